from __future__ import annotations

import pytest

from ninfer.devices.cpu import cpu_info
from ninfer.devices.cuda_sim import SimPrograms
from ninfer.devices.programs import find_compiler
from ninfer.routes.profile import cache_dir


@pytest.fixture(scope="session")
def sim_programs() -> SimPrograms:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("the simulation needs a C++ compiler (install g++)")
    return SimPrograms(compiler, cache_dir() / "programs", cpu_info().arch)
