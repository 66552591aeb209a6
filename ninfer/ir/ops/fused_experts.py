"""A mixture of experts from the router's scores to the sum, with what stands before and beside it: a decode step's
launches of few rows. `ir/rewrite_experts.py` puts it in the place of its parts, whose references its own is made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from attrs import evolve, frozen

from ninfer.formats.quant import by_name
from ninfer.ir import casework as cw
from ninfer.ir.op import Case, Op, Work, require, same_shape
from ninfer.ir.ops.activations import sigmoid
from ninfer.ir.ops.checks import is_rows, is_vector
from ninfer.ir.ops.experts import ACTIVATIONS, ExpertGlu, ExpertSum, PickExperts, _check_stack, _picks
from ninfer.ir.ops.norm import RmsNorm
from ninfer.ir.types import Array, Arrays, Env, T, TensorType, Types, f32_array

BESIDE = ("", "joined", "own")


@frozen
class Roles:
    """Indices of the arguments; None: there is none. dense: gate, up and matrix of the branch beside the experts."""

    stacks: tuple[int, ...]
    down: int
    scale: int | None
    norm: int | None
    dense: tuple[int, int, int] | None
    score: int | None
    residual: int | None
    count: int


@frozen
class FusedExperts(Op):
    """h = RmsNorm(x; w) if norm, else x; picks = PickExperts(logits, scale if scaled)
    y = ExpertSum(ExpertGlu(h, picks), picks) + residual if there is one
    z = (act(gate) * up * sigmoid(h . score) if gated) D^T    if beside: y += z ("joined"), or a result of its own

    x: [R, K]; logits: [R, E]; places: i32 [E]; num_stacks of gate and up, and one of down as ExpertGlu and ExpertSum
    have them; scale [E]; w [K]; gate, up [R, N], D [outer, N], score [K]; residual [R, outer], in this order
    -> y [R, outer], and z [R, outer] if it is its own.

    parts > 0, with norm: logits are ScoredAdd's, [R, parts * E], and their sums over parts are divided by the root mean
    square of x; gate and up beside are then products of h yet to be made, of matrices [N, K].
    """

    pick: PickExperts
    glu: ExpertGlu
    sum: ExpertSum
    num_stacks: int = 1
    scaled: bool = False
    norm: bool = False
    eps: float = 1e-6
    offset: float = 0.0
    beside: str = ""
    gated: bool = False
    residual: bool = False
    parts: int = 0

    @property
    def roles(self) -> Roles:
        at = 3 + self.num_stacks

        def take(wanted: bool) -> int | None:
            nonlocal at
            at += wanted
            return at if wanted else None

        scale, norm = take(self.scaled), take(self.norm)
        dense = None
        if self.beside:
            dense = (at + 1, at + 2, at + 3)
            at += 3
        score, residual = take(self.gated), take(self.residual)
        stacks = tuple(range(3, 3 + self.num_stacks))
        return Roles(stacks, 3 + self.num_stacks, scale, norm, dense, score, residual, at + 1)

    def infer(self, args: Types) -> Types:
        r = self.roles
        require(self, len(args) == r.count, f"takes {r.count} arguments, not {len(args)}")
        require(self, self.beside in BESIDE and (not self.gated or self.beside != ""), f"beside {self.beside!r}")
        x, logits, places = args[:3]
        k = is_rows(self, "x", x)
        require(
            self, not self.parts or (self.norm and self.gated), "scores in parts are of a norm, which is a gate's too"
        )
        logits = self._logits(logits, places)
        ids, weights = self.pick.infer((logits, *(() if r.scale is None else (args[r.scale],))))
        require(self, places.shape == logits.shape[1:], f"places are {places} for logits {logits}")
        (h,) = self.glu.infer((x, ids, places, *(args[i] for i in r.stacks)))
        residual = () if r.residual is None else (args[r.residual],)
        (y,) = self.sum.infer((h, ids, weights, places, args[r.down], *residual))
        for i in (r.norm, r.score):
            require(self, i is None or is_vector(self, "weight", args[i]) == k, f"a weight is not of rows {x}")
        if r.dense is not None:
            gate, up, down = (args[i] for i in r.dense)
            if self.parts:
                gate, up = (TensorType((x.shape[0], w.shape[0])) for w in (gate, up) if w.shape[1] == k)
            same_shape(self, gate, up)
            _check_stack(self, "the matrix beside", down, self.sum.outer, is_rows(self, "gate", gate))
        return (y, y) if self.beside == "own" else (y,)

    def _logits(self, logits: TensorType, places: TensorType) -> TensorType:
        """Of parts, their sums."""
        if not self.parts:
            return logits
        (num,) = places.shape
        require(self, isinstance(num, int) and logits.shape[1:] == (self.parts * num,), f"scores are {logits}")
        return TensorType((logits.shape[0], num))

    def reference(self, args: Arrays) -> Arrays:
        r = self.roles
        x, logits, places = args[:3]
        if self.parts:
            sums = f32_array(logits).reshape(len(f32_array(x)), self.parts, -1).sum(axis=1)
            logits = sums / np.sqrt(np.square(f32_array(x)).mean(axis=1, keepdims=True) + self.eps)
        h: Array = x
        if r.norm is not None:
            (h,) = RmsNorm(self.eps, self.offset).reference((x, args[r.norm]))
        ids, weights = self.pick.reference((logits, *(() if r.scale is None else (args[r.scale],))))
        (inner,) = self.glu.reference((h, ids, places, *(args[i] for i in r.stacks)))
        residual = () if r.residual is None else (args[r.residual],)
        (y,) = self.sum.reference((inner, ids, weights, places, args[r.down], *residual))
        if r.dense is None:
            return (y,)
        gate, up, down = (f32_array(args[i]) for i in r.dense)
        if self.parts:
            gate, up = (f32_array(h) @ w.T for w in (gate, up))
        wide = ACTIVATIONS[self.glu.act](gate) * up
        if r.score is not None:
            wide = wide * sigmoid((f32_array(h) @ f32_array(args[r.score]))[:, None])
        z = wide @ down.T
        return (y, z) if self.beside == "own" else (f32_array(y) + z,)

    def work(self, args: Types, env: Env) -> Work:
        r = self.roles
        x, logits, places = args[:3]
        logits = self._logits(logits, places)
        ids, weights = self.pick.infer((logits, *(() if r.scale is None else (args[r.scale],))))
        parts = [self.glu.work((x, ids, places, *(args[i] for i in r.stacks)), env)]
        (h,) = self.glu.infer((x, ids, places, *(args[i] for i in r.stacks)))
        parts.append(self.sum.work((h, ids, weights, places, args[r.down]), env))
        if r.dense is not None:
            matrix, (rows, _) = args[r.dense[2]], x.concrete(env)
            n, k = matrix.concrete(env)
            parts.append(Work(matrix.nbytes(env), 2 * rows * n * k))
            if self.parts:
                parts += [Work(args[i].nbytes(env), 2 * rows * n * k) for i in r.dense[:2]]
        return Work(sum(p.nbytes for p in parts), sum(p.flops for p in parts))

    @classmethod
    def cases(cls) -> Iterable[Case]:
        yield from _cases()


def _cases() -> Iterator[Case]:
    """As Qwen has it, as Gemma has it, and without anything beside. 8-bit activations: Route.rtol holds."""
    for n_rows, kind, names in (
        (1, "joined", ("q4_g64", "q5_g64", "q8_g32")),
        (3, "joined", ("q4_k", "q6_k", "q4_k")),
        (1, "own", ("q4_0", "q4_0", "q4_0")),
        (5, "own", ("q8_0", "q4_0", "q6_k")),
        (2, "", ("q4_1", "q4_g64", "q8_0")),
    ):
        gate_up, down, dense = map(by_name, names)
        k, inner, outer, num, top_k = 512, 256 if "q4_k" in names or "q6_k" in names else 192, 80, 6, 3
        joined, num_stacks = kind == "joined", 1 if kind else 2
        act = "gelu_tanh" if kind == "own" else "silu"
        pick = PickExperts(top_k, n_rows != 5, 0.7 if kind == "own" else 1.0)
        op = FusedExperts(
            pick, ExpertGlu(top_k, inner, act), ExpertSum(top_k, outer), num_stacks, scaled=kind == "own",
            norm=joined, eps=1e-5, offset=1.0, beside=kind, gated=joined, residual=kind != "own",
        )  # fmt: skip
        typed = [cw.rows(T, n_rows, k, seed=3), cw.rows(T, n_rows, num, seed=n_rows)]
        typed.append(_picks(n_rows, top_k=top_k, seed=1)[1])
        rows = num * inner * (3 - num_stacks)
        typed += [cw.matrix(gate_up, rows, k, seed=5 + i) for i in range(num_stacks)]
        typed.append(cw.matrix(down, num * outer, inner, seed=7))
        typed += [cw.vector(num, seed=8)] if op.scaled else []
        typed += [cw.vector(k, seed=9, mean=0.1)] if op.norm else []
        if kind:
            wide = 512 if kind == "joined" else 256
            typed += [cw.rows(T, n_rows, wide, seed=10 + i) for i in range(2)] + [
                cw.matrix(dense, outer, wide, seed=12)
            ]
        typed += [cw.vector(k, seed=13, mean=0.0)] if op.gated else []
        typed += [cw.rows(T, n_rows, outer, seed=14)] if op.residual else []
        types, arrays = tuple(t for t, _ in typed), tuple(a for _, a in typed)
        yield Case(op, f"{kind or 'plain'}-{names[0]}-r{n_rows}", types, arrays, Env(n_rows, 1, 1))
        if joined and "q4_k" not in names:
            gate, up, beside = op.roles.dense or (0, 0, 0)
            typed[1] = cw.rows(T, n_rows, 4 * num, seed=15)
            typed[gate], typed[up] = (cw.matrix(dense, 128, k, seed=16 + i) for i in range(2))
            typed[beside] = cw.matrix(dense, outer, 128, seed=18)
            types, arrays = tuple(t for t, _ in typed), tuple(a for _, a in typed)
            yield Case(evolve(op, parts=4), f"parts-{names[0]}-r{n_rows}", types, arrays, Env(n_rows, 1, 1))
