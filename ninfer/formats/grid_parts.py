"""Blocks of the grid formats as integers, for layouts that keep them so: indices, signs and scales, nothing decoded.

    w = d * (2 scale + 1) / 2^shift * code

where code is a grid value with its sign, or, in the formats with offsets, 8 * grid value + 1 (or - 1 where `minus`).
All of these are exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.formats.bits import U8Array
from ninfer.formats.format import QuantFormat
from ninfer.formats.grids import grid, sign_bytes

U16Array = NDArray[np.uint16]


@frozen
class GridParts:
    """Of n blocks of 256 values."""

    d: U16Array  # [n], f16 words
    scale: U8Array  # [n, groups], 0 .. 15
    index: U16Array  # [n, 256 / lanes]
    signs: U8Array | None = None  # [n, 32]: bit j of byte o: value 8 o + j is negative
    minus: U8Array | None = None  # [n, 32]: 1 where 8 values have the offset -1


@frozen
class GridCode:
    """One grid format. lanes: values of a grid point; bits: of an index; group: values that share a scale."""

    name: str
    lanes: int
    bits: int
    group: int
    shift: int
    parts: Callable[[U8Array], GridParts]

    @property
    def has_signs(self) -> bool:
        return self.name not in ("iq1_s", "iq1_m")

    @property
    def field(self) -> int:
        """Bits of an index and of what goes with it: the sign of its values' offset, where they have one."""
        return self.bits + (not self.has_signs)

    @property
    def levels(self) -> tuple[int, ...]:
        """Different values of the grid, ascending."""
        return tuple(int(v) for v in np.unique(grid(self.name)))

    @property
    def odd(self) -> bool:
        """Whether all values are odd: the negative of such a number has all bits turned but the last."""
        return all(v % 2 for v in self.levels)

    def words(self) -> NDArray[np.uint32]:
        """A 32-bit word per grid point: four values as bytes, or eight values' places among `levels` as nibbles."""
        table = grid(self.name)
        if self.lanes == 4:
            words: NDArray[np.uint32] = np.ascontiguousarray(table.view(np.uint8)).view("<u4").reshape(-1)
            return words
        places = np.searchsorted(self.levels, table).astype(np.uint32)
        return np.asarray(np.bitwise_or.reduce(places << (4 * np.arange(8, dtype=np.uint32)), axis=1), np.uint32)


def _words(raw: U8Array, dtype: str) -> NDArray[Any]:
    return np.ascontiguousarray(raw).view(dtype)


def _nibbles(raw: U8Array) -> U8Array:
    return np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=-1).reshape(len(raw), -1)


def _index(low: U8Array, high: U8Array, bits: int) -> U16Array:
    """low: a byte per point; high: fields of `bits`, low first."""
    parts = (high[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8((1 << bits) - 1)
    return low.astype(np.uint16) | parts.reshape(len(low), -1).astype(np.uint16) << np.uint16(8)


def _even_signs(words: NDArray[np.uint32]) -> U8Array:
    """Four fields of 7 bits in each word.   [n, 8] -> [n, 32]"""
    fields = (words[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & np.uint32(127)
    signs: U8Array = sign_bytes()[fields].reshape(len(words), -1)
    return signs


def _iq2_xxs(b: U8Array) -> GridParts:
    pair = _words(b[:, 2:], "<u4").reshape(len(b), 8, 2)
    index = np.ascontiguousarray(pair[..., 0]).view(np.uint8).reshape(len(b), 32)
    scale = (pair[..., 1] >> 28).astype(np.uint8)
    return GridParts(_words(b[:, :2], "<u2")[:, 0], scale, index.astype(np.uint16), _even_signs(pair[..., 1]))


def _iq2_xs(b: U8Array) -> GridParts:
    q = _words(b[:, 2:66], "<u2")
    return GridParts(_words(b[:, :2], "<u2")[:, 0], _nibbles(b[:, 66:]), q & np.uint16(511), sign_bytes()[q >> 9])


def _iq2_s(b: U8Array) -> GridParts:
    index = _index(b[:, 2:34], b[:, 66:74], 2)
    return GridParts(_words(b[:, :2], "<u2")[:, 0], _nibbles(b[:, 74:]), index, b[:, 34:66])


def _iq3_xxs(b: U8Array) -> GridParts:
    word = _words(b[:, 66:], "<u4")
    index, scale = b[:, 2:66].astype(np.uint16), (word >> 28).astype(np.uint8)
    return GridParts(_words(b[:, :2], "<u2")[:, 0], scale, index, _even_signs(word))


def _iq3_s(b: U8Array) -> GridParts:
    index = _index(b[:, 2:66], b[:, 66:74], 1)
    return GridParts(_words(b[:, :2], "<u2")[:, 0], _nibbles(b[:, 106:]), index, b[:, 74:106])


def _iq1_s(b: U8Array) -> GridParts:
    qh = _words(b[:, 34:], "<u2")
    high = ((qh[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & np.uint16(7)).reshape(len(b), 32)
    index = np.asarray(b[:, 2:34].astype(np.uint16) | high << np.uint16(8), np.uint16)
    scale = (qh >> 12 & 7).astype(np.uint8)
    minus = (qh >> 15).astype(np.uint8).repeat(4, axis=1)
    return GridParts(_words(b[:, :2], "<u2")[:, 0], scale, index, minus=minus)


def _iq1_m(b: U8Array) -> GridParts:
    words, nibble = _words(b[:, 48:], "<u2"), _nibbles(b[:, 32:48])
    d = words[:, 0] >> 12 | words[:, 1] >> 8 & 0xF0 | words[:, 2] >> 4 & 0xF00 | words[:, 3] & 0xF000
    scale = ((words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & np.uint16(7)).reshape(len(b), 16)
    index = b[:, :32].astype(np.uint16) | (nibble & np.uint8(7)).astype(np.uint16) << np.uint16(8)
    return GridParts(d.astype(np.uint16), scale.astype(np.uint8), index, minus=nibble >> np.uint8(3))


GRID_CODES: dict[str, GridCode] = {
    code.name: code
    for code in (
        GridCode("iq2_xxs", 8, 8, 32, 3, _iq2_xxs),
        GridCode("iq2_xs", 8, 9, 16, 3, _iq2_xs),
        GridCode("iq2_s", 8, 10, 16, 3, _iq2_s),
        GridCode("iq3_xxs", 4, 8, 32, 2, _iq3_xxs),
        GridCode("iq3_s", 4, 9, 32, 0, _iq3_s),
        GridCode("iq1_s", 8, 11, 32, 3, _iq1_s),
        GridCode("iq1_m", 8, 11, 16, 3, _iq1_m),
    )
}


def random_blocks(fmt: QuantFormat, n: int, rms: float, rng: np.random.Generator) -> U8Array:
    """n valid blocks whose values have about the given root mean square: grid formats have no encoder.   [n, bytes]"""
    assert fmt.grid is not None
    blocks = rng.integers(0, 256, (n, fmt.block_bytes), dtype=np.uint8)
    _set_d(fmt.name, blocks, np.ones(n))
    size = np.sqrt(np.mean(fmt.grid(blocks[:64]).astype(np.float64) ** 2))
    _set_d(fmt.name, blocks, rng.uniform(0.5, 1.4, n) * rms / size)
    return blocks


def _set_d(name: str, blocks: U8Array, d: NDArray[np.float64]) -> None:
    word = d.astype("<f2").view("<u2")
    if name != "iq1_m":
        blocks[:, :2] = word.view(np.uint8).reshape(-1, 2)
        return
    scales = _words(blocks[:, 48:], "<u2").copy()  # a nibble of d at the top of each
    for j in range(4):
        scales[:, j] = scales[:, j] & np.uint16(0xFFF) | (word >> np.uint16(4 * j) & np.uint16(15)) << np.uint16(12)
    blocks[:, 48:] = scales.view(np.uint8)
