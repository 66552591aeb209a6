"""Rotations with what makes their rows, on a CPU. A product quantises its rows itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.ops.elementwise import SigmoidMul
from ninfer.ir.ops.norm import GatedRmsNorm, RmsNorm
from ninfer.ir.ops.rotated import Rotated
from ninfer.ir.types import Env, Types
from ninfer.routes.route import Geometry, Route, Tuning

CHUNK_VALUES = 4 << 10


def rotated_kind(op: Rotated) -> str:
    match op.maker:
        case None:
            return "given"
        case RmsNorm():
            return "norm"
        case GatedRmsNorm():
            return "gated"
        case _:
            return "product"


def norm_length(op: Rotated, types: Types) -> int:
    """Values of a norm; 0: there is no norm."""
    d = types[1].shape[0] if rotated_kind(op) in ("norm", "gated") else 0
    assert isinstance(d, int)
    return d


def formula(op: Rotated) -> str:
    return "x" if op.maker is None else f"{op.maker.key} of the first arguments"


def width(types: Types) -> int:
    n = types[0].shape[1]
    assert isinstance(n, int)
    return n


def _refuse(op: Rotated, types: Types) -> str | None:
    if op.maker is None or op.quant:
        return "products on a CPU quantise their rows themselves"
    d = norm_length(op, types)
    if op.block % 8:
        return f"blocks of {op.block} are no vectors of 8"
    if rotated_kind(op) == "norm" and d != width(types):
        return f"the norm is over {d} of {width(types)} values"
    if rotated_kind(op) == "gated" and (op.block % d or d % 8):
        return f"heads of {d} values do not divide blocks of {op.block}, or are no vectors of 8"
    return None


def _geometry(op: Rotated, types: Types, env: Env, tuning: Tuning) -> Geometry:
    rows, n = types[0].concrete(env)
    return Geometry((max(1, min(rows * (n // op.block), rows * n // CHUNK_VALUES)), 1, 1))


def _context(op: Rotated, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {
        "kind": rotated_kind(op),
        "d": norm_length(op, types),
        "formula": formula(op),
        "expression": "a * sigmoid8(b)" if isinstance(op.maker, SigmoidMul) else "a * sigmoid8(a) * b",
    }


ROTATED = Route(
    name="rotated.cpu",
    op=Rotated,
    device="cpu",
    template="cpu/rotated.cpp.j2",
    geometry=_geometry,
    context=_context,
    refuse=_refuse,
    numerics="f32",
)

ROUTES: tuple[Route[Any], ...] = (ROTATED,)
