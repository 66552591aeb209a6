"""What a drafter is: it hears of every token that becomes final, and says which ones may come next.

A draft never changes a text: it is kept only while it equals the token that the target itself draws at that position,
and draws are keyed by position. So drafters may be wrong, stale or silent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from attrs import frozen
from numpy.typing import NDArray

from ninfer.runtime.batch import Draw, SeqRows
from ninfer.runtime.request import Sampling

Run: TypeAlias = Callable[[Sequence[SeqRows]], Mapping[str, NDArray[Any]]]
"""Runs a graph over a batch. Outputs by name, a row per logit row of the batch, valid until the next call."""

LAST_ROW = Draw(sampling=Sampling(temperature=0), seed=0)  # makes a drafter's last row a logit row


@frozen(kw_only=True)
class Advance:
    """What a step has made final: the target has the rows of positions kv_len, kv_len + 1, ... of the slot, and
    following[i] is the token after row i.   limit: drafts wanted after the last of them; 0: none."""

    slot: int
    kv_len: int
    following: tuple[int, ...]
    limit: int


@frozen(kw_only=True)
class Want:
    """Drafts for the next round of a slot.   kv_len: rows the target has; last: the token after them. temperature,
    seed: of the request, for drafters that draw."""

    slot: int
    kv_len: int
    last: int
    limit: int
    temperature: float = 0.0
    seed: int = 0


class Drafter(Protocol):
    """Calls come in the order begin, advance (for every step of the prompt), then propose and advance by turns, end.

    Not every step is followed by a proposal, and what is proposed may be cut short.
    """

    name: str

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        """A sequence takes the slot."""

    def advance(self, parts: Sequence[Advance]) -> None: ...

    def propose(self, wants: Sequence[Want]) -> list[tuple[int, ...]]:
        """At most `limit` tokens each that may follow `last`."""

    def end(self, slot: int) -> None:
        """The slot is free. A second time is a no-op."""
