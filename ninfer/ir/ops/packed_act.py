"""Activations as int8 codes, and products fused with their neighbours: what a decode step is made of on a GPU.

A row is quantised in runs of `group` values: d = max|x| / 127, code = round(x / d), ties to even;
d = 0 where all are 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from ninfer.formats.dtypes import F32, I8
from ninfer.formats.quant import by_name
from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, Work, require
from ninfer.ir.ops.norm import RmsNorm
from ninfer.ir.types import Array, Arrays, Dim, Env, T, TensorType, Types, f32_array, plain


def quantize(x: NDArray[np.float32], group: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """[R, K] -> codes [R, K'], d [R, K' / group], K' being K rounded up to whole groups."""
    width = -(-x.shape[1] // group) * group
    runs = np.pad(x, ((0, 0), (0, width - x.shape[1]))).reshape(len(x), -1, group)
    amax = np.abs(runs).max(axis=-1)
    with np.errstate(divide="ignore"):
        inverse = np.where(amax > 0, np.float32(127) / amax, np.float32(0)).astype(np.float32)
    codes = np.rint(runs * inverse[:, :, None]).astype(np.int8)
    return codes.reshape(len(x), width), amax * np.float32(1 / 127)


def dequantize(codes: NDArray[np.int8], d: NDArray[np.float32]) -> NDArray[np.float32]:
    return (codes.reshape(*d.shape, -1) * d[:, :, None]).reshape(codes.shape)


def packed_types(rows: Dim, k: int, group: int) -> Types:
    width = -(-k // group) * group
    return TensorType((rows, width), I8), TensorType((rows, width // group), F32)


@frozen
class QuantizeRows(Op):
    """x: [R, K] -> codes i8 [R, K'], d [R, K' / group]; K' is K rounded up to whole groups, the rest being 0."""

    group: int

    def infer(self, args: Types) -> Types:
        (x,) = args
        k = x.shape[-1]
        require(self, len(x.shape) == 2 and isinstance(k, int), f"x must be [rows, K], not {x}")
        assert isinstance(k, int)
        return packed_types(x.shape[0], k, self.group)

    def reference(self, args: Arrays) -> Arrays:
        return quantize(f32_array(args[0]), self.group)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for group, k in ((32, 256), (64, 192), (128, 1024), (64, 100)):
            xt, values = cw.rows(T, 3, k, seed=k)
            x = plain(values)
            x[1, :group] = 0
            yield Case(cls(group), f"g{group}-k{k}", (xt,), (x,), _env(3), rtol=1e-6, atol=1e-7)


@frozen
class RmsNormQuant(Op):
    """QuantizeRows of RmsNorm.   x: [R, K]; w: [K] -> codes i8 [R, K'], d [R, K' / group]."""

    group: int
    eps: float = 1e-6
    offset: float = 0.0

    def infer(self, args: Types) -> Types:
        x, w = args
        require(self, w.shape == x.shape[-1:], f"{w} does not weigh rows of {x}")
        return QuantizeRows(self.group).infer(RmsNorm(self.eps, self.offset).infer(args))

    def reference(self, args: Arrays) -> Arrays:
        return QuantizeRows(self.group).reference(RmsNorm(self.eps, self.offset).reference(args))

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for group, k in ((64, 256), (32, 1000)):
            (xt, x), (wt, w) = cw.rows(T, 3, k, seed=k), cw.vector(k)
            # a value next to the middle of two codes may round to either
            yield Case(cls(group, 1e-5, 1.0), f"g{group}-k{k}", (xt, wt), (x, w), _env(3), rtol=1e-5, atol=1)


@frozen
class FusedLinear(Op):
    """A product with what stands before and after it:

        x = dequantize(codes, d)                      packed > 0: groups of `packed` values; otherwise x is given
        x = RmsNorm(eps, offset)(x, w)                if norm and x is given
        x = x / sqrt(sum(squares) / K + eps)          if norm and packed: codes of weighed values, not yet normalised
        y_i = x W_i^T                                 epilogue "none"
        y = x W_0^T + residual                        "add"
        y = silu(x W_0^T) * (x W_1^T)                 "swiglu"
        y = quantize(y)                               quant > 0: groups of `quant` values
        y, quantize(y * (w_n + offset)), squares      weigh > 0: for a norm that follows; squares are sums of y^2 per
                                                      group of `weigh` values

    ahead, with ahead_weights > 0: the product that comes next reads those weights, the last arguments, which play no
    part in the result. A device may fetch them into a cache while this product ends.

    Arguments: x [R, K], or codes i8 [R, K'] and d [R, K' / packed]; w [K] if norm, or squares [R, K' / packed];
    W_i [N_i, K]; residual [R, N] with "add"; w_n [N] if weigh. Results: y_i [R, N_i], or codes and d; if weigh, y,
    codes, d and squares.
    """

    norm: bool = False
    packed: int = 0
    epilogue: str = "none"
    quant: int = 0
    eps: float = 1e-6
    offset: float = 0.0
    weigh: int = 0
    ahead: FusedLinear | None = None
    ahead_weights: int = 0

    def split(self, args: Sequence[TensorType]) -> tuple[int, list[int]]:
        """Index of the norm's weight (or the first matrix), and of the matrices."""
        at = 2 if self.packed else 1
        first = at + (1 if self.norm else 0)
        return at, list(range(first, len(args) - self.ahead_weights - (self.epilogue == "add") - (self.weigh > 0)))

    def infer(self, args: Types) -> Types:
        at, matrices = self.split(args)
        args = args[: len(args) - self.ahead_weights]
        require(self, self.epilogue in ("none", "add", "swiglu"), f"epilogue {self.epilogue!r}")
        require(self, not self.weigh or (self.epilogue == "add" and not self.quant), "weighs sums with a residual")
        require(self, len(matrices) == {"none": max(1, len(matrices)), "add": 1, "swiglu": 2}[self.epilogue],
                f"{len(matrices)} weights for {self.epilogue}")  # fmt: skip
        rows, k = args[0].shape[0], args[matrices[0]].shape[1]
        assert isinstance(k, int)
        want = packed_types(rows, k, self.packed) if self.packed else (TensorType((rows, k)),)
        require(self, args[:at] == want, f"activations are {args[0]}, weights have rows of {k}")
        by = want[1] if self.packed else TensorType((k,))
        require(self, not self.norm or args[at].shape == by.shape, f"the norm's {args[at]} is not {by}")
        for i in matrices:
            w = args[i]
            require(self, len(w.shape) == 2 and w.fmt is not None and w.shape[1] == k, f"weight {i} is {w}")
        outs = tuple(TensorType((rows, args[i].shape[0])) for i in matrices)
        if self.epilogue == "add":
            residual = args[-2 if self.weigh else -1]
            require(self, residual == outs[0], f"residual is {residual}, the product {outs[0]}")
        if self.epilogue == "swiglu":
            require(self, outs[0] == outs[1], f"gate is {outs[0]}, up is {outs[1]}")
            outs = outs[:1]
        if self.quant or self.weigh:
            (out,) = outs
            n = out.shape[1]
            assert isinstance(n, int)
            if self.quant:
                return packed_types(rows, n, self.quant)
            require(self, n % self.weigh == 0, f"{n} outputs are not whole groups of {self.weigh}")
            require(self, args[-1].shape == (n,), f"the next norm's weight is {args[-1]}, rows have {n}")
            codes, d = packed_types(rows, n, self.weigh)
            return out, codes, d, d
        return outs

    def reference(self, args: Arrays) -> Arrays:
        at, args = 2 if self.packed else 1, args[: len(args) - self.ahead_weights]
        if self.packed:
            x = dequantize(plain(args[0]), plain(args[1]))
        else:
            x = f32_array(args[0])
        rest: list[Array] = list(args[at:])
        if self.norm and self.packed:
            mean = f32_array(rest.pop(0)).sum(axis=1, dtype=np.float64) / rest[0].shape[1]
            x = (x / np.sqrt(mean + self.eps)[:, None]).astype(np.float32)
        elif self.norm:
            (normed,) = RmsNorm(self.eps, self.offset).reference((x, rest.pop(0)))
            x = f32_array(normed)
        weight = f32_array(rest.pop()) if self.weigh else None
        residual = f32_array(rest.pop()) if self.epilogue == "add" else None
        weights = [f32_array(w) for w in rest]
        ys = [x[:, : w.shape[1]] @ w.T for w in weights]
        if residual is not None:
            ys = [ys[0] + residual]
        if self.epilogue == "swiglu":
            ys = [ys[0] / (1 + np.exp(-ys[0])) * ys[1]]
        if weight is not None:
            squares = np.square(ys[0]).reshape(len(x), -1, self.weigh).sum(axis=2)
            return (ys[0], *quantize(ys[0] * (weight + np.float32(self.offset)), self.weigh), squares)
        return quantize(ys[0], self.quant) if self.quant else tuple(ys)

    def work(self, args: Types, env: Env) -> Work:
        _, matrices = self.split(args)
        flops = 2 * args[0].concrete(env)[0] * sum(prod(args[i].concrete(env)) for i in matrices)
        return Work(super().work(args, env).nbytes, flops)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n_rows in (1, 2, 4, 8):
            for name in ("q4_g64", "q5_g64", "q4_k"):
                fmt, k = by_name(name), 512
                xt, x = cw.rows(T, n_rows, k, seed=n_rows)
                wt, w = cw.vector(k)
                big, other = cw.matrix(fmt, 96, k, seed=3), cw.matrix(fmt, 96, k, seed=4)
                small = cw.matrix(by_name("bf16"), 20, k, seed=5)
                rt, r = cw.rows(T, n_rows, 96, seed=6)
                env = _env(n_rows)
                # the activations of a route are int8, the reference's are not: Route.rtol holds
                norm = cls(norm=True, eps=1e-5, offset=1.0)
                yield Case(norm, f"norm-{name}-r{n_rows}", (xt, wt, big[0], small[0], other[0]),
                           (x, w, big[1], small[1], other[1]), env)  # fmt: skip
                swiglu = cls(norm=True, epilogue="swiglu", quant=32)
                yield Case(swiglu, f"swiglu-quant-{name}-r{n_rows}", (xt, wt, big[0], other[0]),
                           (x, w, big[1], other[1]), env)  # fmt: skip
                codes, d = quantize(f32_array(x), 32)
                packed = packed_types(T, k, 32)
                yield Case(cls(packed=32, epilogue="add"), f"packed-add-{name}-r{n_rows}",
                           (*packed, big[0], rt), (codes, d, big[1], r), env, rtol=3e-5, atol=3e-5)  # fmt: skip
                yield Case(cls(packed=32), f"packed-{name}-r{n_rows}", (*packed, big[0], small[0]),
                           (codes, d, big[1], small[1]), env)  # fmt: skip
                yield Case(cls(packed=32, epilogue="swiglu"), f"packed-swiglu-{name}-r{n_rows}",
                           (*packed, big[0], other[0]), (codes, d, big[1], other[1]), env, 5e-5, 5e-5)  # fmt: skip
                st, squares = packed[1], np.square(f32_array(x)).reshape(n_rows, -1, 32).sum(axis=2)
                late = cls(norm=True, packed=32, eps=1e-5)
                yield Case(late, f"late-norm-{name}-r{n_rows}", (*packed, st, big[0], small[0]),
                           (codes, d, squares, big[1], small[1]), env)  # fmt: skip
                yield Case(evolve(late, epilogue="swiglu", quant=32), f"late-swiglu-{name}-r{n_rows}",
                           (*packed, st, big[0], other[0]), (codes, d, squares, big[1], other[1]), env)  # fmt: skip
                nt, n = cw.vector(96, seed=7)
                weigh = cls(packed=32, epilogue="add", offset=1.0, weigh=32)
                yield Case(weigh, f"weigh-{name}-r{n_rows}", (*packed, big[0], rt, nt), (codes, d, big[1], r, n), env)
                then = evolve(weigh, ahead=evolve(late, epilogue="swiglu", quant=32), ahead_weights=2)
                yield Case(then, f"weigh-ahead-{name}-r{n_rows}", (*packed, big[0], rt, nt, big[0], other[0]),
                           (codes, d, big[1], r, n, big[1], other[1]), env)  # fmt: skip


def _env(n_rows: int) -> Env:
    return Env(rows=n_rows, logit_rows=1, seqs=1)


def quantize_rows(g: Graph, x: Value, group: int) -> tuple[Value, Value]:
    codes, d = g.add(QuantizeRows(group), x)
    return codes, d


def fused_linear(g: Graph, op: FusedLinear, *args: Value) -> tuple[Value, ...]:
    return g.add(op, *args)
