"""Acceptance of drafts, and the records of the steps that follow, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.ops.rounds import NUM_NEXT, AcceptDrafts, FollowDrafts
from ninfer.ir.step import COUNT_GENERATED, COUNT_NONE, FLAG_COUNTS
from ninfer.ir.types import Env, Types
from ninfer.routes.route import Geometry, Route, Tuning

COUNTING = {"flag_counts": FLAG_COUNTS, "generated": COUNT_GENERATED, "uncounted": COUNT_NONE}


def _one(op: AcceptDrafts | FollowDrafts, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry()


def _context(op: AcceptDrafts | FollowDrafts, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"num_next": NUM_NEXT, "counting": COUNTING}


ACCEPT_DRAFTS = Route(
    name="accept_drafts.cpu",
    op=AcceptDrafts,
    device="cpu",
    template="cpu/accept_drafts.cpp.j2",
    geometry=_one,
    context=_context,
    numerics="exact",
)
FOLLOW_DRAFTS = Route(
    name="follow_drafts.cpu",
    op=FollowDrafts,
    device="cpu",
    template="cpu/follow_drafts.cpp.j2",
    geometry=_one,
    context=_context,
    numerics="exact",
)

ROUTES: tuple[Route[Any], ...] = (ACCEPT_DRAFTS, FOLLOW_DRAFTS)
