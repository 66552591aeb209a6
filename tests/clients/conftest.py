"""Real server processes on real small models, for real clients."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import TINY_GGUF

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0  # the first start of all compiles kernels


class Process:
    """A running ninfer-serve.   lines: what it has written to stderr."""

    def __init__(self, *argv: str) -> None:
        self.lines: list[str] = []
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ninfer.cli.serve", *argv, "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        deadline = time.monotonic() + START_S
        while not any(line.startswith("ready") for line in self.lines):
            assert self.process.poll() is None and time.monotonic() < deadline, "\n".join(self.lines)
            time.sleep(0.02)
        self.url = next(line.split()[1] for line in self.lines if line.startswith("ready"))
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/stats").json()
        return found

    def idle(self) -> bool:
        stats = self.stats()
        requests = stats["requests"]
        return not (requests["admitted"] or requests["open"] or any(slot["is_processing"] for slot in stats["slots"]))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join()
        self.http.close()
        return code


@contextmanager
def serve(*argv: str) -> Iterator[Process]:
    process = Process(*argv)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.process.kill()
            process.process.wait()


def until(true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def tiny() -> Iterator[Process]:
    """A trained Qwen3.5 of ten million parameters: it greets, counts, writes JSON and calls tools."""
    with serve(str(TINY_GGUF), "--max-context", "2048", "--max-concurrency", "4") as process:
        yield process
        assert process.idle(), "something is left behind"
        assert process.stop() == 0
        assert not [line for line in process.lines if "Traceback" in line or " ERROR " in line]


@pytest.fixture(scope="session")
def demo() -> Iterator[Process]:
    """SmolLM2-135M-Instruct."""
    with serve("demo", "--max-context", "1024", "--max-concurrency", "4") as process:
        yield process
        assert process.idle(), "something is left behind"
        assert process.stop() == 0
        assert not [line for line in process.lines if "Traceback" in line or " ERROR " in line]
