"""Every route of a GPU against the ops' references, then timings of the kernels at the shapes of a 27B model.

    python experiments/device_check.py                       # parity of all, then timings
    python experiments/device_check.py --only attention --no-timings
    compute-sanitizer --tool memcheck python experiments/device_check.py --separate --no-timings

The trials are those of tests/cuda. One line per failure, one JSON line per timing, a summary at the end; exit code 1
if a trial failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ninfer.devices.cuda import CudaDevice
from ninfer.devices.plan import Plan
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.ir.graph import Graph
from ninfer.ir.ops.attention import Attention, kv_state, paged_attention
from ninfer.ir.ops.norm import rms_norm
from ninfer.ir.ops.recurrent import GatedDelta, causal_conv_silu, gated_delta
from ninfer.ir.ops.sample import sample
from ninfer.ir.step import SAMPLE_PARAMS
from ninfer.ir.types import Env, S, T, TensorType
from ninfer.routes.lower import Lowering
from tests.cuda.gpu import GpuRun, open_gpu
from tests.cuda.parity import check, lay_out, lowering_for, trials


def parity(device: CudaDevice, only: str, separate: bool) -> list[str]:
    """Run the trials; the names of those that failed."""
    chosen = [t for t in trials(device.info) if only in t.id]
    lowering, run = lowering_for(device.info), GpuRun(device, separate)
    start = time.perf_counter()
    plans = [Plan(t.env, lay_out(t, lowering).launches, 0, 0, {}) for t in chosen]
    device.compile(plans)
    print(f"{len(chosen)} trials, kernels ready in {time.perf_counter() - start:.1f} s", flush=True)
    failed, worst = [], dict[str, float]()
    for trial in chosen:
        try:
            error = check(trial, lowering, run)
            route = trial.candidate.route.name
            worst[route] = max(worst.get(route, 0.0), error)
        except Exception as raised:  # a broken kernel must not hide the others
            failed.append(trial.id)
            print(f"FAILED {trial.id}: {type(raised).__name__}: {str(raised)[:300]}", flush=True)
            if "CUDA_ERROR" in str(raised) or "cudaError" in str(raised):
                print("the device context is lost; stopping", flush=True)
                break
    for route, error in sorted(worst.items()):
        print(f"  {route:36} worst relative L2 {error:.1e}")
    print(f"{len(chosen) - len(failed)} of {len(chosen)} trials passed", flush=True)
    return failed


# Timings: chains of one op with its own states, as the layers of a step have them.


def attention_chain(layers: int, pages: int, rows: int, route: str) -> tuple[Graph, Env, int]:
    """bytes: keys and values of one sequence."""
    g, fmt = Graph(), kv_by_name("bf16")
    q = g.state("q", TensorType((T, 24 * 256)))
    k, v = (g.state(n, TensorType((T, 4 * 256))) for n in "kv")
    op = Attention(fmt, 24, 4, 256, 1 / 16)
    for i in range(layers):
        with g.layer(i):
            y = paged_attention(g, q, k, v, kv_state(g, i, fmt, 4, 256), op)
    g.outputs["y"] = y
    del route
    env = Env(rows=rows, logit_rows=1, seqs=1, slots=1, pages=pages, max_pages=pages)
    return g, env, layers * pages * fmt.page_bytes(4, 256)


def delta_chain(layers: int, rows: int) -> tuple[Graph, Env, int]:
    g, op = Graph(), GatedDelta(16, 48, 128, 128)
    width = 2 * 16 * 128 + 48 * 128
    x = g.state("x", TensorType((T, width)))
    a, b = (g.state(n, TensorType((T, 48))) for n in ("a", "b"))
    taps, a_log, dt = g.weight("taps", TensorType((width, 4))), g.weight("a_log", TensorType((48,))), g.weight(
        "dt", TensorType((48,))
    )  # fmt: skip
    for i in range(layers):
        with g.layer(i):
            u = causal_conv_silu(g, x, taps, g.state(f"conv.{i}", TensorType((S, width, 3))))
            y = gated_delta(g, op, u, a, b, a_log, dt, g.state(f"delta.{i}", TensorType((S, 48, 128, 128))))
    g.outputs["y"] = y
    env = Env(rows=rows, logit_rows=1, seqs=1)
    return g, env, layers * 2 * 4 * 48 * 128 * 128


def norm_chain(layers: int, rows: int) -> tuple[Graph, Env, int]:
    g = Graph()
    x, w = g.state("x", TensorType((T, 5120))), g.weight("w", TensorType((5120,)))
    for _ in range(layers):
        x = rms_norm(g, x, w, eps=1e-6)
    g.outputs["y"] = x
    return g, Env(rows=rows, logit_rows=1, seqs=1), layers * rows * 5120 * 8


def sample_chain(rows: int) -> tuple[Graph, Env, int]:
    from ninfer.ir.types import L

    g, v = Graph(), 248320
    logits = g.state("logits", TensorType((L, v)))
    sample(g, logits, domain=248077)
    return g, Env(rows=rows, logit_rows=rows, seqs=rows, slots=rows), rows * v * 4


def executable(device: CudaDevice, lowering: Lowering, g: Graph, env: Env) -> Any:
    plan = lowering.lower(g, env)
    rng = np.random.default_rng(0)
    weights = {v.name: (rng.standard_normal(v.type.concrete(env)) * 0.1).astype(np.float32) for v in g.weights}
    memory = device.memory(weights, {n: v.type for n, v in g.states.items()}, env, plan.arena_bytes)
    for name, array in memory.states.items():
        if array.dtype == np.float32 and not name.startswith("bias"):
            memory.write_state(name, slice(None), rng.standard_normal(array.shape, np.float32))
    memory.write_state("page_table", slice(None), np.arange(env.slots * env.max_pages).reshape(env.slots, -1))
    return device.bind(plan, memory, {}, device.compile([plan]))


def points() -> Iterator[tuple[str, tuple[Graph, Env, int], dict[str, int], int]]:
    """name, chain, step settings, ops in the chain."""
    for tokens in (512, 4096, 32768, 131072):
        for rows in (1, 4):
            yield (
                f"attention {tokens} x{rows}",
                attention_chain(16, tokens // 64, rows, ""),
                {"past": tokens - rows},
                16,
            )
    for tokens in (2048, 8192):
        yield (
            f"attention chunk 2048 of {tokens}",
            attention_chain(4, tokens // 64, 2048, ""),
            {"past": tokens - 2048},
            4,
        )
    for rows in (1, 4, 2048):
        yield f"conv + delta x{rows}", delta_chain(24, rows), {"past": 100}, 24
    for rows in (1, 2048):
        yield f"norm x{rows}", norm_chain(64, rows), {"past": 0}, 64
    for temperature, top_k in ((0, 0), (1, 0), (1, 20)):
        yield f"sample t{temperature} k{top_k}", sample_chain(1), {"temperature": temperature, "top_k": top_k}, 1


def timings(device: CudaDevice, only: str) -> None:
    lowering = lowering_for(device.info)
    for name, (g, env, nbytes), settings, count in points():
        if only and only not in name:
            continue
        try:
            run = executable(device, lowering, g, env)
            step, header = run.step, run.header
            header["rows"], header["seqs"], header["logit_rows"] = env.rows, env.seqs, env.logit_rows
            step["row_count"][:] = env.rows
            step["kv_len"][:] = settings.get("past", 0)
            params = step["params"].view(SAMPLE_PARAMS.numpy).reshape(-1)
            params["temperature"], params["top_p"] = settings.get("temperature", 0), 1
            params["repetition_penalty"], params["top_k"] = 1, settings.get("top_k", 0)
            run.launch()
            seconds = sorted(run.time(5) for _ in range(7))[3] / count
            point = {
                "what": name,
                "us": round(seconds * 1e6, 2),
                "gb_per_s": round(nbytes / count / seconds / 1e9, 1),
                "kernels": len(run.plan.launches) / count,
                "routes": sorted({x.route for x in run.plan.launches}),
            }
            print(json.dumps(point), flush=True)
        finally:
            device.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="trials and timings whose name has this")
    parser.add_argument("--separate", action="store_true", help="an allocation per operand (for memcheck)")
    parser.add_argument("--no-parity", action="store_true")
    parser.add_argument("--no-timings", action="store_true")
    parser.add_argument("--device", type=int, default=0)
    args = parser.parse_args()
    device = open_gpu(args.device)
    print(f"{device.info.name}  {device.info.arch}  {device.info.units} multiprocessors", flush=True)
    failed: list[str] = [] if args.no_parity else parity(device, args.only, args.separate)
    if not args.no_timings:
        timings(device, args.only)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
