"""A GPU through cupy: one region each for weights, states and activations, and a plan as one captured graph.

A step is: fill the pinned record, launch the graph, wait, read the pinned results. The graph begins with the copy of
the record and ends with the copy of the results, and its kernels follow each other by programmatic dependent launch
where the card has it, so a step costs the host no work per kernel. Plans with library calls are launched one by one.
Modules are loaded and shared memory is granted before anything is captured.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ninfer.devices.base import DeviceInfo, noise
from ninfer.devices.nvrtc import CubinCache
from ninfer.devices.nvrtc import version as nvrtc_version
from ninfer.devices.plan import BufferRef, Launch, Place, Plan
from ninfer.devices.synthetic import Synthetic
from ninfer.errors import DeviceError
from ninfer.formats.bits import U8Array
from ninfer.formats.quant import Packed, QuantFormat
from ninfer.ir.step import HEADER, HEADER_FIELD, STEP_FIELDS
from ninfer.ir.types import Array, Env, Sym, TensorType

ALIGN = 256
STAGE_BYTES = 64 << 20
STAGED_BYTES = 8 << 20  # of a row that is copied on the device before it goes to the host
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3

# By library routine: the operands' type, the arithmetic (68: 32-bit floats, 72: 32-bit integers), that of its factors.
GEMMS: Mapping[str, tuple[int, int, type[np.generic]]] = {
    "gemm_bf16": (14, 68, np.float32),
    "gemm_f16": (2, 68, np.float32),
    "gemm_s8": (3, 72, np.int32),
}

# By format: bytes as stored and shape -> bytes as kernels read them.
Layout = Callable[[QuantFormat], Callable[[U8Array, Sequence[int]], U8Array]]
Weight = Array | Synthetic


@frozen
class Libraries:
    """cupy and the driver's bindings: all that this module knows of a GPU."""

    cupy: Any
    driver: Any


def libraries() -> Libraries:
    """Raises DeviceError naming what to install."""
    try:
        import cupy  # type: ignore[import-untyped, import-not-found, unused-ignore]
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            f"--device cuda needs cupy and cuda-bindings ({error}): pip install 'ninfer[cuda13]' "
            "(or 'ninfer[cuda12]' for a driver older than 580), or use --device cpu"
        ) from None
    return Libraries(cupy, driver)


def cuda_missing() -> str | None:
    """None, or why there is no GPU to use."""
    try:
        count_devices(libraries())
    except DeviceError as error:
        return str(error)
    return None


def count_devices(libs: Libraries) -> int:
    """Raises DeviceError for no driver, an old one, or no GPU."""
    runtime = libs.cupy.cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        name = str(error).split(":")[0]
        if "InsufficientDriver" in name:
            raise DeviceError(
                "no NVIDIA driver, or one that is too old for this cupy: install the driver (580 or newer for "
                "CUDA 13, 525 for CUDA 12), or use --device cpu"
            ) from None
        raise DeviceError(f"no NVIDIA GPU can be used ({name}); use --device cpu") from None
    if count == 0:
        raise DeviceError("the NVIDIA driver finds no GPU; use --device cpu")
    return count


def check_driver(driver_version: int, compiler: str) -> None:
    """Machine code of a newer CUDA major does not load.   driver_version: 12040 for CUDA 12.4."""
    major = int(compiler.split(".")[0])
    if driver_version // 1000 < major:
        supported = f"{driver_version // 1000}.{driver_version % 1000 // 10}"
        raise DeviceError(
            f"the driver supports CUDA {supported}, but kernels are compiled by NVRTC {compiler}: "
            f"update the driver, or pip install 'ninfer[cuda{driver_version // 1000}]' in place of this one"
        )


_EXACT = {90: "sm_90a", 100: "sm_100a", 103: "sm_103a", 120: "sm_120a", 121: "sm_121a"}  # with the card's own additions


def cuda_info(libs: Libraries, index: int = 0) -> DeviceInfo:
    """Raises DeviceError for an index that is not there, or a card before sm_80."""
    count = count_devices(libs)
    if index >= count:
        raise DeviceError(f"--device cuda:{index}, but there are {count} GPUs; the first is cuda:0")
    p = libs.cupy.cuda.runtime.getDeviceProperties(index)
    name = p["name"].decode() if isinstance(p["name"], bytes) else str(p["name"])
    cc = 10 * p["major"] + p["minor"]
    if cc < 80:
        raise DeviceError(f"{name} is sm_{cc}; kernels need sm_80 or newer. Use --device cpu")
    arch = _EXACT.get(cc, f"sm_{cc}")
    slug = "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
    return DeviceInfo(
        "cuda",
        name,
        f"{slug}-sm{cc}",
        features_of(arch),
        arch,
        int(p["multiProcessorCount"]),
        int(p["totalGlobalMem"]),
    )


def features_of(arch: str) -> frozenset[str]:
    """What routes may need, by architecture: `sm_90a` has sm80, sm86, sm89, sm90, sm90a, and shared227.

    shared227: blocks may have 227 KiB of shared memory; later architectures of desktops have 99.
    """
    number = int("".join(c for c in arch if c.isdigit()))
    names = {f"sm{n}" for n in (80, 86, 89, 90, 100, 103, 120, 121) if n <= number}
    room = {"shared227"} if 90 <= number <= 103 else set[str]()
    return frozenset({"cuda", "dp4a", "mma", *names, *room, arch.replace("_", "")})


def _pinned(cupy: Any, nbytes: int, *, clear: bool = True) -> NDArray[np.uint8]:
    memory = cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
    array: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, max(nbytes, 1))
    if clear:
        array[:] = 0
    return array


def _align(n: int, to: int = ALIGN) -> int:
    return -(-n // to) * to


@define(eq=False)
class Region:
    """Device memory that is one allocation."""

    cupy: Any
    nbytes: int
    pointer: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pointer = int(self.cupy.cuda.runtime.malloc(max(self.nbytes, ALIGN)))

    def free(self) -> None:
        if self.pointer:
            self.cupy.cuda.runtime.free(self.pointer)
            self.pointer = 0

    def view(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """A cupy array over a part."""
        size = prod(shape) * np.dtype(dtype).itemsize
        memory = self.cupy.cuda.UnownedMemory(self.pointer + offset, size, self)
        return self.cupy.ndarray(shape, dtype, memptr=self.cupy.cuda.MemoryPointer(memory, 0))


@define(eq=False)
class CudaMemory:
    """weights, states: addresses by name; sizes are bytes. Everything is on `device`'s stream."""

    device: CudaDevice
    weights: dict[str, Weight]  # as given: for sizes and for the calibration's reference
    weight_at: dict[str, int]
    states: dict[str, Any]  # cupy arrays
    arena: int
    arena_bytes: int
    regions: list[Region]
    copies: Copies | None = None  # made when the first row is copied
    _pinning: threading.Thread | None = None
    _freed: threading.Event = field(factory=threading.Event)

    def write_state(self, name: str, index: Any, values: NDArray[Any]) -> None:
        self.device.enter()
        view = self.states[name][index]
        host = np.ascontiguousarray(np.broadcast_to(values, view.shape), view.dtype)
        if view.flags.c_contiguous:
            view.set(host, stream=self.device.stream)
        else:
            for i in range(len(view)):
                view[i].set(host[i], stream=self.device.stream)
        self.device.stream.synchronize()

    def read_state(self, name: str, index: Any) -> NDArray[Any]:
        self.device.enter()
        view = self.states[name][index]
        array: NDArray[Any] = self.device.cupy.asnumpy(view, stream=self.device.stream)
        return array

    def read_rows(self, names: Sequence[str], index: int) -> NDArray[np.uint8]:
        """A small row is first copied on the device, so that the next launch may write to it at once; a large one
        makes the next launch wait for the bus."""
        rows, at = self._rows(names, index), 0
        host = _pinned(self.device.cupy, sum(size for _, size in rows), clear=False)
        copies = self._copies()
        if host.nbytes <= STAGED_BYTES:
            copies.read_staged(rows, host)
            return host
        copies.begin()
        for pointer, size in rows:
            copies.copy(host.ctypes.data + at, pointer, size, _TO_HOST)
            at += size
        copies.end(host)
        return host

    def write_rows(self, names: Sequence[str], index: int, data: NDArray[np.uint8]) -> None:
        copies, at = self._copies(), 0
        data = np.ascontiguousarray(data)
        copies.begin()
        for pointer, size in self._rows(names, index):
            copies.copy(pointer, data.ctypes.data + at, size, _TO_DEVICE)
            at += size
        copies.end(data)

    def settle(self) -> None:
        if self.copies is not None:
            self.copies.settle()

    def reserve_rows(self, counts: Mapping[int, int]) -> None:
        """Into cupy's pool of pinned memory, which `read_rows` takes from. Memory that cannot be pinned is left out."""
        cuda = self.device.cupy.cuda

        def pin() -> None:
            cuda.runtime.setDevice(self.device.index)
            held = list[Any]()
            with suppress(RuntimeError, MemoryError):
                for nbytes in (n for n, count in counts.items() for _ in range(count)):
                    if self._freed.is_set():
                        break
                    held.append(cuda.alloc_pinned_memory(nbytes))

        self._pinning = threading.Thread(target=pin, name="ninfer-pin", daemon=True)
        self._pinning.start()

    def _rows(self, names: Sequence[str], index: int) -> list[tuple[int, int]]:
        """Address and bytes of each."""
        found = []
        for name in names:
            array = self.states[name]
            size = array.nbytes // array.shape[0]
            found.append((int(array.data.ptr) + index * size, size))
        return found

    def _copies(self) -> Copies:
        self.device.enter()
        if self.copies is None:
            self.copies = Copies(self.device.cupy, self.device.stream)
            self.regions.append(self.copies.stage)
        return self.copies

    def free(self) -> None:
        self._freed.set()
        if self._pinning is not None:
            self._pinning.join()
        self.settle()
        for region in self.regions:
            region.free()


@define(eq=False)
class Copies:
    """Copies between host and device on a stream of their own. Each comes after what `main` has been given before, and
    before what it is given next; but a staged read leaves `main` free at once."""

    cupy: Any
    main: Any
    stream: Any = field(init=False)
    stage: Region = field(init=False)  # half for each of two reads
    _turn: int = 0
    _emptied: list[Any] = field(init=False)  # when each half was copied out last
    _pending: list[tuple[Any, NDArray[np.uint8]]] = field(factory=list)  # host memory that a copy reads or fills

    def __attrs_post_init__(self) -> None:
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.stage = Region(self.cupy, 2 * STAGED_BYTES)
        self._emptied = [None, None]

    def _event(self, stream: Any) -> Any:
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def begin(self) -> None:
        self.stream.wait_event(self._event(self.main))

    def copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        self.cupy.cuda.runtime.memcpyAsync(to, source, nbytes, kind, self.stream.ptr)

    def end(self, host: NDArray[np.uint8]) -> None:
        """host: is kept until the copies are done."""
        done = self._event(self.stream)
        self.main.wait_event(done)
        self._keep(done, host)

    def read_staged(self, rows: Sequence[tuple[int, int]], host: NDArray[np.uint8]) -> None:
        half = self.stage.pointer + self._turn * STAGED_BYTES
        if self._emptied[self._turn] is not None:
            self.main.wait_event(self._emptied[self._turn])
        at = 0
        for pointer, size in rows:
            self.cupy.cuda.runtime.memcpyAsync(half + at, pointer, size, _ON_DEVICE, self.main.ptr)
            at += size
        self.begin()
        self.copy(host.ctypes.data, half, at, _TO_HOST)
        done = self._emptied[self._turn] = self._event(self.stream)
        self._turn = 1 - self._turn
        self._keep(done, host)

    def _keep(self, done: Any, host: NDArray[np.uint8]) -> None:
        self._pending = [(event, array) for event, array in self._pending if not event.done]
        self._pending.append((done, host))

    def settle(self) -> None:
        if self._pending:
            self.stream.synchronize()
            self._pending.clear()


@define(eq=False)
class CudaDevice:
    """programs: the cubins of this card's architecture. layout: how weights lie on the device."""

    libs: Libraries
    info: DeviceInfo
    programs: CubinCache
    layout: Layout
    index: int = 0
    progress: Callable[[int, int], None] = lambda done, total: None
    dependent_launch: bool = True
    cupy: Any = field(init=False)
    stream: Any = field(init=False)
    modules: dict[str, Any] = field(factory=dict)  # by entry
    _functions: dict[str, Any] = field(factory=dict)  # function handles by entry
    _granted: dict[str, int] = field(factory=dict)  # dynamic shared memory by entry
    _blas: Any = None
    _memories: list[CudaMemory] = field(factory=list)
    _thread: threading.local = field(factory=threading.local)  # their numbers would not do: later ones get them again

    def __attrs_post_init__(self) -> None:
        self.cupy = self.libs.cupy
        runtime = self.cupy.cuda.runtime
        runtime.setDevice(self.index)
        check_driver(int(runtime.driverGetVersion()), nvrtc_version())
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.enter()
        self.dependent_launch = self.dependent_launch and "sm90" in self.info.features

    def close(self) -> None:
        self.stream.synchronize()
        for memory in self._memories:
            memory.free()
        self._memories.clear()

    def driver(self, what: str, result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code) != 0:
            raise DeviceError(f"{self.info.name}: {what} failed with {code.name}")
        return values[0] if values else None

    # memory

    def memory(
        self, weights: Mapping[str, Weight], states: Mapping[str, TensorType], env: Env, arena_bytes: int
    ) -> CudaMemory:
        """Allocate everything and copy the weights.   Raises DeviceError with what is needed and what is free."""
        sizes = {
            "weights": sum(_align(self.weight_bytes(w)) for w in weights.values()),
            "kv": sum(_align(t.nbytes(env)) for n, t in states.items() if n.startswith("kv.")),
            "state": sum(_align(t.nbytes(env)) for n, t in states.items() if not n.startswith("kv.")),
            "arena": _align(arena_bytes),
        }
        self._check_fit(sizes)
        weight_region = Region(self.cupy, sizes["weights"])
        state_region = Region(self.cupy, sizes["kv"] + sizes["state"])
        arena_region = Region(self.cupy, sizes["arena"])
        self.cupy.cuda.runtime.memsetAsync(state_region.pointer, 0, max(state_region.nbytes, 1), self.stream.ptr)
        arrays, at = {}, 0
        for name, type in states.items():
            arrays[name] = state_region.view(at, type.concrete(env), type.dtype.numpy)
            at += _align(type.nbytes(env))
        places = self._upload(weights, weight_region)
        self.stream.synchronize()
        regions = [weight_region, state_region, arena_region]
        memory = CudaMemory(self, dict(weights), places, arrays, arena_region.pointer, sizes["arena"], regions)
        self._memories.append(memory)
        return memory

    def weight_bytes(self, weight: Weight) -> int:
        """On the device."""
        if isinstance(weight, Packed | Synthetic):
            return device_bytes(self.layout, weight.format, weight.shape)
        return int(weight.nbytes)

    def _check_fit(self, sizes: Mapping[str, int]) -> None:
        free, _ = self.cupy.cuda.runtime.memGetInfo()
        needed = sum(sizes.values()) + (256 << 20)  # and what graphs, modules and records take
        if needed <= free:
            return
        parts = ", ".join(f"{name} {nbytes / 2**30:.1f}" for name, nbytes in sizes.items())
        short = needed - free
        if sizes["kv"] > short:
            share = 1 - short / sizes["kv"]
            advice = f"lower --kv-capacity (or --max-context, --max-concurrency) to {share:.0%} of what it is"
        else:
            advice = "use a smaller weight format (--quantize, --format) or a smaller model"
        raise DeviceError(
            f"{self.info.name} has {free / 2**30:.1f} GiB free, but {needed / 2**30:.1f} are needed ({parts}): {advice}"
        )

    def _upload(self, weights: Mapping[str, Weight], region: Region) -> dict[str, int]:
        runtime = self.cupy.cuda.runtime
        stages = [_pinned(self.cupy, STAGE_BYTES) for _ in range(2)]
        events = [self.cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        places, tiles, at, turn = {}, dict[Any, tuple[Region, int]](), region.pointer, 0
        for name, weight in weights.items():
            places[name] = at
            if isinstance(weight, Synthetic):
                self._repeat(weight, tiles, at)
            else:
                raw = self._bytes(weight)
                for start in range(0, raw.nbytes, STAGE_BYTES):
                    part = raw[start : start + STAGE_BYTES]
                    events[turn].synchronize()
                    stages[turn][: part.nbytes] = part
                    runtime.memcpyAsync(at + start, stages[turn].ctypes.data, part.nbytes, _TO_DEVICE, self.stream.ptr)
                    events[turn].record(self.stream)
                    turn = 1 - turn
            at += _align(self.weight_bytes(weight))
        self.stream.synchronize()
        for tile, _ in tiles.values():
            tile.free()
        return places

    def _bytes(self, weight: Array) -> U8Array:
        if isinstance(weight, Packed):
            return self.layout(weight.format)(weight.raw.reshape(-1), weight.shape).reshape(-1)
        return np.ascontiguousarray(weight).reshape(-1).view(np.uint8)

    def _repeat(self, weight: Synthetic, tiles: dict[Any, tuple[Region, int]], at: int) -> None:
        """A synthetic matrix: a few hundred rows from the host, turned by the seed, then copied over and over."""
        runtime, total = self.cupy.cuda.runtime, self.weight_bytes(weight)
        key = (weight.format, weight.shape[1], min(weight.shape[0], Synthetic.TILE))
        if key not in tiles:
            raw = self._bytes(weight.tile())
            region = Region(self.cupy, raw.nbytes)
            self.copy_in(region.pointer, raw)
            tiles[key] = (region, raw.nbytes)
        region, nbytes = tiles[key]
        rows = min(weight.shape[0], Synthetic.TILE)
        turn = weight.seed % max(1, rows // 16) * (nbytes // max(1, rows // 16)) if rows == Synthetic.TILE else 0
        pieces = [(region.pointer + turn, nbytes - turn), (region.pointer, turn)]
        done = 0
        for source, size in pieces:
            size = min(size, total - done)
            if size:
                runtime.memcpyAsync(at + done, source, size, _ON_DEVICE, self.stream.ptr)
                done += size
        while done < total:
            size = min(done, total - done)
            runtime.memcpyAsync(at + done, at, size, _ON_DEVICE, self.stream.ptr)
            done += size

    def copy_in(self, pointer: int, array: NDArray[Any]) -> None:
        """On the stream: a plain copy from pageable memory may still be on its way when it returns."""
        raw = np.ascontiguousarray(array)
        self.cupy.cuda.runtime.memcpyAsync(pointer, raw.ctypes.data, raw.nbytes, _TO_DEVICE, self.stream.ptr)
        self.stream.synchronize()

    def enter(self) -> None:
        """Make this device and its stream the calling thread's, which calls of the driver and of libraries need."""
        if not hasattr(self._thread, "entered"):
            self.cupy.cuda.runtime.setDevice(self.index)
            self.cupy.cuda.runtime.free(0)
            self.stream.use()  # cupy sets a library's stream to the current one before each call
            self._thread.entered = True

    # programs

    def compile(self, plans: Sequence[Plan]) -> dict[str, int]:
        """Load every kernel of the plans; function handles by entry."""
        sources = list(dict.fromkeys(s for plan in plans for s in plan.sources))
        missing = [s for s in sources if s.entry not in self._functions]
        for entry, cubin in self.programs.cubins(missing, self.progress).items():
            module = self.driver(f"loading {entry}", self.libs.driver.cuModuleLoadData(cubin))
            self.modules[entry] = module
            function = self.libs.driver.cuModuleGetFunction(module, entry.encode())
            self._functions[entry] = self.driver(f"finding {entry}", function)
        for plan in plans:
            for launch in plan.launches:
                if launch.source is not None:
                    self._grant(launch.source.entry, launch.geometry.shared)
        return {s.entry: int(self._functions[s.entry]) for s in sources}

    def _grant(self, entry: str, shared: int) -> None:
        if shared > self._granted.get(entry, 32 << 10):  # of 48 KiB, in which static shared memory counts
            attribute = self.libs.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            result = self.libs.driver.cuFuncSetAttribute(self._functions[entry], attribute, shared)
            self.driver(f"granting {entry} {shared} bytes of shared memory", result)
            self._granted[entry] = shared

    def bind(
        self, plan: Plan, memory: CudaMemory, consts: Mapping[str, NDArray[Any]], entries: Mapping[str, int]
    ) -> CudaExecutable:
        return CudaExecutable(self, plan, memory, consts)

    def kernel(self, launch: Launch, pointers: Sequence[int], *, dependent: bool) -> Callable[[], None]:
        """A launch on this device's stream with everything made ready."""
        assert launch.source is not None
        driver = self.libs.driver
        values = (ctypes.c_void_p * len(pointers))(*pointers)
        places = (ctypes.c_void_p * len(pointers))(
            *(ctypes.addressof(values) + i * ctypes.sizeof(ctypes.c_void_p) for i in range(len(pointers)))
        )
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.geometry.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.geometry.block, 1, 1
        config.sharedMemBytes = launch.geometry.shared
        config.hStream = driver.CUstream(self.stream.ptr)
        if dependent and self.dependent_launch:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        function, address, entry = self._functions[launch.source.entry], ctypes.addressof(places), launch.source.entry
        keep = (values, places)

        def call() -> None:
            result = driver.cuLaunchKernelEx(config, function, address, 0)
            if int(result[0]) != 0:
                self.driver(f"launching {entry} {launch.geometry}", result)
            assert keep

        return call

    def library(self, launch: Launch, pointers: Sequence[int], header: NDArray[Any]) -> Callable[[], None]:
        """gemm_bf16, gemm_f16, gemm_s8: c[rows, n] = a[rows, k] b[n, k]^T; of int8 in int32, exactly.

        Operands by argument index (the header is none) and byte offset; rows_field: the header's count of rows;
        rows_pad: what the count is raised to a multiple of.
        """
        assert launch.library is not None
        name, p = launch.library
        if name not in GEMMS:
            raise DeviceError(f"{launch.op.key}: this device has no library routine {name}")
        blas = self._cublas()
        n, k, count = int(p["n"]), int(p["k"]), str(p.get("rows_field", "rows"))
        a, b, c = (pointers[1 + int(p[x])] + int(p.get(f"{x}_offset", 0)) for x in "abc")
        kind, arithmetic, scalar = GEMMS[name]
        one, zero = np.ones((), scalar), np.zeros((), scalar)
        out = 10 if name == "gemm_s8" else {"f32": 0, "bf16": 14, "f16": 2}[str(p.get("out", "f32"))]  # 10: int32
        pad = int(p.get("rows_pad", 1))

        def call() -> None:
            blas.gemmEx(
                self._blas, 1, 0, n, _align(int(header[count]), pad), k, one.ctypes.data, b, kind, k, a, kind, k,
                zero.ctypes.data, c, out, int(p.get("ldc", n)), arithmetic, -1,
            )  # fmt: skip

        return call

    def _cublas(self) -> Any:
        from cupy_backends.cuda.libs import cublas

        if self._blas is None:
            self._blas = cublas.create()
        return cublas


def device_bytes(layout: Layout, fmt: QuantFormat, shape: Sequence[int]) -> int:
    """Size of a matrix in the device's layout, whose rows come in runs of 16 of equal size."""
    n, k = prod(shape[:-1]), shape[-1]
    return _run_bytes(layout, fmt, k) * -(-n // 16) if not fmt.is_plain else fmt.nbytes((n, k))


_RUNS: dict[tuple[str, int], int] = {}


def _run_bytes(layout: Layout, fmt: QuantFormat, k: int) -> int:
    key = (fmt.name, k)
    if key not in _RUNS:
        rows = fmt.least_rows(16)
        _RUNS[key] = layout(fmt)(np.zeros(fmt.nbytes((rows, k)), np.uint8), (rows, k)).nbytes * 16 // rows
    return _RUNS[key]


@define(eq=False)
class CudaExecutable:
    """A plan bound to addresses. Captured at once unless it has library calls."""

    device: CudaDevice
    plan: Plan
    memory: CudaMemory
    consts: Mapping[str, NDArray[Any]]
    header: NDArray[Any] = field(init=False)
    step: dict[str, NDArray[Any]] = field(factory=dict)
    _outputs: dict[str, tuple[NDArray[Any], Sym | None]] = field(factory=dict)
    _record: Region = field(init=False)
    _record_at: list[dict[str, int]] = field(factory=list)  # offsets of the fields of each record
    _const_at: dict[str, int] = field(factory=dict)
    _results: Region = field(init=False)
    _tables: list[Region] = field(factory=list)  # of woven launches
    _calls: list[Callable[[], None]] = field(factory=list)
    _graph: Any = None
    _keep: list[Any] = field(factory=list)
    _copy_in: tuple[int, int, int] = (0, 0, 0)  # destination, source, bytes
    _copy_out: tuple[int, int, int] = (0, 0, 0)

    def __attrs_post_init__(self) -> None:
        if self.memory.arena_bytes < self.plan.arena_bytes:
            raise ValueError(f"the plan needs an arena of {self.plan.arena_bytes} bytes, not {self.memory.arena_bytes}")
        self._make_record()
        self._make_results()
        self.memory.regions += [self._record, self._results]  # freed with it
        self._make_calls()
        if all(launch.library is None for launch in self.plan.launches):
            self._capture()

    @property
    def env(self) -> Env:
        return self.plan.env

    def _make_record(self) -> None:
        """One pinned buffer and its device copy: header, then the step's inputs. Behind it on the device are records
        that the plan itself fills, and the consts."""
        cupy, at = self.device.cupy, 0
        for env in self.plan.frames:
            places = {HEADER_FIELD.name: at}
            at += _align(HEADER.nbytes, 16)
            for f in STEP_FIELDS:
                places[f.name] = at
                at += _align(f.type.nbytes(env), 16)
            self._record_at.append(places)
        own = self._record_at[1][HEADER_FIELD.name] if self.plan.more_frames else at
        host = _pinned(cupy, own)
        self._record = Region(cupy, at + sum(_align(np.ascontiguousarray(c).nbytes, 16) for c in self.consts.values()))
        self._keep.append(host)
        self.header = host[: HEADER.nbytes].view(HEADER.numpy).reshape(())
        for f in STEP_FIELDS:
            part = host[self._record_at[0][f.name] :][: f.type.nbytes(self.env)]
            self.step[f.name] = part.view(f.type.dtype.numpy).reshape(f.type.concrete(self.env))
        self._copy_in = (self._record.pointer, host.ctypes.data, own)
        if at > own:
            self.device.cupy.cuda.runtime.memsetAsync(self._record.pointer + own, 0, at - own, self.device.stream.ptr)
        for name, array in self.consts.items():
            raw = np.ascontiguousarray(array)
            self._const_at[name] = self._record.pointer + at
            self.device.copy_in(self._record.pointer + at, raw)
            at += _align(raw.nbytes, 16)

    def _make_results(self) -> None:
        """Outputs side by side, so that one copy brings them."""
        self._results = Region(self.device.cupy, self.plan.result_bytes)
        host = _pinned(self.device.cupy, self.plan.result_bytes)
        self._keep.append(host)
        for name, (ref, type) in self.plan.outputs.items():
            env = self.plan.frames[ref.frame]
            part = host[ref.offset :][: type.nbytes(env)]
            first = type.shape[0] if type.shape else None
            view = part.view(type.dtype.numpy).reshape(type.concrete(env))
            counted = isinstance(first, Sym) and not ref.frame  # counts of other records stay on the device
            self._outputs[name] = (view, first if isinstance(first, Sym) and counted else None)
        self._copy_out = (host.ctypes.data, self._results.pointer, self.plan.result_bytes)

    def address(self, ref: BufferRef) -> int:
        """Where an operand lies."""
        match ref.place:
            case Place.ARENA:
                return self.memory.arena + ref.offset
            case Place.RESULT:
                return self._results.pointer + ref.offset
            case Place.WEIGHT:
                return self.memory.weight_at[ref.name]
            case Place.STATE:
                return int(self.memory.states[ref.name].data.ptr)
            case Place.STEP:
                return self._record.pointer + self._record_at[ref.frame][ref.name]
            case Place.CONST:
                return self._const_at[ref.name]

    def free(self) -> None:
        """The record and the results; the graph goes with this object."""
        self._graph = None
        for region in (self._record, self._results, *self._tables):
            region.free()

    def _make_calls(self) -> None:
        dependent = False  # kernels read their header early, so the first of a record waits for what writes it
        frame = 0
        for launch in self.plan.launches:
            dependent, frame = dependent and launch.frame == frame, launch.frame
            header = self._record.pointer + self._record_at[frame][HEADER_FIELD.name]
            pointers = [header, *self._table(launch), *(self.address(ref) for ref in launch.args)]
            if launch.source is not None:
                self._calls.append(self.device.kernel(launch, pointers, dependent=dependent))
                dependent = True
            elif launch.library is not None and not frame:
                self._calls.append(self.device.library(launch, pointers, self.header))
                dependent = False
            else:
                raise DeviceError(f"{launch.op.key} has no kernel on {self.device.info.name}")

    def _table(self, launch: Launch) -> list[int]:
        """Where a woven launch's table of stages is."""
        if not launch.stages:
            return []
        table = launch.table(self.address)
        region = Region(self.device.cupy, table.nbytes)
        self.device.copy_in(region.pointer, table)
        self._tables.append(region)
        self.memory.regions.append(region)
        return [region.pointer]

    def _enqueue(self) -> None:
        runtime, stream = self.device.cupy.cuda.runtime, self.device.stream.ptr
        runtime.memcpyAsync(*self._copy_in, _TO_DEVICE, stream)
        for call in self._calls:
            call()
        if self._copy_out[2]:
            runtime.memcpyAsync(*self._copy_out, _TO_HOST, stream)

    def _capture(self) -> None:
        stream = self.device.stream
        stream.begin_capture()
        try:
            self._enqueue()
        finally:
            graph = stream.end_capture()
        self._graph = graph
        graph.upload(stream)
        stream.synchronize()

    def start(self) -> None:
        """Enqueue a step without waiting for it."""
        if self._graph is not None:
            self._graph.launch(self.device.stream)
        else:
            self._enqueue()

    def launch(self) -> dict[str, NDArray[Any]]:
        """Run the step that header and step arrays describe; outputs are views, valid until the next launch."""
        self.device.enter()
        try:
            self.start()
            self.device.stream.synchronize()
        except self.device.cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(f"{self.device.info.name}: a step failed with {error}") from None
        counts = {Sym.T: "rows", Sym.L: "logit_rows", Sym.B: "seqs"}
        return {
            name: view if sym is None or sym not in counts else view[: int(self.header[counts[sym]])]
            for name, (view, sym) in self._outputs.items()
        }

    def time(self, repeat: int) -> float:
        """Seconds per step of `repeat` steps in a row, by the device's clock."""
        cuda = self.device.cupy.cuda
        start, end = cuda.Event(), cuda.Event()
        start.record(self.device.stream)
        for _ in range(repeat):
            self.start()
        end.record(self.device.stream)
        end.synchronize()
        return float(cuda.get_elapsed_time(start, end)) / 1e3 / repeat

    def time_part(self, wanted: Callable[[Launch], bool], repeat: int) -> float:
        """Seconds of some of the launches in a captured chain of their own, on whatever the buffers hold."""
        cuda, stream = self.device.cupy.cuda, self.device.stream
        stream.begin_capture()
        try:
            for launch, call in zip(self.plan.launches, self._calls, strict=True):
                if wanted(launch):
                    call()
        finally:
            graph = stream.end_capture()
        graph.launch(stream)
        start, end = cuda.Event(), cuda.Event()
        start.record(stream)
        for _ in range(repeat):
            graph.launch(stream)
        end.record(stream)
        end.synchronize()
        return float(cuda.get_elapsed_time(start, end)) / 1e3 / repeat

    def time_each(self, repeat: int) -> list[float]:
        """Seconds of each launch within whole steps, uncaptured: the median of `repeat` steps. A step before them keeps
        the device busy, so that it does not wait for the host; launches do not overlap their neighbours."""
        cuda, stream = self.device.cupy.cuda, self.device.stream
        for call in self._calls:
            call()
        steps = []
        for _ in range(repeat):
            events = [cuda.Event() for _ in range(len(self._calls) + 1)]
            events[0].record(stream)
            for call, event in zip(self._calls, events[1:], strict=True):
                call()
                event.record(stream)
            steps.append(events)
        stream.synchronize()
        times = [[cuda.get_elapsed_time(a, b) / 1e3 for a, b in pairwise(events)] for events in steps]
        return [statistics.median(each) for each in zip(*times, strict=True)]

    def host_seconds(self, repeat: int) -> float:
        """What starting a step costs the host, without the wait."""
        began = time.perf_counter()
        for _ in range(repeat):
            self.start()
        spent = (time.perf_counter() - began) / repeat
        self.device.stream.synchronize()
        return spent


@define(eq=False)
class CudaBench:
    """Runs plans for calibration (routes/measure.py), with the model's weights and one arena that grows."""

    device: CudaDevice
    weights: Mapping[str, Weight]
    states: Mapping[str, TensorType]
    env: Env
    consts: Mapping[str, NDArray[Any]]
    memory: CudaMemory = field(init=False)
    _arena: Region = field(init=False)
    _ballast: Region = field(init=False)
    _bound: dict[int, CudaExecutable] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        cupy = self.device.cupy
        self.memory = self.device.memory(self.weights, self.states, self.env, ALIGN)
        self._arena, self._ballast = Region(cupy, ALIGN), Region(cupy, 256 << 20)  # more than any L2
        self.memory.regions += [self._ballast]

    @property
    def info(self) -> DeviceInfo:
        return self.device.info

    def compile(self, plans: Sequence[Plan]) -> None:
        self.device.compile(plans)

    def begin(self, plans: Sequence[Plan]) -> None:
        self.device.stream.synchronize()
        for old in self._bound.values():
            old.free()
        self._bound.clear()
        needed = max((p.arena_bytes for p in plans), default=0)
        if self._arena.nbytes < needed:
            self._arena.free()
            self._arena = Region(self.device.cupy, needed)
            self.memory.arena, self.memory.arena_bytes = self._arena.pointer, needed

    def prepare(
        self, plan: Plan, fill: Callable[[Mapping[str, NDArray[Any]], NDArray[Any]], None]
    ) -> Callable[[], float]:
        executable = self.device.bind(plan, self.memory, self.consts, self.device.compile([plan]))
        self._bound[id(plan)] = executable
        fill(executable.step, executable.header)
        values = noise(min(plan.arena_bytes // 4, 1 << 24))
        for at in range(0, plan.arena_bytes, max(values.nbytes, 1)):
            n = min(values.nbytes, plan.arena_bytes - at)
            self.device.copy_in(self._arena.pointer + at, values.view(np.uint8)[:n])

        return lambda: executable.time(1)

    def operand(self, plan: Plan, ref: BufferRef, type: TensorType) -> Array:
        """With this step's counts."""
        executable = self._bound[id(plan)]
        if ref.place is Place.WEIGHT:
            weight = self.weights[ref.name]
            return weight.whole() if isinstance(weight, Synthetic) else weight
        if ref.place is Place.CONST:
            return self.consts[ref.name]
        host = executable.step.get(ref.name) if ref.place is Place.STEP else None
        if host is None:
            host = np.empty(type.concrete(self.env if ref.place is Place.STATE else plan.env), type.dtype.numpy)
            self.device.stream.synchronize()
            self.device.cupy.cuda.runtime.memcpy(host.ctypes.data, executable.address(ref), host.nbytes, _TO_HOST)
        first = type.shape[0] if type.shape else None
        counts = {Sym.T: "rows", Sym.L: "logit_rows", Sym.B: "seqs"}
        return host[: int(executable.header[counts[first]])] if first in counts else host

    def flush(self) -> None:
        self.device.cupy.cuda.runtime.memsetAsync(
            self._ballast.pointer, 1, self._ballast.nbytes, self.device.stream.ptr
        )

    def close(self) -> None:
        self.begin(())
        self._arena.free()
        self.device.close()
