"""A request's way through the engine: WAITING -> PREFILL -> DECODE -> DONE."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from enum import Enum

from attrs import define, evolve, field, frozen

from ninfer.errors import NinferError
from ninfer.runtime.batch import Draw
from ninfer.runtime.request import Delta, GenerateRequest, Timings

SEED_MASK = (1 << 64) - 1

Sink = Callable[[Seq[Delta]], None]
"""Takes what a step gave the requests that share this sink. Called on the engine's thread; must not block."""


@frozen(kw_only=True)
class Failed(Delta):
    """The last delta of a request that ninfer itself gave up. A client raises `exception` if nothing came before."""

    exception: NinferError


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@define(eq=False, kw_only=True)
class Sequence:
    """kv_len: tokens that the slot's cache holds. last: drawn, and not yet in the cache.

    max_tokens is clamped to the window. Slot and pages are set from admission until it is done.
    """

    request: GenerateRequest
    sink: Sink
    seed: int
    max_tokens: int
    arrived_s: float
    phase: Phase = Phase.WAITING
    slot: int = -1
    pages: list[int] = field(factory=list)
    kv_len: int = 0
    last: int = -1
    num_generated: int = 0
    generated: list[int] = field(factory=list)  # tokens of the reply
    switched: bool = False  # the request's switch is behind it
    num_cached: int = 0
    drafting: bool = False
    drafts: tuple[int, ...] = ()  # for the next round
    copied: bool = False  # the drafts are a copy of earlier text
    num_drafted: int = 0
    num_accepted: int = 0
    skipped: int = 0  # prefill steps since it had one
    turn: int = 0  # the step it was in last
    admitted_s: float | None = None
    prefilled_s: float | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_positions(self) -> int:
        """Cache positions it may come to need. The token drawn last is never cached."""
        return self.prompt_len + max(0, self.max_tokens - 1)

    @property
    def num_remaining(self) -> int:
        """Prompt tokens not yet in the cache."""
        return max(0, self.prompt_len - self.kv_len)

    def timings(self, now: float) -> Timings:
        admitted = now if self.admitted_s is None else self.admitted_s
        prefilled = now if self.prefilled_s is None else self.prefilled_s
        return Timings(
            num_prompt_tokens=self.prompt_len,
            num_cached_tokens=self.num_cached,
            num_generated_tokens=self.num_generated,
            queue_s=admitted - self.arrived_s,
            prefill_s=prefilled - admitted,
            decode_s=now - prefilled,
            num_drafted_tokens=self.num_drafted,
            num_accepted_tokens=self.num_accepted,
            slot=self.slot if self.slot >= 0 else None,
        )


def draws_of(seq: Sequence, drafts: tuple[int, ...], masked: bool) -> tuple[Draw, tuple[int, Draw] | None]:
    """How the tokens after a sequence's last row and its drafts are drawn, as SeqRows has it."""
    request, switch = seq.request, seq.request.switch
    draw = Draw(sampling=request.sampling, seed=seq.seed, logprobs=request.logprobs, masked=masked)
    if switch is None:
        return draw, None
    seed = seq.seed if switch.sampling.seed is None else switch.sampling.seed & SEED_MASK
    other = evolve(draw, sampling=switch.sampling, seed=seed)
    if seq.switched:
        return other, None
    draw = evolve(draw, counted=switch.sampling.has_penalties)
    return draw, (drafts.index(switch.after) + 1, other) if switch.after in drafts else None
