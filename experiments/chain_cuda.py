"""The decode step of a 27B model as a chain of kernels in one CUDA graph, on random weights: what do tunings give?

    python experiments/chain_cuda.py --rows 1 2 4 8 --seconds 300

No engine: only the templates, NVRTC and cupy. 64 layers of in projection (norm and quantisation in its prologue),
a stand-in for the delta rule that moves its state, out projection, gate/up with SwiGLU, down; then the head. Tunings
are found by coordinate descent inside the chain, since alone a kernel prefers other grids than among its neighbours.
One JSON line per point, a table at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ninfer.devices.base import DeviceInfo, Source
from ninfer.formats.dtypes import F32, I8
from ninfer.formats.quant import Packed, by_name
from ninfer.ir.op import Op
from ninfer.ir.ops.linear import Linear
from ninfer.ir.ops.packed_act import FusedLinear, RmsNormQuant, dequantize, packed_types, quantize
from ninfer.ir.types import Array, Arrays, Env, T, TensorType, Types, plain
from ninfer.routes import linear_cuda
from ninfer.routes.cuda_layout import layout_of
from ninfer.routes.render import Renderer
from ninfer.routes.route import Geometry, Tuning

H, I, V, IN, MIX = 5120, 17408, 248320, 16384, 6144
LAYERS = 64
READ_WORDS = 1 << 31
EPS = 1e-6

MIXER = r"""
// A stand-in for the gated delta rule: per (sequence, head, 16 of its 128 value rows) the state is read before the
// wait, updated with vectors of the projection, and written.
__device__ __forceinline__ f32 dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
__device__ __forceinline__ float4 scaled(float4 a, f32 f) { return make_float4(a.x * f, a.y * f, a.z * f, a.w * f); }
extern "C" __global__ void __launch_bounds__(128) mixer(const StepHeader* hdr, const f32* u, f32* state, f32* out) {
    PDL_TRIGGER();
    const int warp = WARP, lane = LANE, head = blockIdx.y, part = blockIdx.x, seq = blockIdx.z;
    float4* const s = (float4*)(state + ((u64)seq * 48 + head) * 16384 + part * 2048 + warp * 512) + lane;
    float4 r[4];
    for (int i = 0; i < 4; i++) r[i] = s[32 * i];
    PDL_WAIT();
    const f32* const row = u + (u64)seq * 16384;
    const float4 q = *(const float4*)(row + head / 3 * 128 + 4 * lane);
    const float4 k = *(const float4*)(row + 2048 + head / 3 * 128 + 4 * lane);
    const f32 norm = rsqrtf(warp_sum(dot(k, k)) + 1e-6f);
    const f32 decay = sigmoid(row[4096 + head] + 3.0f), beta = sigmoid(row[4200 + head]) * norm;
    for (int i = 0; i < 4; i++) {
        const int v = part * 16 + warp * 4 + i;
        r[i] = scaled(r[i], decay);
        const f32 delta = beta * (row[4096 + head * 128 + v] - norm * warp_sum(dot(r[i], k)));
        r[i].x += delta * k.x, r[i].y += delta * k.y, r[i].z += delta * k.z, r[i].w += delta * k.w;
        s[32 * i] = r[i];
        const f32 y = warp_sum(dot(r[i], q));
        if (lane == 0) out[(u64)seq * 6144 + head * 128 + v] = y * norm;
    }
}
extern "C" __global__ void __launch_bounds__(256) mixer_small(
    const StepHeader* hdr, const f32* u, f32* state, f32* out) {
    PDL_TRIGGER();
    PDL_WAIT();
    const int i = blockIdx.x * 256 + threadIdx.x;
    const f32* const row = u + (u64)blockIdx.y * 16384;
    out[(u64)blockIdx.y * 6144 + i] = row[i] * sigmoid(row[6144 + i]);
}
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* x, u64 n, u32* out) {
    u32 a = 0;
    for (u64 i = (u64)blockIdx.x * 2048 + threadIdx.x; i < n; i += (u64)gridDim.x * 2048) {
        uint4 v[4];
        for (int j = 0; j < 4; j++) v[j] = stream16(x + i + 512 * j);
        for (int j = 0; j < 4; j++) a ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (a == 0x12345678u) *out = a;
}
"""


def compile_cubin(text: str, arch: str) -> bytes:
    """In a worker process: NVRTC text to machine code."""
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"nvrtc: {result[0]}")
        return result[1] if len(result) == 2 else result[1:]

    program = check(nvrtc.nvrtcCreateProgram(text.encode(), b"k.cu", 0, [], []))
    options = [f"--gpu-architecture={arch}".encode(), b"-std=c++17", b"--device-as-default-execution-space"]
    if int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]) != 0:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode()[:4000])
    cubin: bytes = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


class Gpu:
    """Compiled kernels by rendered text, and launches with programmatic dependence."""

    def __init__(self, workers: int) -> None:
        self.pool = ProcessPoolExecutor(workers, get_context("spawn"))  # before CUDA starts
        import cupy
        from cuda.bindings import driver

        self.cp, self.driver = cupy, driver
        cupy.cuda.Device(0).use()
        cupy.zeros(1)
        props = cupy.cuda.runtime.getDeviceProperties(0)
        self.name, self.units = props["name"].decode(), props["multiProcessorCount"]
        major, minor = props["major"], props["minor"]
        self.arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
        info = DeviceInfo("cuda", self.name, self.name, frozenset(), self.arch, self.units, 1 << 37)
        self.renderer = Renderer(info)
        self.shared_limit = props["sharedMemPerBlockOptin"]
        self.functions: dict[str, Any] = {}
        self.carveout = True

    def check(self, result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"{result[0]}")
        return result[1] if len(result) == 2 else result[1:]

    def load(self, sources: Iterable[tuple[Source, int]]) -> None:
        """Compile what is new, in parallel.   sources: with their dynamic shared bytes."""
        new = {s.entry: (s, shared) for s, shared in sources if s.entry not in self.functions}
        texts = ["\n".join([*s.headers, s.text]) for s, _ in new.values()]
        cubins = self.pool.map(compile_cubin, texts, [self.arch] * len(texts))
        for (source, shared), cubin in zip(new.values(), cubins, strict=True):
            module = self.check(self.driver.cuModuleLoadData(cubin))
            self.functions[source.entry] = self.function(module, source.entry, shared)

    def function(self, module: Any, name: str, shared: int) -> Any:
        d = self.driver
        f = self.check(d.cuModuleGetFunction(module, name.encode()))
        attribute = d.CUfunction_attribute
        self.check(d.cuFuncSetAttribute(f, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared))
        if self.carveout:
            self.check(d.cuFuncSetAttribute(f, attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100))
        return f

    def launch(self, f: Any, grid: tuple[int, int, int], block: int, shared: int, args: Sequence[int], stream: int,
               pdl: bool) -> None:  # fmt: skip
        d = self.driver
        config = d.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.hStream = shared, stream
        if pdl:
            attribute = d.CUlaunchAttribute()
            attribute.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        self.check(d.cuLaunchKernelEx(config, f, (tuple(args), (ctypes.c_void_p,) * len(args)), 0))


def rendered(gpu: Gpu, op: Op, types: Types, rows: int, tuning: Tuning) -> tuple[Source, Geometry]:
    env = Env(rows=rows, logit_rows=rows, seqs=rows)
    types = (*types, *op.infer(types))
    if isinstance(op, RmsNormQuant):
        context = linear_cuda._quantize_context(op, types, env, tuning)
        source = gpu.renderer.render_template(
            "cuda/quantize.cu.j2", {"op": op, "types": types, "env": env, "t": tuning, **context}
        )
        return source, linear_cuda._quantize_geometry(op, types, env, tuning)
    context = linear_cuda.stream(op, types, env, tuning)
    source = gpu.renderer.render_template(
        "cuda/linear_stream.cu.j2", {"op": op, "types": types, "env": env, "t": tuning, **context}
    )
    return source, linear_cuda.stream_geometry(op, types, env, tuning)


def matrix(name: str, n: int, k: int) -> TensorType:
    return TensorType((n, k), F32, by_name(name))


ROW, NORM = TensorType((T, H)), TensorType((H,))


def chain_ops(mix: str, separate: bool) -> dict[str, tuple[Op, Types]]:
    q4, q5 = "q4_g64", "q4_g64" if mix == "q4" else "q5_g64"
    head = "q4_g64" if mix == "q4" else "q6_g64"
    ins = [matrix(q4, IN, H)] if mix == "q4" else [matrix(q4, 4096, H), matrix(q5, 12288, H)]
    gates = [matrix("bf16", 96, H)]
    act: Types = packed_types(T, H, 64) if separate else (ROW, NORM)
    how: dict[str, Any] = {"packed": 64} if separate else {"norm": True, "offset": 1.0}
    return {
        "in": (FusedLinear(**how), (*act, *ins, *gates)),
        "out": (FusedLinear(epilogue="add"), (TensorType((T, MIX)), matrix(q5, H, MIX), ROW)),
        "gate_up": (FusedLinear(epilogue="swiglu", quant=32, **how), (*act, matrix(q4, I, H), matrix(q4, I, H))),
        "down": (FusedLinear(packed=32, epilogue="add"), (*packed_types(T, I, 32), matrix(q5, H, I), ROW)),
        "head": (FusedLinear(**how), (*act, matrix(head, V, H))),
    }


# stages of `span` tiles; per: blocks per multiprocessor; resident: blocks whose registers must fit together
START: dict[str, dict[str, int]] = {
    "in": {"warps": 10, "stages": 4, "span": 1, "per": 1, "bulk": 1, "resident": 2},
    "out": {"warps": 8, "stages": 5, "span": 1, "per": 1, "bulk": 1, "resident": 2},
    "gate_up": {"warps": 10, "stages": 4, "span": 1, "per": 1, "bulk": 1, "resident": 2},
    "down": {"warps": 9, "stages": 4, "span": 1, "per": 1, "bulk": 1, "resident": 2},
    "head": {"warps": 10, "stages": 4, "span": 1, "per": 1, "bulk": 1, "resident": 2},
}
WARPS = {"in": (4, 5, 7, 10, 20), "out": (4, 6, 8, 12, 24), "gate_up": (4, 5, 7, 10, 20),
         "down": (4, 6, 8, 9, 10, 12, 17), "head": (4, 5, 10, 20)}  # fmt: skip


def neighbours(kernel: str, t: Mapping[str, int]) -> Iterable[dict[str, int]]:
    """Tunings that differ in one or two coordinates; bytes in flight matter more than stages, so others scale them."""
    for per in (1, 2, 3, 4):
        if per != t["per"]:
            yield {**t, "per": per}
            yield {**t, "per": per, "stages": max(2, round(t["stages"] * t["per"] / per))}
            yield {**t, "per": per, "warps": max(4, round(t["warps"] * t["per"] / per)), "resident": 2 * per}
    for w in WARPS[kernel]:
        if w != t["warps"]:
            yield {**t, "warps": w, "stages": max(2, round(t["stages"] * t["warps"] / w))}
            yield {**t, "warps": w}
    for s in (2, 3, 4, 5, 6, 8, 10, 12):
        if s != t["stages"]:
            yield {**t, "stages": s}
    for span in (1, 2, 4):
        if span != t["span"]:
            yield {**t, "span": span, "stages": max(2, round(t["stages"] * t["span"] / span))}
    for resident in (1, 2, 3, 4):
        if resident != t["resident"]:
            yield {**t, "resident": resident}
    yield {**t, "bulk": 1 - t["bulk"]}


def full(t: Mapping[str, int], units: int) -> dict[str, int]:
    return {**{k: v for k, v in t.items() if k != "per"}, "blocks": t["per"] * units, "limit": 227 // t["per"]}


def fitted(gpu: Gpu, op: Op, types: Types, rows: int, t: Mapping[str, int]) -> tuple[Source, Geometry]:
    """Raises ValueError where shared memory does not suffice."""
    source, g = rendered(gpu, op, types, rows, full(t, gpu.units))
    if g.shared > gpu.shared_limit:
        raise ValueError(f"{g.shared} bytes of shared memory")
    return source, g


class Chain:
    """Buffers of the model and the graph of one configuration."""

    def __init__(self, gpu: Gpu, mix: str, max_rows: int) -> None:
        cp = self.cp = gpu.cp
        self.gpu, self.mix = gpu, mix
        self.stream = cp.cuda.Stream(non_blocking=True)
        rng = cp.random.default_rng(1)
        self.x = [cp.asarray(rng.standard_normal((max_rows, H), dtype=cp.float32)) for _ in range(2)]
        self.norm = cp.full(H, 0.01, cp.float32)
        self.proj = cp.zeros((max_rows, IN + 96), cp.float32)
        self.gates = cp.zeros((max_rows, 96), cp.float32)
        self.mixed = cp.zeros((max_rows, MIX), cp.float32)
        self.codes = cp.zeros((max_rows, I), cp.int8)
        self.scales = cp.zeros((max_rows, I // 32), cp.float32)
        self.hcodes = cp.zeros((max_rows, H), cp.int8)
        self.hscales = cp.zeros((max_rows, H // 64), cp.float32)
        self.logits = cp.zeros((max_rows, V), cp.float32)
        self.header = cp.zeros(16, cp.int32)
        self.state = [cp.zeros((max_rows, 48, 128, 128), cp.float32) if i % 4 != 3 else None for i in range(LAYERS)]
        ops = chain_ops(mix, False)
        self.weights = {name: [[self.random(t) for t in types if t.fmt is not None]
                               for _ in range(1 if name == "head" else LAYERS)]
                        for name, (_, types) in ops.items()}  # fmt: skip
        self.weight_bytes = sum(w.nbytes for ws in self.weights.values() for layer in ws for w in layer)
        self.module_mixer()

    def random(self, t: TensorType) -> Any:
        """Random codes with tame scales."""
        assert t.fmt is not None
        n, k = (int(d) for d in t.shape)
        cp, layout = self.cp, layout_of(t.fmt)
        if not layout.tiled:
            x = cp.random.default_rng(2).standard_normal((n, k), dtype=cp.float32) * (1.0 / k**0.5)
            return (x.view(cp.uint32) >> 16).astype(cp.uint16)
        tiling = layout.tiling(k)
        raw = cp.arange(layout.nbytes((n, k)) // 4, dtype=cp.uint32)
        for factor, shift in ((0x9E3779B1, 15), (0x85EBCA6B, 13)):  # a hash of the index
            raw *= cp.uint32(factor)
            raw ^= raw >> cp.uint32(shift)
        tiles = raw.view(cp.uint8).reshape(-1, tiling.tile_bytes)
        d = tiling.planes["d"]
        scale = np.full(d.nbytes // 2, 0.3 / k**0.5 / 2 ** (tiling.bits - 4), np.float16).view(np.uint8)
        tiles[:, d.offset : d.offset + d.nbytes] = cp.asarray(scale)
        return raw

    def module_mixer(self) -> None:
        prelude = self.gpu.renderer.render_template("cuda/prelude.h.j2", {}).text
        cubin = self.gpu.pool.submit(compile_cubin, prelude + MIXER, self.gpu.arch).result()
        module = self.gpu.check(self.gpu.driver.cuModuleLoadData(cubin))
        self.mixer = self.gpu.function(module, "mixer", 0)
        self.mixer_small = self.gpu.function(module, "mixer_small", 0)
        self.read_all = self.gpu.function(module, "read_all", 0)

    def kernels(self, tunings: Mapping[str, Mapping[str, int]], rows: int, separate: bool) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, (op, types) in chain_ops(self.mix, separate).items():
            out[name] = fitted(self.gpu, op, types, rows, tunings[name])
        if separate:
            out["norm"] = rendered(self.gpu, RmsNormQuant(64, EPS, 1.0), (ROW, NORM), rows, {})
        self.gpu.load([(source, geometry.shared) for source, geometry in out.values()])
        return out

    def record(self, tunings: Mapping[str, Mapping[str, int]], rows: int, *, pdl: bool = True,
               separate: bool = False, only: str | None = None) -> Callable[[], None]:  # fmt: skip
        """Capture the step; the result launches it."""
        kernels = self.kernels(tunings, rows, separate)
        self.header[0] = rows
        self.cp.cuda.runtime.deviceSynchronize()
        s = self.stream
        s.begin_capture()
        try:
            self.enqueue(kernels, rows, pdl, separate, only)
        finally:
            graph = s.end_capture()
        graph.upload(s)
        return lambda: graph.launch(s)

    def enqueue(self, kernels: Mapping[str, Any], rows: int, pdl: bool, separate: bool, only: str | None) -> None:
        first = [True]
        ptr = self.stream.ptr

        def go(name: str, *arrays: Any) -> None:
            if only is not None and name not in (only, "norm" if separate else only):
                return
            source, g = kernels[name]
            args = [self.header.data.ptr, *(a.data.ptr for a in arrays)]
            self.gpu.launch(
                self.gpu.functions[source.entry], g.grid, g.block, g.shared, args, ptr, pdl and not first[0]
            )
            first[0] = False

        def normed(x: Any) -> tuple[Any, ...]:
            if not separate:
                return (x, self.norm)
            go("norm", x, self.norm, self.hcodes, self.hscales)
            return self.hcodes, self.hscales

        a, b = self.x
        for layer in range(LAYERS):
            w = {name: ws[layer] for name, ws in self.weights.items() if name != "head"}
            outs = [self.proj] * (len(w["in"]) - 1)
            go("in", *normed(a), *w["in"], *outs, self.gates)
            if only is None:
                args = [self.header.data.ptr, self.proj.data.ptr]
                state = self.state[layer]
                if state is not None:
                    self.gpu.launch(self.mixer, (8, 48, rows), 128, 0,
                                    [*args, state.data.ptr, self.mixed.data.ptr], ptr, pdl)  # fmt: skip
                else:
                    self.gpu.launch(self.mixer_small, (24, rows, 1), 256, 0,
                                    [*args, 0, self.mixed.data.ptr], ptr, pdl)  # fmt: skip
            go("out", self.mixed, *w["out"], a, b)
            go("gate_up", *normed(b), *w["gate_up"], self.codes, self.scales)
            go("down", self.codes, self.scales, *w["down"], b, a)
        go("head", *normed(a), *self.weights["head"][0], self.logits)

    def time(self, run: Callable[[], None], repeat: int = 7) -> tuple[float, float]:
        """Median milliseconds of a step and the spread of the middle half; steps follow each other as in decoding."""
        cp = self.cp
        for _ in range(2):
            run()
        events = [cp.cuda.Event() for _ in range(repeat + 1)]
        for e in events[:-1]:
            e.record(self.stream)
            run()
        events[-1].record(self.stream)
        events[-1].synchronize()
        ms = sorted(cp.cuda.get_elapsed_time(x, y) for x, y in itertools.pairwise(events))
        return statistics.median(ms), ms[-1 - len(ms) // 4] - ms[len(ms) // 4]

    def read_rate(self) -> float:
        """Bytes per second of a plain read of 8 GB."""
        cp = self.cp
        x = cp.arange(READ_WORDS, dtype=cp.uint32)
        cp.cuda.runtime.deviceSynchronize()
        n, nbytes, best = x.nbytes // 16, float(x.nbytes), 1e9
        kinds = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
        for per in (2, 4, 8):
            start, end = cp.cuda.Event(), cp.cuda.Event()
            for _ in range(4):
                start.record(self.stream)
                self.gpu.check(self.gpu.driver.cuLaunchKernel(
                    self.read_all, per * self.gpu.units, 1, 1, 512, 1, 1, 0, self.stream.ptr,
                    ((x.data.ptr, n, self.header.data.ptr), kinds), 0))  # fmt: skip
                end.record(self.stream)
                end.synchronize()
                best = min(best, cp.cuda.get_elapsed_time(start, end) / 1e3)
        return nbytes / best


def check(gpu: Gpu, chain: Chain) -> None:
    """The kernels against the ops' references, with both kinds of copies."""
    cp = gpu.cp
    rng = np.random.default_rng(0)
    todo: list[tuple[int, int, str, Op, Arrays, Source, Geometry]] = []
    for rows, bulk, fmt in itertools.product((1, 3, 8), (0, 1), ("q4_g64", "q5_g64", "q6_g64")):
        x = rng.standard_normal((rows, 2048)).astype(np.float32)
        w, n = rng.standard_normal((2, 320, 2048)).astype(np.float32), rng.standard_normal(2048).astype(np.float32)
        packed = [Packed(by_name(fmt), by_name(fmt).pack(m), m.shape) for m in w]
        small = Packed(by_name("bf16"), by_name("bf16").pack(w[0, :40]), (40, 2048))
        residual = rng.standard_normal((rows, 320)).astype(np.float32)
        cases: list[tuple[Op, Arrays]] = [
            (FusedLinear(norm=True, offset=1.0), (x, n, packed[0], packed[1], small)),
            (FusedLinear(norm=True, epilogue="swiglu", quant=32), (x, n, *packed)),
            (FusedLinear(packed=32, epilogue="add"), (*quantize(x, 32), packed[0], residual)),
            (RmsNormQuant(64), (x, n)),
        ]
        for op, arrays in cases:
            tuning = {"warps": 4, "stages": 3, "blocks": 7, "bulk": bulk}
            todo.append((rows, bulk, fmt, op, arrays,
                         *rendered(gpu, op, tuple(type_of(a) for a in arrays), rows, tuning)))  # fmt: skip
    gpu.load([(source, g.shared) for *_, source, g in todo])
    for rows, bulk, fmt, op, arrays, source, g in todo:
        want = [plain(y) for y in op.reference(arrays)]
        device = [cp.asarray(layout_of(a.format).repack(a.raw, a.shape)) if isinstance(a, Packed)
                  else cp.asarray(a) for a in arrays]  # fmt: skip
        outs = [cp.full(y.shape, 99, y.dtype) for y in want]
        chain.header[0] = rows
        cp.cuda.runtime.deviceSynchronize()
        gpu.launch(gpu.functions[source.entry], g.grid, g.block, g.shared,
                   [chain.header.data.ptr, *(a.data.ptr for a in device), *(a.data.ptr for a in outs)],
                   chain.stream.ptr, False)  # fmt: skip
        chain.stream.synchronize()
        got = [cp.asnumpy(o) for o in outs]
        if want[0].dtype == np.int8:
            got, want = [dequantize(*got)], [dequantize(*want)]
        errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, want, strict=True)]
        ok = all(e < 0.03 for e in errors)
        if not ok or (fmt == "q4_g64" and rows == 3):
            print(f"check rows {rows} bulk {bulk} {fmt} {op.key} {' '.join(f'{e:.1e}' for e in errors)}"
                  f" {'ok' if ok else 'WRONG'}", flush=True)  # fmt: skip


def prompt_kernels(gpu: Gpu, chain: Chain) -> None:
    """Times of what a chunk of a prompt needs: unpacking a matrix, the library's product, our own product."""
    from cupy_backends.cuda.libs import cublas

    cp, handle, one, zero = gpu.cp, cublas.create(), np.ones((), np.float32), np.zeros((), np.float32)
    cublas.setStream(handle, chain.stream.ptr)

    def seconds(run: Callable[[], None]) -> float:
        return chain.time(run, 7)[0] / 1e3

    for fmt, n, k in (("q4_g64", 2 * I, H), ("q5_g64", H, I), ("q4_k", H, I)):
        t = matrix(fmt, n, k)
        w = chain.random(t) if fmt != "q4_k" else cp.zeros(layout_of(by_name(fmt)).nbytes((n, k)), cp.uint8)
        line = [f"{fmt} {n}x{k}:"]
        for rows in (64, 512, 2048):
            x, y = cp.ones((rows, k), cp.float32), cp.zeros((rows, n), cp.float32)
            chain.header[0] = rows
            for kind, tuning in (("gemm", {}), *(("mma", {"warps": 4, "columns": c}) for c in (64, 128))):
                op: Op = Linear()
                types = (TensorType((T, k)), t, *op.infer((TensorType((T, k)), t)))
                env = Env(rows=rows, logit_rows=1, seqs=1)
                context = linear_cuda.gemm(op, types, env, tuning)
                space = cp.zeros(context["at"].end, cp.uint8)
                route = (
                    linear_cuda._gemm_route(Linear, True, False)
                    if kind == "gemm"
                    else linear_cuda._mma_route(Linear, True)
                )
                kernels = [(route.template, route.geometry)] + [
                    (s.template, s.geometry) for s in route.then if s.template
                ]
                found = []
                for template, geometry in kernels:
                    variables = {"op": op, "types": types, "env": env, "t": tuning, **context}
                    found.append((gpu.renderer.render_template(template, variables), geometry(op, types, env, tuning)))
                gpu.load([(s, g.shared) for s, g in found])
                cp.cuda.runtime.deviceSynchronize()
                pointers = [chain.header.data.ptr, x.data.ptr, w.data.ptr, y.data.ptr, space.data.ptr]
                for source, g in found:
                    took = seconds(lambda: gpu.launch(gpu.functions[source.entry], g.grid, g.block, g.shared, pointers,  # noqa: B023
                                                      chain.stream.ptr, False))  # fmt: skip
                    name = source.entry.split("_")[2]
                    if name == "dequantise" and rows == 2048:
                        line.append(f"unpack {took * 1e6:.0f} us {(w.nbytes + 2 * n * k) / took / 1e12:.2f} TB/s")
                    elif name == "convert" and kind == "gemm":
                        line.append(f"convert {rows} {took * 1e6:.0f} us")
                    elif name == "mma":
                        rate = 2 * rows * n * k / took / 1e12
                        line.append(f"mma {rows}/{tuning['columns']} {took * 1e6:.0f} us {rate:.0f} TF")
                if kind == "gemm":
                    a, b = space.data.ptr + context["a_offset"], space.data.ptr
                    took = seconds(lambda: cublas.gemmEx(handle, 1, 0, n, rows, k, one.ctypes.data, b, 14, k, a, 14, k,  # noqa: B023
                                                         zero.ctypes.data, y.data.ptr, 0, n, 68, -1))  # noqa: B023  # fmt: skip
                    line.append(f"library {rows} {took * 1e6:.0f} us {2 * rows * n * k / took / 1e12:.0f} TF")
        print("  ".join(line), flush=True)


def type_of(a: Array) -> TensorType:
    if isinstance(a, Packed):
        return TensorType(a.shape, F32, a.format)
    dtype = I8 if a.dtype == np.int8 else F32
    return TensorType((T, a.shape[1]) if a.ndim == 2 else a.shape, dtype)


def descend(chain: Chain, rows: int, tunings: dict[str, dict[str, int]], seconds: float, rate: float,
            separate: bool) -> tuple[dict[str, dict[str, int]], float]:  # fmt: skip
    """Coordinate descent over the kernels' tunings, timed in the whole chain."""
    deadline = time.perf_counter() + seconds
    best = {k: dict(v) for k, v in tunings.items()}
    best_ms, spread = chain.time(chain.record(best, rows, separate=separate))
    print(f"rows {rows} start {best_ms:.3f} ms +-{spread:.3f}", flush=True)
    seen = {json.dumps(best, sort_keys=True)}
    improved = True
    while improved and time.perf_counter() < deadline:
        improved = False
        for kernel in ("gate_up", "down", "in", "out", "head"):
            options = [t for t in neighbours(kernel, best[kernel])]
            usable = []
            for t in options:
                trial = {**best, kernel: t}
                key = json.dumps(trial, sort_keys=True)
                if key in seen:
                    continue
                seen.add(key)
                try:
                    op, types = chain_ops(chain.mix, separate)[kernel]
                    if 32 * t["warps"] * t["resident"] <= 2048 and t["warps"] <= 32:
                        source, g = fitted(chain.gpu, op, types, rows, t)
                        usable.append((t, trial, source, g.shared))
                except ValueError:
                    continue
            chain.gpu.load([(s, n) for _, _, s, n in usable])
            for t, trial, _, _ in usable:
                if time.perf_counter() > deadline:
                    break
                try:
                    run = chain.record(trial, rows, separate=separate)
                    ms, _ = chain.time(run, 5)
                except RuntimeError as error:
                    print(f"  {kernel} {t} failed: {error}", flush=True)
                    continue
                if ms < best_ms * 0.997:
                    ms, _ = chain.time(run, 9)
                if ms < best_ms * 0.998:
                    best, best_ms, improved = trial, ms, True
                    print(f"  {ms:.3f} ms {chain.weight_bytes / ms / 1e9 / rate * 1e12:6.1%} {kernel} {t}", flush=True)
    return best, best_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 2])
    parser.add_argument("--mix", choices=["q4", "q45"], default="q4", help="q45: v, z, out, down q5_g64, head q6_g64")
    parser.add_argument("--seconds", type=float, default=240, help="for the descents, shared among the row counts")
    parser.add_argument("--prompt", action="store_true", help="time the kernels of prompts as well")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--start", type=json.loads, default=START, help="tunings to start from, as printed")
    args = parser.parse_args()
    begin = time.perf_counter()
    gpu = Gpu(args.workers)
    chain = Chain(gpu, args.mix, max(args.rows))
    rate = chain.read_rate()
    floor, ready = chain.weight_bytes / rate * 1e3, time.perf_counter() - begin
    print(f"{gpu.name} {gpu.units} units, read {rate / 1e12:.3f} TB/s, weights {chain.weight_bytes / 1e9:.3f} GB,"
          f" floor {floor:.3f} ms, ready after {ready:.0f} s", flush=True)  # fmt: skip
    check(gpu, chain)
    if args.prompt:
        prompt_kernels(gpu, chain)
    base, table = args.start, []
    share = {rows: (2 if rows == 1 else 1) for rows in args.rows}
    for rows in args.rows:
        for separate in (False, True) if rows > 1 else (False,):
            try:
                ms, spread = chain.time(chain.record(base, rows, separate=separate))
            except (ValueError, RuntimeError) as error:
                print(f"rows {rows} separate {separate}: {error}", flush=True)
                continue
            print(f"rows {rows} separate norm {separate}: {ms:.3f} ms +-{spread:.3f}", flush=True)
        tunings, ms = descend(chain, rows, base, args.seconds * share[rows] / sum(share.values()), rate, False)
        if rows == 1:
            base = tunings
        moved = chain.weight_bytes + rows * 2 * sum(48 * 65536 for s in chain.state if s is not None)
        table.append((rows, ms, chain.weight_bytes / ms / 1e9, moved / ms / 1e9))
        print(json.dumps({"rows": rows, "ms": round(ms, 4), "mix": args.mix, "tunings": tunings}), flush=True)
        if rows == 1:
            plain, _ = chain.time(chain.record(base, 1, pdl=False))
            print(f"without dependent launch {plain:.3f} ms", flush=True)
            for name in START:
                alone, _ = chain.time(chain.record(base, 1, only=name))
                nbytes = sum(w.nbytes for layer in chain.weights[name] for w in layer)
                print(f"  {name:8} alone {alone:.3f} ms {nbytes / alone / 1e9:.2f} TB/s", flush=True)
    print(f"\nread {rate / 1e12:.3f} TB/s, {chain.weight_bytes / 1e9:.3f} GB of weights, mix {args.mix}")
    print("rows     ms   weights TB/s  share   with states   share   vs 1 row")
    one = next((ms for rows, ms, _, _ in table if rows == 1), float("nan"))
    for rows, ms, w, m in table:
        print(f"{rows:4} {ms:7.3f} {w:10.3f} {w * 1e12 / rate:9.1%} {m:10.3f} {m * 1e12 / rate:9.1%} {ms / one:8.3f}")


if __name__ == "__main__":
    main()
