"""Mixtures of experts: a router picks few experts for each row, and only their weights are read.

The experts of a layer lie in one stack of rows, a run of equal length for each. Expert e lies in place `places[e]` of
it, so that a stack may hold fewer experts than the model has, in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.formats.dtypes import I32
from ninfer.formats.quant import Packed, by_name
from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, Work, require
from ninfer.ir.ops.activations import gelu_tanh, silu
from ninfer.ir.ops.checks import are_ints, is_rows, is_vector
from ninfer.ir.types import Array, Arrays, Env, T, TensorType, Types, f32_array, ints

ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


@frozen
class PickExperts(Op):
    """p = softmax(factor * logits), factor above 0; the top_k largest logits, the lowest id among equals, in order.

    logits: [R, E]; scale: [E], optional -> ids i32 [R, top_k], weights [R, top_k]. A weight is p over the sum of the
    picked p (normalise) or p itself, times scale[id].
    """

    top_k: int
    normalise: bool = True
    factor: float = 1.0

    def infer(self, args: Types) -> Types:
        logits, *scale = args
        n = is_rows(self, "logits", logits)
        require(self, self.top_k <= n, f"{self.top_k} of {n} experts are asked for")
        require(self, self.factor > 0, f"factor is {self.factor}")
        for s in scale:
            require(self, is_vector(self, "scale", s) == n, f"scale is {s} for {n} experts")
        picked = (logits.shape[0], self.top_k)
        return TensorType(picked, I32), TensorType(picked)

    def reference(self, args: Arrays) -> Arrays:
        logits, *scale = map(f32_array, args)
        p = np.exp((logits - logits.max(axis=1, keepdims=True)) * np.float32(self.factor))
        p /= p.sum(axis=1, keepdims=True)
        ids = np.argsort(-logits, axis=1, kind="stable")[:, : self.top_k].astype(np.int32)
        weights = np.take_along_axis(p, ids, axis=1)
        if self.normalise:
            weights /= weights.sum(axis=1, keepdims=True)
        for s in scale:
            weights = weights * s[ids]
        return ids, weights

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n, k in ((8, 2), (128, 8), (256, 8)):
            xt, x = cw.rows(T, 5, n, seed=n)
            st, s = cw.vector(n)
            env = Env(rows=5, logit_rows=1, seqs=1)
            # exponentials of two libraries, one sum of up to 256 float32 values
            yield Case(cls(k), f"e{n}", (xt,), (x,), env, rtol=1e-5, atol=1e-7)
            yield Case(cls(k, False, 0.5), f"e{n}-scaled", (xt, st), (x, s), env, rtol=1e-5, atol=1e-7)
        tied = np.zeros((2, 12), np.float32)
        tied[1, [3, 7, 9]] = 1
        yield Case(cls(4), "ties", (TensorType((T, 12)),), (tied,), Env(2, 1, 1), rtol=1e-5, atol=1e-7)


def _check_picks(op: Op, rows: TensorType, ids: TensorType, places: TensorType, top_k: int) -> None:
    are_ints(op, "ids", (rows.shape[0], top_k), ids)
    shape = places.shape
    require(op, len(shape) == 1 and places.dtype is I32, f"places must be i32 [experts], not {places}")


def _check_stack(op: Op, name: str, w: TensorType, rows: int, k: int) -> None:
    require(op, len(w.shape) == 2 and w.fmt is not None, f"{name} must be a matrix with a format, not {w}")
    n = w.shape[0]
    whole = isinstance(n, int) and n % rows == 0 and w.shape[1] == k
    require(op, whole, f"{name} is {w}, not experts of {rows} rows of {k}")


def _rows_of(w: Array, start: int, count: int) -> NDArray[np.float32]:
    """Rows of a stack, decoded."""
    if isinstance(w, Packed):
        return w.format.unpack(w.format.slice_rows(w.raw, w.shape, start, count), (count, w.shape[1]))
    return f32_array(w)[start : start + count]


def _groups(ids: Array, places: Array) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.intp]]]:
    """Place of each expert that is used, and the rows and picks that use it."""
    picked, where = ints(ids), ints(places)
    for e in np.unique(picked):
        rows, picks = np.nonzero(picked == e)
        yield int(where[e]), rows, picks


def _touched(env: Env, rows: int, top_k: int, w: TensorType, num: int) -> int:
    """Bytes of the experts that so many rows use at most."""
    return w.nbytes(env) * min(rows * top_k, num) // num


@frozen
class ExpertGlu(Op):
    """y[t, j] = act(x_t Wg_e^T) * (x_t Wu_e^T) for the picked experts e = ids[t, j].

    x: [R, K]; ids: i32 [R, top_k]; places: i32 [E]; then a stack of [gate; up] runs of 2 * inner rows, or a stack of
    gates and one of ups with runs of inner rows, in rows of K -> [R, top_k * inner].
    """

    top_k: int
    inner: int
    act: str = "silu"

    def infer(self, args: Types) -> Types:
        x, ids, places, *stacks = args
        k = is_rows(self, "x", x)
        _check_picks(self, x, ids, places, self.top_k)
        require(self, len(stacks) in (1, 2), f"{len(stacks)} stacks of weights; one or two are meant")
        require(self, self.act in ACTIVATIONS, f"no activation {self.act!r}; there are {', '.join(ACTIVATIONS)}")
        for w in stacks:
            _check_stack(self, "weight", w, self.inner * (3 - len(stacks)), k)
        return (TensorType((x.shape[0], self.top_k * self.inner)),)

    def reference(self, args: Arrays) -> Arrays:
        x, ids, places, *stacks = args
        rows, n, act = f32_array(x), self.inner, ACTIVATIONS[self.act]
        out = np.zeros((len(rows), self.top_k, n), np.float32)
        for place, picked, j in _groups(ids, places):
            if len(stacks) == 1:
                both = _rows_of(stacks[0], 2 * n * place, 2 * n)
                gate, up = both[:n], both[n:]
            else:
                gate, up = (_rows_of(w, n * place, n) for w in stacks)
            out[picked, j] = act(rows[picked] @ gate.T) * (rows[picked] @ up.T)
        return (out.reshape(len(rows), -1),)

    def work(self, args: Types, env: Env) -> Work:
        x, _, places, *stacks = args
        (num,), (rows, k) = places.concrete(env), x.concrete(env)
        nbytes = sum(_touched(env, rows, self.top_k, w, num) for w in stacks)
        return Work(nbytes + x.nbytes(env), 4 * rows * self.top_k * self.inner * k)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for name in ("f32", "bf16", "q8_0", "q4_g64", "q4_1"):
            for n_rows in (1, 5, 40) if name != "f32" else (1, 5, 150):
                fused = n_rows != 5
                case = _picks(n_rows, top_k=3, seed=n_rows)
                xt, x = cw.rows(T, n_rows, 256, seed=3)
                inner = 20 if name == "f32" and n_rows == 5 else 32  # 20: no multiple of any tile
                rows = 6 * inner * (2 if fused else 1)
                one = [cw.matrix(by_name(name), rows, 256, seed=s) for s in range(1 if fused else 2)]
                types = (xt, case[0][0], case[1][0], *(t for t, _ in one))
                arrays = (x, case[0][1], case[1][1], *(a for _, a in one))
                act = "silu" if name != "bf16" else "gelu_tanh"
                env = Env(rows=n_rows, logit_rows=1, seqs=1)
                # sums of 256 float32 products in another order, then a product of two of them
                yield Case(cls(3, inner, act), f"{name}-r{n_rows}", types, arrays, env, rtol=5e-5, atol=5e-5)


@frozen
class ExpertSum(Op):
    """y_t = sum_j weights[t, j] * (h[t, j] D_e^T), e = ids[t, j], in the order of e; + residual_t if there is one.

    h: [R, top_k * inner]; ids: i32 [R, top_k]; weights: [R, top_k]; places: i32 [E]; D: a stack of runs of `outer`
    rows of inner; residual: [R, outer] -> [R, outer].
    """

    top_k: int
    outer: int

    def infer(self, args: Types) -> Types:
        h, ids, weights, places, down, *residual = args
        n = is_rows(self, "h", h)
        require(self, n % self.top_k == 0, f"h is {h} for {self.top_k} picks")
        _check_picks(self, h, ids, places, self.top_k)
        require(self, weights == TensorType(ids.shape), f"weights are {weights} for ids {ids}")
        _check_stack(self, "down", down, self.outer, n // self.top_k)
        y = TensorType((h.shape[0], self.outer))
        require(self, len(residual) < 2 and all(r == y for r in residual), f"residual is {residual}, not {y}")
        return (y,)

    def reference(self, args: Arrays) -> Arrays:
        h, ids, weights, places, down, *residual = args
        n_rows = len(f32_array(h))
        hidden, w = f32_array(h).reshape(n_rows, self.top_k, -1), f32_array(weights)
        out = np.zeros((n_rows, self.outer), np.float32)
        for place, picked, j in _groups(ids, places):
            d = _rows_of(down, self.outer * place, self.outer)
            out[picked] += w[picked, j][:, None] * (hidden[picked, j] @ d.T)
        for r in residual:
            out = out + f32_array(r)
        return (out,)

    def work(self, args: Types, env: Env) -> Work:
        h, _, _, places, down, *_ = args
        (num,), (rows, width) = places.concrete(env), h.concrete(env)
        nbytes = _touched(env, rows, self.top_k, down, num) + h.nbytes(env)
        return Work(nbytes, 2 * rows * width * self.outer)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for name in ("f32", "bf16", "q8_0", "q4_g64", "q4_1"):
            for n_rows in (1, 5, 40) if name != "f32" else (1, 5, 150):
                ids, places = _picks(n_rows, top_k=3, seed=n_rows)
                ht, h = cw.rows(T, n_rows, 3 * 64, seed=3)
                _, w = cw.rows(T, n_rows, 3, seed=4)
                outer = 50 if n_rows == 5 and name != "q8_0" else 64
                dt, d = cw.matrix(by_name(name), 6 * outer, 64)
                types, arrays = [ht, ids[0], TensorType((T, 3)), places[0], dt], [h, ids[1], w, places[1], d]
                if n_rows != 5:
                    rt, r = cw.rows(T, n_rows, outer, seed=5)
                    types, arrays = [*types, rt], [*arrays, r]
                env = Env(rows=n_rows, logit_rows=1, seqs=1)
                # sums of 64 float32 products in another order
                yield Case(cls(3, outer), f"{name}-r{n_rows}", tuple(types), tuple(arrays), env, rtol=3e-5, atol=3e-5)


def _picks(n_rows: int, *, top_k: int, seed: int) -> tuple[cw.Typed, cw.Typed]:
    """Ids of 6 experts, and places in which the stack has them in another order."""
    order = cw.rng(seed).permuted(np.tile(np.arange(6, dtype=np.int32), (n_rows, 1)), axis=1)
    ids = np.ascontiguousarray(order[:, :top_k])
    return (TensorType((T, top_k), I32), ids), (TensorType((6,), I32), np.array([2, 0, 5, 1, 4, 3], np.int32))


def pick_experts(
    g: Graph, logits: Value, top_k: int, *, normalise: bool = True, factor: float = 1.0, scale: Value | None = None
) -> tuple[Value, Value]:
    args = (logits,) if scale is None else (logits, scale)
    ids, weights = g.add(PickExperts(top_k, normalise, factor), *args)
    return ids, weights


def expert_glu(
    g: Graph, x: Value, ids: Value, places: Value, stacks: Sequence[Value], *, inner: int, act: str = "silu"
) -> Value:
    top_k = ids.type.shape[1]
    assert isinstance(top_k, int)
    return g.one(ExpertGlu(top_k, inner, act), x, ids, places, *stacks)


def expert_sum(
    g: Graph, h: Value, picks: tuple[Value, Value], places: Value, down: Value, *, outer: int, residual: Value | None
) -> Value:
    ids, weights = picks
    top_k = ids.type.shape[1]
    assert isinstance(top_k, int)
    more = () if residual is None else (residual,)
    return g.one(ExpertSum(top_k, outer), h, ids, weights, places, down, *more)


def expert_places(g: Graph, num: int) -> Value:
    """Every expert in the place of its number: all of them are in the stack."""
    return g.const("experts.places", TensorType((num,), I32), np.arange(num, dtype=np.int32))
