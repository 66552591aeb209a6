"""A branch, normed, added to the residual, and the norms of the sum that are read next: one launch for Gemma's five."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, require, same_shape
from ninfer.ir.ops.checks import is_rows, is_vector
from ninfer.ir.types import Arrays, Env, T, TensorType, Types, f32_array


@frozen
class JoinNorms(Op):
    """y = (x + h) * scale, and rms(y; u_i) for each of the next weights.

    h = rms(a; w), or of two branches rms(rms(a; w) + rms(b; v); t), with rms(x; w) = x / sqrt(mean(x^2) + eps) * (w +
    offset).
    x, a, b: [R, N]; w, v, t, u_i: [N]; scale: [1]. Arguments: x, a, w; b, v, t if two; scale if scaled; the u_i
    -> y [R, N], then one [R, N] for each u_i.
    """

    eps: float
    offset: float = 0.0
    two: bool = False
    scaled: bool = False

    @property
    def num_before(self) -> int:
        """Arguments before the next weights."""
        return 3 + 3 * self.two + self.scaled

    def infer(self, args: Types) -> Types:
        require(self, len(args) >= self.num_before, f"{len(args)} arguments, of {self.num_before}")
        rows, vectors = self._roles(args)
        n = is_rows(self, "x", args[0])
        same_shape(self, *rows)
        for v in vectors:
            require(self, is_vector(self, "weight", v) == n, f"weight is {v} for rows {args[0]}")
        if self.scaled:
            scale = args[self.num_before - 1]
            require(self, is_vector(self, "scale", scale) == 1, f"scale is {scale}, not one number")
        return (args[0],) * (1 + len(args) - self.num_before)

    def _roles(self, args: Types) -> tuple[Types, Types]:
        rows, vectors = [args[0], args[1]], [args[2]]
        if self.two:
            rows, vectors = [*rows, args[3]], [*vectors, args[4], args[5]]
        return tuple(rows), (*vectors, *args[self.num_before :])

    def _rms(self, x: NDArray[np.float32], w: NDArray[np.float32]) -> NDArray[np.float32]:
        rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.eps))
        y: NDArray[np.float32] = x / rms * (w + np.float32(self.offset))
        return y

    def reference(self, args: Arrays) -> Arrays:
        x, a, w, *rest = map(f32_array, args)
        h = self._rms(a, w)
        if self.two:
            b, v, t, *rest = rest
            h = self._rms(h + self._rms(b, v), t)
        y = x + h
        if self.scaled:
            y, rest = y * rest[0], rest[1:]
        return (y, *(self._rms(y, u) for u in rest))

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n, two, scaled, count in (
            (64, False, False, 3),
            (2816, True, True, 1),
            (100, True, False, 0),
            (640, False, True, 1),
        ):
            for n_rows in (1, 5):
                op = cls(1e-6, 1.0 if n == 640 else 0.0, two, scaled)
                rows = [cw.rows(T, n_rows, n, seed=i, scale=1 + i) for i in range(3 if two else 2)]
                w = [cw.vector(n, seed=10 + i) for i in range((3 if two else 1) + count)]
                typed = [rows[0], rows[1], w[0]]
                if two:
                    typed += [rows[2], w[1], w[2]]
                if scaled:
                    typed.append((TensorType((1,)), np.array([0.9], np.float32)))
                typed += w[3 if two else 1 :]
                types, arrays = tuple(t for t, _ in typed), tuple(a for _, a in typed)
                env = Env(rows=n_rows, logit_rows=1, seqs=1)
                # three norms of float32 sums of up to 2816 squares, one after the other
                yield Case(op, f"n{n}-{count}-r{n_rows}", types, arrays, env, rtol=2e-5, atol=5e-6)


def join_norms(
    g: Graph,
    x: Value,
    branches: Sequence[tuple[Value, Value]],
    *,
    eps: float,
    offset: float = 0.0,
    outer: Value | None = None,
    scale: Value | None = None,
    following: Sequence[Value] = (),
) -> tuple[Value, ...]:
    """branches: one or two, each with its weight; outer: the weight over the sum of two. Returns y and its norms."""
    (a, w), *more = branches
    args = [x, a, w]
    for b, v in more:
        assert outer is not None
        args += [b, v, outer]
    if scale is not None:
        args.append(scale)
    return g.add(JoinNorms(eps, offset, bool(more), scale is not None), *args, *following)
