"""A pretended GPU: the rendered CUDA text, compiled by the host compiler, run thread by thread.

It proves indexing, layouts, barriers and the order of reductions. It says nothing about speed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from ninfer.devices.base import DeviceInfo, Source
from ninfer.devices.cpu import CpuMemory, HostExecutable, aligned
from ninfer.devices.plan import Launch, Plan
from ninfer.devices.programs import ProgramCache
from ninfer.errors import DeviceError
from ninfer.formats.bits import U8Array
from ninfer.formats.quant import Packed, QuantFormat
from ninfer.ir.types import Array, Env, TensorType

_SHIM = Path(__file__).resolve().parent.parent / "templates" / "sim" / "cuda_shim.hpp"
_ONE_AT_A_TIME = Lock()  # the simulation's own state is static
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-fno-math-errno",
          "-fno-trapping-math", "-fsanitize=alignment", "-w")  # fmt: skip

# By format: bytes as stored and shape -> bytes as kernels read them.
Layout = Callable[[QuantFormat], Callable[[U8Array, Sequence[int]], U8Array]]

SIM_FEATURES = frozenset({"cuda", "sm80", "sm86", "sm89", "sm90", "sm120a", "shared227", "dp4a", "mma"})


def sim_info(units: int = 4) -> DeviceInfo:
    return DeviceInfo("cuda-sim", "simulated GPU", "cuda-sim", SIM_FEATURES, "sim", units, 16 << 30)


class SimPrograms(ProgramCache):
    """Quick to compile rather than quick to run."""

    @property
    def flags(self) -> tuple[str, ...]:
        return (*_FLAGS, *(() if self.portable else self.compiler.native))

    def _fits(self, unit: Sequence[Source], source: Source) -> bool:
        """Headers of kernels are made for one at a time: no other header of the unit may define the same names."""
        others = {h for s in unit for h in s.headers}
        names = {n for h in others - set(source.headers) for n in _defined(h)}
        return super()._fits(unit, source) and not any(n in names for h in source.headers[1:] for n in _defined(h))


def _defined(header: str) -> list[str]:
    """Functions and types of a header."""
    return re.findall(r"^(?:__device__ __forceinline__ \w+|typedef \w+) (\w+)(?=[(;])", header, re.MULTILINE)


def sim_source(source: Source) -> Source:
    """The kernel behind the shim, in a namespace of its own, with an entry that the host can call."""
    text = f"namespace {source.entry}_unit {{\n{source.text}\nNI_SIM_EXPORT({source.entry})\n}}\n"
    text += "".join(f"#undef {name}\n" for name in re.findall(r"^#define (\w+)", source.text, re.MULTILINE))
    return Source(f"{source.entry}_sim", text, (_SHIM.read_text(), *source.headers))


@define
class SimDevice:
    """layout: how weights lie on the device. order: 1 runs the threads of a block from last to first."""

    programs: ProgramCache
    layout: Layout
    info: DeviceInfo = field(factory=sim_info)
    order: int = 0

    def close(self) -> None:
        pass

    def memory(
        self, weights: Mapping[str, Array], states: Mapping[str, TensorType], env: Env, arena_bytes: int
    ) -> CpuMemory:
        arrays: dict[str, NDArray[Any]] = {}
        for name, type in states.items():
            shape = type.concrete(env)
            flat = aligned(int(np.prod(shape)) * type.dtype.numpy.itemsize, 256)
            arrays[name] = flat.view(type.dtype.numpy).reshape(shape)
        return CpuMemory({n: self.on_device(w) for n, w in weights.items()}, arrays, aligned(arena_bytes, 256))

    def on_device(self, weight: Array) -> Array:
        """The bytes as a GPU would hold them, at the alignment that its allocator gives."""
        if isinstance(weight, Packed):
            raw = self.layout(weight.format)(weight.raw.reshape(-1), weight.shape)
            return Packed(weight.format, _aligned_copy(raw), weight.shape)
        return _aligned_copy(weight)

    def compile(self, plans: Sequence[Plan]) -> dict[str, int]:
        """Host entries of all kernels of the plans, by the kernels' names."""
        sources = list(dict.fromkeys(s for plan in plans for s in plan.sources))
        found = self.programs.addresses([sim_source(s) for s in sources])
        return {s.entry: found[f"{s.entry}_sim"] for s in sources}

    def bind(
        self, plan: Plan, memory: CpuMemory, consts: Mapping[str, NDArray[Any]], entries: Mapping[str, int]
    ) -> SimExecutable:
        on_device = {name: _aligned_copy(array) for name, array in consts.items()}
        return SimExecutable(plan, memory, on_device, entries, self)


def _aligned_copy(array: NDArray[Any]) -> NDArray[Any]:
    flat = aligned(array.nbytes, 256)
    copy = flat.view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@define(eq=False)
class SimExecutable(HostExecutable):
    device: SimDevice

    def _gemm_s8(self, launch: Launch, p: Mapping[str, Any]) -> None:
        """What devices/cuda.py has a library do, by numpy: sums below 2**53 are exact in float64."""
        rows, n, k = int(self.header[str(p["rows_field"])]), int(p["n"]), int(p["k"])

        def operand(name: str, count: int, dtype: type[np.generic]) -> NDArray[Any]:
            array = self.array(launch.args[int(p[name])])
            assert not isinstance(array, Packed)
            flat = array.reshape(-1).view(np.uint8)[int(p[f"{name}_offset"]) :]
            return flat[: count * np.dtype(dtype).itemsize].view(dtype)

        a, b = (operand(x, r * k, np.int8).reshape(r, k).astype(np.float64) for x, r in (("a", rows), ("b", n)))
        operand("c", rows * n, np.int32)[:] = (a @ b.T).reshape(-1)

    def _run(self, launch: Launch) -> None:
        if launch.library is not None and launch.library[0] == "gemm_s8":
            self._gemm_s8(launch, launch.library[1])
            return
        if launch.source is None:
            what = launch.library[0] if launch.library else "the op's reference"
            raise DeviceError(f"{launch.op.key}: the simulation cannot run {what}")
        if launch.stages:
            self._run_woven(launch, launch.source)
            return
        self._run_kernel(launch, launch.source, self.pointers(launch))

    def _run_kernel(self, launch: Launch, source: Source, pointers: Sequence[int]) -> None:
        geometry, entry = launch.geometry, source.entry
        run_kernel(
            entry, self.entries[entry], pointers, geometry.grid, geometry.block, geometry.shared,
            order=self.device.order,
        )  # fmt: skip

    def _run_woven(self, launch: Launch, source: Source) -> None:
        """Blocks run one after another here, so several run one stage after another; a single one runs all at once."""
        table = launch.table(self._address)
        header, *rest = self.pointers(launch)
        ends = range(1, len(launch.stages) + 1) if launch.geometry.grid[0] > 1 else [len(launch.stages)]
        first = 0
        for last in ends:
            table[0] = first | last << 32
            self._run_kernel(launch, source, [header, table.ctypes.data, *rest])
            first = last

    def launch(self) -> dict[str, NDArray[Any]]:
        for launch in self.plan.launches:
            self._run(launch)
        return self.outputs()


def run_kernel(
    name: str,
    address: int,
    pointers: Sequence[int],
    grid: tuple[int, int, int],
    block: int,
    shared: int,
    *,
    order: int = 0,
) -> None:
    """Run all blocks, one after another.   Raises DeviceError with the place where the kernel went wrong."""
    call = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int,
        ctypes.c_char_p, ctypes.c_int,
    )(address)  # fmt: skip
    args, extents = (ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int * 3)(*grid)
    error = ctypes.create_string_buffer(512)
    with _ONE_AT_A_TIME:
        failed = call(
            ctypes.addressof(args), len(pointers), ctypes.addressof(extents), block, shared, order, error, 512
        )
    if failed:
        raise DeviceError(f"{name}: {error.value.decode()}")
