"""Mixtures of experts in decode steps of a GPU: two launches from the router's scores to the sum."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from ninfer.ir.ops.fused_experts import FusedExperts
from ninfer.ir.types import Env, Types
from ninfer.routes.cuda_layout import TILE_ROWS, layout_of
from ninfer.routes.expert_launches import (
    GA,
    bodies_of,
    first_launch,
    second_launch,
    unit_launch,
    wide_body,
    width_of,
)
from ninfer.routes.experts_cuda import ACT, FEW
from ninfer.routes.linear_cuda import RTOL, SHARED_80, SHARED_90
from ninfer.routes.route import Geometry, Route, Stage, Tuning


def _context(op: FusedExperts, types: Types, env: Env, tuning: Tuning) -> dict[str, Any]:
    r = op.roles
    gate_up, down, dense = bodies_of(op, types)
    names = {0: "x", 1: "logits", 2: "places", r.down: "down", **{i: f"w{j}" for j, i in enumerate(r.stacks)}}
    for i, name in ((r.scale, "scale"), (r.norm, "norm"), (r.score, "score"), (r.residual, "residual")):
        if i is not None:
            names[i] = name
    units = unit_launch(op, types, tuning) if "each" in tuning else None
    second = second_launch(op, types, tuning)
    if units is not None:
        second = evolve(second, wide=env.rows * op.pick.top_k * op.glu.inner)
    if r.dense is not None:
        names.update(zip(r.dense, ("dense_gate", "dense_up", "beside"), strict=True))
    kinds = {i: "u8" if t.fmt is not None else "f32" for i, t in enumerate(types[: r.count])} | {2: "i32"}
    outs = ["f32* y", "f32* z"] if op.beside == "own" else ["f32* y"]
    return {
        "gate_up": gate_up, "down": down, "dense": dense, "K": width_of(types[0]),
        "experts": width_of(types[1]) // (op.parts or 1), "ga": GA, "bulk": tuning["bulk"],
        "first": units or first_launch(op, types, tuning), "second": second, "dense_gate": wide_body(op, types),
        "parameters": ", ".join([*(f"const {kinds[i]}* {names[i]}" for i in range(r.count)), *outs]),
        "act": ACT[op.glu.act],
    }  # fmt: skip


def _refuse(op: FusedExperts, types: Types) -> str | None:
    r, n = op.roles, width_of(types[1]) // (op.parts or 1)
    dense = () if r.dense is None else r.dense[0 if op.parts else 2 :]
    formats = [types[i].fmt for i in (*r.stacks, r.down, *dense)]
    if any(f is None or not layout_of(f).tiled for f in formats):
        return "takes matrices that are tiled"
    if len({types[i].fmt for i in r.stacks}) > 1:
        return "takes gate and up of one format"
    if op.glu.inner % TILE_ROWS or op.sum.outer % TILE_ROWS:
        return f"experts of {op.glu.inner} and {op.sum.outer} outputs are not whole tiles of {TILE_ROWS}"
    if n > 1024 or op.pick.top_k > 32:
        return f"picks up to 32 of up to 1024 experts, not {op.pick.top_k} of {n}"
    inner = [width_of(types[0]), op.glu.inner, *(() if r.dense is None else (width_of(types[r.dense[2]]),))]
    return next((f"rows of {k} values are not whole vectors of 4" for k in inner if k % 4), None)


def _fits(op: FusedExperts, types: Types, tuning: Tuning) -> bool:
    """Whether blocks of both launches fit shared memory."""
    limit = (SHARED_90 if tuning["bulk"] else SHARED_80) - (16 << 10)  # beside picks and sums
    return max(first_launch(op, types, tuning).end, second_launch(op, types, tuning).end) <= limit


def _first_geometry(op: FusedExperts, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c = first_launch(op, types, tuning)
    return Geometry((op.glu.inner // TILE_ROWS, env.rows * op.pick.top_k, 1), c.threads, c.end)


def _second_geometry(op: FusedExperts, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c = second_launch(op, types, tuning)
    return Geometry((op.sum.outer // TILE_ROWS, env.rows, 1), c.threads, c.end)


def _workspace(op: FusedExperts, types: Types, env: Env, tuning: Tuning) -> int:
    return 4 * env.rows * op.pick.top_k * op.glu.inner


def _refuse_bulk(op: FusedExperts, types: Types) -> str | None:
    return "takes scores that are whole" if op.parts else _refuse(op, types)


def _refuse_units(op: FusedExperts, types: Types) -> str | None:
    r = op.roles
    dense = () if r.dense is None or not op.parts else r.dense[:2]
    formats = [types[i].fmt for i in (*r.stacks, *dense)]
    if any(f is not None and f.is_plain is False and layout_of(f).m_kind for f in formats):
        return "takes gates and ups of formats without minima"
    if dense and types[dense[0]].fmt != types[dense[1]].fmt:
        return "takes gate and up beside of one format"
    return _refuse(op, types)


def _units_fit(op: FusedExperts, types: Types, tuning: Tuning) -> bool:
    """Whether blocks of both launches fit shared memory, and there are enough for the branch beside."""
    u, limit = unit_launch(op, types, tuning), (SHARED_90 if tuning["bulk"] else SHARED_80) - (16 << 10)
    enough = u.blocks >= 2 * u.wide_tiles * u.cuts and 16 * (u.each + 1) <= u.threads
    return enough and max(u.end, second_launch(op, types, tuning).end) <= limit


def _units_geometry(op: FusedExperts, types: Types, env: Env, tuning: Tuning) -> Geometry:
    u = unit_launch(op, types, tuning)
    return Geometry((u.blocks, env.rows, 1), u.threads, u.end)


def _units_workspace(op: FusedExperts, types: Types, env: Env, tuning: Tuning) -> int:
    u, s = unit_launch(op, types, tuning), second_launch(op, types, tuning)
    return 4 * env.rows * (op.pick.top_k * op.glu.inner + u.cuts * 2 * s.dense_k * bool(u.wide_tiles))


def _route(bulk: int) -> Route[FusedExperts]:
    """tuning: warps of a block at most; span, reach: KiB that a warp of the first and of the second launch asks for at
    once; ring: times that it does so before it multiplies, at most; bulk: 1: sm_90's copy engine."""
    sizes = ((12, 2, 8, 8), (20, 2, 3, 8), (12, 4, 4, 4), (8, 2, 4, 4), (4, 1, 1, 2), (12, 5, 8, 8))
    return Route(
        name=f"fused_experts.{'bulk' if bulk else 'copy'}",
        op=FusedExperts,
        device="cuda",
        template="cuda/expert_first.cu.j2",
        geometry=_first_geometry,
        then=(Stage(template="cuda/expert_second.cu.j2", geometry=_second_geometry),),
        context=_context,
        workspace=_workspace,
        widths=(1, FEW),
        needs=("sm90a",) if bulk else ("sm80",),
        refuse=_refuse_bulk,
        tunings=tuple({"bulk": bulk, "warps": w, "span": s, "reach": n, "ring": r} for w, s, n, r in sizes),
        fits=_fits,
        rtol=RTOL,
    )


def _units_route(bulk: int) -> Route[FusedExperts]:
    """tuning: as above, and each: units of a block."""
    sizes = ((8, 1, 12, 8), (8, 2, 12, 8), (11, 2, 12, 8), (11, 3, 12, 5), (6, 1, 12, 8))
    return Route(
        name=f"fused_experts.units_{'bulk' if bulk else 'copy'}",
        op=FusedExperts,
        device="cuda",
        template="cuda/expert_units.cu.j2",
        geometry=_units_geometry,
        then=(Stage(template="cuda/expert_second.cu.j2", geometry=_second_geometry),),
        context=_context,
        workspace=_units_workspace,
        widths=(1, FEW),
        needs=("sm90a",) if bulk else ("sm80",),
        refuse=_refuse_units,
        tunings=tuple({"bulk": bulk, "warps": w, "each": e, "then": t, "reach": n, "ring": 8} for w, e, t, n in sizes),
        fits=_units_fit,
        rtol=RTOL,
    )


ROUTES: tuple[Route[Any], ...] = (_route(1), _route(0), _units_route(1), _units_route(0))
