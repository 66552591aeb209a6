"""Weight formats. Each is declared once, as data; sizes, numpy codecs and C decoders are derived.

A matrix is [N, K], K running along a row. Rows are cut into blocks of `block` values; the bytes of a block are the
fields of `record`. In a ggml format blocks lie one after another. In a native format (`split`) each field has a
plane of its own, planes begin at multiples of 256 bytes, and K is padded to a multiple of 128.

All formats but the plain and the grid ones share one view: with g = k // group,
    w[n, k] = d[n, g] * code[n, k] + m[n, g]
in float32, each product rounded; code is an int8 and m is absent in most formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ninfer.errors import ArtifactError
from ninfer.formats import encode, grids
from ninfer.formats.bits import (
    Bits,
    F32Array,
    Fields,
    I8Array,
    Offset,
    Plane,
    Scale,
    Signed,
    Table,
    Trits,
    U8Array,
)
from ninfer.formats.dtypes import BF16, F16, F32, I8, U8, DType, bf16_to_f32, f32_to_bf16
from ninfer.formats.record import Field, Record

PAD_K = 128  # native rows are padded to this many values
PLANE_ALIGN = 256
_SLICE_VALUES = 1 << 20  # codecs work on about so many values at a time


def align_up(x: int, a: int) -> int:
    return -(-x // a) * a


@frozen
class PlaneSpan:
    """A run of bytes in a packed matrix."""

    name: str
    offset: int
    nbytes: int


@frozen(eq=False, repr=False)
class QuantFormat:
    """One way to store a matrix. Compared by identity: there is one value per format, in FORMATS."""

    name: str
    ggml_type: int | None  # id in GGUF files; None for native formats
    block: int
    record: Record  # bytes of one block
    group: int  # values that share d and m
    code: Bits | Trits | None = None  # None: plain values or a grid
    d: Scale | None = None
    m: Scale | None = None
    split: bool = False
    dtype: DType | None = None  # of plain values
    grid: Callable[[U8Array], F32Array] | None = None
    encode: Callable[[F32Array, QuantFormat, Fields], None] | None = None

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    # sizes

    @property
    def block_bytes(self) -> int:
        return self.record.nbytes

    @property
    def is_plain(self) -> bool:
        return self.dtype is not None

    @property
    def is_grid(self) -> bool:
        return self.grid is not None

    @property
    def can_pack(self) -> bool:
        return self.is_plain or self.encode is not None

    def padded_k(self, k: int) -> int:
        return align_up(k, PAD_K) if self.split else k

    def blocks_per_row(self, k: int) -> int:
        """Raises ArtifactError for a row length that the format cannot hold."""
        k = self.padded_k(k)
        if k % self.block:
            raise ArtifactError(f"{self.name} has blocks of {self.block} values: rows of {k} do not divide into them")
        return k // self.block

    def row_bytes(self, k: int) -> int:
        """Bytes of one row, where rows are contiguous: not in native formats."""
        if self.split:
            raise ArtifactError(f"{self.name} keeps codes and scales in separate planes: a row has no single extent")
        return self.blocks_per_row(k) * self.block_bytes

    def planes(self, shape: Sequence[int]) -> tuple[PlaneSpan, ...]:
        """Where each plane lies. A ggml or plain matrix is one plane, named "blocks"."""
        n, k = _matrix(shape)
        count = n * self.blocks_per_row(k)
        if not self.split:
            return (PlaneSpan("blocks", 0, count * self.block_bytes),)
        spans, at = [], 0
        for f in self.record.fields:
            at = align_up(at, PLANE_ALIGN)
            spans.append(PlaneSpan(f.name, at, count * f.nbytes))
            at += count * f.nbytes
        return tuple(spans)

    def nbytes(self, shape: Sequence[int]) -> int:
        last = self.planes(shape)[-1]
        return last.offset + last.nbytes

    def bpw(self, k: int) -> float:
        """Bits per value in rows of k, without the gaps between planes."""
        return 8 * self.blocks_per_row(k) * self.block_bytes / k

    # bytes -> values

    def fields(self, raw: U8Array, shape: Sequence[int]) -> dict[str, U8Array]:
        """Views [N * blocks per row, field bytes] into a packed matrix."""
        raw = raw.reshape(-1)
        spans = self.planes(shape)
        if raw.size != self.nbytes(shape):
            have, want = raw.size, self.nbytes(shape)
            raise ArtifactError(f"a {self.name} matrix {list(shape)} takes {want} bytes, not {have}")
        if self.split:
            return {
                f.name: raw[s.offset : s.offset + s.nbytes].reshape(-1, f.nbytes)
                for f, s in zip(self.record.fields, spans, strict=True)
            }
        blocks, at = raw.reshape(-1, self.block_bytes), 0
        out = {}
        for f in self.record.fields:
            out[f.name] = blocks[:, at : at + f.nbytes]
            at += f.nbytes
        return out

    def groups(self, raw: U8Array, shape: Sequence[int]) -> tuple[I8Array, F32Array, F32Array | None]:
        """Codes int8 [N, K], d and m float32 [N, ceil(K / group)]: the view in the module's docstring."""
        n, k = _matrix(shape)
        if self.code is None or self.d is None:
            raise ArtifactError(f"{self.name} has no codes per group: its values are {self._kind()}")
        fields, per_row = self.fields(raw, shape), self.blocks_per_row(k)
        count, num_groups = self.block // self.group * per_row, -(-k // self.group)
        codes = self.code.read(fields, self.block).reshape(n, -1)[:, :k]
        d = self.d.read(fields, self.block // self.group).reshape(n, count)[:, :num_groups]
        if self.m is None:
            return codes, d, None
        return codes, d, self.m.read(fields, self.block // self.group).reshape(n, count)[:, :num_groups]

    def unpack(self, raw: U8Array, shape: Sequence[int]) -> F32Array:
        """float32 values in the given shape; leading dimensions are rows."""
        n, k = _matrix(shape)
        if self.dtype is not None:
            self.fields(raw, shape)  # checks the size
            values = np.ascontiguousarray(raw.reshape(-1)).view(self.dtype.numpy)
            values = bf16_to_f32(values) if self.dtype is BF16 else values.astype(np.float32)
            return values.reshape(tuple(shape))
        per_row = self.blocks_per_row(k)
        fields = self.fields(raw, shape)
        blocks = raw.reshape(-1, self.block_bytes) if self.grid is not None else None
        out = np.empty((n, k), np.float32)
        step = max(1, _SLICE_VALUES // (per_row * self.block))
        for r in range(0, n, step):
            rows = slice(r * per_row, min(r + step, n) * per_row)
            if self.grid is not None and blocks is not None:
                values = self.grid(blocks[rows])
            else:
                values = self._decode({name: f[rows] for name, f in fields.items()})
            out[r : r + step] = values.reshape(-1, per_row * self.block)[:, :k]
        return out.reshape(tuple(shape))

    def _decode(self, fields: Fields) -> F32Array:
        """[blocks, block]."""
        assert self.code is not None and self.d is not None
        groups = self.block // self.group
        codes = self.code.read(fields, self.block)
        with np.errstate(over="ignore", invalid="ignore"):  # bytes of a damaged file may hold any scale
            values = codes.reshape(len(codes), groups, self.group) * self.d.read(fields, groups)[:, :, None]
            if self.m is not None:
                values += self.m.read(fields, groups)[:, :, None]
        return values.reshape(len(codes), self.block)

    def _kind(self) -> str:
        return "stored as they are" if self.is_plain else "entries of a grid"

    def check(self, raw: U8Array, shape: Sequence[int]) -> None:
        """Raises ArtifactError for bytes that a valid native matrix does not hold: illegal words and scales."""
        fields = self.fields(raw, shape)
        if not self.split or not isinstance(self.code, Bits) or self.d is None:
            return
        scale = np.ascontiguousarray(fields[self.d.field]).view("<u2").reshape(-1)
        if ((scale & 0x7C00) == 0x7C00).any() or (scale == 0x8000).any():
            raise ArtifactError(f"{self.name}: a scale is infinite, NaN or -0")
        words = self.code.words(fields, self.block)
        illegal = self.code.map.illegal if isinstance(self.code.map, Signed) else ()
        if np.isin(words, illegal).any():
            raise ArtifactError(f"{self.name}: the code word {illegal[0]:#x} is not a value")
        if words[scale == 0].any():
            raise ArtifactError(f"{self.name}: a group has scale 0 but codes other than 0")

    # values -> bytes

    def pack(self, x: NDArray[Any]) -> U8Array:
        """The bytes of a matrix (or of rows in any leading shape), uint8 [nbytes]."""
        n, k = _matrix(x.shape)
        values = np.ascontiguousarray(x, np.float32).reshape(n, k)
        if self.dtype is not None:
            if self.dtype is BF16:
                return f32_to_bf16(values).reshape(-1).view(np.uint8)
            with np.errstate(over="ignore"):
                return values.astype(self.dtype.numpy).reshape(-1).view(np.uint8)
        if self.encode is None:
            raise ArtifactError(f"{self.name} can be read but not written; formats that can: {_names(True)}")
        if not np.isfinite(values).all():
            raise ArtifactError(f"{self.name} cannot hold infinities or NaN")
        per_row, raw = self.blocks_per_row(k), np.zeros(self.nbytes((n, k)), np.uint8)
        fields = self.fields(raw, (n, k))
        step = max(1, _SLICE_VALUES // (per_row * self.block))
        for r in range(0, n, step):
            part = values[r : r + step]
            if k % self.block or self.padded_k(k) != k:
                part = np.pad(part, ((0, 0), (0, self.padded_k(k) - k)))
            rows = slice(r * per_row, r * per_row + len(part) * per_row)
            self.encode(part.reshape(-1, self.block), self, {name: f[rows] for name, f in fields.items()})
        return raw

    # rearranging without decoding

    def slice_rows(self, raw: U8Array, shape: Sequence[int], start: int, count: int) -> U8Array:
        """Rows start .. start + count as a matrix of their own; a view where rows are contiguous."""
        if not self.split:
            width = self.row_bytes(_matrix(shape)[1])
            return raw.reshape(-1)[start * width : (start + count) * width]
        return self.gather_rows(raw, shape, np.arange(start, start + count))

    def gather_rows(self, raw: U8Array, shape: Sequence[int], index: NDArray[np.intp]) -> U8Array:
        """Row i of the result is row index[i]."""
        n, k = _matrix(shape)
        per_row = self.blocks_per_row(k)
        out = np.zeros(self.nbytes((len(index), k)), np.uint8)
        target = self.fields(out, (len(index), k))
        for name, source in self.fields(raw, shape).items():
            rows = source.reshape(n, per_row, -1)[index]
            target[name][:] = rows.reshape(len(index) * per_row, -1)
        return out

    def row_spans(self, shape: Sequence[int], start: int, count: int) -> list[tuple[int, int]]:
        """(offset, bytes) of rows start .. start + count in each plane, in the order of the planes."""
        k = _matrix(shape)[1]
        per_row = self.blocks_per_row(k)
        sizes = [f.nbytes for f in self.record.fields] if self.split else [self.block_bytes]
        planes = zip(self.planes(shape), sizes, strict=True)
        return [(span.offset + start * per_row * size, count * per_row * size) for span, size in planes]

    def stack_rows(self, parts: Sequence[tuple[U8Array, Sequence[int]]]) -> U8Array:
        """Matrices (bytes, shape) below each other; each plane of a native format for itself."""
        k = parts[0][1][-1]
        if any(shape[-1] != k for _, shape in parts):
            raise ArtifactError(f"rows of {', '.join(str(shape[-1]) for _, shape in parts)} values cannot be stacked")
        whole = (sum(_matrix(shape)[0] for _, shape in parts), k)
        out = np.zeros(self.nbytes(whole), np.uint8)
        targets, at = self.fields(out, whole), 0
        for raw, shape in parts:
            n = _matrix(shape)[0] * self.blocks_per_row(k)
            for name, source in self.fields(raw, shape).items():
                targets[name][at : at + n] = source
            at += n
        return out

    def can_move_columns(self, width: int) -> bool:
        """Whether runs of `width` columns are whole blocks."""
        return not self.split and width % self.block == 0

    def gather_columns(self, raw: U8Array, shape: Sequence[int], width: int, index: NDArray[np.intp]) -> U8Array:
        """Run i of `width` columns in the result is run index[i]; needs can_move_columns(width)."""
        n, k = _matrix(shape)
        if not self.can_move_columns(width) or k % width:
            raise ArtifactError(f"{self.name}: runs of {width} columns in rows of {k} are not whole blocks")
        runs = raw.reshape(n, k // width, self.row_bytes(width))
        return np.ascontiguousarray(runs[:, index]).reshape(-1)

    # C

    def c_source(self, prefix: str, shape: Sequence[int], qualifier: str = "static inline") -> str:
        """C decoders of one matrix, one value at a time: the plain form that faster kernels are checked against.

        Needs the types u8 .. u64, i8, i32, f32 and the functions f32 f16_to_f32(u16) and f32 bits_to_f32(u32).
            P_at P_locate(const u8 *w, u64 row, u32 block)   pointers to the fields of a block
            i32 P_code(P_at at, u32 e)                       code of value e of the block
            f32 P_d(P_at at, u32 g), P_m(P_at at, u32 g)     of group g of the block
            f32 P_value(const u8 *w, u64 row, u32 k)         compile without fused multiply-add
        """
        if self.code is None or self.d is None:
            raise ArtifactError(f"{self.name} has no derived C decoder: its values are {self._kind()}")
        n, k = _matrix(shape)
        per_row, groups = self.blocks_per_row(k), self.block // self.group
        names = [f.name for f in self.record.fields]
        if self.split:
            spans = self.planes((n, k))
            where = [f"w + {s.offset}u + i * {f.nbytes}u"
                     for f, s in zip(self.record.fields, spans, strict=True)]  # fmt: skip
        else:
            where = [f"w + i * {self.block_bytes}u + {self.record.offset(name)}u" for name in names]
        q, p = qualifier, prefix
        words = {f.name: f.count if f.dtype is not U8 or f.count == groups else 1 for f in self.record.fields}
        lines = [
            f"typedef struct {{ const u8 {', '.join('*' + name for name in names)}; }} {p}_at;",
            f"{q} {p}_at {p}_locate(const u8 *w, u64 row, u32 block) {{",
            f"    u64 i = row * {per_row}u + block;",
            f"    {p}_at at = {{{', '.join(where)}}};",
            "    return at;\n}",
            f"{q} i32 {p}_code({p}_at at, u32 e) {{\n    {self.code.c_body('at', 'e')}\n}}",
            f"{q} f32 {p}_d({p}_at at, u32 g) {{\n    {self.d.c_body('at', 'g', words[self.d.field])}\n}}",
        ]
        plus = ""
        if self.m is not None:
            lines.append(f"{q} f32 {p}_m({p}_at at, u32 g) {{\n    {self.m.c_body('at', 'g', words[self.m.field])}\n}}")
            plus = f" + {p}_m(at, g)"
        lines += [
            f"{q} f32 {p}_value(const u8 *w, u64 row, u32 k) {{",
            f"    {p}_at at = {p}_locate(w, row, k / {self.block}u);",
            f"    u32 e = k % {self.block}u, g = e / {self.group}u;",
            f"    return {p}_d(at, g) * (f32){p}_code(at, e){plus};\n}}",
        ]
        return "\n".join(lines) + "\n"


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and row length of a tensor of any rank."""
    if not shape or min(shape) <= 0:
        raise ArtifactError(f"a weight of shape {list(shape)} has no values")
    return prod(shape[:-1]), shape[-1]


@frozen(eq=False)
class Packed:
    """A weight as stored. Equal only to itself."""

    format: QuantFormat
    raw: U8Array = field(repr=False)
    shape: tuple[int, ...]

    def f32(self) -> F32Array:
        """Decoded anew at each call."""
        return self.format.unpack(self.raw, self.shape)


# Declarations. Byte orders are those of the files; the comment gives what one would not guess.


def _plain(name: str, ggml_type: int, dtype: DType) -> QuantFormat:
    return QuantFormat(name, ggml_type, 1, Record(name, (Field("x", dtype),)), 1, dtype=dtype)


def _record(name: str, *fields: tuple[str, DType, int]) -> Record:
    return Record(f"block_{name}", tuple(Field(n, t, c) for n, t, c in fields))


_D, _M = ("d", F16, 1), ("m", F16, 1)


def _native(name: str, group: int, planes: tuple[Plane, ...], map: Signed, high: int = 0) -> QuantFormat:
    base = group * planes[0].bits // 8
    fields = [("base", U8, base), *([("high", U8, high)] if high else []), ("scale", F16, 1)]
    encoder = encode.ternary if map.bits == 2 else encode.grouped_absmax
    return QuantFormat(name, None, group, _record(name, *fields), group, Bits(planes, map), Scale("scale"),
                       split=True, encode=encoder)  # fmt: skip


def _grid(name: str, ggml_type: int, decode: Callable[[U8Array], F32Array], nbytes: int, group: int) -> QuantFormat:
    return QuantFormat(name, ggml_type, 256, _record(name, ("bytes", U8, nbytes)), group, grid=decode)


_IQ4 = Table((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
_E2M1_TWICE = Table((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))  # word 8 is +0

# 8 scales and 8 minima of 6 bits in 12 bytes: the low bits of numbers 4..7 and the high bits are packed elsewhere.
_K_SCALE = Bits((Plane("scales", 4, 4, step=0, hop=8), Plane("scales", 2, 4, lsb=4, shift0=4)), Offset(6))
_K_MIN = Bits((Plane("scales", 4, 4, offset=4, hop=4), Plane("scales", 2, 4, offset=4, lsb=4, shift0=4)), Offset(6))
_Q3_SCALE = Bits((Plane("scales", 4, 8), Plane("scales", 2, 4, offset=8, lsb=4)), Offset(6, 32))
_IQ4_SCALE = Bits((Plane("scales_l", 4, 1), Plane("scales_h", 2, 1, lsb=4)), Offset(6, 32))

F32_FORMAT = _plain("f32", 0, F32)
F16_FORMAT = _plain("f16", 1, F16)
BF16_FORMAT = _plain("bf16", 30, BF16)

FORMATS: tuple[QuantFormat, ...] = (
    F32_FORMAT,
    F16_FORMAT,
    BF16_FORMAT,
    QuantFormat("q4_0", 2, 32, _record("q4_0", _D, ("qs", U8, 16)), 32,
                Bits((Plane("qs", 4, 16),), Offset(4, 8)), Scale("d"), encode=encode.extreme),
    QuantFormat("q4_1", 3, 32, _record("q4_1", _D, _M, ("qs", U8, 16)), 32,
                Bits((Plane("qs", 4, 16),), Offset(4)), Scale("d"), Scale("m"), encode=encode.minmax),
    QuantFormat("q5_0", 6, 32, _record("q5_0", _D, ("qh", U8, 4), ("qs", U8, 16)), 32,
                Bits((Plane("qs", 4, 16), Plane("qh", 1, 1, lsb=4)), Offset(5, 16)), Scale("d"),
                encode=encode.extreme),
    QuantFormat("q5_1", 7, 32, _record("q5_1", _D, _M, ("qh", U8, 4), ("qs", U8, 16)), 32,
                Bits((Plane("qs", 4, 16), Plane("qh", 1, 1, lsb=4)), Offset(5)), Scale("d"), Scale("m"),
                encode=encode.minmax),
    QuantFormat("q8_0", 8, 32, _record("q8_0", _D, ("qs", I8, 32)), 32,
                Bits((Plane("qs", 8, 1),), Signed(8)), Scale("d"), encode=encode.round_q8),
    QuantFormat("q2_k", 10, 256, _record("q2_k", ("scales", U8, 16), ("qs", U8, 64), _D, ("dmin", F16, 1)), 16,
                Bits((Plane("qs", 2, 32),), Offset(2)),
                Scale("d", sub=Bits((Plane("scales", 4, 16),), Offset(4))),
                Scale("dmin", sub=Bits((Plane("scales", 4, 16, shift0=4),), Offset(4)), negate=True),
                encode=encode.minmax),
    QuantFormat("q3_k", 11, 256, _record("q3_k", ("hmask", U8, 32), ("qs", U8, 64), ("scales", U8, 12), _D), 16,
                Bits((Plane("qs", 2, 32), Plane("hmask", 1, 32, lsb=2)), Offset(3, 4)),
                Scale("d", sub=_Q3_SCALE), encode=encode.extreme),
    QuantFormat("q4_k", 12, 256, _record("q4_k", _D, ("dmin", F16, 1), ("scales", U8, 12), ("qs", U8, 128)), 32,
                Bits((Plane("qs", 4, 32),), Offset(4)), Scale("d", sub=_K_SCALE),
                Scale("dmin", sub=_K_MIN, negate=True), encode=encode.minmax),
    QuantFormat("q5_k", 13, 256,
                _record("q5_k", _D, ("dmin", F16, 1), ("scales", U8, 12), ("qh", U8, 32), ("qs", U8, 128)), 32,
                Bits((Plane("qs", 4, 32), Plane("qh", 1, 32, lsb=4)), Offset(5)), Scale("d", sub=_K_SCALE),
                Scale("dmin", sub=_K_MIN, negate=True), encode=encode.minmax),
    QuantFormat("q6_k", 14, 256, _record("q6_k", ("ql", U8, 128), ("qh", U8, 64), ("scales", I8, 16), _D), 16,
                Bits((Plane("ql", 4, 64), Plane("qh", 2, 32, lsb=4)), Offset(6, 32)),
                Scale("d", sub=Bits((Plane("scales", 8, 1),), Signed(8))), encode=encode.extreme),
    _grid("iq2_xxs", 16, grids.iq2_xxs, 66, 32),
    _grid("iq2_xs", 17, grids.iq2_xs, 74, 16),
    _grid("iq3_xxs", 18, grids.iq3_xxs, 98, 32),
    _grid("iq1_s", 19, grids.iq1_s, 50, 32),
    QuantFormat("iq4_nl", 20, 32, _record("iq4_nl", _D, ("qs", U8, 16)), 32,
                Bits((Plane("qs", 4, 16),), _IQ4), Scale("d"), encode=encode.extreme),
    _grid("iq3_s", 21, grids.iq3_s, 110, 32),
    _grid("iq2_s", 22, grids.iq2_s, 82, 16),
    QuantFormat("iq4_xs", 23, 256,
                _record("iq4_xs", _D, ("scales_h", U8, 2), ("scales_l", U8, 4), ("qs", U8, 128)), 32,
                Bits((Plane("qs", 4, 16),), _IQ4), Scale("d", sub=_IQ4_SCALE), encode=encode.extreme),
    _grid("iq1_m", 29, grids.iq1_m, 56, 16),
    QuantFormat("tq1_0", 34, 256, _record("tq1_0", ("qs", U8, 48), ("qh", U8, 4), _D), 256,
                Trits(), Scale("d"), encode=encode.ternary),
    QuantFormat("tq2_0", 35, 256, _record("tq2_0", ("qs", U8, 64), _D), 256,
                Bits((Plane("qs", 2, 32),), Offset(2, 1)), Scale("d"), encode=encode.ternary),
    QuantFormat("mxfp4", 39, 32, _record("mxfp4", ("e", U8, 1), ("qs", U8, 16)), 32,
                Bits((Plane("qs", 4, 16),), _E2M1_TWICE), Scale("e", "e8m0_half"), encode=encode.mxfp4),
    QuantFormat("nvfp4_ggml", 40, 64, _record("nvfp4_ggml", ("d", U8, 4), ("qs", U8, 32)), 16,
                Bits((Plane("qs", 4, 8),), _E2M1_TWICE), Scale("d", "ue4m3_half"), encode=encode.ue4m3),
    QuantFormat("q1_0", 41, 128, _record("q1_0", _D, ("qs", U8, 16)), 128,
                Bits((Plane("qs", 1, 1),), Table((-1, 1))), Scale("d"), encode=encode.signs),
    QuantFormat("q2_0", 42, 64, _record("q2_0", _D, ("qs", U8, 16)), 64,
                Bits((Plane("qs", 2, 1),), Offset(2, 1)), Scale("d"), encode=encode.ternary),
    _native("q4_g64", 64, (Plane("base", 4, 1),), Signed(4)),
    _native("q5_g64", 64, (Plane("base", 4, 1), Plane("high", 1, 1, lsb=4)), Signed(5), high=8),
    _native("q6_g64", 64, (Plane("base", 4, 1), Plane("high", 2, 1, lsb=4)), Signed(6), high=16),
    _native("q8_g32", 32, (Plane("base", 8, 1),), Signed(8, illegal=(0x80,))),
    _native("t2_g128", 128, (Plane("base", 2, 1),), Signed(2, illegal=(0b10,))),
)  # fmt: skip

_BY_NAME = {f.name: f for f in FORMATS}
_BY_GGML = {f.ggml_type: f for f in FORMATS if f.ggml_type is not None}


def _names(packable: bool = False) -> str:
    return ", ".join(f.name for f in FORMATS if f.can_pack or not packable)


def by_name(name: str) -> QuantFormat:
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ArtifactError(f"no weight format {name!r}; there are {_names()}") from None


def by_ggml(type_id: int) -> QuantFormat:
    """The format of a GGUF tensor type."""
    try:
        return _BY_GGML[type_id]
    except KeyError:
        known = ", ".join(f"{f.name} ({i})" for i, f in sorted(_BY_GGML.items()))
        raise ArtifactError(f"GGUF tensor type {type_id} is not supported; supported are {known}") from None
