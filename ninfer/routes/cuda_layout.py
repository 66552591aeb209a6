"""How weights lie in the memory of a GPU: by format, what turns the bytes of a file into those that kernels read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ninfer.formats.bits import U8Array
from ninfer.formats.quant import QuantFormat

Repack = Callable[[U8Array, Sequence[int]], U8Array]  # (bytes as stored, shape) -> bytes as kernels read them


def _as_stored(raw: U8Array, shape: Sequence[int]) -> U8Array:
    return raw


def device_layout(fmt: QuantFormat) -> Repack:
    return _as_stored
