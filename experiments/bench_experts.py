"""Routes of experts at many rows: microseconds, arithmetic per second, and the error beside numpy's reference.

    python experiments/bench_experts.py --rows 512 4096 --format q4_g64

Shapes are those of Qwen3.5-35B-A3B by default. Rows pick their experts evenly, by a seed. Launches of a route follow
each other as in a step, many steps in one captured graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ceilings

from ninfer.devices.cuda import CudaDevice, Region, device_bytes
from ninfer.devices.plan import BufferRef, Launch, Place, Plan
from ninfer.formats.dtypes import I32
from ninfer.formats.quant import Packed, by_name
from ninfer.ir import casework as cw
from ninfer.ir.graph import Kind, Node, Value
from ninfer.ir.ops.experts import ACTIVATIONS, ExpertGlu, ExpertSum
from ninfer.ir.step import HEADER
from ninfer.ir.types import Array, Env, T, TensorType, f32_array
from ninfer.routes.cuda import cuda_routes
from ninfer.routes.cuda_layout import device_layout
from ninfer.routes.lower import Arena, Lowering
from ninfer.routes.profile import DeviceProfile
from ninfer.routes.render import Renderer
from ninfer.routes.route import Candidate, RouteRegistry
from ninfer.routes.select import Selector

DIFFERENT = 4  # experts, repeated to the number that there are
CHECKED = 256  # rows that numpy computes too


class Bench:
    """One op's operands on the device, and its candidates."""

    def __init__(
        self, device: CudaDevice, op: Any, types: tuple[TensorType, ...], arrays: list[Any], rows: int
    ) -> None:
        self.device, self.op, self.types = device, op, (*types, *op.infer(types))
        self.env, self.arrays = Env(rows=rows, logit_rows=1, seqs=1), arrays
        self.registry = RouteRegistry(cuda_routes(device.info.units))
        self.lowering = Lowering(Selector(self.registry, device.info, DeviceProfile("none")), Renderer(device.info))
        self.stages: list[float] = []  # microseconds of each launch of the last candidate in a chain of its own
        self.offsets, at = [], 0
        for t in self.types:
            self.offsets.append(at)
            tiled = t.fmt is not None and not t.fmt.is_plain
            nbytes = device_bytes(device_layout, t.fmt, t.concrete(self.env)) if tiled else t.nbytes(self.env)
            at += -(-nbytes // 256) * 256
        self.end = at

    def candidates(self) -> tuple[Candidate, ...]:
        return self.registry.candidates(self.op, self.types[: len(self.arrays)], self.env, self.device.info)

    def launches(self, candidate: Candidate) -> tuple[tuple[Launch, ...], int]:
        """Over offsets in a region of so many bytes."""
        values = [Value(f"a{i}", t, Kind.NODE) for i, t in enumerate(self.types)]
        n, space = len(self.arrays), Arena(end=self.end)
        node = Node(self.op, tuple(values[:n]), tuple(values[n:]), None)
        refs = [BufferRef(Place.ARENA, offset=o) for o in self.offsets]
        return tuple(self.lowering.launches(node, self.types, self.env, candidate, refs, space)), space.end

    def measure(self, candidate: Candidate, want: NDArray[Any], repeat: int) -> tuple[float, float, float]:
        """Seconds, their spread, and the relative error."""
        device, runtime = self.device, self.device.cupy.cuda.runtime
        launches, nbytes = self.launches(candidate)
        region, head = Region(device.cupy, nbytes), Region(device.cupy, HEADER.nbytes)
        header = np.zeros((), HEADER.numpy)
        header["rows"], header["seqs"], header["logit_rows"] = self.env.rows, 1, 1
        device.copy_in(head.pointer, header.reshape(1).view(np.uint8))
        for at, array in zip(self.offsets, self.arrays, strict=False):
            device.copy_in(region.pointer + at, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        calls = [
            device.kernel(x, [head.pointer, *(region.pointer + r.offset for r in x.args)], dependent=i > 0)
            for i, x in enumerate(launches)
        ]
        times = self._times(calls, repeat)
        self.stages = [round(statistics.median(self._times([call], repeat)) * 1e6, 1) for call in calls]
        got = np.empty(want.shape, np.float32)  # of the first rows
        runtime.memcpy(got.ctypes.data, region.pointer + self.offsets[len(self.arrays)], got.nbytes, 2)
        region.free()
        head.free()
        seconds = statistics.median(times)
        return seconds, (max(times) - min(times)) / seconds, float(np.linalg.norm(got - want) / np.linalg.norm(want))

    def _times(self, calls: list[Callable[[], None]], repeat: int) -> list[float]:
        """Seconds of all calls, five times."""
        stream, cuda = self.device.stream, self.device.cupy.cuda
        stream.begin_capture()
        for _ in range(repeat):
            for call in calls:
                call()
        graph = stream.end_capture()
        graph.launch(stream)
        times = []
        for _ in range(5):
            start, end = cuda.Event(), cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(float(cuda.get_elapsed_time(start, end)) / 1e3 / repeat)
        return times


def stack(fmt_name: str, experts: int, rows: int, k: int, seed: int) -> tuple[TensorType, NDArray[Any], Any]:
    """A stack as the device holds it, and the few different experts of it."""
    few_type, few = cw.matrix(by_name(fmt_name), DIFFERENT * rows, k, seed=seed)
    raw = few.raw.reshape(-1) if isinstance(few, Packed) else np.ascontiguousarray(few).reshape(-1).view(np.uint8)
    there = device_layout(by_name(fmt_name))(raw, (DIFFERENT * rows, k)).reshape(-1)
    return evolve(few_type, shape=(experts * rows, k)), np.tile(there, experts // DIFFERENT), (few_type, few)


def picked_products(
    op: ExpertGlu | ExpertSum,
    rows: NDArray[Any],
    ids: NDArray[Any],
    few: Array,
    shares: NDArray[Any],
    residual: NDArray[Any],
) -> NDArray[Any]:
    """What some rows' picks give, of experts that repeat themselves: faster than the op's reference.

    rows: [R, K], or [R, top_k * inner] of a sum.
    """
    count, top_k = ids.shape
    matrices = f32_array(few).reshape(DIFFERENT, -1, few.shape[1])
    out: NDArray[Any] = np.zeros((count, top_k, op.inner if isinstance(op, ExpertGlu) else op.outer), np.float32)
    for d in range(DIFFERENT):
        at, j = np.nonzero(ids % DIFFERENT == d)
        if isinstance(op, ExpertGlu):
            both = rows[at] @ matrices[d].T
            gate, up = both[:, : op.inner], both[:, op.inner :]
            out[at, j] = ACTIVATIONS[op.act](gate) * up
        else:
            out[at, j] = rows.reshape(count, top_k, -1)[at, j] @ matrices[d].T
    if isinstance(op, ExpertGlu):
        return out.reshape(count, -1)
    total: NDArray[Any] = (out * shares[:, :, None]).sum(axis=1) + residual
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--format", default="q4_g64")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", type=int, default=0)
    args = parser.parse_args()
    device = ceilings.open_gpu(args.device)
    num, top_k, rng = args.experts, args.top_k, np.random.default_rng(1)
    gate_up, down = (
        stack(args.format, num, n, k, seed)
        for n, k, seed in ((2 * args.inner, args.hidden, 1), (args.hidden, args.inner, 2))
    )
    benches: list[tuple[Bench, NDArray[Any], int, list[Candidate]]] = []
    for rows in args.rows:
        ids = np.argsort(rng.random((rows, num)), axis=1)[:, :top_k].astype(np.int32)
        x, h = (rng.standard_normal((rows, n)).astype(np.float32) for n in (args.hidden, top_k * args.inner))
        shares = rng.random((rows, top_k)).astype(np.float32)
        places, types = np.arange(num, dtype=np.int32), TensorType((num,), I32)
        id_type = TensorType((T, top_k), I32)
        glu, total = ExpertGlu(top_k, args.inner), ExpertSum(top_k, args.hidden)
        for op, first, (stack_type, raw, (_, few)), before, after in (
            (glu, x, gate_up, (), ()),
            (total, h, down, (shares,), (x,)),
        ):
            more = tuple(TensorType((T, a.shape[1])) for a in before), tuple(TensorType((T, a.shape[1])) for a in after)
            operand_types = (TensorType((T, first.shape[1])), id_type, *more[0], types, stack_type, *more[1])
            bench = Bench(device, op, operand_types, [first, ids, *before, places, raw, *after], rows)
            want = picked_products(op, first[:CHECKED], ids[:CHECKED], few, shares[:CHECKED], x[:CHECKED])
            chosen = [c for c in bench.candidates() if not c.route.name.endswith(".each") or rows < 64]
            benches.append((bench, want, op.work(operand_types, bench.env).flops, chosen))
    device.compile([Plan(b.env, b.launches(c)[0], 0, 0, {}) for b, _, _, chosen in benches for c in chosen])
    for bench, want, flops, chosen in benches:
        for candidate in chosen:
            seconds, spread, error = bench.measure(candidate, want, args.repeat)
            print(json.dumps({
                "rows": bench.env.rows, "format": args.format, "route": candidate.id, "us": round(seconds * 1e6, 1),
                "spread": round(spread, 3), "t_per_s": round(flops / seconds / 1e12, 1), "stages": bench.stages,
                "error": round(error, 5), "device": device.info.name,
            }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
