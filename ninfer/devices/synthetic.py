"""Weights that are made from a seed on the device, so that a large model's speed is measured without a download."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
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

    def whole(self) -> Packed:
        """The same matrix on the host."""
        tile, n = self.tile(), self.shape[0]
        turn = 16 * self.seed if n >= TILE else 0
        raw = self.format.gather_rows(tile.raw, tile.shape, (np.arange(n) + turn) % tile.shape[0])
        return Packed(self.format, raw, self.shape)

    def tile(self) -> Packed:
        """The rows that are repeated, or the whole of a small matrix; equal for all seeds."""
        return make_tile(self.format, min(self.shape[0], TILE), self.shape[1])
