"""The delta rule of decode steps: microseconds a layer of each route and tuning, and whether it is right.

    python experiments/delta_cuda.py --rows 1 4 8

The shapes are the 27B model's: a chain of layers in one CUDA graph with programmatic dependent launch, with states of
their own that together do not fit L2. Every kernel is compared with the reference. Bytes: states read and written once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chain_cuda import Gpu, Kernel

from ninfer.devices.base import DeviceInfo
from ninfer.devices.cuda import features_of
from ninfer.formats.dtypes import F32, I32
from ninfer.ir.ops.fused import FusedDelta
from ninfer.ir.ops.fused_rounds import FusedDeltaRecord
from ninfer.ir.step import HEADER
from ninfer.ir.types import B, Env, S, T, TensorType, Types
from ninfer.routes import folds_cuda, recurrent_cuda
from ninfer.routes.render import Renderer
from ninfer.routes.route import Candidate, Route, Tuning

HK, HV, D = 16, 48, 128
C = 2 * HK * D + HV * D
GROUP = 32
STEP, ROUND = FusedDelta(HK, HV, D, D, 1e-6, GROUP), FusedDeltaRecord(HK, HV, D, D, 1e-6, GROUP)
PLACES = 8  # of a round's rings
COLD_BYTES = 400 << 20  # of states, which L2 does not hold


def operands(op: FusedDelta) -> Types:
    row, ints = TensorType((T, C)), TensorType((B,), I32)
    types: Types = (
        row, TensorType((C, 4)), TensorType((S, C, 3), F32), TensorType((T, HV)), TensorType((T, HV)),
        TensorType((HV,)), TensorType((HV,)), TensorType((S, HV, D, D), F32), TensorType((D,)),
        TensorType((T, HV * D)), ints, ints, ints, ints,
    )  # fmt: skip
    if isinstance(op, FusedDeltaRecord):
        types = (*types, *(TensorType((S, PLACES, n), F32) for n in (C, HV, HV)))
    return (*types, *op.infer(types))


@frozen
class Variant:
    route: Route[Any]
    tuning: Tuning
    kernel: Kernel

    @property
    def name(self) -> str:
        return Candidate(self.route, self.tuning).id.removeprefix("fused_delta.")


def tunings() -> Iterator[tuple[Route[Any], Tuning]]:
    for route in recurrent_cuda.ROUTES:
        if route.op is FusedDelta:
            yield from ((route, tuning) for tuning in route.tunings)


def of_rounds() -> Iterator[tuple[Route[Any], Tuning]]:
    for tuning in folds_cuda.FUSED_DELTA_RECORD.tunings:
        yield folds_cuda.FUSED_DELTA_RECORD, tuning


def variants(renderer: Renderer, op: FusedDelta, seqs: int, columns: int, only: str) -> list[Variant]:
    types, out = operands(op), []
    env = Env(rows=seqs * columns, logit_rows=seqs, seqs=seqs, slots=seqs)
    for route, tuning in of_rounds() if op is ROUND else tunings():
        candidate = Candidate(route, tuning)
        if only not in candidate.id:
            continue
        g = route.geometry(op, types, env, tuning)
        source = renderer.render(candidate, op, types, env)
        out.append(Variant(route, tuning, Kernel(source, g.grid, g.block, g.shared, 0)))
    return out


class Layers:
    """Device memory of a chain: states of each layer, one step's activations."""

    def __init__(self, gpu: Gpu, op: FusedDelta, seqs: int, columns: int) -> None:
        rows = seqs * columns
        self.gpu = gpu
        cp, rng = gpu.cp, np.random.default_rng(5)

        def normal(*shape: int, size: float = 1.0, mean: float = 0.0) -> NDArray[np.float32]:
            return (mean + size * rng.standard_normal(shape)).astype(np.float32)

        self.state, self.conv = normal(seqs, HV, D, D, size=0.1), normal(seqs, C, 3)
        self.num = max(16, min(96, -(-COLD_BYTES // self.state.nbytes)))
        state, conv = cp.asarray(self.state), cp.asarray(self.conv)
        self.states, self.convs = [state.copy() for _ in range(self.num)], [conv.copy() for _ in range(self.num)]
        self.before = [normal(rows, C), normal(C, 4, size=0.3)]
        self.gates = [normal(rows, HV), normal(rows, HV), normal(HV, size=0.2, mean=0.3), normal(HV, size=0.2, mean=-1)]
        self.after = [normal(D), normal(rows, HV * D)]
        at, one = np.arange(seqs, dtype=np.int32), np.ones(seqs, np.int32)
        self.seqs = [columns * at, columns * one, at[::-1].copy(), 100 * one]
        rings = [np.zeros((seqs, PLACES, n), np.float32) for n in (C, HV, HV)] if op is ROUND else []
        self.on_device = [cp.asarray(a) for a in (*self.before, *self.gates, *self.after, *self.seqs, *rings)]
        header = np.zeros((), HEADER.numpy)
        header["seqs"], header["rows"], header["logit_rows"] = seqs, rows, seqs
        self.head = cp.asarray(header.reshape(1).view(np.uint8))
        self.y, self.scale = cp.zeros((rows, HV * D), cp.int8), cp.zeros((rows, HV * D // GROUP), cp.float32)
        self.stream = cp.cuda.Stream(non_blocking=True)
        moved = self.state.copy(), self.conv.copy()
        y, scale = op.reference((*self.before[:2], moved[1], *self.gates, moved[0], *self.after, *self.seqs, *rings))
        self.want = np.asarray(y, np.float32) * np.repeat(np.asarray(scale), GROUP, 1), *moved

    def enqueue(self, v: Variant, layers: int) -> None:
        x, taps, *rest = (a.data.ptr for a in self.on_device)
        for i in range(layers):
            args = [self.head.data.ptr, x, taps, self.convs[i].data.ptr, *rest[:4], self.states[i].data.ptr, *rest[4:],
                    self.y.data.ptr, self.scale.data.ptr]  # fmt: skip
            self.gpu.run(v.kernel, args, self.stream.ptr, i > 0)

    def errors(self, v: Variant) -> list[float]:
        """Relative, of y, state and convolution after a step."""
        self.states[0].set(self.state)
        self.convs[0].set(self.conv)
        self.gpu.cp.cuda.runtime.deviceSynchronize()
        self.enqueue(v, 1)
        self.stream.synchronize()
        got = (
            self.y.get().astype(np.float32) * np.repeat(self.scale.get(), GROUP, 1),
            self.states[0].get(),
            self.convs[0].get(),
        )
        return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, self.want, strict=True)]

    def time_us(self, v: Variant, seconds: float) -> float:
        cp, s = self.gpu.cp, self.stream
        s.begin_capture()
        try:
            self.enqueue(v, self.num)
        finally:
            graph = s.end_capture()
        graph.upload(s)
        took: list[float] = []
        until = time.monotonic() + seconds
        while len(took) < 5 or time.monotonic() < until:
            a, b = cp.cuda.Event(), cp.cuda.Event()
            a.record(s)
            graph.launch(s)
            b.record(s)
            b.synchronize()
            took.append(1e3 * cp.cuda.get_elapsed_time(a, b))
        return float(np.median(took) / self.num)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8], help="sequences")
    parser.add_argument("--columns", type=int, nargs="*", default=[1], help="rows of a sequence, of a prompt or drafts")
    parser.add_argument("--seconds", type=float, default=0.05, help="of timing a variant")
    parser.add_argument("--only", default="", help="a part of the candidates' names")
    parser.add_argument("--workers", type=int, default=16, help="that compile")
    parser.add_argument("--registers", metavar="ARCH", help="compile only")
    args = parser.parse_args()
    points = [(STEP, rows, columns) for columns in args.columns for rows in args.rows]
    points += [(ROUND, rows, columns) for _, rows, columns in points if 1 < columns <= PLACES]
    if args.registers:
        from ninfer.devices.nvrtc import compile_cubin

        info = DeviceInfo("cuda", "", "", features_of(args.registers), args.registers, 132, 1 << 37)
        for point in points:
            for v in variants(Renderer(info), *point, args.only):
                print(v.name, v.kernel.shared, compile_cubin(v.kernel.source, args.registers)[1], flush=True)
        return
    gpu = Gpu(args.workers)
    found = {point: variants(gpu.renderer, *point, args.only) for point in points}
    gpu.load(v.kernel for vs in found.values() for v in vs)
    for (op, rows, columns), vs in found.items():
        layers = Layers(gpu, op, rows, columns)
        floor = (1 if op is ROUND else 2) * layers.state.nbytes / 4.2e6
        print(f"{gpu.name}: {rows} sequences of {columns}, {layers.num} layers, bytes alone {floor:.2f} us at 4.2 TB/s")
        for v in vs:
            errors = layers.errors(v)
            us = layers.time_us(v, args.seconds)
            wrong = "" if errors[0] < 1e-2 and max(errors[1:]) < 1e-5 else "  WRONG"
            print(f"{rows:3} {us:7.2f} us  {v.name:60} {' '.join(f'{e:.1e}' for e in errors)}{wrong}", flush=True)
        del layers
        gpu.cp.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
