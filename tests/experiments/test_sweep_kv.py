"""The sweep of KV formats on the small model: a JSON line a format, a table, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.checkpoints import TINY_GGUF
from tests.experiments.scripts import EXPERIMENTS, script


@pytest.fixture(scope="module")
def sweep_kv() -> ModuleType:
    return script("sweep_kv")


def test_a_line_and_a_row_for_each_format(
    sweep_kv: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "out.jsonl"
    options = ["--formats", "bf16", "rk4v4", "--context", "256", "--repeat", "1", "--device", "cpu"]
    text = ["--text", str(EXPERIMENTS / "genesis.txt")]
    sweep_kv.main([str(TINY_GGUF), *text, *options, "--jsonl", str(lines)])
    points = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(p["kv_dtype"], p["bytes_per_token"]) for p in points] == [("bf16", 2048), ("rk4v4", 560)]
    assert all(p["decode_tokens_per_s"] > 0 and p["scored_tokens"] > 500 for p in points)
    bf16, rk4v4 = (p["perplexity"] for p in points)
    assert bf16 < 3 and abs(rk4v4 / bf16 - 1) < 0.02  # -0.0008 measured, +0.0025 with a window of 1,024
    table = capsys.readouterr().out
    assert table.splitlines()[1].startswith("bf16") and "+0.00%" in table


def test_a_context_without_room_for_the_reply_is_refused(sweep_kv: ModuleType) -> None:
    with pytest.raises(SystemExit, match="--context 100: 128 of them are for the reply; use 256 or more"):
        sweep_kv.main([str(TINY_GGUF), "--context", "100"])
