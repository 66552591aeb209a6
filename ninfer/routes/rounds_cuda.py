"""Acceptance of drafts, and the records of the steps that follow, on a GPU: a block, since they are a few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.ops.rounds import AcceptDrafts, FollowDrafts
from ninfer.ir.types import Env, Types
from ninfer.routes.rounds_cpu import COUNTING
from ninfer.routes.route import Geometry, Route, Tuning

_NEXT_RECORD = "StepHeader* next, " + ", ".join(
    f"i32* next_{name}"
    for name in (
        "tokens",
        "positions",
        "row_seq",
        "count_mode",
        "start",
        "count",
        "slot",
        "len",
        "room",
        "most",
        "logit_rows",
    )
)


def _one_block(op: AcceptDrafts | FollowDrafts, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((1, 1, 1), 128)


def _context(op: AcceptDrafts | FollowDrafts, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"next_record": _NEXT_RECORD, "counting": COUNTING}


ACCEPT_DRAFTS = Route(
    name="accept_drafts.cuda",
    op=AcceptDrafts,
    device="cuda",
    template="cuda/accept_drafts.cu.j2",
    geometry=_one_block,
    context=_context,
    numerics="exact",
)
FOLLOW_DRAFTS = Route(
    name="follow_drafts.cuda",
    op=FollowDrafts,
    device="cuda",
    template="cuda/follow_drafts.cu.j2",
    geometry=_one_block,
    context=_context,
    numerics="exact",
)

ROUTES: tuple[Route[Any], ...] = (ACCEPT_DRAFTS, FOLLOW_DRAFTS)
