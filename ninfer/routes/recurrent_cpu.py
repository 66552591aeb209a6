"""Causal convolution and gated delta rule on a CPU."""

from __future__ import annotations

from typing import Any

from ninfer.ir.ops.recurrent import CausalConvSilu, GatedDelta
from ninfer.ir.types import Env, Types
from ninfer.routes.route import Geometry, Route, Tuning


def conv_geometry(op: CausalConvSilu, types: Types, env: Env, tuning: Tuning) -> Geometry:
    rows, channels = types[0].concrete(env)
    return Geometry((max(1, min(channels // 8, rows * channels >> 13)), 1, 1))


CAUSAL_CONV = Route(
    name="causal_conv.cpu",
    op=CausalConvSilu,
    device="cpu",
    template="cpu/causal_conv.cpp.j2",
    geometry=conv_geometry,
    numerics="f32",
)


def delta_refuse(op: GatedDelta, types: Types) -> str | None:
    return f"takes keys of whole vectors of 8, not {op.key_dim}" if op.key_dim % 8 else None


def delta_geometry(op: GatedDelta, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((min(256, env.seqs * op.value_heads * -(-op.value_dim // tuning["vb"])), 1, 1))


GATED_DELTA = Route(
    name="gated_delta.cpu",
    op=GatedDelta,
    device="cpu",
    template="cpu/gated_delta.cpp.j2",
    geometry=delta_geometry,
    refuse=delta_refuse,
    tunings=({"vb": 32},),
    numerics="f32",
)

ROUTES: tuple[Route[Any], ...] = (CAUSAL_CONV, GATED_DELTA)
