"""What stands before the attention of wide heads, on a GPU."""

from __future__ import annotations

from typing import Any

from ninfer.ir.ops.turn_heads import TurnHeads
from ninfer.ir.types import Env, Types
from ninfer.routes.route import Geometry, Route, Tuning


def _refuse(op: TurnHeads, types: Types) -> str | None:
    if not op.fmt.is_plain:
        return f"stores keys and values as they are, not in {op.fmt.name}"
    return f"a warp turns heads of multiples of 64 values, not {op.head_dim}" if op.head_dim % 64 else None


def _geometry(op: TurnHeads, types: Types, env: Env, tuning: Tuning) -> Geometry:
    rows, n = types[0].concrete(env)
    return Geometry((-(-rows * (n // op.head_dim + op.kv_heads) // 4), 1, 1), 128)


ROUTES: tuple[Route[Any], ...] = (
    Route(
        name="turn_heads.cuda",
        op=TurnHeads,
        device="cuda",
        template="cuda/turn_heads.cu.j2",
        geometry=_geometry,
        refuse=_refuse,
        numerics="cuda",
    ),
)
