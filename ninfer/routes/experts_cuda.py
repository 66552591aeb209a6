"""Mixtures of experts on a GPU: pick by pick for few rows, tensor-core products of an expert's picks for many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from attrs import frozen

from ninfer.formats.quant import align_up
from ninfer.ir.op import snake
from ninfer.ir.ops.experts import ExpertGlu, ExpertSum, PickExperts
from ninfer.ir.types import Env, TensorType, Types
from ninfer.routes.cuda_layout import SLICE, TILE_ROWS, Tiling, layout_of
from ninfer.routes.linear_cuda import SHARED_80, SHARED_90
from ninfer.routes.route import Geometry, Route, Stage, Tuning

Mixture: TypeAlias = ExpertGlu | ExpertSum

PIECE = 256  # columns of a plain format that a warp takes at a time
SORT_THREADS, SORT_EACH = 1024, 4  # of the kernel that sorts and rounds, and vectors of 4 that a thread rounds
FEW = 16  # rows up to which every pick reads its expert's weights
RTOL_BF16 = 0.015
MANY = 1024  # rows from which an expert of hundreds has some tens of picks
Tiles: TypeAlias = tuple[int, int, int, int]  # warps, picks, slabs in flight, blocks that registers of a unit allow for
FEW_PICKS = ((4, 32, 3, 4), (4, 64, 3, 3), (4, 128, 3, 2))
MANY_PICKS = ((4, 128, 3, 2), (4, 64, 4, 3))
GROUP_PICKS = ((4, 128, 4, 2), (8, 128, 4, 1), (4, 64, 4, 3))  # of warpgroups
GROUP_GLU = (GROUP_PICKS[1], GROUP_PICKS[0], GROUP_PICKS[2])  # longer rows: fewer blocks gather them
ACT = {
    "silu": "gate / (1.0f + expf(-gate))",
    "gelu_tanh": "gate / (1.0f + expf(-1.5957691216057308f * (gate + 0.044715f * gate * gate * gate)))",
}


@frozen
class Body:
    """A stack of experts. row_bytes: of 16 rows; chunks: pieces of K."""

    prefix: str
    tiling: Tiling | None
    dtype: str
    row_bytes: int
    chunks: int

    @property
    def factor(self) -> float:
        return 1.0 if self.tiling is None else self.tiling.factor

    @property
    def sums(self) -> int:
        """Columns whose activations are summed, for int8 products of formats with minima; 0: none are."""
        return min(self.tiling.group, SLICE) if self.tiling is not None and self.tiling.m_kind else 0


@frozen
class Places:
    """Byte offsets in the workspace."""

    tiles: int
    order: int
    x: int
    product: int
    end: int


def _stacks(types: Types) -> list[TensorType]:
    return [t for t in types if t.fmt is not None]


def stack_body(w: TensorType) -> Body:
    k, fmt = w.shape[1], w.fmt
    assert isinstance(k, int) and fmt is not None
    layout = layout_of(fmt)
    if layout.tiled:
        tiling = layout.tiling(k)
        return Body(f"Tile_{fmt.name}_{tiling.slices}", tiling, "", tiling.row_bytes, tiling.num_tiles)
    assert fmt.dtype is not None
    return Body(f"plain_{fmt.name}", None, fmt.dtype.name, TILE_ROWS * k * fmt.dtype.nbytes, -(-k // PIECE))


def _outputs(op: Mixture) -> int:
    return op.inner if isinstance(op, ExpertGlu) else op.outer


def _refuse(op: Mixture, types: Types) -> str | None:
    k = _stacks(types)[0].shape[1]
    assert isinstance(k, int)
    if _outputs(op) % TILE_ROWS:
        return f"experts of {_outputs(op)} outputs are not whole tiles of {TILE_ROWS}"
    return f"rows of {k} values are not whole vectors of 4" if k % 4 else None


def _refuse_mma(op: Mixture, types: Types) -> str | None:
    formats = {w.fmt for w in _stacks(types)}
    return "takes gate and up of one format" if len(formats) > 1 else _refuse(op, types)


def _num(op: Mixture, types: Types) -> int:
    n = types[2 if isinstance(op, ExpertGlu) else 3].shape[0]
    assert isinstance(n, int)
    return n


def _num_tiles(op: Mixture, types: Types, env: Env, tuning: Tuning) -> int:
    """Whole tiles of picks, and one begun for each expert at most."""
    picks = env.rows * op.top_k
    return -(-picks // tuning["columns"]) + min(_num(op, types), picks)


def _padded(w: TensorType) -> int:
    """Columns of activations that its tiles meet."""
    b, k = stack_body(w), w.shape[1]
    assert isinstance(k, int)
    return align_up(k, SLICE) if b.tiling is None else b.chunks * b.tiling.columns


def _tile_stages(w: TensorType, tuning: Tuning) -> int:
    """Tiles of a row in shared memory: those that all slabs but one meet, and the one in use."""
    tiling, stages = stack_body(w).tiling, tuning.get("stages", 0)
    return 0 if tiling is None or not stages else 1 - (1 - stages) // tiling.slices


def _mma_shared(types: Types, tuning: Tuning) -> int:
    """Slabs of activations, tiles of weights, and what it takes for slabs to begin at a multiple of 1024."""
    w = _stacks(types)[0]
    tiling, slabs = stack_body(w).tiling, tuning["stages"] * tuning["columns"] * 2 * SLICE
    tiles = 0 if tiling is None else tuning["warps"] * _tile_stages(w, tuning) * 2 * tiling.tile_bytes
    return slabs + tiles + 1024 * tuning["wgmma"]


def _mma_fits(op: Mixture, types: Types, tuning: Tuning) -> bool:
    tiling = stack_body(_stacks(types)[0]).tiling
    beside = 4 * tuning["columns"] + (0 if tiling is None else tiling.grid_bytes)
    return _mma_shared(types, tuning) + beside <= (SHARED_90 if tuning["wgmma"] else SHARED_80)


def _context(op: Mixture, types: Types, env: Env, tuning: Tuning) -> dict[str, Any]:
    """For every kernel of both ops. The workspace is that of the products by expert."""
    stacks, num, picks = _stacks(types), _num(op, types), env.rows * op.top_k
    glu, kp = isinstance(op, ExpertGlu), _padded(stacks[0])
    order = align_up(16 * (1 + _num_tiles(op, types, env, tuning)), 256) if "columns" in tuning else 0
    x = order + align_up(4 * picks, 256)
    product = x + align_up(2 * kp * (env.rows if glu else picks), 256)
    residual = not glu and len(types) == 7
    weights = ", ".join(f"const u8* w{i}" for i in range(len(stacks)))
    everything = (
        f"const f32* x, const i32* ids, const i32* places, {weights}, f32* y"
        if glu
        else "const f32* h, const i32* ids, const f32* weights, const i32* places, const u8* down, "
        + ("const f32* residual, " if residual else "")
        + "f32* y"
    )
    return {
        "bodies": tuple(map(stack_body, stacks)),
        "K": stacks[0].shape[1], "KP": kp, "num": num, "threads": SORT_THREADS, "each": SORT_EACH,
        "glu": glu, "residual": residual, "tile_stages": _tile_stages(stacks[0], tuning),
        "parameters": weights, "all_parameters": everything, "act": ACT[op.act] if isinstance(op, ExpertGlu) else "",
        "period_tiles": _outputs(op) * (3 - len(stacks)) // TILE_ROWS if glu else 0,
        "at": Places(0, order, x, product, product + (0 if glu else 2 * picks * _outputs(op))),
    }  # fmt: skip


def _each_geometry(op: Mixture, types: Types, env: Env, tuning: Tuning) -> Geometry:
    rows = env.rows * (op.top_k if isinstance(op, ExpertGlu) else 1)
    return Geometry((_outputs(op) // TILE_ROWS, rows, 1), 32 * tuning["warps"])


def _sort_geometry(op: Mixture, types: Types, env: Env, tuning: Tuning) -> Geometry:
    rows = env.rows * (1 if isinstance(op, ExpertGlu) else op.top_k)
    items = rows * _padded(_stacks(types)[0]) // 4
    return Geometry((1 + -(-items // (SORT_THREADS * SORT_EACH)), 1, 1), SORT_THREADS)


def _mma_geometry(op: Mixture, types: Types, env: Env, tuning: Tuning) -> Geometry:
    each = TILE_ROWS * tuning["warps"] * (1 if isinstance(op, ExpertGlu) else 2)
    grid = (-(-_outputs(op) // each), _num_tiles(op, types, env, tuning), 1)
    return Geometry(grid, 32 * tuning["warps"], _mma_shared(types, tuning))


def _combine_geometry(op: Mixture, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((-(-env.rows * _outputs(op) // 1024), 1, 1), 256)


def _workspace(op: Mixture, types: Types, env: Env, tuning: Tuning) -> int:
    places: Places = _context(op, types, env, tuning)["at"]
    return places.end


def _pick_refuse(op: PickExperts, types: Types) -> str | None:
    n = types[0].shape[1]
    assert isinstance(n, int)
    if n > 1024 or op.top_k > 32:
        return f"picks up to 32 of up to 1024 experts, not {op.top_k} of {n}"
    return None


def _pick_geometry(op: PickExperts, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((-(-env.rows // 4), 1, 1), 128)


PICK_EXPERTS = Route(
    name="pick_experts.cuda",
    op=PickExperts,
    device="cuda",
    template="cuda/pick_experts.cu.j2",
    geometry=_pick_geometry,
    refuse=_pick_refuse,
    numerics="cuda",
)


def _each_route(op: type[Any], template: str) -> Route[Any]:
    return Route(
        name=f"{snake(op.__name__)}.each",
        op=op,
        device="cuda",
        template=template,
        geometry=_each_geometry,
        context=_context,
        refuse=_refuse,
        tunings=({"warps": 8}, {"warps": 4}),
        numerics="cuda.experts.f32",
    )


def _mma_route(op: type[Any], name: str, low: int, high: int, need: str, tiles: Sequence[Tiles]) -> Route[Any]:
    then = [Stage[Any](template="cuda/expert_mma.cu.j2", geometry=_mma_geometry)]
    if op is ExpertSum:
        then.append(Stage[Any](template="cuda/expert_combine.cu.j2", geometry=_combine_geometry))
    wgmma = int(need == "sm90a")
    return Route(
        name=f"{snake(op.__name__)}.{name}",
        op=op,
        device="cuda",
        template="cuda/expert_sort.cu.j2",
        geometry=_sort_geometry,
        then=tuple(then),
        context=_context,
        workspace=_workspace,
        widths=(low, high),
        needs=(need,),
        refuse=_refuse_mma,
        tunings=tuple({"warps": w, "columns": c, "stages": s, "resident": r, "wgmma": wgmma} for w, c, s, r in tiles),
        fits=_mma_fits,
        rtol=RTOL_BF16,
    )


ROUTES: tuple[Route[Any], ...] = (
    PICK_EXPERTS,
    *(
        _mma_route(op, *route)
        for op in (ExpertGlu, ExpertSum)
        for route in (
            ("wgmma", MANY, 1 << 30, "sm90a", GROUP_GLU if op is ExpertGlu else GROUP_PICKS),
            ("mma", FEW + 1, MANY - 1, "sm80", FEW_PICKS),
            ("mma.many", MANY, 1 << 30, "sm80", MANY_PICKS),
        )
    ),
    _each_route(ExpertGlu, "cuda/expert_glu.cu.j2"),
    _each_route(ExpertSum, "cuda/expert_sum.cu.j2"),
)
