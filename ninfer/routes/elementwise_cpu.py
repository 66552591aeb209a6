"""Pointwise operations and moves of heads on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.op import Op
from ninfer.ir.ops.elementwise import Add, GeluMul, GluRows, SigmoidMul, SiluMul, SoftCap, TakeHeads
from ninfer.ir.ops.hadamard import Hadamard
from ninfer.ir.types import Env, Types
from ninfer.routes.render import c_float
from ninfer.routes.route import Geometry, Route, Tuning
from ninfer.routes.work_cpu import by_elements

GELU = "{0} * sigmoid8(1.5957691216057308f * ({0} + 0.044715f * {0} * {0} * {0}))"


def _geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return by_elements(types[-1], env)


def _expression(op: Op, types: Types) -> str:
    """Of eight values: a and b of the first two arguments, p[3] being the third."""
    match op:
        case SigmoidMul():
            return "a * sigmoid8(b)"
        case SiluMul():
            return "a * sigmoid8(a) * b"
        case GeluMul():
            return f"{GELU.format('a')} * b"
        case SoftCap():
            return f"{c_float(op.cap)} - {c_float(2 * op.cap)} / (1.0f + exp8(a * {c_float(2 / op.cap)}))"
        case _:
            return "(a + b) * *(const f32*)p[3]" if len(types) == 4 else "a + b"


def _pointwise(op: Op, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"expression": _expression(op, types), "second": not isinstance(op, SoftCap)}


def _pointwise_route(op: type[Any], name: str) -> Route[Any]:
    return Route(
        name=f"{name}.cpu",
        op=op,
        device="cpu",
        template="cpu/elementwise.cpp.j2",
        geometry=_geometry,
        context=_pointwise,
        numerics="f32",
    )


GLU_ROWS = Route(
    name="glu_rows.cpu",
    op=GluRows,
    device="cpu",
    template="cpu/glu_rows.cpp.j2",
    geometry=_geometry,
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

HADAMARD = Route(
    name="hadamard.cpu",
    op=Hadamard,
    device="cpu",
    template="cpu/hadamard.cpp.j2",
    geometry=_geometry,
    numerics="f32",
)

ROUTES: tuple[Route[Any], ...] = (
    _pointwise_route(SigmoidMul, "sigmoid_mul"),
    _pointwise_route(SiluMul, "silu_mul"),
    _pointwise_route(GeluMul, "gelu_mul"),
    _pointwise_route(Add, "add"),
    _pointwise_route(SoftCap, "soft_cap"),
    GLU_ROWS,
    HADAMARD,
    TAKE_HEADS,
)
