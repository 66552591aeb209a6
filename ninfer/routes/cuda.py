"""The route tables of GPUs, joined. The order is the default order of choice."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ninfer.routes import (
    attention_cuda,
    attention_ring_cuda,
    attention_tile_cuda,
    block_cuda,
    draft_cuda,
    elementwise_cuda,
    embed_cuda,
    experts_cuda,
    folds_cuda,
    fp4_cuda,
    fused_experts_cuda,
    gemm8_cuda,
    join_cuda,
    journal_cuda,
    linear_cuda,
    norm_cuda,
    recurrent_cuda,
    rotated_cuda,
    rounds_cuda,
    sample_cuda,
    scored_cuda,
    turn_heads_cuda,
    twobit_cuda,
)
from ninfer.routes.route import Route


def cuda_routes(units: int, *, opted: Collection[str] = ()) -> tuple[Route[Any], ...]:
    """For a GPU of so many multiprocessors.   opted: classes of accuracy that were asked for (Route.opt_in)."""
    return (
        *(r for r in (*fp4_cuda.ROUTES, *gemm8_cuda.ROUTES) if r.opt_in in opted),
        *twobit_cuda.routes(units),
        *join_cuda.routes(units),
        *linear_cuda.routes(units),
        *norm_cuda.ROUTES,
        *rotated_cuda.ROUTES,
        *attention_tile_cuda.routes(units),
        *attention_ring_cuda.CODED,
        *attention_cuda.ROUTES,
        *turn_heads_cuda.ROUTES,
        *attention_ring_cuda.PLAIN,
        *embed_cuda.ROUTES,
        *elementwise_cuda.ROUTES,
        *experts_cuda.ROUTES,
        *fused_experts_cuda.ROUTES,
        *scored_cuda.ROUTES,
        *recurrent_cuda.ROUTES,
        *folds_cuda.ROUTES,
        *sample_cuda.ROUTES,
        *journal_cuda.ROUTES,
        *draft_cuda.ROUTES,
        *rounds_cuda.ROUTES,
        *block_cuda.ROUTES,
    )
