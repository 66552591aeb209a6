"""The disk tier: what survives a kill, and what damage, foreign files and a disk that refuses do."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from ninfer.errors import UsageError
from ninfer.runtime.kv import disk as disk_module
from ninfer.runtime.kv.disk import DiskTier
from ninfer.runtime.kv.prefix import ROOT, Chunk
from ninfer.runtime.kv.tiers import Image, StoredPage, image_of
from tests.checkpoints import TINY_GGUF

SIZE = 20_000


def payload(number: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def page(number: int) -> StoredPage:
    """Everything about it follows from its number."""
    key = blake2b(str(number).encode(), digest_size=16).digest()
    return StoredPage(Chunk(key, tuple(range(number, number + 64))), ROOT, payload(number))


def image(number: int, tail: int = 3) -> Image:
    state = payload(number + 1000)
    tokens = tuple(range(tail))
    return image_of(page(number).chunk.key, 5, tokens, state, payload(number + 2000) if tail else None)


def assert_whole(tier: DiskTier, number: int) -> None:
    want, got = page(number), tier.page(page(number).chunk.key)
    assert got is not None and got.chunk == want.chunk and got.parent == want.parent
    np.testing.assert_array_equal(got.data, want.data)


def test_pages_and_images_come_back_after_a_restart(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1 << 30)
    for n in range(5):
        tier.put_page(page(n))
    tier.put_image(image(3))
    tier.put_image(image(3, tail=0))
    tier.close()
    tier.close()
    again = DiskTier(tmp_path, 1 << 30)
    assert len(again) == 7 and again.used_bytes == sum(f.stat().st_size for f in tmp_path.rglob("*.kv"))
    for n in range(5):
        assert_whole(again, n)
    found = {i.tail: i for i in again.images(page(3).chunk.key)}
    assert set(found) == {(), (0, 1, 2)} and found[()].depth == 5
    state, tail_page = found[0, 1, 2].load() or (None, None)
    np.testing.assert_array_equal(state, payload(1003))
    np.testing.assert_array_equal(tail_page, payload(2003))
    assert found[()].load()[1] is None  # type: ignore[index]
    assert again.page(page(77).chunk.key) is None and not list(again.images(page(77).chunk.key))
    again.close()
    blind = DiskTier(tmp_path, 1 << 30, restore=False)
    assert blind.page(page(1).chunk.key) is None and not blind.has_page(page(1).chunk.key)
    assert blind.has_written(page(1).chunk.key) and not list(blind.images(page(3).chunk.key))
    blind.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "header", "gone", "swapped"])
def test_a_damaged_file_is_found_out_reported_and_removed(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(tmp_path, 1 << 30)
    tier.put_page(page(1))
    tier.put_page(page(2))
    tier.flush()
    path, other = tier._path((page(1).chunk.key, None)), tier._path((page(2).chunk.key, None))
    raw = bytearray(path.read_bytes())
    match damage:
        case "flip":
            raw[random.Random(1).randrange(200, len(raw))] ^= 1
            path.write_bytes(raw)
        case "cut":
            path.write_bytes(raw[:-1])
        case "empty":
            path.write_bytes(b"")
        case "header":
            path.write_bytes(b"NOTMINE!" + raw[8:])
        case "gone":
            path.unlink()
        case "swapped":  # whole, but another page's
            path.write_bytes(other.read_bytes())
    assert tier.page(page(1).chunk.key) is None
    assert tier.num_bad == 1 and path.name in caplog.text and not path.exists()
    assert not tier.has_page(page(1).chunk.key)
    assert_whole(tier, 2)
    tier.put_page(page(1))  # and it is written again
    tier.flush()
    assert_whole(tier, 1)
    tier.close()


def test_foreign_files_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path, 1 << 30)
    tier.put_page(page(1))
    tier.close()
    folder = tier._path((page(1).chunk.key, None)).parent
    (folder / "notes.txt").write_text("mine")
    (folder / "x.kv").write_bytes(b"NINFERKV" + bytes(200))
    (tmp_path / "README").write_text("mine")
    again = DiskTier(tmp_path, 1 << 30)
    assert len(again) == 1 and "2 files in" in caplog.text
    assert (folder / "notes.txt").read_text() == "mine" and (folder / "x.kv").exists()
    again.close()


def test_the_least_recently_used_files_go_when_the_budget_is_spent(tmp_path: Path) -> None:
    each = len(disk_module.encode(1, disk_module._Meta(0, tuple(range(64)), 0, SIZE, ROOT, ROOT), None, payload(0)))
    tier = DiskTier(tmp_path, 4 * each)
    for n in range(4):
        tier.put_page(page(n))
    tier.flush()
    assert_whole(tier, 0)
    tier.put_page(page(4))
    tier.flush()
    assert [tier.has_page(page(n).chunk.key) for n in range(5)] == [True, False, True, True, True]
    assert tier.stats()["evicted"] == 1
    assert tier.used_bytes == 4 * each == sum(f.stat().st_size for f in tmp_path.rglob("*.kv"))
    tier.close()
    smaller = DiskTier(tmp_path, 2 * each)
    assert len(smaller) == 2 and smaller.used_bytes == 2 * each
    smaller.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_refuses_is_reported_and_tried_again_later(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    tier = DiskTier(tmp_path, 1 << 30, clock=lambda: now[0])
    tier.put_page(page(1))
    tier.flush()

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        tier.put_page(page(2))
        tier.flush()
    assert os.strerror(code) in caplog.text and tier.num_failed == 1
    assert_whole(tier, 1)
    tier.put_page(page(3))  # too early
    tier.flush()
    assert tier.num_dropped == 1 and not tier.has_written(page(3).chunk.key)
    now[0] = disk_module.PAUSE_S + 1
    tier.put_page(page(2))
    tier.flush()
    assert_whole(tier, 2)
    assert not list(tmp_path.rglob("*.tmp"))
    tier.close()


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UsageError, match=r"--disk-kv-path: cannot use .*file/x: Not a directory; choose another folder"
    ):
        DiskTier(tmp_path / "file" / "x", 1 << 30)


WRITER = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.runtime.test_disk_tier import DiskTier, image, page
tier = DiskTier(Path({folder!r}), 1 << 30)
n = {first}
while True:
    tier.put_page(page(n))
    tier.put_image(image(n))
    tier.flush()
    print(n, flush=True)
    n += 1
"""


@pytest.mark.parametrize("kills", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_a_kill_at_any_point_loses_nothing_written_and_invents_nothing(tmp_path: Path, kills: int) -> None:
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    rng = random.Random(seed)
    written = 0
    for _ in range(kills):
        script = WRITER.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path), first=written)
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            last = int(process.stdout.readline())  # it has begun
            time.sleep(rng.random() * 0.1)
            process.send_signal(signal.SIGKILL)
            for line in process.stdout:
                if line.endswith("\n"):
                    last = int(line)
        tier = DiskTier(tmp_path, 1 << 30)
        for n in range(last + 1):
            assert_whole(tier, n)
            (found,) = tier.images(page(n).chunk.key)
            state, tail_page = found.load() or (None, None)
            np.testing.assert_array_equal(state, payload(n + 1000))
            np.testing.assert_array_equal(tail_page, payload(n + 2000))
        maybe = tier.page(page(last + 1).chunk.key)  # renamed, but not yet told
        assert maybe is None or np.array_equal(maybe.data, page(last + 1).data)
        assert tier.num_bad == 0 and not list(tmp_path.rglob("*.tmp"))
        tier.close()
        written = last + 1


FINGERPRINT = """
from ninfer.config import EngineConfig
from ninfer.runtime.load import _fingerprint, open_model
for changes in ({{}}, {{"kv_dtype": "int8"}}, {{"gdn_state_fp16": True}}, {{"rope_yarn": 2.0}}):
    config = EngineConfig(model={model!r}, **changes)
    print(_fingerprint(open_model(config, tokenizer_needed=False), config))
"""


def test_a_model_has_one_folder_whatever_process_asks() -> None:
    """A set's order is drawn by each process anew."""
    script = FINGERPRINT.format(model=str(TINY_GGUF))
    told = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert told[0] == told[1] and len(set(told[0])) == 4
