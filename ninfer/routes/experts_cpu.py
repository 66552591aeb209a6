"""Mixtures of experts on a CPU: weights decoded to float32, once for all picks of an expert in a block of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from ninfer.ir.ops.experts import ExpertGlu, ExpertSum, PickExperts
from ninfer.ir.types import Env, TensorType, Types
from ninfer.routes.grids_cpu import GRIDS
from ninfer.routes.linear_cpu import CHUNK_MACS, codes
from ninfer.routes.route import Geometry, Route, Tuning
from ninfer.routes.work_cpu import by_elements

Mixture: TypeAlias = ExpertGlu | ExpertSum

BLOCK = 128  # rows whose picks are sorted together
ACT = {"silu": "g * sigmoid8(g)", "gelu_tanh": "g * sigmoid8(1.5957691216057308f * (g + 0.044715f * g * g * g))"}


def _stacks(types: Types) -> list[TensorType]:
    return [t for t in types if t.fmt is not None]


def _refuse(op: Mixture, types: Types) -> str | None:
    for w in _stacks(types):
        if w.fmt is None or (w.fmt.is_grid and w.fmt.name not in GRIDS):
            return f"has no decoder of {w.fmt}"
    return None


def _context(op: Mixture, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    found, stacks = list[dict[str, Any]](), _stacks(types)
    for w in stacks:
        (n, k), fmt = w.shape, w.fmt
        assert isinstance(n, int) and isinstance(k, int) and fmt is not None
        found.append(codes(fmt, n, k))
    (num,) = types[2 if isinstance(op, ExpertGlu) else 3].shape
    more: dict[str, Any] = {"residual": len(types) == 7}
    if isinstance(op, ExpertGlu):
        more = {"act": ACT[op.act], "period": op.inner * (3 - len(stacks))}
    return {"codes": found, "k": found[0]["k"], "num": num, "block": BLOCK, **more}


def _geometry(op: Mixture, types: Types, env: Env, tuning: Tuning) -> Geometry:
    """As many chunks as there are panels of the experts in use, and no more than the work is worth."""
    k = _stacks(types)[0].shape[1]
    assert isinstance(k, int)
    (num,) = types[2 if isinstance(op, ExpertGlu) else 3].concrete(env)
    if isinstance(op, ExpertGlu):
        macs, panels = 2 * op.inner * k, -(-op.inner // 8) * min(num, env.rows * op.top_k)
    else:
        macs, panels = op.outer * k, -(-op.outer // 16)
    n = env.rows * op.top_k * macs // CHUNK_MACS
    return Geometry((min(panels, max(2, n)), 1, 1))


def _by_rows(op: PickExperts, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return by_elements(types[0], env)


PICK_EXPERTS = Route(
    name="pick_experts.cpu",
    op=PickExperts,
    device="cpu",
    template="cpu/pick_experts.cpp.j2",
    geometry=_by_rows,
    numerics="f32",
)
EXPERT_GLU = Route(
    name="expert_glu.cpu",
    op=ExpertGlu,
    device="cpu",
    template="cpu/expert_glu.cpp.j2",
    refuse=_refuse,
    tunings=({"gb": 8},),
    geometry=_geometry,
    context=_context,
    numerics="f32",
)
EXPERT_SUM = Route(
    name="expert_sum.cpu",
    op=ExpertSum,
    device="cpu",
    template="cpu/expert_sum.cpp.j2",
    refuse=_refuse,
    tunings=({"gb": 8},),
    geometry=_geometry,
    context=_context,
    numerics="f32",
)

ROUTES: tuple[Route[Any], ...] = (PICK_EXPERTS, EXPERT_GLU, EXPERT_SUM)
