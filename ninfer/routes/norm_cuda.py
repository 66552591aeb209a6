"""Norms on a GPU: a run of values stays in the registers of a warp or of a block."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from ninfer.ir.op import Op
from ninfer.ir.ops.norm import GatedRmsNorm, RmsNorm
from ninfer.ir.types import Env, Types
from ninfer.routes.route import Geometry, Route, Tuning

WARP_RUN = 512  # values that one warp holds


def _run(types: Types) -> int:
    d = types[1].shape[0]
    assert isinstance(d, int)
    return d


def _runs(types: Types, env: Env) -> int:
    rows, n = types[0].concrete(env)
    return rows * (n // _run(types))


def _lanes(d: int) -> int:
    """Warps for a run."""
    return 1 if d <= WARP_RUN else min(32, max(4, ceil(d / 320)))


def _geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    lanes, runs = _lanes(_run(types)), _runs(types, env)
    return Geometry((runs, 1, 1), 32 * lanes) if lanes > 1 else Geometry((ceil(runs / 4), 1, 1), 128)


def _context(op: Op, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    lanes = _lanes(_run(types))
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

ROUTES: tuple[Route[Any], ...] = (RMS_NORM, GATED_RMS_NORM)
