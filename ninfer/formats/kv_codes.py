"""How the numbers of a quantised KV row are coded: numpy encoders and decoders, bit for bit what kernels do.

A code works on a group of values that share a scale. All arithmetic is float32 with single rounding and no fused
multiply-add; divisions are by the stored scale as it is represented. Sums of a group are taken by halves: the second
half is added to the first, until one value is left. The E8 codes are over blocks of 8 values inside a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.formats.dtypes import E2M1_VALUES, E4M3_VALUES, f32_to_e2m1, f32_to_e4m3

F32Array = NDArray[np.float32]
U8Array = NDArray[np.uint8]
Coded = tuple[U8Array, F32Array]  # code bytes [..., group * bits / 8]; scales [...], representable in their type

f32 = np.float32


@frozen
class KVCode(ABC):
    """name: also of the kernels' functions. bits: of a value."""

    name: str
    bits: int

    @abstractmethod
    def encode(self, x: F32Array) -> Coded:
        """[..., group] -> bytes and scales."""

    @abstractmethod
    def decode(self, codes: U8Array) -> F32Array:
        """[..., bytes] -> [..., values], in units of the scale; exact."""

    def __str__(self) -> str:
        return self.name


def round_f16(x: F32Array) -> F32Array:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(f32)


def inverse(scale: F32Array) -> F32Array:
    """1 / scale, 0 where it is 0.   Keeps a last axis for the group's values."""
    with np.errstate(divide="ignore"):
        return np.where(scale > 0, f32(1) / scale, f32(0)).astype(f32)[..., None]


def halving_sum(x: F32Array) -> F32Array:
    """Over the last axis, whose length is a power of two."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def pack4(words: U8Array) -> U8Array:
    """Words below 16: the even one in the low nibble."""
    return words[..., 0::2] | words[..., 1::2] << np.uint8(4)


def unpack4(raw: U8Array) -> U8Array:
    return np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=-1).reshape(*raw.shape[:-1], -1)


def _signed4(raw: U8Array) -> F32Array:
    return ((unpack4(raw) ^ np.uint8(8)).astype(f32) - f32(8)).astype(f32)


@frozen
class IntCode(KVCode):
    """Integers from -top to top; scale = f16(absmax / top)."""

    top: int = 127

    def encode(self, x: F32Array) -> Coded:
        scale = round_f16(np.abs(x).max(axis=-1) / f32(self.top))
        code = np.clip(np.rint(x * inverse(scale)), -self.top, self.top).astype(np.int8).view(np.uint8)
        return (pack4(code & np.uint8(15)) if self.bits == 4 else code), scale

    def decode(self, codes: U8Array) -> F32Array:
        return _signed4(codes) if self.bits == 4 else codes.view(np.int8).astype(f32)


# Lloyd-Max of N(0, 1) in 16 levels: decision bounds on |x| / rms, and levels as integers of 127 steps
LLOYD_BOUNDS = np.array([0.25825, 0.52245, 0.79960, 1.09930, 1.43715, 1.84355, 2.40080], f32)
LLOYD_LEVELS = (6, 18, 31, 44, 58, 75, 96, 127)


@frozen
class LloydCode(KVCode):
    """sign << 3 | level; scale = f16 of the least-squares fit of the levels to the values."""

    def encode(self, x: F32Array) -> Coded:
        rms = np.sqrt(halving_sum(x * x) / f32(x.shape[-1]))
        ratio = np.abs(x) / np.where(rms > 0, rms, f32(1))[..., None]
        level = (ratio[..., None] >= LLOYD_BOUNDS).sum(axis=-1)
        negative = x < 0
        code = np.where(negative, -1, 1).astype(f32) * np.array(LLOYD_LEVELS, f32)[level]
        fit = halving_sum(x * code) / halving_sum(code * code)
        scale = np.where(rms > 0, round_f16(fit), f32(0)).astype(f32)
        return pack4((negative.astype(np.uint8) << np.uint8(3)) | level.astype(np.uint8)), scale

    def decode(self, codes: U8Array) -> F32Array:
        levels = np.array(LLOYD_LEVELS, f32)
        return np.concatenate([levels, -levels])[unpack4(codes)]


@frozen
class E4m3Code(KVCode):
    """scale = f16(absmax / 448), between 2^-24 and 65504; codes and scale are 0 where all values are."""

    def encode(self, x: F32Array) -> Coded:
        top = np.abs(x).max(axis=-1)
        scale = round_f16(np.clip(top / f32(448), f32(2.0**-24), f32(65504)))
        scale = np.where(top > 0, scale, f32(0)).astype(f32)
        code = f32_to_e4m3(x * inverse(scale))
        return np.where(top[..., None] > 0, code, np.uint8(0)).astype(np.uint8), scale

    def decode(self, codes: U8Array) -> F32Array:
        return E4M3_VALUES[codes]


E2M1_TARGETS = (6.0, 4.0, 4.5, 5.0, 5.5)  # what the largest value becomes; 6.5 and 7 would saturate


@frozen
class E2m1Code(KVCode):
    """scale = e4m3(absmax / target), from 2^-9 to 448, by the target with the smallest squared error."""

    def encode(self, x: F32Array) -> Coded:
        top = np.abs(x).max(axis=-1)
        best = np.full(top.shape, np.inf, f32)
        codes, scales = np.zeros(x.shape, np.uint8), np.zeros(top.shape, f32)
        for target in E2M1_TARGETS:
            scale = E4M3_VALUES[f32_to_e4m3(np.clip(top / f32(target), f32(2.0**-9), f32(448)))]
            code = f32_to_e2m1(x * inverse(scale))
            off = x - E2M1_VALUES[code] * scale[..., None]
            error = halving_sum(off * off)
            better = error < best
            best, scales = np.where(better, error, best), np.where(better, scale, scales)
            codes = np.where(better[..., None], code, codes)
        return pack4(codes), scales

    def decode(self, codes: U8Array) -> F32Array:
        return E2M1_VALUES[unpack4(codes)]


def _nearest_d8(z: F32Array) -> F32Array:
    """The nearest point of D8 (integers with an even sum) to [..., 8]."""
    r = np.rint(z)
    worst = np.abs(z - r).argmax(axis=-1)[..., None]
    at, rounded = np.take_along_axis(z, worst, -1), np.take_along_axis(r, worst, -1)
    moved = r.copy()
    np.put_along_axis(moved, worst, rounded + np.where(at >= rounded, f32(1), f32(-1)), -1)
    odd = r.sum(axis=-1, keepdims=True) % 2 != 0
    return np.where(odd, moved, r)


@frozen
class E8SnapCode(IntCode):
    """As IntCode, with each block moved to the nearest point of E8 before; which half of E8 it was is not stored."""

    def encode(self, x: F32Array) -> Coded:
        scale = round_f16(np.abs(x).max(axis=-1) / f32(self.top))
        y = (x * inverse(scale)).reshape(*x.shape[:-1], -1, 8)
        whole = _nearest_d8(y)
        half = _nearest_d8(y - f32(0.5)) + f32(0.5)
        off_whole, off_half = y - whole, y - half
        nearer = halving_sum(off_half * off_half) < halving_sum(off_whole * off_whole)
        code = np.clip(np.rint(np.where(nearer[..., None], half, whole)), -8, 7).astype(np.int8).view(np.uint8)
        return pack4(code.reshape(x.shape) & np.uint8(15)), scale


def _roots() -> NDArray[np.int8]:
    """The 240 roots of E8 times 4 [240, 8]: 112 pairs of +-4, then 128 of +-2 with an even number of minus signs."""
    rows = []
    for i in range(8):
        for j in range(i + 1, 8):
            for code in range(4):
                row = [0] * 8
                row[i], row[j] = 4 if code & 2 else -4, 4 if code & 1 else -4
                rows.append(row)
    for bits in range(128):
        row = [2 if bits >> k & 1 else -2 for k in range(7)]
        rows.append([*row, -2 if sum(v < 0 for v in row) % 2 else 2])
    return np.array(rows, np.int8)


E8_ROOTS4 = _roots()
E8_BOUNDS = np.array([0.2227247, 0.2806155, 0.3535534, 0.4454494, 0.5612310, 0.7071068, 0.8908987, 1.1224620,
                      1.4142136, 1.7817974, 2.2449241, 2.8284271, 3.5635949, 4.4898482], f32)  # fmt: skip
E8_EMPTY = f32(0.08)
E8_RADII = np.array([0, 0.0992, 0.1250, 0.1575, 0.1984, 0.2500, 0.3150, 0.3969, 0.5000, 0.6300, 0.7937, 1.0, 1.2599,
                     1.5874, 2.0, 2.5198], f32)  # fmt: skip
TINY = f32(1e-8)


@frozen
class E8RootCode(KVCode):
    """Two bytes for a block: the nearest root; radius << 4 | axis, a step along the axis the root misses most.

    scale = f16(absmax / 7) of the group; a radius is in units of sqrt(8) scales.
    """

    def encode(self, x: F32Array) -> Coded:
        scale = round_f16(np.abs(x).max(axis=-1) / f32(7))
        b = x.reshape(*x.shape[:-1], -1, 8)
        length = np.sqrt(halving_sum(b * b))
        u = b / (length + TINY)[..., None]
        root = self._nearest_root(u)
        r = E8_ROOTS4[root].astype(f32) * f32(0.25)
        off = u - (halving_sum(u * r) * f32(0.5))[..., None] * r
        index = np.abs(off).argmax(axis=-1)
        axis = 2 * index + (np.take_along_axis(off, index[..., None], -1)[..., 0] < 0)
        ratio = length / (scale * np.sqrt(f32(8)) + TINY)[..., None]
        radius = np.where(ratio < E8_EMPTY, 0, 1 + (ratio[..., None] >= E8_BOUNDS).sum(axis=-1))
        pair = np.stack([root, radius << 4 | axis], axis=-1).astype(np.uint8)
        return pair.reshape(*x.shape[:-1], -1), scale

    @staticmethod
    def _nearest_root(u: F32Array) -> NDArray[np.intp]:
        a, positive = np.abs(u), u >= 0
        order = np.argsort(-a, axis=-1, kind="stable")[..., :2]
        pair_score = np.take_along_axis(a, order, -1).sum(axis=-1)
        i, j = order.min(axis=-1), order.max(axis=-1)
        sign_i, sign_j = (np.take_along_axis(positive, k[..., None], -1)[..., 0] for k in (i, j))
        pair = 4 * (i * (15 - i) // 2 + (j - i - 1)) + 2 * sign_i + sign_j
        smallest = a.argmin(axis=-1)[..., None]
        odd = (~positive).sum(axis=-1) % 2 == 1
        half_score = halving_sum(a) * f32(0.5)
        half_score = np.where(odd, half_score - np.take_along_axis(a, smallest, -1)[..., 0], half_score)
        flipped = positive.copy()
        np.put_along_axis(flipped, smallest, ~np.take_along_axis(positive, smallest, -1), -1)
        signs = np.where(odd[..., None], flipped, positive)
        half = 112 + (signs[..., :7] << np.arange(7)).sum(axis=-1)
        root: NDArray[np.intp] = np.where(half_score > pair_score, half, pair)
        return root

    def decode(self, codes: U8Array) -> F32Array:
        pair = codes.reshape(*codes.shape[:-1], -1, 2)
        value = E8_ROOTS4[np.minimum(pair[..., 0], 239)].astype(f32)
        axis, radius = pair[..., 1] & 15, pair[..., 1] >> 4
        step = np.where(axis & 1, f32(-1), f32(1))
        value = value + (np.arange(8) == (axis >> 1)[..., None]) * step[..., None]
        rounded: F32Array = np.rint(value * E8_RADII[radius][..., None]).astype(f32)
        return rounded.reshape(*codes.shape[:-1], -1)


INT8 = IntCode("int8", 8, 127)
INT4 = IntCode("int4", 4, 7)
LLOYD4 = LloydCode("lloyd4", 4)
E4M3 = E4m3Code("e4m3", 8)
E2M1 = E2m1Code("e2m1", 4)
E8_SNAP = E8SnapCode("e8snap", 4, 7)
E8_ROOT = E8RootCode("e8root", 2)


def hadamard(x: F32Array) -> F32Array:
    """The normalised Hadamard transform of the last axis, a power of two long; its own inverse.

    Stages over strides 1, 2, 4, ...: of a pair the lower becomes a + b, the upper a - b; then times D^-1/2.
    """
    d = x.shape[-1]
    y = x.reshape(*x.shape[:-1], d)
    stride = 1
    while stride < d:
        pairs = y.reshape(*x.shape[:-1], d // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        stride *= 2
    return y * f32(d**-0.5)
