"""A product with its residual and a router's scores of the sum, for one row: clusters of blocks own 128 columns."""

from __future__ import annotations

from typing import Any

from ninfer.formats.quant import align_up
from ninfer.ir.ops.scored_add import PART, ScoredAdd
from ninfer.ir.types import Env, TensorType, Types
from ninfer.routes.cuda_layout import TILE_ROWS, layout_of
from ninfer.routes.expert_launches import even
from ninfer.routes.experts_cuda import stack_body
from ninfer.routes.linear_cuda import SHARED_90
from ninfer.routes.route import Geometry, Route, Tuning

CLUSTER = PART // TILE_ROWS


def _size(t: TensorType, axis: int) -> int:
    n = t.shape[axis]
    assert isinstance(n, int)
    return n


def _context(op: ScoredAdd, types: Types, env: Env, tuning: Tuning) -> dict[str, Any]:
    codes, w, router = types[0], types[2], types[5]
    b, own, n = stack_body(w), _size(router, 0) // CLUSTER, _size(w, 0)
    assert b.tiling is not None and router.fmt is not None and router.fmt.dtype is not None
    warps = even(b.chunks, tuning["warps"])
    stage_bytes, width = -(-b.chunks // warps) * b.tiling.tile_bytes, b.chunks * b.tiling.columns
    at = align_up(warps * stage_bytes, 128)
    scales = at + align_up(width, 128)
    bars = scales + width // op.packed * 32
    return {
        "b": b, "ga": op.packed, "warps": warps, "threads": 32 * warps, "N": n, "x_codes": _size(codes, 1),
        "cluster": CLUSTER, "part": PART, "own": own, "vectors": -(-own * 16 // (32 * warps)),
        "dtype": router.fmt.dtype.name, "stage_bytes": stage_bytes,
        "codes": at, "scales": scales, "bars": bars, "end": bars + 8 * warps,
    }  # fmt: skip


def _refuse(op: ScoredAdd, types: Types) -> str | None:
    w, router = types[2], types[5]
    if w.fmt is None or not layout_of(w.fmt).tiled or layout_of(w.fmt).m_kind:
        return "takes a tiled matrix without minima"
    dtype = None if router.fmt is None else router.fmt.dtype
    if dtype is None or dtype.name not in ("bf16", "f16") or _size(router, 0) % CLUSTER:
        return f"takes a router in bf16 or f16 with a multiple of {CLUSTER} experts"
    return None


def _fits(op: ScoredAdd, types: Types, tuning: Tuning) -> bool:
    c = _context(op, types, Env(1, 1, 1), tuning)
    end: int = c["end"]
    return 32 * c["warps"] >= PART and c["vectors"] <= 4 and end <= SHARED_90 - 4096


def _geometry(op: ScoredAdd, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c = _context(op, types, env, tuning)
    return Geometry((c["N"] // TILE_ROWS, 1, 1), c["threads"], c["end"])


SCORED_ADD = Route(
    name="scored_add.cluster",
    op=ScoredAdd,
    device="cuda",
    template="cuda/scored_add.cu.j2",
    geometry=_geometry,
    context=_context,
    widths=(1, 1),
    needs=("sm90a",),
    refuse=_refuse,
    tunings=({"warps": 16}, {"warps": 8}),
    fits=_fits,
    sim=False,
)

ROUTES: tuple[Route[Any], ...] = (SCORED_ADD,)
