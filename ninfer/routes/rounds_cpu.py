"""Acceptance of drafts, and the records of the steps that follow, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.ops.rounds import NUM_NEXT, AcceptDrafts, FollowDrafts
from ninfer.ir.types import Env, Types
from ninfer.routes.route import Geometry, Route, Tuning


def _one(op: AcceptDrafts | FollowDrafts, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry()


def _context(op: AcceptDrafts, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"num_next": NUM_NEXT}


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
    numerics="exact",
)

ROUTES: tuple[Route[Any], ...] = (ACCEPT_DRAFTS, FOLLOW_DRAFTS)
