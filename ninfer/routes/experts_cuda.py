"""Mixtures of experts on a GPU: pick by pick for few rows, tensor-core products of an expert's picks for many."""

from __future__ import annotations

from typing import Any, TypeAlias

from attrs import frozen

from ninfer.formats.quant import align_up
from ninfer.ir.op import snake
from ninfer.ir.ops.experts import ExpertGlu, ExpertSum, PickExperts
from ninfer.ir.types import Env, TensorType, Types
from ninfer.routes.cuda_layout import SLICE, TILE_ROWS, Tiling, layout_of
from ninfer.routes.route import Geometry, Route, Stage, Tuning

Mixture: TypeAlias = ExpertGlu | ExpertSum

PIECE = 256  # columns of a plain format that a warp takes at a time
FEW = 16  # rows up to which every pick reads its expert's weights
RTOL_BF16 = 0.015
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

    starts: int
    tiles: int
    order: int
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


def _context(op: Mixture, types: Types, env: Env, tuning: Tuning) -> dict[str, Any]:
    """For every kernel of both ops. The workspace is that of the products by expert."""
    stacks, num, picks = _stacks(types), _num(op, types), env.rows * op.top_k
    tiles = align_up(4 * (num + 1), 256)
    order = 2 * tiles
    product = order + align_up(4 * picks, 256)
    glu = isinstance(op, ExpertGlu)
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
        "K": stacks[0].shape[1], "num": num, "threads": align_up(num, 32), "glu": glu, "residual": residual,
        "parameters": weights, "all_parameters": everything, "act": ACT[op.act] if isinstance(op, ExpertGlu) else "",
        "period_tiles": _outputs(op) * (3 - len(stacks)) // TILE_ROWS if glu else 0,
        "at": Places(0, tiles, order, product, product + (0 if glu else 4 * picks * _outputs(op))),
    }  # fmt: skip


def _each_geometry(op: Mixture, types: Types, env: Env, tuning: Tuning) -> Geometry:
    rows = env.rows * (op.top_k if isinstance(op, ExpertGlu) else 1)
    return Geometry((_outputs(op) // TILE_ROWS, rows, 1), 32 * tuning["warps"])


def _sort_geometry(op: Mixture, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((1, 1, 1), align_up(_num(op, types), 32))


def _mma_geometry(op: Mixture, types: Types, env: Env, tuning: Tuning) -> Geometry:
    """Whole tiles of picks, and one begun for each expert at most."""
    picks = env.rows * op.top_k
    tiles = -(-picks // tuning["columns"]) + min(_num(op, types), picks)
    each = TILE_ROWS * tuning["warps"] * (1 if isinstance(op, ExpertGlu) else 2)
    return Geometry((-(-_outputs(op) // each), tiles, 1), 32 * tuning["warps"])


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


def _mma_route(op: type[Any]) -> Route[Any]:
    then = [Stage[Any](template="cuda/expert_mma.cu.j2", geometry=_mma_geometry)]
    if op is ExpertSum:
        then.append(Stage[Any](template="cuda/expert_combine.cu.j2", geometry=_combine_geometry))
    return Route(
        name=f"{snake(op.__name__)}.mma",
        op=op,
        device="cuda",
        template="cuda/expert_sort.cu.j2",
        geometry=_sort_geometry,
        then=tuple(then),
        context=_context,
        workspace=_workspace,
        widths=(FEW + 1, 1 << 30),
        needs=("sm80",),
        refuse=_refuse_mma,
        tunings=({"warps": 4, "columns": 32}, {"warps": 4, "columns": 64}),
        rtol=RTOL_BF16,
    )


ROUTES: tuple[Route[Any], ...] = (
    PICK_EXPERTS,
    _mma_route(ExpertGlu),
    _mma_route(ExpertSum),
    _each_route(ExpertGlu, "cuda/expert_glu.cu.j2"),
    _each_route(ExpertSum, "cuda/expert_sum.cu.j2"),
)
