"""Which pages already hold the beginning of a prompt.

The key of a page is a hash of the key of the page before it, its 64 tokens and its media, so that equal keys mean equal
histories. Tokens are stored and compared all the same: a hash is never trusted. The index holds each of its pages once
in `Pages`; sequences that use one hold it once more.

Two rules keep eviction simple. Whoever holds a page of a chain holds all pages before it (`extend` sees to that), and
pages are released tail first. So when a page is idle, held by the index alone, everything behind it has been idle for
longer: the page that has been idle longest is always the end of its chain, and every idle page can be evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
from attrs import define, field, frozen

from ninfer.ir.step import PAGE
from ninfer.runtime.kv.pages import Pages

Key = bytes  # 16
ROOT: Key = bytes(16)


@frozen
class Media:
    """Tokens [start, end) stand for something else, whose digest this is."""

    start: int
    end: int
    digest: bytes


def page_key(parent: Key, tokens: Sequence[int], extra: bytes = b"") -> Key:
    """Of one page: blake2b-128 of the parent's key, the tokens as u32 and the media that overlap them."""
    return blake2b(parent + np.array(tokens, "<u4").tobytes() + extra, digest_size=16).digest()


def page_extra(media: Sequence[Media], index: int) -> bytes:
    """What identifies the media in a page besides their placeholder tokens: digests and places."""
    start, end = index * PAGE, (index + 1) * PAGE
    found = [m for m in media if m.start < end and m.end > start]
    return b"".join(m.digest + np.array([m.start - start, m.end - start], "<i4").tobytes() for m in found)


@frozen
class Chunk:
    """A page's worth of a sequence: its last one may have fewer tokens."""

    key: Key
    tokens: tuple[int, ...]
    extra: bytes = b""


def chunks(tokens: Sequence[int], media: Sequence[Media] = ()) -> Iterator[Chunk]:
    """The chain of a token sequence. Pure: it may be computed on any thread, before admission."""
    key = ROOT
    for index in range(-(-len(tokens) // PAGE)):
        part = tuple(tokens[index * PAGE : (index + 1) * PAGE])
        extra = page_extra(media, index)
        key = page_key(key, part, extra)
        yield Chunk(key, part, extra)


@define(eq=False)
class _Entry:
    chunk: Chunk
    parent: _Entry | None
    page: int
    children: dict[Key, _Entry] = field(factory=dict)


@frozen
class Match:
    """The longest known beginning. pages: whole ones, to be held. tail: a page whose first `tail_tokens` match too;
    it must be copied, since its owner's continuation differs. key: of the last whole page, ROOT if there is none."""

    pages: tuple[int, ...]
    key: Key
    tail: int | None = None
    tail_tokens: int = 0

    @property
    def num_whole_tokens(self) -> int:
        return PAGE * len(self.pages)

    @property
    def num_tokens(self) -> int:
        return self.num_whole_tokens + self.tail_tokens


@define(eq=False)
class Chain:
    """A sequence's pages, in order, each held once.   num_known: of them, those offered to the index so far.

    pinned: pages of the index that equal the page at that place. closed: nothing more is offered.
    """

    pages: list[int]
    last: _Entry | None
    num_known: int
    pinned: dict[int, int] = field(factory=dict)
    closed: bool = False

    def held(self) -> list[int]:
        return [*self.pages, *self.pinned.values()]


class PrefixIndex:
    """Chains of pages by content. Used by one thread, the one that uses `pages`."""

    def __init__(self, pages: Pages, evicted: Callable[[Chunk, Key, int], None] = lambda *_: None) -> None:
        """evicted: told of a page that is about to be freed, with its parent's key."""
        self._pages = pages
        self._evicted = evicted
        self._entries: dict[Key, _Entry] = {}
        self._roots: dict[Key, _Entry] = {}  # children of nothing
        self._by_page: dict[int, _Entry] = {}
        self._idle: OrderedDict[int, _Entry] = OrderedDict()  # by page; idle longest first

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now."""
        return len(self._idle)

    def match(self, prompt: Sequence[Chunk]) -> Match:
        """The longest known beginning, short of the last token: one is always left to prefill. Nothing is held."""
        left = sum(len(chunk.tokens) for chunk in prompt) - 1
        entry: _Entry | None = None
        pages: list[int] = []
        for chunk in prompt:
            found = self._find(entry, chunk) if len(chunk.tokens) == PAGE <= left else None
            if found is None:
                tail, count = self._best_tail(entry, chunk, left)
                return Match(tuple(pages), entry.chunk.key if entry else ROOT, tail, count)
            entry = found
            pages.append(found.page)
            left -= PAGE
        return Match(tuple(pages), entry.chunk.key if entry else ROOT)

    def start(self, match: Match) -> Chain:
        """A sequence that begins with the whole pages of a match made just now. They are held; add fresh ones."""
        last: _Entry | None = None
        for page in match.pages:
            self._hold(page)
            last = self._by_page[page]
        return Chain(list(match.pages), last, len(match.pages))

    def extend(self, chain: Chain, chunk: Chunk) -> None:
        """Make known the next page of a sequence, now that its tokens are in. A partial page is the last.

        Where another page of the same content is known, that one stays, and the sequence's own remains private; the
        known one is held as long as the sequence lives, because what comes next continues it.
        """
        if chain.closed:
            return
        index = chain.num_known
        found = self._find(chain.last, chunk)
        if found is None:
            if chunk.key in self._entries:  # two contents, one hash: what comes next stays private
                chain.closed = True
                return
            found = _Entry(chunk, chain.last, chain.pages[index])
            self._add(found)
        elif found.page != chain.pages[index]:
            self._hold(found.page)
            chain.pinned[index] = found.page
        chain.last = found
        chain.num_known += 1
        chain.closed = len(chunk.tokens) < PAGE

    def release(self, chain: Chain) -> None:
        """The sequence is done. Its known pages are idle unless others hold them, its private ones free."""
        for index in range(len(chain.pages) - 1, -1, -1):
            self._release(chain.pages[index])
            if index in chain.pinned:
                self._release(chain.pinned[index])
        chain.pages, chain.pinned, chain.last, chain.closed = [], {}, None, True

    def hold(self, page: int) -> None:
        """Keep a known page, whose chain is held, until `unhold`."""
        self._hold(page)

    def unhold(self, page: int) -> None:
        self._release(page)

    def _hold(self, page: int) -> None:
        self._pages.hold(page)
        self._idle.pop(page, None)

    def _release(self, page: int) -> None:
        self._pages.release((page,))
        entry = self._by_page.get(page)
        if entry is not None and self._pages.refs(page) == 1:
            self._idle[page] = entry

    def evict(self, count: int) -> int:
        """Free up to `count` pages that only the index holds, idle longest first. How many it were."""
        freed = 0
        while freed < count and self._idle:
            _, entry = self._idle.popitem(last=False)
            self._evicted(entry.chunk, entry.parent.chunk.key if entry.parent else ROOT, entry.page)
            self._remove(entry)
            freed += 1
        return freed

    def page_of(self, chunk: Chunk) -> int | None:
        """Where a known page is."""
        entry = self._entries.get(chunk.key)
        return entry.page if entry is not None and entry.chunk == chunk else None

    def drop(self, chunk: Chunk) -> bool:
        """Free a page without telling anyone. False: it is in use, or something continues it; True also if unknown."""
        entry = self._entries.get(chunk.key)
        if entry is None or entry.chunk != chunk:
            return True
        if entry.children or entry.page not in self._idle:
            return False
        del self._idle[entry.page]
        self._remove(entry)
        return True

    def clear(self) -> None:
        """Forget everything idle."""
        self.evict(len(self._idle))

    def _siblings(self, parent: _Entry | None) -> dict[Key, _Entry]:
        return self._roots if parent is None else parent.children

    def _find(self, parent: _Entry | None, chunk: Chunk) -> _Entry | None:
        entry = self._entries.get(chunk.key)
        if entry is None or entry.parent is not parent or entry.chunk != chunk:
            return None
        return entry

    def _best_tail(self, parent: _Entry | None, chunk: Chunk, left: int) -> tuple[int | None, int]:
        """The page that shares most tokens with a chunk after the same history."""
        best: tuple[int | None, int] = (None, 0)
        if chunk.extra:  # where media lie is known by page, not by token
            return best
        for entry in self._siblings(parent).values():
            if not entry.chunk.extra:
                count = min(left, _common(entry.chunk.tokens, chunk.tokens))
                if count > best[1]:
                    best = entry.page, count
        return best

    def _add(self, entry: _Entry) -> None:
        siblings = self._siblings(entry.parent)
        tokens = entry.chunk.tokens
        for other in list(siblings.values()):  # what it continues is of no more use
            n = len(other.chunk.tokens)
            if n < PAGE and n <= len(tokens) and other.chunk.tokens == tokens[:n] and other.page in self._idle:
                del self._idle[other.page]
                self._remove(other)
        siblings[entry.chunk.key] = entry
        self._entries[entry.chunk.key] = entry
        self._by_page[entry.page] = entry
        self._pages.hold(entry.page)

    def _remove(self, entry: _Entry) -> None:
        assert not entry.children, "a page is evicted before what continues it"
        del self._siblings(entry.parent)[entry.chunk.key]
        del self._entries[entry.chunk.key]
        del self._by_page[entry.page]
        self._pages.release((entry.page,))

    def held(self) -> list[int]:
        """The pages that the index holds, for Pages.check."""
        return list(self._by_page)

    def check(self) -> None:
        """Raises AssertionError unless the tables agree and idle pages are those that nobody else holds."""
        assert len(self._entries) == len(self._by_page)
        for page, entry in self._by_page.items():
            assert entry.page == page and self._entries[entry.chunk.key] is entry
            assert self._siblings(entry.parent)[entry.chunk.key] is entry
            assert (self._pages.refs(page) == 1) == (page in self._idle), f"page {page}"
            assert entry.parent is None or len(entry.parent.chunk.tokens) == PAGE
        order = {page: i for i, page in enumerate(self._idle)}
        for page, entry in self._idle.items():
            assert all(order.get(child.page, PAGE * len(order)) < order[page] for child in entry.children.values())


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
