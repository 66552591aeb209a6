"""The bench of reused prompts on a small model: both tiers give the whole prompt, and it says when they do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.experiments.scripts import script

SMALL = ["synthetic:qwen3.5-tiny", "--device", "cpu", "--tokens", "256", "--repeat", "1"]


def test_both_tiers_give_the_whole_prompt(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert script("bench_reuse").main([*SMALL, "--kv-capacity", "384", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["cached"]["computed"] == [0] and min(found["cached"]["device"] + found["cached"]["host"]) >= 256
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in found["seconds"].values())


def test_without_host_memory_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("bench_reuse").main([*SMALL, "--kv-capacity", "384", "--host-cache-mib", "0"]) == 1
    assert "host " in capsys.readouterr().out
