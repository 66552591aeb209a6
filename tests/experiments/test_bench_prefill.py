"""What a token of a prompt is multiplied with."""

from __future__ import annotations

import pytest

from ninfer.formats.quant import by_name
from ninfer.ir.graph import Graph, Value
from ninfer.ir.ops.embed import embed
from ninfer.ir.ops.experts import expert_glu, expert_places, expert_sum, pick_experts
from ninfer.ir.ops.linear import linear
from ninfer.ir.types import TensorType
from tests.experiments.scripts import EXPERIMENTS, script


def test_of_experts_those_that_a_token_picks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)  # it imports another script
    g = Graph()

    def matrix(name: str, rows: int, k: int) -> Value:
        return g.weight(name, TensorType((rows, k), fmt=by_name("q4_g64")))

    x = embed(g, g.step["tokens"], matrix("embedding", 1000, 64))
    logits, _ = linear(g, x, matrix("router", 8, 64), matrix("beside", 32, 64))
    ids, weights = pick_experts(g, logits, 2)
    places = expert_places(g, 8)
    h = expert_glu(g, x, ids, places, [matrix("gate_up", 8 * 2 * 16, 64)], inner=16)
    expert_sum(g, h, (ids, weights), places, matrix("down", 8 * 64, 16), outer=64, residual=None)
    assert script("bench_prefill").matrix_values(g) == (8 + 32) * 64 + 2 * (2 * 16 * 64 + 64 * 16)
