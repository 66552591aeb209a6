"""What readers of tool calls share: a machine over a reply's text, whatever the spelling."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from ninfer.text.parts import Part

MAX_TAG = 256  # characters; a longer one is no tag


def call_id() -> str:
    return "call_" + secrets.token_hex(12)


class CallReader(ABC):
    """Text in pieces to text and calls.

    tools: name -> JSON schema of the parameters; what names none of them is text. parallel False: nothing after the
    first call counts. A state takes what it can from the buffer and appends parts; False: it needs to see more.
    """

    def __init__(
        self, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool = True, new_id: Callable[[], str] = call_id
    ) -> None:
        self._tools = tools
        self._parallel = parallel
        self._new_id = new_id
        self._state: Callable[[list[Part]], bool] = self._text
        self._buf = ""
        self._index = -1  # of the call

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._buf += text
        self._run(parts)
        return parts

    @abstractmethod
    def finish(self, *, complete: bool) -> list[Part]:
        """No more comes. complete: the model ended here; what it left open is closed. Otherwise it stays open."""

    @abstractmethod
    def _text(self, parts: list[Part]) -> bool:
        """The state between calls."""

    def _run(self, parts: list[Part]) -> None:
        while self._buf and self._state(parts):
            pass

    def _end_call(self) -> None:
        self._state = self._text if self._parallel else self._drop

    def _drop(self, parts: list[Part]) -> bool:
        self._buf = ""
        return False
