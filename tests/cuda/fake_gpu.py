"""A GPU of host memory: what devices/cuda.py asks of cupy and the driver, with kernels run by the simulation.

A captured graph is the list of operations that were enqueued; freed and foreign addresses are not checked.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

from ninfer.devices.base import Source
from ninfer.devices.cuda import Libraries
from ninfer.devices.cuda_sim import SimPrograms, run_kernel, sim_source


class Code(IntEnum):
    CUDA_SUCCESS = 0


class CUDARuntimeError(RuntimeError):
    pass


class FakeArray(np.ndarray):
    def set(self, values: np.ndarray, stream: Any = None) -> None:
        self[...] = values

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


class Stream:
    ptr = 77

    def __init__(self, non_blocking: bool = False) -> None:
        self.recording: list[Callable[[], object]] | None = None

    def do(self, action: Callable[[], object]) -> None:
        if self.recording is None:
            action()
        else:
            self.recording.append(action)

    def wait_event(self, event: Any) -> None:
        assert self.recording is None and event.recorded, "an event is waited for that nobody records"

    def use(self) -> Stream:
        return self

    def begin_capture(self) -> None:
        self.recording = []

    def end_capture(self) -> Any:
        actions, self.recording = self.recording or [], None

        def launch(stream: Stream) -> None:
            for action in actions:
                action()

        return SimpleNamespace(launch=launch, upload=lambda stream: None, actions=actions)

    def synchronize(self) -> None:
        assert self.recording is None, "a synchronising call inside a capture"


class Event:
    def __init__(self, **settings: Any) -> None:
        self.recorded = False

    def record(self, stream: Stream) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        pass

    @property
    def done(self) -> bool:
        return self.recorded


class FakeGpu:
    """free_bytes: what memGetInfo reports. dependent: for each launch, whether it had the attribute."""

    def __init__(self, *, free_bytes: int = 8 << 30, driver_version: int = 13000, major: int = 9) -> None:
        self.buffers: dict[int, Any] = {}
        self.current: Stream | None = None
        self.addresses: dict[str, int] = {}
        self.dependent: list[bool] = []
        self.granted: dict[int, int] = {}
        self.free_bytes, self.driver_version, self.major = free_bytes, driver_version, major

    @property
    def libs(self) -> Libraries:
        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            malloc=self.malloc,
            free=lambda p: self.buffers.pop(p, None),
            memcpy=lambda dst, src, n, kind: ctypes.memmove(dst, src, n),
            memcpyAsync=lambda dst, src, n, kind, stream: self.do(lambda: ctypes.memmove(dst, src, n)),
            memsetAsync=lambda p, value, n, stream: self.do(lambda: ctypes.memset(p, value, n)),
            memGetInfo=lambda: (self.free_bytes, self.free_bytes),
            getDeviceCount=lambda: 1,
            setDevice=lambda i: None,
            driverGetVersion=lambda: self.driver_version,
            getDeviceProperties=lambda i: {
                "name": b"Fake GPU 1", "major": self.major, "minor": 0,
                "multiProcessorCount": 4, "totalGlobalMem": 8 << 30,
            },
        )  # fmt: skip
        cuda = SimpleNamespace(
            runtime=runtime,
            Stream=self.stream,
            Event=Event,
            get_elapsed_time=lambda a, b: 1.0,
            UnownedMemory=lambda ptr, size, owner: SimpleNamespace(ptr=ptr, size=size),
            MemoryPointer=lambda memory, offset: memory,
            alloc_pinned_memory=lambda n: bytearray(n),
        )
        cupy = SimpleNamespace(cuda=cuda, ndarray=self.array, asnumpy=lambda a, stream=None: np.array(a))
        driver = SimpleNamespace(
            CUlaunchConfig=SimpleNamespace,
            CUlaunchAttribute=lambda: SimpleNamespace(value=SimpleNamespace()),
            CUlaunchAttributeID=SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6),
            CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8),
            CUstream=lambda p: p,
            cuModuleLoadData=lambda cubin: (Code(0), cubin.decode()),
            cuModuleGetFunction=lambda module, name: (Code(0), self.addresses[name.decode()]),
            cuFuncSetAttribute=self.grant,
            cuLaunchKernelEx=self.launch,
        )
        return Libraries(cupy, driver)

    def stream(self, non_blocking: bool = False) -> Stream:
        """The first is the one that captures; what others are given is done at once."""
        made = Stream()
        self.current = self.current or made
        return made

    def do(self, action: Callable[[], object]) -> None:
        assert self.current is not None
        self.current.do(action)

    def malloc(self, n: int) -> int:
        assert self.current is None or self.current.recording is None, "an allocation inside a capture"
        buffer = np.full(n + 256, 0xEE, np.uint8)
        pointer = (buffer.ctypes.data + 255) // 256 * 256
        self.buffers[pointer] = buffer
        return pointer

    def array(self, shape: tuple[int, ...], dtype: Any, memptr: Any) -> FakeArray:
        raw = (ctypes.c_char * max(memptr.size, 1)).from_address(memptr.ptr)
        return np.frombuffer(raw, dtype, int(np.prod(shape))).reshape(shape).view(FakeArray)

    def grant(self, function: int, attribute: int, value: int) -> tuple[Code]:
        self.granted[function] = value
        return (Code(0),)

    def launch(self, config: Any, function: int, params: int, extra: int) -> tuple[Code]:
        name = next(n for n, a in self.addresses.items() if a == function)
        assert config.sharedMemBytes <= max(48 << 10, self.granted.get(function, 0)), "shared memory was not granted"
        places = (ctypes.c_void_p * self.counts[name]).from_address(params)
        pointers = [ctypes.c_void_p.from_address(p or 0).value or 0 for p in places]
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        shared, block = config.sharedMemBytes, config.blockDimX
        self.dependent.append(getattr(config, "numAttrs", 0) == 1)
        self.do(lambda: run_kernel(name, function, pointers, grid, block, shared))
        return (Code(0),)

    counts: dict[str, int]


class FakePrograms:
    """Cubins that are the kernels' names; the fake GPU knows their host entries."""

    def __init__(self, gpu: FakeGpu, sim: SimPrograms) -> None:
        self.gpu, self.sim = gpu, sim
        gpu.counts = {}

    def cubins(self, sources: Sequence[Source], progress: Any = None) -> dict[str, bytes]:
        found = self.sim.addresses([sim_source(s) for s in sources])
        for s in sources:
            self.gpu.addresses[s.entry] = found[f"{s.entry}_sim"]
            text = s.text[s.text.index(f" {s.entry}(") :]
            text = text[: text.index(")")]
            words = [int(n) - 1 for n in re.findall(r"Words<(\d+)>", text)]  # a struct of pointers is one parameter
            self.gpu.counts[s.entry] = text.count(",") + 1 + sum(words)
        return {s.entry: s.entry.encode() for s in sources}
