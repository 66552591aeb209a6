"""Scalar types: numpy carrier, C storage type and bits of each; conversions of the small floats.

A small float travels as its bits: bf16 in uint16, e4m3 and e2m1 in uint8. Encoders round to nearest, ties to
even.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray


@frozen(eq=False)
class DType:
    """numpy: the carrier; c_name: the C storage type (f16 and bf16 are stored as u16). Compared by identity: there is
    one value per type."""

    name: str
    numpy: np.dtype[Any] = field(converter=np.dtype)
    c_name: str
    bits: int

    @property
    def nbytes(self) -> int:
        return self.bits // 8

    def __str__(self) -> str:
        return self.name


F64 = DType("f64", "<f8", "f64", 64)
F32 = DType("f32", "<f4", "f32", 32)
F16 = DType("f16", "<f2", "u16", 16)
BF16 = DType("bf16", "<u2", "u16", 16)
I64 = DType("i64", "<i8", "i64", 64)
I32 = DType("i32", "<i4", "i32", 32)
I16 = DType("i16", "<i2", "i16", 16)
I8 = DType("i8", "i1", "i8", 8)
U64 = DType("u64", "<u8", "u64", 64)
U32 = DType("u32", "<u4", "u32", 32)
U16 = DType("u16", "<u2", "u16", 16)
U8 = DType("u8", "u1", "u8", 8)

DTYPES: tuple[DType, ...] = (F64, F32, F16, BF16, I64, I32, I16, I8, U64, U32, U16, U8)
_BY_NAME = {d.name: d for d in DTYPES}


def by_name(name: str) -> DType:
    """Raises KeyError naming the types that exist."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise KeyError(f"no dtype {name!r}; there are {', '.join(_BY_NAME)}") from None


def bf16_to_f32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """NaN keeps its sign and becomes quiet; everything else rounds to nearest even, up to infinity."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def _small_float_values(exponent_bits: int, mantissa_bits: int, bias: int) -> NDArray[np.float32]:
    code = np.arange(1 << (exponent_bits + mantissa_bits))
    e, m = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    magnitude = np.where(e == 0, np.ldexp(m, 1 - bias - mantissa_bits),
                         np.ldexp(m + (1 << mantissa_bits), e - bias - mantissa_bits))  # fmt: skip
    return np.concatenate([magnitude, -magnitude]).astype(np.float32)


def _encode_small_float(
    x: NDArray[np.float32], mantissa_bits: int, bias: int, largest: int
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Magnitude codes, saturating at `largest`, and signs. Exact: only powers of two are divided by."""
    a = np.abs(x.astype(np.float64))
    _, exponent = np.frexp(a)  # a = f * 2**exponent, f in [0.5, 1)
    e = np.maximum(exponent - 1, 1 - bias)
    steps = np.rint(np.ldexp(np.minimum(a, 1e30), mantissa_bits - e))
    code = ((e + bias - 1) << mantissa_bits) + steps  # a full binade of steps carries into the exponent
    return np.where(a == 0, 0, np.minimum(code, largest)).astype(np.uint8), np.signbit(x)


E4M3_VALUES: NDArray[np.float32] = _small_float_values(4, 3, 7)
E4M3_VALUES[[0x7F, 0xFF]] = np.nan
E4M3_MAX = 448.0
E2M1_VALUES: NDArray[np.float32] = _small_float_values(2, 1, 1)
E2M1_MAX = 6.0


def e4m3_to_f32(code: NDArray[np.uint8]) -> NDArray[np.float32]:
    """E4M3FN: no infinities, NaN at 0x7f and 0xff."""
    return E4M3_VALUES[code]


def f32_to_e4m3(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Saturates at 448; NaN becomes 0x7f. A negative value that rounds to zero keeps its sign."""
    code, negative = _encode_small_float(np.nan_to_num(x, nan=0.0, posinf=1e30, neginf=-1e30), 3, 7, 0x7E)
    return np.where(np.isnan(x), 0x7F, code | (negative.astype(np.uint8) << 7)).astype(np.uint8)


def e2m1_to_f32(code: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Codes 0..15: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    return E2M1_VALUES[code]


def f32_to_e2m1(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Saturates at 6; NaN is not a value of the format and becomes 0."""
    code, negative = _encode_small_float(np.nan_to_num(x, nan=0.0, posinf=1e30, neginf=-1e30), 1, 1, 7)
    return (code | (negative.astype(np.uint8) << 3)).astype(np.uint8)
