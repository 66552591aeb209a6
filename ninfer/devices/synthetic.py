"""Weights that are made from a seed on the device, so that a large model's speed is measured without a download."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from ninfer.formats.quant import Packed, QuantFormat
from ninfer.formats.tile import TILE, make_tile


@frozen(eq=False)
class Synthetic:
    """A matrix in `format`: TILE random rows, turned by `seed` runs of 16 rows and repeated."""

    format: QuantFormat
    shape: tuple[int, ...]
    seed: int
    TILE: ClassVar[int] = TILE

    @property
    def nbytes(self) -> int:
        return self.format.nbytes(self.shape)

    def tile(self) -> Packed:
        """The rows that are repeated, or the whole of a small matrix; equal for all seeds."""
        return make_tile(self.format, min(self.shape[0], TILE), self.shape[1])
