"""Acceptance of drafts, and the records of the steps that follow, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.op import Op, snake
from ninfer.ir.ops.rounds import COUNTING, NUM_NEXT, ROUND_OPS
from ninfer.ir.types import Env, Types
from ninfer.routes.route import Geometry, Route, Tuning


def _one(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry()


def _context(op: Op, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"num_next": NUM_NEXT, "counting": COUNTING}


ROUTES: tuple[Route[Any], ...] = tuple(
    Route(
        name=f"{snake(op.__name__)}.cpu",
        op=op,
        device="cpu",
        template=f"cpu/{snake(op.__name__)}.cpp.j2",
        geometry=_one,
        context=_context,
        numerics="exact",
    )
    for op in ROUND_OPS
)
