"""Encoders: choose scales for float blocks, then codes. Each takes x, float32 [blocks, block], and fills the fields.

`grouped_absmax`, `extreme` (without nested scales), `minmax` (likewise) and `round_q8` give the reference encoders'
bytes. The others are plain choices of our own: a scale per group from its extremes, then the nearest code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ninfer.errors import ArtifactError
from ninfer.formats.bits import Bits, CodeMap, F32Array, Fields, I8Array, Table, U8Array
from ninfer.formats.dtypes import f32_to_e4m3

if TYPE_CHECKING:
    from ninfer.formats.quant import QuantFormat


def _f16_bytes(x: NDArray[Any]) -> U8Array:
    with np.errstate(over="ignore"):
        half = np.ascontiguousarray(x, np.float32).astype("<f2")
    if not np.isfinite(half).all():
        raise ArtifactError("a weight's scale does not fit float16")
    return half.view(np.uint8)


def _divide(x: F32Array, y: F32Array) -> F32Array:
    """x / y, and 0 where y is 0."""
    return np.divide(x, y, out=np.zeros(np.broadcast_shapes(x.shape, y.shape), np.float32), where=y != 0)


def _extreme(x: F32Array) -> F32Array:
    """The value of the largest magnitude, with its sign, along the last axis (kept)."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)


def _nearest(y: F32Array, codes: CodeMap) -> I8Array:
    if isinstance(codes, Table):
        values = np.unique(np.array(codes.values, np.int8))
        middle = (values[1:].astype(np.float32) + values[:-1].astype(np.float32)) / 2
        return values[np.searchsorted(middle, y)]
    return np.clip(np.rint(y), codes.low, codes.high).astype(np.int8)


def _fill_codes(x: F32Array, fmt: QuantFormat, out: Fields) -> None:
    """Nearest codes under the scales that `out` already holds."""
    assert fmt.code is not None and fmt.d is not None
    groups = fmt.block // fmt.group
    y = x.reshape(len(x), groups, fmt.group)
    d = fmt.d.read(out, groups)[:, :, None]
    if fmt.m is not None:
        y = y - fmt.m.read(out, groups)[:, :, None]
    fmt.code.write(out, _nearest(_divide(y, d), fmt.code.map).reshape(x.shape))


def _fill_nested(per_group: F32Array, field: str, sub: Bits, out: Fields) -> None:
    """A f16 word and small integers whose products come near per_group [blocks, groups]."""
    top = max(sub.map.high, 1)
    word = np.abs(per_group).max(axis=1, keepdims=True) / np.float32(top)
    out[field][:] = _f16_bytes(word)
    word = np.ascontiguousarray(out[field]).view("<f2").astype(np.float32)
    sub.write(out, np.clip(np.rint(_divide(per_group, word)), sub.map.low, top).astype(np.int8))


def grouped_absmax(x: F32Array, fmt: QuantFormat, out: Fields) -> None:
    """scale = f16(max|x| / qmax); codes = round(x * (1 / scale)): multiplied by the reciprocal, not divided."""
    assert fmt.code is not None and fmt.d is not None
    top = np.float32(fmt.code.map.high)
    amax = np.abs(x).max(axis=1, keepdims=True)
    raw = _f16_bytes(amax / top)
    scale = raw.view("<u2")
    scale[(scale == 0) & (amax > 0)] = 1
    out[fmt.d.field][:] = raw
    inverse = _divide(np.ones_like(amax), raw.view("<f2").astype(np.float32))
    codes = np.clip(np.rint(x * inverse), fmt.code.map.low, fmt.code.map.high)
    fmt.code.write(out, codes.astype(np.int8))


def ternary(x: F32Array, fmt: QuantFormat, out: Fields) -> None:
    """scale = max|x|; codes = round(x / scale), in -1, 0, 1."""
    assert fmt.code is not None and fmt.d is not None
    amax = np.abs(x).max(axis=1, keepdims=True)
    raw = _f16_bytes(amax)
    word = raw.view("<u2")
    word[(word == 0) & (amax > 0)] = 1
    out[fmt.d.field][:] = raw
    fmt.code.write(out, np.clip(np.rint(_divide(x, amax)), -1, 1).astype(np.int8))


def signs(x: F32Array, fmt: QuantFormat, out: Fields) -> None:
    """One bit: scale = mean|x|."""
    assert fmt.code is not None and fmt.d is not None
    out[fmt.d.field][:] = _f16_bytes(np.abs(x).mean(axis=1, keepdims=True))
    fmt.code.write(out, np.where(x < 0, -1, 1).astype(np.int8))


def extreme(x: F32Array, fmt: QuantFormat, out: Fields) -> None:
    """The scale, of either sign, that sends the value of largest magnitude to the lowest code."""
    assert fmt.code is not None and fmt.d is not None
    codes = fmt.code.map
    if fmt.d.sub is not None:
        per_group = _extreme(x.reshape(len(x), -1, fmt.group))[..., 0] / np.float32(codes.low)
        _fill_nested(per_group, fmt.d.field, fmt.d.sub, out)
        return _fill_codes(x, fmt, out)
    d = _extreme(x) / np.float32(codes.low)
    out[fmt.d.field][:] = _f16_bytes(d)
    if isinstance(codes, Table):
        return _fill_codes(x, fmt, out)
    inverse = _divide(np.ones_like(d), d)  # of the unrounded scale, as the reference does
    word = np.trunc(x * inverse + np.float32(0.5 - codes.low))
    fmt.code.write(out, (np.minimum(word, codes.high - codes.low) + codes.low).astype(np.int8))


def minmax(x: F32Array, fmt: QuantFormat, out: Fields) -> None:
    """Codes from 0 at the least value to the highest at the greatest."""
    assert fmt.code is not None and fmt.d is not None and fmt.m is not None
    top = np.float32(fmt.code.map.high)
    if fmt.d.sub is not None and fmt.m.sub is not None:
        y = x.reshape(len(x), -1, fmt.group)
        low = np.minimum(y.min(axis=-1), 0)
        _fill_nested((np.maximum(y.max(axis=-1), 0) - low) / top, fmt.d.field, fmt.d.sub, out)
        _fill_nested(-low, fmt.m.field, fmt.m.sub, out)
        return _fill_codes(x, fmt, out)
    low = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - low) / top
    out[fmt.d.field][:] = _f16_bytes(d)
    out[fmt.m.field][:] = _f16_bytes(low)
    inverse = _divide(np.ones_like(d), d)
    word = np.trunc((x - low) * inverse + np.float32(0.5))
    fmt.code.write(out, np.minimum(word, top).astype(np.int8))


def round_q8(x: F32Array, fmt: QuantFormat, out: Fields) -> None:
    """d = max|x| / 127 (unrounded for the codes); halves round away from zero."""
    assert fmt.code is not None and fmt.d is not None
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    out[fmt.d.field][:] = _f16_bytes(d)
    y = x * _divide(np.ones_like(d), d)
    fmt.code.write(out, (np.sign(y) * np.floor(np.abs(y) + np.float32(0.5))).astype(np.int8))


def mxfp4(x: F32Array, fmt: QuantFormat, out: Fields) -> None:
    """The power of two that brings max|x| into [4, 8), where 6 is the greatest value."""
    assert fmt.d is not None
    amax = np.abs(x).max(axis=1, keepdims=True)
    _, exponent = np.frexp(amax)
    out[fmt.d.field][:] = np.where(amax > 0, np.clip(exponent - 1 - 2 + 127, 0, 254), 0)
    _fill_codes(x, fmt, out)


def ue4m3(x: F32Array, fmt: QuantFormat, out: Fields) -> None:
    """e4m3(max|x| / 6) per 16 values."""
    assert fmt.d is not None
    amax = np.abs(x.reshape(len(x), -1, fmt.group)).max(axis=-1)
    out[fmt.d.field][:] = f32_to_e4m3(amax / np.float32(6))
    _fill_codes(x, fmt, out)
