"""Prompts through a served model's plans: tokens per second, everything included, beside the card's GEMM rate.

    python experiments/bench_prefill.py synthetic:qwen3.5-27b --format q4_g64/q5_g64 --prompt 8192 --prefill-chunk 2048

The roofline is two operations for every weight of a matrix that a token meets (of experts those that it picks), over
the rate that the library reaches on bf16 matrices of 8192 x 8192 x 8192 in the same run (no roofline on a processor).
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

import ceilings

from ninfer.config import EngineConfig
from ninfer.devices.cuda import CudaDevice, CudaExecutable
from ninfer.ir.graph import Graph, Value
from ninfer.ir.ops.experts import ExpertGlu, ExpertSum
from ninfer.runtime.batch import Draw, SeqRows
from ninfer.runtime.load import load, open_model
from ninfer.runtime.request import Sampling
from ninfer.runtime.runner import CompiledRunner


def matrix_values(graph: Graph) -> int:
    """Weights that a token of a prompt is multiplied with: all matrices but the embedding and the head, and of a stack
    of experts the share that a token picks."""
    heads = {a for n in graph.nodes for a in n.args if n.op.key == "embed" or str(n.args[0].type).startswith("f32[L")}
    num, values = dict[Value, int](), 0
    for node in graph.nodes:
        if isinstance(node.op, ExpertGlu | ExpertSum):
            places = node.args[2 if isinstance(node.op, ExpertGlu) else 3].type.shape[0]
            assert isinstance(places, int)
            num.update((a, places // node.op.top_k) for a in node.args if a.type.fmt is not None)
    for v in graph.weights:
        if v.type.fmt is not None and v not in heads:
            n, k = v.type.shape
            assert isinstance(n, int) and isinstance(k, int)
            values += n * k // num.get(v, 1)
    return values


def gemm_rate(device: CudaDevice) -> float:
    rows = ceilings.gemm(device, ceilings.Timer(device, 0.3))
    return max(float(r["t_per_s"]) for r in rows if r["kind"] == "bf16" and "t_per_s" in r) * 1e12


def prefill(runner: CompiledRunner, length: int, chunk: int, draw: Draw) -> float:
    """Seconds from the first chunk to the first token."""
    tokens = tuple(3 + i % 1000 for i in range(length))
    start = time.perf_counter()
    for at in range(0, length, chunk):
        part = tokens[at : at + chunk]
        last = draw if at + chunk >= length else None
        runner.step([SeqRows(slot=0, kv_len=at, tokens=part, generated=False, draw=last)])
    return time.perf_counter() - start


def parts(executable: CudaExecutable) -> list[tuple[float, int, str]]:
    """Where a full chunk's time goes: (milliseconds, launches, what) of each kind of launch within whole steps."""
    kinds: dict[str, list[float]] = {}
    for x, seconds in zip(executable.plan.launches, executable.time_each(3), strict=True):
        what = x.source.entry.rsplit("_", 1)[0] if x.source is not None else str(x.library[0]) if x.library else ""
        weights = " ".join(str(t) for t in x.types if t.fmt is not None)
        kinds.setdefault(f"{x.op.key} {what} {weights}", []).append(seconds)
    return sorted(((round(sum(s) * 1e3, 3), len(s), what) for what, s in kinds.items()), reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--format")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--prefill-chunk", type=int, default=2048)
    parser.add_argument("--prefill-activations", choices=("16bit", "8bit"), default="16bit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--parts", action="store_true", help="time the kinds of launches of a full chunk")
    parser.add_argument("--profile", type=Path, help="a device profile")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model, format=args.format, device=args.device, max_concurrency=1,
        prefill_chunk=args.prefill_chunk, max_context=max(args.prompt) + 64, device_profile_path=args.profile,
        prefill_activations=args.prefill_activations,
    )  # fmt: skip
    values = matrix_values(open_model(config, tokenizer_needed=False).graph("sample"))
    loaded = load(config, lambda label, text: print(f"{label:9} {text}", flush=True))
    runner = loaded.runner
    assert isinstance(runner, CompiledRunner)
    if args.explain:
        print(loaded.explain().split("\n\n")[-1])
    rate = gemm_rate(runner.device) if isinstance(runner.device, CudaDevice) else None
    runner.set_pages(0, 0, list(range(runner.limits.max_pages)))
    draw, points = Draw(sampling=Sampling(temperature=0.0), seed=1), list[dict[str, Any]]()
    for length in args.prompt:
        prefill(runner, length, args.prefill_chunk, draw)
        times = [prefill(runner, length, args.prefill_chunk, draw) for _ in range(args.rounds)]
        seconds = statistics.median(times)
        point = {
            "model": args.model, "format": args.format, "prompt": length, "chunk": args.prefill_chunk,
            "activations": args.prefill_activations,
            "tok_per_s": round(length / seconds, 1), "spread": round((max(times) - min(times)) / seconds, 3),
            "t_per_s": round(2 * values * length / seconds / 1e12, 2),
            "gemm_t_per_s": None if rate is None else round(rate / 1e12, 1),
            "roofline": None if rate is None else round(2 * values * length / seconds / rate, 4),
            "device": runner.device.info.name, "date": datetime.date.today().isoformat(),
        }  # fmt: skip
        points.append(point)
        print(json.dumps(point), flush=True)
    last = runner.executables[max(runner.executables)]
    if args.parts and isinstance(last, CudaExecutable):
        for ms, count, what in parts(last):
            print(f"{ms:>9.3f} ms  {count:>4} x {ms / count * 1e3:>8.1f} us  {what}")
    if args.json:
        args.json.write_text(json.dumps(points, indent=1))
    runner.close()


if __name__ == "__main__":
    main()
