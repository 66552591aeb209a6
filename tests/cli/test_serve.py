from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoints import TINY_GGUF

ROOT = Path(__file__).resolve().parents[2]

# A server around a fake model, as a program: signals and exit codes are what is tested here.
SERVER = """
import asyncio, json, sys, time
sys.path.insert(0, {root!r})
from tests.runtime.fake_runner import FakeRunner, engine, request
from ninfer.cli import serve
from ninfer.errors import ArtifactError

def slowly(history, seed):
    time.sleep(0.01)
    return len(history)

def start():
    time.sleep({load_s})
    if {fails}:
        raise ArtifactError("no/such.gguf: no such file")
    return engine(FakeRunner(token=slowly)), build

def build(client):
    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            while True:
                event = (await receive())["type"]
                print(event, flush=True)
                await send({{"type": event + ".complete"}})
                if event.endswith("shutdown"):
                    return
        await send({{"type": "http.response.start", "status": 200, "headers": []}})
        async for delta in client.stream(request(scope["path"], max_tokens=int(scope["query_string"] or 5))):
            text = json.dumps([t.id for t in delta.tokens]) + str(delta.finish) + "\\n"
            await send({{"type": "http.response.body", "body": text.encode(), "more_body": True}})
        await send({{"type": "http.response.body", "body": b""}})
    return app

serve.load_engine = lambda config, console, log: start()
sys.exit(serve.main(["fake", "--port", "0", "--drain-timeout-ms", "{drain_ms}"]))
"""


class Server:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.port = int(self.wait_for("listen").split("http://127.0.0.1:")[1].split()[0])

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def wait_for(self, start: str) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if line.startswith(start):
                    return line
            time.sleep(0.01)
        raise AssertionError(f"no line {start!r} in {self.lines}")

    def get(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        return connection.getresponse()

    def end(self) -> int:
        code = self.process.wait(60)
        self._reader.join()
        return code


@contextmanager
def server(*, load_s: float = 0.0, fails: bool = False, drain_ms: int = 5000) -> Iterator[Server]:
    code = SERVER.format(root=str(ROOT), load_s=load_s, fails=fails, drain_ms=drain_ms)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield Server(process)
    finally:
        process.kill()
        process.wait()


def test_it_serves_and_sigterm_is_a_clean_stop() -> None:
    with server() as s:
        s.wait_for("ready")
        response = s.get("/a?7")
        assert response.status == 200
        assert len(response.read().splitlines()) == 7
        s.process.send_signal(signal.SIGTERM)
        assert s.end() == 0
        assert s.process.stdout and s.process.stdout.read().split() == ["lifespan.startup", "lifespan.shutdown"]
        assert not any("Traceback" in line for line in s.lines)


def test_while_loading_every_route_is_a_503_with_retry_after() -> None:
    with server(load_s=60) as s:
        response = s.get("/v1/models")
        assert (response.status, response.headers["retry-after"]) == (503, "2")
        assert json.loads(response.read())["error"]["code"] == "model_loading"
        s.process.send_signal(signal.SIGTERM)
        assert s.end() == 0


def test_ctrl_c_while_loading_ends_at_once() -> None:
    with server(load_s=60) as s:
        assert s.get("/").status == 503  # the loop runs, so signals are its own
        s.process.send_signal(signal.SIGINT)
        assert s.end() == 130


def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_2() -> None:
    with server(fails=True) as s:
        assert s.end() == 2
        assert s.lines[-1] == "ninfer-serve: no/such.gguf: no such file"
        assert not any("Traceback" in line for line in s.lines)


def damaged(folder: Path, how: str) -> tuple[Path, str]:
    """A model as people have it after a bad download, and what the one line has to name."""
    file = folder / "model.gguf"
    whole = TINY_GGUF.read_bytes()
    match how:
        case "cut":
            file.write_bytes(whole[: len(whole) // 2])
            return file, "incomplete"
        case "magic":
            file.write_bytes(b"JUNK" + whole[4:])
            return file, "not a GGUF file"
        case "architecture":
            file.write_bytes(whole.replace(b"qwen35", b"qwen99"))
            return file, "qwen99"
        case _:
            return folder, "found nothing there"


@pytest.mark.parametrize("how", ["cut", "magic", "architecture", "empty folder"])
def test_a_damaged_model_is_one_line_that_names_it_and_exit_code_2(tmp_path: Path, how: str) -> None:
    path, named = damaged(tmp_path, how)
    command = [sys.executable, "-m", "ninfer.cli.serve", str(path), "--port", "0", "--device", "cpu-numpy"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    last = run.stderr.splitlines()[-1]
    assert run.returncode == 2, run.stderr
    assert last.startswith(f"ninfer-serve: {path}: ") and named in last
    assert "Traceback" not in run.stderr


def test_a_stop_lets_open_streams_finish() -> None:
    with server() as s:
        s.wait_for("ready")
        response = s.get("/a?50")
        response.readline()
        s.process.send_signal(signal.SIGINT)
        assert len(response.read().splitlines()) == 49
        assert s.end() == 0


def test_a_stop_ends_streams_that_take_too_long() -> None:
    with server(drain_ms=50) as s:
        s.wait_for("ready")
        response = s.get("/a?1000")
        response.readline()
        s.process.send_signal(signal.SIGTERM)
        assert response.read().splitlines()[-1] == b"[]error"
        assert s.end() == 0


def test_a_second_ctrl_c_ends_at_once() -> None:
    with server(drain_ms=60_000) as s:
        s.wait_for("ready")
        response = s.get("/a?1000")
        response.readline()
        s.process.send_signal(signal.SIGINT)
        s.wait_for("stopping")
        s.process.send_signal(signal.SIGINT)
        assert s.end() == 130


def ninfer_serve(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ninfer.cli.serve", *argv],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_busy_port_is_one_line_and_exit_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = ninfer_serve("demo", "--port", str(port))
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert str(port) in line and "in use" in line and "--port" in line


@pytest.mark.parametrize(
    "argv", [["demo", "--port", "x"], ["demo", "--host", "no such host"], ["demo", "--kv-dtype", "float7"], []]
)
def test_a_bad_flag_is_one_line_and_exit_code_2(argv: list[str]) -> None:
    result = ninfer_serve(*argv)
    assert result.returncode == 2 and not result.stdout
    [line] = result.stderr.splitlines()
    assert line.startswith("ninfer-serve: ")


def test_help_is_exit_code_0() -> None:
    result = ninfer_serve("--help")
    assert result.returncode == 0 and "--max-context" in result.stdout
