"""Gemma 4's tool calls out of a reply's text as it streams, however it is cut.

    <|tool_call>call:NAME{key:VALUE,key:VALUE}<tool_call|>

A value is <|"|>text<|"|>, which has no escapes, true, false, null, a number, [..] or {..}. What does not name a
declared tool stays text. Nothing here raises: a call that is spelled wrong still becomes JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ninfer.text.call_reader import MAX_TAG, CallReader, call_id
from ninfer.text.parts import CallArguments, CallBegin, CallEnd, Part, Text
from ninfer.text.stream import overlap

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'

_HEAD = re.compile(re.escape(OPEN) + r"\s*call:\s*([\w.:-]+)\s*\{")
_HALF_HEAD = re.compile(re.escape(OPEN) + r"\s*(?:c|ca|cal|call|call:\s*[\w.:-]*\s*)?")
_KEY_END = re.compile(r"[:,}]|" + re.escape(CLOSE))
_BARE_END = re.compile(r"[,}\]]|" + re.escape(CLOSE))
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class GemmaParser(CallReader):
    """Of tools, only the names count."""

    def __init__(
        self, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool = True, new_id: Callable[[], str] = call_id
    ) -> None:
        super().__init__(tools, parallel=parallel, new_id=new_id)
        self._arguments = _Arguments()

    def finish(self, *, complete: bool) -> list[Part]:
        parts: list[Part] = []
        while self._state == self._head:  # half a head is text, and there may be another behind it
            self._refuse(parts)
            self._run(parts)
        if self._state == self._text and self._buf:
            parts.append(Text(self._buf))
        elif self._state == self._in_call and complete:
            parts += [CallArguments(self._index, self._arguments.finish(self._buf)), CallEnd(self._index)]
        self._buf = ""
        return parts

    # States

    def _text(self, parts: list[Part]) -> bool:
        at = self._buf.find(OPEN)
        if at >= 0:
            self._state = self._head
        else:
            at = len(self._buf) - overlap(self._buf, OPEN)
        begin = len(self._buf[:at].rstrip())  # blanks before a call belong to it
        if begin:
            parts.append(Text(self._buf[:begin]))
        self._buf = self._buf[begin:]
        return self._state == self._head

    def _head(self, parts: list[Part]) -> bool:
        rest = self._buf.lstrip()
        if found := _HEAD.match(rest):
            if found[1] not in self._tools:
                return self._refuse(parts)
            self._index += 1
            self._arguments = _Arguments()
            self._buf, self._state = rest[found.end() :], self._in_call
            parts += [CallBegin(self._index, self._new_id(), found[1]), CallArguments(self._index, "{")]
            return True
        if len(rest) < MAX_TAG and _HALF_HEAD.fullmatch(rest):
            return False
        return self._refuse(parts)

    def _refuse(self, parts: list[Part]) -> bool:
        """It only looked like a call: the tag is text."""
        end = self._buf.index(OPEN) + len(OPEN)
        parts.append(Text(self._buf[:end]))
        self._buf, self._state = self._buf[end:], self._text
        return True

    def _in_call(self, parts: list[Part]) -> bool:
        piece, used = self._arguments.feed(self._buf)
        self._buf = self._buf[used:]
        if piece:
            parts.append(CallArguments(self._index, piece))
        if not self._arguments.done:
            return False
        parts.append(CallEnd(self._index))
        self._state = self._after
        return True

    def _after(self, parts: list[Part]) -> bool:
        rest = self._buf.lstrip("}] \t\r\n")
        if rest.startswith(CLOSE):
            self._buf = rest[len(CLOSE) :]
        elif CLOSE.startswith(rest):
            return False
        self._end_call()
        return True


class _Arguments:
    """The notation of an object to JSON text, piece by piece, from behind the opening brace on."""

    def __init__(self) -> None:
        self._closers = ["}"]  # of what is open, the outermost first
        self._counts = [0]  # members so far
        self._step: Callable[[str], tuple[str, int]] = self._member
        self._is_key = False  # of the text under way
        self.done = False

    def feed(self, text: str) -> tuple[str, int]:
        """(JSON, how many characters that took)."""
        out, at = "", 0
        while at < len(text) and not self.done:
            before = self._step
            piece, used = self._step(text[at:])
            out += piece
            at += used
            if not used and self._step == before:
                break  # it needs to see more
        return out, at

    def finish(self, rest: str) -> str:
        """The end of the JSON, where no more than `rest` comes."""
        if self._step == self._in_text:
            return _quoted(rest)[1:-1] + '"' + (": null" if self._is_key else "") + self._close()
        if self._step in (self._colon, self._value):
            lead = ": " if self._step == self._colon else ""
            return lead + (self._lead() + _literal(rest) if rest.strip() else self._nothing()) + self._close()
        return self._close()

    # Steps: text to (JSON, characters used). Nothing used and no other step: more must be seen.

    def _member(self, text: str) -> tuple[str, int]:
        """Before a key, or the object's end."""
        c = text[0]
        if c.isspace() or c == ",":
            return "", 1
        if c in "}]":
            return self._pop(), 1
        if c == "<" and (found := self._mark(text, key=True)) is not None:
            return found
        if c == '"':
            if (string := _JSON_STRING.match(text)) is None:
                return "", 0
            self._step = self._colon
            return self._separator() + _json_string(string[0]), string.end()
        if (end := _KEY_END.search(text)) is None:
            return "", 0
        self._step = self._value
        key = _quoted(text[: end.start()].strip())
        return f"{self._separator()}{key}: ", end.end() if end[0] == ":" else end.start()

    def _colon(self, text: str) -> tuple[str, int]:
        if text[0].isspace():
            return "", 1
        self._step = self._value
        return ": ", int(text[0] == ":")

    def _value(self, text: str) -> tuple[str, int]:
        """Before a value: of a key, or of an array, which may end instead."""
        c = text[0]
        if c.isspace() or (c == "," and self._closers[-1] == "]"):
            return "", 1
        if c in ",}]":
            nothing, self._step = self._nothing(), self._next
            return nothing, 0
        if c == "<" and (found := self._mark(text, key=False)) is not None:
            return found
        if c in "{[":
            lead = self._lead()
            self._closers.append("}" if c == "{" else "]")
            self._counts.append(0)
            self._step = self._member if c == "{" else self._value
            return lead + c, 1
        if c == '"':
            if (string := _JSON_STRING.match(text)) is None:
                return "", 0
            self._step = self._next
            return self._lead() + _json_string(string[0]), string.end()
        if (end := _BARE_END.search(text)) is None:
            return "", 0
        self._step = self._next
        return self._lead() + _literal(text[: end.start()]), end.start()

    def _next(self, text: str) -> tuple[str, int]:
        """Behind a value."""
        c = text[0]
        if c in "}]":
            return self._pop(), 1
        if c == "<" and CLOSE.startswith(text[: len(CLOSE)]):
            return (self._close(), len(CLOSE)) if len(text) >= len(CLOSE) else ("", 0)
        self._step = self._member if self._closers[-1] == "}" else self._value
        return "", int(c == ",")

    def _in_text(self, text: str) -> tuple[str, int]:
        end = text.find(QUOTE)
        if end < 0:
            end = len(text) - overlap(text, QUOTE)
            return _quoted(text[:end])[1:-1], end
        self._step = self._colon if self._is_key else self._next
        return _quoted(text[:end])[1:-1] + '"', end + len(QUOTE)

    # What they share

    def _mark(self, text: str, *, key: bool) -> tuple[str, int] | None:
        """What a bracket begins: a text, or the end of the call. None: neither."""
        if text.startswith(QUOTE):
            self._step, self._is_key = self._in_text, key
            return (self._separator() if key else self._lead()) + '"', len(QUOTE)
        if text.startswith(CLOSE):
            return ("" if key else self._nothing()) + self._close(), len(CLOSE)
        return ("", 0) if QUOTE.startswith(text) or CLOSE.startswith(text) else None

    def _separator(self) -> str:
        """Before a member."""
        self._counts[-1] += 1
        return ", " if self._counts[-1] > 1 else ""

    def _lead(self) -> str:
        """Before a value: in an array it is a member."""
        return self._separator() if self._closers[-1] == "]" else ""

    def _nothing(self) -> str:
        """A value that is missing."""
        return "null" if self._closers[-1] == "}" else ""

    def _pop(self) -> str:
        self._counts.pop()
        self.done = len(self._closers) == 1
        self._step = self._next
        return self._closers.pop()

    def _close(self) -> str:
        """The end of all that is open."""
        self.done = True
        return "".join(reversed(self._closers))


def _literal(text: str) -> str:
    """A word without quotes: JSON if it is, else text."""
    text = text.strip()
    return text if _LITERAL.fullmatch(text) else _quoted(text)


def _json_string(text: str) -> str:
    """A text in JSON's quotes instead."""
    try:
        return _quoted(json.loads(text, strict=False))
    except ValueError:
        return _quoted(text[1:-1])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
