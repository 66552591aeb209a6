"""A reply in pieces through a reader of tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from typing import Any

from ninfer.text.call_reader import CallReader
from ninfer.text.parts import CallArguments, CallBegin, Part, joined


def read(
    reader: type[CallReader],
    tools: dict[str, dict[str, Any]],
    text: str,
    cuts: Sequence[int] = (),
    *,
    complete: bool = True,
    **kwargs: Any,
) -> list[Part]:
    """All parts, neighbours joined. Calls are id0, id1, ..."""
    numbers = count()
    parser = reader(tools, new_id=lambda: f"id{next(numbers)}", **kwargs)
    parts: list[Part] = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += parser.feed(text[begin:end])
    return joined(parts + parser.finish(complete=complete))


def calls(parts: list[Part]) -> list[tuple[str, Any]]:
    """(name, arguments) of each."""
    names = [p.name for p in parts if isinstance(p, CallBegin)]
    arguments = [json.loads(p.json) for p in parts if isinstance(p, CallArguments)]
    return list(zip(names, arguments, strict=True))
