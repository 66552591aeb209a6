"""Groupwise integers by search: for each group the scale, among some seventy, whose codes lose least.

The loss of a group is sum(importance * (w - scale * code)^2), importance being a number per input channel (how large
an activation's squares are there), or 1. The reference encoder's result stays unless a candidate loses strictly less,
so no group is worse for the search. Scales may be negative, which sends the largest positive value to the lowest code.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from ninfer.errors import ArtifactError
from ninfer.formats import encode
from ninfer.formats.bits import Bits, F32Array, Fields, U8Array
from ninfer.formats.quant import QuantFormat

MULTIPLES = tuple(np.float32(0.70 + 0.02 * i) for i in range(25))  # of the scales that just reach the largest value
POWERS = (np.float32(0.25), np.float32(0.5), np.float32(2))
SLICE_VALUES = 1 << 15  # at a time: what a core's cache holds, several times over


def can_search(fmt: QuantFormat) -> bool:
    """Groupwise integers of four bits and more."""
    return fmt.encode is encode.grouped_absmax


def grouped_search(
    fmt: QuantFormat, x: F32Array, importance: F32Array | None = None, *, negative_scales: bool = True
) -> U8Array:
    """The bytes of a matrix.   x: [N, K]; importance: [K] or [N, K], finite and not negative."""
    if not can_search(fmt):
        raise ArtifactError(f"{fmt.name} has no scales to search for")
    n, k = x.shape
    raw = fmt.pack(x)
    per_row, pad = fmt.blocks_per_row(k), ((0, 0), (0, fmt.padded_k(k) - k))
    fields = fmt.fields(raw, (n, k))
    weights = np.broadcast_to(np.ones(k, np.float32) if importance is None else importance, (n, k))
    step = max(1, SLICE_VALUES // (per_row * fmt.block))

    def improve(start: int) -> None:
        rows = slice(start, min(start + step, n))
        groups = slice(rows.start * per_row, rows.stop * per_row)
        part, w = (np.pad(a[rows], pad).reshape(-1, fmt.block) for a in (x, weights))
        _improve(fmt, part, w, {name: f[groups] for name, f in fields.items()}, negative_scales)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(improve, range(0, n, step)))
    return raw


class _Groups:
    """Groups, and the best scale of each so far.   x, w: [groups, G]."""

    def __init__(self, fmt: QuantFormat, x: F32Array, w: F32Array, scale: F32Array, negative: bool) -> None:
        assert isinstance(fmt.code, Bits)
        self.low, self.high = fmt.code.map.low, fmt.code.map.high
        self.x, self.w, self.negative = x, w, negative
        self.scale = scale
        self.loss = self._loss(scale)

    def codes(self, scale: F32Array) -> F32Array:
        """As the reference encoder: times the reciprocal, rounded before it is clamped."""
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        q: F32Array = self.x * inverse[:, None]
        np.rint(q, out=q)
        return np.clip(q, self.low, self.high, out=q)

    def _loss(self, scale: F32Array) -> F32Array:
        off = self.codes(scale)
        off *= scale[:, None]
        np.subtract(self.x, off, out=off)
        off *= off
        off *= self.w
        loss: F32Array = off.sum(axis=1)
        return loss

    def exact_loss(self, scale: F32Array) -> NDArray[np.float64]:
        off = self.x - self.codes(scale).astype(np.float64) * scale[:, None]
        loss: NDArray[np.float64] = (off * off * self.w).sum(axis=1)
        return loss

    def offer(self, scale: F32Array) -> None:
        """Takes a candidate, rounded to float16, where it loses less than what there is."""
        with np.errstate(over="ignore"):
            half = scale.astype(np.float16).astype(np.float32)
        fits = np.isfinite(half) & ((half != 0) if self.negative else (half > 0))
        half = np.where(fits, half, self.scale)
        loss = self._loss(half)
        better = loss < self.loss
        self.scale, self.loss = np.where(better, half, self.scale), np.where(better, loss, self.loss)

    def offer_near(self, scale: F32Array, itself: bool = True) -> None:
        """The scale and its neighbours in float16."""
        with np.errstate(over="ignore"):
            half = scale.astype(np.float16)
            for towards in (-np.inf, np.inf):
                self.offer(np.nextafter(half, np.float16(towards)).astype(np.float32))
        if itself:
            self.offer(scale)

    def fitted(self, scale: F32Array) -> F32Array:
        """The scale of least loss for the codes that `scale` gives; 0 where all are 0."""
        q = self.codes(scale)
        weighted = self.w * q
        below = (weighted * q).sum(axis=1)
        fit: F32Array = np.divide((weighted * self.x).sum(axis=1), below, out=np.zeros_like(below), where=below > 0)
        return fit


def _improve(fmt: QuantFormat, x: F32Array, w: F32Array, out: Fields, negative: bool) -> None:
    assert isinstance(fmt.code, Bits) and fmt.d is not None
    reference = np.ascontiguousarray(out[fmt.d.field]).view("<f2")[:, 0].astype(np.float32)
    g = _Groups(fmt, x, w, reference, negative)
    extreme: F32Array = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], 1)[:, 0]
    ends: list[F32Array] = [np.divide(np.abs(extreme), np.float32(g.high))]
    if g.low != -g.high:  # else it is the first, or its negative, which loses the same
        ends.append(extreme / np.float32(g.low))
    for end in ends:
        for multiple in MULTIPLES:
            g.offer(end * multiple)
    for power in POWERS:
        g.offer(reference * power)
    g.offer_near(reference, itself=False)
    g.offer_near(g.fitted(reference))
    g.offer_near(g.fitted(g.scale))
    kept = g.exact_loss(g.scale) >= g.exact_loss(reference)  # what float32 sums took for less
    scale = np.where(kept, reference, g.scale)
    codes = g.codes(scale).astype(np.int8)
    for field in out.values():
        field[:] = 0
    out[fmt.d.field][:] = scale.astype("<f2").view(np.uint8).reshape(-1, 2)
    fmt.code.write(out, codes)
