"""What a weight format is: data, from which sizes, numpy codecs and C decoders are derived. Declared in `quant.py`.

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
from ninfer.formats.bits import Bits, F32Array, Fields, I8Array, Offset, Scale, Signed, Trits, U8Array
from ninfer.formats.dtypes import BF16, U8, DType, bf16_to_f32, f32_to_bf16
from ninfer.formats.record import Record

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
    """One way to store a matrix. Compared by identity: there is one value per format, in `quant.py`."""

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
    def row_step(self) -> int:
        """Matrices have a multiple of so many rows, and are cut at multiples of it."""
        return 1

    def least_rows(self, rows: int) -> int:
        """A number of rows, at least so many, that a whole matrix may have."""
        return align_up(rows, self.row_step)

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
        n, k = matrix_of(shape)
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
        n, k = matrix_of(shape)
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
        n, k = matrix_of(shape)
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

    def unpack_rows(self, raw: U8Array, shape: Sequence[int], index: NDArray[np.intp]) -> F32Array:
        """Row i is row index[i]; only these are decoded.   -> float32 [len(index), K]"""
        return self.unpack(self.gather_rows(raw, shape, index), (len(index), shape[-1]))

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
        if ((scale & 0x7C00) == 0x7C00).any():
            raise ArtifactError(f"{self.name}: a scale is infinite or NaN")
        if isinstance(self.code.map, Offset):
            return  # imported words: any finite scale with any code
        if (scale == 0x8000).any():
            raise ArtifactError(f"{self.name}: a scale is -0")
        words = self.code.words(fields, self.block)
        illegal = self.code.map.illegal if isinstance(self.code.map, Signed) else ()
        if np.isin(words, illegal).any():
            raise ArtifactError(f"{self.name}: the code word {illegal[0]:#x} is not a value")
        if words[scale == 0].any():
            raise ArtifactError(f"{self.name}: a group has scale 0 but codes other than 0")

    # values -> bytes

    def pack(self, x: NDArray[Any]) -> U8Array:
        """The bytes of a matrix (or of rows in any leading shape), uint8 [nbytes]."""
        n, k = matrix_of(x.shape)
        values = np.ascontiguousarray(x, np.float32).reshape(n, k)
        if self.dtype is not None:
            if self.dtype is BF16:
                return f32_to_bf16(values).reshape(-1).view(np.uint8)
            with np.errstate(over="ignore"):
                return values.astype(self.dtype.numpy).reshape(-1).view(np.uint8)
        if self.encode is None:
            raise ArtifactError(f"{self.name} can be read but not written")
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
            width = self.row_bytes(matrix_of(shape)[1])
            return raw.reshape(-1)[start * width : (start + count) * width]
        return self.gather_rows(raw, shape, np.arange(start, start + count))

    def gather_rows(self, raw: U8Array, shape: Sequence[int], index: NDArray[np.intp]) -> U8Array:
        """Row i of the result is row index[i]."""
        n, k = matrix_of(shape)
        per_row = self.blocks_per_row(k)
        out = np.zeros(self.nbytes((len(index), k)), np.uint8)
        target = self.fields(out, (len(index), k))
        for name, source in self.fields(raw, shape).items():
            rows = source.reshape(n, per_row, -1)[index]
            target[name][:] = rows.reshape(len(index) * per_row, -1)
        return out

    def row_spans(self, shape: Sequence[int], start: int, count: int) -> list[tuple[int, int]]:
        """(offset, bytes) of rows start .. start + count in each plane, in the order of the planes."""
        k = matrix_of(shape)[1]
        per_row = self.blocks_per_row(k)
        sizes = [f.nbytes for f in self.record.fields] if self.split else [self.block_bytes]
        planes = zip(self.planes(shape), sizes, strict=True)
        return [(span.offset + start * per_row * size, count * per_row * size) for span, size in planes]

    def stack_rows(self, parts: Sequence[tuple[U8Array, Sequence[int]]]) -> U8Array:
        """Matrices (bytes, shape) below each other; each plane of a native format for itself."""
        k = parts[0][1][-1]
        if any(shape[-1] != k for _, shape in parts):
            raise ArtifactError(f"rows of {', '.join(str(shape[-1]) for _, shape in parts)} values cannot be stacked")
        whole = (sum(matrix_of(shape)[0] for _, shape in parts), k)
        out = np.zeros(self.nbytes(whole), np.uint8)
        targets, at = self.fields(out, whole), 0
        for raw, shape in parts:
            n = matrix_of(shape)[0] * self.blocks_per_row(k)
            for name, source in self.fields(raw, shape).items():
                targets[name][at : at + n] = source
            at += n
        return out

    def can_move_columns(self, width: int) -> bool:
        """Whether runs of `width` columns are whole blocks."""
        return not self.split and width % self.block == 0

    def gather_columns(self, raw: U8Array, shape: Sequence[int], width: int, index: NDArray[np.intp]) -> U8Array:
        """Run i of `width` columns in the result is run index[i]; needs can_move_columns(width)."""
        n, k = matrix_of(shape)
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
        n, k = matrix_of(shape)
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


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
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
