"""Every op but the matrix products, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ninfer.devices.base import Geometry
from ninfer.ir.op import Op
from ninfer.ir.ops.attention import Attention, KvAppend, Rope
from ninfer.ir.ops.elementwise import SigmoidMul, SiluMul, TakeHeads
from ninfer.ir.ops.embed import Embed, TakeRows
from ninfer.ir.ops.norm import GatedRmsNorm, RmsNorm
from ninfer.ir.ops.recurrent import CausalConvSilu, GatedDelta
from ninfer.ir.ops.sample import PURPOSE_DRAW, CountTokens, Sample, TokenLogprob
from ninfer.ir.step import (
    COUNT_GENERATED,
    COUNT_PROMPT,
    FLAG_COUNTS,
    MASK_ROWS,
    NUM_TOP,
    PROMPT_BIT,
    USE_BIAS,
    USE_LOGPROBS,
    USE_MASK,
    USE_PENALTIES,
)
from ninfer.ir.types import Env, Types
from ninfer.routes.host_linear import DECODE, extent, undecodable
from ninfer.routes.route import Route, Tuning

ATTENTION_ROWS = 8
CONV_CHANNELS = 256
MAX_CHUNKS = 64

Context = Callable[[Any, Types, Env, Tuning], Mapping[str, Any]]


def _chunks(n: int) -> Geometry:
    return Geometry((max(1, min(n, MAX_CHUNKS)), 1, 1))


def _by_values(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    """Pieces of some thousand values: less is not worth a hand-over between threads."""
    return _chunks(env.rows * extent(types[0], 1) // 8192)


def _by_rows(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return _chunks(env.rows // 4)


def _by_logit_rows(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return _chunks(min(env.logit_rows, env.rows))


def _route(
    name: str,
    op: type[Any],
    template: str,
    geometry: Callable[[Any, Types, Env, Tuning], Geometry],
    context: Context = lambda op, types, env, tuning: {},
    **more: Any,
) -> Route[Any]:
    return Route(
        name=f"{name}.cpu",
        op=op,
        device="cpu",
        template=f"host/{template}.cpp.j2",
        geometry=geometry,
        context=context,
        numerics="f32.vector",
        **more,
    )


def _norm(op: RmsNorm | GatedRmsNorm, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    offset = op.offset if isinstance(op, RmsNorm) else 0.0
    return {"d": types[1].shape[0], "gated": isinstance(op, GatedRmsNorm), "offset": offset}


def _attention_items(op: Attention, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return _chunks(op.kv_heads * -(-env.rows // ATTENTION_ROWS))


def _delta_slice(op: GatedDelta) -> int:
    return op.value_dim // 4 if op.value_dim % 4 == 0 else op.value_dim


def _delta_items(op: GatedDelta, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return _chunks(min(env.seqs, env.rows) * op.value_heads * (op.value_dim // _delta_slice(op)))


def _conv_items(op: CausalConvSilu, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return _chunks(min(env.seqs, env.rows) * -(-extent(types[1], 0) // CONV_CHANNELS))


def _vectors(op: Attention, types: Types) -> str | None:
    return None if op.head_dim % 16 == 0 else f"heads of {op.head_dim} do not divide into vectors of 16"


def _delta_vectors(op: GatedDelta, types: Types) -> str | None:
    return None if op.key_dim % 16 == 0 else f"keys of {op.key_dim} do not divide into vectors of 16"


def _plain_sides(op: Attention | KvAppend, types: Types) -> str | None:
    scaled = any(s.scale is not None or s.rotate for s in (op.fmt.k, op.fmt.v))
    return f"{op.fmt.name} has scales: no host code yet" if scaled else None


def _sample_row_bytes(types: Types) -> int:
    return -(-extent(types[0], 1) * 12 // 64) * 64


def _sample(op: Sample, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {
        "num_top": NUM_TOP,
        "mask_rows": MASK_ROWS,
        "row_workspace": _sample_row_bytes(types),
        "use_penalties": USE_PENALTIES,
        "use_bias": USE_BIAS,
        "use_mask": USE_MASK,
        "use_logprobs": USE_LOGPROBS,
        "prompt_bit": PROMPT_BIT,
        "purpose_draw": PURPOSE_DRAW,
    }


def _count(op: CountTokens, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {
        "flag_counts": FLAG_COUNTS,
        "count_prompt": COUNT_PROMPT,
        "count_generated": COUNT_GENERATED,
        "prompt_bit": PROMPT_BIT,
    }


EMBED = _route("embed", Embed, "embed", _by_rows, lambda *_: DECODE, refuse=lambda op, types: undecodable(types[1]))
TAKE_ROWS = _route("take_rows", TakeRows, "take", _by_logit_rows)
TAKE_HEADS = _route("take_heads", TakeHeads, "take", _by_rows)
RMS_NORM = _route("rms_norm", RmsNorm, "rms_norm", _by_values, _norm)
GATED_RMS_NORM = _route("gated_rms_norm", GatedRmsNorm, "rms_norm", _by_values, _norm)
ROPE = _route("rope", Rope, "rope", _by_rows)
KV_APPEND = _route("kv_append", KvAppend, "kv_append", _by_rows, refuse=_plain_sides)
ATTENTION = _route(
    "attention",
    Attention,
    "attention",
    _attention_items,
    refuse=lambda op, types: _vectors(op, types) or _plain_sides(op, types),
    tunings=({"rows": ATTENTION_ROWS},),
)
SIGMOID_MUL = _route("sigmoid_mul", SigmoidMul, "elementwise", _by_values)
SILU_MUL = _route("silu_mul", SiluMul, "elementwise", _by_values)
CAUSAL_CONV_SILU = _route(
    "causal_conv_silu", CausalConvSilu, "causal_conv_silu", _conv_items, lambda *_: {"block": CONV_CHANNELS}
)
GATED_DELTA = _route(
    "gated_delta",
    GatedDelta,
    "gated_delta",
    _delta_items,
    lambda op, *_: {"slice": _delta_slice(op)},
    refuse=_delta_vectors,
)
COUNT_TOKENS = _route("count_tokens", CountTokens, "count_tokens", lambda *_: Geometry(), _count)
SAMPLE = _route(
    "sample",
    Sample,
    "sample",
    _by_logit_rows,
    _sample,
    workspace=lambda op, types, env, tuning: env.logit_rows * _sample_row_bytes(types),
)
TOKEN_LOGPROB = _route("token_logprob", TokenLogprob, "token_logprob", _by_logit_rows)

ROUTES: tuple[Route[Any], ...] = (
    EMBED,
    TAKE_ROWS,
    TAKE_HEADS,
    RMS_NORM,
    GATED_RMS_NORM,
    ROPE,
    KV_APPEND,
    ATTENTION,
    SIGMOID_MUL,
    SILU_MUL,
    CAUSAL_CONV_SILU,
    GATED_DELTA,
    COUNT_TOKENS,
    SAMPLE,
    TOKEN_LOGPROB,
)
