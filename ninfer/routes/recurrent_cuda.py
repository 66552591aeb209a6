"""Gated DeltaNet on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from ninfer.formats.dtypes import F32
from ninfer.ir.ops.fused import FusedDelta, FusedDeltaPeek
from ninfer.ir.ops.recurrent import CausalConvSilu, GatedDelta
from ninfer.ir.types import Env, TensorType, Types
from ninfer.routes.route import Geometry, Route, Stage, Tuning

PIECE = 32  # rows of a sequence that one block convolves


def conv_geometry(op: CausalConvSilu, types: Types, env: Env, tuning: Tuning) -> Geometry:
    channels = types[0].shape[1]
    assert isinstance(channels, int)
    return Geometry((ceil(channels / 128), ceil(env.rows / PIECE), env.seqs), 128)


def conv_context(op: CausalConvSilu, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"piece": PIECE, "moves": bool(op.mutates)}


def _warps(op: GatedDelta) -> int:
    return next(w for w in (4, 2, 1) if op.value_dim % (8 * w) == 0)


def delta_refuse(op: GatedDelta, types: Types) -> str | None:
    if op.key_dim % 32 or op.value_dim % 8:
        return f"heads of {op.key_dim} and {op.value_dim} values are not multiples of 32 and 8"
    return None


def delta_geometry(op: GatedDelta, types: Types, env: Env, tuning: Tuning) -> Geometry:
    warps = _warps(op)
    return Geometry((op.value_heads, op.value_dim // (8 * warps), env.seqs), 32 * warps)


def delta_context(op: GatedDelta, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"warps": _warps(op), "moves": bool(op.mutates)}


# In chunks of 32 rows, on tensor cores (Yang et al., "Gated Delta Networks", 2024). Blocks of the second kernel have
# eight warps: four follow the keys of a chunk, four its queries.

CHUNK_WORDS = 2 * 32 * 32 + 4 * 32 + 4  # what the first kernel leaves for a chunk and head


def _f32_state(state: TensorType) -> str | None:
    return None if state.dtype is F32 else f"keeps states in f32, not {state.dtype}"


def chunk_refuse(op: GatedDelta, types: Types) -> str | None:
    if types[5].dtype is not F32:
        return _f32_state(types[5])
    if op.key_dim not in (32, 64, 128) or op.value_dim % 32:
        return f"takes keys of 32, 64 or 128 values and values in 32s, not {op.key_dim} and {op.value_dim}"
    return None


def chunk_workspace(op: GatedDelta, types: Types, env: Env, tuning: Tuning) -> int:
    return 4 * CHUNK_WORDS * op.value_heads * (env.rows // 32 + 2 * env.seqs + 1)


def prepare_geometry(op: GatedDelta, types: Types, env: Env, tuning: Tuning) -> Geometry:
    shared = 4 * (2 * 32 * (op.key_dim + 4) + 32 * (36 + 33) + 4 * 32)
    return Geometry((ceil(env.rows / 32) + 1, op.value_heads, env.seqs), 128, shared)


def chunks_geometry(op: GatedDelta, types: Types, env: Env, tuning: Tuning) -> Geometry:
    shared = 4 * (5 * 32 * (op.key_dim + 4) + 2 * 32 * 40)
    return Geometry((op.value_heads, op.value_dim // 32, env.seqs), 256, shared)


def chunk_context(op: GatedDelta, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"chunk_words": CHUNK_WORDS, "moves": bool(op.mutates)}


def fused_refuse(op: FusedDelta, types: Types) -> str | None:
    if types[7].dtype is not F32:
        return _f32_state(types[7])
    if op.key_dim % 32 or op.value_dim % 32 or op.value_dim > 256:
        return f"heads of {op.key_dim} and {op.value_dim} values are not multiples of 32 up to 256"
    if 2 * op.key_dim + op.value_dim > 4 * op.value_dim:
        return f"keys of {op.key_dim} values are too long for a block made for values of {op.value_dim}"
    if op.quant not in (0, 32, 64):
        return f"quantises in groups of 32 and 64, not {op.quant}"
    return None


def fused_geometry(op: FusedDelta, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((op.value_heads, env.seqs, 1), 4 * op.value_dim)


def cluster_refuse(op: FusedDelta, types: Types) -> str | None:
    """Blocks of a cluster own 32 values each; portable clusters have up to 8."""
    if op.value_dim not in (64, 128, 256):
        return f"takes heads of 64, 128 and 256 values, not of {op.value_dim}"
    return fused_refuse(op, types)


def cluster_geometry(op: FusedDelta, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((op.value_heads * op.value_dim // 32, env.seqs, 1), 128)


def cluster_context(op: FusedDelta, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"warps": 4, "parts": op.value_dim // 32}


def shared_fits(op: FusedDelta, types: Types, tuning: Tuning) -> bool:
    """A warp has rows of a head's state in eights, and the block a thread for each value; with them lie the past of the
    convolution and its outputs."""
    threads, words = 32 * tuning["warps"], op.value_dim * op.key_dim + 4 * (2 * op.key_dim + op.value_dim)
    fits = tuning["resident"] * (4 * words + (2 << 10)) <= 227 << 10
    return fits and op.value_dim % (8 * tuning["warps"]) == 0 and op.value_dim <= threads


def shared_geometry(op: FusedDelta, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((op.value_heads, env.seqs, 1), 32 * tuning["warps"], 4 * op.value_dim * op.key_dim)


def fused_context(op: FusedDelta, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"warps": op.value_dim // 8, "moves": bool(op.mutates)}


CONV = Route(
    name="causal_conv_silu.cuda",
    op=CausalConvSilu,
    device="cuda",
    template="cuda/causal_conv.cu.j2",
    geometry=conv_geometry,
    context=conv_context,
    numerics="cuda",
)
DELTA = Route(
    name="gated_delta.cuda",
    op=GatedDelta,
    device="cuda",
    template="cuda/gated_delta.cu.j2",
    geometry=delta_geometry,
    context=delta_context,
    refuse=delta_refuse,
    numerics="cuda",
)
DELTA_CHUNKED = Route(
    name="gated_delta.cuda.chunked",
    op=GatedDelta,
    device="cuda",
    template="cuda/delta_prepare.cu.j2",
    geometry=prepare_geometry,
    then=(Stage[GatedDelta](template="cuda/delta_chunks.cu.j2", geometry=chunks_geometry),),
    context=chunk_context,
    workspace=chunk_workspace,
    refuse=chunk_refuse,
    widths=(65, 1 << 30),
    needs=("sm80",),
    numerics="cuda.chunked",
    rtol=5e-3,  # products in TF32: 10 bits
)
FUSED_DELTA = Route(
    name="fused_delta.cuda",
    op=FusedDelta,
    device="cuda",
    template="cuda/fused_delta.cu.j2",
    geometry=fused_geometry,
    context=fused_context,
    refuse=fused_refuse,
    widths=(1, 64),  # it goes token by token; wider chunks take the chunked route
    numerics="cuda",
)
FUSED_DELTA_CLUSTER = Route(
    name="fused_delta.cuda.cluster",
    op=FusedDelta,
    device="cuda",
    template="cuda/fused_delta_cluster.cu.j2",
    geometry=cluster_geometry,
    context=cluster_context,
    refuse=cluster_refuse,
    widths=(1, 64),
    needs=("sm90a",),
    numerics="cuda.cluster",
    sim=False,
)
FUSED_DELTA_SHARED = Route(
    name="fused_delta.cuda.shared",
    op=FusedDelta,
    device="cuda",
    template="cuda/fused_delta_shared.cu.j2",
    geometry=shared_geometry,
    tunings=({"warps": 4, "resident": 3}, {"warps": 8, "resident": 2}),
    fits=shared_fits,
    refuse=fused_refuse,
    widths=(3, 64),  # a block of a head that has a multiprocessor for itself is faster in registers
    needs=("sm90", "shared227"),
    numerics="cuda.shared",
)
FUSED_DELTA_PEEK = Route(
    name="fused_delta_peek.cuda",
    op=FusedDeltaPeek,
    device="cuda",
    template="cuda/fused_delta.cu.j2",
    geometry=fused_geometry,
    context=fused_context,
    refuse=fused_refuse,
    numerics="cuda",
)

ROUTES: tuple[Route[Any], ...] = (
    FUSED_DELTA,
    FUSED_DELTA_CLUSTER,
    FUSED_DELTA_SHARED,
    FUSED_DELTA_PEEK,
    CONV,
    DELTA_CHUNKED,
    DELTA,
)
