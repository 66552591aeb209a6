"""ninfer-serve: bind, load, serve, drain."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import attrs
import uvicorn

from ninfer.api.request_log import RequestLog
from ninfer.cli.output import Console, configure_logging, run, version
from ninfer.cli.starting import starting
from ninfer.config import ServeConfig, parse
from ninfer.errors import UsageError
from ninfer.formats.kv import KV_FORMATS

if TYPE_CHECKING:  # the engine and the application are imported while the driver starts
    from ninfer.runtime.client import AsyncEngineClient
    from ninfer.runtime.engine import Engine

log = logging.getLogger(__name__)

PROG = "ninfer-serve"
DESCRIPTION = "Serve a model over HTTP: OpenAI, Anthropic and llama.cpp dialects."
BACKLOG = 2048
DEAD_PEER_MS = 15_000  # unacknowledged data after which a connection counts as gone
CLOSE_S = 5  # for connections to finish their last response
SWITCH_S = 0.0005  # a foreign call that releases the interpreter lock gets it back within this

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Any, Any, Any], Awaitable[None]]

LOADING = {
    "message": "The model is still loading. Retry shortly.",
    "type": "service_unavailable",
    "param": None,
    "code": "model_loading",
}


class Gate:
    """An ASGI app that answers 503 until `app` is there."""

    def __init__(self) -> None:
        self.app: App | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            return await self.app(scope, receive, send)
        body = json.dumps({"error": LOADING}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", b"2"),
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Lifespan:
    """Tells an app that it starts and stops, as a server would that had it from the beginning."""

    def __init__(self, app: App) -> None:
        self._inbox: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._outbox: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
        self._task = asyncio.ensure_future(app(scope, self._inbox.get, self._outbox.put))

    async def tell(self, event: str) -> None:
        """Send `startup` or `shutdown` and wait for the answer. An app may ignore lifespans by ending at once."""
        await self._inbox.put({"type": f"lifespan.{event}"})
        answer = asyncio.ensure_future(self._outbox.get())
        await asyncio.wait((self._task, answer), return_when=asyncio.FIRST_COMPLETED)
        if answer.done() and answer.result()["type"] == f"lifespan.{event}.failed":
            raise RuntimeError(f"{event} of the application failed: {answer.result().get('message', '')}")
        answer.cancel()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us: uvicorn would wait for open streams for ever, and pass SIGTERM on."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # this and the next: inherited by connections
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from None
    sock.setblocking(False)
    return sock


def url(sock: socket.socket) -> str:
    """Where to point a client; a wildcard address is shown as the loopback."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


Start: TypeAlias = "Callable[[], tuple[Engine, Callable[[AsyncEngineClient], App]]]"
"""Loads a model: the engine, not yet started, and what makes the application around its client. Takes a while."""


async def serve(config: ServeConfig, sock: socket.socket, start: Start, console: Console) -> int:
    """Answer on the socket from now on; with the model once `start` has returned. The exit code."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    gate = Gate()
    server = _Uvicorn(
        uvicorn.Config(
            gate,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=CLOSE_S,
        )
    )
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    stopped = asyncio.ensure_future(signals.get())
    loading = _in_daemon_thread(start)
    await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        console.line("stopped while loading")
        quit_now(130 if stopped.result() is signal.SIGINT else 0)
    try:
        engine, build = loading.result()
    except BaseException:
        server.should_exit = True
        await serving
        raise
    with engine:
        engine.start()
        from ninfer.runtime.client import AsyncEngineClient

        client = AsyncEngineClient(engine)
        app = build(client)
        lifespan = Lifespan(app)
        await lifespan.tell("startup")
        gate.app = app
        console.report("ready", url(sock))
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        again = asyncio.ensure_future(_second_interrupt(signals))
        console.line(f"stopping: {engine.num_live} requests, {config.drain_timeout_ms / 1000:g} s to finish")
        await client.drain(config.drain_timeout_ms / 1000)
        server.should_exit = True
        await serving
        await lifespan.tell("shutdown")
        again.cancel()
    console.line("stopped")
    return 0


async def _second_interrupt(signals: asyncio.Queue[signal.Signals]) -> None:
    while await signals.get() is not signal.SIGINT:
        pass
    quit_now(130)


def quit_now(code: int) -> NoReturn:
    """End the process whatever its threads are doing: compilers and kernels cannot be interrupted."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _in_daemon_thread(start: Start) -> asyncio.Future[Any]:
    """The result of `start`, on a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def work() -> None:
        try:
            result = start()
        except BaseException as error:
            _post(loop, future.set_exception, error)
        else:
            _post(loop, future.set_result, result)

    threading.Thread(target=work, name="ninfer-load", daemon=True).start()
    return future


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[Any], None], value: object) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, value)


def open_request_log(config: ServeConfig) -> RequestLog | None:
    """The log of the flags. Raises UsageError."""
    if config.request_log_jsonl is None:
        return None
    if config.request_log_jsonl.resolve() == Path(config.engine.model).resolve():
        raise UsageError("--request-log-jsonl: this is the model's file; name another")
    told = attrs.asdict(config)
    told["api_keys"] = len(config.all_api_keys())
    return RequestLog(
        config.request_log_jsonl,
        max_mib=config.request_log_max_mib,
        keep=config.request_log_keep,
        server={"version": version(), "model": config.engine.model, "pid": os.getpid(), "config": told},
    )


def make_slot_folder(path: Path | None) -> None:
    """Raises UsageError."""
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--slot-save-path: cannot use {path}: {error.strerror}; choose another folder") from None


def load_engine(
    config: ServeConfig, console: Console, log: RequestLog | None = None
) -> tuple[Engine, Callable[[AsyncEngineClient], App]]:
    """The model of the flags."""
    begun = time.perf_counter()
    with starting(config.engine.device):  # late imports: a bad flag or a busy port is told at once
        from ninfer.runtime.engine import Engine
        from ninfer.runtime.load import load

        loaded = load(config.engine, console.report, console.progress, grafts=config.grafts)
        from ninfer.api.app import build_app

    if config.engine.explain:
        console.line(loaded.explain())
    console.report("loaded", f"{loaded.model_id}  in {time.perf_counter() - begun:.1f} s")
    engine = Engine(loaded.runner, config.engine, speculation=loaded.speculation)
    return engine, lambda client: build_app(loaded, client, config, log)


def body(argv: Sequence[str]) -> int:
    config = parse(
        ServeConfig,
        argv,
        prog=PROG,
        description=DESCRIPTION,
        version=version(),
        choices={"kv_dtype": [f.name for f in KV_FORMATS]},
    )
    configure_logging(config.log_level)
    keys = config.all_api_keys()
    sock = listen(config.host, config.port)
    console = Console()
    console.report("ninfer", version())
    log = open_request_log(config)
    make_slot_folder(config.slot_save_path)
    console.report("listen", f"{url(sock)}  {len(keys)} keys")
    if not keys and sock.getsockname()[0] not in ("127.0.0.1", "::1"):
        console.report("warning", f"--host {config.host} lets other machines in, and no key is asked: give --api-key")
    sys.setswitchinterval(SWITCH_S)
    return asyncio.run(serve(config, sock, lambda: load_engine(config, console, log), console))


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROG, body, argv)


if __name__ == "__main__":
    sys.exit(main())
