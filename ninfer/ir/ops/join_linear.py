"""Products of the norms that a join ends in, as one launch with it: a decode step's on a GPU. `ir/rewrite_experts.py`
puts it in the place of its parts, whose references its own is made of."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import frozen

from ninfer.formats.quant import by_name
from ninfer.ir import casework as cw
from ninfer.ir.op import Case, Op, Work, require
from ninfer.ir.ops.join import JoinNorms
from ninfer.ir.ops.linear import Linear
from ninfer.ir.types import Arrays, Env, T, TensorType, Types


@frozen
class JoinLinear(Op):
    """y and norms as JoinNorms; norm i is a result if counts[i] is 0, else its products with counts[i] matrices are.

    Arguments: those of the join, then the matrices [N, K] in the order of the norms they read -> y [R, K], then for
    each norm itself [R, K] or its products [R, N].
    """

    join: JoinNorms
    counts: tuple[int, ...]

    @property
    def num_join(self) -> int:
        """Arguments of the join."""
        return self.join.num_before + len(self.counts)

    def infer(self, args: Types) -> Types:
        require(self, len(args) == self.num_join + sum(self.counts), f"{len(args)} arguments for {self.counts}")
        y, *norms = self.join.infer(args[: self.num_join])
        outs, at = [y], self.num_join
        for norm, count in zip(norms, self.counts, strict=True):
            outs += Linear().infer((norm, *args[at : at + count])) if count else (norm,)
            at += count
        return tuple(outs)

    def reference(self, args: Arrays) -> Arrays:
        y, *norms = self.join.reference(args[: self.num_join])
        outs, at = [y], self.num_join
        for norm, count in zip(norms, self.counts, strict=True):
            outs += Linear().reference((norm, *args[at : at + count])) if count else (norm,)
            at += count
        return tuple(outs)

    def work(self, args: Types, env: Env) -> Work:
        rows = args[0].concrete(env)[0]
        weights = args[self.num_join :]
        flops = sum(2 * rows * int(np.prod(w.concrete(env))) for w in weights)
        return Work(super().work(args, env).nbytes, flops)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for two, counts, names in (
            (False, (2, 1, 0), ("q4_0", "q4_0", "bf16")),
            (True, (3,), ("q4_g64", "q4_g64", "q5_g64")),
            (False, (1, 2), ("f32", "q8_0", "q6_k")),
            (True, (), ()),
            (False, (1, 1), ("q8_g32", "q4_0")),
        ):
            for n_rows in (1, 3) if counts else (1,):
                k, eps = 512, 1e-6
                op = cls(JoinNorms(eps, 1.0 if two else 0.0, two, two), counts)
                typed = [cw.rows(T, n_rows, k, seed=0), cw.rows(T, n_rows, k, seed=1, scale=2), cw.vector(k, seed=2)]
                if two:
                    typed += [cw.rows(T, n_rows, k, seed=3), cw.vector(k, seed=4), cw.vector(k, seed=5)]
                    typed.append((TensorType((1,)), np.array([0.9], np.float32)))
                typed += [cw.vector(k, seed=6 + i) for i in range(len(counts))]
                for i, f in enumerate(map(by_name, names)):
                    typed.append(cw.matrix(f, (6 if f.is_plain else 40) + 4 * i, k, seed=20 + i))
                types, arrays = tuple(t for t, _ in typed), tuple(a for _, a in typed)
                # the activations of a route are int8, the reference's are not: Route.rtol holds
                name = f"{'-'.join(names) or 'none'}-r{n_rows}"
                yield Case(op, name, types, arrays, Env(n_rows, 1, 1))
