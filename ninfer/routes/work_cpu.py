"""How CPU routes cut their work into chunks."""

from __future__ import annotations

from math import prod

from ninfer.devices.base import Geometry
from ninfer.ir.types import Env, TensorType

CHUNK_VALUES = 16 << 10  # of a light operation: some microseconds


def by_elements(type: TensorType, env: Env, each: int = CHUNK_VALUES) -> Geometry:
    """A chunk for about `each` values, and at most one for a row."""
    shape = type.concrete(env)
    return Geometry((max(1, min(shape[0], prod(shape) // each)), 1, 1))
