"""Embedding rows and picked rows on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.ops.embed import Embed, TakeRows
from ninfer.ir.types import Env, Types
from ninfer.routes.grids_cpu import GRIDS
from ninfer.routes.linear_cpu import codes
from ninfer.routes.route import Geometry, Route, Tuning
from ninfer.routes.work_cpu import by_elements


def _geometry(op: Embed | TakeRows, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return by_elements(types[-1], env)


def _refuse(op: Embed, types: Types) -> str | None:
    fmt = types[1].fmt
    return f"has no decoder of {fmt}" if fmt is None or (fmt.is_grid and fmt.name not in GRIDS) else None


def _context(op: Embed, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    (n, k), fmt = types[1].shape, types[1].fmt
    assert fmt is not None and isinstance(n, int) and isinstance(k, int)
    return {"codes": codes(fmt, n, k)}


EMBED = Route(
    name="embed.cpu",
    op=Embed,
    device="cpu",
    template="cpu/embed.cpp.j2",
    geometry=_geometry,
    refuse=_refuse,
    context=_context,
    numerics="f32",
)
TAKE_ROWS = Route(
    name="take_rows.cpu",
    op=TakeRows,
    device="cpu",
    template="cpu/take_rows.cpp.j2",
    geometry=_geometry,
    numerics="exact",
)

ROUTES: tuple[Route[Any], ...] = (EMBED, TAKE_ROWS)
