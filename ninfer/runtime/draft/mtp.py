"""Drafts by the model's own multi-token-prediction block (models/mtp.py)."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from ninfer.runtime.batch import SeqRows
from ninfer.runtime.draft.drafter import LAST_ROW, Advance, Run, Want


@define
class MtpDrafter:
    """Drafts for the next round at the end of this one, where the target's hidden values are.

    run: the "draft" graph. Rows that became final run again with the target's hidden values, which replaces the keys
    that drafting had left at their positions; the last of them gives the first draft, and every further draft is one
    more row. All slots draft together.
    """

    run: Run
    name: str = "mtp"
    _drafts: dict[int, list[int]] = field(factory=dict)  # by slot

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        self._drafts.pop(slot, None)

    def end(self, slot: int) -> None:
        self._drafts.pop(slot, None)

    def take(self, slot: int, drafts: Sequence[int]) -> None:
        """Drafts that a round made itself (chain.py) in place of `advance`."""
        self._drafts[slot] = list(drafts)

    def advance(self, parts: Sequence[Advance]) -> None:
        rows = [self._row(p.slot, p.kv_len, p.following, p.limit > 0) for p in parts]
        live = [p for p in parts if p.limit]
        for part in parts:
            self._drafts[part.slot] = []
        done = 0
        while rows:
            outputs = self.run(rows)
            for part, token in zip(live, outputs["draft"], strict=True):
                self._drafts[part.slot].append(int(token))
            done += 1
            live = [p for p in live if p.limit > done]
            rows = [
                self._row(p.slot, p.kv_len + len(p.following) + done - 1, (self._drafts[p.slot][-1],), True)
                for p in live
            ]

    @staticmethod
    def _row(slot: int, kv_len: int, tokens: tuple[int, ...], drafts: bool) -> SeqRows:
        draw = LAST_ROW if drafts else None
        return SeqRows(slot=slot, kv_len=kv_len, tokens=tokens, generated=True, draw=draw)

    def propose(self, wants: Sequence[Want]) -> list[tuple[int, ...]]:
        return [tuple(self._drafts.get(w.slot, ())[: w.limit]) for w in wants]
