"""The CPU as a device: rendered C++ kernels run by a pool of threads, numpy references where there is none."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ninfer.devices.base import DeviceInfo, noise
from ninfer.devices.plan import BufferRef, Launch, Place, Plan
from ninfer.devices.programs import ProgramCache
from ninfer.formats.quant import Packed
from ninfer.ir.step import HEADER, HEADER_FIELD, STEP_FIELDS
from ninfer.ir.types import Array, Env, Sym, TensorType

_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "asimd",
)
_LAUNCH = np.dtype([("fn", "u8"), ("args", "u8"), ("chunks", "i8")])
_EXECUTOR = Path(__file__).resolve().parent.parent / "templates" / "cpu" / "executor.cpp"


def cpu_info(*, portable: bool = False) -> DeviceInfo:
    """What /proc/cpuinfo says; elsewhere, a portable CPU.   portable: pretend to have no extensions."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            match key.strip():
                case "model name":
                    name = value.strip()
                case "flags" | "Features":
                    flags = set(value.split())
    except OSError:
        pass
    features = frozenset[str]() if portable else frozenset(f for f in _FEATURES if f in flags)
    slug = "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split()) or "cpu"
    isa = "avx512" if "avx512f" in features else "avx2" if "avx2" in features else "portable"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    arch = f"{platform.machine()}:{','.join(sorted(flags))}" if not portable else f"{platform.machine()}:portable"
    return DeviceInfo("cpu", name, f"{slug}-{isa}", features, arch, available_cores(), memory)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def aligned(nbytes: int, alignment: int = 64) -> NDArray[np.uint8]:
    """A zeroed byte buffer at an aligned address; its pages come into being when touched."""
    raw = np.zeros(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


@frozen(eq=False)
class Frame:
    """The record of one step in host memory: header and fields, with the full extents of its Env."""

    header: NDArray[Any]
    step: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, env: Env) -> Frame:
        header = aligned(HEADER.numpy.itemsize)
        step: dict[str, NDArray[Any]] = {HEADER_FIELD.name: header.view(np.uint32)}
        for f in STEP_FIELDS:
            shape = f.type.concrete(env)
            flat = aligned(int(np.prod(shape)) * f.type.dtype.numpy.itemsize)
            step[f.name] = flat.view(f.type.dtype.numpy).reshape(shape)
        return cls(header.view(HEADER.numpy).reshape(()), step)


@define
class CpuMemory:
    """Weights (maps or copies), states and the arena that all plans share."""

    weights: Mapping[str, Array]
    states: dict[str, NDArray[Any]]
    arena: NDArray[np.uint8]

    def write_state(self, name: str, index: Any, values: NDArray[Any]) -> None:
        self.states[name][index] = values

    def read_state(self, name: str, index: Any) -> NDArray[Any]:
        return np.array(self.states[name][index])

    def read_rows(self, names: Sequence[str], index: int) -> NDArray[np.uint8]:
        return np.concatenate([self._row(name, index) for name in names])

    def write_rows(self, names: Sequence[str], index: int, data: NDArray[np.uint8]) -> None:
        at = 0
        for row in (self._row(name, index) for name in names):
            row[:] = data[at : at + len(row)]
            at += len(row)

    def settle(self) -> None:
        pass

    def reserve_rows(self, counts: Mapping[int, int]) -> None:
        pass

    def _row(self, name: str, index: int) -> NDArray[np.uint8]:
        return self.states[name][index : index + 1].reshape(-1).view(np.uint8)


@define
class CpuDevice:
    """programs None: no compiler, every op runs its reference."""

    info: DeviceInfo
    programs: ProgramCache | None
    threads: int
    progress: Callable[[int, int], None] = lambda done, total: None
    _lib: ctypes.CDLL | None = None
    _pool: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.programs is not None:
            self._lib = self.programs.library(_EXECUTOR.read_text())
            self._lib.ni_pool_new.restype = ctypes.c_void_p
            self._lib.ni_pool_free.argtypes = [ctypes.c_void_p]
            self._lib.ni_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
            self._pool = self._lib.ni_pool_new(self.threads)

    def close(self) -> None:
        if self._lib is not None and self._pool is not None:
            self._lib.ni_pool_free(self._pool)
            self._pool = None

    def memory(
        self, weights: Mapping[str, Array], states: Mapping[str, TensorType], env: Env, arena_bytes: int
    ) -> CpuMemory:
        """Allocate every state for env's slots and pages."""
        arrays: dict[str, NDArray[Any]] = {}
        for name, type in states.items():
            shape = type.concrete(env)
            flat = aligned(int(np.prod(shape)) * type.dtype.numpy.itemsize)
            arrays[name] = flat.view(type.dtype.numpy).reshape(shape)
        return CpuMemory(weights, arrays, aligned(arena_bytes))

    def compile(self, plans: Sequence[Plan]) -> dict[str, int]:
        """Entry addresses of all kernels of the plans."""
        sources = list(dict.fromkeys(s for plan in plans for s in plan.sources))
        if not sources:
            return {}
        assert self.programs is not None
        return self.programs.addresses(sources, self.progress)

    def bind(
        self, plan: Plan, memory: CpuMemory, consts: Mapping[str, NDArray[Any]], entries: Mapping[str, int]
    ) -> CpuExecutable:
        return CpuExecutable(plan, memory, consts, entries, self)

    def run(self, launches: NDArray[Any]) -> None:
        assert self._lib is not None
        self._lib.ni_run(self._pool, launches.ctypes.data, len(launches))


@define(eq=False)
class HostExecutable:
    """A plan bound to host memory: its records, its results, and where operands lie."""

    plan: Plan
    memory: CpuMemory
    consts: Mapping[str, NDArray[Any]]
    entries: Mapping[str, int]
    frames: list[Frame] = field(init=False)
    results: NDArray[np.uint8] = field(init=False)

    def __attrs_post_init__(self) -> None:
        if len(self.memory.arena) < self.plan.arena_bytes:
            raise ValueError(f"the plan needs an arena of {self.plan.arena_bytes} bytes, not {len(self.memory.arena)}")
        self.frames = [Frame.of(env) for env in self.plan.frames]
        self.results = aligned(self.plan.result_bytes, 256)

    @property
    def env(self) -> Env:
        return self.plan.env

    @property
    def header(self) -> NDArray[Any]:
        return self.frames[0].header

    @property
    def step(self) -> Mapping[str, NDArray[Any]]:
        return self.frames[0].step

    def array(self, ref: BufferRef) -> Array:
        """An operand with its full extents; of the arena and the results, all from its offset on."""
        match ref.place:
            case Place.ARENA:
                return self.memory.arena[ref.offset :]
            case Place.RESULT:
                return self.results[ref.offset :]
            case Place.WEIGHT:
                return self.memory.weights[ref.name]
            case Place.STATE:
                return self.memory.states[ref.name]
            case Place.STEP:
                return self.frames[ref.frame].step[ref.name]
            case Place.CONST:
                return self.consts[ref.name]

    def pointers(self, launch: Launch) -> list[int]:
        """The header's address and the operands'."""
        return [self.frames[launch.frame].header.ctypes.data, *map(self._address, launch.args)]

    def _address(self, ref: BufferRef) -> int:
        array = self.array(ref)
        raw = array.raw if isinstance(array, Packed) else array
        if not raw.flags.c_contiguous:
            raise ValueError(f"operand {ref} is not contiguous")
        return int(raw.ctypes.data)

    def view(self, ref: BufferRef, type: TensorType, frame: int = 0) -> Array:
        """An operand of a launch with its step's counts; a record that is yet to be written has its full extents."""
        array = self.array(ref)
        if isinstance(array, Packed):
            return array
        if ref.place in (Place.ARENA, Place.RESULT):
            env = self.plan.frames[frame]
            array = array[: type.nbytes(env)].view(type.dtype.numpy).reshape(type.concrete(env))
        if ref.place is Place.STEP and ref.frame != frame:
            return array
        first = type.shape[0] if type.shape else 0
        counts = {Sym.T: "rows", Sym.L: "logit_rows", Sym.B: "seqs"}
        header = self.frames[frame].header
        return array[: int(header[counts[first]])] if isinstance(first, Sym) and first in counts else array

    def outputs(self) -> dict[str, NDArray[Any]]:
        """Views of the last launch's outputs, with its counts."""
        outputs = {}
        for name, (ref, type) in self.plan.outputs.items():
            view = self.view(ref, type, ref.frame)
            assert not isinstance(view, Packed)
            outputs[name] = view
        return outputs


@define(eq=False)
class CpuExecutable(HostExecutable):
    """Segments of kernels, each one foreign call, and reference calls between."""

    device: CpuDevice
    _segments: list[NDArray[Any] | Launch] = field(factory=list)
    _keep: list[object] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        run: list[tuple[int, int, int]] = []
        for launch in self.plan.launches:
            if launch.source is None:
                self._flush(run)
                self._segments.append(launch)
                continue
            pointers = self.pointers(launch)
            block = (ctypes.c_void_p * len(pointers))(*pointers)
            self._keep.append(block)
            x, y, z = launch.geometry.grid
            run.append((self.entries[launch.source.entry], ctypes.addressof(block), x * y * z))
        self._flush(run)

    def _flush(self, run: list[tuple[int, int, int]]) -> None:
        if run:
            self._segments.append(np.array(run, _LAUNCH))
            run.clear()

    def _reference(self, launch: Launch) -> None:
        operands = [self.view(r, t, launch.frame) for r, t in zip(launch.args, launch.types, strict=True)]
        results = launch.op.reference(tuple(operands[: launch.num_inputs]))
        for out, result in zip(operands[launch.num_inputs :], results, strict=True):
            assert not isinstance(out, Packed) and not isinstance(result, Packed)
            out[...] = result

    def launch(self) -> dict[str, NDArray[Any]]:
        """Run the step that header and step arrays describe; outputs are views, valid until the next launch."""
        for segment in self._segments:
            if isinstance(segment, Launch):
                self._reference(segment)
            else:
                self.device.run(segment)
        return self.outputs()


@define(eq=False)
class CpuBench:
    """Runs plans for calibration (routes/measure.py), with the model's weights and one arena that grows."""

    device: CpuDevice
    weights: Mapping[str, Array]
    states: Mapping[str, TensorType]
    env: Env
    consts: Mapping[str, NDArray[Any]]
    memory: CpuMemory = field(init=False)
    _bound: dict[int, CpuExecutable] = field(factory=dict)
    _ballast: NDArray[np.uint8] = field(factory=lambda: np.ones(96 << 20, np.uint8))

    def __attrs_post_init__(self) -> None:
        self.memory = self.device.memory(self.weights, self.states, self.env, 1 << 20)

    @property
    def info(self) -> DeviceInfo:
        return self.device.info

    def compile(self, plans: Sequence[Plan]) -> None:
        self.device.compile(plans)

    def begin(self, plans: Sequence[Plan]) -> None:
        self._bound.clear()
        needed = max(p.arena_bytes for p in plans) if plans else 0
        if len(self.memory.arena) < needed:
            self.memory.arena = aligned(needed)

    def prepare(
        self, plan: Plan, fill: Callable[[Mapping[str, NDArray[Any]], NDArray[Any]], None]
    ) -> Callable[[], float]:
        executable = self.device.bind(plan, self.memory, self.consts, self.device.compile([plan]))
        self._bound[id(plan)] = executable
        fill(executable.step, executable.header)
        values = noise(plan.arena_bytes // 4)
        self.memory.arena[: values.nbytes].view(np.float32)[:] = values

        def run() -> float:
            start = time.perf_counter()
            executable.launch()
            return time.perf_counter() - start

        return run

    def operand(self, plan: Plan, ref: BufferRef, type: TensorType) -> Array:
        return self._bound[id(plan)].view(ref, type)

    def flush(self) -> None:
        self._ballast.sum(dtype=np.uint64)

    def close(self) -> None:
        self.device.close()
