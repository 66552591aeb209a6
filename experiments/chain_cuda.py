"""The decode step of a 27B model as a chain of kernels in one CUDA graph, on random weights: what do tunings give?

    python experiments/chain_cuda.py --rows 1 2 4 8 --seconds 300

No engine: only the templates, NVRTC and cupy. 64 layers of in projection, a stand-in for the delta rule that moves its
state and quantises, out projection, gate/up with SwiGLU, down; then the head. Tunings are found by coordinate descent
inside the chain, since alone a kernel prefers other grids than among its neighbours. Kernels are checked against the
references first, and the tunings that won against the ones begun with at the chain's own shapes: exit code 1 where one
is wrong. A JSON line per point, tables at the end.
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
from typing import Any, NamedTuple

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ninfer.devices.base import DeviceInfo, Source
from ninfer.formats.dtypes import F32, I8, f32_to_bf16
from ninfer.formats.quant import Packed, by_name
from ninfer.formats.tile import make_tile
from ninfer.ir.op import Op
from ninfer.ir.ops.linear import Linear
from ninfer.ir.ops.packed_act import FusedLinear, RmsNormQuant, dequantize, packed_types, quantize
from ninfer.ir.types import Array, Arrays, Env, T, TensorType, Types, plain
from ninfer.routes import linear_cuda
from ninfer.routes.cuda_layout import layout_of
from ninfer.routes.render import Renderer
from ninfer.routes.route import Tuning

H, I, V, IN, MIX = 5120, 17408, 248320, 16384, 6144
LAYERS = 64
READ_WORDS = 1 << 31
EPS = 1e-6

MIXER = r"""
// A stand-in for the gated delta rule: per (sequence, head, 16 of its 128 value rows) the state is read before the
// wait, updated with vectors of the projection, and written.
__device__ __forceinline__ f32 dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
__device__ __forceinline__ float4 scaled(float4 a, f32 f) { return make_float4(a.x * f, a.y * f, a.z * f, a.w * f); }
// The 32 values of y that a warp or a block has, as codes of one scale.
__device__ __forceinline__ void quantised(f32 y, i8* codes, f32* scale) {
    const f32 amax = warp_max(fabsf(y));
    codes[LANE] = (i8)__float2int_rn(amax > 0 ? y * (127.0f / amax) : 0.0f);
    if (LANE == 0) *scale = amax * (1.0f / 127.0f);
}
extern "C" __global__ void __launch_bounds__(256) mixer(
    const StepHeader* hdr, const f32* u, f32* state, i8* codes, f32* scales) {
    PDL_TRIGGER();
    __shared__ f32 ys[32];
    const int warp = WARP, lane = LANE, head = blockIdx.y, part = blockIdx.x, seq = blockIdx.z;
    float4* const s = (float4*)(state + ((u64)seq * 48 + head) * 16384 + part * 4096 + warp * 512) + lane;
    float4 r[4];
    for (int i = 0; i < 4; i++) r[i] = s[32 * i];
    PDL_WAIT();
    const f32* const row = u + (u64)seq * 16384;
    const float4 q = *(const float4*)(row + head / 3 * 128 + 4 * lane);
    const float4 k = *(const float4*)(row + 2048 + head / 3 * 128 + 4 * lane);
    const f32 norm = rsqrtf(warp_sum(dot(k, k)) + 1e-6f);
    const f32 decay = sigmoid(row[4096 + head] + 3.0f), beta = sigmoid(row[4200 + head]) * norm;
    for (int i = 0; i < 4; i++) {
        const int v = part * 32 + warp * 4 + i;
        r[i] = scaled(r[i], decay);
        const f32 delta = beta * (row[4096 + head * 128 + v] - norm * warp_sum(dot(r[i], k)));
        r[i].x += delta * k.x, r[i].y += delta * k.y, r[i].z += delta * k.z, r[i].w += delta * k.w;
        s[32 * i] = r[i];
        const f32 y = warp_sum(dot(r[i], q));
        if (lane == 0) ys[warp * 4 + i] = y * norm;
    }
    __syncthreads();
    const u64 at = (u64)seq * 6144 + head * 128 + part * 32;
    if (warp == 0) quantised(ys[lane], codes + at, scales + at / 32);
}
extern "C" __global__ void __launch_bounds__(256) mixer_small(
    const StepHeader* hdr, const f32* u, f32* state, i8* codes, f32* scales) {
    PDL_TRIGGER();
    PDL_WAIT();
    const int i = blockIdx.x * 256 + threadIdx.x;
    const f32* const row = u + (u64)blockIdx.y * 16384;
    const u64 at = (u64)blockIdx.y * 6144 + i / 32 * 32;
    quantised(row[i] * sigmoid(row[6144 + i]), codes + at, scales + at / 32);
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


class Kernel(NamedTuple):
    source: Source
    grid: tuple[int, int, int]
    block: int
    shared: int
    scratch: int  # bytes of the workspace that it takes as its last argument; 0: none


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
        self.modules: dict[str, Any] = {}
        self.carveout = True

    def check(self, result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"{result[0]}")
        return result[1] if len(result) == 2 else result[1:]

    def load(self, kernels: Iterable[Kernel]) -> None:
        """Compile what is new, in parallel."""
        new = {k.source.entry: k for k in kernels if k.source.entry not in self.functions}
        texts = ["\n".join([*k.source.headers, k.source.text]) for k in new.values()]
        cubins = self.pool.map(compile_cubin, texts, [self.arch] * len(texts))
        for (entry, kernel), cubin in zip(new.items(), cubins, strict=True):
            self.modules[entry] = self.check(self.driver.cuModuleLoadData(cubin))
            self.functions[entry] = self.function(self.modules[entry], entry, kernel.shared)

    def run(self, k: Kernel, args: Sequence[int], stream: int, pdl: bool) -> None:
        self.launch(self.functions[k.source.entry], k.grid, k.block, k.shared, args, stream, pdl)

    def stamps(self, k: Kernel) -> NDArray[np.uint64]:
        """[blocks, 5] of the last launch."""
        at, nbytes = self.check(self.driver.cuModuleGetGlobal(self.modules[k.source.entry],
                                                              f"{k.source.entry}_stamps".encode()))  # fmt: skip
        out = np.zeros(nbytes // 8, np.uint64)
        self.check(self.driver.cuMemcpyDtoH(out.ctypes.data, at, nbytes))
        return out.reshape(-1, 5)

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


def rendered(gpu: Gpu, op: Op, types: Types, rows: int, tuning: Tuning) -> Kernel:
    env = Env(rows=rows, logit_rows=rows, seqs=rows)
    types = (*types, *op.infer(types))
    if isinstance(op, RmsNormQuant):
        context, template = linear_cuda._quantize_context(op, types, env, tuning), "cuda/quantize.cu.j2"
        g, scratch = linear_cuda._quantize_geometry(op, types, env, tuning), 0
    else:
        context, template = linear_cuda.stream(op, types, env, tuning), "cuda/linear_stream.cu.j2"
        g, scratch = linear_cuda.stream_geometry(op, types, env, tuning), linear_cuda._cuts(op, types, env, tuning)
    source = gpu.renderer.render_template(template, {"op": op, "types": types, "env": env, "t": tuning, **context})
    return Kernel(source, g.grid, g.block, g.shared, scratch)


def matrix(name: str, n: int, k: int) -> TensorType:
    return TensorType((n, k), F32, by_name(name))


ROW, NORM = TensorType((T, H)), TensorType((H,))


MIXES: dict[str, tuple[str, str, str]] = {  # q k gate up; v z out down; head
    "q4": ("q4_g64", "q4_g64", "q4_g64"),
    "q45": ("q4_g64", "q5_g64", "q6_g64"),
    "t2": ("t2_g128", "t2_g128", "q4_g64"),
    "q4_k": ("q4_k", "q4_k", "q6_k"),
    "q4_0": ("q4_0", "q4_0", "q4_0"),
    "q8": ("q8_g32", "q8_g32", "q8_g32"),
    "iq3_s": ("iq3_s", "iq3_s", "iq3_s"),
    "fp8": ("fp8_e4m3fn_row_bf16", "fp8_e4m3fn_row_bf16", "fp8_e4m3fn_row_bf16"),
}
GROUP = 32  # values of a scale where codes pass
NAMES = ("in", "out", "gate_up", "down", "head")
NEXT = {"in": "out", "out": "gate_up", "gate_up": "down", "down": "in"}  # what is fetched ahead


def chain_ops(mix: str, norm: str) -> dict[str, tuple[Op, Types]]:
    """norm: where rows are normalised and quantised: by the "producer", the "consumer", or a kernel "between"."""
    q4, q5, head = MIXES[mix]
    ins = [matrix(q4, IN, H)] if q4 == q5 else [matrix(q4, 4096, H), matrix(q5, 12288, H)]
    gates = [matrix("bf16", 96, H)]
    codes, scales = packed_types(T, H, GROUP)
    act: Types
    if norm == "producer":
        act, how = (codes, scales, scales), FusedLinear(packed=GROUP, norm=True, eps=EPS)
    elif norm == "between":
        act, how = (codes, scales), FusedLinear(packed=GROUP)
    else:
        act, how = (ROW, NORM), FusedLinear(norm=True, offset=1.0, eps=EPS)
    add = FusedLinear(packed=GROUP, epilogue="add", weigh=GROUP if norm == "producer" else 0, offset=1.0)
    after: Types = (ROW, NORM) if norm == "producer" else (ROW,)
    ops: dict[str, tuple[Op, Types]] = {
        "in": (how, (*act, *ins, *gates)),
        "out": (add, (*packed_types(T, MIX, GROUP), matrix(q5, H, MIX), *after)),
        "gate_up": (evolve(how, epilogue="swiglu", quant=GROUP), (*act, matrix(q4, I, H), matrix(q4, I, H))),
        "down": (add, (*packed_types(T, I, GROUP), matrix(q5, H, I), *after)),
        "head": (how, (*act, matrix(head, V, H))),
    }
    if norm == "producer":
        single = dict(ops)
        for name, following in NEXT.items():
            op, types = single[name]
            then, more = single[following][0], tuple(t for t in single[following][1] if t.fmt and not t.fmt.dtype)
            assert isinstance(op, FusedLinear) and isinstance(then, FusedLinear)
            ops[name] = evolve(op, ahead=then, ahead_weights=len(more)), (*types, *more)
    return ops


# stages of `span` tiles; per: blocks per multiprocessor; resident: blocks whose registers must fit; late: ring fills
# still to come when the next kernel may start; split: parts of what equal shares leave
COMMON = {"stages": 4, "span": 1, "per": 1, "bulk": 1, "resident": 2, "late": 2, "split": 8, "ahead": 0}
START: dict[str, dict[str, int]] = {
    "in": {"warps": 10, **COMMON},
    "out": {"warps": 8, **COMMON},
    "gate_up": {"warps": 10, **COMMON},
    "down": {"warps": 9, **COMMON},
    "head": {"warps": 10, **COMMON},
}
LOOKUPS = {**COMMON, "stages": 3, "resident": 1, "grid": 64, "apart": 1}
STARTS = {"iq3_s": {k: {**LOOKUPS, "warps": w} for k, w in zip(NAMES, (20, 12, 20, 17, 20), strict=True)}, "fp8": START}
WARPS = {"in": (4, 5, 7, 10, 20), "out": (4, 6, 8, 12, 24), "gate_up": (4, 5, 7, 10, 20),
         "down": (4, 6, 8, 9, 10, 12, 17), "head": (4, 5, 10, 20)}  # fmt: skip
LATE = (-1, 0, 1, 2, 4, 8, 16)


def neighbours(kernel: str, t: Mapping[str, int]) -> Iterable[dict[str, int]]:
    """Tunings that differ in one or two coordinates; bytes in flight matter more than stages, so others scale them."""
    for late in LATE:
        if late != t["late"]:
            yield {**t, "late": late}
    for s in (2, 3, 4, 5, 6, 8, 10, 12):
        if s != t["stages"]:
            yield {**t, "stages": s}
            if t["late"] > 0:
                yield {**t, "stages": s, "late": max(1, round(t["late"] * s / t["stages"]))}
    for ahead in (0, 16, 32, 64, 96, 128, 192, 256):
        if ahead != t["ahead"]:
            yield {**t, "ahead": ahead}
    for split in (1, 2, 4, 8):
        if split != t["split"]:
            yield {**t, "split": split}
    for w in WARPS[kernel]:
        if w != t["warps"]:
            yield {**t, "warps": w, "stages": max(2, round(t["stages"] * t["warps"] / w))}
            yield {**t, "warps": w}
    for per in (1, 2, 3, 4):
        if per != t["per"]:
            yield {**t, "per": per, "stages": max(2, round(t["stages"] * t["per"] / per))}
            yield {**t, "per": per, "warps": max(4, round(t["warps"] * t["per"] / per)), "resident": 2 * per}
    for span in (1, 2, 4):
        if span != t["span"]:
            yield {**t, "span": span, "stages": max(2, round(t["stages"] * t["span"] / span))}
    for resident in (1, 2, 3, 4):
        if resident != t["resident"]:
            yield {**t, "resident": resident}
    yield {**t, "bulk": 1 - t["bulk"]}
    if "grid" in t:
        for grid in (8, 16, 32, 64):
            if grid != t["grid"]:
                yield {**t, "grid": grid}
                yield {**t, "grid": grid, "per": 2, "warps": t["warps"] // t["per"], "resident": 2}
        yield {**t, "apart": 1 - t["apart"]}


def full(t: Mapping[str, int], units: int) -> dict[str, int]:
    return {**{k: v for k, v in t.items() if k != "per"}, "blocks": t["per"] * units, "limit": 227 // t["per"]}


def fitted(gpu: Gpu, op: Op, types: Types, rows: int, t: Mapping[str, int]) -> Kernel:
    """Raises ValueError where shared memory does not suffice."""
    kernel = rendered(gpu, op, types, rows, full(t, gpu.units))
    if kernel.shared > gpu.shared_limit:
        raise ValueError(f"{kernel.shared} bytes of shared memory")
    return kernel


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
        self.mixed = cp.zeros((max_rows, MIX), cp.int8), cp.zeros((max_rows, MIX // GROUP), cp.float32)
        self.middle = cp.zeros((max_rows, I), cp.int8), cp.zeros((max_rows, I // GROUP), cp.float32)
        # codes, scales and sums of squares of each of the two rows
        self.handed = [(cp.asarray(rng.integers(-127, 128, (max_rows, H), cp.int32).astype(cp.int8)),
                        *(cp.full((max_rows, H // GROUP), 0.01 * f, cp.float32) for f in (1, 100 * GROUP)))
                       for _ in range(2)]  # fmt: skip
        self.logits = cp.zeros((max_rows, V), cp.float32)
        self.header = cp.zeros(16, cp.int32)
        self.state = [cp.zeros((max_rows, 48, 128, 128), cp.float32) if i % 4 != 3 else None for i in range(LAYERS)]
        ops = chain_ops(mix, "consumer")
        self.weights = {name: [[self.random(t) for t in types if t.fmt is not None]
                               for _ in range(1 if name == "head" else LAYERS)]
                        for name, (_, types) in ops.items()}  # fmt: skip
        self.weight_bytes = sum(w.nbytes for ws in self.weights.values() for layer in ws for w in layer)
        self.scratch = cp.zeros(1 << 22, cp.uint8)
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
        if tiling.code == "e4m3":
            raw &= cp.uint32(0xBFBFBFBF)  # no NaN
        tiles = raw.view(cp.uint8).reshape(-1, tiling.tile_bytes)
        value = 0.3 / k**0.5 / 2 ** (tiling.bits - 4) / (32 if tiling.d_kind == "sub" else 1)
        for plane, kind in (("d", tiling.d_kind), ("m", tiling.m_kind)):
            if kind:
                p, dtype = tiling.planes[plane], np.float32 if kind == "f32" else np.float16
                fill = np.full(p.nbytes // np.dtype(dtype).itemsize, value, dtype).view(np.uint8)
                if kind == "bf16":
                    fill = f32_to_bf16(np.full(p.nbytes // 2, value, np.float32)).view(np.uint8)
                tiles[:, p.offset : p.offset + p.nbytes] = cp.asarray(fill)
        return raw

    def module_mixer(self) -> None:
        prelude = self.gpu.renderer.render_template("cuda/prelude.h.j2", {}).text
        cubin = self.gpu.pool.submit(compile_cubin, prelude + MIXER, self.gpu.arch).result()
        module = self.gpu.check(self.gpu.driver.cuModuleLoadData(cubin))
        self.mixer = self.gpu.function(module, "mixer", 0)
        self.mixer_small = self.gpu.function(module, "mixer_small", 0)
        self.read_all = self.gpu.function(module, "read_all", 0)

    def kernels(self, tunings: Mapping[str, Mapping[str, int]], rows: int, norm: str) -> dict[str, Kernel]:
        out: dict[str, Kernel] = {}
        for name, (op, types) in chain_ops(self.mix, norm).items():
            out[name] = fitted(self.gpu, op, types, rows, tunings[name])
        if norm == "between":
            out["norm"] = rendered(self.gpu, RmsNormQuant(GROUP, EPS, 1.0), (ROW, NORM), rows, {})
        self.gpu.load(out.values())
        return out

    def record(self, tunings: Mapping[str, Mapping[str, int]], rows: int, *, pdl: bool = True,
               norm: str = "producer", only: str | None = None) -> Callable[[], None]:  # fmt: skip
        """Capture the step; the result launches it."""
        kernels = self.kernels(tunings, rows, norm)
        self.header[0] = rows
        self.cp.cuda.runtime.deviceSynchronize()
        s = self.stream
        s.begin_capture()
        try:
            self.enqueue(kernels, rows, pdl, norm, only)
        finally:
            graph = s.end_capture()
        graph.upload(s)
        return lambda: graph.launch(s)

    def enqueue(self, kernels: Mapping[str, Kernel], rows: int, pdl: bool, norm: str, only: str | None) -> None:
        first = [True]
        ptr = self.stream.ptr

        def go(name: str, *arrays: Any) -> None:
            if only is not None and name != only:
                return
            buffers = [self.header, *arrays, *([self.scratch] if kernels[name].scratch else [])]
            self.gpu.run(kernels[name], [a.data.ptr for a in buffers], ptr, pdl and not first[0])
            first[0] = False

        def normed(i: int) -> tuple[Any, ...]:
            if norm == "producer":
                return self.handed[i]
            if norm == "consumer":
                return (self.x[i], self.norm)
            go("norm", self.x[i], self.norm, *self.handed[i][:2])
            return self.handed[i][:2]

        def add(name: str, codes: tuple[Any, ...], w: Sequence[Any], i: int, ahead: Sequence[Any]) -> None:
            """Into row 1 - i."""
            if norm == "producer":
                go(name, *codes, *w, self.x[i], self.norm, *ahead, self.x[1 - i], *self.handed[1 - i])
            else:
                go(name, *codes, *w, self.x[i], self.x[1 - i])

        for layer in range(LAYERS):
            w = {name: ws[layer] for name, ws in self.weights.items() if name != "head"}
            following = self.weights["in"][(layer + 1) % LAYERS][:-1]
            ahead = {"in": w["out"], "out": w["gate_up"], "gate_up": w["down"], "down": following}
            if norm != "producer":
                ahead = {name: [] for name in ahead}
            outs = [self.proj] * (len(w["in"]) - 1)
            go("in", *normed(0), *w["in"], *ahead["in"], *outs, self.gates)
            if only is None:
                state = self.state[layer]
                args = [self.header.data.ptr, self.proj.data.ptr, 0 if state is None else state.data.ptr,
                        *(a.data.ptr for a in self.mixed)]  # fmt: skip
                if state is not None:
                    self.gpu.launch(self.mixer, (4, 48, rows), 256, 0, args, ptr, pdl)
                else:
                    self.gpu.launch(self.mixer_small, (24, rows, 1), 256, 0, args, ptr, pdl)
            add("out", self.mixed, w["out"], 0, ahead["out"])
            go("gate_up", *normed(1), *w["gate_up"], *ahead["gate_up"], *self.middle)
            add("down", self.middle, w["down"], 1, ahead["down"])
        go("head", *normed(0), *self.weights["head"][0], self.logits)

    def results(self, name: str, kernel: Kernel, rows: int) -> list[Any]:
        """What a kernel with the producer's norm computes at the chain's own shapes, from inputs of fixed seeds."""
        cp = self.cp
        op, types = chain_ops(self.mix, "producer")[name]
        inputs: list[Any] = []
        matrices = iter([*self.weights[name][0], *self.weights[NEXT.get(name, name)][0]])
        for i, t in enumerate(types):
            if t.fmt is not None:
                inputs.append(next(matrices))
                continue
            shape = t.concrete(Env(rows, rows, rows))
            rng = cp.random.default_rng(i)
            if t.dtype is I8:
                inputs.append(rng.integers(-127, 128, shape, cp.int32).astype(cp.int8))
            else:
                inputs.append(rng.random(shape, dtype=cp.float32) * 0.02 + 0.01)
        outs = [cp.full(t.concrete(Env(rows, rows, rows)), 77, t.dtype.numpy) for t in op.infer(types)]
        self.header[0] = rows
        self.cp.cuda.runtime.deviceSynchronize()
        args = [self.header, *inputs, *outs, *([self.scratch] if kernel.scratch else [])]
        self.gpu.run(kernel, [a.data.ptr for a in args], self.stream.ptr, False)
        self.stream.synchronize()
        if len(outs) >= 2 and outs[0].dtype == cp.int8:
            return [outs[0].reshape(*outs[1].shape, -1) * outs[1][:, :, None]]
        if len(outs) == 4:
            return [outs[0], outs[1].reshape(*outs[2].shape, -1) * outs[2][:, :, None], outs[3]]
        return outs

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


CHECKED = ("q4_g64", "q5_g64", "q6_g64", "t2_g128", "q8_g32", "q4_0", "q8_0", "q4_k", "q5_k", "q6_k")


def check(gpu: Gpu, chain: Chain, formats: Sequence[str], tuning: Mapping[str, int]) -> list[str]:
    """The kernels against the ops' references. tuning: beside the plainest. Returns what is wrong."""
    cp = gpu.cp
    rng = np.random.default_rng(0)
    todo: list[tuple[str, Op, Arrays, Kernel]] = []
    for rows, fmt in itertools.product((1, 3, 8), formats):
        x = rng.standard_normal((rows, 2048)).astype(np.float32)
        w, n = rng.standard_normal((2, 320, 2048)).astype(np.float32), rng.standard_normal(2048).astype(np.float32)
        packed = [Packed(by_name(fmt), by_name(fmt).pack(m), m.shape) for m in w if by_name(fmt).can_pack]
        packed = packed or [make_tile(by_name(fmt), 320, 2048)] * 2
        small = Packed(by_name("bf16"), by_name("bf16").pack(w[0, :40]), (40, 2048))
        residual, after = rng.standard_normal((rows, 320)).astype(np.float32), n[:320]
        codes, squares = quantize(x, GROUP), np.square(x).reshape(rows, -1, GROUP).sum(axis=2)
        late = FusedLinear(norm=True, packed=GROUP)
        cases: list[tuple[Op, Arrays]] = [
            (FusedLinear(norm=True, offset=1.0), (x, n, packed[0], packed[1], small)),
            (late, (*codes, squares, packed[0], packed[1], small)),
            (evolve(late, epilogue="swiglu", quant=GROUP), (*codes, squares, *packed)),
            (FusedLinear(packed=GROUP, epilogue="add"), (*codes, packed[0], residual)),
            (FusedLinear(packed=GROUP, epilogue="add", weigh=GROUP), (*codes, packed[0], residual, after)),
            (RmsNormQuant(64), (x, n)),
        ]
        for (op, arrays), bulk in itertools.product(cases, (0, 1)):
            basic = {"warps": 4, "stages": 3, "blocks": 7, "bulk": bulk, "late": 2 * bulk, "split": 8}
            types = tuple(type_of(a) for a in arrays)
            for t in (basic, {**basic, **tuning}) if bulk and tuning else (basic,):
                todo.append((f"rows {rows} bulk {bulk} {fmt} {t}", op, arrays, rendered(gpu, op, types, rows, t)))
    gpu.load([k for *_, k in todo])
    wrong, worst = list[str](), 0.0
    for what, op, arrays, kernel in todo:
        want = [plain(y) for y in op.reference(arrays)]
        device = [cp.asarray(layout_of(a.format).repack(a.raw, a.shape)) if isinstance(a, Packed)
                  else cp.asarray(a) for a in arrays]  # fmt: skip
        outs = [cp.full(y.shape, 99, y.dtype) for y in want]
        chain.header[0] = len(want[0])
        cp.cuda.runtime.deviceSynchronize()
        buffers = [chain.header, *device, *outs, *([chain.scratch] if kernel.scratch else [])]
        gpu.run(kernel, [a.data.ptr for a in buffers], chain.stream.ptr, False)
        chain.stream.synchronize()
        got = [cp.asnumpy(o) for o in outs]
        for ys in (got, want):
            at = next((i for i, y in enumerate(want) if y.dtype == np.int8), None)
            if at is not None:
                ys[at : at + 2] = [dequantize(*ys[at : at + 2])]
        errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, want, strict=True)]
        worst = max(worst, *errors)
        if not all(e < 0.03 for e in errors):
            wrong.append(f"{what} {op}: {' '.join(f'{e:.1e}' for e in errors)}")
    print(f"{len(todo)} checks, worst relative L2 {worst:.1e}, {len(wrong)} wrong", *wrong, sep="\n  ", flush=True)
    return wrong


def agree(chain: Chain, rows: int, tunings: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Compare the tuned kernels with plain ones (no cuts, one chunk at a time) at the chain's shapes."""
    wrong = []
    for name, (op, types) in chain_ops(chain.mix, "producer").items():
        kernels = []
        for t in (tunings[name], {**START[name], "stages": 2, "late": -1, "split": 1, "bulk": 0}):
            kernels.append(fitted(chain.gpu, op, types, rows, t))
        chain.gpu.load(kernels)
        for a, b in zip(*(chain.results(name, k, rows) for k in kernels), strict=True):
            error = float(chain.cp.linalg.norm(a - b) / chain.cp.linalg.norm(b))
            if not error < 2e-3:  # a code may fall to the neighbour; the sums' orders differ
                wrong.append(f"{name} at {rows} rows with {tunings[name]}: {error:.1e}")
    print(f"rows {rows}: tuned kernels {'agree' if not wrong else 'DISAGREE'}", *wrong, sep="\n  ", flush=True)
    return wrong


def phases(chain: Chain, rows: int, tunings: Mapping[str, Mapping[str, int]]) -> None:
    """When the kernels of the last layer begin, wait, have their activations and end: microseconds."""
    marked = {k: {**t, "stamps": 1} for k, t in tunings.items()}
    run = chain.record(marked, rows)
    for _ in range(3):
        run()
    chain.stream.synchronize()
    kernels, before = chain.kernels(marked, rows, "producer"), None
    print("phases, us: first and last block begin | wait over | activations there | next may start, first and last |"
          " first and last end | since the end before: wait over, first sums", flush=True)  # fmt: skip
    for name in NAMES:
        s = chain.gpu.stamps(kernels[name]).astype(np.int64)
        if before is None:
            zero = before = int(s[:, 0].min())
        us = (s - zero) / 1e3
        gap = (before - zero) / 1e3
        lets = us[:, 4] if s[:, 4].min() > 0 else us[:, 0]
        print(f"  {name:8} {us[:, 0].min():8.2f} {us[:, 0].max():8.2f} | {np.median(us[:, 1]):8.2f} |"
              f" {np.median(us[:, 2]):8.2f} | {lets.min():8.2f} {lets.max():8.2f} |"
              f" {us[:, 3].min():8.2f} {us[:, 3].max():8.2f} |"
              f" {np.median(us[:, 1]) - gap:6.2f} {np.median(us[:, 2]) - gap:6.2f}", flush=True)  # fmt: skip
        before = int(s[:, 3].max())


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
                    g = geometry(op, types, env, tuning)
                    source = gpu.renderer.render_template(template, variables)
                    found.append(Kernel(source, g.grid, g.block, g.shared, 0))
                gpu.load(found)
                cp.cuda.runtime.deviceSynchronize()
                pointers = [chain.header.data.ptr, x.data.ptr, w.data.ptr, y.data.ptr, space.data.ptr]
                for kernel in found:
                    took = seconds(lambda: gpu.run(kernel, pointers, chain.stream.ptr, False))  # noqa: B023
                    name = kernel.source.entry.split("_")[2]
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


# What differs from START in all kernels, and where rows are normalised.
VARIANTS: tuple[tuple[str, dict[str, int]], ...] = (
    ("consumer", {"late": -1, "split": 1}),
    ("between", {"late": -1}),
    ("producer", {"late": -1}),
    ("producer", {"late": -1, "ahead": 32}),
    ("producer", {"late": -1, "ahead": 64}),
    ("producer", {"late": -1, "ahead": 128}),
    ("producer", {"late": -1, "ahead": 256}),
    ("producer", {"late": -1, "ahead": 128, "split": 1}),
    ("producer", {"late": -1, "ahead": 128, "stages": 3}),
    ("producer", {"late": -1, "ahead": 128, "stages": 6}),
    ("producer", {"late": -1, "ahead": 128, "stages": 8}),
    ("producer", {"late": -1, "ahead": 192, "stages": 8}),
    ("producer", {"late": 0, "ahead": 128}),
    ("producer", {"late": 2, "ahead": 64}),
    ("producer", {"late": 4, "ahead": 128, "stages": 6}),
    ("producer", {"late": 0, "ahead": 128, "stages": 6}),
    ("producer", {"late": -1, "ahead": 128, "per": 2, "stages": 4}),
    ("producer", {"late": -1, "ahead": 64, "per": 2, "stages": 4}),
    ("producer", {"late": -1, "ahead": 64, "per": 2, "stages": 2, "resident": 4}),
    ("producer", {"late": -1, "ahead": 128, "bulk": 0}),
)
FOUND: dict[str, dict[str, int]] = {  # by descent at one row, without anything fetched ahead
    "in": {**COMMON, "warps": 5, "stages": 8, "per": 2},
    "out": {**COMMON, "warps": 8, "stages": 2, "span": 2, "per": 2, "split": 4},
    "gate_up": {**COMMON, "warps": 10, "stages": 6, "per": 4, "late": 6},
    "down": {**COMMON, "warps": 10, "stages": 4, "per": 2, "late": -1},
    "head": {**COMMON, "warps": 10, "per": 2},
}


def variants(chain: Chain, rows: int) -> tuple[str, dict[str, dict[str, int]]]:
    """Time VARIANTS; the best of the producer's."""
    best, best_ms, base = {k: dict(v) for k, v in START.items()}, float("inf"), float("nan")
    tried = [(norm, change, {k: {**t, **change} for k, t in START.items()}) for norm, change in VARIANTS]
    more: tuple[dict[str, int], ...] = ({}, {"ahead": 32}, {"ahead": 64}, {"ahead": 128}, {"ahead": 64, "late": -1})
    tried += [("producer", {"found": 1, **m}, {k: {**t, **m} for k, t in FOUND.items()}) for m in more]
    for norm, change, tunings in tried:
        try:
            ms, spread = chain.time(chain.record(tunings, rows, norm=norm))
        except (ValueError, RuntimeError) as error:
            print(f"  {norm:8} {change}: {error}", flush=True)
            continue
        base = ms if base != base else base
        print(f"  rows {rows} {ms:7.3f} ms +-{spread:.3f}  {ms / base:6.3f}  norm in {norm}, {change}", flush=True)
        if norm == "producer" and ms < best_ms:
            best, best_ms = tunings, ms
    return "producer", best


class Ranking:
    """Per kernel, the tunings tried in the chain with its best milliseconds."""

    def __init__(self) -> None:
        self.tried: dict[str, list[tuple[float, dict[str, int]]]] = {name: [] for name in NAMES}

    def show(self, rows: int, count: int = 4) -> None:
        for name, tried in self.tried.items():
            for ms, t in sorted(tried, key=lambda x: x[0])[:count]:
                print(f"  rows {rows} {name:8} {ms:.3f} ms {json.dumps(t)}")


def descend(chain: Chain, rows: int, tunings: dict[str, dict[str, int]], seconds: float, rate: float,
            ranking: Ranking) -> tuple[dict[str, dict[str, int]], float]:  # fmt: skip
    """Coordinate descent over the kernels' tunings, timed in the whole chain."""
    deadline = time.perf_counter() + seconds
    best = {k: dict(v) for k, v in tunings.items()}
    best_ms, spread = chain.time(chain.record(best, rows))
    print(f"rows {rows} start {best_ms:.3f} ms +-{spread:.3f}", flush=True)
    seen, count = {json.dumps(best, sort_keys=True)}, 0
    improved = True
    while improved and time.perf_counter() < deadline:
        improved = False
        for kernel in ("gate_up", "down", "in", "out", "head"):
            usable = []
            op, types = chain_ops(chain.mix, "producer")[kernel]
            for t in neighbours(kernel, best[kernel]):
                trial = {**best, kernel: t}
                key = json.dumps(trial, sort_keys=True)
                if key in seen or 32 * t["warps"] * t["resident"] > 2048 or t["warps"] > 32:
                    continue
                seen.add(key)
                try:
                    usable.append((t, fitted(chain.gpu, op, types, rows, t)))
                except ValueError:
                    continue
            chain.gpu.load([k for _, k in usable])
            for t, _ in usable:
                if time.perf_counter() > deadline:
                    break
                trial = {**best, kernel: t}
                try:
                    run = chain.record(trial, rows)
                    ms, _ = chain.time(run, 5)
                except RuntimeError as error:
                    print(f"  {kernel} {t} failed: {error}", flush=True)
                    continue
                count += 1
                if ms < best_ms * 0.997:
                    ms, _ = chain.time(run, 9)
                ranking.tried[kernel].append((ms, t))
                if ms < best_ms * 0.998:
                    best, best_ms, improved = trial, ms, True
                    print(f"  {ms:.3f} ms {chain.weight_bytes / ms / 1e9 / rate * 1e12:6.1%} {kernel} {t}", flush=True)
    print(f"rows {rows}: {count} trials", flush=True)
    return best, best_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 2])
    parser.add_argument("--mix", choices=list(MIXES), default="q4", help="q45: v, z, out, down q5_g64, head q6_g64")
    parser.add_argument("--seconds", type=float, default=240, help="for the descents, shared among the row counts")
    parser.add_argument("--prompt", action="store_true", help="time the kernels of prompts as well")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--start", type=json.loads, default=None, help="tunings to start from, as printed")
    args = parser.parse_args()
    begin = time.perf_counter()
    gpu = Gpu(args.workers)
    chain = Chain(gpu, args.mix, max(args.rows))
    rate = chain.read_rate()
    floor, ready = chain.weight_bytes / rate * 1e3, time.perf_counter() - begin
    print(f"{gpu.name} {gpu.units} units, read {rate / 1e12:.3f} TB/s, weights {chain.weight_bytes / 1e9:.3f} GB,"
          f" floor {floor:.3f} ms, ready after {ready:.0f} s", flush=True)  # fmt: skip
    start = args.start or STARTS.get(args.mix)
    tuning = {k: start["in"][k] for k in ("grid", "apart") if k in start["in"]} if start else {}
    wrong = check(gpu, chain, tuple(dict.fromkeys(MIXES[args.mix])) if args.mix in STARTS else CHECKED, tuning)
    print(f"checked after {time.perf_counter() - begin:.0f} s", flush=True)
    if args.prompt:
        prompt_kernels(gpu, chain)
    base, table = start, []
    share = {rows: (2 if rows == 1 else 1) for rows in args.rows}
    for rows in args.rows:
        if base is None or rows > 1:
            _, found = variants(chain, rows)
            base = base or found
        start = found if base is None or (rows > 1 and args.start is None) else base
        ranking = Ranking()
        tunings, ms = descend(chain, rows, start, args.seconds * share[rows] / sum(share.values()), rate, ranking)
        wrong += agree(chain, rows, tunings)
        ranking.show(rows)
        phases(chain, rows, tunings)
        moved = chain.weight_bytes + rows * 2 * sum(48 * 65536 for s in chain.state if s is not None)
        table.append((rows, ms, chain.weight_bytes / ms / 1e9, moved / ms / 1e9))
        print(json.dumps({"rows": rows, "ms": round(ms, 4), "mix": args.mix, "tunings": tunings}), flush=True)
        if rows == 1:
            plain, _ = chain.time(chain.record(tunings, 1, pdl=False))
            print(f"without dependent launch {plain:.3f} ms", flush=True)
        for name in NAMES:
            alone, _ = chain.time(chain.record(tunings, rows, only=name))
            nbytes = sum(w.nbytes for layer in chain.weights[name] for w in layer)
            print(f"  rows {rows} {name:8} alone {alone:.3f} ms {nbytes / alone / 1e9:.2f} TB/s", flush=True)
    print(f"\nread {rate / 1e12:.3f} TB/s, {chain.weight_bytes / 1e9:.3f} GB of weights, mix {args.mix}")
    print("rows     ms   weights TB/s  share   with states   share   vs 1 row")
    one = next((ms for rows, ms, _, _ in table if rows == 1), float("nan"))
    for rows, ms, w, m in table:
        print(f"{rows:4} {ms:7.3f} {w:10.3f} {w * 1e12 / rate:9.1%} {m:10.3f} {m * 1e12 / rate:9.1%} {ms / one:8.3f}")
    if wrong:
        sys.exit(f"{len(wrong)} results are wrong")


if __name__ == "__main__":
    main()
