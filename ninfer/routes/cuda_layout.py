"""How weights lie in the memory of a GPU.

Plain formats stay as stored. Every other format becomes tiles: 16 rows by `columns` columns, a tile's bytes being
contiguous, tiles running along K first. A tile has planes, each a vector per lane, pair of lanes or row pair, cut into
16-byte pieces (piece-major), so that a warp loads whole lines and each lane finds tensor-core operands.

With g = lane / 4 and t = lane % 4, a lane owns of each 64-column slice the columns 16 i + 4 t + b (i, b < 4) of rows
g and g + 8 (h = 0, 1): eight words of four codes, word 2 i + h. An integer code of n bits is moved to the top of its
byte, so that the word times 2^(n-8) is the code, in two's complement, and unpacking is a shift and a mask:
    n = 4, 5, 6   plane "base": the top four bits of words 2 i (high nibble) and 2 i + 1 (low nibble) in u32 i
    n = 3, 5      plane "more": bit w of each byte belongs to word w
    n = 6         plane "more": bits 2 (w % 4) of each byte of u32 w / 4 belong to word w
    n = 8         plane "base": the words themselves
    n = 2, 3      plane "base": bits 2 (w % 4) of each byte of u32 w / 4 belong to word w
Other codes:
    table of 16   plane "base": u32 i has the places of word 2 i's four codes as nibbles, then those of word 2 i + 1
    table of 4    plane "base": as n = 2, the places;   of 2: bit w of each byte belongs to word w
    e4m3          plane "base": the words themselves
    grid          the indices of a tile as one stream of bits, word by word, slice by slice, in plane "base", of which
                  the last bytes are plane "high"; above it the sign of its values' offset, where they have one. Of
                  grids of 8 values two lanes share a stream, the even one has the first four. Plane "signs": a u32 per
                  slice, a bit per value (`sign_places`)
Scales are vectors per g: [group][h]. Where a format has a factor per 256 values and small integers per group, both are
kept. Codes that are not centred (0 .. 2^n - 1) are shifted by `zero`, and the group's minimum grows by zero * d.

A tile has no more bits than the file but for these: the eighth sign of iq2_xxs, iq2_xs and iq3_xxs, which is the parity
of the others, is written out; so is the offset's sign of iq1_s per 8 values; tq1_0's digits take two bits each; scales
of three or six bits take four or eight; rows with one scale repeat it in every tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import numpy as np
from attrs import field, frozen

from ninfer.errors import ArtifactError
from ninfer.formats.bits import Bits, F32Array, Offset, Scale, Signed, Table, Trits, U8Array
from ninfer.formats.grid_parts import GRID_CODES, GridCode
from ninfer.formats.quant import FloatFormat, QuantFormat, align_up
from ninfer.routes.cuda_tiles import (
    SCALE_BYTES,
    CodeKind,
    TilePlane,
    load_codes,
    load_scales,
    store_codes,
    store_divisors,
    store_grid,
    store_scales,
)
from ninfer.routes.cuda_tiles import SLICE as SLICE
from ninfer.routes.cuda_tiles import TILE_ROWS as TILE_ROWS
from ninfer.routes.cuda_tiles import Tiling as Tiling

Repack = Callable[[U8Array, Sequence[int]], U8Array]  # (bytes as stored, shape) -> bytes as kernels read them
_E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _kind(scale: Scale | None) -> str:
    if scale is None:
        return ""
    if scale.sub is None:
        return scale.kind
    return "sub4" if isinstance(scale.sub.map, Offset) and (scale.sub.map.bits, scale.sub.map.zero) == (4, 0) else "sub"


@frozen
class DeviceLayout:
    """Of one format. tiled: False for plain formats. group 0: a scale per row."""

    format: QuantFormat
    tiled: bool
    bits: int = 0
    zero: int = 0
    d_kind: str = ""
    m_kind: str = ""
    code: CodeKind = "int"
    group: int = 0
    table: tuple[int, ...] = ()
    grid: GridCode | None = None
    _tilings: dict[int, Tiling] = field(factory=dict, eq=False, repr=False)

    def tiling(self, k: int) -> Tiling:
        if k not in self._tilings:
            self._tilings[k] = self._tile(k)
        return self._tilings[k]

    def _tile(self, k: int) -> Tiling:
        fmt = self.format
        whole = not {self.d_kind, self.m_kind}.isdisjoint(("sub", "sub4", "nibble"))
        small = self.bits in (2, 3) or len(self.table) in (2, 4)
        least = max(1, self.group // SLICE, 4 if whole else 1, 2 if small else 1)
        slices = next((s for s in (4, 2, 1) if s >= least and align_up(k, SLICE) % (s * SLICE) == 0), least)
        group = self.group or slices * SLICE
        groups = slices * SLICE // group
        planes: dict[str, TilePlane] = {}
        at = 0

        def plane(name: str, owners: int, width: int) -> None:
            nonlocal at
            planes[name] = TilePlane(name, owners, width, at)
            at += owners * width

        if self.grid is not None:
            owners, high = 128 // self.grid.lanes, self.grid.field - 8
            plane("base", owners, 8 * slices)
            if self.grid.has_signs:
                plane("signs", 32, 4 * slices)
            if high:
                plane("high", owners, slices * high)
        else:
            width = {2: 4, 4: 8, 16: 16}[len(self.table)] if self.table else {2: 8, 3: 8, 8: 32}.get(self.bits, 16)
            plane("base", 32, slices * width)
            if self.bits in (3, 5, 6):
                plane("more", 32, slices * (8 if self.bits == 6 else 4))
        for name, kind in (("d", self.d_kind), ("m", self.m_kind)):
            if kind in SCALE_BYTES:
                plane(name, 8, SCALE_BYTES[kind] * groups)
            elif kind:
                plane(name, 8, 4)
                plane(f"{name}_sub", 8, 2 * groups if kind == "sub" else groups)
        if self.d_kind == "e4m3":
            plane("divisor", 1, 4)
        num_tiles = align_up(k, slices * SLICE) // (slices * SLICE)
        sign = -1 if fmt.m is not None and fmt.m.negate else 1
        return Tiling(
            self.bits, self.zero, group, slices, num_tiles, self.d_kind, self.m_kind, sign, planes, align_up(at, 16),
            self.code, self.table, self.grid,
        )  # fmt: skip

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
        tiling = self.tiling(k)
        out = np.zeros(self.nbytes(shape), np.uint8).reshape(-1, tiling.num_tiles, tiling.tile_bytes)
        fields = self.format.fields(raw, (n, k))
        step = max(TILE_ROWS, (1 << 22) // max(k, 1) // TILE_ROWS * TILE_ROWS)
        for r in range(0, n, step):
            count = min(step, n - r)
            part = {name: _rows(f, n, r, count) for name, f in fields.items()}
            tiles = out[r // TILE_ROWS : align_up(r + count, TILE_ROWS) // TILE_ROWS]
            if self.grid is not None:
                self._repack_grid(part["bytes"], count, tiles, tiling)
            elif isinstance(self.format, FloatFormat):
                self._repack_floats(part, tiles, tiling)
            else:
                self._repack_codes(part, count, tiles, tiling)
        return out.reshape(-1)

    def _repack_codes(self, fields: dict[str, U8Array], n: int, tiles: U8Array, tiling: Tiling) -> None:
        fmt = self.format
        assert fmt.code is not None and fmt.d is not None
        if self.code == "table":
            codes = fmt.code.words(fields, fmt.block)
        else:
            codes = ((fmt.code.read(fields, fmt.block).astype(np.int16) - self.zero) << (8 - self.bits)).astype(
                np.uint8
            )
        store_codes(tiles, codes.reshape(n, -1), tiling)
        for name, kind, scale in (("d", self.d_kind, fmt.d), ("m", self.m_kind, fmt.m)):
            if scale is None:
                continue
            per_block = fmt.block // fmt.group
            words = fields[scale.field] if kind in ("e8m0_half", "ue4m3_half") else None
            if kind in ("sub", "sub4"):
                assert scale.sub is not None
                words = scale.sub.read(fields, per_block).view(np.uint8)
                super_scale = np.ascontiguousarray(fields[scale.field]).view("<u2").reshape(n, -1)
                store_scales(tiles, name, super_scale, 1, tiling)
                name = f"{name}_sub"
            elif words is None:
                store_scales(tiles, name, scale.read(fields, per_block).astype("<f2").view("<u2").reshape(n, -1),
                             tiling.groups, tiling)  # fmt: skip
                continue
            store_scales(tiles, name, words.reshape(n, -1), tiling.groups, tiling)

    def _repack_floats(self, fields: dict[str, U8Array], tiles: U8Array, tiling: Tiling) -> None:
        words, scale = fields["words"], np.ascontiguousarray(fields["scale"])
        if self.code == "table":
            words = np.stack([words & np.uint8(15), words >> np.uint8(4)], axis=-1).reshape(len(words), -1)
        store_codes(tiles, words, tiling)
        if self.group == 0:
            store_scales(tiles, "d", scale.view("<u2").repeat(tiling.num_tiles, axis=1), 1, tiling)
        else:
            store_scales(tiles, "d", scale, tiling.groups, tiling)
        if "divisor" in fields:
            store_divisors(tiles, np.ascontiguousarray(fields["divisor"]).view("<f4")[:, 0], tiling)

    def _repack_grid(self, blocks: U8Array, n: int, tiles: U8Array, tiling: Tiling) -> None:
        assert self.grid is not None
        parts = self.grid.parts(blocks)
        store_grid(tiles, parts, n, tiling)
        store_scales(tiles, "d", parts.d.reshape(n, -1), 1, tiling)
        store_scales(tiles, "d_sub", parts.scale.reshape(n, -1), tiling.groups, tiling)

    def unpack(self, packed: U8Array, shape: Sequence[int]) -> F32Array:
        """The matrix's values from the device's bytes: what the kernels' decoders are checked against."""
        if not self.tiled:
            return self.format.unpack(packed, shape)
        n, k = prod(shape[:-1]), shape[-1]
        tiling = self.tiling(k)
        tiles = packed.reshape(-1, tiling.num_tiles, tiling.tile_bytes)
        values = load_codes(tiles, tiling)
        values = values.reshape(values.shape[0], -1, tiling.group)
        values = values * load_scales(tiles, "d", self.d_kind, tiling)[:, :, None]
        if self.m_kind:
            values += np.float32(tiling.m_sign) * load_scales(tiles, "m", self.m_kind, tiling)[:, :, None]
        if self.d_kind == "e4m3":
            divisor = tiling.planes["divisor"].load(tiles).view("<f4").reshape(len(tiles), -1)
            values = values / divisor[:, :1].repeat(TILE_ROWS, axis=0)[:, :, None]
        return values.reshape(len(values), -1)[:n, :k].reshape(tuple(shape))


def _rows(field: U8Array, n: int, start: int, count: int) -> U8Array:
    """field: [n * blocks of a row, bytes]."""
    each = len(field) // n
    return field[start * each : (start + count) * each]


@cache
def layout_of(fmt: QuantFormat) -> DeviceLayout:
    if fmt.is_plain:
        return DeviceLayout(fmt, False)
    if isinstance(fmt, FloatFormat):
        if fmt.word == "e2m1":
            return DeviceLayout(fmt, True, 8, d_kind="e4m3", code="table", group=fmt.group, table=_E2M1_TWICE)
        return DeviceLayout(
            fmt, True, 8, d_kind=fmt.scale, code="e4m3", group=fmt.group if fmt.layout == "groups" else 0
        )
    if fmt.is_grid:
        grid = GRID_CODES[fmt.name]
        return DeviceLayout(fmt, True, 8, d_kind="nibble", code="grid", group=grid.group, grid=grid)
    assert fmt.code is not None and fmt.d is not None
    kinds = (_kind(fmt.d), _kind(fmt.m))
    if isinstance(fmt.code, Trits):
        return DeviceLayout(fmt, True, 2, 0, *kinds, group=fmt.group)
    assert isinstance(fmt.code, Bits)
    code = fmt.code.map
    low, high = code.low, code.high
    if isinstance(code, Table) or (isinstance(code, Offset) and code.bits == 2 and code.zero):
        table = code.values if isinstance(code, Table) else tuple(u - code.zero for u in range(4))
        return DeviceLayout(fmt, True, 8, 0, *kinds, code="table", group=fmt.group, table=table)
    if isinstance(code, Signed):
        low = -(1 << (code.bits - 1))
    zero = 0
    if fmt.m is not None:  # codes from 0 up, to be centred
        zero = (high + 1) // 2
        low, high = low - zero, high - zero
    bits = next(n for n in (2, 3, 4, 5, 6, 8) if low >= -(1 << (n - 1)) and high < 1 << (n - 1))
    return DeviceLayout(fmt, True, bits, zero, *kinds, group=fmt.group)


def device_layout(fmt: QuantFormat) -> Repack:
    return layout_of(fmt).repack


def tiling_of(fmt: QuantFormat, k: int) -> Tiling:
    """Raises ArtifactError for a format that is not tiled."""
    layout = layout_of(fmt)
    if not layout.tiled:
        raise ArtifactError(f"{fmt.name} matrices are not tiled on a GPU")
    return layout.tiling(k)
