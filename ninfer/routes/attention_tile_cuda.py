"""Attention of few rows over a 16-bit cache, all rows of a sequence against tiles of keys that are read once."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from attrs import evolve

from ninfer.ir.ops.fused import FusedAttention
from ninfer.ir.step import PAGE
from ninfer.ir.types import Env, Types
from ninfer.routes import attention_cuda as split
from ninfer.routes.linear_cuda import SHARED_90
from ninfer.routes.route import Geometry, Route, Tuning

MOST_COLUMNS = 64  # at a time: rows of a sequence times query heads of a KV head


def splits(op: FusedAttention, env: Env, tuning: Tuning) -> int:
    """Blocks of a KV head: its share of those that fill a card, of which the device makes splits times groups."""
    tiles = env.max_pages * PAGE // tuning["keys"]
    return max(1, min(tuning["blocks"] // op.kv_heads, tiles * split.column_groups(op, env)))


def parts(tuning: Tuning) -> int:
    """Of a row's values: where there are more warps than 16 keys each."""
    return tuning["warps"] // (tuning["keys"] // 16)


def shared_bytes(op: FusedAttention, types: Types, env: Env, tuning: Tuning, n: int) -> int:
    """The ring, queries and weights as two numbers each, scores, factors, angles; or all of the splits' shares."""
    d, keys = op.head_dim, tuning["keys"]
    ring = tuning["stages"] * 2 * keys * 2 * d
    own = 2 * (2 * d + 16) + 2 * (2 * keys + 16) + 4 * parts(tuning) * (keys + 4) + 4
    rotary = types[10].shape[0]
    assert isinstance(rotary, int)
    return max(ring + n * own + 8 * env.rows * rotary, 4 * tuning["warps"] * splits(op, env, tuning))


def columns(op: FusedAttention, types: Types, env: Env, tuning: Tuning) -> int:
    """In whole tiles of 8, as many as there are and shared memory holds."""
    n = min(MOST_COLUMNS, 8 * split.column_groups(op, env))
    while n > 8 and shared_bytes(op, types, env, tuning, n) > SHARED_90:
        n -= 8
    return n


def _geometry(op: FusedAttention, types: Types, env: Env, tuning: Tuning) -> Geometry:
    grid = (op.kv_heads, splits(op, env, tuning), env.seqs)
    return Geometry(grid, 32 * tuning["warps"], shared_bytes(op, types, env, tuning, columns(op, types, env, tuning)))


def _workspace(op: FusedAttention, types: Types, env: Env, tuning: Tuning) -> int:
    return split.partial_bytes(splits(op, env, tuning), op.heads, op.head_dim, env)


def _context(op: FusedAttention, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    w, n, most = tuning["warps"], columns(op, types, env, tuning), splits(op, env, tuning)
    return {
        **split.FUSED_ATTENTION.context(op, types, env, {"warps": w, "splits": most}),
        "splits": most,
        "columns": n,
        "keys": tuning["keys"],
        "stages": tuning["stages"],
        "parts": parts(tuning),
        "apart": tuning["apart"] * 1024,
        "groups": split.column_groups(op, env),
        "ahead": min(4, ceil((n + 2 * env.rows) / w)),  # rows that a warp loads at once
        "joined": split.joined_splits(op.head_dim),
    }


def _refuse(op: FusedAttention, types: Types) -> str | None:
    rotary = types[10].shape[0]
    if isinstance(rotary, int) and rotary % 8:
        return f"rotates pairs eight at a time, not {rotary}"
    return split.FUSED_ATTENTION.refuse(op, types)


def _fits(op: FusedAttention, types: Types, tuning: Tuning) -> bool:
    """16 values of a row for each warp, when scores are made and when values are added."""
    return op.head_dim % (16 * tuning["warps"]) == 0 and parts(tuning) > 0


def routes(units: int) -> tuple[Route[Any], ...]:
    """For a GPU of so many multiprocessors, a block on each.

    apart: thousands (1024) of tokens up to which each 8 columns have blocks of their own.
    """
    sizes = ((8, 64, 2), (16, 64, 2), (8, 32, 4), (4, 32, 2))
    tunings = tuple({"warps": w, "keys": k, "stages": s, "blocks": units, "apart": 16} for w, k, s in sizes)
    return (
        evolve(
            split.FUSED_ATTENTION,
            name="fused_attention.cuda.tile",
            template="cuda/attention_tile.cu.j2",
            geometry=_geometry,
            context=_context,
            workspace=_workspace,
            refuse=_refuse,
            fits=_fits,
            needs=("sm80", "shared227"),  # for two tiles of 64 keys
            widths=(1, 16),
            tunings=tunings,
            numerics="cuda.tile",
        ),
    )
