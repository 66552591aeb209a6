"""Who runs next. Host code alone: it knows slots, pages and lengths, and nothing of devices.

First come, first served: the head of the queue waits for a slot and for pages for its prompt and its whole reply, and
nobody passes it. Once admitted a sequence is never preempted. Prefill chunks and decode rounds alternate, so that a
long prompt delays running streams by a chunk at a time; several prompts share the chunks, the shortest rest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum

from attrs import frozen

from ninfer.errors import UsageError
from ninfer.ir.step import PAGE
from ninfer.runtime.batch import Limits
from ninfer.runtime.kv.cache import PageSource, PlainPages
from ninfer.runtime.kv.pages import Pages, num_pages
from ninfer.runtime.sequence import Phase, Sequence

MAX_SKIP = 4  # prefill steps that a prompt may be passed over by shorter ones


class StepKind(Enum):
    PREFILL = "prefill"
    ROUND = "round"


@frozen
class Part:
    """A sequence's share of a step: its next `count` rows."""

    seq: Sequence
    count: int


@frozen
class Step:
    kind: StepKind
    parts: tuple[Part, ...]


class Scheduler:
    """Owns the queue, the slots and the pages.   chunk: rows of a prefill step at most.

    rounds_per_chunk: decode rounds after a prefill step while both kinds are ready; 0: one per 64 rows of it.
    deterministic: a prefill step has one sequence, and starts at a multiple of 64. source: makes what gives sequences
    their pages.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        num_slots: int,
        chunk: int,
        rounds_per_chunk: int = 0,
        deterministic: bool = False,
        source: Callable[[Pages], PageSource] = PlainPages,
    ) -> None:
        chunk = min(chunk, limits.max_rows)
        if deterministic:
            chunk = chunk // PAGE * PAGE
            if not chunk:
                raise UsageError(f"--deterministic needs steps of at least {PAGE} rows: raise --prefill-chunk")
        self.limits = limits
        self.chunk = chunk
        self.pages = Pages(limits.pages)
        self.source = source(self.pages)
        self.waiting: deque[Sequence] = deque()
        self.slots: list[Sequence | None] = [None] * min(num_slots, limits.slots)
        self._rounds_per_chunk = rounds_per_chunk
        self._deterministic = deterministic
        self._rounds_due = 0
        self._turn = 0

    @property
    def context_len(self) -> int:
        """The longest sequence that fits when it runs alone."""
        return min(self.limits.context_len, PAGE * min(self.limits.max_pages, self.limits.pages))

    @property
    def num_running(self) -> int:
        return sum(seq is not None for seq in self.slots)

    def running(self, phase: Phase) -> list[Sequence]:
        return [seq for seq in self.slots if seq is not None and seq.phase is phase]

    def admit(self) -> Sequence | None:
        """Give the head of the queue a slot and pages, if there are both. It enters PREFILL."""
        if not self.waiting or None not in self.slots:
            return None
        pages = self.source.reserve(self.waiting[0], num_pages(self.waiting[0].num_positions))
        if pages is None:
            return None
        seq = self.waiting.popleft()
        seq.slot = self.slots.index(None)
        seq.pages = pages
        seq.phase = Phase.PREFILL
        self.slots[seq.slot] = seq
        return seq

    def next(self) -> Step | None:
        """The next step; None when no sequence runs."""
        prefills, ready = self.running(Phase.PREFILL), self.running(Phase.DECODE)
        if prefills and not (ready and self._rounds_due):
            step = self._prefill(prefills)
            rows = sum(part.count for part in step.parts)
            self._rounds_due = self._rounds_per_chunk or -(-rows // PAGE)
        elif ready:
            most = min(self.limits.max_seqs, self.limits.max_rows)
            turn = sorted(ready, key=lambda seq: seq.turn)[:most]  # all of them, as a rule
            step = Step(StepKind.ROUND, tuple(Part(seq, 1) for seq in sorted(turn, key=lambda seq: seq.slot)))
            self._rounds_due = max(0, self._rounds_due - 1)
        else:
            return None
        self._turn += 1
        for part in step.parts:
            part.seq.turn = self._turn
        return step

    def _prefill(self, prefills: list[Sequence]) -> Step:
        """One chunk, shared by the prompts with the shortest rest; one passed over too often goes first."""
        order = sorted(
            prefills,
            key=lambda seq: (-seq.skipped, 0) if seq.skipped >= MAX_SKIP else (0, seq.num_remaining),
        )
        parts: list[Part] = []
        budget = self.chunk
        for seq in order[: 1 if self._deterministic else self.limits.max_seqs]:
            count = self._count(seq, budget, self.source.next_stop(seq))
            if not count and not parts:
                count = budget  # steps of less than a page cannot keep to page ends
            if count:
                parts.append(Part(seq, count))
                budget -= count
        for seq in prefills:
            seq.skipped += 1
        for part in parts:
            part.seq.skipped = 0
        return Step(StepKind.PREFILL, tuple(parts))

    @staticmethod
    def _count(seq: Sequence, budget: int, stop: int) -> int:
        """Up to where the prompt's step has to end, or to the last page end within the budget."""
        if stop - seq.kv_len <= budget:
            return stop - seq.kv_len
        return max(0, (seq.kv_len + budget) // PAGE * PAGE - seq.kv_len)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is; its slot and pages are free at once. A second time is a no-op."""
        if seq.phase is Phase.WAITING and seq in self.waiting:
            self.waiting.remove(seq)
        elif seq.slot >= 0:
            self.slots[seq.slot] = None
            seq.pages, seq.slot = [], -1
        self.source.release(seq)
        seq.phase = Phase.DONE

    def check(self) -> None:
        """Raises AssertionError unless every page and slot is accounted for."""
        self.pages.check(self.source.held())
        for slot, seq in enumerate(self.slots):
            if seq is not None:
                assert seq.slot == slot and seq.phase in (Phase.PREFILL, Phase.DECODE), f"slot {slot}: {seq}"
                assert len(seq.pages) * PAGE >= seq.num_positions >= seq.kv_len, f"slot {slot}: {seq}"
        for seq in self.waiting:
            assert seq.phase is Phase.WAITING and seq.slot < 0 and not seq.pages, f"waiting: {seq}"
