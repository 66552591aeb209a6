"""Sequences that decode together, through a served model's plans: total tokens per second against one sequence's.

    python experiments/bench_batch.py synthetic:qwen3.5-27b --format q4_g64/q5_g64 --batch 1 2 4 8

Every step is what the engine runs for that many requests: step records filled on the host, one launch, tokens read.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ninfer.config import EngineConfig
from ninfer.runtime.batch import Draw, SeqRows
from ninfer.runtime.load import load
from ninfer.runtime.request import Sampling
from ninfer.runtime.runner import CompiledRunner


def decode(runner: CompiledRunner, batch: int, context: int, count: int, draw: Draw) -> float:
    """Seconds of a step, the median of `count`."""
    token, times = [5] * batch, list[float]()
    for i in range(count):
        start = time.perf_counter()
        drawn = runner.step(
            [SeqRows(slot=s, kv_len=context + i, tokens=(token[s],), generated=True, draw=draw) for s in range(batch)]
        )
        token = [max(0, d.token) for d in drawn if d is not None]
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--format")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--profile", type=Path, help="a device profile")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model, format=args.format, device=args.device, max_concurrency=max(args.batch), prefill_chunk=64,
        max_context=args.context + args.count + 64, device_profile_path=args.profile,
    )  # fmt: skip
    runner = load(config, lambda label, text: print(f"{label:9} {text}", flush=True)).runner
    assert isinstance(runner, CompiledRunner)
    pages = runner.limits.max_pages
    for slot in range(max(args.batch)):
        runner.set_pages(slot, 0, list(range(slot * pages, (slot + 1) * pages)))
    draw = Draw(sampling=Sampling(temperature=args.temperature), seed=1)
    for batch in args.batch:
        decode(runner, batch, args.context, 8, draw)
    found: dict[int, list[float]] = {batch: [] for batch in args.batch}
    for _ in range(args.rounds):  # in turns, so that a change of the machine's speed touches all of them
        for batch in args.batch:
            found[batch].append(decode(runner, batch, args.context, args.count, draw))
    one, points = statistics.median(found[args.batch[0]]) / args.batch[0], list[dict[str, Any]]()
    for batch, times in found.items():
        step = statistics.median(times)
        point = {
            "model": args.model, "format": args.format, "batch": batch, "context": args.context,
            "step_ms": round(step * 1e3, 4), "tok_per_s": round(batch / step, 1),
            "of_one": round(batch * one / step, 3), "step_of_one": round(step / one, 3),
            "spread": round((max(times) - min(times)) / step, 3),
            "device": runner.device.info.name, "date": datetime.date.today().isoformat(),
        }  # fmt: skip
        points.append(point)
        print(json.dumps(point), flush=True)
    if args.json:
        args.json.write_text(json.dumps(points, indent=1))
    runner.close()


if __name__ == "__main__":
    main()
