"""What a reply is made of, in the order it comes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from attrs import frozen


@frozen
class Text:
    text: str


@frozen
class Reasoning:
    text: str


@frozen
class CallBegin:
    """A tool call whose name is known. index counts the reply's calls from 0."""

    index: int
    id: str
    name: str


@frozen
class CallArguments:
    """More of a call's arguments: a piece of JSON text, as written."""

    index: int
    json: str


@frozen
class CallEnd:
    """The arguments are whole. A reply that is cut short may end without."""

    index: int


Part: TypeAlias = Text | Reasoning | CallBegin | CallArguments | CallEnd


def joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of one kind as one."""
    out: list[Part] = []
    for part in parts:
        match out[-1] if out else None, part:
            case Text(a), Text(b):
                out[-1] = Text(a + b)
            case Reasoning(a), Reasoning(b):
                out[-1] = Reasoning(a + b)
            case CallArguments(i, a), CallArguments(j, b) if i == j:
                out[-1] = CallArguments(i, a + b)
            case _:
                out.append(part)
    return out
