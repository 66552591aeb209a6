"""Rotation of rows together with what makes them and what quantises them: the input of a matrix in a rotated basis."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import frozen

from ninfer.errors import ShapeError
from ninfer.ir import casework as cw
from ninfer.ir.op import Case, Op, Work, require
from ninfer.ir.ops.elementwise import SigmoidMul, SiluMul
from ninfer.ir.ops.hadamard import Hadamard
from ninfer.ir.ops.norm import GatedRmsNorm, RmsNorm
from ninfer.ir.ops.packed_act import QuantizeRows
from ninfer.ir.types import Arrays, Env, T, Types, f32_array

MAKERS: tuple[type[Op], ...] = (RmsNorm, GatedRmsNorm, SigmoidMul, SiluMul)


@frozen
class Rotated(Op):
    """Hadamard(block) of what `maker` gives, or of x if there is none, quantised if quant > 0.

    Arguments: those of `maker`, or x [R, K]; signs [K]. Results: the maker's [R, K] if keep; then the rotated [R, K],
    or its codes i8 [R, K] and d [R, K / quant]. Bit for bit what the ops one after the other give.
    """

    maker: Op | None
    block: int
    keep: bool = False
    quant: int = 0

    @property
    def rotation(self) -> Hadamard:
        return Hadamard(self.block)

    def infer(self, args: Types) -> Types:
        *given, signs = args
        require(self, not (self.keep and self.maker is None), "keeps what it is given")
        require(self, self.quant == 0 or self.block % self.quant == 0, f"groups of {self.quant} cut blocks")
        try:
            made = tuple(given) if self.maker is None else self.maker.infer(tuple(given))
            require(self, len(made) == 1, f"rotates one value, not {len(made)}")
            turned = self.rotation.infer((*made, signs))
        except ShapeError as error:
            raise ShapeError(f"{self.key}: {error}") from None
        if self.quant:
            turned = QuantizeRows(self.quant).infer(turned)
        return (*made, *turned) if self.keep else turned

    def reference(self, args: Arrays) -> Arrays:
        *given, signs = args
        made = tuple(given) if self.maker is None else self.maker.reference(tuple(given))
        turned = self.rotation.reference((*made, signs))
        if self.quant:
            turned = QuantizeRows(self.quant).reference((f32_array(turned[0]),))
        return (*made, *turned) if self.keep else turned

    def work(self, args: Types, env: Env) -> Work:
        rotation = self.rotation.work((args[0], args[-1]), env)
        return Work(super().work(args, env).nbytes, rotation.flops)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for maker, block, n, d, keep in (
            (RmsNorm(1e-5, 1.0), 1024, 5120, 5120, True),
            (RmsNorm(), 256, 512, 512, False),
            (GatedRmsNorm(), 1024, 2048, 128, False),
            (GatedRmsNorm(1e-5), 64, 192, 16, True),
            (SigmoidMul(), 512, 1536, 0, False),
            (SiluMul(), 4096, 4096, 0, True),
            (None, 1024, 2048, 0, False),
        ):
            for n_rows in (1, 3):
                typed = [cw.rows(T, n_rows, n, seed=n)]
                typed += [cw.vector(d)] if d else []
                typed += [cw.rows(T, n_rows, n, seed=7)] if maker is not None and not isinstance(maker, RmsNorm) else []
                signs_type, signs = cw.vector(n, mean=0)
                types = (*(t for t, _ in typed), signs_type)
                arrays = (*(a for _, a in typed), np.sign(f32_array(signs)))
                env, name = Env(rows=n_rows, logit_rows=1, seqs=1), f"{maker.key if maker else 'x'}-b{block}-r{n_rows}"
                # twelve additions of values near 1, after a norm's division
                if maker is not None:
                    yield Case(cls(maker, block, keep), name, types, arrays, env, rtol=2e-5, atol=2e-5)
                if block % 128 == 0:
                    op = cls(maker, block, keep, quant=64)
                    yield Case(op, f"{name}-q64", types, arrays, env, rtol=2e-5, atol=2e-5)
