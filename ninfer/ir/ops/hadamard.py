"""Rotation of rows by signed Hadamard matrices: weights stored in the rotated basis meet rotated activations."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, Work, require
from ninfer.ir.ops.checks import is_rows, is_vector
from ninfer.ir.types import Arrays, Env, T, Types, f32_array


def fwht(x: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    """Each run of `block` values times the Hadamard matrix in Sylvester's order, over sqrt(block): its own inverse."""
    y = x.reshape(-1, block).copy()
    h = 1
    while h < block:
        pairs = y.reshape(len(y), block // (2 * h), 2, h)
        a, b = pairs[:, :, 0].copy(), pairs[:, :, 1].copy()
        pairs[:, :, 0], pairs[:, :, 1] = a + b, a - b
        h *= 2
    scaled: NDArray[np.float32] = y.reshape(x.shape) * np.float32(block**-0.5)
    return scaled


@frozen
class Hadamard(Op):
    """y = fwht(x * signs); inverse: y = signs * fwht(x). In blocks along the row.

    x: [R, K]; signs: [K], each 1 or -1; block: a power of two that divides K -> [R, K].
    """

    block: int
    inverse: bool = False

    def infer(self, args: Types) -> Types:
        x, signs = args
        n = is_rows(self, "x", x)
        require(self, is_vector(self, "signs", signs) == n, f"signs are {signs} for rows {x}")
        power = self.block > 1 and self.block & (self.block - 1) == 0
        require(self, power and n % self.block == 0, f"blocks of {self.block} do not divide rows of {x}")
        return (x,)

    def reference(self, args: Arrays) -> Arrays:
        x, signs = map(f32_array, args)
        if self.inverse:
            return (signs * fwht(x, self.block),)
        return (fwht(x * signs, self.block),)

    def work(self, args: Types, env: Env) -> Work:
        rows, n = args[0].concrete(env)
        return Work(2 * args[0].nbytes(env), rows * n * self.block.bit_length())

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for block, n, inverse in ((1024, 2048, False), (1024, 1024, True), (128, 640, False), (16, 48, True)):
            for n_rows in (1, 3):
                xt, x = cw.rows(T, n_rows, n)
                st, s = cw.vector(n, mean=0)
                env = Env(rows=n_rows, logit_rows=1, seqs=1)
                # ten additions in the same order, values near 1
                yield Case(
                    cls(block, inverse),
                    f"b{block}-n{n}-r{n_rows}",
                    (xt, st),
                    (x, np.sign(f32_array(s))),
                    env,
                    rtol=1e-5,
                    atol=1e-5,
                )


def hadamard(g: Graph, x: Value, signs: Value, *, block: int, inverse: bool = False) -> Value:
    return g.one(Hadamard(block, inverse), x, signs)
