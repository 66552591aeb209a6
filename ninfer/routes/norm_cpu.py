"""Norms on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.ops.join import JoinNorms
from ninfer.ir.ops.norm import GatedRmsNorm, RmsNorm
from ninfer.ir.types import Env, Types
from ninfer.routes.route import Geometry, Route, Tuning
from ninfer.routes.work_cpu import by_elements


def _context(op: RmsNorm | GatedRmsNorm, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    n, d = types[0].shape[1], types[1].shape[0]
    assert isinstance(n, int) and isinstance(d, int)
    return {"d": d, "heads": n // d, "gated": isinstance(op, GatedRmsNorm)}


def _geometry(op: RmsNorm | GatedRmsNorm, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return by_elements(types[0], env)


RMS_NORM = Route(
    name="norm.cpu",
    op=RmsNorm,
    device="cpu",
    template="cpu/rms_norm.cpp.j2",
    geometry=_geometry,
    context=_context,
    numerics="f32",
)
GATED_RMS_NORM = Route(
    name="norm.gated.cpu",
    op=GatedRmsNorm,
    device="cpu",
    template="cpu/rms_norm.cpp.j2",
    geometry=_geometry,
    context=_context,
    numerics="f32",
)


def _join_context(op: JoinNorms, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    n = types[0].shape[1]
    nexts = (len(types) - op.num_before - 1) // 2  # a weight and an output for each
    return {"n": n, "nexts": nexts, "first_out": 1 + op.num_before + nexts}


def _join_geometry(op: JoinNorms, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return by_elements(types[0], env)


JOIN_NORMS = Route(
    name="join_norms.cpu",
    op=JoinNorms,
    device="cpu",
    template="cpu/join_norms.cpp.j2",
    geometry=_join_geometry,
    context=_join_context,
    numerics="f32",
)

ROUTES: tuple[Route[Any], ...] = (RMS_NORM, GATED_RMS_NORM, JOIN_NORMS)
