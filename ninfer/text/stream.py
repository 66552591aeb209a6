"""Token ids to text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ninfer.text.tokenizer import Tokenizer


class TextStream:
    """The text of one reply. Special tokens are not shown.

    Held back are the bytes of an unfinished character, and the longest end of the text that a stop string could begin
    with; never more.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [s for s in stop if s]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped: str | None = None  # the stop string that was met

    @property
    def held_len(self) -> int:
        """Characters that are known but held back."""
        return len(self._held)

    def feed(self, ids: Sequence[int]) -> tuple[str, bool]:
        """(new text, whether a stop string was met). After that, nothing more comes."""
        if self.stopped is not None:
            return "", True
        shown = b"".join(self._tokenizer.token_bytes(i) for i in ids if not self._tokenizer.is_special(i))
        return self._release(self._decoder.decode(shown))

    def feed_text(self, text: str) -> tuple[str, bool]:
        """The same for text that is known already."""
        return ("", True) if self.stopped is not None else self._release(text)

    def flush(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped is not None:
            return ""
        text, _ = self._release(self._decoder.decode(b"", True))
        held, self._held = self._held, ""
        return text + held if self.stopped is None else text

    def _release(self, new: str) -> tuple[str, bool]:
        text = self._held + new
        found = [(at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda f: (f[0], -len(f[1])))
            self._held = ""
            return text[:at], True
        keep = max((overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def overlap(text: str, stop: str) -> int:
    """The length of the longest proper prefix of `stop` that `text` ends with."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
