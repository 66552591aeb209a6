"""Rows in and rows out: token embedding, and picking the rows that need logits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import frozen

from ninfer.formats.dtypes import I32
from ninfer.formats.quant import FLOATS, Packed, by_name
from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, require
from ninfer.ir.ops.checks import is_rows
from ninfer.ir.types import Arrays, Env, L, T, TensorType, Types, f32_array, ints


@frozen
class Embed(Op):
    """y_t = scale * W[token_t].   tokens: i32 [R]; W: [V, H] of any format -> [R, H]."""

    scale: float = 1.0

    def infer(self, args: Types) -> Types:
        tokens, w = args
        require(self, tokens.dtype is I32 and len(tokens.shape) == 1, f"tokens must be i32 [R], not {tokens}")
        require(self, len(w.shape) == 2 and w.fmt is not None, f"weight must be a matrix with a format, not {w}")
        return (TensorType((tokens.shape[0], w.shape[1])),)

    def reference(self, args: Arrays) -> Arrays:
        tokens, w = ints(args[0]), args[1]
        if isinstance(w, Packed):  # only these rows are decoded
            rows = w.format.unpack_rows(w.raw, w.shape, tokens.astype(np.intp))
        else:
            rows = f32_array(w)[tokens]
        return (rows * np.float32(self.scale),)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for fmt in FLOATS:
            (tt, t), (wt, w) = cw.ints(T, [0, 127, 7]), cw.matrix(fmt, 128, 192)
            yield Case(cls(), fmt.name, (tt, wt), (t, w), Env(rows=3, logit_rows=1, seqs=1), rtol=1e-6, atol=1e-7)
        for name in ("f32", "f16", "bf16", "q4_1", "q8_0", "q6_k", "q4_k", "q4_g64", "q6_g64", "q8_g32"):
            (tt, t), (wt, w) = cw.ints(T, [0, 39, 7]), cw.matrix(by_name(name), 40, 256)
            yield Case(cls(), name, (tt, wt), (t, w), Env(rows=3, logit_rows=1, seqs=1), rtol=1e-6, atol=1e-7)


@frozen
class TakeRows(Op):
    """y_l = x[index_l].   x: [T, N]; index: i32 [L] -> [L, N]."""

    def infer(self, args: Types) -> Types:
        x, index = args
        is_rows(self, "x", x)
        require(self, index.dtype is I32 and len(index.shape) == 1, f"index must be i32 [L], not {index}")
        return (TensorType((index.shape[0], *x.shape[1:])),)

    def reference(self, args: Arrays) -> Arrays:
        x, index = args
        return (f32_array(x)[ints(index)],)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        (xt, x), (it, i) = cw.rows(T, 5, 96), cw.ints(L, [4, 0])
        yield Case(cls(), "r5", (xt, it), (x, i), Env(rows=5, logit_rows=2, seqs=1), rtol=0, atol=0)


def embed(g: Graph, tokens: Value, w: Value, *, scale: float = 1.0) -> Value:
    return g.one(Embed(scale), tokens, w)


def take_rows(g: Graph, x: Value, index: Value) -> Value:
    return g.one(TakeRows(), x, index)
