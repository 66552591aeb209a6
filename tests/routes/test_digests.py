"""A measurement counts for the kernels that it was made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from ninfer.config import EngineConfig
from ninfer.devices.cpu import CpuDevice, cpu_info
from ninfer.routes import digest
from ninfer.routes.digest import fresh, route_digest, stamped, texts
from ninfer.routes.profile import DeviceProfile, save_profile
from ninfer.routes.render import TEMPLATES
from ninfer.routes.tables import REGISTRY
from ninfer.runtime.backend import Backend

A, B = (next(r for r in REGISTRY.routes if r.name.startswith(n)) for n in ("linear.cpu.f32", "norm.cpu"))
PROFILE = DeviceProfile(
    "x",
    {"op": ((1, ""), (4, f"{A.name}/warps4"), (8, B.name)), "other": ((2, B.name),)},
    measured={"op": {"4": {f"{B.name}/warps2": 2.0, f"{A.name}/warps4": 1.0}, "8": {A.name: 2.0, B.name: 1.0}}},
)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The text of A's template, followed by the parameter."""
    read = digest._text.__wrapped__
    monkeypatch.setattr(digest, "_text", lambda name: read(name) + (request.param if name == A.template else ""))
    monkeypatch.setattr(digest, "route_digest", route_digest.__wrapped__)


def test_a_template_is_listed_with_all_that_it_uses() -> None:
    found = texts("cuda/linear_stream.cu.j2")
    used = ("mma.h", "linear_ring.h", "linear_tile.h", "linear_ends", "linear_stream_x", "linear_int8.h")
    assert {f"cuda/{name}.j2" for name in (*used, "linear_stream_plain")} < set(found)
    assert len(found) == len(set(found))


def test_nothing_changed_nothing_goes() -> None:
    profile = stamped(PROFILE, REGISTRY.routes)
    assert fresh(profile, REGISTRY.routes) == (profile, 0)
    again = DeviceProfile.from_json(profile.to_json(), "a file")
    assert fresh(again, REGISTRY.routes) == (profile, 0)


def test_comments_and_blanks_are_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = route_digest(A)
    (tmp_path / "cpu").mkdir()
    for file in (TEMPLATES / "cpu").glob("*.j2"):
        (tmp_path / "cpu" / file.name).write_text(f"// a word more\n\n{{# and one #}}  {file.read_text()}")
    monkeypatch.setattr(digest, "TEMPLATES", tmp_path)
    monkeypatch.setattr(digest, "_text", digest._text.__wrapped__)
    assert route_digest.__wrapped__(A) == before


@pytest.mark.parametrize("changed", ["int one_more;"], indirect=True)
def test_bands_that_a_changed_kernel_won_or_lost_go(changed: None) -> None:
    kept, stale = fresh(evolve(PROFILE, digests=BEFORE), REGISTRY.routes)
    assert stale == 2 and kept.lookup("op", 3) is None and kept.lookup("op", 8) is None
    assert kept.lookup("other", 2) == B.name


BEFORE = stamped(PROFILE, REGISTRY.routes).digests


def test_a_profile_of_before_or_of_routes_that_are_gone_is_stale() -> None:
    assert fresh(PROFILE, REGISTRY.routes)[1] == 3
    gone = evolve(PROFILE, routes={"op": ((1, "linear.never/warps4"),)})
    assert fresh(stamped(gone, REGISTRY.routes), REGISTRY.routes)[1] == 1


def test_layers_keep_their_own_digests() -> None:
    old = evolve(PROFILE, digests={"op": ("", "0", "0"), "other": ("0",)})
    both = old.layered(
        evolve(stamped(PROFILE, REGISTRY.routes), routes={"op": PROFILE.routes["op"]}, digests={"op": BEFORE["op"]})
    )
    assert fresh(both, REGISTRY.routes)[1] == 1
    nothing_won = evolve(PROFILE, routes={})
    assert "op" not in PROFILE.layered(nothing_won).routes


def test_the_start_says_what_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no profile of the user's
    info = cpu_info()
    backend = Backend(device=CpuDevice(info, None, 1), registry=REGISTRY, free_bytes=None)
    lines = list[str]()
    for profile in (evolve(PROFILE, digests={**BEFORE, "other": ("0",)}), stamped(PROFILE, REGISTRY.routes)):
        save_profile(profile, tmp_path / "p.json")
        config = EngineConfig(model="demo", device_profile_path=tmp_path / "p.json")
        backend.lowering(config, lambda label, text: lines.append(text))
    assert "2 of 3 bands used, 1 stale (run ninfer-calibrate" in lines[0] and "3 of 3 bands used" in lines[1]
    assert "stale" not in lines[1]
