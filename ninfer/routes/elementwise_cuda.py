"""Elementwise ops and moves of heads on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from ninfer.ir.op import Op
from ninfer.ir.ops.elementwise import SigmoidMul, SiluMul, TakeHeads
from ninfer.ir.ops.embed import TakeRows
from ninfer.ir.types import Env, TensorType, Types
from ninfer.routes.route import Geometry, Route, Tuning

TEMPLATE = "cuda/elementwise.cu.j2"


def _width(type: TensorType) -> int:
    n = type.shape[-1]
    assert isinstance(n, int)
    return n


def _vector(op: Op, types: Types) -> int:
    unit = op.head_dim if isinstance(op, TakeHeads) else _width(types[-1])
    return 4 if unit % 4 == 0 else 1


def _geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    rows, n = types[-1].concrete(env)
    return Geometry((ceil(rows * n / (256 * _vector(op, types))), 1, 1), 256)


def _names(*names: str, index: str = "") -> list[dict[str, str]]:
    return [{"type": "i32" if n == index else "f32", "name": n} for n in names]


def _per_value(formula: str, a: str, b: str) -> Callable[[Op, Types, Env, Tuning], Mapping[str, Any]]:
    """y from values of a and b at the same place; `formula` in terms of {0} and {1}."""

    def context(op: Op, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
        lanes = ", ".join(formula.format(f"p.{c}", f"q.{c}") for c in "xyzw")
        return {
            "arguments": _names(a, b),
            "vector": _vector(op, types),
            "formula": f"y = {formula.format(a, b)}",
            "body": f"const float4 p = *(const float4*)({a} + at), q = *(const float4*)({b} + at);\n"
            f"    *(float4*)(y + at) = make_float4({lanes});",
            "body_one": f"y[at] = {formula.format(f'{a}[at]', f'{b}[at]')};",
        }

    return context


def _moved(arguments: list[dict[str, str]], formula: str, place: str) -> Mapping[str, Any]:
    return {
        "arguments": arguments,
        "formula": formula,
        "body": f"const u64 row = at / N;\n    const int k = (int)(at % N);\n"
        f"    *(float4*)(y + at) = *(const float4*)(x + {place});",
        "body_one": f"const u64 row = at / N;\n    const int k = (int)(at % N);\n    y[at] = x[{place}];",
    }


def _rows_context(op: TakeRows, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    moved = _moved(_names("x", "index", index="index"), "y = x[index]", "(u64)index[row] * N + k")
    return {**moved, "vector": _vector(op, types)}


def _heads_context(op: TakeHeads, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    order = ", ".join(map(str, op.order))
    place = f"row * {_width(types[0])} + order[k / {op.head_dim}] * {op.head_dim} + k % {op.head_dim}"
    moved = _moved(_names("x"), "heads in another order", place)
    table = f"const u16 order[{len(op.order)}] = {{{order}}};\n    "
    return {
        **moved,
        "vector": _vector(op, types),
        "body": table + str(moved["body"]),
        "body_one": table + str(moved["body_one"]),
    }


SIGMOID_MUL = Route(
    name="sigmoid_mul.cuda",
    op=SigmoidMul,
    device="cuda",
    template=TEMPLATE,
    geometry=_geometry,
    context=_per_value("{0} * sigmoid({1})", "x", "gate"),
    numerics="cuda",
)
SILU_MUL = Route(
    name="silu_mul.cuda",
    op=SiluMul,
    device="cuda",
    template=TEMPLATE,
    geometry=_geometry,
    context=_per_value("silu({0}) * {1}", "gate", "up"),
    numerics="cuda",
)
TAKE_ROWS = Route(
    name="take_rows.cuda",
    op=TakeRows,
    device="cuda",
    template=TEMPLATE,
    geometry=_geometry,
    context=_rows_context,
    numerics="exact",
)
TAKE_HEADS = Route(
    name="take_heads.cuda",
    op=TakeHeads,
    device="cuda",
    template=TEMPLATE,
    geometry=_geometry,
    context=_heads_context,
    numerics="exact",
)

ROUTES: tuple[Route[Any], ...] = (SIGMOID_MUL, SILU_MUL, TAKE_ROWS, TAKE_HEADS)
