"""A server around a scripted engine: real sockets, a byte-level tokenizer with a few longer words."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import httpx
import pytest
import uvicorn
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ninfer.api.app import build_app
from ninfer.api.request_log import RequestLog
from ninfer.config import EngineConfig, SamplingDefaults, ServeConfig
from ninfer.errors import NinferError, Overloaded
from ninfer.runtime.grafts import Graft
from ninfer.runtime.load import Loaded
from ninfer.runtime.request import Delta, EngineStats, FinishReason, GenerateRequest, Timings, TokenOut
from ninfer.text.chat import ChatTemplate
from ninfer.text.tokenizer import Tokenizer

T = TypeVar("T")
MODEL = "toy/model-1"
SPECIAL = ("<|end|>", "<|turn|>")
MARKUP = ("<think>", "</think>")
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def toy_tokenizer(folder: Path) -> Tokenizer:
    """One token per byte, and control tokens: what a token is can be read off the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in MARKUP])
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return Tokenizer.from_hf(path)


Deltas = Sequence[Sequence[int]]
Script = Callable[[GenerateRequest], Deltas]


@attrs.define
class FakeClient:
    """An EngineClient that plays a script: lists of tokens, one list per step."""

    context_len: int = 256
    script: Script = lambda request: [[65], [66]]
    hold: bool = False  # after the script, generate nothing more and never end
    step_s: float = 0.0
    before_s: float = 0.0  # in the queue
    refusal: NinferError | None = None
    failure: NinferError | None = None  # after the script
    requests: list[GenerateRequest] = attrs.field(factory=list)
    cancelled: list[str] = attrs.field(factory=list)
    room: int | None = None
    num_open: int = 0  # streams that have begun and not ended
    stats_now: EngineStats = attrs.field(factory=lambda: EngineStats(slots=({"id": 0, "is_processing": False},)))

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        if self.refusal is not None:
            raise self.refusal
        if self.room is not None and len(self.requests) >= self.room:
            raise Overloaded("no room", retry_after_s=3.0)
        self.requests.append(request)
        finished = False
        self.num_open += 1
        try:
            await asyncio.sleep(self.before_s)
            steps = self.script(request)
            count = 0
            if request.timed:
                yield Delta(
                    request_id=request.id,
                    num_cached_tokens=1,
                    timings=self._timings(request, 0),
                    num_prefilled_tokens=2,
                )
            for tokens in steps:
                tokens = tokens[: request.max_tokens - count]
                ends = [i for i, t in enumerate(tokens) if t in request.stop_ids]
                cut = tokens[: ends[0]] if ends else tokens
                count += len(cut)
                await asyncio.sleep(self.step_s)
                finish = FinishReason.STOP if ends else FinishReason.LENGTH if count >= request.max_tokens else None
                finished = finish is not None
                yield Delta(
                    request_id=request.id,
                    tokens=tuple(self._token(t, request) for t in cut),
                    num_cached_tokens=1,
                    finish=finish,
                    stop_id=tokens[ends[0]] if ends else None,
                    timings=self._timings(request, count + bool(ends)) if finish or request.timed else None,
                )
                if finished:
                    return
            if self.failure is not None:
                raise self.failure
            if self.hold:
                await asyncio.Event().wait()
            finished = True
            yield Delta(
                request_id=request.id, finish=FinishReason.STOP, stop_id=0, timings=self._timings(request, count + 1)
            )
        finally:
            self.num_open -= 1
            if not finished and self.failure is None:
                self.cancelled.append(request.id)

    @staticmethod
    def _token(id: int, request: GenerateRequest) -> TokenOut:
        if request.logprobs is None:
            return TokenOut(id)
        return TokenOut(id, -id / 1000, tuple((id + i, -(id + i) / 1000) for i in range(request.logprobs)))

    @staticmethod
    def _timings(request: GenerateRequest, count: int) -> Timings:
        return Timings(
            num_prompt_tokens=len(request.prompt_ids),
            num_cached_tokens=1,
            num_generated_tokens=count,
            prefill_s=0.5,
            decode_s=0.25,
        )

    async def act(self, action: Callable[[Any], T]) -> T:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        return self.stats_now


@attrs.define
class Server:
    url: str
    client: FakeClient
    tokenizer: Tokenizer
    http: httpx.Client

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def says(self, *texts: str) -> None:
        """The reply, one step per text, then the end token."""
        self.client.script = lambda request: [*map(self.ids, texts), self.ids("<|end|>")]

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def events(self, path: str, **body: Any) -> list[Any]:
        """The data of a stream's events, JSON decoded; comments as they are."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            return parse_events(response.read().decode())


def parse_events(text: str) -> list[Any]:
    found: list[Any] = []
    for frame in text.split("\n\n")[:-1]:
        if frame.startswith("data: {"):
            found.append(json.loads(frame.removeprefix("data: ")))
        else:
            found.append(frame.removeprefix("data: "))
    return found


def until(true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


Start = Callable[..., Server]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def start(tokenizer: Tokenizer) -> Iterator[Start]:
    """Starts servers: start(client, template=..., generation_config=..., **fields of ServeConfig)."""
    yield from starter(tokenizer)


@pytest.fixture(scope="module")
def module_start(tokenizer: Tokenizer) -> Iterator[Start]:
    yield from starter(tokenizer)


def starter(tokenizer: Tokenizer) -> Iterator[Start]:
    running: list[tuple[uvicorn.Server, threading.Thread, httpx.Client]] = []

    def begin(
        client: FakeClient | None = None,
        *,
        template: str | None = TEMPLATE,
        generation_config: dict[str, Any] | None = None,
        defaults: SamplingDefaults | None = None,
        engine: EngineConfig | None = None,
        headers: dict[str, str] | None = None,
        log: RequestLog | None = None,
        loads: tuple[Graft, ...] = (),
        **config: Any,
    ) -> Server:
        client = client or FakeClient()
        end = tokenizer.token_to_id("<|end|>")
        assert end is not None
        loaded = Loaded(
            runner=None,  # type: ignore[arg-type]
            tokenizer=tokenizer,
            chat_template=ChatTemplate(template) if template else None,
            model_id=MODEL,
            generation_config=generation_config or {},
            eos_ids=frozenset({end}),
            explain=str,
            grafts={graft.name: graft for graft in loads},
        )
        app = build_app(
            loaded,
            client,
            ServeConfig(engine=engine or EngineConfig(model="demo"), defaults=defaults or SamplingDefaults(), **config),
            log,
        )
        sock = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        http = httpx.Client(base_url=url, timeout=20, headers=headers)
        running.append((server, thread, http))
        until(lambda: server.started)
        return Server(url, client, tokenizer, http)

    yield begin
    for server, thread, http in running:
        http.close()
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def server(start: Start) -> Server:
    return start()
