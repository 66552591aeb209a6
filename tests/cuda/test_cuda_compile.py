"""Every kernel that the route tests render compiles for every architecture that ninfer supports, without a driver."""

from __future__ import annotations

import pytest

from ninfer.devices.base import DeviceInfo, Source
from ninfer.devices.cuda import features_of
from ninfer.devices.nvrtc import ARCHITECTURES, CubinCache, nvrtc_missing
from ninfer.ir.op import snake
from ninfer.routes.profile import cache_dir
from tests.cuda.parity import ALL_OPS, lay_out, lowering_for, trials

pytestmark = [
    pytest.mark.slow,  # some minutes: python -m pytest -m slow
    pytest.mark.skipif(nvrtc_missing() is not None, reason=nvrtc_missing() or ""),
]


@pytest.mark.parametrize("op", [snake(op.__name__) for op in ALL_OPS])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles(arch: str, op: str) -> None:
    info = DeviceInfo("cuda", arch, arch, features_of(arch), arch, 100, 0)
    lowering, sources = lowering_for(info), dict[str, Source]()
    for trial in trials(info):
        # further tunings differ in numbers of warps and splits only
        if trial.case.op.key == op and trial.candidate.tuning in trial.candidate.route.tunings[:1]:
            for launch in lay_out(trial, lowering).launches:
                if launch.source is not None:
                    sources[launch.source.entry] = launch.source
    cubins = CubinCache(cache_dir() / "programs", arch).cubins(list(sources.values()))
    assert cubins.keys() == sources.keys()
