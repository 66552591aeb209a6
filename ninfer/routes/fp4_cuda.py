"""Products of NVFP4 weights with activations in NVFP4 (sm_120a): block-scaled tensor-core products of e2m1.

Activations of four bits cost some 10 % of a product (relative L2), so the routes are opt-in: see Route.opt_in.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen

from ninfer.formats.quant import align_up
from ninfer.ir.op import Op, snake
from ninfer.ir.ops.linear import Linear, LinearAdd, LinearSwiglu
from ninfer.ir.types import Env, Types
from ninfer.routes.cuda_layout import layout_of
from ninfer.routes.linear_cuda import finish_geometry, gemm, operands
from ninfer.routes.route import Geometry, Route, Stage, Tuning

PREFILL_4BIT = "prefill-4bit"  # Route.opt_in of these routes
RTOL_A4 = 0.15  # e2m1 with scales of e4m3 per 16 columns: 9.5 % of normal data, half as much again through SwiGLU


@frozen
class Places:
    """Byte offsets in the workspace."""

    codes: int
    scales: int
    inverse: int
    product: int
    end: int


def _context(op: Op, types: Types, env: Env, tuning: Tuning) -> dict[str, Any]:
    c = gemm(op, types, env, tuning)
    rows, k = c["T"], c["K"]
    scales = align_up(rows * k // 2, 256)
    inverse = scales + align_up(rows * k // 16, 256)
    product = inverse + align_up(4 * rows, 256)
    end = product + (0 if c["direct"] else align_up(2 * rows * c["NS"], 256))
    tiling = c["bodies"][0].tiling
    return {**c, "at": Places(0, scales, inverse, product, end), "slices": tiling.slices, "chunks": tiling.num_tiles}


def _workspace(op: Op, types: Types, env: Env, tuning: Tuning) -> int:
    places: Places = _context(op, types, env, tuning)["at"]
    return places.end


def _rows_geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((types[0].concrete(env)[0], 1, 1), 256)


def _mma_geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c, step, columns = _context(op, types, env, tuning), 32 * tuning["warps"], tuning["columns"]
    blocks = sum(-(-w.n // step) for b in c["bodies"] for w in b.weights)
    slab = columns * (36 * c["slices"] + 16)
    return Geometry((blocks, -(-c["T"] // columns), 1), step, 3 * slab)


def _refuse(op: Op, types: Types) -> str | None:
    formats = {t.fmt for _, t in operands(op, types).weights}
    if any(f is None or layout_of(f).d_kind != "e4m3" for f in formats):
        return "multiplies nvfp4"
    return None if len(formats) == 1 else "takes matrices of one number of divisors"


def _direct(op: Op, types: Types) -> bool:
    return len(operands(op, types).weights) == 1 and not isinstance(op, LinearAdd)


def _route(op: type[Op], direct: bool) -> Route[Any]:
    then = [Stage[Op](template="cuda/fp4_mma.cu.j2", geometry=_mma_geometry)]
    if not direct:
        then.append(Stage[Op](template="cuda/gemm_finish.cu.j2", geometry=finish_geometry))

    def refuse(op: Op, types: Types) -> str | None:
        return "is for other operands" if _direct(op, types) != direct else _refuse(op, types)

    return Route(
        name=f"{snake(op.__name__)}.fp4{'-direct' if direct else ''}",
        op=op,
        device="cuda",
        template="cuda/fp4_quantize.cu.j2",
        geometry=_rows_geometry,
        then=tuple(then),
        context=_context,
        workspace=_workspace,
        widths=(33, 1 << 30),
        needs=("sm120a",),
        refuse=refuse,
        tunings=({"warps": 4, "columns": 64}, {"warps": 4, "columns": 32}),
        rtol=RTOL_A4,
        opt_in=PREFILL_4BIT,
        bits=4,
    )


ROUTES: tuple[Route[Any], ...] = (
    _route(Linear, True),
    _route(Linear, False),
    _route(LinearAdd, False),
    _route(LinearSwiglu, False),
)
