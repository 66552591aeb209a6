"""The engine for asynchronous code: deltas cross from its thread to the event loop in one callback per step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from ninfer.runtime.engine import Engine
from ninfer.runtime.request import Delta, EngineStats, GenerateRequest
from ninfer.runtime.sequence import Failed
from ninfer.runtime.slots import Slots

T = TypeVar("T")

DRAIN_POLL_S = 0.02


class AsyncEngineClient:
    """An EngineClient of one event loop: the one that first iterates a stream.

    A slow reader is not throttled: its backlog is bounded by max_tokens, and finishing frees pages soonest.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, asyncio.Queue[Delta]] = {}
        self._sink = self._post  # one object, so that the engine makes one list per step

    @property
    def context_len(self) -> int:
        return self._engine.context_len

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Submit and iterate the deltas; the last has `finish`.

        Raises what Engine.submit raises, and QueueTimeout or EngineUnavailable if that comes before the first delta;
        after it, those are the last delta. Leaving early cancels the request.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Delta] = asyncio.Queue()
        self._engine.submit(request, self._sink)
        self._queues[request.id] = queue  # before any callback can run: this is the loop's thread
        try:
            delta = await queue.get()
            if isinstance(delta, Failed):
                raise delta.exception
            yield delta
            while delta.finish is None:
                delta = await queue.get()
                yield delta
        finally:
            del self._queues[request.id]
            self._engine.cancel(request.id)  # a no-op once it is done

    async def act(self, action: Callable[[Slots], T]) -> T:
        """Do something with the sessions of slots between two steps. Raises what it raises, and EngineUnavailable."""
        return await asyncio.wrap_future(self._engine.act(action))

    async def drain(self, grace_s: float) -> None:
        """Admit nothing more, let what runs and waits finish for so long, then end it with EngineUnavailable."""
        loop = asyncio.get_running_loop()
        self._engine.refuse("the server is stopping")
        deadline = loop.time() + grace_s
        while self._engine.num_live and loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        if self._engine.num_live:
            self._engine.abort("the server is stopping")
        while self._queues and loop.time() < deadline + 1.0:  # let the streams say so to their clients
            await asyncio.sleep(DRAIN_POLL_S)

    def _post(self, deltas: Sequence[Delta]) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver, deltas)
        except RuntimeError:  # closed in between: nobody listens any more
            return

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            queue = self._queues.get(delta.request_id)
            if queue is not None:
                queue.put_nowait(delta)
