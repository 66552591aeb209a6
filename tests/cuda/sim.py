"""Runs a trial's launches in the simulation, kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from attrs import frozen
from numpy.typing import NDArray

from ninfer.devices.cuda_sim import SimPrograms, run_kernel, sim_source
from ninfer.devices.plan import Launch


@frozen
class SimRun:
    """order: 1 runs the threads of a block from last to first. Library calls skip the test."""

    programs: SimPrograms
    order: int = 0

    def __call__(
        self, launches: Sequence[Launch], arena: NDArray[np.uint8], header: NDArray[np.uint8], spans: dict[int, int]
    ) -> None:
        for launch in launches:
            if launch.source is None:
                pytest.skip("a library call")
            (address,) = self.programs.addresses([sim_source(launch.source)]).values()
            pointers = [header.ctypes.data, *(arena.ctypes.data + ref.offset for ref in launch.args)]
            run_kernel(launch.source.entry, address, pointers, launch.geometry.grid, launch.geometry.block,
                       launch.geometry.shared, order=self.order)  # fmt: skip
