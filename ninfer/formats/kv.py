"""KV cache formats: how keys and values of one token are stored, and what a page of them looks like.

A page holds PAGE tokens of one layer in planes, each [G][PAGE][row]: codes of keys, their scales, codes of values,
their scales. No group of values that share a scale spans two tokens, so a page may be cut, overwritten or shared at
any token.

Keys of a quantised format are stored rotated by a Hadamard transform, which spreads outliers over the whole row;
attention rotates its queries the same way, and products stay what they were. Values are never rotated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.errors import UsageError
from ninfer.formats import kv_codes as codes
from ninfer.formats.dtypes import BF16, F16, F32, U8, DType, bf16_to_f32, e4m3_to_f32, f32_to_bf16, f32_to_e4m3
from ninfer.formats.kv_codes import KVCode, hadamard

PAGE = 64  # tokens

E4M3_SCALE = DType("e4m3", U8.numpy, "u8", 8)

Stored = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # code bytes and scale bytes of rows


@frozen
class Side:
    """Keys or values. code: a float type that is stored as it is, or a code with scales.

    A coded side has one scale of type `scale` for every `group` numbers of a token (0: one for the row).
    rotate: a Hadamard transform comes before.
    """

    code: DType | KVCode
    scale: DType | None = None
    group: int = 0
    rotate: bool = False

    def code_bytes(self, head_dim: int) -> int:
        return head_dim * self.code.bits // 8

    def group_of(self, head_dim: int) -> int:
        """Values that share a scale."""
        return self.group or head_dim

    def scale_bytes(self, head_dim: int) -> int:
        return 0 if self.scale is None else self.scale.nbytes * (head_dim // self.group_of(head_dim))

    def row_bytes(self, head_dim: int) -> int:
        """One token of one KV head."""
        return self.code_bytes(head_dim) + self.scale_bytes(head_dim)

    def accepts(self, head_dim: int) -> bool:
        if isinstance(self.code, DType):
            return True
        fits = head_dim % max(self.group, 8) == 0
        return fits and (not self.rotate or head_dim & (head_dim - 1) == 0)

    def encode(self, x: NDArray[np.float32]) -> Stored:
        """[..., D] -> code bytes [..., code_bytes(D)] and scale bytes [..., scale_bytes(D)]."""
        if isinstance(self.code, DType):
            return _plain_encode(self.code, x), np.zeros((*x.shape[:-1], 0), np.uint8)
        d = x.shape[-1]
        if self.rotate:
            x = hadamard(x)
        raw, scales = self.code.encode(x.reshape(*x.shape[:-1], -1, self.group_of(d)))
        bits = f32_to_e4m3(scales) if self.scale is E4M3_SCALE else scales.astype("<f2")
        return (
            raw.reshape(*x.shape[:-1], self.code_bytes(d)),
            np.ascontiguousarray(bits).view(np.uint8).reshape(*x.shape[:-1], self.scale_bytes(d)),
        )

    def decode(self, raw: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Rows as they are stored, rotated ones rotated.   [..., bytes] of both -> [..., D]."""
        raw = np.ascontiguousarray(raw)
        if isinstance(self.code, DType):
            bits: NDArray[Any] = raw.view(self.code.numpy)
            return bf16_to_f32(bits) if self.code is BF16 else bits.astype(np.float32)
        scales = np.ascontiguousarray(scales)
        factor = e4m3_to_f32(scales) if self.scale is E4M3_SCALE else scales.view("<f2").astype(np.float32)
        values = self.code.decode(raw)
        grouped = values.reshape(*factor.shape, -1) * factor[..., None]
        return grouped.reshape(values.shape)


def _plain_encode(dtype: DType, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    bits: NDArray[Any]
    if dtype is BF16:
        bits = f32_to_bf16(x)
    else:
        with np.errstate(over="ignore"):
            bits = np.ascontiguousarray(x, dtype.numpy)
    return np.ascontiguousarray(bits).view(np.uint8)


@frozen(eq=False, repr=False)
class KVFormat:
    """Compared by identity: there is one value per format, in KV_FORMATS."""

    name: str
    k: Side
    v: Side

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    @property
    def c_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def is_plain(self) -> bool:
        """Stored as a float type, without scales."""
        return isinstance(self.k.code, DType)

    def bytes_per_token(self, num_kv_heads: int, head_dim: int) -> int:
        """Of one layer."""
        return num_kv_heads * (self.k.row_bytes(head_dim) + self.v.row_bytes(head_dim))

    def page_bytes(self, num_kv_heads: int, head_dim: int, page: int = PAGE) -> int:
        """Of one layer."""
        return page * self.bytes_per_token(num_kv_heads, head_dim)

    def plane_offsets(self, num_kv_heads: int, head_dim: int) -> tuple[int, int, int, int]:
        """Where in a page lie codes of keys, their scales, codes of values, their scales."""
        rows, k, v = PAGE * num_kv_heads, self.k, self.v
        values = rows * k.row_bytes(head_dim)
        return 0, rows * k.code_bytes(head_dim), values, values + rows * v.code_bytes(head_dim)

    def v_offset(self, num_kv_heads: int, head_dim: int) -> int:
        """Where the values of a page begin."""
        return self.plane_offsets(num_kv_heads, head_dim)[2]

    def check(self, head_dim: int) -> None:
        """Raises UsageError where heads of this size cannot be stored so."""
        if self.k.accepts(head_dim) and self.v.accepts(head_dim):
            return
        sizes = [d for d in (64, 128, 256, 512) if self.k.accepts(d) and self.v.accepts(d)]
        raise UsageError(
            f"--kv-dtype {self.name} stores heads of {', '.join(map(str, sizes))} values, "
            f"this model's have {head_dim}; use --kv-dtype bf16"
        )


def _same(name: str, code: DType) -> KVFormat:
    return KVFormat(name, Side(code), Side(code))


INT8_KEYS = Side(codes.INT8, F16, 64, rotate=True)
INT8_VALUES = Side(codes.INT8, F16, 64)
INT4_VALUES = Side(codes.INT4, F16, 32)  # 15 levels: one outlier sets the step of fewer numbers than of 64
E4M3_KEYS = Side(codes.E4M3, F16, rotate=True)
E2M1_VALUES = Side(codes.E2M1, E4M3_SCALE, 16)

KV_FORMATS: tuple[KVFormat, ...] = (
    _same("bf16", BF16),
    _same("f16", F16),
    _same("f32", F32),
    KVFormat("int8", INT8_KEYS, INT8_VALUES),
    KVFormat("fp8", E4M3_KEYS, Side(codes.E4M3, F16)),
    KVFormat("rk8v4", INT8_KEYS, INT4_VALUES),
    KVFormat("k8v4", E4M3_KEYS, E2M1_VALUES),
    KVFormat("nvfp4", Side(codes.E2M1, E4M3_SCALE, 16, rotate=True), E2M1_VALUES),
    KVFormat("rk4v4", Side(codes.LLOYD4, F16, 64, rotate=True), INT4_VALUES),
    KVFormat("rk4v4-e8", Side(codes.E8_SNAP, F16, 64, rotate=True), INT4_VALUES),
    KVFormat("rk2v4-e8", Side(codes.E8_ROOT, F16, 64, rotate=True), INT4_VALUES),
)
_BY_NAME = {f.name: f for f in KV_FORMATS}


def by_name(name: str) -> KVFormat:
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UsageError(f"no KV format {name!r}; there are {', '.join(_BY_NAME)}") from None
