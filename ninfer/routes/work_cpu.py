"""How CPU routes cut their work into chunks."""

from __future__ import annotations

from math import prod

from ninfer.devices.base import Geometry
from ninfer.ir.types import Env, TensorType

CHUNK_VALUES = 16 << 10  # of a light operation: some microseconds
PAIR_VALUES = 2 << 10  # that are worth a second thread: about a microsecond each


def by_elements(type: TensorType, env: Env, each: int = CHUNK_VALUES) -> Geometry:
    """A chunk for about `each` values, two for fewer if that pays, and at most one for a row."""
    shape = type.concrete(env)
    values = prod(shape)
    return Geometry((max(1, min(shape[0], max(values // each, min(2, values // PAIR_VALUES)))), 1, 1))
