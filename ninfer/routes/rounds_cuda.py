"""Acceptance of drafts, and the records of the steps that follow, on a GPU: a block, since they are a few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.op import Op, snake
from ninfer.ir.ops.rounds import COUNTING, NEXT_FIELDS, ROUND_OPS
from ninfer.ir.types import Env, Types
from ninfer.routes.route import Geometry, Route, Tuning

_NEXT_RECORD = ", ".join(["StepHeader* next", *(f"i32* next_{name}" for name in NEXT_FIELDS.split()[1:])])


def _one_block(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((1, 1, 1), 128)


def _context(op: Op, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"next_record": _NEXT_RECORD, "counting": COUNTING}


ROUTES: tuple[Route[Any], ...] = tuple(
    Route(
        name=f"{snake(op.__name__)}.cuda",
        op=op,
        device="cuda",
        template=f"cuda/{snake(op.__name__)}.cu.j2",
        geometry=_one_block,
        context=_context,
        numerics="exact",
    )
    for op in ROUND_OPS
)
