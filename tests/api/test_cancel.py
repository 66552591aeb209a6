"""A client that goes is noticed, at every stage, streamed or not."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from tests.api.conftest import FakeClient, Server, Start, until

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/completion": {"prompt": "hi"},
    "/v1/messages": {"messages": HI},
    "/v1/responses": {"input": "hi"},
}


def begin(server: Server, path: str, **body: Any) -> socket.socket:
    """Send a request on a raw socket and leave it open."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    sock = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["queued", "generating"])
@pytest.mark.parametrize("path", BODIES)
def test_a_disconnect_cancels(start: Start, path: str, stage: str, stream: bool) -> None:
    client = FakeClient(hold=True, before_s=60.0 if stage == "queued" else 0.0)
    server = start(client)
    sock = begin(server, path, **BODIES[path], stream=stream)
    until(lambda: len(client.requests) == 1)
    if stage == "generating" and stream:
        assert sock.recv(100)
    assert client.cancelled == []
    sock.close()
    until(lambda: client.cancelled == [client.requests[0].id], 3)
    assert server.http.get("/health").status_code == 200


def test_a_disconnect_cancels_every_reply_and_nobody_elses(start: Start) -> None:
    client = FakeClient(hold=True)
    server = start(client)
    other = begin(server, "/v1/chat/completions", messages=HI)
    until(lambda: len(client.requests) == 1)
    sock = begin(server, "/v1/chat/completions", messages=HI, n=3)
    until(lambda: len(client.requests) == 4)
    sock.close()
    until(lambda: len(client.cancelled) == 3)
    time.sleep(0.1)
    assert sorted(client.cancelled) == sorted(r.id for r in client.requests[1:])
    other.close()


def test_a_reply_that_ends_cancels_nothing(server: Server) -> None:
    server.says("done")
    for stream in (False, True):
        server.chat(stream=stream)
    time.sleep(0.1)
    assert server.client.cancelled == []


def test_random_disconnects_leave_nothing_behind(start: Start) -> None:
    client = FakeClient(script=lambda request: [[65]] * 50, step_s=0.01)
    server = start(client)

    async def one(http: httpx.AsyncClient, i: int) -> None:
        body = {"messages": HI, "stream": i % 2 == 0, "max_tokens": 50}
        try:
            await http.post("/v1/chat/completions", json=body, timeout=0.01 + 0.02 * (i % 20))
        except httpx.TimeoutException:
            return

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=server.url) as http:
            await asyncio.gather(*(one(http, i) for i in range(40)))

    asyncio.run(all_of_them())
    until(lambda: client.num_open == 0)
    assert client.cancelled
    assert server.http.get("/health").status_code == 200


def test_a_client_that_goes_while_it_sends_is_no_failure(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with caplog.at_level("INFO"):
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.1)
        until(lambda: any("has gone" in r.message for r in caplog.records))
    assert not [r for r in caplog.records if r.levelname == "ERROR"]
