"""Mixtures of experts in decode steps of a GPU: two launches from the router's scores to the sum."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from ninfer.formats.quant import align_up
from ninfer.ir.ops.fused_experts import FusedExperts
from ninfer.ir.types import Env, TensorType, Types
from ninfer.routes.cuda_layout import TILE_ROWS, layout_of
from ninfer.routes.experts_cuda import ACT, FEW, Body, stack_body
from ninfer.routes.linear_cuda import RTOL, SHARED_80, SHARED_90
from ninfer.routes.route import Geometry, Route, Stage, Tuning

GA = 64  # columns that share an activation scale


@frozen
class First:
    """The launch of gates and ups. spans: runs of `span` tiles of K that a warp asks for at once; period: tiles of an
    expert; codes, scales, sums, bars, end: byte offsets in shared memory, which begins with the rings."""

    warps: int
    stages: int
    stage_bytes: int
    span: int
    spans: int
    pieces: int  # runs of 4 activations, of a thread
    period: int
    codes: int
    scales: int
    sums: int
    bars: int
    end: int

    @property
    def threads(self) -> int:
        return 32 * self.warps


@frozen
class Second:
    """The launch of the sums. items: spans of K of all picks (`picked`, `spans` of each) and of the branch beside;
    width, dense_width: columns of codes."""

    warps: int
    stages: int
    stage_bytes: int
    span: int
    spans: int
    dense_span: int
    dense_k: int
    dense_width: int
    picked: int
    items: int
    width: int
    codes: int
    scales: int
    sums: int
    bars: int
    end: int

    @property
    def threads(self) -> int:
        return 32 * self.warps


def even(items: int, most: int) -> int:
    """Warps of up to `most`, so that each has as many items as the fullest."""
    return -(-items // -(-items // most))


def _span(b: Body, kib: int) -> int:
    """Tiles along K of up to so many KiB, in runs that are as equal as can be."""
    assert b.tiling is not None
    most = max(1, min(b.chunks, (kib << 10) // b.tiling.tile_bytes))
    return -(-b.chunks // -(-b.chunks // most))


def _places(ring: int, width: int, sums: bool, bars: int) -> tuple[int, int, int, int, int]:
    """Of codes, scales, sums and barriers behind the rings, and the end. A scale, or sum, has room for 8 rows."""
    codes = align_up(ring, 128)
    scales = codes + align_up(width, 128)
    first_sum = scales + width // GA * 32
    at = first_sum + (width // 16 * 32 if sums else 0)
    return codes, scales, first_sum, at, at + 8 * bars


def _first(op: FusedExperts, types: Types, tuning: Tuning) -> First:
    b, k = _bodies(op, types)[0], _width(types[0])
    assert b.tiling is not None
    span = _span(b, tuning["span"])
    spans = -(-b.chunks // span)
    warps = even(spans, tuning["warps"])
    stages = min(2 * -(-spans // warps), max(2, tuning["ring"]))
    stage_bytes, width = span * b.tiling.tile_bytes, b.chunks * b.tiling.columns
    places = _places(warps * stages * stage_bytes, width, b.tiling.m_kind != "", warps * stages)
    period = op.glu.inner * (3 - op.num_stacks) // TILE_ROWS
    return First(warps, stages, stage_bytes, span, spans, -(-max(k, width) // (128 * warps)), period, *places)


def _second(op: FusedExperts, types: Types, tuning: Tuning) -> Second:
    _, b, dense = _bodies(op, types)
    assert b.tiling is not None
    span = _span(b, tuning["reach"])
    spans = -(-b.chunks // span)
    picked, items, stage_bytes = op.pick.top_k * spans, op.pick.top_k * spans, span * b.tiling.tile_bytes
    width, dense_width, dense_span, dense_k, sums = b.chunks * b.tiling.columns, 0, 0, 0, b.tiling.m_kind != ""
    if dense is not None:
        assert dense.tiling is not None and op.roles.dense is not None
        dense_k, dense_width = _width(types[op.roles.dense[0]]), dense.chunks * dense.tiling.columns
        dense_span = _span(dense, tuning["reach"])
        items += -(-dense.chunks // dense_span)
        stage_bytes = max(stage_bytes, dense_span * dense.tiling.tile_bytes)
        sums = sums or dense.tiling.m_kind != ""
    warps = even(items, tuning["warps"])
    stages = min(-(-items // warps), max(2, tuning["ring"]))
    places = _places(warps * stages * stage_bytes, op.pick.top_k * width + dense_width, sums, warps * stages)
    return Second(
        warps, stages, stage_bytes, span, spans, dense_span, dense_k, dense_width, picked, items, width, *places
    )


def _width(t: TensorType) -> int:
    k = t.shape[-1]
    assert isinstance(k, int)
    return k


def _bodies(op: FusedExperts, types: Types) -> tuple[Body, Body, Body | None]:
    """Of gates and ups, of down, and of the matrix beside."""
    r = op.roles
    dense = None if r.dense is None else stack_body(types[r.dense[2]])
    return stack_body(types[r.stacks[0]]), stack_body(types[r.down]), dense


def _context(op: FusedExperts, types: Types, env: Env, tuning: Tuning) -> dict[str, Any]:
    r = op.roles
    gate_up, down, dense = _bodies(op, types)
    names = {0: "x", 1: "logits", 2: "places", r.down: "down", **{i: f"w{j}" for j, i in enumerate(r.stacks)}}
    for i, name in ((r.scale, "scale"), (r.norm, "norm"), (r.score, "score"), (r.residual, "residual")):
        if i is not None:
            names[i] = name
    if r.dense is not None:
        names.update(zip(r.dense, ("dense_gate", "dense_up", "beside"), strict=True))
    kinds = {i: "u8" if t.fmt is not None else "f32" for i, t in enumerate(types[: r.count])} | {2: "i32"}
    outs = ["f32* y", "f32* z"] if op.beside == "own" else ["f32* y"]
    return {
        "gate_up": gate_up, "down": down, "dense": dense, "K": _width(types[0]), "experts": _width(types[1]), "ga": GA,
        "bulk": tuning["bulk"], "first": _first(op, types, tuning), "second": _second(op, types, tuning),
        "parameters": ", ".join([*(f"const {kinds[i]}* {names[i]}" for i in range(r.count)), *outs]),
        "act": ACT[op.glu.act],
    }  # fmt: skip


def _refuse(op: FusedExperts, types: Types) -> str | None:
    r, n = op.roles, _width(types[1])
    formats = [types[i].fmt for i in (*r.stacks, r.down, *(() if r.dense is None else r.dense[2:]))]
    if any(f is None or not layout_of(f).tiled for f in formats):
        return "takes matrices that are tiled"
    if len({types[i].fmt for i in r.stacks}) > 1:
        return "takes gate and up of one format"
    if op.glu.inner % TILE_ROWS or op.sum.outer % TILE_ROWS:
        return f"experts of {op.glu.inner} and {op.sum.outer} outputs are not whole tiles of {TILE_ROWS}"
    if n > 1024 or op.pick.top_k > 32:
        return f"picks up to 32 of up to 1024 experts, not {op.pick.top_k} of {n}"
    inner = [_width(types[0]), op.glu.inner, *(() if r.dense is None else (_width(types[r.dense[0]]),))]
    return next((f"rows of {k} values are not whole vectors of 4" for k in inner if k % 4), None)


def _fits(op: FusedExperts, types: Types, tuning: Tuning) -> bool:
    """Whether blocks of both launches fit shared memory."""
    limit = (SHARED_90 if tuning["bulk"] else SHARED_80) - (16 << 10)  # beside picks and sums
    return max(_first(op, types, tuning).end, _second(op, types, tuning).end) <= limit


def _first_geometry(op: FusedExperts, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c = _first(op, types, tuning)
    return Geometry((op.glu.inner // TILE_ROWS, env.rows * op.pick.top_k, 1), c.threads, c.end)


def _second_geometry(op: FusedExperts, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c = _second(op, types, tuning)
    return Geometry((op.sum.outer // TILE_ROWS, env.rows, 1), c.threads, c.end)


def _workspace(op: FusedExperts, types: Types, env: Env, tuning: Tuning) -> int:
    return 4 * env.rows * op.pick.top_k * op.glu.inner


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
        refuse=_refuse,
        tunings=tuple({"bulk": bulk, "warps": w, "span": s, "reach": n, "ring": r} for w, s, n, r in sizes),
        fits=_fits,
        rtol=RTOL,
    )


ROUTES: tuple[Route[Any], ...] = (_route(1), _route(0))
