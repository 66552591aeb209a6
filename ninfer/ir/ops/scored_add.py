"""A product with its residual, and a router's scores of the sum, not yet normalised: what stands before experts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import frozen

from ninfer.formats.quant import by_name
from ninfer.ir import casework as cw
from ninfer.ir.op import Case, Op, Work, require
from ninfer.ir.ops.packed_act import FusedLinear, packed_types, quantize
from ninfer.ir.types import Arrays, Env, T, TensorType, Types, f32_array

PART = 128  # columns whose products are summed together


@frozen
class ScoredAdd(Op):
    """y = x W^T + residual, x = dequantize(codes, d) in groups of `packed`
    scores[t, p] = (y * (w + offset))_t R^T over columns 128 p .. 128 p + 127

    A softmax over experts reads sum_p scores[t, p] / rms(y_t): the norm of y is a factor of all scores, so that blocks
    which own columns of y need not wait for each other.

    codes: i8 [R, K']; d: [R, K' / packed]; W: [N, K]; residual: [R, N]; w: [N]; R: [E, N], N of whole parts
    -> y [R, N], scores [R, N / 128 * E].
    """

    packed: int
    offset: float = 0.0

    def infer(self, args: Types) -> Types:
        codes, d, w, residual, norm, router = args
        (y,) = FusedLinear(packed=self.packed, epilogue="add").infer((codes, d, w, residual))
        n, (num, columns) = y.shape[1], router.shape
        assert isinstance(n, int) and isinstance(num, int)
        require(self, norm.shape == (n,) and columns == n, f"a norm {norm} and a router {router} of rows {y}")
        require(self, n % PART == 0, f"rows of {n} are not whole parts of {PART}")
        return y, TensorType((y.shape[0], n // PART * num))

    def reference(self, args: Arrays) -> Arrays:
        *product, norm, router = args
        (y,) = FusedLinear(packed=self.packed, epilogue="add").reference(tuple(product))
        weighed = f32_array(y) * (f32_array(norm) + np.float32(self.offset))
        rows, by_part = len(weighed), weighed.reshape(len(weighed), -1, PART)
        matrix = f32_array(router).reshape(-1, by_part.shape[1], PART)
        return y, np.einsum("tpk,epk->tpe", by_part, matrix).reshape(rows, -1).astype(np.float32)

    def work(self, args: Types, env: Env) -> Work:
        (rows, _), (n, k), (num, _) = (args[i].concrete(env) for i in (0, 2, 5))
        return Work(super().work(args, env).nbytes, 2 * rows * n * (k + num))

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for name, k, n, num in (("q8_g32", 2048, 1024, 64), ("q4_g64", 1024, 1024, 128)):
            x, (w, r) = cw.rows(T, 1, k, seed=1)[1], (cw.matrix(by_name(name), n, k, seed=2), cw.rows(T, 1, n, seed=3))
            norm, router = cw.vector(n, seed=4), cw.matrix(by_name("bf16"), num, n, seed=5)
            codes, d = quantize(f32_array(x), 32)
            types = (*packed_types(T, k, 32), w[0], r[0], norm[0], router[0])
            yield Case(cls(32, 1.0), name, types, (codes, d, w[1], r[1], norm[1], router[1]), Env(1, 1, 1), 5e-5, 5e-5)
