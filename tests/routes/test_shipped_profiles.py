"""Profiles in profiles/: they parse, and what they chose still exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from ninfer.routes.cuda import cuda_routes
from ninfer.routes.profile import SHIPPED, DeviceProfile
from ninfer.routes.route import Candidate

FILES = sorted(SHIPPED.glob("*.json"))


def test_there_is_one() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_shipped_profile_names_candidates_that_exist(path: Path) -> None:
    profile = DeviceProfile.from_json(path.read_text(), str(path))
    assert profile.hardware_class == path.stem
    units = profile.device["units"]
    assert isinstance(units, int)
    known = {Candidate(route, tuning).id for route in cuda_routes(units) for tuning in route.tunings} | {""}
    chosen = {(key, name) for key, bands in profile.routes.items() for _, name in bands}
    assert {(key, name) for key, name in chosen if name not in known} == set()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_shipped_profile_tells_of_which_kernels_it_was_measured(path: Path) -> None:
    """Bands of kernels that were changed since are ignored with a line; bands that tell nothing would always be."""
    profile = DeviceProfile.from_json(path.read_text(), str(path))
    for key, bands in profile.routes.items():
        digests = profile.digests[key]
        assert [bool(d) for d in digests] == [bool(winner) for _, winner in bands] and "gone" not in digests
