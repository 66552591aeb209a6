"""Attention of few rows of a sequence, all formats and tunings: microseconds a layer, and whether it is right.

    python experiments/attention_cuda.py --tokens 131072 --kv-dtype bf16 rk8v4 rk4v4
    python experiments/attention_cuda.py --tokens 512 4096 --rows 1 4 --kv-dtype bf16

The shapes are the 27B model's, a chain of 16 layers or more in one CUDA graph, with caches of their own that together
do not fit L2. Every kernel is compared with the reference on the first 2,000 tokens, and kernels of one format with
each other at full length: exit code 1 where one is off by more than its route's tolerance.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chain_cuda import Gpu, Kernel

from ninfer.formats.dtypes import I32, U8
from ninfer.formats.kv import PAGE, KVFormat, by_name
from ninfer.ir.ops.attention import page_views
from ninfer.ir.ops.fused import FusedAttention
from ninfer.ir.step import HEADER
from ninfer.ir.types import Arrays, B, Env, M, P, S, T, TensorType, Types
from ninfer.routes import attention_cuda, attention_ring_cuda, attention_tile_cuda
from ninfer.routes.route import Candidate, Route

HEADS, KV_HEADS, D, ROTARY = 24, 4, 256, 32
LAYERS, MOST_LAYERS = 16, 96
COLD_BYTES = 192 << 20  # of caches, which L2 does not hold
DRAWN_PAGES = 32  # drawn and coded; longer caches repeat them
SCORE_SIZE = 3.0  # of queries: some keys weigh much more than others


@frozen
class Variant:
    route: Route[Any]
    kernel: Kernel
    name: str


def operands(fmt: KVFormat) -> tuple[FusedAttention, Types]:
    op = FusedAttention(fmt, HEADS, KV_HEADS, D, D**-0.5, None, 1.0, True, 1e-6, 1.0, True, 0)
    row, kv, ints = TensorType((T, HEADS * D)), TensorType((T, KV_HEADS * D)), TensorType((B,), I32)
    cache = TensorType((P, fmt.page_bytes(KV_HEADS, D)), U8)
    of_rows, norm = TensorType((T,), I32), TensorType((D,))
    paging = (TensorType((S, M), I32), of_rows, ints, ints, ints)
    types: Types = (row, kv, kv, cache, *paging, of_rows, TensorType((ROTARY,)), norm, norm, row)
    return op, (*types, *op.infer(types))


def variants(gpu: Gpu, fmt: KVFormat, pages: int, rows: int, limit: int, named: list[str]) -> list[Variant]:
    op, types = operands(fmt)
    env = Env(rows=rows, logit_rows=rows, seqs=1, slots=1, pages=pages, max_pages=pages)
    out = []
    for route in (
        *attention_cuda.ROUTES,
        *attention_ring_cuda.CODED,
        *attention_ring_cuda.PLAIN,
        *attention_tile_cuda.routes(gpu.units),
    ):
        if route.op is not FusedAttention or not any(n in route.name for n in named) or route.refuse(op, types):
            continue
        for tuning in [t for t in route.tunings if route.fits(op, types, t)][:limit]:
            g = route.geometry(op, types, env, tuning)
            if g.shared > gpu.shared_limit:
                continue
            candidate = Candidate(route, tuning)
            source = gpu.renderer.render(candidate, op, types, env)
            scratch = route.workspace(op, types, env, tuning)
            out.append(Variant(route, Kernel(source, g.grid, g.block, g.shared, scratch), candidate.id))
    return out


class Caches:
    """Device memory of one format: a cache per layer, and a step's operands."""

    def __init__(self, gpu: Gpu, fmt: KVFormat, pages: int, num_rows: int) -> None:
        self.gpu, self.fmt, self.pages, self.num_rows = gpu, fmt, pages, num_rows
        cp, rng = gpu.cp, np.random.default_rng(5)
        drawn = np.zeros((DRAWN_PAGES, fmt.page_bytes(KV_HEADS, D)), np.uint8)
        for rows in page_views(drawn, fmt, KV_HEADS, D):
            rows.store(..., rng.standard_normal((DRAWN_PAGES, KV_HEADS, PAGE, D)).astype(np.float32))
        self.drawn = drawn
        one = cp.tile(cp.asarray(drawn), (-(-pages // DRAWN_PAGES), 1))[:pages]
        self.layers = min(MOST_LAYERS, max(LAYERS, -(-COLD_BYTES // one.nbytes)))
        self.caches = [one.copy() for _ in range(self.layers)]

        def normal(n: int, size: float = 1.0) -> NDArray[np.float32]:
            return (size * rng.standard_normal((num_rows, n))).astype(np.float32)

        self.rows = [normal(HEADS * D), normal(KV_HEADS * D), normal(KV_HEADS * D)]
        freqs = (1e7 ** -(np.arange(ROTARY) / ROTARY)).astype(np.float32)
        norms = [np.full(D, SCORE_SIZE - 1, np.float32), np.zeros(D, np.float32)]  # 1 is added
        self.after = [freqs, *norms, normal(HEADS * D)]
        table = np.arange(pages, dtype=np.int32)[None]
        self.paging = [table, *(np.zeros(n, np.int32) for n in (num_rows, 1, 1, 1, num_rows))]
        self.on_device = [cp.asarray(a) for a in (*self.rows, *self.paging, *self.after)]
        self.header = np.zeros((), HEADER.numpy)
        self.header["seqs"], self.header["rows"], self.header["logit_rows"] = 1, num_rows, num_rows
        self.head = cp.asarray(self.header.reshape(1).view(np.uint8))
        self.y = cp.zeros((num_rows, HEADS * D), cp.float32)
        self.scratch = cp.zeros(1 << 26, cp.uint8)
        self.stream = cp.cuda.Stream(non_blocking=True)

    def length(self, past: int) -> None:
        self.paging[4][:], self.paging[5][:] = past, past + np.arange(self.num_rows)
        for i in (4, 5):
            self.on_device[3 + i].set(self.paging[i])
        self.gpu.cp.cuda.runtime.deviceSynchronize()

    def enqueue(self, v: Variant, layers: int) -> None:
        q, k, w, *rest = (a.data.ptr for a in self.on_device)
        assert v.kernel.scratch <= self.scratch.nbytes
        for i in range(layers):
            args = [self.head.data.ptr, q, k, w, self.caches[i].data.ptr, *rest, self.y.data.ptr, self.scratch.data.ptr]
            self.gpu.run(v.kernel, args, self.stream.ptr, i > 0)

    def output(self, v: Variant, past: int) -> NDArray[np.float32]:
        self.length(past)
        self.y.fill(np.nan)
        self.gpu.cp.cuda.runtime.deviceSynchronize()
        self.enqueue(v, 1)
        self.stream.synchronize()
        out: NDArray[np.float32] = self.y.get()
        return out

    def expected(self, past: int) -> NDArray[np.float32]:
        self.length(past)
        op, _ = operands(self.fmt)
        args: Arrays = (*self.rows, self.drawn.copy(), *self.paging, *self.after)
        (y,) = op.reference(args)
        return np.asarray(y)

    def time_us(self, v: Variant, seconds: float) -> float:
        """Of a layer: the median of many steps."""
        cp, s = self.gpu.cp, self.stream
        self.length(self.pages * PAGE - self.num_rows)
        s.begin_capture()
        try:
            self.enqueue(v, self.layers)
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
        return float(np.median(took) / self.layers)


def relative(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b))


def compare(gpu: Gpu, fmt: KVFormat, vs: list[Variant], tokens: int, rows: int, seconds: float) -> int:
    """Prints a line for each; how many were wrong."""
    pages, wrong = tokens // PAGE, 0
    caches = Caches(gpu, fmt, pages, rows)
    short = min(1990, pages * PAGE) - rows
    want, first = caches.expected(short), None
    nbytes = tokens * fmt.bytes_per_token(KV_HEADS, D)
    for v in vs:
        error = relative(caches.output(v, short), want)
        whole = caches.output(v, pages * PAGE - rows)
        first = whole if first is None else first
        apart, us = relative(whole, first), caches.time_us(v, seconds)
        allowed = v.route.rtol or 1e-4
        bad = not (error <= allowed and apart <= allowed)
        wrong += bad
        print(
            f"{fmt.name:9}{tokens:>7}{rows:>3}  {v.name:64}{us:8.1f}{nbytes / us / 1e6:7.2f}  {error:.1e} {apart:.1e}"
            f"{'  WRONG' * bad}",
            flush=True,
        )
    del caches
    gpu.cp.get_default_memory_pool().free_all_blocks()
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072])
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="of the sequence in a step")
    parser.add_argument("--kv-dtype", nargs="+", default=["bf16", "rk8v4", "rk4v4"])
    parser.add_argument("--seconds", type=float, default=0.2, help="of timing a variant")
    parser.add_argument("--tunings", type=int, default=99, help="of a route, at most")
    parser.add_argument("--routes", nargs="+", default=[""], help="only those whose name has one of these in it")
    parser.add_argument("--workers", type=int, default=16, help="that compile")
    args = parser.parse_args()
    gpu = Gpu(args.workers)
    points = [(name, tokens, rows) for name in args.kv_dtype for tokens in args.tokens for rows in args.rows]
    found = {(name, tokens, rows): variants(gpu, by_name(name), tokens // PAGE, rows, args.tunings, args.routes)
             for name, tokens, rows in points}  # fmt: skip
    gpu.load(v.kernel for vs in found.values() for v in vs)
    print(f"{gpu.name}: {HEADS} heads, {KV_HEADS} KV heads of {D}")
    print(f"{'format':9}{'tokens':>7}{'rows':>5}  {'route':62}{'us':>8}{'TB/s':>7}  error, error to the first")
    wrong = sum(
        compare(gpu, by_name(name), vs, tokens, rows, args.seconds) for (name, tokens, rows), vs in found.items()
    )
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
