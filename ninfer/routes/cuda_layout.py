"""How weights lie in the memory of a GPU.

Plain formats stay as stored. Every format of codes and scales becomes tiles: 16 rows by `columns` columns, a tile's
bytes being contiguous, tiles running along K first. A tile has planes, each a vector per lane or per row pair, cut
into 16-byte pieces (piece-major), so that a warp loads whole lines and each lane finds tensor-core operands.

With g = lane / 4 and t = lane % 4, a lane owns of each 64-column slice the columns 16 i + 4 t + b (i, b < 4) of rows
g and g + 8 (h = 0, 1): eight words of four codes, word 2 i + h. A code of n bits is moved to the top of its byte, so
that the word times 2^(n-8) is the code, in two's complement, and unpacking is a shift and a mask:
    n = 4, 5, 6   plane "base": the top four bits of words 2 i (high nibble) and 2 i + 1 (low nibble) in u32 i
    n = 5         plane "more": bit w of each byte belongs to word w
    n = 6         plane "more": bits 2 (w % 4) of each byte of u32 w / 4 belong to word w
    n = 8         plane "base": the words themselves
    n = 2         plane "base": bits 2 (w % 4) of each byte of u32 w / 4 belong to word w
Scales are vectors per g: [group][h]. Where a format has a factor per 256 values and small integers per group, both are
kept. Codes that are not centred (0 .. 2^n - 1) are shifted by `zero`, and the group's minimum grows by zero * d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ninfer.errors import ArtifactError
from ninfer.formats.bits import Bits, F32Array, Scale, Signed, Table, Trits, U8Array
from ninfer.formats.quant import QuantFormat, align_up

TILE_ROWS = 16
SLICE = 64

Repack = Callable[[U8Array, Sequence[int]], U8Array]  # (bytes as stored, shape) -> bytes as kernels read them


@frozen
class TilePlane:
    """Vectors of `width` bytes for each of `owners` lanes or row pairs, in pieces of at most 16 bytes."""

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
    """The tiles of a matrix of given row length."""

    bits: int
    zero: int
    group: int
    slices: int  # of 64 columns in a tile
    num_tiles: int  # along K
    d_kind: str  # "f16", "f32", or "sub": an f16 per row and tile times an int8 per group
    m_kind: str  # the same, or "" for none
    m_sign: int
    planes: Mapping[str, TilePlane]
    tile_bytes: int

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


def _kind(scale: Scale | None) -> str:
    if scale is None:
        return ""
    if scale.sub is not None:
        return "sub"
    return "f16" if scale.kind == "f16" else "f32"


@frozen
class DeviceLayout:
    """Of one format. tiled: False for plain formats, and for grids, which no GPU route reads."""

    format: QuantFormat
    tiled: bool
    bits: int = 0
    zero: int = 0
    d_kind: str = ""
    m_kind: str = ""
    _tilings: dict[int, Tiling] = field(factory=dict, eq=False, repr=False)

    def tiling(self, k: int) -> Tiling:
        if k not in self._tilings:
            self._tilings[k] = self._tile(k)
        return self._tilings[k]

    def _tile(self, k: int) -> Tiling:
        fmt = self.format
        least = max(1, fmt.group // SLICE, 4 if "sub" in (self.d_kind, self.m_kind) else 1, 2 if self.bits == 2 else 1)
        slices = next((s for s in (4, 2, 1) if s >= least and align_up(k, SLICE) % (s * SLICE) == 0), least)
        groups = slices * SLICE // fmt.group
        planes: dict[str, TilePlane] = {}
        at = 0

        def plane(name: str, owners: int, width: int) -> None:
            nonlocal at
            planes[name] = TilePlane(name, owners, width, at)
            at += owners * width

        plane("base", 32, slices * {2: 8, 8: 32}.get(self.bits, 16))
        if self.bits in (5, 6):
            plane("more", 32, slices * (self.bits - 4) * 4)
        for name, kind in (("d", self.d_kind), ("m", self.m_kind)):
            if kind:
                plane(name, 8, {"f16": 4 * groups, "f32": 8 * groups, "sub": 4}[kind])
            if kind == "sub":
                plane(f"{name}_sub", 8, 2 * groups)
        num_tiles = align_up(k, slices * SLICE) // (slices * SLICE)
        sign = -1 if fmt.m is not None and fmt.m.negate else 1
        return Tiling(
            self.bits, self.zero, fmt.group, slices, num_tiles, self.d_kind, self.m_kind, sign, planes, align_up(at, 16)
        )

    def nbytes(self, shape: Sequence[int]) -> int:
        if not self.tiled:
            return self.format.nbytes(shape)
        n, k = prod(shape[:-1]), shape[-1]
        return align_up(n, TILE_ROWS) // TILE_ROWS * self.tiling(k).row_bytes

    def repack(self, raw: U8Array, shape: Sequence[int]) -> U8Array:
        """Bytes of the file -> bytes on the device."""
        if not self.tiled:
            return raw
        n, k = prod(shape[:-1]), shape[-1]
        out = np.zeros(self.nbytes(shape), np.uint8).reshape(-1, self.tiling(k).row_bytes)
        step = max(TILE_ROWS, (1 << 22) // max(k, 1) // TILE_ROWS * TILE_ROWS)
        for r in range(0, n, step):
            count = min(step, n - r)
            part = self.format.slice_rows(raw, (n, k), r, count)
            tiles = out[r // TILE_ROWS : align_up(r + count, TILE_ROWS) // TILE_ROWS]
            self._repack_rows(part, count, k, tiles)
        return out.reshape(-1)

    def _repack_rows(self, raw: U8Array, n: int, k: int, out: U8Array) -> None:
        fmt, tiling = self.format, self.tiling(k)
        fields = fmt.fields(raw, (n, k))
        assert fmt.code is not None and fmt.d is not None
        codes = fmt.code.read(fields, fmt.block).reshape(n, -1)
        tiles = out.reshape(len(out), tiling.num_tiles, tiling.tile_bytes)
        u = self._words(codes.astype(np.int16) - self.zero, k)
        self._store_codes(tiles, u, tiling)
        for name, kind, scale in (("d", self.d_kind, fmt.d), ("m", self.m_kind, fmt.m)):
            if scale is None:
                continue
            per_block = fmt.block // fmt.group
            if kind == "sub":
                assert scale.sub is not None
                super_scale = np.ascontiguousarray(fields[scale.field]).view("<u2").reshape(n, -1)
                self._store_scales(tiles, f"{name}", super_scale, 1, tiling)
                sub = scale.sub.read(fields, per_block).view(np.uint8).reshape(n, -1)
                self._store_scales(tiles, f"{name}_sub", sub, tiling.groups, tiling)
            else:
                value = scale.read(fields, per_block).reshape(n, -1)
                words = value.astype("<f2").view("<u2") if kind == "f16" else value.view("<u4")
                self._store_scales(tiles, name, words, tiling.groups, tiling)

    def _words(self, codes: NDArray[np.int16], k: int) -> U8Array:
        """Codes moved to the top of their bytes.   [n, K] -> [row tiles, tiles, slices, g, t, i, h, b]"""
        tiling, n = self.tiling(k), len(codes)
        columns = tiling.num_tiles * tiling.columns
        padded = np.zeros((align_up(n, TILE_ROWS), columns), np.uint8)
        width = min(codes.shape[1], columns)
        padded[:n, :width] = (codes[:, :width] << (8 - self.bits)).astype(np.uint8)
        split = padded.reshape(-1, 2, 8, tiling.num_tiles, tiling.slices, 4, 4, 4)  # tile h g chunk slice i t b
        return np.ascontiguousarray(split.transpose(0, 3, 4, 2, 6, 5, 1, 7))

    def _store_codes(self, tiles: U8Array, u: U8Array, tiling: Tiling) -> None:
        rows, chunks, slices = u.shape[:3]
        per_lane = u.reshape(rows, chunks, slices, 32, 4, 2, 4)  # i h b

        def vectors(x: U8Array) -> U8Array:
            """[rows, chunks, slices, lane, ...] -> [rows, chunks, lane, width]."""
            return np.moveaxis(x, 2, 3).reshape(rows, chunks, 32, -1)

        base, more = tiling.planes["base"], tiling.planes.get("more")
        if self.bits == 8:
            base.store(tiles, vectors(per_lane))
            return
        word = per_lane.reshape(rows, chunks, slices, 32, 8, 4)
        if self.bits == 2:
            base.store(tiles, vectors(_pairs(word, 6)))
            return
        nibbles = _u8((per_lane[..., 0, :] & 0xF0) | (per_lane[..., 1, :] >> 4))
        base.store(tiles, vectors(nibbles))
        if more is None:
            return
        if self.bits == 6:
            more.store(tiles, vectors(_pairs(word, 2)))
        else:
            bit = _u8((word >> 3 & 1) << np.arange(8, dtype=np.uint8)[:, None])
            more.store(tiles, vectors(np.bitwise_or.reduce(bit, axis=-2)))

    def _store_scales(self, tiles: U8Array, name: str, words: NDArray[Any], groups: int, tiling: Tiling) -> None:
        """words: [n, groups in a row] -> vectors [group][h] of each g."""
        plane, n = tiling.planes[name], len(words)
        padded = np.zeros((align_up(n, TILE_ROWS), tiling.num_tiles * groups), words.dtype)
        width = min(words.shape[1], padded.shape[1])
        padded[:n, :width] = words[:, :width]
        split = padded.reshape(-1, 2, 8, tiling.num_tiles, groups).transpose(0, 3, 2, 4, 1)  # tile chunk g group h
        plane.store(tiles, np.ascontiguousarray(split).view(np.uint8).reshape(*split.shape[:3], -1))

    def unpack(self, packed: U8Array, shape: Sequence[int]) -> F32Array:
        """The matrix's values from the device's bytes: what the kernels' decoders are checked against."""
        if not self.tiled:
            return self.format.unpack(packed, shape)
        n, k = prod(shape[:-1]), shape[-1]
        tiling = self.tiling(k)
        tiles = packed.reshape(-1, tiling.num_tiles, tiling.tile_bytes)
        values = self._load_codes(tiles, tiling).astype(np.float32) + np.float32(self.zero)
        values = values.reshape(values.shape[0], -1, tiling.group)
        d = self._load_scales(tiles, "d", self.d_kind, tiling)
        values = values * d[:, :, None]
        if self.m_kind:
            values += np.float32(tiling.m_sign) * self._load_scales(tiles, "m", self.m_kind, tiling)[:, :, None]
        return values.reshape(len(values), -1)[:n, :k].reshape(tuple(shape))

    def _load_codes(self, tiles: U8Array, tiling: Tiling) -> NDArray[np.int8]:
        base = tiling.planes["base"].load(tiles)
        lead = (*tiles.shape[:2], 32, tiling.slices)
        if self.bits == 8:
            words = base.reshape(*lead, 8, 4)
        elif self.bits == 2:
            words = _unpairs(base.reshape(*lead, 2, 4), 6)
        else:
            nibbles = base.reshape(*lead, 4, 1, 4)
            words = _u8(np.concatenate([nibbles & 0xF0, nibbles << 4], axis=-2).reshape(*lead, 8, 4))
        if "more" in tiling.planes:
            more = tiling.planes["more"].load(tiles)
            if self.bits == 6:
                words = words | _unpairs(more.reshape(*lead, 2, 4), 2)
            else:
                bit = _u8(more.reshape(*lead, 1, 4) >> np.arange(8, dtype=np.uint8)[:, None] & 1)
                words = _u8(words | bit << 3)
        split = words.reshape(*tiles.shape[:2], 8, 4, tiling.slices, 4, 2, 4)  # row chunk g t slice i h b
        codes = split.transpose(0, 6, 2, 1, 4, 5, 3, 7).reshape(tiles.shape[0] * TILE_ROWS, -1)
        return np.ascontiguousarray(codes).view(np.int8) >> (8 - self.bits)

    def _load_scales(self, tiles: U8Array, name: str, kind: str, tiling: Tiling) -> F32Array:
        def rows(plane: str, dtype: str) -> NDArray[Any]:
            words = tiling.planes[plane].load(tiles).view(dtype)
            words = words.reshape(*words.shape[:3], -1, 2)  # row tile, tile, g, group, h
            return words.transpose(0, 4, 2, 1, 3).reshape(tiles.shape[0] * TILE_ROWS, -1)

        value = rows(name, "<f4" if kind == "f32" else "<f2").astype(np.float32)
        if kind == "sub":
            value = np.repeat(value, tiling.groups, axis=1) * rows(f"{name}_sub", "i1").astype(np.float32)
        return value


def _u8(x: NDArray[Any]) -> U8Array:
    """The stubs lose the width of shifted bytes; the arrays do not."""
    return x


def _pairs(words: U8Array, shift: int) -> U8Array:
    """Two bits of each byte of eight words, in two words.   [..., 8, 4] -> [..., 2, 4]"""
    two = _u8((words >> shift & 3).reshape(*words.shape[:-2], 2, 4, 4))
    return _u8(np.bitwise_or.reduce(two << (2 * np.arange(4, dtype=np.uint8))[:, None], axis=-2))


def _unpairs(pairs: U8Array, shift: int) -> U8Array:
    two = _u8(pairs[..., :, None, :] >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3)
    return (two << np.uint8(shift)).reshape(*pairs.shape[:-2], 8, 4)


@cache
def layout_of(fmt: QuantFormat) -> DeviceLayout:
    if fmt.is_plain or fmt.code is None or fmt.d is None:
        return DeviceLayout(fmt, False)
    if isinstance(fmt.code, Trits):
        return DeviceLayout(fmt, True, 2, 0, _kind(fmt.d), _kind(fmt.m))
    assert isinstance(fmt.code, Bits)
    code = fmt.code.map
    low, high = code.low, code.high
    if isinstance(code, Signed):
        low = -(1 << (code.bits - 1))
    zero = 0
    if fmt.m is not None:  # codes from 0 up, to be centred
        zero = (high + 1) // 2
        low, high = low - zero, high - zero
    if isinstance(code, Table) and (low, high) == (-1, 1):
        low, high = -2, 1
    bits = next(n for n in (2, 4, 5, 6, 8) if low >= -(1 << (n - 1)) and high < 1 << (n - 1))
    return DeviceLayout(fmt, True, bits, zero, _kind(fmt.d), _kind(fmt.m))


def device_layout(fmt: QuantFormat) -> Repack:
    return layout_of(fmt).repack


def tiling_of(fmt: QuantFormat, k: int) -> Tiling:
    """Raises ArtifactError for a format that is not tiled."""
    layout = layout_of(fmt)
    if not layout.tiled:
        raise ArtifactError(f"{fmt.name} matrices are not tiled on a GPU")
    return layout.tiling(k)
