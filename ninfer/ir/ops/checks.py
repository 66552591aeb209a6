"""Checks that several ops share."""

from __future__ import annotations

from ninfer.formats.dtypes import I32
from ninfer.ir.op import Op, require
from ninfer.ir.types import Dim, TensorType


def is_vector(op: Op, name: str, type: TensorType) -> int:
    """A float vector of a fixed length, which is returned."""
    (n,) = type.shape if len(type.shape) == 1 else (None,)
    require(op, isinstance(n, int) and type.fmt is None, f"{name} must be a vector, not {type}")
    assert isinstance(n, int)
    return n


def is_rows(op: Op, name: str, type: TensorType) -> int:
    """An activation [R, N]; returns N."""
    n = type.shape[1] if len(type.shape) == 2 else None
    require(op, isinstance(n, int) and type.fmt is None, f"{name} must be [rows, N], not {type}")
    assert isinstance(n, int)
    return n


def are_ints(op: Op, names: str, shape: tuple[Dim, ...], *types: TensorType) -> None:
    """Step inputs of one shape; names: separated by spaces."""
    for name, type in zip(names.split(), types, strict=True):
        require(op, type == TensorType(shape, I32), f"{name} must be {TensorType(shape, I32)}, not {type}")
