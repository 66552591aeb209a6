"""Rotary positions, the KV cache and attention on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, gcd
from typing import Any

from attrs import evolve

from ninfer.formats.dtypes import F32
from ninfer.formats.kv import KVFormat
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.ir.ops.attention import Attention, KvAppend, Rope
from ninfer.ir.ops.block import BlockAttention
from ninfer.ir.ops.fused import FusedAttention
from ninfer.ir.types import Env, Types
from ninfer.routes.route import Geometry, Route, Tuning

LOG2E = 1.4426950408889634
F16_CACHE = kv_by_name("f16")
SPLIT_HEADS = (64, 128, 256)  # wider ones would not leave a warp the registers


def _rope_geometry(op: Rope, types: Types, env: Env, tuning: Tuning) -> Geometry:
    rows, n = types[0].concrete(env)
    return Geometry((ceil(rows * n // op.head_dim / 4), 1, 1), 128)


def _append_geometry(op: KvAppend, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((env.rows, 1, 1), 256)


def _append_refuse(op: KvAppend, types: Types) -> str | None:
    if op.fmt.is_plain or op.head_dim in (*SPLIT_HEADS, 512):
        return None
    return f"a warp codes rows of 64, 128, 256 and 512 values, not {op.head_dim}"


def _simple_refuse(op: Attention, types: Types) -> str | None:
    if op.head_dim % 32:
        return f"a warp reads heads of multiples of 32 values, not {op.head_dim}"
    if op.fmt.is_plain or (op.head_dim == 512 and not isinstance(op, BlockAttention)):
        return None
    return f"reads plain caches, and coded ones with heads of 512; this one is {op.fmt.name}, {op.head_dim}"


def cache_context(fmt: KVFormat, kv_heads: int, head_dim: int) -> Mapping[str, Any]:
    return {
        "fmt": fmt,
        "page_bytes": fmt.page_bytes(kv_heads, head_dim),
        "planes": fmt.plane_offsets(kv_heads, head_dim),
    }


def _simple_geometry(op: Attention, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((env.rows, op.heads, 1), 128)


def _simple_context(op: Attention, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {
        **cache_context(op.fmt, op.kv_heads, op.head_dim),
        "q_scale": op.scale * LOG2E,
        "window": op.window,
        "block": isinstance(op, BlockAttention),
    }


# The split kernel. Its shape depends on the capacity and the tuning only, never on how many sequences share a step.


def split_count(env: Env, tuning: Tuning) -> int:
    return max(1, min(tuning["splits"], env.max_pages))


def partial_bytes(splits: int, heads: int, head_dim: int, env: Env) -> int:
    """Partial sums and their maxima and weights, for each split, row and head."""
    return 4 * splits * env.rows * heads * (head_dim + 2)


def split_workspace(heads: int, head_dim: int, env: Env, tuning: Tuning) -> int:
    return partial_bytes(split_count(env, tuning), heads, head_dim, env)


def column_groups(op: Attention | FusedAttention, env: Env) -> int:
    """Of 8 columns: rows of a sequence times query heads of a KV head."""
    return ceil(env.rows * (op.heads // op.kv_heads) / 8)


def joins(head_dim: int, columns: int, warps: int, resident: int = 1) -> Mapping[str, int]:
    """How a block's warps join splits: runs of 64 values that one has of a column, and splits that it loads at once."""
    runs = max(1, head_dim // 64)
    pieces = runs
    while pieces > 1 and columns * runs // pieces < warps:
        pieces //= 2
    registers = min(96, 65536 // (32 * warps * resident) - 48)
    return {"pieces": pieces, "joined": max(1, registers // (2 * pieces))}


def split_shared(head_dim: int, tuning: Tuning) -> tuple[int, int]:
    """Where the statistics lie in shared memory, and its size."""
    w = tuning["warps"]
    at = max(32 * w * head_dim, 4 * w * 8 * (head_dim + 8))
    return at, at + 4 * (16 * w + w * head_dim)


def split_geometry(kv_heads: int, head_dim: int, env: Env, tuning: Tuning) -> Geometry:
    grid = (kv_heads, split_count(env, tuning), env.seqs)
    return Geometry(grid, 32 * tuning["warps"], split_shared(head_dim, tuning)[1])


def split_context(fmt: KVFormat, heads: int, kv_heads: int, head_dim: int, scale: float, window: int | None,
                  env: Env, tuning: Tuning) -> dict[str, Any]:  # fmt: skip
    registers = {64: 128, 128: 168, 256: 255}[head_dim]
    return {
        **cache_context(fmt, kv_heads, head_dim),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "window": window,
        "W": tuning["warps"],
        "splits": split_count(env, tuning),
        "least_pages": 1,
        "resident": max(1, 65536 // (registers * 32 * tuning["warps"])),
        "stats_at": split_shared(head_dim, tuning)[0],
        "q_scale": scale * LOG2E,
        "fused": False,
        "norm": False,
        "gate": False,
        "quant": 0,
    }


def split_refusal(fmt: KVFormat, head_dim: int) -> str | None:
    if head_dim not in SPLIT_HEADS:
        return f"heads of {head_dim} values; this kernel has 64, 128 and 256"
    if fmt.k.code is F32:
        return "reads caches of 16 bits and less, not f32"
    return None


def _split_refuse(op: Attention, types: Types) -> str | None:
    return split_refusal(op.fmt, op.head_dim) or _coded(op.fmt)


def _split_coded_refuse(op: Attention, types: Types) -> str | None:
    return split_refusal(op.fmt, op.head_dim) or _not_coded(op.fmt)


def _coded(fmt: KVFormat) -> str | None:
    return None if fmt.is_plain else f"reads plain caches; {fmt.name} is coded"


def _not_coded(fmt: KVFormat) -> str | None:
    return f"reads coded caches; {fmt.name} is plain" if fmt.is_plain else None


def _split_geometry(op: Attention, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return split_geometry(op.kv_heads, op.head_dim, env, tuning)


def _split_workspace(op: Attention, types: Types, env: Env, tuning: Tuning) -> int:
    return split_workspace(op.heads, op.head_dim, env, tuning)


def _split_context(op: Attention, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    names = ("page_table", "row_seq", "row_start", "seq_slot", "kv_len")
    parameters = ["const f32* q", "const u8* cache", *(f"const i32* {n}" for n in names), "f32* y", "f32* workspace"]
    return {
        **split_context(op.fmt, op.heads, op.kv_heads, op.head_dim, op.scale, op.window, env, tuning),
        "parameters": ", ".join(parameters),
    }


# The same kernel with norm, rotation and append before, gate and quantisation after.


def _fused_refuse(op: FusedAttention, types: Types) -> str | None:
    if op.quant not in (0, 32, 64):
        return f"quantises in groups of 32 and 64, not {op.quant}"
    return split_refusal(op.fmt, op.head_dim) or _coded(op.fmt)


def _fused_coded_refuse(op: FusedAttention, types: Types) -> str | None:
    plain = evolve(op, fmt=F16_CACHE)
    return _fused_refuse(plain, types) or _not_coded(op.fmt)


def _flash_refuse(op: Attention, types: Types) -> str | None:
    return split_refusal(op.fmt, op.head_dim)


def _fused_geometry(op: FusedAttention, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return split_geometry(op.kv_heads, op.head_dim, env, tuning)


def _fused_workspace(op: FusedAttention, types: Types, env: Env, tuning: Tuning) -> int:
    return split_workspace(op.heads, op.head_dim, env, tuning)


def _fused_context(op: FusedAttention, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    ints = ("page_table", "row_seq", "row_start", "seq_slot", "kv_len", "positions")
    parameters = [*(f"const f32* {n}" for n in ("q", "k_in", "v_in")), "u8* cache", *(f"const i32* {n}" for n in ints)]
    parameters += ["const f32* __restrict__ freqs"]
    parameters += [f"const f32* __restrict__ {n}" for n in ("q_norm", "k_norm") if op.norm]
    parameters += ["const f32* __restrict__ v_norm"] if op.norm_v else []
    parameters += ["const f32* gate"] if op.gate else []
    parameters += ["u8* y", "f32* y_scale"] if op.quant else ["f32* y"]
    return {
        **split_context(op.fmt, op.heads, op.kv_heads, op.head_dim, op.scale, op.window, env, tuning),
        "parameters": ", ".join([*parameters, "f32* workspace"]),
        "fused": True,
        "norm": op.norm,
        "gate": op.gate,
        "quant": op.quant,
        "rotary": types[10].shape[0],
    }


# Splits of wide heads, which are not products of tensor cores.


def _heads_per_block(op: Attention) -> int:
    """Query heads of a KV head that a warp keeps in registers with their sums."""
    return gcd(4, op.heads // op.kv_heads)


def _heads(op: Attention) -> Mapping[str, Any]:
    """The cache and who reads it."""
    return {
        **cache_context(op.fmt, op.kv_heads, op.head_dim),
        "heads": op.heads,
        "kv_heads": op.kv_heads,
        "head_dim": op.head_dim,
        "window": op.window,
    }


def _wide_refuse(op: Attention, types: Types) -> str | None:
    return None if op.head_dim == 512 else f"reads heads of 512 values, not {op.head_dim}"


def _wide_geometry(op: Attention, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((op.heads // _heads_per_block(op), split_count(env, tuning), env.rows), 256)


def _wide_context(op: Attention, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {
        **_heads(op),
        "per": _heads_per_block(op),
        "splits": split_count(env, tuning),
        "q_scale": op.scale * LOG2E,
    }


# The tiled kernel, for chunks of a prompt.


def _flash_geometry(op: Attention, types: Types, env: Env, tuning: Tuning) -> Geometry:
    tiles = ceil(env.rows * (op.heads // op.kv_heads) / 64)
    return Geometry((tiles, op.kv_heads, env.seqs), 128, 3 * 64 * op.head_dim * 2)


def _flash_context(op: Attention, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    names = ("page_table", "row_seq", "row_start", "seq_slot", "kv_len")
    return {
        **_heads(op),
        "q_scale": op.scale * LOG2E,
        "resident": {64: 4, 128: 3, 256: 2}[op.head_dim],
        "parameters": ", ".join(["const f32* q", "const u8* cache", *(f"const i32* {n}" for n in names), "f32* y"]),
    }


SPLIT_TUNINGS: tuple[Tuning, ...] = tuple(
    # 33 and 66 splits of four KV heads are as many blocks as 132 multiprocessors hold
    {"warps": warps, "splits": splits}
    for warps, splits in ((4, 64), (4, 32), (8, 32), (4, 128), (8, 64), (8, 33), (4, 66))
)

ROPE = Route(
    name="rope.cuda",
    op=Rope,
    device="cuda",
    template="cuda/rope.cu.j2",
    geometry=_rope_geometry,
    numerics="cuda",
)
KV_APPEND = Route(
    name="kv_append.cuda",
    op=KvAppend,
    device="cuda",
    template="cuda/kv_append.cu.j2",
    geometry=_append_geometry,
    refuse=_append_refuse,
    numerics="exact",
)
ATTENTION_SPLIT = Route(
    name="attention.cuda.split",
    op=Attention,
    device="cuda",
    template="cuda/attention_split.cu.j2",
    geometry=_split_geometry,
    context=_split_context,
    workspace=_split_workspace,
    refuse=_split_refuse,
    widths=(1, 32),
    needs=("sm80",),
    tunings=SPLIT_TUNINGS,
    numerics="cuda.split",
)
FUSED_ATTENTION = Route(
    name="fused_attention.cuda.split",
    op=FusedAttention,
    device="cuda",
    template="cuda/attention_split.cu.j2",
    geometry=_fused_geometry,
    context=_fused_context,
    workspace=_fused_workspace,
    refuse=_fused_refuse,
    widths=(1, 32),
    needs=("sm80",),
    tunings=SPLIT_TUNINGS,
    numerics="cuda.split",
)
ATTENTION_SPLIT_CODED = evolve(
    ATTENTION_SPLIT,
    name="attention.cuda.split_coded",
    refuse=_split_coded_refuse,
    rtol=1e-3,  # a code times its scale is rounded to f16, 11 bits
)
FUSED_ATTENTION_CODED = evolve(
    FUSED_ATTENTION,
    name="fused_attention.cuda.split_coded",
    refuse=_fused_coded_refuse,
    rtol=5e-3,  # of the cache as it was written; an output between two codes may fall to either
)
ATTENTION_WIDE = Route(
    name="attention.cuda.wide",
    op=Attention,
    device="cuda",
    template="cuda/attention_wide.cu.j2",
    geometry=_wide_geometry,
    context=_wide_context,
    workspace=_split_workspace,
    refuse=_wide_refuse,
    widths=(1, 32),
    tunings=({"splits": 64}, {"splits": 32}, {"splits": 128}),
    numerics="cuda.wide",
)
ATTENTION_FLASH = Route(
    name="attention.cuda.flash",
    op=Attention,
    device="cuda",
    template="cuda/attention_flash.cu.j2",
    geometry=_flash_geometry,
    context=_flash_context,
    refuse=_flash_refuse,
    widths=(17, 1 << 30),
    needs=("sm80",),
    numerics="cuda.flash",
    rtol=1e-2,  # queries and weights are rounded to the cache's type: 8 bits of bf16
)


def _simple(op: type[Any], name: str) -> Route[Any]:
    return Route(
        name=f"{name}.cuda.simple",
        op=op,
        device="cuda",
        template="cuda/attention_simple.cu.j2",
        geometry=_simple_geometry,
        refuse=_simple_refuse,
        context=_simple_context,
        numerics="cuda.simple",
    )


ROUTES: tuple[Route[Any], ...] = (
    _simple(BlockAttention, "block_attention"),
    FUSED_ATTENTION,
    FUSED_ATTENTION_CODED,
    ROPE,
    KV_APPEND,
    ATTENTION_SPLIT,
    ATTENTION_SPLIT_CODED,
    ATTENTION_WIDE,
    ATTENTION_FLASH,
    _simple(Attention, "attention"),
)
