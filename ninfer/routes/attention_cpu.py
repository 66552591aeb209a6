"""Rotary positions, cache appends and attention on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.ops.attention import Attention, KvAppend, Rope
from ninfer.ir.step import PAGE
from ninfer.ir.types import Env, Types
from ninfer.routes.route import Geometry, Route, Stage, Tuning
from ninfer.routes.work_cpu import by_elements

SPAN = 256  # keys whose parts are merged in order, whatever the route
FEW = 16  # rows up to which work is cut along the keys


def _rope_context(op: Rope, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    n, f = types[0].shape[1], types[2].shape[0]
    assert isinstance(n, int)
    return {"f": f, "heads": n // op.head_dim}


def _rope_geometry(op: Rope, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return by_elements(types[0], env)


ROPE = Route(
    name="rope.cpu",
    op=Rope,
    device="cpu",
    template="cpu/rope.cpp.j2",
    geometry=_rope_geometry,
    context=_rope_context,
    numerics="f32",
)


def _append_refuse(op: KvAppend, types: Types) -> str | None:
    return None if op.fmt.is_plain or op.head_dim % 8 == 0 else f"codes whole vectors of 8, not heads of {op.head_dim}"


def _append_context(op: KvAppend, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"page": PAGE}


def _append_geometry(op: KvAppend, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return by_elements(types[0], env)


KV_APPEND = Route(
    name="kv_append.cpu",
    op=KvAppend,
    device="cpu",
    template="cpu/kv_append.cpp.j2",
    geometry=_append_geometry,
    refuse=_append_refuse,
    context=_append_context,
    numerics="exact",
)


def _refuse(op: Attention, types: Types) -> str | None:
    if op.head_dim % 8:
        return f"takes heads of whole vectors of 8, not {op.head_dim}"
    return None


def _spans(env: Env) -> int:
    return -(-env.max_pages * PAGE // SPAN)


def _context(op: Attention, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    p = f"attention_{op.fmt.c_name}_{op.heads}_{op.kv_heads}x{op.head_dim}_{op.window or 0}_{env.max_pages}"
    return {"p": p, "page": PAGE, "span": SPAN, "spans": _spans(env), "kv_v_row": op.fmt.v.code_bytes(op.head_dim)}


def _workspace(op: Attention, types: Types, env: Env, tuning: Tuning) -> int:
    return env.rows * op.heads * _spans(env) * 4 * (op.head_dim + 2)


def _span_geometry(op: Attention, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((min(256, env.rows * op.kv_heads * min(8, _spans(env))), 1, 1))


def _merge_geometry(op: Attention, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((max(1, env.rows // 4), 1, 1))


def _block_geometry(op: Attention, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((op.kv_heads * (-(-env.rows // tuning["qb"]) + env.seqs - 1), 1, 1))


ATTENTION_SPANS = Route(
    name="attention.cpu.spans",
    op=Attention,
    device="cpu",
    template="cpu/attention_spans.cpp.j2",
    widths=(1, FEW),
    geometry=_span_geometry,
    refuse=_refuse,
    then=(Stage(template="cpu/attention_merge.cpp.j2", geometry=_merge_geometry),),
    workspace=_workspace,
    context=_context,
    numerics="f32",
)
ATTENTION_BLOCKS = Route(
    name="attention.cpu.blocks",
    op=Attention,
    device="cpu",
    template="cpu/attention_blocks.cpp.j2",
    geometry=_block_geometry,
    refuse=_refuse,
    tunings=({"qb": 16},),
    context=_context,
    numerics="f32",
)

ROUTES: tuple[Route[Any], ...] = (ROPE, KV_APPEND, ATTENTION_SPANS, ATTENTION_BLOCKS)
