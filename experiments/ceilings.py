"""What this GPU can do at most: read bandwidth, copy bandwidth, library GEMM rates, the price of a kernel boundary.

    python experiments/ceilings.py [--json FILE] [--device N] [--seconds S]

A median of repeats after a warm-up, with the spread. Every speed in docs/performance.md stands beside one of these.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ninfer.devices.base import Geometry, Source
from ninfer.devices.cuda import CudaDevice, Region, cuda_info, libraries
from ninfer.devices.nvrtc import CubinCache
from ninfer.devices.plan import Launch, Plan
from ninfer.ir.ops.norm import RmsNorm
from ninfer.ir.types import Env
from ninfer.routes.cuda_layout import device_layout
from ninfer.routes.profile import cache_dir

READ = """
typedef unsigned long long u64;
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* x, unsigned* out, const u64* words) {
    const u64 n = *words, stride = (u64)gridDim.x * 512;
    unsigned sum = 0;
    u64 i = (u64)blockIdx.x * 512 + threadIdx.x;
    for (; i + 7 * stride < n; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++)  // volatile: all eight are in flight before the first is used
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w) : "l"(x + i + j * stride));
#pragma unroll
        for (int j = 0; j < 8; j++) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < n; i += stride) sum ^= x[i].x;
    if (sum == 0x12345678u) *out = sum;  // never, but the compiler cannot know
}
"""
COPY = """
typedef unsigned long long u64;
extern "C" __global__ void __launch_bounds__(512) copy_all(const uint4* x, uint4* out, const u64* words) {
    const u64 n = *words, stride = (u64)gridDim.x * 512;
    u64 i = (u64)blockIdx.x * 512 + threadIdx.x;
    for (; i + 3 * stride < n; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = __ldcs(x + i + j * stride);
#pragma unroll
        for (int j = 0; j < 4; j++) __stcs(out + i + j * stride, v[j]);
    }
    for (; i < n; i += stride) out[i] = x[i];
}
"""
NOTHING = """
extern "C" __global__ void __launch_bounds__(128) nothing(int* x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
"""


def open_gpu(index: int) -> CudaDevice:
    libs = libraries()
    info = cuda_info(libs, index)
    return CudaDevice(libs, info, CubinCache(cache_dir() / "programs", info.arch), device_layout, index)


class Timer:
    """Medians of repeats on the device's clock."""

    def __init__(self, device: CudaDevice, seconds: float) -> None:
        self.device, self.seconds = device, seconds

    def __call__(self, call: Callable[[], None]) -> tuple[float, float]:
        """Seconds of one call, and the spread (80 % of the repeats) as a share of it."""
        cuda, stream = self.device.cupy.cuda, self.device.stream
        for _ in range(3):
            call()
        stream.synchronize()
        times: list[float] = []
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end or len(times) < 7:
            a, b = cuda.Event(), cuda.Event()
            a.record(stream)
            call()
            b.record(stream)
            b.synchronize()
            times.append(float(cuda.get_elapsed_time(a, b)) / 1e3)
        times.sort()
        median = statistics.median(times)
        return median, (times[int(len(times) * 0.9)] - times[int(len(times) * 0.1)]) / median


def kernel(
    device: CudaDevice, entry: str, text: str, blocks: int, block: int, pointers: list[int]
) -> Callable[[], None]:
    source = Source(entry, text)
    launch = Launch(RmsNorm(), "", source, None, Geometry((blocks, 1, 1), block), (), (), 0, None)
    device.compile([Plan(Env(1, 1, 1), (launch,), 0, 0, {})])
    return device.kernel(launch, pointers, dependent=True)


def bandwidth(device: CudaDevice, timer: Timer) -> dict[str, Any]:
    """Read-only and copy rates over more than the caches hold, each at its best grid."""
    free, _ = device.cupy.cuda.runtime.memGetInfo()
    nbytes = min(8 << 30, int(free) // 3) // 4096 * 4096
    x, y = Region(device.cupy, nbytes), Region(device.cupy, nbytes)
    words = Region(device.cupy, 256)
    device.cupy.cuda.runtime.memset(x.pointer, 1, nbytes)
    count = np.array([nbytes // 16], np.uint64)
    device.copy_in(words.pointer, count)
    device.cupy.cuda.runtime.deviceSynchronize()
    results: dict[str, Any] = {"bytes": nbytes}
    for name, entry, text, factor in (("read", "read_all", READ, 1), ("copy", "copy_all", COPY, 2)):
        best = (0.0, 0.0, 0)
        for per_unit in (1, 2, 4, 8):
            call = kernel(device, entry, text, per_unit * device.info.units, 512, [x.pointer, y.pointer, words.pointer])
            seconds, spread = timer(call)
            best = max(best, (factor * nbytes / seconds / 1e12, spread, per_unit))
        results[f"{name}_tb_per_s"], results[f"{name}_spread"] = round(best[0], 3), round(best[1], 4)
        results[f"{name}_blocks_per_unit"] = best[2]
    for region in (x, y, words):
        region.free()
    return results


KINDS = {"bf16": (14, 0, 68, 2, 4), "f16": (2, 0, 68, 2, 4), "int8": (3, 10, 72, 1, 4)}  # in, out, compute, bytes
SHAPES = ((512, 34816, 5120), (2048, 34816, 5120), (2048, 5120, 17408), (2048, 16384, 5120), (8192, 8192, 8192))


def gemm(device: CudaDevice, timer: Timer) -> list[dict[str, Any]]:
    """Library products c[m, n] = a[m, k] b[n, k]^T of random values."""
    blas = device._cublas()
    rng, results = np.random.default_rng(0), []
    for kind, (code_in, code_out, compute, size_in, size_out) in KINDS.items():
        for m, n, k in SHAPES:
            a, b = Region(device.cupy, m * k * size_in), Region(device.cupy, n * k * size_in)
            c = Region(device.cupy, m * n * size_out)
            _fill(device, rng, kind, (a, m * k), (b, n * k))
            one, zero = (np.ones((), np.int32 if kind == "int8" else np.float32) * s for s in (1, 0))
            one, zero = np.ascontiguousarray(one), np.ascontiguousarray(zero)

            def call(a=a, b=b, c=c, m=m, n=n, k=k, one=one, zero=zero, x=code_in, y=code_out, z=compute) -> None:  # type: ignore[no-untyped-def]
                blas.gemmEx(device._blas, 1, 0, n, m, k, one.ctypes.data, b.pointer, x, k, a.pointer, x, k,
                            zero.ctypes.data, c.pointer, y, n, z, -1)  # fmt: skip

            try:
                seconds, spread = timer(call)
                rate = 2 * m * n * k / seconds / 1e12
                results.append(
                    {"kind": kind, "m": m, "n": n, "k": k, "t_per_s": round(rate, 1), "spread": round(spread, 3)}
                )
            except Exception as error:
                results.append({"kind": kind, "m": m, "n": n, "k": k, "error": str(error)[:100]})
            for region in (a, b, c):
                region.free()
    return results


def _fill(device: CudaDevice, rng: np.random.Generator, kind: str, *operands: tuple[Region, int]) -> None:
    """Values of a normal distribution: zeros would draw less power and run too fast."""
    for region, count in operands:
        part = rng.standard_normal(1 << 20).astype(np.float32)
        if kind == "int8":
            raw = np.clip(np.rint(part * 30), -127, 127).astype(np.int8).view(np.uint8)
        elif kind == "f16":
            raw = part.astype(np.float16).view(np.uint8)
        else:
            raw = (part.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        size = raw.nbytes * count // (1 << 20)
        for at in range(0, size, raw.nbytes):
            n = min(raw.nbytes, size - at)
            device.copy_in(region.pointer + at, raw[:n])


def boundaries(device: CudaDevice, timer: Timer) -> dict[str, float]:
    """Microseconds of an empty kernel in a captured chain of 1,000, without and with dependent launch."""
    x = Region(device.cupy, 256)
    results = {}
    for name, dependent in (("kernel_us", False), ("dependent_kernel_us", True)):
        allowed, device.dependent_launch = device.dependent_launch, dependent and device.dependent_launch
        call = kernel(device, "nothing", NOTHING, device.info.units, 128, [x.pointer])
        device.dependent_launch = allowed
        device.stream.begin_capture()
        for _ in range(1000):
            call()
        graph = device.stream.end_capture()
        seconds, _ = timer(lambda graph=graph: graph.launch(device.stream))  # type: ignore[misc]
        results[name] = round(seconds * 1e3, 3)
    x.free()
    return results


def measure(device: CudaDevice, seconds: float = 0.3) -> dict[str, Any]:
    timer = Timer(device, seconds)
    return {"bandwidth": bandwidth(device, timer), "boundaries": boundaries(device, timer), "gemm": gemm(device, timer)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each point")
    args = parser.parse_args()
    device = open_gpu(args.device)
    driver = device.cupy.cuda.runtime.driverGetVersion()
    results = {"device": device.info.name, "arch": device.info.arch, "units": device.info.units, "driver": driver}
    results |= measure(device, args.seconds)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    b = results["bandwidth"]
    print(f"{device.info.name}, {device.info.units} multiprocessors, driver {driver}")
    print(f"  read  {b['read_tb_per_s']:6.2f} TB/s   copy {b['copy_tb_per_s']:6.2f} TB/s (read and written)")
    print("  " + "   ".join(f"{k} {v}" for k, v in results["boundaries"].items()))
    for p in results["gemm"]:
        rate = p.get("t_per_s", p.get("error"))
        print(f"  {p['kind']:5} {p['m']:>5} x {p['n']:>5} x {p['k']:>5}   {rate} T/s")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
