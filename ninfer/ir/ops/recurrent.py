"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): the causal convolution and the delta rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np
from attrs import frozen

from ninfer.formats.dtypes import F16, F32
from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, Work, require, same_shape
from ninfer.ir.ops.activations import sigmoid, silu
from ninfer.ir.ops.checks import are_ints, is_rows, is_vector
from ninfer.ir.types import Array, Arrays, B, Env, S, T, TensorType, Types, f32_array, ints, plain

SEQ_FIELDS = "row_start row_count seq_slot kv_len"


def _sequences(row_start: Array, row_count: Array, seq_slot: Array, kv_len: Array) -> Iterator[tuple[range, int, bool]]:
    """(rows, slot, starts) of each sequence in the step."""
    for start, count, slot, length in zip(*map(ints, (row_start, row_count, seq_slot, kv_len)), strict=True):
        yield range(start, start + count), int(slot), length == 0


@frozen
class CausalConvSilu(Op):
    """u[t, c] = silu(sum_j w[c, j] * x[t - (taps-1) + j, c]), oldest tap first; depthwise, per sequence.

    x: [T, C]; w: [C, taps]; state: f32 [S, C, taps-1], the last raw inputs, oldest first; row_start, row_count,
    seq_slot, kv_len: [B] -> [T, C]. The state moves on by the rows. It counts as zero where kv_len is 0.
    """

    mutates: ClassVar[tuple[int, ...]] = (2,)

    def infer(self, args: Types) -> Types:
        x, w, state, *seqs = args
        c = is_rows(self, "x", x)
        taps = is_rows(self, "taps", w)
        require(self, w.shape[0] == c, f"x is {x}, but the taps are {w}")
        require(self, state == TensorType((S, c, taps - 1), F32), f"state is {state} for taps {w}")
        are_ints(self, SEQ_FIELDS, (B,), *seqs)
        return (x,)

    def reference(self, args: Arrays) -> Arrays:
        x, w, state = f32_array(args[0]), f32_array(args[1]), plain(args[2])
        taps = w.shape[1]
        out = np.zeros_like(x)
        for rows, slot, starts in _sequences(*args[3:7]):
            past = np.zeros_like(state[slot].T) if starts else state[slot].T
            line = np.concatenate([past, x[rows.start : rows.stop]])  # [taps-1 + n, C]
            n = len(rows)
            total = line[:n] * w[:, 0]
            for j in range(1, taps):
                total += line[j : j + n] * w[:, j]
            out[rows.start : rows.stop] = silu(total)
            state[slot] = line[n:].T
        return (out,)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        (xt, x), (wt, w) = cw.rows(T, 9, 96), cw.rows(96, 96, 4, seed=2)
        state = cw.rng(3).standard_normal((4, 96, 3)).astype(np.float32)
        types = (xt, wt, TensorType((S, 96, 3), F32), *_seq_types())
        yield Case(cls(), "mixed", types, (x, w, state, *_seq_arrays()), Env(9, 1, 3, slots=4), rtol=1e-5, atol=2e-6)


@frozen
class GatedDelta(Op):
    """The gated delta rule, row by row of each sequence, for each value head j with key head j // (Hv/Hk).

    q, k = l2norm of their heads (x * rsqrt(sum x^2 + 1e-6)), q scaled by dk^-1/2; alpha = exp(-exp(a_log) *
    softplus(a + dt_bias)); beta = sigmoid(b);  S <- alpha S;  S <- S + beta (v - S k) k^T;  o = S q.

    u: [T, 2*Hk*dk + Hv*dv] (q | k | v, heads-major); a, b: [T, Hv]; a_log, dt_bias: [Hv];
    state: f32 or f16 [S, Hv, dv, dk]; row_start, row_count, seq_slot, kv_len: [B] -> [T, Hv*dv].
    An f16 state is rounded after every row, so that it does not depend on how rows are cut into steps.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    mutates: ClassVar[tuple[int, ...]] = (5,)

    def infer(self, args: Types) -> Types:
        u, a, b, a_log, dt_bias, state, *seqs = args
        width = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        require(self, is_rows(self, "u", u) == width, f"u is {u}, not {width} wide")
        fits = self.value_heads % self.key_heads == 0
        require(self, fits, f"{self.value_heads} value heads do not share {self.key_heads} key heads")
        same_shape(self, a, b)
        same_shape(self, a_log, dt_bias)
        require(self, a.shape == (u.shape[0], self.value_heads), f"a is {a}, not {self.value_heads} wide")
        require(self, is_vector(self, "a_log", a_log) == self.value_heads, f"a_log is {a_log} for a {a}")
        dtype = F16 if state.dtype is F16 else F32
        expected = TensorType((S, self.value_heads, self.value_dim, self.key_dim), dtype)
        require(self, state == expected, f"state is {state}, not {expected}")
        are_ints(self, SEQ_FIELDS, (B,), *seqs)
        return (TensorType((u.shape[0], self.value_heads * self.value_dim)),)

    def reference(self, args: Arrays) -> Arrays:
        u, a, b, a_log, dt_bias = map(f32_array, args[:5])
        state = plain(args[5])
        n, kd = len(u), self.key_heads * self.key_dim
        repeat = self.value_heads // self.key_heads
        q, k = (u[:, i * kd : (i + 1) * kd].reshape(n, self.key_heads, self.key_dim) for i in (0, 1))
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + np.float32(1e-6)) for x in (q, k))
        q = np.repeat(q * np.float32(self.key_dim**-0.5), repeat, axis=1)
        k = np.repeat(k, repeat, axis=1)
        v = u[:, 2 * kd :].reshape(n, self.value_heads, self.value_dim)
        alpha = np.exp(-np.exp(a_log) * np.logaddexp(np.float32(0), a + dt_bias))
        beta = sigmoid(b)
        out = np.zeros((n, self.value_heads, self.value_dim), np.float32)
        for rows, slot, starts in _sequences(*args[6:10]):
            s = (np.zeros_like(state[slot]) if starts else state[slot]).astype(np.float32)
            for t in rows:
                s *= alpha[t][:, None, None]
                delta = beta[t][:, None] * (v[t] - (s @ k[t][:, :, None])[..., 0])
                s += delta[:, :, None] * k[t][:, None, :]
                out[t] = (s @ q[t][:, :, None])[..., 0]
                s = s.astype(state.dtype).astype(np.float32)
            state[slot] = s
        return (out.reshape(n, -1),)

    def work(self, args: Types, env: Env) -> Work:
        """The states of the step's sequences, read and written."""
        per_seq = 4 * self.value_heads * self.value_dim * self.key_dim
        return Work(2 * env.seqs * per_seq, 8 * env.rows * per_seq // 4)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for hk, hv, dk, dv, dtype in ((2, 4, 32, 32, F32), (1, 2, 128, 128, F32), (1, 2, 128, 128, F16)):
            ut, u = cw.rows(T, 9, 2 * hk * dk + hv * dv)
            (at, a), (bt, b) = cw.rows(T, 9, hv, seed=1), cw.rows(T, 9, hv, seed=2)
            (lt, a_log), (dt, dt_bias) = cw.vector(hv, seed=4, mean=0.3), cw.vector(hv, seed=5, mean=-1)
            state = (cw.rng(3).standard_normal((4, hv, dv, dk)) * 0.3).astype(dtype.numpy)
            types = (ut, at, bt, lt, dt, TensorType((S, hv, dv, dk), dtype), *_seq_types())
            arrays = (u, a, b, a_log, dt_bias, state, *_seq_arrays())
            # 5 steps of a recurrence over sums of 128 float32 products; f16 may fall to the neighbour
            name = f"h{hk}-{hv}-d{dk}{'-f16' if dtype is F16 else ''}"
            rtol, atol = (2e-3, 1e-3) if dtype is F16 else (5e-5, 1e-5)
            yield Case(cls(hk, hv, dk, dv), name, types, arrays, Env(9, 1, 3, slots=4), rtol, atol)


def _seq_types() -> Types:
    return tuple(cw.ints(B, [0, 0, 0])[0] for _ in range(4))


def _seq_arrays() -> Arrays:
    """Sequences of 1, 5 and 3 rows in slots 2, 0 and 3; the last one starts."""
    return tuple(np.array(x, np.int32) for x in ([0, 1, 6], [1, 5, 3], [2, 0, 3], [130, 62, 0]))


def _seq_values(g: Graph) -> tuple[Value, ...]:
    return tuple(g.step[name] for name in SEQ_FIELDS.split())


def causal_conv_silu(g: Graph, x: Value, w: Value, state: Value) -> Value:
    return g.one(CausalConvSilu(), x, w, state, *_seq_values(g))


def gated_delta(
    g: Graph, op: GatedDelta, u: Value, a: Value, b: Value, a_log: Value, dt_bias: Value, state: Value
) -> Value:
    return g.one(op, u, a, b, a_log, dt_bias, state, *_seq_values(g))
