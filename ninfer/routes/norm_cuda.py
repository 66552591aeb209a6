"""Norms on a GPU: a run of values stays in the registers of a warp or of a block."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from ninfer.formats.quant import align_up
from ninfer.ir.op import Op
from ninfer.ir.ops.join import JoinNorms
from ninfer.ir.ops.norm import GatedRmsNorm, RmsNorm
from ninfer.ir.types import Env, Types
from ninfer.routes.render import c_float
from ninfer.routes.route import Geometry, Route, Tuning

WARP_RUN = 512  # values that one warp holds


def _run(types: Types) -> int:
    d = types[1].shape[0]
    assert isinstance(d, int)
    return d


def _runs(types: Types, env: Env) -> int:
    rows, n = types[0].concrete(env)
    return rows * (n // _run(types))


def norm_lanes(d: int) -> int:
    """Warps for a run."""
    return 1 if d <= WARP_RUN else min(32, max(4, ceil(d / 320)))


def _geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    lanes, runs = norm_lanes(_run(types)), _runs(types, env)
    return Geometry((runs, 1, 1), 32 * lanes) if lanes > 1 else Geometry((ceil(runs / 4), 1, 1), 128)


def _context(op: Op, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    lanes = norm_lanes(_run(types))
    return {"lanes": lanes, "warps": lanes if lanes > 1 else 4, "gated": isinstance(op, GatedRmsNorm)}


RMS_NORM = Route(
    name="norm.rms.cuda",
    op=RmsNorm,
    device="cuda",
    template="cuda/rms_norm.cu.j2",
    geometry=_geometry,
    context=_context,
    numerics="cuda.norm",
)
GATED_RMS_NORM = Route(
    name="norm.gated.cuda",
    op=GatedRmsNorm,
    device="cuda",
    template="cuda/rms_norm.cu.j2",
    geometry=_geometry,
    context=_context,
    numerics="cuda.norm",
)


def _join_threads(types: Types) -> int:
    n = types[0].shape[1]
    assert isinstance(n, int)
    return min(1024, max(32, align_up(-(-n // 4), 32)))


def _join_context(op: JoinNorms, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    nexts = (len(types) - op.num_before - 1) // 2  # a weight and an output for each
    names = ["x", "a", "w", *(("b", "v", "outer") if op.two else ()), *(("factor",) if op.scaled else ())]
    inputs = [f"const f32* {name}" for name in (*names, *(f"u{i}" for i in range(nexts)))]
    return {
        "n": types[0].shape[1],
        "nexts": nexts,
        "threads": _join_threads(types),
        "parameters": ", ".join([*inputs, *(f"f32* y{i}" for i in range(nexts + 1))]),
        "plus": f" + {c_float(op.offset)}" if op.offset else "",
    }


def _join_geometry(op: JoinNorms, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((types[0].concrete(env)[0], 1, 1), _join_threads(types))


JOIN_NORMS = Route(
    name="join_norms.cuda",
    op=JoinNorms,
    device="cuda",
    template="cuda/join_norms.cu.j2",
    geometry=_join_geometry,
    context=_join_context,
    numerics="cuda.norm",
)

ROUTES: tuple[Route[Any], ...] = (RMS_NORM, GATED_RMS_NORM, JOIN_NORMS)
