"""The bench of a round's parts on a small model."""

from __future__ import annotations

from tests.experiments.scripts import script


def test_every_part_of_a_round_is_timed() -> None:
    arguments = "synthetic:qwen3.5-tiny --device cpu --context 100 --repeat 1 --concurrency 2"
    found = script("bench_columns").main(arguments.split())
    names = {"plain", "plain of 8", "verification", "fold", "draft", "draft after 4", "round"}
    assert set(found["ms"]) == names and all(ms > 0 for ms in found["ms"].values())
