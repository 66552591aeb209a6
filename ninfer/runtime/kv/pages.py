"""The pool of KV pages: which are free, and how many holders each of the others has.

A page id selects 64 tokens' worth of all planes of all layers. Free plus held is always the whole pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ninfer.ir.step import PAGE


def num_pages(num_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // PAGE)


class Pages:
    """A free list with reference counts. Used by one thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))  # a stack: the page freed last is the warmest
        self._refs = [0] * count

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many free pages, held once. Raises ValueError when there are fewer: ask `num_free` before."""
        if count > len(self._free):
            raise ValueError(f"{count} pages asked, {len(self._free)} of {self.count} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def hold(self, page: int) -> None:
        """One more holder of a page that is held."""
        if self._refs[page] < 1:
            raise ValueError(f"page {page} is free")
        self._refs[page] += 1

    def refs(self, page: int) -> int:
        return self._refs[page]

    def release(self, pages: Iterable[int]) -> None:
        """One holder less of each."""
        for page in pages:
            if self._refs[page] < 1:
                raise ValueError(f"page {page} is free already")
            self._refs[page] -= 1
            if not self._refs[page]:
                self._free.append(page)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Raises AssertionError unless free and held pages make up the pool and counts are those of `holders`."""
        held = Counter(page for pages in holders for page in pages)
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert free.isdisjoint(held), f"pages {sorted(free & set(held))} are free and held"
        assert len(free) + len(held) == self.count, f"{len(free)} free + {len(held)} held of {self.count} pages"
        for page, refs in held.items():
            assert self._refs[page] == refs, f"page {page} counts {self._refs[page]} holders, has {refs}"
