"""Which reader of tool calls goes with a model's spelling of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ninfer.text.chat import CallStyle
from ninfer.text.parts import Part
from ninfer.text.tools import ToolParser
from ninfer.text.tools_gemma import GemmaParser


class CallParser(Protocol):
    """Text in pieces to text and calls."""

    def feed(self, text: str) -> list[Part]: ...

    def finish(self, *, complete: bool) -> list[Part]:
        """No more comes. complete: the model ended here by itself."""


def call_parser(
    style: CallStyle | None, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool = True
) -> CallParser:
    """tools: name -> JSON schema of the parameters.   style None: the template does not say."""
    return (GemmaParser if style is CallStyle.GEMMA else ToolParser)(tools, parallel=parallel)
