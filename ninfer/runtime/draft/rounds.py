"""A round of drafts: proposed, verified by the target in one pass, kept as far as the target agrees.

The order is propose, verify, accept, fold, advance. Verification draws after every row, keyed by the position that the
draw fills, as a step without drafts would; it writes keys and values in place, where those of rejected rows are out of
reach, and leaves recurrent states and token counts alone. Folding moves these over the kept rows, from what
verification noted in its rings. Where all drafts of a round are MTP's or DFlash's, all of that is one plan (chain.py),
with the proposal for the next round at its end; otherwise the host accepts, and runs a graph at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from attrs import define, evolve, field

from ninfer.ir.step import PROPOSAL_COPY, PROPOSAL_DRAWN
from ninfer.runtime.batch import Drawn, SeqRows
from ninfer.runtime.draft.chain import Chain
from ninfer.runtime.draft.dflash import DFlashDrafter
from ninfer.runtime.draft.drafter import Advance, Drafter, Run, Want
from ninfer.runtime.draft.mtp import MtpDrafter
from ninfer.runtime.draft.ngram import NgramDrafter
from ninfer.runtime.draft.width import AdaptiveWidth, Survival
from ninfer.runtime.request import DraftStats, GenerateRequest
from ninfer.runtime.sequence import Sequence as Seq
from ninfer.runtime.sequence import draws_of
from ninfer.runtime.steps import read_draws


def num_agreed(drafts: Sequence[int], drawn: Sequence[Drawn]) -> int:
    """Drafts that equal the target's own draws, up to the first that does not."""
    n = 0
    while n < len(drafts) and drawn[n].token == drafts[n]:
        n += 1
    return n


def before_stop(drafts: Iterable[int], stop_ids: frozenset[int]) -> tuple[int, ...]:
    """Drafts up to an end token: the target draws that one by itself, and nothing comes after it."""
    kept: list[int] = []
    for token in drafts:
        if token in stop_ids:
            break
        kept.append(token)
    return tuple(kept)


@define
class Speculation:
    """What the engine asks about drafts; on its thread only.

    run_verify, run_fold: the "verify" and "fold" graphs; without a fold, verifying moves all there is to move.
    num_drafts: of `drafter` in a round; num_copied: of `copier`, whose drafts go before the drafter's. width: chooses
    how many of num_drafts a round has; None: all. rejects: verification weighs a draft's probability against the one
    that it was drawn with, so no draft may be left out for what it is. chain: whole rounds in one plan.
    """

    run_verify: Run
    run_fold: Run | None
    drafter: Drafter | None
    copier: NgramDrafter | None
    num_drafts: int
    num_copied: int
    width: AdaptiveWidth | None = None
    rejects: bool = False
    chain: Chain | None = None
    _chained: bool = field(init=False, default=False)  # the round under way made its drafts itself
    _survival: dict[int, Survival] = field(init=False, factory=dict)  # by slot
    _timed: tuple[int, int] | None = field(init=False, default=None)  # sequences and drafts of the round under way
    _at: list[int] = field(init=False)  # accepted drafts by their place in the round
    _count: Counter[str] = field(init=False, factory=Counter)  # fields of DraftStats

    def __attrs_post_init__(self) -> None:
        self._at = [0] * max(self.num_drafts, self.num_copied)

    @property
    def most_rows(self) -> int:
        """Of a sequence in a round."""
        return 1 + len(self._at)

    @property
    def _drafters(self) -> list[Drafter]:
        return [d for d in (self.copier, self.drafter) if d is not None]

    def admit(self, seq: Seq) -> None:
        seq.drafting = seq.max_tokens > 2 and not (self.rejects and _has_penalties(seq.request))
        if seq.drafting:
            for drafter in self._drafters:
                drafter.begin(seq.slot, seq.request.prompt_ids)
            self._survival[seq.slot] = Survival()

    def free(self, slot: int) -> None:
        self._survival.pop(slot, None)
        for drafter in self._drafters:
            drafter.end(slot)

    def propose(self, seqs: Sequence[Seq]) -> None:
        """Set the drafts of each, possibly none: a copy where there is a long one, else the drafter's."""
        seqs = [seq for seq in seqs if seq.drafting]
        for seq in seqs:
            seq.drafts, seq.copied = (), False
        if self.copier is not None:
            for seq, drafts in zip(seqs, self.copier.propose(self._wants(seqs, self.num_copied)), strict=True):
                seq.drafts, seq.copied = self._cut(drafts, seq), bool(drafts)
        rest = [seq for seq in seqs if not seq.drafts]
        if self.drafter is not None and rest:
            for seq, drafts in zip(rest, self.drafter.propose(self._wants(rest, self.num_drafts)), strict=True):
                seq.drafts, seq.copied = self._cut(drafts, seq), False
        uniform = seqs and not any(seq.copied for seq in seqs)
        self._timed = (len(seqs), max(len(seq.drafts) for seq in seqs)) if uniform else None

    def _cut(self, drafts: tuple[int, ...], seq: Seq) -> tuple[int, ...]:
        kept = before_stop(drafts, seq.request.stop_ids)
        return drafts[: len(kept) + 1] if self.rejects else kept

    def proposal(self, seq: Seq) -> int:
        """How its drafts came about, for their verification."""
        if not self.rejects or not seq.drafts:
            return 0
        return PROPOSAL_COPY if seq.copied else PROPOSAL_DRAWN

    def _wants(self, seqs: Sequence[Seq], most: int) -> list[Want]:
        return [
            Want(
                slot=s.slot,
                kv_len=s.kv_len,
                last=s.last,
                limit=_limit(s, most),
                temperature=draws_of(s, (), False)[0].sampling.temperature,
                seed=s.seed,
            )
            for s in seqs
        ]

    def is_round(self, seqs: Sequence[Seq], rows: Sequence[SeqRows]) -> bool:
        """Whether a step verifies drafts or makes some on its way; else it is a plain one. Once for each step."""
        self._chained = (
            self.chain is not None
            and all(row.generated for row in rows)
            and any(seq.drafting for seq in seqs)
            and not any(seq.drafts and seq.copied for seq in seqs)
        )
        return self._chained or any(row.num_draws > 1 for row in rows)

    def verify(self, seqs: Sequence[Seq], rows: Sequence[SeqRows]) -> list[tuple[Drawn, ...]]:
        """The draws of each sequence, as far as its drafts agree: the last one is the target's alone."""
        if self._chained:
            return self._run_chain(seqs, rows)
        drawn = read_draws(rows, self.run_verify(rows))
        return [found[: 1 + num_agreed(row.tokens[1:], found)] for row, found in zip(rows, drawn, strict=True)]

    def _run_chain(self, seqs: Sequence[Seq], rows: Sequence[SeqRows]) -> list[tuple[Drawn, ...]]:
        assert self.chain is not None and isinstance(self.drafter, MtpDrafter | DFlashDrafter)
        most = self._next_width(seqs)
        roomy = [
            evolve(row, room=seq.max_tokens - seq.num_generated - 2, most_drafts=most) if seq.drafting else row
            for seq, row in zip(seqs, rows, strict=True)
        ]
        result = self.chain(roomy)
        for seq, drafts in zip(seqs, result.drafts, strict=True):
            if seq.drafting:
                self.drafter.take(seq.slot, drafts)
        return result.drawn

    def fold(self, rows: Sequence[SeqRows], kept: Sequence[int]) -> None:
        """Move what verification left in place over the first kept[i] rows of rows[i]."""
        if self._chained:
            return
        moved = [evolve(row, tokens=row.tokens[:n], draw=None) for row, n in zip(rows, kept, strict=True) if n]
        if self.run_fold is not None and moved:
            self.run_fold(moved)

    def advance(self, seqs: Sequence[Seq], kv_lens: Sequence[int], following: Sequence[tuple[int, ...]]) -> None:
        """What became final of each, from kv_len on, with the token after every row; after a step of any kind."""
        most = 0 if self._chained else self._next_width(seqs)
        parts = [
            Advance(slot=seq.slot, kv_len=kv_len, following=ids, limit=_limit(seq, most))
            for seq, kv_len, ids in zip(seqs, kv_lens, following, strict=True)
            if seq.drafting and ids
        ]
        for drafter in self._drafters if parts else ():
            if drafter is self.copier or not self._chained:
                drafter.advance(parts)

    def _next_width(self, seqs: Sequence[Seq]) -> int:
        """Drafts of the next round. Chosen once for each round of the drafter's own drafts."""
        if self.width is None:
            return self.num_drafts
        if self._timed is None:  # a copy, or no round at all
            return self.width.width
        return self.width.choose([self._survival[seq.slot] for seq in seqs if seq.drafting and seq.last >= 0])

    def took(self, seconds: float) -> None:
        """The round that was proposed last, from its proposal to the drafts for the next one."""
        if self.width is not None and self._timed is not None:
            self.width.observe(*self._timed, seconds)
        self._timed = None

    def note(self, seq: Seq, num_drafts: int, num_accepted: int) -> None:
        """A sequence's part of a round."""
        self._count["num_rounds"] += 1
        self._count["num_plain_rounds"] += not num_drafts
        self._count["num_drafted"] += num_drafts
        self._count["num_accepted"] += num_accepted
        if seq.drafting and not seq.copied:
            self._survival[seq.slot].note(num_drafts, num_accepted)
        if seq.copied:
            self._count["num_copied"] += num_drafts
            self._count["num_copies_accepted"] += num_accepted
        for i in range(num_accepted):
            self._at[i] += 1
        seq.num_drafted += num_drafts
        seq.num_accepted += num_accepted

    def stats(self) -> DraftStats:
        return DraftStats(accepted_at=tuple(self._at), **self._count)


def _has_penalties(request: GenerateRequest) -> bool:
    """Rejection reads the counts of a slot, which know the tokens before the round only."""
    switch = request.switch
    return request.sampling.has_penalties or (switch is not None and switch.sampling.has_penalties)


def _limit(seq: Seq, most: int) -> int:
    """Drafts that a round may keep and still have a token of its own to draw; 0 inside the prompt."""
    if seq.last < 0:
        return 0
    return max(0, min(most, seq.max_tokens - seq.num_generated - 1))
