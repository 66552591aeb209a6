"""What drafters need that fill a whole block of positions in one pass (models/dflash.py).

A CPU runs the references as they are; GPUs have kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from ninfer.formats.dtypes import F32, I32, U32
from ninfer.formats.rng import uniform
from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, require
from ninfer.ir.ops.attention import Attention
from ninfer.ir.ops.checks import are_ints, is_rows
from ninfer.ir.ops.sample import PARAM_WORDS
from ninfer.ir.step import SAMPLE_PARAMS
from ninfer.ir.types import Arrays, B, Env, L, T, TensorType, Types, f32_array, ints, plain

PURPOSE_PROPOSE = 5  # of uniforms that draw proposals; targets draw with another
NUM_CANDIDATES = 16


@frozen
class BlockAttention(Attention):
    """Attention whose rows see all rows of their sequence's step, later ones too. window: |distance| below it."""

    def hidden(self, key: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.bool_]:
        none = np.zeros(np.broadcast_shapes(key.shape, row.shape), bool)
        return none if self.window is None else np.abs(key - row) >= self.window

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for case in Attention.cases():
            assert isinstance(case.op, Attention)
            a = case.op
            if a.fmt.name == "f32":
                op = cls(a.fmt, a.heads, a.kv_heads, a.head_dim, a.scale, a.window)
                yield evolve(case, op=op)


@frozen
class BlockConv(Op):
    """y_i = sum over taps t <= i of (base[side, t] + delta_i[side, t, group of c]) x_{i-t}, i counted in the sequence's
    rows of the step.

    x: [T, N]; delta: [T, 2 * taps * N/group] (side, tap, group); base: [2, taps, N]; row_seq [T]; row_start [B]
    -> [T, N].
    """

    side: int
    taps: int
    group: int

    def infer(self, args: Types) -> Types:
        x, delta, base, row_seq, row_start = args
        n = is_rows(self, "x", x)
        groups = n // self.group
        require(self, n % self.group == 0, f"groups of {self.group} do not divide {n} channels")
        fits = delta.shape == (x.shape[0], 2 * self.taps * groups)
        require(self, fits, f"delta is {delta}, not {2 * self.taps * groups} wide")
        require(self, base.shape == (2, self.taps, n), f"base is {base}, not [2, {self.taps}, {n}]")
        are_ints(self, "row_seq", (x.shape[0],), row_seq)
        are_ints(self, "row_start", (B,), row_start)
        return (x,)

    def reference(self, args: Arrays) -> Arrays:
        x, delta, base = f32_array(args[0]), f32_array(args[1]), f32_array(args[2])[self.side]
        row_seq, row_start = ints(args[3]), ints(args[4])
        d = delta.reshape(len(x), 2, self.taps, -1)[:, self.side].repeat(self.group, axis=-1)  # [T, taps, N]
        place = np.arange(len(x)) - row_start[row_seq]
        out = np.zeros_like(x)
        for t in range(self.taps):
            rows = np.flatnonzero(place >= t)
            out[rows] += (base[t] + d[rows, t]) * x[rows - t]
        return (out,)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for side in (0, 1):
            (xt, x), (dt, d) = cw.rows(T, 6, 32), cw.rows(T, 6, 8, seed=2, scale=0.3)
            base = cw.rng(3).standard_normal((2, 2, 32)).astype(np.float32)
            typed = (cw.ints(T, [0, 0, 0, 1, 1, 1]), cw.ints(B, [0, 3]))
            types = (xt, dt, TensorType((2, 2, 32)), *(t for t, _ in typed))
            arrays = (x, d, base, *(a for _, a in typed))
            yield Case(cls(side, 2, 16), f"side{side}", types, arrays, Env(6, 1, 2), rtol=1e-6, atol=1e-6)


@frozen
class SelectDrafts(Op):
    """Walks each sequence's logit rows, choosing a token at a time among the best candidates of each row.

    With C_i the candidates of row i (logit falling, id rising) and E_i[c] = logit + sum_r pred[prev, r] gate_i[r]
    succ[c, r], prev being the token chosen in the row before, or the sequence's first token of the step: greedy takes
    the largest E, the first of equals; else the first whose running sum of softmax(E / temperature) exceeds the uniform
    of (seed, position - 2), two before the position that params give, which is of the token after the draft.

    logits: [L, V]; gate: [L, R]; pred, succ: [V, R]; params: u32 [L, words]; tokens, row_seq [T]; row_start [B];
    logit_rows [L] -> draft i32 [L], candidates i32 [L, C], their probabilities f32 [L, C] (greedy: one is 1).
    """

    domain: int
    count: int = NUM_CANDIDATES

    def infer(self, args: Types) -> Types:
        logits, gate, pred, succ, params, tokens, row_seq, row_start, logit_rows = args
        v, rows = is_rows(self, "logits", logits), logits.shape[0]
        require(self, self.count <= self.domain <= v, f"{self.count} candidates, domain {self.domain} of {logits}")
        rank = is_rows(self, "gate", gate)
        for name, book in (("pred", pred), ("succ", succ)):
            require(self, book.shape == (v, rank), f"{name} is {book}, not [{v}, {rank}]")
        require(self, params == TensorType((rows, PARAM_WORDS), U32), f"params is {params}")
        are_ints(self, "tokens row_seq", (T,), tokens, row_seq)
        are_ints(self, "row_start", (B,), row_start)
        are_ints(self, "logit_rows", (rows,), logit_rows)
        return TensorType((rows,), I32), TensorType((rows, self.count), I32), TensorType((rows, self.count), F32)

    def reference(self, args: Arrays) -> Arrays:
        logits, gate, pred, succ = (f32_array(a) for a in args[:4])
        params = np.ascontiguousarray(plain(args[4])).view(SAMPLE_PARAMS.numpy).reshape(-1)
        tokens, row_seq, row_start, logit_rows = map(ints, args[5:])
        n = len(logits)
        drafts, q = np.zeros(n, np.int32), np.zeros((n, self.count), np.float32)
        candidates = np.argsort(-logits[:, : self.domain], axis=1, kind="stable")[:, : self.count].astype(np.int32)
        before = -1
        for i, row in enumerate(logit_rows):
            b = row_seq[row]
            prev = tokens[row_start[b]] if b != before else drafts[i - 1]
            before = b
            ids = candidates[i]
            scores = logits[i, ids] + (pred[prev] * gate[i] * succ[ids]).sum(axis=1)
            q[i], rank = proposal(scores, params[i])
            drafts[i] = ids[rank]
        return drafts, candidates, q

    @classmethod
    def cases(cls) -> Iterable[Case]:
        (lt, logits), (gt, gate) = cw.rows(L, 5, 200), cw.rows(L, 5, 8, seed=1)
        books = [(cw.rng(s).standard_normal((200, 8)) * 0.5).astype(np.float32) for s in (2, 3)]
        p = np.zeros(5, SAMPLE_PARAMS.numpy)
        p["temperature"], p["seed"], p["position"] = [0, 0, 0.8, 0.8, 0.8], 77, [12, 13, 44, 45, 46]
        typed = (
            cw.ints(T, [5, 199, 199, 9, 199, 199, 199]),
            cw.ints(T, [0, 0, 0, 1, 1, 1, 1]),
            cw.ints(B, [0, 3]),
            cw.ints(L, [1, 2, 4, 5, 6]),
        )
        types = (
            lt,
            gt,
            *(TensorType((200, 8)) for _ in books),
            TensorType((L, PARAM_WORDS), U32),
            *(t for t, _ in typed),
        )
        arrays = (logits, gate, *books, p.view(np.uint32).reshape(5, -1), *(a for _, a in typed))
        yield Case(cls(190), "walk", types, arrays, Env(7, 5, 2), rtol=1e-5, atol=1e-6)


def proposal(scores: NDArray[np.float32], p: object) -> tuple[NDArray[np.float32], int]:
    """Probabilities of a row's candidates, and the rank that is drawn."""
    record = np.asarray(p)
    q = np.zeros(len(scores), np.float32)
    temperature = float(record["temperature"])
    if temperature <= 0:
        rank = int(np.argmax(scores))
        q[rank] = 1
        return q, rank
    e = np.exp((scores - scores.max()) / np.float32(temperature))
    q = (e / e.sum()).astype(np.float32)
    u = uniform(int(record["seed"]), int(record["position"]) - 2, PURPOSE_PROPOSE, 0)[0]
    above = np.flatnonzero(np.cumsum(q, dtype=np.float32) > u)
    return q, int(above[0]) if len(above) else len(q) - 1


def block_attention(g: Graph, q: Value, cache: Value, op: BlockAttention) -> Value:
    step = g.step
    return g.one(
        op, q, cache, g.states["page_table"], step["row_seq"], step["row_start"], step["seq_slot"], step["kv_len"]
    )


def block_conv(g: Graph, x: Value, delta: Value, base: Value, op: BlockConv) -> Value:
    return g.one(op, x, delta, base, g.step["row_seq"], g.step["row_start"])


BLOCK_OPS: tuple[type[Op], ...] = (BlockAttention, BlockConv, SelectDrafts)
