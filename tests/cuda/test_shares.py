"""How the blocks of a product's kernel are dealt out, for shapes of Qwen3.5-35B-A3B."""

from __future__ import annotations

from ninfer.formats.quant import by_name
from ninfer.ir.ops.packed_act import FusedLinear
from ninfer.ir.types import Env, T, TensorType
from ninfer.routes.linear_cuda import stream

ENV = Env(rows=1, logit_rows=1, seqs=1)
TUNING = {"warps": 10, "stages": 4, "bulk": 1, "resident": 2}


def matrix(n: int, k: int, fmt: str) -> TensorType:
    return TensorType((n, k), fmt=by_name(fmt))


def test_a_few_plain_rows_have_a_block_for_each_tile_and_the_rest_shares_what_is_left() -> None:
    """One block with both gates took 17 us where the others took 5 (H200)."""
    weights = (matrix(8192, 2048, "q8_g32"), matrix(4096, 2048, "q8_g32"), *(matrix(32, 2048, "bf16"),) * 2)
    types = (TensorType((T, 2048)), TensorType((2048,)), *weights)
    context = stream(FusedLinear(norm=True), types, ENV, {**TUNING, "blocks": 132})
    assert [(b.blocks, b.most_tiles) for b in context["bodies"]] == [(128, 6), (4, 1)] and context["blocks"] == 132


def test_a_ring_has_no_more_stages_than_a_warp_has_fills() -> None:
    """What it does not need is room for the next kernel's weights."""
    types = (TensorType((T, 2048)), TensorType((2048,)), matrix(2048, 2048, "q8_g32"))
    small, large = (stream(FusedLinear(norm=True), types, ENV, {**TUNING, "blocks": n}) for n in (128, 16))
    assert (small["stages"], large["stages"]) == (2, 4) and small["at"].end < large["at"].end
