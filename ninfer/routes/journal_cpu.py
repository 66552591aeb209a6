"""What rounds of drafts need, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.ops.journal import NEVER, Argmax, Concat, ConvPeek, DeltaPeek, PickColumns, RingLoad, RingStore
from ninfer.ir.types import Env, Types
from ninfer.routes import recurrent_cpu
from ninfer.routes.route import Geometry, Route, Tuning
from ninfer.routes.work_cpu import by_elements


def _ring_geometry(op: RingStore | RingLoad, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return by_elements(types[0] if isinstance(op, RingStore) else types[-1], env)


def _store(op: RingStore, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    _, places, n = types[1].shape
    return {"store": True, "ahead": op.ahead, "places": places, "n": n, "first": 3}


def _load(op: RingLoad, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    _, places, n = types[0].shape
    return {"store": False, "ahead": 0, "places": places, "n": n, "first": 2}


def _wide_geometry(op: Concat | PickColumns, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return by_elements(types[-1], env)


def _never(op: PickColumns, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"never": NEVER}


def _argmax_geometry(op: Argmax, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((max(1, types[0].concrete(env)[0]), 1, 1))


RING_STORE = Route(
    name="ring_store.cpu",
    op=RingStore,
    device="cpu",
    template="cpu/ring.cpp.j2",
    geometry=_ring_geometry,
    context=_store,
    numerics="exact",
)
RING_LOAD = Route(
    name="ring_load.cpu",
    op=RingLoad,
    device="cpu",
    template="cpu/ring.cpp.j2",
    geometry=_ring_geometry,
    context=_load,
    numerics="exact",
)
CONV_PEEK = Route(
    name="conv_peek.cpu",
    op=ConvPeek,
    device="cpu",
    template="cpu/causal_conv.cpp.j2",
    geometry=recurrent_cpu.conv_geometry,
    numerics="f32",
)
DELTA_PEEK = Route(
    name="delta_peek.cpu",
    op=DeltaPeek,
    device="cpu",
    template="cpu/gated_delta.cpp.j2",
    geometry=recurrent_cpu.delta_geometry,
    refuse=recurrent_cpu.delta_refuse,
    tunings=({"vb": 32},),
    numerics="f32",
)
CONCAT = Route(
    name="concat.cpu",
    op=Concat,
    device="cpu",
    template="cpu/concat.cpp.j2",
    geometry=_wide_geometry,
    numerics="exact",
)
ARGMAX = Route(
    name="argmax.cpu",
    op=Argmax,
    device="cpu",
    template="cpu/argmax.cpp.j2",
    geometry=_argmax_geometry,
    numerics="exact",
)
PICK_COLUMNS = Route(
    name="pick_columns.cpu",
    op=PickColumns,
    device="cpu",
    template="cpu/pick_columns.cpp.j2",
    geometry=_wide_geometry,
    context=_never,
    numerics="exact",
)

ROUTES: tuple[Route[Any], ...] = (RING_STORE, RING_LOAD, CONV_PEEK, DELTA_PEEK, CONCAT, ARGMAX, PICK_COLUMNS)
