"""Rotations with what makes their rows and what quantises them, on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.ops.elementwise import SigmoidMul
from ninfer.ir.ops.rotated import Rotated
from ninfer.ir.types import Env, Types
from ninfer.routes.norm_cuda import WARP_RUN, norm_lanes
from ninfer.routes.rotated_cpu import formula, norm_length, rotated_kind, width
from ninfer.routes.route import Geometry, Route, Tuning

SHARED = 48 << 10
FEW_ROWS = 32  # up to here the blocks of a row go to thread blocks of their own, and each norms the whole row


def _bytes(count: int) -> int:
    """Of shared memory, with the gaps between runs of eight."""
    return 4 * (count + count // 8)


def _refuse(op: Rotated, types: Types) -> str | None:
    n, d = width(types), norm_length(op, types)
    if op.block % 32 or _bytes(op.block) > SHARED - 256:
        return f"a thread block holds blocks of 32 to 8192 values, not {op.block}"
    if op.quant and (op.block % 128 or op.quant not in (32, 64, 128)):
        return f"quantises blocks of 128 and more in groups of 32, 64 and 128, not {op.block} in {op.quant}"
    if rotated_kind(op) == "norm" and (d != n or n > 16384):
        return f"norms whole rows of at most 16384 values, not {d} of {n}"
    if rotated_kind(op) == "gated" and (op.block % d or d % 4 or d > WARP_RUN):
        return f"a warp norms heads of up to {WARP_RUN} values that divide the block, not {d}"
    return None


def _threads(op: Rotated, types: Types) -> int:
    if rotated_kind(op) == "norm":
        return 32 * norm_lanes(width(types))
    return max(32, min(256, op.block // 8))


def _count(op: Rotated, types: Types, env: Env) -> int:
    """Values of a thread block."""
    n, rows = width(types), types[0].concrete(env)[0]
    whole = rotated_kind(op) == "norm" and rows > FEW_ROWS and _bytes(n) <= SHARED - 256
    return n if whole else op.block


def _geometry(op: Rotated, types: Types, env: Env, tuning: Tuning) -> Geometry:
    rows = types[0].concrete(env)[0]
    return Geometry((rows * (width(types) // _count(op, types, env)), 1, 1), _threads(op, types))


def _context(op: Rotated, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    product = "{0} * sigmoid({1})" if isinstance(op.maker, SigmoidMul) else "silu({0}) * {1}"
    return {
        "kind": rotated_kind(op),
        "d": norm_length(op, types),
        "formula": formula(op),
        "threads": _threads(op, types),
        "count": _count(op, types, env),
        "lanes": ", ".join(product.format(f"p.{c}", f"q.{c}") for c in "xyzw"),
    }


ROTATED = Route(
    name="rotated.cuda",
    op=Rotated,
    device="cuda",
    template="cuda/rotated.cu.j2",
    geometry=_geometry,
    context=_context,
    refuse=_refuse,
    numerics="cuda.norm",
)

ROUTES: tuple[Route[Any], ...] = (ROTATED,)
