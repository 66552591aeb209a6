"""Clients that hang up, and servers that stop, with the real engine."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import TINY_GGUF
from tests.clients.conftest import Process, serve, until

TURNS = [{"role": "user", "content": "Count from 1 to 1000."}]
LONG: dict[str, dict[str, Any]] = {  # requests that would fill the window, were they left alone
    "/v1/chat/completions": {"messages": TURNS, "ignore_eos": True},
    "/v1/completions": {"prompt": "1, 2, 3,", "max_tokens": -1, "ignore_eos": True},
    "/v1/responses": {"input": "Count from 1 to 1000.", "logit_bias": {"2": -100}},
    "/v1/messages": {"messages": TURNS, "max_tokens": 2000, "logit_bias": {"2": -100}},
    "/completion": {"prompt": "1, 2, 3,", "n_predict": -1, "ignore_eos": True},
}


def begin(server: Process, path: str, stream: bool) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps({**LONG[path], "stream": stream}).encode()
    sock = socket.create_connection((host, int(port)), timeout=30)
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", LONG)
def test_who_hangs_up_costs_no_more_steps(tiny: Process, path: str, stream: bool) -> None:
    before = tiny.stats()
    sock = begin(tiny, path, stream)
    until(lambda: any(slot.get("n_decoded", 0) >= 3 for slot in tiny.stats()["slots"]))
    sock.close()
    until(tiny.idle, 5)
    after = tiny.stats()
    assert after["counters"]["cancelled"] == before["counters"]["cancelled"] + 1
    assert after["counters"]["generated_tokens"] - before["counters"]["generated_tokens"] < 1500, "it ran to its end"
    assert after["occupancy"]["kv_pages"] == before["occupancy"]["kv_pages"]
    time.sleep(0.1)
    assert tiny.stats()["counters"]["generated_tokens"] == after["counters"]["generated_tokens"]


def test_one_who_hangs_up_while_waiting_takes_no_slot(tiny: Process) -> None:
    running = [begin(tiny, "/completion", True) for _ in range(4)]
    until(lambda: tiny.stats()["requests"]["running"] == 4)
    waiting = begin(tiny, "/v1/messages", False)
    until(lambda: tiny.stats()["queue"]["depth"] == 1)
    assert tiny.stats()["queue"]["entries"][0]["position"] == 1
    waiting.close()
    until(lambda: tiny.stats()["queue"]["depth"] == 0)
    assert tiny.stats()["requests"]["running"] == 4
    for sock in running:
        sock.close()
    until(tiny.idle)


def test_a_stop_ends_streams_with_an_event_and_the_log_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    flags = ["--max-context", "2048", "--drain-timeout-ms", "200", "--request-log-jsonl", str(log)]
    with serve(str(TINY_GGUF), *flags) as server:
        streams = {path: begin(server, path, True) for path in LONG}
        until(lambda: server.stats()["requests"]["running"] == len(LONG))
        server.process.send_signal(signal.SIGTERM)
        for path, sock in streams.items():
            text = b""
            while piece := sock.recv(1 << 16):
                text += piece
            last = text.decode().rstrip("0\r\n").strip().split("\n\n")[-1]
            assert "stopping" in last, path
            assert {"/v1/messages": "event: error", "/v1/responses": "event: response.failed"}.get(path, "") in last
        assert server.process.wait(30) == 0
        assert not [line for line in server.lines if "Traceback" in line]
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r["event"] for r in records].count("request_error") == len(LONG)
    assert {r.get("error") for r in records[1 + len(LONG) :]} == {"service_unavailable"}
