"""Builders for `Op.cases`: seeded arrays and their types."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.formats.dtypes import F32, I32, DType
from ninfer.formats.grid_parts import random_blocks
from ninfer.formats.quant import Packed, QuantFormat
from ninfer.ir.types import Array, Dim, TensorType

Typed = tuple[TensorType, Array]


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def rows(sym: Dim, n: int, width: int, *, seed: int = 0, scale: float = 1.0) -> Typed:
    """Normal activations [n, width], row dimension `sym`."""
    x = (rng(seed).standard_normal((n, width)) * scale).astype(np.float32)
    return TensorType((sym, width), F32), x


def vector(width: int, *, seed: int = 1, mean: float = 1.0) -> Typed:
    x = (mean + 0.2 * rng(seed).standard_normal(width)).astype(np.float32)
    return TensorType((width,), F32), x


def matrix(fmt: QuantFormat, n: int, k: int, *, seed: int = 2) -> Typed:
    """A weight [n, k] in `fmt`, values about N(0, 1/k); of grids, which have no encoder, random blocks of that size."""
    if fmt.is_grid:
        blocks = random_blocks(fmt, n * fmt.blocks_per_row(k), float(k**-0.5), rng(seed))
        return TensorType((n, k), F32, fmt), Packed(fmt, blocks.reshape(-1), (n, k))
    x = (rng(seed).standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)
    return TensorType((n, k), F32, fmt), Packed(fmt, fmt.pack(x), (n, k))


def ints(sym: Dim, values: list[int]) -> Typed:
    return TensorType((sym,), I32), np.array(values, np.int32)


def buffer(type: TensorType, array: NDArray[Any]) -> Typed:
    return type, array


def dtype_array(dtype: DType, *shape: int) -> NDArray[Any]:
    return np.zeros(shape, dtype.numpy)
