"""Element by element, and moves of whole heads."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import frozen

from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, require, same_shape
from ninfer.ir.ops.activations import gelu_tanh, sigmoid, silu
from ninfer.ir.ops.checks import is_rows, is_vector
from ninfer.ir.types import Arrays, Env, T, TensorType, Types, f32_array


@frozen
class SigmoidMul(Op):
    """y = x * sigmoid(gate).   x, gate: [R, N] -> [R, N]."""

    def infer(self, args: Types) -> Types:
        same_shape(self, *args)
        is_rows(self, "x", args[0])
        return args[:1]

    def reference(self, args: Arrays) -> Arrays:
        x, gate = map(f32_array, args)
        return (x * sigmoid(gate),)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n_rows in (1, 5):
            (xt, x), (gt, gate) = cw.rows(T, n_rows, 200), cw.rows(T, n_rows, 200, seed=1, scale=6)
            env = Env(rows=n_rows, logit_rows=1, seqs=1)
            yield Case(cls(), f"r{n_rows}", (xt, gt), (x, gate), env, rtol=5e-6, atol=1e-7)


@frozen
class SiluMul(Op):
    """y = silu(gate) * up.   gate, up: [R, N] -> [R, N]. For gate and up weights that one launch cannot take."""

    def infer(self, args: Types) -> Types:
        same_shape(self, *args)
        is_rows(self, "x", args[0])
        return args[:1]

    def reference(self, args: Arrays) -> Arrays:
        gate, up = map(f32_array, args)
        return (silu(gate) * up,)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n_rows in (1, 5):
            (gt, gate), (ut, up) = cw.rows(T, n_rows, 200, scale=6), cw.rows(T, n_rows, 200, seed=1)
            env = Env(rows=n_rows, logit_rows=1, seqs=1)
            yield Case(cls(), f"r{n_rows}", (gt, ut), (gate, up), env, rtol=5e-6, atol=1e-7)


@frozen
class GeluMul(Op):
    """y = gelu_tanh(gate) * up.   gate, up: [R, N] -> [R, N]."""

    def infer(self, args: Types) -> Types:
        same_shape(self, *args)
        is_rows(self, "x", args[0])
        return args[:1]

    def reference(self, args: Arrays) -> Arrays:
        gate, up = map(f32_array, args)
        return (gelu_tanh(gate) * up,)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n_rows in (1, 5):
            (gt, gate), (ut, up) = cw.rows(T, n_rows, 200, scale=3), cw.rows(T, n_rows, 200, seed=1)
            env = Env(rows=n_rows, logit_rows=1, seqs=1)
            # the exponent is a cubic of up to 100, rounded in another order
            yield Case(cls(), f"r{n_rows}", (gt, ut), (gate, up), env, rtol=5e-5, atol=1e-6)


@frozen
class GluRows(Op):
    """y_t = silu(gate_t) * up_t * sigmoid(h_t . w), as Qwen weighs its shared expert.

    gate, up: [R, N]; h: [R, K]; w: [K] -> [R, N].
    """

    def infer(self, args: Types) -> Types:
        gate, up, h, w = args
        same_shape(self, gate, up)
        is_rows(self, "gate", gate)
        require(self, is_rows(self, "h", h) == is_vector(self, "w", w), f"w is {w} for rows {h}")
        require(self, h.shape[0] == gate.shape[0], f"{h} and {gate} have other rows")
        return (gate,)

    def reference(self, args: Arrays) -> Arrays:
        gate, up, h, w = map(f32_array, args)
        return (silu(gate) * up * sigmoid((h @ w)[:, None]),)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n_rows in (1, 5):
            for n, k in ((100, 256), (10, 70)):
                (gt, gate), (ut, up) = cw.rows(T, n_rows, n, scale=3), cw.rows(T, n_rows, n, seed=1)
                (ht, h), (wt, w) = cw.rows(T, n_rows, k, seed=2), cw.vector(k, mean=0)
                types, env = (gt, ut, ht, wt), Env(rows=n_rows, logit_rows=1, seqs=1)
                # a sum of 256 float32 products in another order, in the exponent
                yield Case(cls(), f"n{n}-r{n_rows}", types, (gate, up, h, w), env, rtol=3e-5, atol=1e-6)


@frozen
class Add(Op):
    """y = a + b, times scale if there is one.   a, b: [R, N]; scale: [1] -> [R, N]."""

    def infer(self, args: Types) -> Types:
        a, b, *scale = args
        same_shape(self, a, b)
        is_rows(self, "a", a)
        for s in scale:
            require(self, is_vector(self, "scale", s) == 1, f"scale is {s}, not one number")
        return (a,)

    def reference(self, args: Arrays) -> Arrays:
        a, b, *scale = map(f32_array, args)
        y = a + b
        return (y * scale[0] if scale else y,)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n_rows in (1, 5):
            (at, a), (bt, b) = cw.rows(T, n_rows, 100), cw.rows(T, n_rows, 100, seed=1)
            env, (st, s) = Env(rows=n_rows, logit_rows=1, seqs=1), cw.vector(1)
            yield Case(cls(), f"r{n_rows}", (at, bt), (a, b), env, rtol=1e-6, atol=1e-7)
            yield Case(cls(), f"scaled-r{n_rows}", (at, bt, st), (a, b, s), env, rtol=1e-6, atol=1e-7)


@frozen
class SoftCap(Op):
    """y = cap * tanh(x / cap).   x: [R, N] -> [R, N]."""

    cap: float

    def infer(self, args: Types) -> Types:
        (x,) = args
        is_rows(self, "x", x)
        return (x,)

    def reference(self, args: Arrays) -> Arrays:
        cap = np.float32(self.cap)
        return (cap * np.tanh(f32_array(args[0]) / cap),)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n_rows in (1, 5):
            xt, x = cw.rows(T, n_rows, 100, scale=30)
            # tanh from an exponential: near 0 the difference of two numbers near 1
            yield Case(cls(30.0), f"r{n_rows}", (xt,), (x,), Env(n_rows, 1, 1), rtol=2e-6, atol=1e-5)


@frozen
class TakeHeads(Op):
    """Head i of y is head order[i] of x; a head is D consecutive values.   x: [R, H*D] -> [R, len(order)*D]."""

    head_dim: int
    order: tuple[int, ...]

    def infer(self, args: Types) -> Types:
        (x,) = args
        n = is_rows(self, "x", x)
        require(self, n % self.head_dim == 0, f"{x} is not heads of {self.head_dim}")
        heads = n // self.head_dim
        require(self, all(0 <= i < heads for i in self.order), f"{x} has {heads} heads, but {self.order} are asked")
        return (TensorType((x.shape[0], len(self.order) * self.head_dim)),)

    def reference(self, args: Arrays) -> Arrays:
        x = f32_array(args[0])
        heads = x.reshape(len(x), -1, self.head_dim)[:, np.array(self.order)]
        return (heads.reshape(len(x), -1),)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for d, order in ((128, (0, 2, 1, 3)), (16, (5, 0, 0, 3, 1, 2))):
            xt, x = cw.rows(T, 5, (max(order) + 1) * d)
            yield Case(cls(d, order), f"d{d}", (xt,), (x,), Env(rows=5, logit_rows=1, seqs=1), rtol=0, atol=0)


def sigmoid_mul(g: Graph, x: Value, gate: Value) -> Value:
    return g.one(SigmoidMul(), x, gate)


def silu_mul(g: Graph, gate: Value, up: Value) -> Value:
    return g.one(SiluMul(), gate, up)


def take_heads(g: Graph, x: Value, order: tuple[int, ...], *, head_dim: int) -> Value:
    return g.one(TakeHeads(head_dim, order), x)


def gelu_mul(g: Graph, gate: Value, up: Value) -> Value:
    return g.one(GeluMul(), gate, up)


def glu_rows(g: Graph, gate: Value, up: Value, h: Value, w: Value) -> Value:
    return g.one(GluRows(), gate, up, h, w)


def add(g: Graph, a: Value, b: Value, scale: Value | None = None) -> Value:
    return g.one(Add(), a, b) if scale is None else g.one(Add(), a, b, scale)


def soft_cap(g: Graph, x: Value, cap: float) -> Value:
    return g.one(SoftCap(cap), x)
