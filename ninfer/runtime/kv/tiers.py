"""What is kept of sequences outside of the device's pages: pages in host memory, and images of recurrent state.

A page of a chain and the state at a place of it are found by the key of the page before that place; tokens are stored
and compared as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from attrs import define, frozen

from ninfer.ir.step import PAGE
from ninfer.runtime.kv.prefix import Chunk, Key
from ninfer.runtime.kv.store import Bytes


@frozen(eq=False)
class StoredPage:
    """parent: key of the page before."""

    chunk: Chunk
    parent: Key
    data: Bytes

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + 4 * PAGE


ImageBytes = tuple[Bytes, Bytes | None]  # the state, and the page with the tail


@frozen(eq=False)
class Image:
    """The state after `depth` whole pages and the tokens of `tail`, whose page is kept beside it.

    load: the bytes, from wherever they are; None: they are lost.
    """

    key: Key
    depth: int
    tail: tuple[int, ...]
    nbytes: int
    load: Callable[[], ImageBytes | None]

    @property
    def num_tokens(self) -> int:
        return self.depth * PAGE + len(self.tail)


def image_of(key: Key, depth: int, tail: tuple[int, ...], state: Bytes, page: Bytes | None) -> Image:
    """An image in memory."""
    data = state, page
    return Image(key, depth, tail, state.nbytes + (0 if page is None else page.nbytes), lambda: data)


class Tier(Protocol):
    """name: in statistics. A tier may lose anything at any time; what it gives is right."""

    name: str

    def has_page(self, key: Key) -> bool: ...

    def page(self, key: Key) -> StoredPage | None: ...

    def images(self, key: Key) -> Iterator[Image]:
        """Those anchored at a page; for a tier that has to read them, as long as they are wanted."""

    def stats(self) -> dict[str, object]: ...


def is_own(tail: tuple[int, ...], following: tuple[int, ...], page: bool) -> bool:
    """Whether an image goes with a chain that is forgotten: `following` comes after its page, which goes if `page`."""
    return page if not tail else tail == following[: len(tail)]


class HostTier:
    """Pages that the device's pool gave up, least recently used first to go.   capacity_bytes 0: keeps nothing."""

    name = "host"

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.num_hits = 0
        self.num_evicted = 0
        self._pages: OrderedDict[Key, StoredPage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def put(self, page: StoredPage) -> None:
        if page.nbytes > self.capacity_bytes:
            return
        old = self._pages.pop(page.chunk.key, None)
        if old is not None:
            self.used_bytes -= old.nbytes
        self._pages[page.chunk.key] = page
        self.used_bytes += page.nbytes
        while self.used_bytes > self.capacity_bytes:
            _, gone = self._pages.popitem(last=False)
            self.used_bytes -= gone.nbytes
            self.num_evicted += 1

    def drop(self, key: Key, following: tuple[int, ...], *, page: bool) -> None:
        """Forget what is kept at a page of a chain, as is_own says."""
        found = self._pages.pop(key, None) if page else None
        if found is not None:
            self.used_bytes -= found.nbytes

    def has_page(self, key: Key) -> bool:
        return key in self._pages

    def page(self, key: Key) -> StoredPage | None:
        found = self._pages.get(key)
        if found is not None:
            self._pages.move_to_end(key)
            self.num_hits += 1
        return found

    def images(self, key: Key) -> Iterator[Image]:
        return iter(())

    def stats(self) -> dict[str, object]:
        return {
            "name": self.name,
            "used_bytes": self.used_bytes,
            "capacity_bytes": self.capacity_bytes,
            "pages": len(self._pages),
            "hits": self.num_hits,
            "evicted": self.num_evicted,
        }


@define(eq=False)
class _Held:
    image: Image
    saved_tokens: int  # that a hit saves against the nearest image before it
    hits: int = 0
    value: float = 0.0


class ImageTier:
    """Images in host memory. The least valuable goes first: value = age + (1 + hits) * tokens saved / bytes.

    Age is the value of the last that went, so that what is not hit grows old (greedy dual size frequency). An image
    whose last page is in no tier is worth nothing. is_known: whether a page is anywhere.
    """

    name = "images"

    def __init__(self, capacity_bytes: int, is_known: Callable[[Key], bool] = lambda key: True) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.num_hits = 0
        self.num_evicted = 0
        self.is_known = is_known
        self._by_key: dict[Key, dict[tuple[int, ...], _Held]] = {}
        self._age = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def put(self, image: Image, saved_tokens: int) -> None:
        if image.nbytes > self.capacity_bytes:
            return
        self._drop(image.key, image.tail)
        held = _Held(image, max(1, saved_tokens))
        held.value = self._value(held)
        self._by_key.setdefault(image.key, {})[image.tail] = held
        self.used_bytes += image.nbytes
        while self.used_bytes > self.capacity_bytes:
            everyone = [h for group in self._by_key.values() for h in group.values()]
            worst = min(everyone, key=lambda h: h.value if self._lives(h) else -1.0)
            if self._lives(worst):
                self._age = worst.value
            self._drop(worst.image.key, worst.image.tail)
            self.num_evicted += 1

    def _lives(self, held: _Held) -> bool:
        return held.image.depth == 0 or self.is_known(held.image.key)

    def _value(self, held: _Held) -> float:
        return self._age + (1 + held.hits) * held.saved_tokens / held.image.nbytes

    def _drop(self, key: Key, tail: tuple[int, ...]) -> None:
        held = self._by_key.get(key, {}).pop(tail, None)
        if held is not None:
            self.used_bytes -= held.image.nbytes
            if not self._by_key[key]:
                del self._by_key[key]

    def drop(self, key: Key, following: tuple[int, ...], *, page: bool) -> None:
        for tail in list(self._by_key.get(key, ())):
            if is_own(tail, following, page):
                self._drop(key, tail)

    def hit(self, image: Image) -> None:
        held = self._by_key.get(image.key, {}).get(image.tail)
        if held is not None:
            held.hits += 1
            held.value = self._value(held)
            self.num_hits += 1

    def has(self, key: Key, tail: tuple[int, ...] = ()) -> bool:
        return tail in self._by_key.get(key, {})

    def has_page(self, key: Key) -> bool:
        return False

    def page(self, key: Key) -> StoredPage | None:
        return None

    def images(self, key: Key) -> Iterator[Image]:
        for held in list(self._by_key.get(key, {}).values()):
            yield held.image

    def stats(self) -> dict[str, object]:
        return {
            "name": self.name,
            "used_bytes": self.used_bytes,
            "capacity_bytes": self.capacity_bytes,
            "images": len(self),
            "hits": self.num_hits,
            "evicted": self.num_evicted,
        }
