"""Where the reasoning of a reply ends and its answer begins."""

from __future__ import annotations

from ninfer.text.chat import THINK_TAGS, ThinkTags
from ninfer.text.parts import Part, Reasoning, Text
from ninfer.text.stream import overlap


class ReasoningSplit:
    """Takes text, gives reasoning and text. The line breaks around the tags belong to neither.

    open: the reply begins inside the tags; otherwise it may open the block itself, at its very start.
    by_token: the tags are single tokens and `close` tells of the end, so the end tag spelled out is only a quotation.
    """

    def __init__(self, *, open: bool, by_token: bool, tags: ThinkTags = THINK_TAGS) -> None:
        self.open = open
        self._begin, self._end = tags.begin, tags.close
        self._by_token = by_token
        self._start = not open  # nothing but blanks so far, so the tag may still come
        self._strip = open  # line breaks that begin a channel are dropped
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if self._start:
            self._held += text
            seen = self._held.lstrip()
            if self._begin.startswith(seen):
                if seen != self._begin:
                    return parts
                self._start, self._held, text = False, "", ""
            elif seen.startswith(self._begin):
                text = seen[len(self._begin) :]
                self._start, self._held = False, ""
            else:
                text, self._held, self._start = self._held, "", False
                return [Text(text)] if text else parts
            self.open = self._strip = True
        if self.open:
            self._reason(text, parts)
        elif text := self._stripped(text):
            parts.append(Text(text))
        return parts

    def close(self) -> list[Part]:
        """The end tag has come."""
        held = self._held.rstrip("\n")
        self._held, self.open, self._start, self._strip = "", False, False, True
        return [Reasoning(held)] if held else []

    def flush(self) -> list[Part]:
        """No more comes. Reasoning that was cut short stays reasoning."""
        held, self._held = self._held, ""
        if not held or (self.open and not held.strip("\n")):
            return []
        return [Reasoning(held) if self.open else Text(held)]

    def _reason(self, text: str, parts: list[Part]) -> None:
        text = self._stripped(self._held + text)
        self._held = ""
        at = -1 if self._by_token else text.find(self._end)
        if at >= 0:
            if before := text[:at].rstrip("\n"):
                parts.append(Reasoning(before))
            self.close()
            if after := self._stripped(text[at + len(self._end) :]):
                parts.append(Text(after))
            return
        keep = 0 if self._by_token else overlap(text, self._end)
        body = text[: len(text) - keep].rstrip("\n")
        self._held = text[len(body) :]
        if body:
            parts.append(Reasoning(body))

    def _stripped(self, text: str) -> str:
        if self._strip:
            text = text.lstrip("\n")
            self._strip = not text
        return text
