"""Attention of few rows by tiles of keys that a block's warps share.

Caches of 16 bits, and those whose keys and values are integers in units of their scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from attrs import evolve

from ninfer.formats import kv_codes as codes
from ninfer.ir.ops.fused import FusedAttention
from ninfer.ir.step import PAGE
from ninfer.ir.types import Env, Types
from ninfer.routes import attention_cuda as split
from ninfer.routes import attention_ring_cuda
from ninfer.routes.linear_cuda import SHARED_90
from ninfer.routes.route import Geometry, Route, Tuning

SHARED = SHARED_90 - 1024  # what is not dynamic beside
MOST_COLUMNS = 64  # at a time: rows of a sequence times query heads of a KV head


def splits(op: FusedAttention, env: Env, tuning: Tuning) -> int:
    """Blocks of a KV head: its share of those that fill a card, of which the device makes splits times groups."""
    tiles = env.max_pages * PAGE // tuning["keys"]
    return max(1, min(tuning["blocks"] // op.kv_heads, tiles * split.column_groups(op, env)))


def parts(tuning: Tuning) -> int:
    """Of a row's values: where there are more warps than 16 keys each."""
    return tuning["warps"] // (tuning["keys"] // 16)


def query_line(op: FusedAttention) -> tuple[int, int]:
    """Planes of the queries, and bytes of one: high and low parts, of some codes their negatives too."""
    if op.fmt.is_plain:
        return 2, 2 * op.head_dim + 16
    return 2 if op.fmt.k.code is codes.LLOYD4 else 1, 2 * op.head_dim + 64


def stage_bytes(op: FusedAttention, tuning: Tuning) -> int:
    """Of a tile in the ring."""
    return ceil(tuning["keys"] * op.fmt.bytes_per_token(1, op.head_dim) / 128) * 128


def own_bytes(op: FusedAttention, tuning: Tuning, n: int) -> int:
    """Of a team: weights, scores and factors of n columns, a tile's number, scales of values by group."""
    line = 2 * tuning["keys"] + 16
    weights = (2 if op.fmt.is_plain else 1) * line
    scales = 0 if op.fmt.is_plain else op.head_dim // op.fmt.v.group * line
    return n * (weights + 4 * parts(tuning) * (tuning["keys"] + 4) + 4) + 16 + scales


def page_places(env: Env, tuning: Tuning, most: int) -> int:
    """Pages of a split, at most: a share of the sequence, or a fourth where columns have blocks of their own."""
    apart = min(env.max_pages, tuning["apart"] * 1024 // PAGE)
    return ceil((max(ceil(env.max_pages / most), ceil(apart / 4)) + 3) / 2) * 2


def shared_bytes(op: FusedAttention, types: Types, env: Env, tuning: Tuning, n: int, stages: int) -> int:
    """Rings, queries, each team's own, pages, angles, coded queries' units and rows; or all of the splits' shares."""
    d, teams, most, (planes, line) = op.head_dim, tuning["teams"], splits(op, env, tuning), query_line(op)
    rotary = types[10].shape[0]
    assert isinstance(rotary, int)
    rings = teams * stages * stage_bytes(op, tuning)
    coded = 0 if op.fmt.is_plain else 4 * n + teams * tuning["warps"] * (d + 32)
    own = teams * own_bytes(op, tuning, n) + 8 * page_places(env, tuning, most) + 8 * env.rows * rotary
    joined = teams * n * (4 * (d + 8) + 8) if teams > 1 else 0
    return max(rings + n * planes * line + own + coded, joined, 4 * teams * tuning["warps"] * most)


def shape(op: FusedAttention, types: Types, env: Env, tuning: Tuning) -> tuple[int, int, int]:
    """Columns in whole tiles of 8, stages, bytes: all columns before more than two stages."""
    n, stages = min(MOST_COLUMNS, 8 * split.column_groups(op, env)), tuning["stages"]
    while (nbytes := shared_bytes(op, types, env, tuning, n, stages)) > SHARED and (stages > 2 or n > 8):
        n, stages = (n, stages - 1) if stages > 2 else (n - 8, stages)
    return n, stages, nbytes


def _geometry(op: FusedAttention, types: Types, env: Env, tuning: Tuning) -> Geometry:
    grid = (op.kv_heads, splits(op, env, tuning), env.seqs)
    return Geometry(grid, 32 * tuning["warps"] * tuning["teams"], shape(op, types, env, tuning)[2])


def _workspace(op: FusedAttention, types: Types, env: Env, tuning: Tuning) -> int:
    return split.partial_bytes(splits(op, env, tuning), op.heads, op.head_dim, env)


def _context(op: FusedAttention, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    w, most, teams = tuning["warps"], splits(op, env, tuning), tuning["teams"]
    n, stages, _ = shape(op, types, env, tuning)
    return {
        **split.FUSED_ATTENTION.context(op, types, env, {"warps": w, "splits": most}),
        "splits": most,
        "columns": n,
        "keys": tuning["keys"],
        "stages": stages,
        "stage": stage_bytes(op, tuning),
        "teams": teams,
        "team_sync": "__syncthreads();" if teams == 1 else f"bar_sync(1 + team, {32 * w});",
        "own": own_bytes(op, tuning, n),
        "pages": page_places(env, tuning, most),
        "q_planes": query_line(op)[0],
        "q_line": query_line(op)[1],
        "p_planes": 2 if op.fmt.is_plain else 1,
        "parts": parts(tuning),
        "slack": attention_ring_cuda.SLACK,
        "apart": tuning["apart"] * 1024,
        "groups": split.column_groups(op, env),
        "ahead": min(4, ceil((n + 2 * env.rows) / (w * teams))),  # rows that a warp loads at once
        **split.joins(op.head_dim, n, w * teams),
    }


def _turns(types: Types) -> str | None:
    rotary = types[10].shape[0]
    return f"rotates pairs eight at a time, not {rotary}" if isinstance(rotary, int) and rotary % 8 else None


def _refuse(op: FusedAttention, types: Types) -> str | None:
    return _turns(types) or split.FUSED_ATTENTION.refuse(op, types)


def _coded_refuse(op: FusedAttention, types: Types) -> str | None:
    return _turns(types) or attention_ring_cuda.FUSED_ATTENTION_CODED.refuse(op, types)


def _fits(op: FusedAttention, types: Types, tuning: Tuning) -> bool:
    """16 values of a row for each warp, when scores are made and when values are added."""
    return op.head_dim % (16 * tuning["warps"]) == 0 and parts(tuning) > 0


def _coded_fits(op: FusedAttention, types: Types, tuning: Tuning) -> bool:
    """A warp adds 32 values of a row, of 32 keys at a time, and makes scores of whole groups of 64."""
    whole = tuning["keys"] % 32 == 0 and parts(tuning) > 0
    return whole and op.head_dim == 32 * tuning["warps"] and op.head_dim % (64 * parts(tuning)) == 0


def routes(units: int) -> tuple[Route[Any], ...]:
    """For a GPU of so many multiprocessors, a block on each.

    apart: thousands (1024) of tokens up to which each 8 columns have blocks of their own.
    """

    def tuning(warps: int, keys: int, stages: int, teams: int = 1) -> Tuning:
        return {"warps": warps, "keys": keys, "stages": stages, "teams": teams, "blocks": units, "apart": 16}

    plain = evolve(
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
        tunings=(
            tuning(8, 64, 2),
            tuning(8, 64, 3),
            tuning(8, 32, 3, 2),
            tuning(4, 32, 2),
        ),
        numerics="cuda.tile",
    )
    coded = evolve(
        plain,
        name="fused_attention.cuda.tile_coded",
        refuse=_coded_refuse,
        fits=_coded_fits,
        tunings=(
            tuning(8, 64, 4, 2),
            tuning(8, 64, 2, 3),
            tuning(8, 128, 2, 2),  # faster at 131,072 tokens, slower at 512
            tuning(4, 64, 4, 4),
        ),
        rtol=split.FUSED_ATTENTION_CODED.rtol,
    )
    return plain, coded
