"""A product whose rows are rotated on their way in: for matrices stored in a rotated basis, at a few rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from attrs import frozen

from ninfer.formats.quant import by_name
from ninfer.ir import casework as cw
from ninfer.ir.op import Case, require
from ninfer.ir.ops.hadamard import Hadamard
from ninfer.ir.ops.norm import RmsNorm
from ninfer.ir.ops.packed_act import FusedLinear
from ninfer.ir.types import Array, Arrays, Env, T, TensorType, Types, f32_array


@frozen
class RotatedLinear(FusedLinear):
    """FusedLinear of Hadamard(block)(x, signs), x being normed before if norm. The last `straight` matrices, with
    epilogue "none" only, read x as it is: not rotated.

    Arguments: x [R, K]; w [K] if norm; signs [K]; W_i [N_i, K]; residual [R, N] with "add". Results: y_i [R, N_i].
    """

    block: int = 1024
    straight: int = 0

    def split(self, args: Sequence[TensorType]) -> tuple[int, list[int]]:
        return 1, list(range(2 + self.norm, len(args) - (self.epilogue == "add")))

    def infer(self, args: Types) -> Types:
        require(self, not (self.packed or self.quant or self.weigh or self.ahead), "takes and gives rows")
        require(self, self.straight == 0 or self.epilogue == "none", "has one basis for what an epilogue joins")
        outs = super().infer(args)
        require(self, self.straight < len(outs) or self.epilogue != "none", "rotates for no matrix")
        Hadamard(self.block).infer((args[0], args[1 + self.norm]))
        return outs

    def reference(self, args: Arrays) -> Arrays:
        x, rest = f32_array(args[0]), list[Array](args[1:])
        if self.norm:
            x = f32_array(RmsNorm(self.eps, self.offset).reference((x, rest.pop(0)))[0])
        turned = f32_array(Hadamard(self.block).reference((x, rest.pop(0)))[0])
        residual = f32_array(rest.pop()) if self.epilogue == "add" else None
        rotated = len(rest) - self.straight
        ys = [(turned if i < rotated else x) @ f32_array(w).T for i, w in enumerate(rest)]
        if residual is not None:
            return (ys[0] + residual,)
        if self.epilogue == "swiglu":
            return (ys[0] / (1 + np.exp(-ys[0])) * ys[1],)
        return tuple(ys)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n_rows, block, k in ((1, 1024, 2048), (2, 128, 512), (3, 512, 1536), (4, 2048, 2048), (1, 256, 768)):
            xt, x = cw.rows(T, n_rows, k, seed=n_rows)
            wt, w = cw.vector(k)
            st, drawn = cw.vector(k, seed=9, mean=0)
            signs = np.sign(f32_array(drawn))
            fmt = by_name("t2_g128")
            (at, a), (bt, b) = cw.matrix(fmt, 96, k, seed=3), cw.matrix(fmt, 96, k, seed=4)
            (ct, c), (dt, d) = (cw.matrix(by_name("bf16"), n, k, seed=n) for n in (6, 5))
            rt, r = cw.rows(T, n_rows, 96, seed=6)
            env = Env(rows=n_rows, logit_rows=1, seqs=1)
            name = f"b{block}-r{n_rows}"
            both = cls(norm=True, eps=1e-5, offset=1.0, block=block, straight=2)
            yield Case(both, f"norm-straight-{name}", (xt, wt, st, at, bt, ct, dt), (x, w, signs, a, b, c, d), env)
            swiglu = cls(norm=True, epilogue="swiglu", block=block)
            yield Case(swiglu, f"norm-swiglu-{name}", (xt, wt, st, at, bt), (x, w, signs, a, b), env)
            yield Case(cls(epilogue="add", block=block), f"add-{name}", (xt, st, at, rt), (x, signs, a, r), env)
