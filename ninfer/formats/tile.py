"""Random matrices made fast: a few hundred rows, repeated by whoever needs more."""

from __future__ import annotations

import numpy as np

from ninfer.errors import ArtifactError
from ninfer.formats.grid_parts import random_blocks
from ninfer.formats.quant import Packed, QuantFormat

TILE = 256  # rows that are really random


def make_tile(fmt: QuantFormat, n: int, k: int) -> Packed:
    """Values about N(0, 1 / K), the same for every matrix of one format and row length."""
    if fmt.is_grid:
        blocks = random_blocks(fmt, n * fmt.blocks_per_row(k), float(k**-0.5), np.random.default_rng(k))
        return Packed(fmt, blocks.reshape(-1), (n, k))
    if not fmt.can_pack:
        raise ArtifactError(f"synthetic weights cannot be made in {fmt.name}: it has no encoder")
    x = np.random.default_rng(k).standard_normal((n, k), np.float32) * np.float32(k**-0.5)
    return Packed(fmt, fmt.pack(x), (n, k))
