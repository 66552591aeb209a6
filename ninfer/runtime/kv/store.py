"""How the context cache reads and writes what a model keeps of its sequences: pages, and the states of a slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from ninfer.ir.step import PROMPT_BIT
from ninfer.ir.types import Sym, TensorType

HOST_STATES = frozenset({"page_table", "bias", "mask", "counts"})  # the host writes them for each request

ROUND_STATES = ("journal.", "mtp.", "tap.")  # rings that a round fills before it reads them

Bytes = NDArray[np.uint8]


class CacheStore(Protocol):
    """Used by the engine's thread, between steps.   image_bytes: of a slot; 0: pages are all that a prefix needs."""

    @property
    def page_bytes(self) -> int: ...

    @property
    def image_bytes(self) -> int: ...

    def read_page(self, page: int) -> Bytes:
        """Memory of the caller's, filled when `settle` returns."""

    def write_page(self, page: int, data: Bytes) -> None: ...

    def copy_page(self, source: int, to: int) -> None: ...

    def read_image(self, slot: int) -> Bytes:
        """Recurrent state of a slot, as its last step left it."""

    def write_image(self, slot: int, data: Bytes) -> None: ...

    def resume(self, slot: int, tokens: Sequence[int], skip: int = 0) -> None:
        """The slot goes on after these prompt tokens: penalties know them, but for the first `skip`."""

    def settle(self) -> None:
        """Wait until what was read is there. Writing what was read needs no wait."""

    def reserve(self, pages: int, images: int) -> None:
        """As many of them will be kept in host memory."""


class StateMemory(Protocol):
    """The part of a device's memory that is needed here."""

    def read_state(self, name: str, index: Any) -> NDArray[Any]: ...

    def write_state(self, name: str, index: Any, values: NDArray[Any]) -> None: ...

    def read_rows(self, names: Sequence[str], index: int) -> Bytes: ...

    def write_rows(self, names: Sequence[str], index: int, data: Bytes) -> None: ...

    def settle(self) -> None: ...

    def reserve_rows(self, counts: Mapping[int, int]) -> None: ...


@define
class StateStore:
    """Over the states of a graph: `kv.*` are pages; other states by slot make up an image."""

    memory: StateMemory
    types: Mapping[str, TensorType]
    _pages: tuple[str, ...] = field(init=False)
    _images: tuple[str, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._pages = tuple(sorted(name for name in self.types if name.startswith("kv.")))
        self._images = tuple(
            sorted(
                name
                for name, t in self.types.items()
                if t.shape[0] is Sym.S and name not in HOST_STATES and not name.startswith(ROUND_STATES)
            )
        )

    def _row_bytes(self, name: str) -> int:
        sizes = [int(d) for d in self.types[name].shape[1:] if isinstance(d, int)]
        return int(np.prod(sizes, dtype=np.int64)) * self.types[name].dtype.nbytes

    @property
    def page_bytes(self) -> int:
        return sum(map(self._row_bytes, self._pages))

    @property
    def image_bytes(self) -> int:
        return sum(map(self._row_bytes, self._images))

    def read_page(self, page: int) -> Bytes:
        return self._read(self._pages, page)

    def write_page(self, page: int, data: Bytes) -> None:
        self._write(self._pages, page, data)

    def copy_page(self, source: int, to: int) -> None:
        self._write(self._pages, to, self._read(self._pages, source))

    def read_image(self, slot: int) -> Bytes:
        return self._read(self._images, slot)

    def write_image(self, slot: int, data: Bytes) -> None:
        self._write(self._images, slot, data)

    def settle(self) -> None:
        self.memory.settle()

    def reserve(self, pages: int, images: int) -> None:
        counts = {self.image_bytes: images, self.page_bytes: pages}
        self.memory.reserve_rows({nbytes: count for nbytes, count in counts.items() if nbytes and count})

    def page_of(self, rows: Mapping[str, Bytes]) -> Bytes:
        """A page from what its states hold, by name. Zeros for those that are not named, such as a drafter's."""
        return np.concatenate([rows.get(n, np.zeros(self._row_bytes(n), np.uint8)) for n in self._pages])

    def image_of(self, states: Mapping[str, NDArray[np.float32]]) -> Bytes:
        """An image from the states of a slot, by name; zeros for those that are not named."""
        parts = []
        for name in self._images:
            values = np.zeros(self._row_bytes(name), np.uint8)
            if name in states:
                values = np.ascontiguousarray(states[name], self.types[name].dtype.numpy).reshape(-1).view(np.uint8)
                if len(values) != self._row_bytes(name):
                    raise ValueError(f"{len(values)} bytes are not the state {name}, {self.types[name]}")
            parts.append(values)
        return np.concatenate(parts)

    def resume(self, slot: int, tokens: Sequence[int], skip: int = 0) -> None:
        if "counts" in self.types:
            counts = np.zeros(int(self.types["counts"].shape[1]), np.int32)
            counts[np.unique(np.array(tokens[skip:], np.int64))] = PROMPT_BIT
            self.memory.write_state("counts", slot, counts)

    def _read(self, names: Sequence[str], index: int) -> Bytes:
        return self.memory.read_rows(names, index) if names else np.zeros(0, np.uint8)

    def _write(self, names: Sequence[str], index: int, data: Bytes) -> None:
        expected = sum(map(self._row_bytes, names))
        if expected != len(data):
            raise ValueError(f"{len(data)} bytes are not the {expected} of this model's states")
        if names:
            self.memory.write_rows(names, index, data)
