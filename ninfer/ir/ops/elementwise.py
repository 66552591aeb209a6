"""Element by element."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import frozen

from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, same_shape
from ninfer.ir.types import Arrays, Env, T, Types, f32_array


@frozen
class SigmoidMul(Op):
    """y = x * sigmoid(gate).   x, gate: [R, N] -> [R, N]."""

    def infer(self, args: Types) -> Types:
        same_shape(self, *args)
        return args[:1]

    def reference(self, args: Arrays) -> Arrays:
        x, gate = map(f32_array, args)
        return (x / (1 + np.exp(-gate)),)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n_rows in (1, 5):
            (xt, x), (gt, gate) = cw.rows(T, n_rows, 200), cw.rows(T, n_rows, 200, seed=1, scale=6)
            env = Env(rows=n_rows, logit_rows=1, seqs=1)
            yield Case(cls(), f"r{n_rows}", (xt, gt), (x, gate), env, rtol=5e-6, atol=1e-7)


def sigmoid_mul(g: Graph, x: Value, gate: Value) -> Value:
    return g.one(SigmoidMul(), x, gate)
