"""What rounds of drafts need, on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from ninfer.ir.ops.fused_draft import ArgmaxPicked
from ninfer.ir.ops.journal import NEVER, Argmax, Concat, ConvPeek, DeltaPeek, PickColumns, RingLoad, RingStore
from ninfer.ir.types import Env, Types
from ninfer.routes import recurrent_cuda
from ninfer.routes.route import Geometry, Route, Tuning

SLICE = 2048


def _rows(op: RingStore | RingLoad, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((env.rows, 1, 1), 256)


def _store(op: RingStore, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"store": True, "ahead": op.ahead, "places": types[1].shape[1]}


def _load(op: RingLoad, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"store": False, "ahead": 0, "places": types[0].shape[1]}


def _wide_geometry(op: Concat | PickColumns, types: Types, env: Env, tuning: Tuning) -> Geometry:
    rows, n = types[-1].concrete(env)
    return Geometry((ceil(rows * n / 256), 1, 1), 256)


def _concat(op: Concat, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    n = types[0].shape[1]
    return {
        "arguments": [{"type": "f32", "name": "a"}, {"type": "f32", "name": "b"}],
        "vector": 1,
        "formula": "y = [a | b]",
        "body": "",
        "body_one": f"const u64 row = at / N;\n    const int k = (int)(at % N);\n"
        f"    y[at] = k < {n} ? a[row * {n} + k] : b[row * (N - {n}) + k - {n}];",
    }


def _pick(op: PickColumns, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {
        "arguments": [{"type": "f32", "name": "x"}, {"type": "i32", "name": "index"}],
        "vector": 1,
        "formula": f"y[j] = x[index[j]], {NEVER} where the index is negative",
        "body": "",
        "body_one": f"const u64 row = at / N;\n    const int i = index[at % N];\n"
        f"    y[at] = i < 0 ? (f32){NEVER} : x[row * {types[0].shape[1]} + i];",
    }


def _argmax_blocks(op: Argmax | ArgmaxPicked) -> int:
    return ceil(op.domain / SLICE)


def argmax_geometry(op: Argmax | ArgmaxPicked, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((_argmax_blocks(op), types[0].concrete(env)[0], 1), 256)


def argmax_context(op: Argmax | ArgmaxPicked, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"blocks": _argmax_blocks(op), "picked": isinstance(op, ArgmaxPicked), "never": NEVER}


def argmax_workspace(op: Argmax | ArgmaxPicked, types: Types, env: Env, tuning: Tuning) -> int:
    return 8 * _argmax_blocks(op) * types[0].concrete(env)[0]


RING_STORE = Route(
    name="ring_store.cuda",
    op=RingStore,
    device="cuda",
    template="cuda/ring.cu.j2",
    geometry=_rows,
    context=_store,
    numerics="exact",
)
RING_LOAD = Route(
    name="ring_load.cuda",
    op=RingLoad,
    device="cuda",
    template="cuda/ring.cu.j2",
    geometry=_rows,
    context=_load,
    numerics="exact",
)
CONV_PEEK = Route(
    name="conv_peek.cuda",
    op=ConvPeek,
    device="cuda",
    template="cuda/causal_conv.cu.j2",
    geometry=recurrent_cuda.conv_geometry,
    context=recurrent_cuda.conv_context,
    numerics="cuda",
)
DELTA_PEEK = Route(
    name="delta_peek.cuda",
    op=DeltaPeek,
    device="cuda",
    template="cuda/gated_delta.cu.j2",
    geometry=recurrent_cuda.delta_geometry,
    context=recurrent_cuda.delta_context,
    refuse=recurrent_cuda.delta_refuse,
    numerics="cuda",
)
CONCAT = Route(
    name="concat.cuda",
    op=Concat,
    device="cuda",
    template="cuda/elementwise.cu.j2",
    geometry=_wide_geometry,
    context=_concat,
    numerics="exact",
)
ARGMAX = Route(
    name="argmax.cuda",
    op=Argmax,
    device="cuda",
    template="cuda/argmax.cu.j2",
    geometry=argmax_geometry,
    context=argmax_context,
    workspace=argmax_workspace,
    numerics="exact",
)
PICK_COLUMNS = Route(
    name="pick_columns.cuda",
    op=PickColumns,
    device="cuda",
    template="cuda/elementwise.cu.j2",
    geometry=_wide_geometry,
    context=_pick,
    numerics="exact",
)

ROUTES: tuple[Route[Any], ...] = (RING_STORE, RING_LOAD, CONV_PEEK, DELTA_PEEK, CONCAT, ARGMAX, PICK_COLUMNS)
