"""Integers of a matrix into tiles of 16 rows and back: see cuda_layout.py for what a tile is.

Words of a lane are numbered 2 i + h; an array of them has the axes [row tile, tile, slice, lane, word, byte].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.formats.bits import F32Array, U8Array
from ninfer.formats.dtypes import E4M3_VALUES, bf16_to_f32
from ninfer.formats.grid_parts import GridCode, GridParts
from ninfer.formats.quant import align_up

TILE_ROWS = 16
SLICE = 64

CodeKind: TypeAlias = Literal["int", "table", "grid", "e4m3"]
SCALE_BYTES = {"f16": 4, "bf16": 4, "e8m0": 2, "e8m0_half": 2, "ue4m3_half": 2, "e4m3": 2}  # of a group


@frozen
class TilePlane:
    """Vectors of `width` bytes for each of `owners` (lanes, pairs or row pairs), in pieces of at most 16 bytes."""

    name: str
    owners: int
    width: int
    offset: int

    @property
    def piece(self) -> int:
        return min(16, self.width)

    @property
    def nbytes(self) -> int:
        return self.owners * self.width

    def store(self, out: U8Array, vectors: U8Array) -> None:
        """vectors: [..., owners, width] into out [..., tile bytes]."""
        pieces = vectors.reshape(*vectors.shape[:-1], self.width // self.piece, self.piece).swapaxes(-2, -3)
        out[..., self.offset : self.offset + self.nbytes] = pieces.reshape(*vectors.shape[:-2], self.nbytes)

    def load(self, tiles: U8Array) -> U8Array:
        part = tiles[..., self.offset : self.offset + self.nbytes]
        pieces = part.reshape(*part.shape[:-1], self.width // self.piece, self.owners, self.piece)
        return np.ascontiguousarray(pieces.swapaxes(-2, -3)).reshape(*part.shape[:-1], self.owners, self.width)


@frozen
class Tiling:
    """The tiles of a matrix of given row length.

    d_kind: "f16", "bf16"; a byte: "e8m0", "e8m0_half", "ue4m3_half", "e4m3" (over the tile's divisor); an f16 per row
    and tile times an int8 ("sub"), four bits ("sub4") or 2 s + 1 of four bits ("nibble") per group. m_kind: "f16",
    "sub", "sub4", or "" for none.
    """

    bits: int
    zero: int
    group: int
    slices: int  # of 64 columns in a tile
    num_tiles: int  # along K
    d_kind: str
    m_kind: str
    m_sign: int
    planes: Mapping[str, TilePlane]
    tile_bytes: int
    code: CodeKind = "int"
    table: tuple[int, ...] = ()
    grid: GridCode | None = None

    @property
    def columns(self) -> int:
        return self.slices * SLICE

    @property
    def groups(self) -> int:
        return self.columns // self.group

    @property
    def row_bytes(self) -> int:
        """Of 16 rows."""
        return self.num_tiles * self.tile_bytes

    @property
    def grid_bytes(self) -> int:
        """Of one copy of the grid."""
        return 0 if self.grid is None else 4 << self.grid.bits

    def grid_copies(self, nbytes: int) -> int:
        """How many are worth having in so many bytes, a power of two: one per lane that looks up a point of its own, at
        most."""
        if self.grid is None:
            return 1
        most = max(1, min(128 // self.grid.lanes, nbytes // self.grid_bytes))
        return 1 << (most.bit_length() - 1)

    @property
    def factor(self) -> float:
        """What kernels' words are to be multiplied by to be codes."""
        return 256.0 if self.code == "e4m3" else 2.0 ** (self.bits - 8)


# codes


def split_rows(values: NDArray[Any], tiling: Tiling) -> NDArray[Any]:
    """[n, up to K] -> [row tile, tile, slice, lane, word, byte], zeros where the matrix ends."""
    columns = tiling.num_tiles * tiling.columns
    padded = np.zeros((align_up(len(values), TILE_ROWS), columns), values.dtype)
    width = min(values.shape[1], columns)
    padded[: len(values), :width] = values[:, :width]
    split = padded.reshape(-1, 2, 8, tiling.num_tiles, tiling.slices, 4, 4, 4)  # tile h g chunk slice i t b
    split = split.transpose(0, 3, 4, 2, 6, 5, 1, 7)
    return np.ascontiguousarray(split).reshape(*split.shape[:3], 32, 8, 4)


def join_rows(words: NDArray[Any], tiling: Tiling) -> NDArray[Any]:
    """The inverse of split_rows.   -> [n, K] with padding"""
    split = words.reshape(*words.shape[:2], tiling.slices, 8, 4, 4, 2, 4)  # row chunk slice g t i h b
    return split.transpose(0, 6, 3, 1, 2, 5, 4, 7).reshape(words.shape[0] * TILE_ROWS, -1)


def _vectors(x: NDArray[Any]) -> U8Array:
    """[row tile, tile, slice, owner, ...] -> bytes [row tile, tile, owner, width]."""
    moved = np.ascontiguousarray(np.moveaxis(x, 2, 3))
    return moved.reshape(*moved.shape[:3], -1).view(np.uint8)


def store_codes(tiles: U8Array, codes: U8Array, tiling: Tiling) -> None:
    """codes: bytes [n, K], already at the top of their bytes; of a table: its places."""
    word = split_rows(codes, tiling)
    base, more = tiling.planes["base"], tiling.planes.get("more")
    if tiling.code == "table" and len(tiling.table) == 2:
        base.store(tiles, _vectors(np.bitwise_or.reduce(_u8(word << np.arange(8, dtype=np.uint8)[:, None]), axis=-2)))
        return
    if tiling.code == "table" and len(tiling.table) == 4:
        base.store(tiles, _vectors(_pairs(word, 0)))
        return
    if tiling.code == "table":
        u = word.reshape(*word.shape[:4], 4, 8).astype(np.uint32)  # a word of h = 0, then one of h = 1
        base.store(tiles, _vectors(_merge(u, 4 * np.arange(8)).astype("<u4")))
        return
    if tiling.bits == 8:
        base.store(tiles, _vectors(word))
    elif tiling.bits in (2, 3):
        base.store(tiles, _vectors(_pairs(word, 6)))
    elif tiling.bits > 3:
        pair = word.reshape(*word.shape[:4], 4, 2, 4)
        base.store(tiles, _vectors(_u8((pair[..., 0, :] & 0xF0) | (pair[..., 1, :] >> 4))))
    if more is None:
        return
    if tiling.bits == 6:
        more.store(tiles, _vectors(_pairs(word, 2)))
    else:
        bit = _u8((word >> (8 - tiling.bits) & 1) << np.arange(8, dtype=np.uint8)[:, None])
        more.store(tiles, _vectors(np.bitwise_or.reduce(bit, axis=-2)))


def load_codes(tiles: U8Array, tiling: Tiling) -> F32Array:
    """float32 [n, K] with padding."""
    if tiling.grid is not None:
        return _load_grid(tiles, tiling, tiling.grid)
    base = tiling.planes["base"].load(tiles)
    lead = (*tiles.shape[:2], 32, tiling.slices)
    if tiling.code == "table":
        if len(tiling.table) == 2:
            places = _u8(base.reshape(*lead, 1, 4) >> np.arange(8, dtype=np.uint8)[:, None] & 1)
        elif len(tiling.table) == 4:
            places = _unpairs(base.reshape(*lead, 2, 4), 0)
        else:
            nibbles = base.reshape(*lead, 16)
            places = np.stack([nibbles & np.uint8(15), nibbles >> np.uint8(4)], axis=-1).reshape(*lead, 8, 4)
        return join_rows(np.moveaxis(np.array(tiling.table, np.float32)[places], 3, 2), tiling)
    if tiling.bits == 8:
        words = base.reshape(*lead, 8, 4)
    elif tiling.bits in (2, 3):
        words = _unpairs(base.reshape(*lead, 2, 4), 6)
    else:
        nibbles = base.reshape(*lead, 4, 1, 4)
        words = _u8(np.concatenate([nibbles & 0xF0, nibbles << 4], axis=-2).reshape(*lead, 8, 4))
    if "more" in tiling.planes:
        more = tiling.planes["more"].load(tiles)
        if tiling.bits == 6:
            words = words | _unpairs(more.reshape(*lead, 2, 4), 2)
        else:
            bit = _u8(more.reshape(*lead, 1, 4) >> np.arange(8, dtype=np.uint8)[:, None] & 1)
            words = _u8(words | bit << (8 - tiling.bits))
    codes = np.ascontiguousarray(join_rows(np.moveaxis(words, 3, 2), tiling))
    if tiling.code == "e4m3":
        return np.asarray(E4M3_VALUES[codes], np.float32)
    return (codes.view(np.int8) >> (8 - tiling.bits)).astype(np.float32) + np.float32(tiling.zero)


# grids


def store_grid(tiles: U8Array, parts: GridParts, n: int, tiling: Tiling) -> None:
    code = tiling.grid
    assert code is not None
    fields = parts.index if parts.minus is None else parts.index | parts.minus.astype(np.uint16) << np.uint16(code.bits)
    points = _split_points(fields.reshape(n, -1), tiling, code.lanes)
    order = np.ascontiguousarray(np.moveaxis(points, 2, 3))  # row tile, tile, owner, slice, word
    bit = (order.reshape(*order.shape[:3], -1, 1) >> np.arange(code.field, dtype=np.uint16)).astype(np.uint8)
    stream = np.packbits((bit & np.uint8(1)).reshape(*order.shape[:3], -1), axis=-1, bitorder="little")
    width = tiling.planes["base"].width
    tiling.planes["base"].store(tiles, np.ascontiguousarray(stream[..., :width]))
    if "high" in tiling.planes:
        tiling.planes["high"].store(tiles, np.ascontiguousarray(stream[..., width:]))
    if parts.signs is not None:
        _store_signs(tiles, parts, n, tiling)


def _store_signs(tiles: U8Array, parts: GridParts, n: int, tiling: Tiling) -> None:
    assert parts.signs is not None and tiling.grid is not None
    bit = parts.signs[..., None] >> np.arange(8, dtype=np.uint8) & np.uint8(1)
    word = split_rows(bit.reshape(n, -1), tiling)
    flat = word.reshape(*word.shape[:4], 32).astype(np.uint32)
    places = sign_places(tiling.grid.lanes).reshape(-1)
    tiling.planes["signs"].store(tiles, _vectors(_merge(flat, places).astype("<u4")))


def sign_places(lanes: int) -> NDArray[np.intp]:
    """Bit of a slice's sign word, by word and byte [8, 4]: where one shift moves a word's four signs into place."""
    word, byte = np.arange(8)[:, None], np.arange(4)[None]
    return np.asarray(8 * byte + word if lanes == 4 else 4 * byte + word % 4 + 16 * (word // 4))


def _split_points(x: NDArray[Any], tiling: Tiling, lanes: int) -> NDArray[Any]:
    """A number per grid point.   [n, points] -> [row tile, tile, slice, owner, word]"""
    padded = np.zeros((align_up(len(x), TILE_ROWS), x.shape[1]), x.dtype)
    padded[: len(x)] = x
    split = padded.reshape(-1, 2, 8, tiling.num_tiles, tiling.slices, 4, 16 // lanes)  # tile h g chunk slice i p
    split = split.transpose(0, 3, 4, 2, 6, 5, 1)
    return np.ascontiguousarray(split).reshape(*split.shape[:3], 8 * (16 // lanes), 8)


def _load_grid(tiles: U8Array, tiling: Tiling, code: GridCode) -> F32Array:
    owners, planes = 8 * (16 // code.lanes), tiling.planes
    lead = (*tiles.shape[:2], owners, tiling.slices)
    stream = np.concatenate([planes[name].load(tiles) for name in ("base", "high") if name in planes], axis=-1)
    bit = np.unpackbits(stream, axis=-1, bitorder="little").astype(np.uint32)
    field = _merge(bit.reshape(*lead, 8, code.field), np.arange(code.field))[..., 0]
    index = np.asarray(field & np.uint32((1 << code.bits) - 1))
    minus = np.asarray(field >> np.uint32(code.bits), np.uint32)
    words = code.words()[index]
    if code.lanes == 4:
        value = np.ascontiguousarray(words).view(np.int8).reshape(*lead, 8, 4).astype(np.float32)
    else:
        places = words[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & np.uint32(15)
        value = np.array(code.levels, np.float32)[places]  # [.., owner, slice, word, 8]: a lane has one half
        if not code.has_signs:
            value = 8 * value + np.float32(1) - 2 * minus[..., None].astype(np.float32)
        halves = value.reshape(*tiles.shape[:2], 8, 2, tiling.slices, 8, 2, 4)  # g p slice word half byte
        value = halves.transpose(0, 1, 2, 3, 6, 4, 5, 7)
    value = value.reshape(*tiles.shape[:2], 32, tiling.slices, 8, 4)
    if code.has_signs:
        signs = planes["signs"].load(tiles).view("<u4").reshape(*tiles.shape[:2], 32, tiling.slices, 1, 1)
        turned = signs >> sign_places(code.lanes).astype(np.uint32) & np.uint32(1)
        value = value * (1 - 2 * turned.astype(np.float32))
    return join_rows(np.moveaxis(value, 3, 2), tiling).astype(np.float32)


# scales


def store_scales(tiles: U8Array, name: str, words: NDArray[Any], groups: int, tiling: Tiling) -> None:
    """words: [n, groups in a row] -> vectors [group][h] of each g; a nibble each where the plane has half the bytes."""
    plane, n = tiling.planes[name], len(words)
    padded = np.zeros((align_up(n, TILE_ROWS), tiling.num_tiles * groups), words.dtype)
    width = min(words.shape[1], padded.shape[1])
    padded[:n, :width] = words[:, :width]
    split = padded.reshape(-1, 2, 8, tiling.num_tiles, groups).transpose(0, 3, 2, 4, 1)  # tile chunk g group h
    if plane.width == groups:
        split = split[..., 0] | split[..., 1] << 4
    plane.store(tiles, np.ascontiguousarray(split).view(np.uint8).reshape(*split.shape[:3], -1))


def store_divisors(tiles: U8Array, divisor: F32Array, tiling: Tiling) -> None:
    """divisor: [n], the same for the rows of a tile."""
    of_tiles = np.ascontiguousarray(divisor[::TILE_ROWS, None].repeat(tiling.num_tiles, axis=1), "<f4")
    tiling.planes["divisor"].store(tiles, of_tiles.view(np.uint8).reshape(*tiles.shape[:2], 1, 4))


def load_scales(tiles: U8Array, name: str, kind: str, tiling: Tiling) -> F32Array:
    """[n, groups in a row], without the divisor."""

    def rows(plane: str, dtype: str) -> NDArray[Any]:
        words = tiling.planes[plane].load(tiles).view(dtype)
        if kind in ("nibble", "sub4") and dtype == "u1":
            words = np.stack([words & 15, words >> 4], axis=-1)
        words = words.reshape(*words.shape[:3], -1, 2)  # row tile, tile, g, group, h
        return words.transpose(0, 4, 2, 1, 3).reshape(tiles.shape[0] * TILE_ROWS, -1)

    match kind:
        case "bf16":
            return bf16_to_f32(np.ascontiguousarray(rows(name, "<u2")))
        case "e8m0":
            return np.ldexp(np.float32(1), rows(name, "u1").astype(np.int32) - 127).astype(np.float32)
        case "e8m0_half":
            return np.ldexp(np.float32(1), rows(name, "u1").astype(np.int32) - 128).astype(np.float32)
        case "ue4m3_half":
            word = rows(name, "u1") & np.uint8(127)
            return np.where(word == 127, np.float32(0), E4M3_VALUES[word] * np.float32(0.5)).astype(np.float32)
        case "e4m3":
            return np.asarray(E4M3_VALUES[rows(name, "u1")] * np.float32(0.5), np.float32)
    value = rows(name, "<f2").astype(np.float32)
    if kind == "sub":
        value = np.repeat(value, tiling.groups, axis=1) * rows(f"{name}_sub", "i1").astype(np.float32)
    elif kind == "sub4":
        value = np.repeat(value, tiling.groups, axis=1) * rows(f"{name}_sub", "u1").astype(np.float32)
    elif kind == "nibble":
        assert tiling.grid is not None
        odd = 2 * rows(f"{name}_sub", "u1").astype(np.float32) + 1
        value = np.repeat(value, tiling.groups, axis=1) * (odd * np.float32(2.0**-tiling.grid.shift))
    return value


def _u8(x: NDArray[Any]) -> U8Array:
    """The stubs lose the width of shifted bytes; the arrays do not."""
    return x


def _merge(fields: NDArray[np.uint32], places: NDArray[Any]) -> NDArray[np.uint32]:
    """Numbers of the last axis at bits `places` of one."""
    return np.asarray(np.bitwise_or.reduce(fields << places.astype(np.uint32), axis=-1))[..., None]


def _pairs(words: U8Array, shift: int) -> U8Array:
    """Two bits of each byte of eight words, in two words.   [..., 8, 4] -> [..., 2, 4]"""
    two = _u8((words >> shift & 3).reshape(*words.shape[:-2], 2, 4, 4))
    return _u8(np.bitwise_or.reduce(two << (2 * np.arange(4, dtype=np.uint8))[:, None], axis=-2))


def _unpairs(pairs: U8Array, shift: int) -> U8Array:
    two = _u8(pairs[..., :, None, :] >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3)
    return (two << np.uint8(shift)).reshape(*pairs.shape[:-2], 8, 4)
