"""Element by element, and moves of whole heads."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import frozen

from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, require, same_shape
from ninfer.ir.ops.activations import sigmoid, silu
from ninfer.ir.ops.checks import is_rows
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
