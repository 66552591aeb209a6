"""Matrix products of activations with stored weights, at the granularity of one launch."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from attrs import frozen

from ninfer.formats.quant import FLOATS, FORMATS, by_name
from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, Work, require
from ninfer.ir.ops.activations import silu
from ninfer.ir.types import Arrays, Env, T, TensorType, Types, f32_array


def _check_product(op: Op, x: TensorType, w: TensorType, index: int) -> None:
    require(op, len(x.shape) == 2, f"x must be [rows, K], not {x}")
    require(op, len(w.shape) == 2 and w.fmt is not None, f"weight {index} must be a matrix with a format, not {w}")
    require(op, w.shape[1] == x.shape[1], f"weight {index} is {w}, but rows of x have {x.shape[1]} values")


def _flops(weights: Types, env: Env, x: TensorType) -> int:
    return 2 * x.concrete(env)[0] * sum(prod(w.concrete(env)) for w in weights)


@frozen
class Linear(Op):
    """y_i = x W_i^T for each weight: several products that read one activation, in one launch.

    x: [R, K]; W_i: [N_i, K] -> y_i: [R, N_i].
    """

    def infer(self, args: Types) -> Types:
        x, *weights = args
        require(self, bool(weights), "needs at least one weight")
        for i, w in enumerate(weights):
            _check_product(self, x, w, i)
        return tuple(TensorType((x.shape[0], w.shape[0])) for w in weights)

    def reference(self, args: Arrays) -> Arrays:
        x, *weights = args
        return tuple(f32_array(x) @ f32_array(w).T for w in weights)

    def work(self, args: Types, env: Env) -> Work:
        return Work(super().work(args, env).nbytes, _flops(args[1:], env, args[0]))

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for fmt in FORMATS:
            if not fmt.can_pack:
                continue
            k = 512 if fmt.block > 32 else 288
            for n_rows in (1, 3, 8):
                x = cw.rows(T, n_rows, k, seed=n_rows)
                w = cw.matrix(fmt, 50, k)
                env = Env(rows=n_rows, logit_rows=1, seqs=1)
                yield _case(cls(), f"{fmt.name}-r{n_rows}", env, x, w)
        for fmt in FLOATS:
            for n_rows in (1, 9):
                x = cw.rows(T, n_rows, 320, seed=n_rows)
                env = Env(rows=n_rows, logit_rows=1, seqs=1)
                yield _case(cls(), f"{fmt.name}-r{n_rows}", env, x, cw.matrix(fmt, 128, 320))
        q4, q8 = by_name("q4_g64"), by_name("q8_0")
        x = cw.rows(T, 5, 256, seed=9)
        env = Env(rows=5, logit_rows=1, seqs=1)
        yield _case(cls(), "mixed", env, x, cw.matrix(q4, 33, 256), cw.matrix(q8, 16, 256), cw.matrix(q4, 7, 256))
        for fmt in (by_name("q4_1"), by_name("bf16"), by_name("f32"), by_name("q6_k")):
            x = cw.rows(T, 70, 512, seed=10)
            env = Env(rows=70, logit_rows=1, seqs=1)
            yield _case(cls(), f"{fmt.name}-r70", env, x, cw.matrix(fmt, 130, 512))


@frozen
class LinearAdd(Op):
    """y = x W^T + residual.   x: [R, K]; W: [N, K]; residual: [R, N] -> [R, N]."""

    def infer(self, args: Types) -> Types:
        x, w, residual = args
        _check_product(self, x, w, 0)
        require(
            self,
            residual.shape == (x.shape[0], w.shape[0]),
            f"residual is {residual}, the product {w.shape[0]}",
        )
        return (residual,)

    def reference(self, args: Arrays) -> Arrays:
        x, w, residual = args
        return (f32_array(x) @ f32_array(w).T + f32_array(residual),)

    def work(self, args: Types, env: Env) -> Work:
        return Work(super().work(args, env).nbytes, _flops(args[1:2], env, args[0]))

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for name in ("q4_1", "q8_0", "bf16", "q4_g64", "q5_g64"):
            for n_rows in (1, 4, 40):
                fmt = by_name(name)
                env = Env(rows=n_rows, logit_rows=1, seqs=1)
                x, r = cw.rows(T, n_rows, 256, seed=3), cw.rows(T, n_rows, 50, seed=4)
                yield _case(cls(), f"{name}-r{n_rows}", env, x, cw.matrix(fmt, 50, 256), r)


@frozen
class LinearSwiglu(Op):
    """y = silu(x Wg^T) * (x Wu^T).   x: [R, K]; Wg, Wu: [N, K] of one format -> [R, N]."""

    def infer(self, args: Types) -> Types:
        x, gate, up = args
        _check_product(self, x, gate, 0)
        _check_product(self, x, up, 1)
        require(self, gate.shape == up.shape and gate.fmt is up.fmt, f"gate is {gate}, up is {up}")
        return (TensorType((x.shape[0], gate.shape[0])),)

    def reference(self, args: Arrays) -> Arrays:
        x, gate, up = args
        g = f32_array(x) @ f32_array(gate).T
        return (silu(g) * (f32_array(x) @ f32_array(up).T),)

    def work(self, args: Types, env: Env) -> Work:
        return Work(super().work(args, env).nbytes, _flops(args[1:], env, args[0]))

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for name in ("q4_1", "bf16", "q4_g64", "q8_g32"):
            for n_rows in (1, 4, 40):
                fmt = by_name(name)
                env = Env(rows=n_rows, logit_rows=1, seqs=1)
                x = cw.rows(T, n_rows, 256, seed=5)
                g, u = cw.matrix(fmt, 50, 256, seed=6), cw.matrix(fmt, 50, 256, seed=7)
                yield _case(cls(), f"{name}-r{n_rows}", env, x, g, u)


def _case(op: Op, name: str, env: Env, *operands: cw.Typed) -> Case:
    # Sums of up to 512 float32 products in another order than numpy's: 1e-5 of a value near 1. Routes that quantise
    # activations state their own tolerance (Route.rtol).
    return Case(op, name, tuple(t for t, _ in operands), tuple(a for _, a in operands), env, rtol=3e-5, atol=3e-5)


def linear(g: Graph, x: Value, *weights: Value) -> tuple[Value, ...]:
    return g.add(Linear(), x, *weights)


def linear_add(g: Graph, x: Value, w: Value, residual: Value) -> Value:
    return g.one(LinearAdd(), x, w, residual)


def linear_swiglu(g: Graph, x: Value, gate: Value, up: Value) -> Value:
    return g.one(LinearSwiglu(), x, gate, up)
