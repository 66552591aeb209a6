"""The request log, and the limits on requests."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ninfer.api.request_log import RequestLog
from ninfer.cli.serve import open_request_log
from ninfer.config import EngineConfig, ServeConfig
from ninfer.errors import NinferError, UsageError
from tests.api.conftest import FakeClient, Start, until

SECRET = "a-phrase-of-the-user"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RequestLog]:
    found = RequestLog(tmp_path / "log.jsonl", max_mib=0, keep=1, server={"model": "toy"})
    yield found
    found.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def records(log: RequestLog, path: Path) -> list[dict[str, Any]]:
    log.close()
    return lines(path)


def test_each_request_leaves_its_lines_and_not_its_text(start: Start, log: RequestLog, tmp_path: Path) -> None:
    server = start(log=log)
    server.says("one ", "two")
    server.chat(SECRET, user="me")
    server.chat(SECRET, stream=True, temperature=0.5)
    server.chat(SECRET, max_tokens="many")
    server.client.failure = NinferError(f"{SECRET} broke it")
    server.client.script = lambda request: [[65]]
    server.http.post("/completion", json={"prompt": SECRET})
    found = records(log, tmp_path / "log.jsonl")
    assert SECRET not in (tmp_path / "log.jsonl").read_text()
    events = [r["event"] for r in found]
    ends = ["request_start", "request_done"] * 2 + ["request_rejected", "request_start", "request_error"]
    assert events == ["server_start", *ends]
    started, done = found[3], found[4]
    assert started["endpoint"] == "openai_chat_completions" and started["stream"] is True
    assert started["sampling"] == {"temperature": 0.5} and started["request_id"] == done["request_id"]
    assert done["generated_tokens"] == 7 and done["finish_reasons"] == ["stop"] and done["cached_tokens"] == 1
    assert done["timings_seconds"]["total"] >= done["timings_seconds"]["first_token"] > 0
    assert found[5]["status"] == 400 and found[7]["status"] == 500
    assert len({r["server_instance_id"] for r in found}) == 1


def test_prompts_and_replies_are_there_if_they_are_wanted(start: Start, log: RequestLog, tmp_path: Path) -> None:
    server = start(log=log, request_log_prompts=True)
    server.says("<think>", "hm", "</think>", "yes")
    server.chat(SECRET, n=2)
    found = records(log, tmp_path / "log.jsonl")
    assert found[1]["prompts"] == [[{"role": "user", "content": SECRET}]]
    assert found[2]["replies"] == [{"reasoning": "hm", "text": "yes", "tool_calls": []}] * 2


def test_a_client_that_goes_is_told(start: Start, log: RequestLog, tmp_path: Path) -> None:
    server = start(FakeClient(hold=True), log=log)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x", "stream": True})
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        sock.recv(100)
    until(lambda: len(server.client.cancelled) == 1)
    until(lambda: server.http.get("/stats").json()["endpoints"]["llamacpp_completion"]["cancelled"] == 1)
    assert records(log, tmp_path / "log.jsonl")[-1]["error"] == "client_disconnected"


def test_files_rotate_and_each_begins_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RequestLog(path, max_mib=1, keep=2, server={"model": "toy"})
    for i in range(5000):
        log.write("request_done", {"i": i, "pad": "x" * 1000})
    log.close()
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["log.jsonl", "log.jsonl.1", "log.jsonl.2"]
    newest = -1
    for name in ("log.jsonl.2", "log.jsonl.1", "log.jsonl"):
        found = lines(tmp_path / name)
        assert found[0]["event"] == "server_start" and found[0]["model"] == "toy"
        assert [r["i"] for r in found[1:]] == list(range(found[1]["i"], found[-1]["i"] + 1))
        assert newest == -1 or found[1]["i"] == newest + 1
        newest = found[-1]["i"]
        assert (tmp_path / name).stat().st_size <= 1 << 20
    assert newest == 4999


def test_keys_are_not_in_the_log_and_bad_files_stop_the_start(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    config = ServeConfig(engine=EngineConfig(model="demo"), api_keys=("sesame", "open"), request_log_jsonl=path)
    log = open_request_log(config)
    assert log is not None
    log.close()
    assert "sesame" not in path.read_text() and lines(path)[0]["config"]["api_keys"] == 2
    model = tmp_path / "m.gguf"
    for bad, engine in ((tmp_path / "no" / "log", "demo"), (tmp_path, "demo"), (model, str(model))):
        with pytest.raises(UsageError, match="--request-log-jsonl"):
            open_request_log(ServeConfig(engine=EngineConfig(model=engine), request_log_jsonl=bad))


@pytest.mark.parametrize("stage", ["queued", "generating"])
def test_a_request_may_take_only_so_long(start: Start, stage: str) -> None:
    client = FakeClient(hold=True, before_s=60.0 if stage == "queued" else 0.0)
    server = start(client, request_timeout_ms=150)
    response = server.chat()
    assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
    assert response.json()["error"]["code"] == "request_timeout"
    message = server.http.post("/v1/messages", json={"messages": [{"role": "user", "content": "hi"}]})
    assert (message.status_code, message.json()["error"]["type"]) == (504, "timeout_error")
    *_, last = server.events("/completion", prompt="hi")
    assert last["error"]["code"] == "request_timeout"
    until(lambda: len(client.cancelled) == 3)


def test_several_keys_from_a_file_and_flags_are_good(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who\nfirst\n\n  second  \n")
    server = start(api_keys=("third",), api_key_file=file)
    for key, status in (("first", 200), ("second", 200), ("third", 200), ("# who", 401), ("", 401), ("fir", 401)):
        headers = {"authorization": f"bearer {key}"} if key else {}
        assert server.http.get("/stats", headers=headers).status_code == status, key
    assert server.http.get("/stats", headers={"x-api-key": "second"}).status_code == 200


def test_an_open_door_is_warned_about() -> None:
    code = (
        "import sys; from ninfer.cli import serve; from ninfer.errors import ArtifactError\n"
        "def fail(*args): raise ArtifactError('enough')\n"
        "serve.load_engine = fail; sys.exit(serve.main(['demo', '--port', '0', *sys.argv[1:]]))"
    )

    def told(*argv: str) -> str:
        return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60).stderr

    assert "no key is asked: give --api-key" in told("--host", "0.0.0.0")
    assert "warning" not in told("--host", "0.0.0.0", "--api-key", "k") + told()
