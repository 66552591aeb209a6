"""Attention of few rows on a GPU by way of a ring in shared memory.

Caches of 16 bits, and those whose keys and values are integers in units of their scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from attrs import evolve, frozen

from ninfer.formats import kv_codes as codes
from ninfer.formats.kv import INT4_VALUES, INT8_VALUES, KVFormat
from ninfer.ir.ops.attention import Attention
from ninfer.ir.ops.fused import FusedAttention
from ninfer.ir.types import Env, Types
from ninfer.routes import attention_cuda as split
from ninfer.routes.route import Geometry, Route, Tuning

KEYS = (codes.INT8, codes.LLOYD4, codes.E8_SNAP)
SLACK = 4  # weights are at most 2 to this power; times a scale of values they are f16
STEP = 16  # tokens
APART = 16384  # tokens up to which each 8 columns have blocks of their own
_WORDS = {2: "u16", 4: "u32", 8: "uint2", 16: "uint4"}


@frozen
class Ring:
    """Shared memory of a block: rings of its warps, queries as two numbers each, statistics, a row per warp.

    columns: of queries that a block has at once, whole tiles of 8. stages: steps in a warp's ring, as many as the
    tuning has and its `limit` of KiB takes, two at least.
    """

    fmt: KVFormat
    columns: int
    head_dim: int
    warps: int
    stages: int

    @property
    def nbytes(self) -> int:
        d, w = self.head_dim, self.warps
        step = ceil(STEP * self.fmt.bytes_per_token(1, d) / 128) * 128
        query = 2 * (d * (2 if self.fmt.is_plain else 1) + 16) + 4 + d // 16
        return w * max(self.stages * step, 4 * 8 * (d + 8)) + self.columns * query + 4 * (16 * w + w * d)


def ring(op: Attention | FusedAttention, env: Env, tuning: Tuning) -> Ring:
    w = tuning["warps"]
    columns = min(8 * w, 8 * split.column_groups(op, env))
    sizes = [Ring(op.fmt, columns, op.head_dim, w, stages) for stages in range(tuning["stages"], 1, -1)]
    return next((r for r in sizes if r.nbytes <= 1024 * tuning["limit"]), sizes[-1])


def _blocks(op: Attention | FusedAttention, env: Env, tuning: Tuning) -> int:
    """Of a KV head: splits times groups where these have blocks of their own, else splits."""
    return max(1, min(tuning["splits"], env.max_pages * split.column_groups(op, env)))


def _workspace(op: Attention | FusedAttention, types: Types, env: Env, tuning: Tuning) -> int:
    return split.partial_bytes(_blocks(op, env, tuning), op.heads, op.head_dim, env)


def _geometry(op: Attention | FusedAttention, types: Types, env: Env, tuning: Tuning) -> Geometry:
    grid = (op.kv_heads, _blocks(op, env, tuning), env.seqs)
    return Geometry(grid, 32 * tuning["warps"], ring(op, env, tuning).nbytes)


def _ring_context(op: Attention | FusedAttention, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    chosen = ring(op, env, tuning)
    return {
        "splits": _blocks(op, env, tuning),
        "columns": chosen.columns,
        "groups": split.column_groups(op, env),
        "apart": APART,
        **split.joins(op.head_dim, chosen.columns, tuning["warps"], max(1, 8 // tuning["warps"])),
        "stages": chosen.stages,
        "slack": SLACK,
        "scale_word": _WORDS.get(op.fmt.k.scale_bytes(op.head_dim)),  # a token's scales of keys, of values
        "v_scale_word": _WORDS.get(op.fmt.v.scale_bytes(op.head_dim)),
        "resident": max(1, 8 // tuning["warps"]),
    }


def _context(op: Attention, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {**split.ATTENTION_SPLIT.context(op, types, env, tuning), **_ring_context(op, env, tuning)}


def _fused_context(op: FusedAttention, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {**split.FUSED_ATTENTION.context(op, types, env, tuning), **_ring_context(op, env, tuning)}


def _not_integers(fmt: KVFormat) -> str | None:
    if fmt.k.code in KEYS and fmt.v in (INT4_VALUES, INT8_VALUES):
        return None
    return f"reads caches of integer keys and values; {fmt.name} has others"


def _coded_refuse(op: Attention, types: Types) -> str | None:
    return split.split_refusal(op.fmt, op.head_dim) or _not_integers(op.fmt)


def _fused_coded_refuse(op: FusedAttention, types: Types) -> str | None:
    return split.FUSED_ATTENTION.refuse(evolve(op, fmt=split.F16_CACHE), types) or _not_integers(op.fmt)


TUNINGS: tuple[Tuning, ...] = tuple({"warps": 4, "splits": splits, "stages": 3, "limit": 99} for splits in (66, 33))
LARGE_TUNINGS: tuple[Tuning, ...] = ({"warps": 8, "splits": 33, "stages": 3, "limit": 227},)
PLAIN_TUNINGS: tuple[Tuning, ...] = (
    {"warps": 4, "splits": 33, "stages": 3, "limit": 227},
    {"warps": 2, "splits": 66, "stages": 3, "limit": 113},
)
ATTENTION = evolve(
    split.ATTENTION_SPLIT,
    name="attention.cuda.ring",
    template="cuda/attention_ring.cu.j2",
    geometry=_geometry,
    workspace=_workspace,
    context=_context,
    needs=("sm80", "shared227"),
    tunings=PLAIN_TUNINGS,
    numerics="cuda.ring",
)
FUSED_ATTENTION = evolve(
    split.FUSED_ATTENTION,
    name="fused_attention.cuda.ring",
    template="cuda/attention_ring.cu.j2",
    geometry=_geometry,
    workspace=_workspace,
    context=_fused_context,
    needs=("sm80", "shared227"),
    tunings=PLAIN_TUNINGS,
    numerics="cuda.ring",
)
ATTENTION_CODED = evolve(
    ATTENTION,
    name="attention.cuda.ring_coded",
    refuse=_coded_refuse,
    needs=("sm80",),
    tunings=TUNINGS,
    rtol=1e-3,  # weights times scales are rounded to f16, 11 bits
)
FUSED_ATTENTION_CODED = evolve(
    FUSED_ATTENTION,
    name="fused_attention.cuda.ring_coded",
    refuse=_fused_coded_refuse,
    needs=("sm80",),
    tunings=TUNINGS,
    rtol=split.FUSED_ATTENTION_CODED.rtol,
)

# where shared memory holds the rings of eight warps
_LARGE = tuple(
    evolve(r, name=f"{r.name}_large", needs=("sm80", "shared227"), tunings=LARGE_TUNINGS)
    for r in (FUSED_ATTENTION_CODED, ATTENTION_CODED)
)

CODED: tuple[Route[Any], ...] = (*_LARGE, FUSED_ATTENTION_CODED, ATTENTION_CODED)
PLAIN: tuple[Route[Any], ...] = (FUSED_ATTENTION, ATTENTION)
