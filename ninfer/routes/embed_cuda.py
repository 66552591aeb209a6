"""Token embedding on a GPU: the rows of the step are decoded value by value."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from ninfer.ir.ops.embed import Embed
from ninfer.ir.types import Env, Types
from ninfer.routes.cuda_layout import layout_of
from ninfer.routes.route import Geometry, Route, Tuning

SPAN = 1024  # columns of a block


def _geometry(op: Embed, types: Types, env: Env, tuning: Tuning) -> Geometry:
    h = types[1].shape[1]
    assert isinstance(h, int)
    return Geometry((types[0].concrete(env)[0], ceil(h / SPAN), 1), 256)


def _context(op: Embed, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    fmt, h = types[1].fmt, types[1].shape[1]
    assert fmt is not None and isinstance(h, int)
    layout = layout_of(fmt)
    tiling = layout.tiling(h) if layout.tiled else None
    return {"span": SPAN, "tiling": tiling, "tiling_name": f"{fmt.name}_{h}"}


EMBED = Route(
    name="embed.cuda",
    op=Embed,
    device="cuda",
    template="cuda/embed.cu.j2",
    geometry=_geometry,
    context=_context,
    numerics="cuda",
)

ROUTES: tuple[Route[Any], ...] = (EMBED,)
