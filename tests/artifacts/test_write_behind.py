"""Bytes are sent to the disk while others are made; what the disk says of them is not lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ninfer.artifacts import ninfer_write as writing
from ninfer.artifacts import open_artifact
from ninfer.artifacts.convert import make_plan
from ninfer.artifacts.convert_objects import to_artifact
from ninfer.artifacts.recipes import recipe
from ninfer.errors import ArtifactError
from tests.checkpoints import DATA


def test_a_write_that_fails_behind_the_conversion_fails_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = to_artifact(make_plan(recipe("bf16"), open_artifact(DATA / "llama"), {}, name="x"))
    flushed = list[int]()

    def fdatasync(fd: int) -> None:
        flushed.append(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(writing, "FLUSH_BYTES", 1000)
    monkeypatch.setattr(os, "fdatasync", lambda fd: flushed.append(fd))
    written = writing.write_artifact(new, tmp_path / "good.ninfer")
    writing.check_written(written, tmp_path / "good.ninfer")
    assert flushed
    flushed.clear()
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(ArtifactError, match=r"bad\.ninfer: cannot be written: Input/output error"):
        writing.write_artifact(new, tmp_path / "bad.ninfer")
    assert len(flushed) == 1 and [p.name for p in tmp_path.iterdir()] == ["good.ninfer"]
