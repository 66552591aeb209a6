"""The pipeline that all dialects share: a parsed request, its tokens, the engine's deltas, parts of text.

A dialect parses a body into an `Ask` and makes a `Teller`, which shapes parts. Neither knows the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any, cast

import attrs

from ninfer.api.ask import Ask, Prompt
from ninfer.api.errors import failure
from ninfer.api.journal import Entry
from ninfer.api.post_thinking import switch
from ninfer.api.prepare import prepare
from ninfer.api.reply import Reply
from ninfer.api.serving import Serving
from ninfer.api.sse import pack
from ninfer.api.told import Part, Teller, merge
from ninfer.errors import EngineUnavailable, NinferError, RequestTimeout
from ninfer.runtime.request import Delta, FinishReason, GenerateRequest, TokenMask
from ninfer.runtime.sequence import Failed

HEAD_START_S = 0.1  # how long a stream waits for its first delta, so that a quick failure is a plain HTTP error


class Run:
    """The replies to one request, under way. Closing it cancels those that are not done."""

    def __init__(self, serving: Serving, ask: Ask, id: str, entry: Entry) -> None:
        self._entry = entry
        self._serving = serving
        self._ask = ask
        self._id = id
        self.prompts: tuple[Prompt, ...] = ()
        self._replies: list[Reply] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._inbox: deque[tuple[int, Delta | Exception]] = deque()
        self._arrived = asyncio.Event()
        self._limit_s = serving.timeout_s
        self._deadline_s = None if self._limit_s is None else time.monotonic() + self._limit_s

    async def start(self) -> None:
        """Tokenise and submit. Raises what the request is refused for, as far as that comes soon."""
        self.prompts, masks = await asyncio.to_thread(prepare, self._serving, self._ask)
        self._entry.prompted(self._ask, self.prompts)
        for i in range(len(self.prompts) * self._ask.n):
            prompt = self.prompts[i // self._ask.n]
            reply = Reply(i, prompt, self._serving.tokenizer, self._ask.stop, self._ask.tools, clock=time.monotonic)
            self._replies.append(reply)
            self._tasks.append(asyncio.ensure_future(self._pump(i, self._request(i, prompt, masks[i]))))

    def _request(self, index: int, prompt: Prompt, mask: TokenMask | None) -> GenerateRequest:
        ask = self._ask
        sampling = self._serving.sampling(ask.sampling)
        if sampling.seed is not None and ask.n > 1:
            sampling = attrs.evolve(sampling, seed=sampling.seed + index % ask.n)  # or all n would be the same
        return GenerateRequest(
            id=f"{self._id}-{index}",
            prompt_ids=prompt.ids,
            sampling=sampling,
            max_tokens=self._serving.max_tokens(ask.max_tokens),
            stop_ids=frozenset() if ask.ignore_eos else self._serving.eos_ids,
            logprobs=ask.logprobs,
            timed=ask.timed and ask.stream,
            mask=mask,
            prefix_len=len(prompt.graft.ids) if prompt.graft is not None else 0,
            prefix_given=prompt.graft is not None and prompt.graft.state is not None,
            switch=switch(self._serving, ask, prompt, sampling, index % ask.n),
        )

    async def _pump(self, index: int, request: GenerateRequest) -> None:
        stream = cast("AsyncGenerator[Delta, None]", self._serving.client.stream(request))
        try:
            async with aclosing(stream):
                async for delta in stream:
                    self._post(index, delta)
        except Exception as error:
            self._post(index, error)

    def _post(self, index: int, found: Delta | Exception) -> None:
        self._inbox.append((index, found))
        self._arrived.set()

    @property
    def begun(self) -> bool:
        """Whether anything has come."""
        return bool(self._inbox)

    @property
    def done(self) -> bool:
        return all(reply.done for reply in self._replies)

    async def settle(self, timeout_s: float) -> None:
        """Wait a moment for the first delta. Raises if it is a failure."""
        await self._wait(timeout_s)
        if self._inbox:
            _raise_failure(self._inbox[0][1])

    async def parts(self, timeout_s: float | None = None) -> list[Part]:
        """All that has come, after waiting for some. Empty: nothing came in time. Raises what a reply failed with."""
        await self._wait(timeout_s)
        found: list[Part] = []
        while self._inbox:
            if found and _failure(self._inbox[0][1]) is not None:
                break  # what came before it is told first
            index, delta = self._inbox.popleft()
            reply = self._replies[index]
            if reply.done:
                continue
            _raise_failure(delta)
            assert isinstance(delta, Delta)
            if delta.num_cached_tokens:
                self._cached(index // self._ask.n, delta.num_cached_tokens)
            found.append(reply.feed(delta))
            self._entry.fed(found[-1])
            if reply.done:
                self._tasks[index].cancel()  # a no-op unless a stop string ended it
        return found

    def _cached(self, at: int, count: int) -> None:
        prompts = list(self.prompts)
        prompts[at] = attrs.evolve(prompts[at], num_cached=count)
        self.prompts = tuple(prompts)

    async def _wait(self, timeout_s: float | None) -> None:
        """Until something has come, or the time is over. Raises RequestTimeout when that of the request is."""
        if self._deadline_s is not None:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise RequestTimeout(f"the request took longer than the {self._limit_s:g} s that one may take here")
            timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        if self._inbox:
            return
        self._arrived.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


def _failure(delta: Delta | Exception) -> Exception | None:
    if isinstance(delta, Exception):
        return delta
    if isinstance(delta, Failed):
        return delta.exception
    if delta.finish is FinishReason.ERROR:
        return NinferError(delta.error or "the engine failed on this request")
    if delta.finish is FinishReason.CANCELLED:
        return EngineUnavailable(delta.error or "the request was cancelled")
    return None


def _raise_failure(delta: Delta | Exception) -> None:
    if (error := _failure(delta)) is not None:
        raise error


async def frames(serving: Serving, ask: Ask, teller: Teller, id: str, entry: Entry) -> AsyncGenerator[bytes, None]:
    """The replies as server-sent events. Errors are raised before the first frame, and events after it."""
    run = Run(serving, ask, id, entry)
    try:
        await run.start()
        await run.settle(HEAD_START_S)
        opened = not teller.late
        if opened:
            yield pack(teller.open(run.prompts))
        elif not run.begun:
            yield teller.ping  # the response's head goes out
        try:
            while not run.done:
                parts = await run.parts(serving.ping_s)
                if not parts:
                    yield teller.ping
                    continue
                head = b"" if opened else pack(teller.open(run.prompts))
                opened = True
                yield head + pack(e for part in parts for e in teller.feed(part))
            ending = pack(teller.close())
            entry.end()  # before the client can have its last event and go
            yield ending
        except Exception as error:
            entry.end(error)
            yield pack(teller.failed(failure(error, teller.dialect, entry.request_id)))
    except BaseException as error:
        entry.end(error)
        raise
    finally:
        run.close()


async def whole(serving: Serving, ask: Ask, teller: Teller, id: str, entry: Entry) -> Mapping[str, Any]:
    """The replies as one body."""
    run = Run(serving, ask, id, entry)
    try:
        await run.start()
        replies: dict[int, list[Part]] = {}
        while not run.done:
            for part in await run.parts():
                replies.setdefault(part.index, []).append(part)
        return teller.whole(run.prompts, [merge(replies[i]) for i in sorted(replies)])
    finally:
        run.close()
