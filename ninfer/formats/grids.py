"""The ggml formats whose codes index a grid of 4 or 8 values: tables and decoders.

Tables come from the gguf package. Each decoder takes whole blocks, uint8 [n, block bytes] -> float32 [n, 256], and
multiplies in float32 in the order of ggml. `grid_parts.py` gives the same blocks as integers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.formats.bits import F32Array, U8Array


@cache
def grid(name: str) -> NDArray[np.int8]:
    """Codebook of an IQ format, [entries, 4 or 8]. name: iq1_s, iq2_xxs, ... (iq1_m uses that of iq1_s)."""
    from gguf import quants

    kind = getattr(quants, ("iq1_s" if name == "iq1_m" else name).upper())
    kind.init_grid()
    return np.ascontiguousarray(kind.grid[0, 0]).astype(np.int8)


@cache
def sign_bytes() -> U8Array:
    """128 sign patterns: 7 given bits, and an eighth that makes the number of minus signs even."""
    i = np.arange(128)
    parity = sum((i >> b) & 1 for b in range(7)) & 1
    return (i | (parity << 7)).astype(np.uint8)


def _signs(byte: U8Array) -> F32Array:
    """[...] -> [..., 8], 1 or -1 from the low bit up."""
    bits = (byte[..., None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1)
    return np.float32(1) - np.float32(2) * bits.astype(np.float32)


def _f16(raw: U8Array) -> F32Array:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _u16(raw: U8Array) -> NDArray[np.uint32]:
    return np.ascontiguousarray(raw).view("<u2").astype(np.uint32)


def _u32(raw: U8Array) -> NDArray[np.uint32]:
    return np.ascontiguousarray(raw).view("<u4").astype(np.uint32)


def _nibbles(raw: U8Array) -> F32Array:
    """Low nibble first.   [n, b] -> float32 [n, 2b]."""
    return np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=-1).reshape(len(raw), -1).astype(np.float32)


def _high(raw: U8Array, bits: int) -> NDArray[np.uint32]:
    """Fields of `bits`, low first, already moved to bit 8.   [n, b] -> [n, b * 8 / bits]."""
    parts = (raw[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8((1 << bits) - 1)
    return parts.reshape(len(raw), -1).astype(np.uint32) << np.uint32(8)


def _lookup(name: str, index: NDArray[np.integer[Any]]) -> F32Array:
    """[n, i] -> [n, i, lanes]."""
    values: F32Array = grid(name)[index].astype(np.float32)
    return values


def iq2_xxs(b: U8Array) -> F32Array:
    n = len(b)
    pair = _u32(b[:, 2:]).reshape(n, 8, 2)
    index = np.ascontiguousarray(pair[..., 0]).view(np.uint8).reshape(n, 32).astype(np.uint32)
    word = pair[..., 1]
    db = _f16(b[:, :2]) * (np.float32(0.5) + (word >> 28).astype(np.float32)) * np.float32(0.25)
    signs = sign_bytes()[(word[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & 127]
    grid_values = _lookup("iq2_xxs", index).reshape(n, 8, 4, 8)
    value: F32Array = db[:, :, None, None] * grid_values * _signs(signs)
    return value.reshape(n, 256)


def iq2_xs(b: U8Array) -> F32Array:
    n = len(b)
    q = _u16(b[:, 2:66])
    db = _f16(b[:, :2]) * (np.float32(0.5) + _nibbles(b[:, 66:])) * np.float32(0.25)
    value = _lookup("iq2_xs", q & 511) * _signs(sign_bytes()[q >> 9])
    return (db[:, :, None, None] * value.reshape(n, 16, 2, 8)).reshape(n, 256)


def iq2_s(b: U8Array) -> F32Array:
    n = len(b)
    index = b[:, 2:34].astype(np.uint32) | _high(b[:, 66:74], 2)
    db = _f16(b[:, :2]) * (np.float32(0.5) + _nibbles(b[:, 74:])) * np.float32(0.25)
    value = _lookup("iq2_s", index) * _signs(b[:, 34:66])
    return (db[:, :, None, None] * value.reshape(n, 16, 2, 8)).reshape(n, 256)


def iq3_xxs(b: U8Array) -> F32Array:
    n = len(b)
    word = _u32(b[:, 66:])
    db = _f16(b[:, :2]) * (np.float32(0.5) + (word >> 28).astype(np.float32)) * np.float32(0.5)
    signs = sign_bytes()[(word[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & 127]
    value = _lookup("iq3_xxs", b[:, 2:66].astype(np.uint32)).reshape(n, 8, 4, 8)
    return (db[:, :, None, None] * value * _signs(signs)).reshape(n, 256)


def iq3_s(b: U8Array) -> F32Array:
    n = len(b)
    index = b[:, 2:66].astype(np.uint32) | _high(b[:, 66:74], 1)
    db = _f16(b[:, :2]) * (np.float32(1) + np.float32(2) * _nibbles(b[:, 106:]))
    signed = _lookup("iq3_s", index).reshape(n, 8, 4, 8) * _signs(b[:, 74:106]).reshape(n, 8, 4, 8)
    value: F32Array = db[:, :, None, None] * signed
    return value.reshape(n, 256)


_DELTA = np.float32(0.125)


def iq1_s(b: U8Array) -> F32Array:
    n = len(b)
    qh = _u16(b[:, 34:])
    dl = _f16(b[:, :2]) * (2 * ((qh >> 12) & 7) + 1).astype(np.float32)
    delta = np.where(qh & 0x8000, -_DELTA, _DELTA).astype(np.float32)
    high = (qh[..., None] >> np.array([0, 3, 6, 9], np.uint32)) & 7
    index = b[:, 2:34].astype(np.uint32) | (high.reshape(n, 32) << 8)
    value = _lookup("iq1_s", index).reshape(n, 8, 4, 8) + delta[:, :, None, None]
    return (dl[:, :, None, None] * value).reshape(n, 256)


def iq1_m(b: U8Array) -> F32Array:
    n = len(b)
    words = _u16(b[:, 48:])
    d16 = (words[:, 0] >> 12) | ((words[:, 1] >> 8) & 0xF0) | ((words[:, 2] >> 4) & 0xF00) | (words[:, 3] & 0xF000)
    d = d16.astype(np.uint16).view(np.float16).astype(np.float32)
    scale = (words[..., None] >> np.array([0, 3, 6, 9], np.uint32)) & 7  # [n, 4, 4]: one per 16 values
    dl = d[:, None] * (2 * scale.reshape(n, 16) + 1).astype(np.float32)
    nibble = np.stack([b[:, 32:48] & np.uint8(15), b[:, 32:48] >> np.uint8(4)], axis=-1).reshape(n, 32)
    index = b[:, :32].astype(np.uint32) | ((nibble & 7).astype(np.uint32) << 8)
    delta = np.where(nibble & 8, -_DELTA, _DELTA).astype(np.float32)
    value = (_lookup("iq1_m", index) + delta[..., None]).reshape(n, 16, 2, 8)
    return (dl[:, :, None, None] * value).reshape(n, 256)
