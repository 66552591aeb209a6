"""The weight formats, each declared once. What a declaration means is in `format.py` and `floats.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ninfer.errors import ArtifactError
from ninfer.formats import encode, grids
from ninfer.formats.bits import Bits, F32Array, Offset, Plane, Scale, Signed, Table, Trits, U8Array
from ninfer.formats.dtypes import BF16, F16, F32, I8, U8, DType
from ninfer.formats.floats import FloatFormat
from ninfer.formats.format import PAD_K, Packed, PlaneSpan, QuantFormat, align_up
from ninfer.formats.record import Field, Record

__all__ = [
    "BF16_FORMAT",
    "F16_FORMAT",
    "F32_FORMAT",
    "FLOATS",
    "FORMATS",
    "PAD_K",
    "FloatFormat",
    "Packed",
    "PlaneSpan",
    "QuantFormat",
    "align_up",
    "by_ggml",
    "by_name",
    "nvfp4",
]

# Declarations. Byte orders are those of the files; the comment gives what one would not guess.


def _plain(name: str, ggml_type: int, dtype: DType) -> QuantFormat:
    return QuantFormat(name, ggml_type, 1, Record(name, (Field("x", dtype),)), 1, dtype=dtype)


def _record(name: str, *fields: tuple[str, DType, int]) -> Record:
    return Record(f"block_{name}", tuple(Field(n, t, c) for n, t, c in fields))


_D, _M = ("d", F16, 1), ("m", F16, 1)


def _native(name: str, group: int, planes: tuple[Plane, ...], map: Signed | Offset, high: int = 0) -> QuantFormat:
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
    QuantFormat("pq2_0", 142, 128, _record("pq2_0", _D, ("qs", U8, 32)), 128,
                Bits((Plane("qs", 2, 1),), Offset(2, 1)), Scale("d"), encode=encode.ternary),
    _native("q4_g64", 64, (Plane("base", 4, 1),), Signed(4)),
    _native("q5_g64", 64, (Plane("base", 4, 1), Plane("high", 1, 1, lsb=4)), Signed(5), high=8),
    _native("q6_g64", 64, (Plane("base", 4, 1), Plane("high", 2, 1, lsb=4)), Signed(6), high=16),
    _native("q8_g32", 32, (Plane("base", 8, 1),), Signed(8, illegal=(0x80,))),
    _native("t2_g128", 128, (Plane("base", 2, 1),), Signed(2, illegal=(0b10,))),
    _native("q2_g64", 64, (Plane("base", 2, 1),), Offset(2, 1)),  # padding has word 1, which is 0
)  # fmt: skip

# Small floats with scales; multiplied as float32.
FLOATS: tuple[FloatFormat, ...] = (
    FloatFormat.rows("fp8_e4m3fn_row_bf16", "bf16"),
    FloatFormat.rows("fp8_e4m3fn_row_fp16", "f16", interleaved=True),
    FloatFormat.mxfp8("mxfp8"),
    FloatFormat.nvfp4("nvfp4", 1),
)


@cache
def nvfp4(divisors: int) -> FloatFormat:
    """The format of matrices from several sources below each other, each with its own divisor."""
    return by_float_name("nvfp4") if divisors == 1 else FloatFormat.nvfp4(f"nvfp4_d{divisors}", divisors)


def by_float_name(name: str) -> FloatFormat:
    return next(f for f in FLOATS if f.name == name)


_BY_NAME: dict[str, QuantFormat] = {f.name: f for f in (*FORMATS, *FLOATS)}
_BY_GGML = {f.ggml_type: f for f in FORMATS if f.ggml_type is not None}


def by_name(name: str) -> QuantFormat:
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ArtifactError(f"no weight format {name!r}; there are {', '.join(_BY_NAME)}") from None


_OTHERS = {
    4: "Q4_2 of early 2023; convert the model again",
    5: "Q4_3 of early 2023; convert the model again",
    **dict.fromkeys((31, 32, 33, 36, 37, 38), "repacked for one processor; use the plain Q4_0 or IQ4_NL file"),
    143: "PTQ1_0, five base-3 digits a byte in blocks of 28 bytes; use the model's PQ2_0 file",
}


def by_ggml(type_id: int) -> QuantFormat:
    """The format of a GGUF tensor type."""
    if type_id in _OTHERS:
        raise ArtifactError(f"GGUF tensor type {type_id} is {_OTHERS[type_id]}")
    try:
        return _BY_GGML[type_id]
    except KeyError:
        known = ", ".join(f"{f.name} ({i})" for i, f in sorted(_BY_GGML.items()))
        raise ArtifactError(f"GGUF tensor type {type_id} is not supported; supported are {known}") from None
