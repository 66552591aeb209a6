"""The bench of a round's parts on a small model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parent.parent.parent / "experiments" / "bench_columns.py"


def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_columns", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_part_of_a_round_is_timed() -> None:
    arguments = "synthetic:qwen3.5-tiny --device cpu --context 100 --repeat 1 --concurrency 2"
    found = bench().main(arguments.split())
    names = {"plain", "plain of 8", "verification", "fold", "draft", "draft after 4", "round"}
    assert set(found["ms"]) == names and all(ms > 0 for ms in found["ms"].values())
