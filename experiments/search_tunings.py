"""Tunings of routes by random search in the whole captured step of a model.

    python experiments/search_tunings.py synthetic:qwen3.5-27b --rows 1 --ops fused_linear --seconds 120 --json out.json

A kernel's fastest tuning in a chain of its own is often not the fastest between its neighbours, with which it shares
the multiprocessors by dependent launch. So a trial changes one kind of op, or a few alike, to a candidate of the
registry's or the present one with a few values changed, and times whole steps. What seems faster is timed in turns with
the present winner, and replaces it if it stays so. Kernels of the next trials are compiled by processes meanwhile.

In the end each winner is taken back on its own, which says what it is worth; `same` is whether a step from empty states
draws the token that the first plan drew. Winners that no route lists are to be added to its tunings.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import define

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bench_decode
import ceilings
from tuning_space import Chosen, Search, Trial

from ninfer.artifacts.synthetic import PREFIX
from ninfer.devices.base import DeviceInfo
from ninfer.devices.cuda import CudaDevice, CudaExecutable
from ninfer.devices.plan import Plan
from ninfer.errors import NinferError, UsageError
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.ir.graph import Graph
from ninfer.ir.rewrites import fuse
from ninfer.ir.types import Env
from ninfer.models import identify
from ninfer.routes.cuda import cuda_routes
from ninfer.routes.digest import fresh
from ninfer.routes.lower import Lowering
from ninfer.routes.profile import load_profile
from ninfer.routes.render import Renderer
from ninfer.routes.route import RouteRegistry
from ninfer.runtime.batch import Draw, SeqRows
from ninfer.runtime.request import Sampling
from ninfer.runtime.steps import fill_step, read_drawn


@define
class Bench:
    """Times plans over one set of weights and states."""

    device: CudaDevice
    executable: CudaExecutable
    graph: Graph
    context: int

    def bind(self, plan: Plan) -> CudaExecutable | None:
        """None: it cannot be launched."""
        try:
            entries = self.device.compile([plan])
            threads = {x.source.entry: x.geometry.block for x in plan.launches if x.source}
            if any(not self._fits(entries[entry], n) for entry, n in threads.items()):
                return None
            consts = {v.name: a for v, a in self.graph.consts.items()}
            executable = self.device.bind(plan, self.executable.memory, consts, entries)
        except (NinferError, RuntimeError) as error:  # cupy's are RuntimeErrors
            print(f"  {error}", flush=True)
            return None
        self.fill(executable)
        executable.launch()
        return executable

    def _fits(self, function: int, threads: int) -> bool:
        driver = self.device.libs.driver
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        handle = driver.CUfunction(function)
        return int(self.device.driver("asking for a limit", driver.cuFuncGetAttribute(most, handle))) >= threads

    def fill(self, executable: CudaExecutable, context: int = 0) -> list[SeqRows]:
        """context: tokens of each row's sequence, if not the bench's."""
        draw = Draw(sampling=Sampling(temperature=0.0), seed=1, logprobs=1)
        rows = range(executable.env.rows)
        seqs = [
            SeqRows(slot=s, kv_len=context or self.context, tokens=(7 + s,), generated=True, draw=draw) for s in rows
        ]
        fill_step(seqs, executable.step, executable.header)
        return seqs

    def drawn(self, executable: CudaExecutable) -> list[int]:
        """Tokens from empty states."""
        for state, array in executable.memory.states.items():
            if state.startswith(("delta.", "conv.")):
                self.device.cupy.cuda.runtime.memsetAsync(array.data.ptr, 0, array.nbytes, self.device.stream.ptr)
        found = read_drawn(self.fill(executable, 64), executable.launch())
        self.fill(executable)
        return [d.token for d in found if d is not None]

    def seconds(self, executable: CudaExecutable, repeat: int = 8, times: int = 3) -> float:
        return statistics.median(executable.time(repeat) for _ in range(times))

    def ratio(self, a: CudaExecutable, b: CudaExecutable, times: int = 7) -> float:
        """a's time over b's, in turns."""
        return statistics.median(a.time(12) / b.time(12) for _ in range(times))


def batch(search: Search, bench: Bench | None, size: int) -> list[Trial]:
    """The next trials, their kernels compiled."""
    proposed = (t for _ in range(8 * size) if (t := search.propose()) is not None)
    found = list(islice(proposed, size))
    if bench is not None:
        sources = {s.entry: s for t in found for s in t.sources}
        try:
            bench.device.programs.cubins(list(sources.values()))
        except NinferError as error:
            print(f"  {error}", flush=True)
    return found


def run(search: Search, bench: Bench, seconds: float, size: int) -> list[dict[str, Any]]:
    """All trials."""
    end, log = time.monotonic() + seconds, list[dict[str, Any]]()
    best, best_s = bench.executable, bench.seconds(bench.executable)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(batch, search, bench, size)
        while time.monotonic() < end:
            trials = coming.result()
            coming = pool.submit(batch, search, bench, size)
            for trial in trials:
                if time.monotonic() >= end:
                    break
                executable = bench.bind(search.plan({**search.best, **trial.table}))
                if executable is None:
                    continue
                took, won = bench.seconds(executable), False
                if took < 1.004 * best_s:
                    won = bench.ratio(executable, best) < 0.9985
                    best_s = bench.seconds(best)
                changed = {key: c.id for key, c in trial.table.items()}
                log.append({"changed": changed, "ms": round(took * 1e3, 4), "won": won})
                if won:
                    search.best = {**search.best, **trial.table}
                    for key, candidate in changed.items():
                        print(f"  {took * 1e3:.4f} ms  {key}  {candidate}", flush=True)
                    executable, best = best, executable
                    best_s = bench.seconds(best)
                if executable is not bench.executable:
                    executable.free()
        coming.cancel()
    return log


def worth(search: Search, bench: Bench, names: Sequence[str]) -> list[dict[str, Any]]:
    """For each kind of op that has a winner, what a step without it costs."""
    best, found = bench.bind(search.plan(search.best)), list[dict[str, Any]]()
    assert best is not None
    for key in names:
        without = bench.bind(search.plan({**search.best, key: search.first[key]}))
        assert without is not None
        share = bench.ratio(without, best)
        listed = any(search.best[key].id == c.id for c in search.kinds[key][1])
        found.append({"op": key, "candidate": search.best[key].id, "before": search.first[key].id,
                      "without": round(share, 4), "listed": listed})  # fmt: skip
        without.free()
    first = bench.executable
    ms, same = [bench.seconds(e, 20, 7) * 1e3 for e in (best, first)], bench.drawn(best) == bench.drawn(first)
    print(f"best {ms[0]:.4f} ms, first {ms[1]:.4f} ms; best over first {bench.ratio(best, first):.4f}; same {same}")
    for f in found:
        print(f"  x {f['without']:.4f} without  {f['op']}\n      {f['candidate']}  {'' if f['listed'] else '(new)'}\n"
              f"      before {f['before']}", flush=True)  # fmt: skip
    return found


def search_of(args: argparse.Namespace, info: DeviceInfo) -> tuple[Search, Any]:
    """The search, and the artifact."""
    artifact = bench_decode.open_model(args.model, args.format)
    family, spec = identify(artifact.config)
    graph = family.build(spec, artifact.info, kv=kv_by_name(args.kv_dtype), mode="sample")
    registry, rows = RouteRegistry(cuda_routes(info.units)), args.rows
    pages = (args.context + bench_decode.PAGE) // bench_decode.PAGE + 1
    env = Env(rows=rows, logit_rows=rows, seqs=rows, slots=rows, pages=rows * pages, max_pages=pages)
    graph = fuse(graph, lambda op, types: bool(registry.candidates(op, types, env, info)))
    profile = load_profile(info, args.profile, check=lambda p: fresh(p, registry.routes)[0])
    search = Search(graph, env, Chosen(registry, info, profile), random.Random(args.seed), args.ops)
    if not search.kinds:
        keys = sorted({n.op.key for n in graph.nodes})
        raise UsageError(f"--ops {' '.join(args.ops)}: no such op has several candidates; there are {', '.join(keys)}")
    return search, artifact


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"{PREFIX}NAME or a model file")
    parser.add_argument("--format", help="weight format of a synthetic model, e.g. q4_g64/q5_g64")
    parser.add_argument("--rows", type=int, default=1, help="sequences of one token each")
    parser.add_argument("--ops", nargs="+", default=(), help="parts of the op keys that may change; all by default")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--seconds", type=float, default=60.0, help="of trials")
    parser.add_argument("--trials", type=int, default=32, help="compiled at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--profile", type=Path, help="a device profile, over the shipped one and the user's")
    parser.add_argument("--json", type=Path, help="all trials and the winners")
    return parser


def main(args: argparse.Namespace, device: CudaDevice) -> None:
    search, artifact = search_of(args, device.info)
    for key, candidate in search.best.items():
        print(f"  {key}  {candidate.id}")
    weights = bench_decode.weights_of(search.graph, artifact)
    lowering = Lowering(search.selector, Renderer(device.info))
    room = (32 << 20) + 2 * lowering.lower(search.graph, search.env).arena_bytes
    bench = Bench(device, bench_decode.bind(device, lowering, search.graph, weights, search.env, room), search.graph,
                  args.context)  # fmt: skip
    bench.fill(bench.executable)
    log = run(search, bench, args.seconds, args.trials)
    winners = worth(search, bench, [k for k, c in search.best.items() if c.id != search.first[k].id])
    print(f"{len(log)} trials of {len(search.kinds)} kinds of ops, seed {args.seed}, {device.info.name}")
    if args.json:
        report = {"model": args.model, "format": args.format, "rows": args.rows, "context": args.context,
                  "seed": args.seed, "device": device.info.name, "winners": winners, "trials": log}  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1))
    device.close()


if __name__ == "__main__":
    args = arguments().parse_args()
    main(args, ceilings.open_gpu(args.device))
