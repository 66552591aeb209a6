"""Products of prompts with 8-bit activations on a GPU: a library's integer product between kernels of ours.

Activations become int8 with a scale per row, weights int8 with a scale per row of theirs, one op's matrices at a time
in the workspace. Both sides pass a Hadamard transform along K before, so that values that stand out, as activations
have, do not set the scale alone; it cancels in the product. The routes are opt-in: see Route.opt_in.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen

from ninfer.formats.quant import align_up
from ninfer.ir.op import Op, snake
from ninfer.ir.types import Env, Types
from ninfer.routes.cuda_layout import SLICE, TILE_ROWS
from ninfer.routes.linear_cuda import (
    OPS,
    Operands,
    bodies_of,
    finish_geometry,
    gemm,
    height,
    operands,
    rows_of,
)
from ninfer.routes.route import Geometry, Route, Stage, Tuning

PREFILL_8BIT = "prefill-8bit"  # Route.opt_in of these routes
ROWS_PAD = 16  # the library's integer kernels take multiples of 16 rows; what is beyond a step's is never read
RTOL_INT8 = 0.04  # of noise: 0.8 % from a side with a scale per row, twice that through SwiGLU; see the tests


@frozen
class Gemm8Places:
    """Byte offsets in the workspace: codes of weights at 0."""

    w_scale: int
    x: int
    x_scale: int
    product: int
    end: int


def slices_turned(op: Op, types: Types) -> int:
    """Slices of 64 columns whose values are turned together: what every matrix's tiles allow.

    Of four slices the values that a lane holds are enough, 64; of fewer all are turned, across lanes.
    """
    o = operands(op, types)
    most = [b.tiling.slices for b in bodies_of(o) if b.tiling] or [4]
    return next(s for s in (4, 2, 1) if s <= min(most) and (o.k % (SLICE * s) == 0 or s == 1))


def gemm8(op: Op, types: Types, env: Env, tuning: Tuning) -> dict[str, Any]:
    """For the three kernels and the library's product (a, b, c and their offsets)."""
    o, base = operands(op, types), gemm(op, types, env, tuning)
    rows, total, k = align_up(rows_of(o, env), ROWS_PAD), base["NS"], o.k
    w_scale = align_up(total * k, 256)
    x = w_scale + align_up(4 * total, 256)
    x_scale = x + align_up(rows * k, 256)
    product = x_scale + align_up(4 * rows, 256)
    at = Gemm8Places(w_scale, x, x_scale, product, product + align_up(4 * rows * total, 256))
    threads, slices = 256 if k <= 8192 else 512, slices_turned(op, types)
    workspace = base["a"]
    return {
        **base, "at": at, "int8": True, "S": slices, "across": slices < 4, "threads": threads,
        "pieces": -(-k // (8 * threads)), "direct": False,
        "b": workspace, "c": workspace, "a_offset": x, "b_offset": 0, "c_offset": product, "rows_pad": ROWS_PAD,
    }  # fmt: skip


def _weights_geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((sum(-(-height(t) // TILE_ROWS) for _, t in operands(op, types).weights), 1, 1), 128)


def _rows_geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c = gemm8(op, types, env, tuning)
    return Geometry((c["T"], 1, 1), c["threads"])


def _workspace(op: Op, types: Types, env: Env, tuning: Tuning) -> int:
    end = gemm8(op, types, env, tuning)["at"].end
    assert isinstance(end, int)
    return end


def _refuse(op: Op, types: Types) -> str | None:
    o: Operands = operands(op, types)
    if o.packed:
        return "takes activations as they are, not their codes"
    if o.k % SLICE:
        return f"rows of {o.k} values are not multiples of {SLICE}"
    group = o.quant or o.weigh
    if group and (height(o.weights[0][1]) % group or group not in (32, 64, 128)):
        return f"{height(o.weights[0][1])} outputs are not whole groups of {group}"
    if any(height(t) % 4 for _, t in o.weights):
        return "needs numbers of outputs that are multiples of 4"
    for b in bodies_of(o):
        if b.tiling and b.tiling.num_tiles * b.tiling.columns != o.k:
            return f"rows of {o.k} values are not whole tiles of {b.tiling.columns}"
    return None


def _route(op: type[Op]) -> Route[Any]:
    return Route(
        name=f"{snake(op.__name__)}.gemm8", op=op, device="cuda", template="cuda/gemm8_weights.cu.j2",
        geometry=_weights_geometry,
        then=(
            Stage[Op](template="cuda/gemm8_rows.cu.j2", geometry=_rows_geometry),
            Stage[Op](library="gemm_s8"),
            Stage[Op](template="cuda/gemm_finish.cu.j2", geometry=finish_geometry),
        ),
        context=gemm8, workspace=_workspace, widths=(129, 1 << 30), refuse=_refuse, rtol=RTOL_INT8,
        opt_in=PREFILL_8BIT, bits=8,
    )  # fmt: skip


ROUTES: tuple[Route[Any], ...] = tuple(_route(op) for op in OPS)
