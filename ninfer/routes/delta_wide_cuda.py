"""The gated delta rule of prompts with eight warps a block: four follow the keys of a chunk, four its queries.

The same chunks as `gated_delta.cuda.chunked` (Yang et al., "Gated Delta Networks", 2024). Its first kernel leaves
factors ready to be used and operands in the order of the products of the second. Calibration chooses between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from ninfer.ir.ops.recurrent import GatedDelta
from ninfer.ir.types import Env, Types
from ninfer.routes import recurrent_cuda as narrow
from ninfer.routes.route import Geometry, Route, Stage, Tuning

CHUNK_WORDS = narrow.CHUNK_WORDS + 4  # what the first kernel leaves for a chunk and head


def _refuse(op: GatedDelta, types: Types) -> str | None:
    if op.key_dim not in (32, 64, 128):
        return f"takes keys of 32, 64 or 128 values, not {op.key_dim}"
    return narrow.chunk_refuse(op, types)


def _workspace(op: GatedDelta, types: Types, env: Env, tuning: Tuning) -> int:
    return narrow.chunk_bytes(CHUNK_WORDS, op, env)


def _prepare_geometry(op: GatedDelta, types: Types, env: Env, tuning: Tuning) -> Geometry:
    shared = 4 * (2 * 32 * (op.key_dim + 4) + 32 * (36 + 33) + 4 * 32)
    return evolve(narrow.prepare_geometry(op, types, env, tuning), shared=shared)


def _chunks_geometry(op: GatedDelta, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return evolve(narrow.chunks_geometry(op, types, env, tuning), block=256)


def _context(op: GatedDelta, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {**narrow.chunk_context(op, types, env, tuning), "chunk_words": CHUNK_WORDS}


DELTA_CHUNKED_WIDE = evolve(
    narrow.DELTA_CHUNKED,
    name="gated_delta.cuda.chunked_wide",
    template="cuda/delta_prepare_wide.cu.j2",
    geometry=_prepare_geometry,
    then=(Stage[GatedDelta](template="cuda/delta_chunks_wide.cu.j2", geometry=_chunks_geometry),),
    context=_context,
    numerics="cuda.chunked_wide",
    workspace=_workspace,
    refuse=_refuse,
)

ROUTES: tuple[Route[Any], ...] = (DELTA_CHUNKED_WIDE,)
