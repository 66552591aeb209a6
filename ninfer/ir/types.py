"""What a value in a graph is: a shape over a few symbols, a dtype, and for weights a quant format."""

from __future__ import annotations

from enum import StrEnum
from math import prod
from typing import Any, TypeAlias

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.formats.dtypes import F32, I32, DType
from ninfer.formats.quant import Packed, QuantFormat


class Sym(StrEnum):
    """The sizes that a step or a memory plan decides."""

    T = "T"  # token rows of the step
    L = "L"  # rows that need logits
    B = "B"  # sequences in the step
    S = "S"  # slots: sequences that have a place on the device
    P = "P"  # KV pages in the pool
    M = "M"  # pages that one sequence may have


T, L, B, S, P, M = Sym.T, Sym.L, Sym.B, Sym.S, Sym.P, Sym.M

Dim: TypeAlias = int | Sym
Array: TypeAlias = NDArray[Any] | Packed
Arrays: TypeAlias = tuple[Array, ...]


@frozen
class Env:
    """Numbers for the symbols. `rows` and `logit_rows` are upper bounds; the step header has the real counts."""

    rows: int
    logit_rows: int
    seqs: int
    slots: int = 1
    pages: int = 1
    max_pages: int = 1

    def __getitem__(self, sym: Sym) -> int:
        match sym:
            case Sym.T:
                return self.rows
            case Sym.L:
                return self.logit_rows
            case Sym.B:
                return self.seqs
            case Sym.S:
                return self.slots
            case Sym.P:
                return self.pages
            case Sym.M:
                return self.max_pages


@frozen(cache_hash=True)
class TensorType:
    """shape: a Sym stands first, if at all (or for page tables [S, M]). fmt: the bytes of a weight matrix.

    least_bits: fewest bits of activations that may meet a weight; 0: nothing is said.
    """

    shape: tuple[Dim, ...]
    dtype: DType = F32
    fmt: QuantFormat | None = None
    least_bits: int = 0

    def concrete(self, env: Env) -> tuple[int, ...]:
        return tuple(env[d] if isinstance(d, Sym) else d for d in self.shape)

    def nbytes(self, env: Env) -> int:
        shape = self.concrete(env)
        if self.fmt is not None:
            return self.fmt.nbytes((prod(shape[:-1]), shape[-1]))
        return prod(shape) * self.dtype.bits // 8

    def __str__(self) -> str:
        kind = self.fmt.name if self.fmt is not None else self.dtype.name
        return f"{kind}[{', '.join(str(d) for d in self.shape)}]"


Types: TypeAlias = tuple[TensorType, ...]


def act(*shape: Dim) -> TensorType:
    """An activation of the reference precision."""
    return TensorType(shape, F32)


def i32(*shape: Dim) -> TensorType:
    return TensorType(shape, I32)


def f32_array(x: Array) -> NDArray[np.float32]:
    """The values of an activation or weight, decoded if packed.   any shape -> float32, same shape."""
    return x.f32() if isinstance(x, Packed) else x.astype(np.float32, copy=False)


def ints(x: Array) -> NDArray[np.int32]:
    if isinstance(x, Packed):
        raise TypeError("an integer operand cannot be a packed weight")
    return x


def plain(x: Array) -> NDArray[Any]:
    """A state or record buffer as it is, so that a reference can write into it."""
    if isinstance(x, Packed):
        raise TypeError("a state cannot be a packed weight")
    return x
