"""Elementwise ops and moves of heads on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from ninfer.ir.op import Op
from ninfer.ir.ops.elementwise import Add, GeluMul, GluRows, SigmoidMul, SiluMul, SoftCap, TakeHeads
from ninfer.ir.ops.embed import TakeRows
from ninfer.ir.ops.hadamard import Hadamard
from ninfer.ir.types import Env, TensorType, Types
from ninfer.routes.render import c_float
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


def _arguments(names: list[str], formula: str) -> Callable[[Op, Types, Env, Tuning], Mapping[str, Any]]:
    """y from values of x (p), of b where it has rows of the same width (q), and of what is read by row or once."""

    def context(op: Op, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
        given = names[: len(types) - 1]
        text = formula if len(given) == len(names) or len(names) == 1 else "{0} + {1}"
        if isinstance(op, SoftCap):
            text = f"{c_float(op.cap)} * tanhf({{0}} * {c_float(1 / op.cap)})"
        second = "b" in given
        lanes = ", ".join(text.format(f"p.{c}", f"q.{c}" if second else "") for c in "xyzw")
        load = "const float4 p = *(const float4*)(x + at)" + (", q = *(const float4*)(b + at)" if second else "")
        return {
            "arguments": _names(*given),
            "vector": _vector(op, types),
            "formula": f"y = {text.format('x', 'b')}",
            "body": f"{load};\n    *(float4*)(y + at) = make_float4({lanes});",
            "body_one": f"y[at] = {text.format('x[at]', 'b[at]')};",
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


def _route(op: type[Any], name: str, context: Callable[[Op, Types, Env, Tuning], Mapping[str, Any]]) -> Route[Any]:
    return Route(
        name=f"{name}.cuda",
        op=op,
        device="cuda",
        template=TEMPLATE,
        geometry=_geometry,
        context=context,
        numerics="cuda",
    )


def _hadamard_threads(op: Hadamard) -> int:
    return max(32, min(256, op.block // 8))


def _hadamard_geometry(op: Hadamard, types: Types, env: Env, tuning: Tuning) -> Geometry:
    rows, n = types[0].concrete(env)
    return Geometry((rows * (n // op.block), 1, 1), _hadamard_threads(op))


def _hadamard_context(op: Hadamard, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"threads": _hadamard_threads(op)}


def _row_geometry(op: GluRows, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((types[0].concrete(env)[0], 1, 1), 128)


GLU_ROWS = Route(
    name="glu_rows.cuda",
    op=GluRows,
    device="cuda",
    template="cuda/glu_rows.cu.j2",
    geometry=_row_geometry,
    numerics="cuda",
)
HADAMARD = Route(
    name="hadamard.cuda",
    op=Hadamard,
    device="cuda",
    template="cuda/hadamard.cu.j2",
    geometry=_hadamard_geometry,
    context=_hadamard_context,
    numerics="cuda",
)
GELU = "{0} * sigmoid(1.5957691216057308f * ({0} + 0.044715f * {0} * {0} * {0})) * {1}"

ROUTES: tuple[Route[Any], ...] = (
    SIGMOID_MUL,
    SILU_MUL,
    _route(GeluMul, "gelu_mul", _per_value(GELU, "gate", "up")),
    GLU_ROWS,
    _route(Add, "add", _arguments(["x", "b", "scale"], "({0} + {1}) * scale[0]")),
    _route(SoftCap, "soft_cap", _arguments(["x"], "{0}")),
    HADAMARD,
    TAKE_ROWS,
    TAKE_HEADS,
)
