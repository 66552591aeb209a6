"""What a drafter's rows pass through before and after its block, on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.ops.fused_draft import ArgmaxPicked, DraftInput, KeepNormed
from ninfer.ir.types import Env, Types
from ninfer.routes import journal_cuda
from ninfer.routes.norm_cuda import norm_lanes
from ninfer.routes.route import Geometry, Route, Tuning

NormOp = DraftInput | KeepNormed


def _warps(types: Types) -> int:
    h = types[0].shape[1]
    assert isinstance(h, int)
    return norm_lanes(h)


def _refuse(op: NormOp, types: Types) -> str | None:
    h = types[0].shape[1]
    if not isinstance(h, int) or h % 4 or h > 16384:
        return f"rows of {h} values are not multiples of 4 up to 16,384"
    if op.quant not in (0, 32):
        return f"quantises in groups of 32, not {op.quant}"
    return None


def _input_geometry(op: DraftInput, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((2, types[0].concrete(env)[0], 1), 32 * _warps(types))


def _keep_geometry(op: KeepNormed, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((types[0].concrete(env)[0], 1, 1), 32 * _warps(types))


def _context(op: NormOp, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"warps": _warps(types)}


DRAFT_INPUT = Route(
    name="draft_input.cuda",
    op=DraftInput,
    device="cuda",
    template="cuda/draft_input.cu.j2",
    geometry=_input_geometry,
    context=_context,
    refuse=_refuse,
    numerics="cuda",
)
KEEP_NORMED = Route(
    name="keep_normed.cuda",
    op=KeepNormed,
    device="cuda",
    template="cuda/keep_normed.cu.j2",
    geometry=_keep_geometry,
    context=_context,
    refuse=_refuse,
    numerics="cuda",
)
ARGMAX_PICKED = Route(
    name="argmax_picked.cuda",
    op=ArgmaxPicked,
    device="cuda",
    template="cuda/argmax.cu.j2",
    geometry=journal_cuda.argmax_geometry,
    context=journal_cuda.argmax_context,
    workspace=journal_cuda.argmax_workspace,
    numerics="exact",
)

ROUTES: tuple[Route[Any], ...] = (DRAFT_INPUT, KEEP_NORMED, ARGMAX_PICKED)
