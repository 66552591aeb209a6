"""Root-mean-square norms (Zhang & Sennrich 2019)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import frozen

from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, require, same_shape
from ninfer.ir.ops.activations import silu
from ninfer.ir.ops.checks import is_rows, is_vector
from ninfer.ir.types import Arrays, Env, T, Types, f32_array


@frozen
class RmsNorm(Op):
    """y = x / sqrt(mean(x^2) + eps) * (w + offset), over each run of D values of a row.

    x: [R, N]; w: [D], D divides N (D < N: per head) -> [R, N]. offset 1: weights stored as w - 1 (Qwen, Gemma).
    """

    eps: float = 1e-6
    offset: float = 0.0

    def infer(self, args: Types) -> Types:
        x, w = args
        n, d = is_rows(self, "x", x), is_vector(self, "weight", w)
        require(self, n % d == 0, f"{w} does not divide rows of {x}")
        return (x,)

    def reference(self, args: Arrays) -> Arrays:
        x, w = map(f32_array, args)
        heads = x.reshape(x.shape[0], x.shape[1] // w.shape[0], w.shape[0])
        rms = np.sqrt(np.mean(heads * heads, axis=-1, keepdims=True) + np.float32(self.eps))
        return ((heads / rms * (w + np.float32(self.offset))).reshape(x.shape),)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n, d in ((64, 64), (256, 256), (512, 128), (1000, 1000)):  # 1000: no multiple of any vector width
            for n_rows in (1, 5):
                (xt, x), (wt, w) = cw.rows(T, n_rows, n, seed=d), cw.vector(d)
                env = Env(rows=n_rows, logit_rows=1, seqs=1)
                op = cls(eps=1e-5, offset=1.0 if d == 256 else 0.0)
                yield Case(op, f"n{n}-d{d}-r{n_rows}", (xt, wt), (x, w), env, rtol=5e-6, atol=1e-6)


@frozen
class GatedRmsNorm(Op):
    """y = x / rms(x) * w * silu(z), over each head of D values.   x, z: [R, H*D]; w: [D] -> [R, H*D]."""

    eps: float = 1e-6

    def infer(self, args: Types) -> Types:
        x, w, z = args
        same_shape(self, x, z)
        n, d = is_rows(self, "x", x), is_vector(self, "weight", w)
        require(self, n % d == 0, f"{w} does not divide rows of {x}")
        return (x,)

    def reference(self, args: Arrays) -> Arrays:
        x, w, z = args
        (y,) = RmsNorm(self.eps).reference((x, w))
        return (f32_array(y) * silu(f32_array(z)),)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n, d in ((64, 32), (512, 128)):
            for n_rows in (1, 5):
                (xt, x), (wt, w), (zt, z) = cw.rows(T, n_rows, n), cw.vector(d), cw.rows(T, n_rows, n, seed=8)
                env = Env(rows=n_rows, logit_rows=1, seqs=1)
                yield Case(cls(), f"n{n}-d{d}-r{n_rows}", (xt, wt, zt), (x, w, z), env, rtol=1e-5, atol=1e-6)


def rms_norm(g: Graph, x: Value, w: Value, *, eps: float, offset: float = 0.0) -> Value:
    return g.one(RmsNorm(eps, offset), x, w)


def gated_rms_norm(g: Graph, x: Value, w: Value, z: Value, *, eps: float) -> Value:
    return g.one(GatedRmsNorm(eps), x, w, z)
