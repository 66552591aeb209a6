"""Which reader of tool calls goes with a model's spelling of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.text.call_reader import CallReader
from ninfer.text.chat import CallStyle
from ninfer.text.tools import ToolParser
from ninfer.text.tools_gemma import GemmaParser


def call_parser(
    style: CallStyle | None, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool = True
) -> CallReader:
    """tools: name -> JSON schema of the parameters.   style None: the template does not say."""
    return (GemmaParser if style is CallStyle.GEMMA else ToolParser)(tools, parallel=parallel)
