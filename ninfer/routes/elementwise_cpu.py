"""Pointwise operations and moves of heads on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.ops.elementwise import SigmoidMul, SiluMul, TakeHeads
from ninfer.ir.types import Env, Types
from ninfer.routes.route import Geometry, Route, Tuning
from ninfer.routes.work_cpu import by_elements


def _geometry(op: SigmoidMul | SiluMul | TakeHeads, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return by_elements(types[-1], env)


def _sigmoid_mul(op: SigmoidMul, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"expression": "a * sigmoid8(b)"}


def _silu_mul(op: SiluMul, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"expression": "a * sigmoid8(a) * b"}


SIGMOID_MUL = Route(
    name="sigmoid_mul.cpu",
    op=SigmoidMul,
    device="cpu",
    template="cpu/elementwise.cpp.j2",
    geometry=_geometry,
    context=_sigmoid_mul,
    numerics="f32",
)
SILU_MUL = Route(
    name="silu_mul.cpu",
    op=SiluMul,
    device="cpu",
    template="cpu/elementwise.cpp.j2",
    geometry=_geometry,
    context=_silu_mul,
    numerics="f32",
)
TAKE_HEADS = Route(
    name="take_heads.cpu",
    op=TakeHeads,
    device="cpu",
    template="cpu/take_heads.cpp.j2",
    geometry=_geometry,
    numerics="exact",
)

ROUTES: tuple[Route[Any], ...] = (SIGMOID_MUL, SILU_MUL, TAKE_HEADS)
