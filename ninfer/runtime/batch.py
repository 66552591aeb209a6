"""What the engine asks a model to do in one step, and what comes back. The engine's only view of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import frozen
from numpy.typing import NDArray

from ninfer.runtime.request import Sampling


@frozen(kw_only=True)
class Limits:
    """Sizes fixed at start. max_rows: token rows of one step; pages: in the pool, of 64 tokens each."""

    max_rows: int
    max_seqs: int
    slots: int
    pages: int
    max_pages: int  # of one sequence
    context_len: int
    domain: int  # token ids are below this


@frozen(kw_only=True)
class Draw:
    """How the token after a row is drawn. seed: resolved (never None). masked: the slot's grammar masks apply, row i
    of them to the i-th draw of the step. counted: token counts are kept for later draws, which have penalties."""

    sampling: Sampling
    seed: int
    logprobs: int | None = None
    masked: bool = False
    counted: bool = False


@frozen(kw_only=True)
class SeqRows:
    """A sequence's part of a step: `tokens` extend the kv_len tokens that the slot's cache holds.

    generated: these tokens were sampled (they count for penalties as such), else they are prompt.
    draw None: a prefill chunk that is not the last: no logits. num_draws: of the last rows, each is drawn after; more
    than one in rounds of drafts, whose rows are the token drawn last and the drafts. proposal: how
    the drafts came about, as in ir/step.py. later: from which of the draws on another one holds, and that one. room,
    most_drafts: of a round that drafts for the next one: drafts that may follow if none of this round's is kept, and
    drafts that are wanted at most.
    """

    slot: int
    kv_len: int
    tokens: tuple[int, ...]
    generated: bool
    draw: Draw | None
    num_draws: int = 1
    proposal: int = 0
    later: tuple[int, Draw] | None = None
    room: int = 0
    most_drafts: int = 0

    def draw_at(self, index: int) -> Draw:
        """Of the draws, which there must be."""
        assert self.draw is not None
        return self.later[1] if self.later is not None and index >= self.later[0] else self.draw


@frozen
class Drawn:
    """A drawn token; -1 when its logits were not finite."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class ModelRunner(Protocol):
    """A loaded model on a device. Used by one thread."""

    @property
    def limits(self) -> Limits: ...

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """The slot's page table entries from index `first` on."""

    def set_bias(self, slot: int, bias: Mapping[int, float]) -> None:
        """Replace the slot's logit bias (empty: none)."""

    def set_mask(self, slot: int, words: NDArray[Any], row: int = 0) -> None:
        """A grammar mask of the slot: int32 [ceil(V/32)], bit t & 31 of word t >> 5. row: of the draw in the step."""

    def step(self, seqs: Sequence[SeqRows]) -> Sequence[Drawn | None]:
        """Run one step; one result per sequence, None where nothing was drawn."""

    def close(self) -> None: ...
