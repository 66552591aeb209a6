"""Speed of the linear kernels on this CPU, beside what its memory and its multipliers give in the same run.

    python experiments/kernels_cpu.py                    # the demo model's shapes, 1 and 2 threads
    python experiments/kernels_cpu.py --rows 1,512 --format q8_0 --shape 4096x4096

Each product runs over copies of its weight that together exceed the caches, as the layers of a model do. Launches
are timed one by one and the 3 % quantile is reported, so that other processes disturb little. GB/s counts weight
bytes; GFLOP/s two operations for every weight and row.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.devices.base import Source
from ninfer.devices.cpu import _LAUNCH, CpuDevice, aligned, cpu_info
from ninfer.devices.plan import BufferRef, Place
from ninfer.devices.programs import ProgramCache, find_compiler
from ninfer.formats.quant import QuantFormat, by_name
from ninfer.ir.graph import Kind, Node, Value
from ninfer.ir.op import Op
from ninfer.ir.ops.linear import Linear, LinearAdd, LinearSwiglu
from ninfer.ir.step import HEADER
from ninfer.ir.types import Env, L, T, TensorType
from ninfer.routes import linear_cpu
from ninfer.routes.lower import Arena, Lowering
from ninfer.routes.profile import DeviceProfile, cache_dir
from ninfer.routes.render import Renderer
from ninfer.routes.route import Candidate, RouteRegistry
from ninfer.routes.select import Selector

COPIES_BYTES = 96 << 20

CEILINGS = Source(
    "ceilings",
    """
#include <stdint.h>
typedef float v8 __attribute__((vector_size(32)));
typedef int64_t q4 __attribute__((vector_size(32)));
extern "C" void stream(void* const* a, int chunk, int chunks) {
    const int64_t bytes = *(const int64_t*)a[0] / 256;
    const int64_t first = bytes * chunk / chunks, last = bytes * (chunk + 1) / chunks;
    const q4* p = (const q4*)a[1];
    q4 s[8] = {};
    for (int64_t i = first; i < last; ++i)
        for (int j = 0; j < 8; ++j) s[j] += p[8 * i + j];
    for (int j = 1; j < 8; ++j) s[0] += s[j];
    *(volatile q4*)((q4*)a[2] + chunk) = s[0];
}
extern "C" void ceilings(void* const* a, int chunk, int chunks) {
    v8 x = (v8){} + 0.999f, y = (v8){} + 1e-3f;
    v8 s0 = y, s1 = y + 1, s2 = y + 2, s3 = y + 3, s4 = y + 4, s5 = y + 5, s6 = y + 6, s7 = y + 7;
    v8 s8 = y + 8, s9 = y + 9;
    for (int64_t n = *(const int64_t*)a[0]; n; --n) {
        s0 = s0 * x + y, s1 = s1 * x + y, s2 = s2 * x + y, s3 = s3 * x + y, s4 = s4 * x + y;
        s5 = s5 * x + y, s6 = s6 * x + y, s7 = s7 * x + y, s8 = s8 * x + y, s9 = s9 * x + y;
    }
    *(volatile v8*)((v8*)a[2] + chunk) = s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7 + s8 + s9;
}
""",
)


@frozen
class Problem:
    name: str
    op: Op
    formats: tuple[tuple[str, int], ...]  # format and rows of each weight
    k: int
    sym: Any = T


def demo_problems() -> list[Problem]:
    q = "q4_1"
    return [
        Problem("qkv", Linear(), ((q, 576), (q, 192), (q, 192)), 576),
        Problem("o + residual", LinearAdd(), ((q, 576),), 576),
        Problem("gate, up", LinearSwiglu(), ((q, 1536), (q, 1536)), 576),
        Problem("down + residual", LinearAdd(), ((q, 576),), 1536),
        Problem("head", Linear(), (("q8_0", 49152),), 576, L),
    ]


def quick(runs: Sequence[Callable[[], object]], rounds: int) -> float:
    """Seconds of one run: the 3 % quantile over all runs and rounds."""
    times = []
    for _ in range(rounds):
        for run in runs:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 33]


def random_weight(fmt: QuantFormat, n: int, k: int) -> NDArray[np.uint8]:
    """Encoded normal values; only a slice is encoded and repeated, which is as good for timing."""
    some = min(n, 64)
    x = (np.random.default_rng(1).standard_normal((some, k)) / np.sqrt(k)).astype(np.float32)
    if fmt.split:
        return fmt.pack(np.resize(x, (n, k)))
    return np.resize(fmt.pack(x), fmt.nbytes((n, k)))


@frozen
class Bench:
    device: CpuDevice
    lowering: Lowering
    rounds: int

    def launches(self, entry: int, blocks: Sequence[Any], chunks: int) -> NDArray[Any]:
        return np.array([(entry, ctypes.addressof(b), chunks) for b in blocks], _LAUNCH)

    def bandwidth(self) -> float:
        assert self.device.programs is not None
        entry = self.device.programs._symbol(self.device.programs._cached(CEILINGS) or Path(), "stream")
        data, out = aligned(COPIES_BYTES), aligned(64 * 256)
        data[:] = 1
        part = 1 << 20
        size = np.array([part], np.int64)
        blocks = [(ctypes.c_void_p * 3)(size.ctypes.data, data.ctypes.data + i, out.ctypes.data)
                  for i in range(0, COPIES_BYTES, part)]  # fmt: skip
        runs = [partial(self.device.run, self.launches(entry, [b], 16)) for b in blocks]
        return part / quick(runs, self.rounds) / 1e9

    def multipliers(self) -> float:
        assert self.device.programs is not None
        entry = self.device.programs.addresses([CEILINGS])["ceilings"]
        loops, chunks = 2000, 8
        out, n = aligned(64 * 256), np.array([loops], np.int64)
        block = (ctypes.c_void_p * 3)(n.ctypes.data, 0, out.ctypes.data)
        run = partial(self.device.run, self.launches(entry, [block], chunks))
        return chunks * loops * 10 * 16 / quick([run] * 20, self.rounds) / 1e9

    def product(self, problem: Problem, rows: int, candidate: Candidate) -> tuple[float, int, int]:
        """Seconds, weight bytes and operations of one launch."""
        k = problem.k
        weights = tuple(TensorType((n, k), fmt=by_name(f)) for f, n in problem.formats)
        x = TensorType((problem.sym, k))
        residual = (TensorType((problem.sym, problem.formats[0][1])),) if isinstance(problem.op, LinearAdd) else ()
        inputs = (x, *weights, *residual)
        types = (*inputs, *problem.op.infer(inputs))
        env = Env(rows, rows, 1)
        nbytes = sum(w.nbytes(env) for w in weights)
        copies = max(1, COPIES_BYTES // nbytes) if rows <= 8 else max(1, min(8, COPIES_BYTES // nbytes))
        values = tuple(Value(str(i), t, Kind.CONST) for i, t in enumerate(types))
        node = Node(problem.op, values[: len(inputs)], values[len(inputs) :], None)
        refs, arena = [BufferRef(Place.CONST, v.name) for v in values], Arena()
        steps = self.lowering.launches(node, types, env, candidate, refs, arena)
        assert self.device.programs is not None
        entries = self.device.programs.addresses([s.source for s in steps if s.source is not None])
        header = np.zeros((), HEADER.numpy)
        header["rows"] = header["logit_rows"] = rows
        rng = np.random.default_rng(0)
        runs: list[Callable[[], object]] = []
        buffers: list[NDArray[np.uint8]] = []
        for t in types:
            buffer = aligned(t.nbytes(env))
            if t.fmt is None:
                buffer.view(np.float32)[:] = rng.standard_normal(buffer.size // 4)
            buffers.append(buffer)
        scratch = aligned(arena.end)
        samples = [random_weight(w.fmt, int(w.shape[0]), k) for w in weights if w.fmt is not None]
        keep: list[Any] = [header]
        for _ in range(copies):
            mine = list(buffers)
            for i, sample in enumerate(samples):
                mine[1 + i] = aligned(len(sample))
                mine[1 + i][:] = sample
            work = []
            for step in steps:
                assert step.source is not None
                pointers = [header.ctypes.data] + [
                    scratch.ctypes.data + r.offset if r.place is Place.ARENA else mine[int(r.name)].ctypes.data
                    for r in step.args
                ]
                block = (ctypes.c_void_p * len(pointers))(*pointers)
                keep += [block, mine]
                gx, gy, gz = step.geometry.grid
                work.append((entries[step.source.entry], ctypes.addressof(block), gx * gy * gz))
            runs.append(partial(self.device.run, np.array(work, _LAUNCH)))
        return quick(runs, self.rounds), nbytes, 2 * rows * k * sum(n for _, n in problem.formats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,8,512", help="widths, with commas")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--format", default="", help="measure one matrix of this format instead of the demo's shapes")
    parser.add_argument("--shape", default="4096x4096", help="NxK of that matrix")
    parser.add_argument("--only", default="", help="routes whose names contain this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line as well")
    args = parser.parse_args()
    n, k = (int(d) for d in args.shape.split("x"))
    problems = [Problem(args.shape, Linear(), ((args.format, n),), k)] if args.format else demo_problems()
    info, compiler = cpu_info(), find_compiler()
    assert compiler is not None, "no compiler"
    registry = RouteRegistry(linear_cpu.ROUTES)
    lowering = Lowering(Selector(registry, info, DeviceProfile(info.hardware_class)), Renderer(info))
    for threads in (int(t) for t in args.threads.split(",")):
        device = CpuDevice(info, ProgramCache(compiler, cache_dir() / "programs", info.arch), threads)
        bench = Bench(device, lowering, args.rounds)
        peak = bench.multipliers()
        stream = bench.bandwidth()
        print(f"{info.name}, {threads} threads: stream {stream:.1f} GB/s, multiply-add {peak:.0f} GFLOP/s")
        print(f"{'product':18} {'rows':>5} {'route':40} {'us':>9} {'GB/s':>7} {'GFLOP/s':>8}")
        for problem in problems:
            for rows in (int(r) for r in args.rows.split(",")):
                if problem.sym is L and rows > 8:
                    continue
                env = Env(rows, rows, 1)
                types = (
                    TensorType((problem.sym, problem.k)),
                    *(TensorType((n, problem.k), fmt=by_name(f)) for f, n in problem.formats),
                )
                for candidate in registry.candidates(problem.op, types, env, info):
                    if args.only not in candidate.id:
                        continue
                    seconds, nbytes, flops = bench.product(problem, rows, candidate)
                    print(f"{problem.name:18} {rows:5} {candidate.id:40} {seconds * 1e6:9.1f} "
                          f"{nbytes / seconds / 1e9:7.2f} {flops / seconds / 1e9:8.1f}", flush=True)  # fmt: skip
                    if args.json:
                        print(json.dumps({"product": problem.name, "rows": rows, "route": candidate.id,
                                          "seconds": seconds, "threads": threads, "stream": stream * 1e9,
                                          "peak": peak * 1e9, "weight_bytes": nbytes, "flops": flops}))  # fmt: skip
        device.close()


if __name__ == "__main__":
    main()
