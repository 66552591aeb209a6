"""Drafts by a model of its own that fills a block of positions at once (models/dflash.py)."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from ninfer.runtime.batch import Draw, SeqRows
from ninfer.runtime.draft.drafter import Advance, Run, Want
from ninfer.runtime.request import Sampling


@define
class DFlashDrafter:
    """run_context: makes keys of what the target's layers said at final rows; run_block: proposals behind them.

    Proposals are made at the start of the round that verifies them, or for it at the end of one in a plan (chain.py).
    """

    run_context: Run
    run_block: Run
    mask_id: int
    name: str = "dflash"
    _taken: dict[int, tuple[int, ...]] = field(factory=dict)  # by slot

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        self._taken.pop(slot, None)

    def end(self, slot: int) -> None:
        self._taken.pop(slot, None)

    def take(self, slot: int, drafts: Sequence[int]) -> None:
        """Drafts that a round made itself; its context is made then, too."""
        self._taken[slot] = tuple(drafts)

    def advance(self, parts: Sequence[Advance]) -> None:
        for part in parts:
            self._taken.pop(part.slot, None)
        self.run_context(
            [SeqRows(slot=p.slot, kv_len=p.kv_len, tokens=p.following, generated=True, draw=None) for p in parts]
        )

    def propose(self, wants: Sequence[Want]) -> list[tuple[int, ...]]:
        found = {w.slot: self._taken[w.slot][: w.limit] for w in wants if w.slot in self._taken}
        live = [w for w in wants if w.limit and w.slot not in found]
        if not live:
            return [found.get(w.slot, ()) for w in wants]
        rows = [
            SeqRows(
                slot=w.slot,
                kv_len=w.kv_len,
                tokens=(w.last, *[self.mask_id] * w.limit),
                generated=True,
                draw=Draw(sampling=Sampling(temperature=w.temperature), seed=w.seed),
                num_draws=w.limit,
            )
            for w in live
        ]
        drafts = self.run_block(rows)["draft"].tolist()
        for w in live:
            found[w.slot], drafts = tuple(drafts[: w.limit]), drafts[w.limit :]
        return [found.get(w.slot, ()) for w in wants]
