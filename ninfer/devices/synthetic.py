"""Weights that are made from a seed on the device, so that a large model's speed is measured without a download."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from attrs import frozen

from ninfer.formats.quant import Packed, QuantFormat


@frozen(eq=False)
class Synthetic:
    """A matrix of values about N(0, 1 / K) in `format`: TILE random rows, turned by the seed and repeated."""

    format: QuantFormat
    shape: tuple[int, ...]
    seed: int
    TILE: ClassVar[int] = 256

    @property
    def nbytes(self) -> int:
        return self.format.nbytes(self.shape)

    def tile(self) -> Packed:
        """The rows that are repeated, or the whole of a small matrix; equal for all seeds."""
        n, k = min(self.shape[0], self.TILE), self.shape[1]
        x = np.random.default_rng(k).standard_normal((n, k), np.float32) * np.float32(k**-0.5)
        return Packed(self.format, self.format.pack(x), (n, k))
