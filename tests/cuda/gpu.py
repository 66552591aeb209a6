"""Runs the route trials on a GPU. Each operand gets an allocation of its own, so that memcheck sees its ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from ninfer.devices.cuda import CudaDevice, Region, cuda_info, libraries
from ninfer.devices.nvrtc import CubinCache
from ninfer.devices.plan import Launch, Plan
from ninfer.ir.types import Env
from ninfer.routes.cuda_layout import device_layout
from ninfer.routes.profile import cache_dir


def open_gpu(index: int = 0) -> CudaDevice:
    libs = libraries()
    info = cuda_info(libs, index)
    return CudaDevice(libs, info, CubinCache(cache_dir() / "programs", info.arch), device_layout, index)


@define
class GpuRun:
    """separate: allocations per operand instead of the guarded arena as a whole."""

    device: CudaDevice
    separate: bool = False
    _freed: list[Region] = field(factory=list)

    def __call__(
        self, launches: Sequence[Launch], arena: NDArray[np.uint8], header: NDArray[np.uint8], spans: dict[int, int]
    ) -> None:
        device, runtime = self.device, self.device.cupy.cuda.runtime
        device.compile([Plan(Env(1, 1, 1), tuple(launches), 0, 0, {})])
        regions: dict[int, Region] = {}

        def put(offset: int, nbytes: int) -> Region:
            region = Region(device.cupy, nbytes)
            device.copy_in(region.pointer, arena[offset : offset + nbytes])
            return region

        if self.separate:
            regions = {offset: put(offset, nbytes) for offset, nbytes in spans.items()}
            address = {offset: r.pointer for offset, r in regions.items()}
        else:
            whole = put(0, len(arena))
            regions = {0: whole}
            address = {offset: whole.pointer + offset for offset in spans}
        head = Region(device.cupy, len(header))
        device.copy_in(head.pointer, header)
        try:
            for i, launch in enumerate(launches):
                pointers = [head.pointer, *(address[ref.offset] for ref in launch.args)]
                if launch.source is not None:
                    device.kernel(launch, pointers, dependent=i > 0 and launches[i - 1].source is not None)()
                else:
                    device.library(launch, pointers, _record(header))()
            device.stream.synchronize()
            for offset, region in regions.items():
                nbytes = spans[offset] if self.separate else len(arena)
                runtime.memcpy(arena.ctypes.data + offset, region.pointer, nbytes, 2)
        finally:
            for region in (*regions.values(), head):
                region.free()


def _record(header: NDArray[np.uint8]) -> Any:
    from ninfer.ir.step import HEADER

    return header.view(HEADER.numpy).reshape(())
