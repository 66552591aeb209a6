"""Drafts copied from what was read or written before: where the last tokens occurred already, what followed then.

Windows of 16, 8 and 4 tokens are indexed by a hash of their ids; a hit is compared token by token and extended
backwards. Windows do not cross special tokens, and a copy ends at one: turns of a conversation do not run together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ninfer.runtime.draft.drafter import Advance, Want

WIDTHS = (16, 8, 4)
MAX_MATCH = 64  # tokens that a match is extended to
ENTRIES = 4  # occurrences of a window that are looked at, the newest first
SPARE = 2  # of what followed, tokens that are left to the target where the source ends
_START, _PRIME, _WORD = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1  # FNV-1a


def _hash(ids: Sequence[int]) -> int:
    h = _START ^ len(ids)
    for i in ids:
        h = (h ^ i) * _PRIME & _WORD
    return h


@frozen(eq=False)
class _Written:
    """Hashes of all windows of one width in a text that does not grow: sorted, with where they end."""

    hashes: NDArray[np.uint64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, ids: NDArray[np.int64], special: NDArray[np.bool_], width: int) -> _Written:
        count = len(ids) - width + 1
        if count <= 0:
            return cls(np.zeros(0, np.uint64), np.zeros(0, np.int64))
        h = np.full(count, _START ^ width, np.uint64)
        for i in range(width):
            h = (h ^ ids[i : i + count].astype(np.uint64)) * np.uint64(_PRIME)
        seen = np.concatenate([[0], np.cumsum(special)])
        ends = np.flatnonzero(seen[width:] == seen[:count]) + width
        h = h[ends - width]
        order = np.argsort(h, kind="stable")
        return cls(h[order], ends[order])

    def find(self, key: int) -> Iterator[int]:
        """Ends of windows of this hash, the newest first."""
        last = int(np.searchsorted(self.hashes, np.uint64(key), side="right"))
        for i in range(last - 1, max(-1, last - 1 - ENTRIES), -1):
            if int(self.hashes[i]) != key:
                return
            yield int(self.ends[i])


@define
class _Index:
    """The tokens of one sequence: the prompt, indexed at once, and its reply, indexed as it grows."""

    special: Collection[int]
    ids: list[int]
    _written: dict[int, _Written] = field(init=False)
    _growing: dict[int, list[int]] = field(factory=dict)  # hash -> ends
    _since: int = field(init=False)  # where the run without special tokens begins

    def __attrs_post_init__(self) -> None:
        ids = np.array(self.ids, np.int64)
        special = np.isin(ids, np.fromiter(self.special, np.int64, len(self.special)))
        self._written = {w: _Written.of(ids, special, w) for w in WIDTHS}
        self._since = int(np.flatnonzero(special)[-1]) + 1 if special.any() else 0

    def append(self, token: int) -> None:
        self.ids.append(token)
        end = len(self.ids)
        if token in self.special:
            self._since = end
        for width in WIDTHS:
            if end - self._since >= width:
                self._growing.setdefault(_hash(self.ids[end - width :]), []).append(end)

    def copy(self, limit: int, min_match: int) -> tuple[int, ...]:
        """The longest match's continuation: at most limit + SPARE tokens, up to a special one or the end."""
        best, found = (0, 0), 0
        for end in self._ends():
            n = self._match(end)
            if n < min_match:
                continue
            available = self._available(end, limit + SPARE)
            if (n, available) > best:
                best, found = (n, available), end
        return tuple(self.ids[found : found + best[1]])

    def _ends(self) -> Iterator[int]:
        """Where windows like the last ones end."""
        now = len(self.ids)
        for width in WIDTHS:
            if now - self._since < width:
                continue
            key = _hash(self.ids[now - width :])
            recent = [end for end in self._growing.get(key, ())[-ENTRIES - 1 :] if end < now]
            yield from reversed(recent)
            yield from (end for end in self._written[width].find(key) if end < now)

    def _match(self, end: int) -> int:
        """Tokens before `end` that equal the last ones."""
        n, now = 0, len(self.ids)
        most = min(MAX_MATCH, end, now - self._since)
        while n < most and self.ids[end - 1 - n] == self.ids[now - 1 - n]:
            n += 1
        return n

    def _available(self, end: int, most: int) -> int:
        n = 0
        while n < most and end + n < len(self.ids) and self.ids[end + n] not in self.special:
            n += 1
        return n


@define
class NgramDrafter:
    """special: tokens that no copy reaches over. min_match: tokens that must agree, at least 4. beyond: drafts that
    another drafter has anyway, so that a copy cut short by its source is worth its while only if longer."""

    special: Collection[int]
    min_match: int
    beyond: int = 0
    name: str = "ngram"
    _slots: dict[int, _Index] = field(factory=dict)

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        self._slots[slot] = _Index(self.special, list(prompt))

    def end(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def advance(self, parts: Sequence[Advance]) -> None:
        for part in parts:
            index = self._slots[part.slot]
            for token in part.following[max(0, len(index.ids) - part.kv_len - 1) :]:
                index.append(token)

    def propose(self, wants: Sequence[Want]) -> list[tuple[int, ...]]:
        return [self._propose(w) for w in wants]

    def _propose(self, want: Want) -> tuple[int, ...]:
        found = self._slots[want.slot].copy(want.limit, self.min_match) if want.limit else ()
        drafts = found[: min(want.limit, max(0, len(found) - SPARE))]
        cut = len(found) < want.limit + SPARE
        return () if cut and len(drafts) <= self.beyond else drafts
