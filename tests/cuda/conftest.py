from __future__ import annotations

from collections.abc import Iterator

import pytest

from ninfer.devices.cpu import cpu_info
from ninfer.devices.cuda import CudaDevice, cuda_missing
from ninfer.devices.cuda_sim import SimPrograms
from ninfer.devices.programs import find_compiler
from ninfer.routes.profile import cache_dir
from tests.cuda.gpu import open_gpu


@pytest.fixture(scope="session")
def sim_programs() -> SimPrograms:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("the simulation needs a C++ compiler (install g++)")
    return SimPrograms(compiler, cache_dir() / "programs", cpu_info().arch)


@pytest.fixture(scope="session")
def gpu() -> Iterator[CudaDevice]:
    reason = cuda_missing()
    if reason is not None:
        pytest.skip(reason)
    device = open_gpu()
    yield device
    device.close()
