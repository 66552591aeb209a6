"""The bench of rounds on a small model: forced acceptance is what was asked for."""

from __future__ import annotations

import pytest

from tests.experiments.scripts import script


def test_forced_acceptance_is_what_was_asked_for() -> None:
    arguments = "synthetic:qwen3.5-tiny --device cpu --tokens 80 --repeat 1 --context 64 --deterministic"
    found = script("bench_rounds").main([*arguments.split(), "--accept-rate", "0.6", "1"])
    none, some, all_kept = found["rates"]
    assert none["kept_per_round"] == 0 and none["one_plan"] and all_kept["kept_per_round"] == pytest.approx(3, abs=0.2)
    ideal = 0.6 + 0.6**2 + 0.6**3
    assert some["kept_per_round"] == pytest.approx(ideal, abs=0.5)  # of some fifty rounds
    assert all(p["same_texts"] == p["texts"] for p in found["rates"])
    assert found["columns"]["rows"] == 4 and found["columns"]["round_ms"] > 0
