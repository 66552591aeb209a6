from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from ninfer.errors import ContextTooLong, DeviceError, EngineUnavailable, NinferError, Overloaded, QueueTimeout
from ninfer.runtime.client import AsyncEngineClient
from ninfer.runtime.engine import Engine
from ninfer.runtime.request import Delta, FinishReason
from tests.runtime.fake_runner import Clock, FakeRunner, engine, expected, request, tokens

Test = Callable[[Engine, AsyncEngineClient], Awaitable[None]]


def on_a_loop(test: Test, runner: FakeRunner | None = None, **changes: Any) -> Engine:
    """Run a test beside an engine thread; afterwards nothing may be left in it."""
    e = engine(runner, **changes)
    e.start()

    async def body() -> None:
        async with asyncio.timeout(60):
            await test(e, AsyncEngineClient(e))
            await idle(e)

    try:
        asyncio.run(body())
    finally:
        e.close()
    e.check()
    return e


async def idle(e: Engine) -> None:
    while e.num_live:
        await asyncio.sleep(0.001)


async def collect(stream: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in stream]


def slowly(history: Sequence[int], seed: int) -> int:
    """A token that takes a while, so that a test can come in between."""
    time.sleep(0.002)
    return len(history)


def test_streams_run_side_by_side() -> None:
    requests = [request("x" * i, 30 * i, max_tokens=20) for i in range(1, 15)]

    async def test(e: Engine, client: AsyncEngineClient) -> None:
        results = await asyncio.gather(*(collect(client.stream(r)) for r in requests))
        for r, deltas in zip(requests, results, strict=True):
            assert tokens(deltas) == expected(r)
            assert deltas[-1].finish is FinishReason.LENGTH

    on_a_loop(test)


def test_refusals_are_raised_before_the_first_delta() -> None:
    async def test(e: Engine, client: AsyncEngineClient) -> None:
        with pytest.raises(ContextTooLong):
            await collect(client.stream(request("a", client.context_len + 1)))
        long = client.stream(request("b", max_tokens=1000))
        await anext(long)
        with pytest.raises(Overloaded):
            await collect(client.stream(request("c")))
        await long.aclose()

    on_a_loop(test, FakeRunner(token=slowly), max_concurrency=1, max_pending_requests=0)


def test_a_queue_timeout_is_raised() -> None:
    clock = Clock()
    e = engine(FakeRunner(), clock, max_concurrency=1, pending_timeout_ms=10)

    async def test() -> None:
        client = AsyncEngineClient(e)
        a = asyncio.ensure_future(collect(client.stream(request("a", max_tokens=3))))
        b = asyncio.ensure_future(collect(client.stream(request("b"))))
        await asyncio.sleep(0)
        e.step()
        clock.now = 1.0
        while e.step():
            pass
        assert len(tokens(await a)) == 3
        with pytest.raises(QueueTimeout):
            await b

    asyncio.run(test())


def test_leaving_a_stream_cancels_its_request() -> None:
    async def test(e: Engine, client: AsyncEngineClient) -> None:
        async with aclosing(client.stream(request("a", max_tokens=1000))) as stream:
            await anext(stream)
        await idle(e)
        assert e.stats().num_cancelled == 1

    on_a_loop(test, FakeRunner(token=slowly))


def test_cancelling_the_task_cancels_its_request_even_in_the_queue() -> None:
    async def test(e: Engine, client: AsyncEngineClient) -> None:
        tasks = [asyncio.ensure_future(collect(client.stream(request(id, max_tokens=1000)))) for id in "ab"]
        while e.stats().num_running < 1:
            await asyncio.sleep(0.001)
        for task in reversed(tasks):
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results)

    assert on_a_loop(test, FakeRunner(token=slowly), max_concurrency=1).stats().num_cancelled == 2


def test_drain_lets_running_requests_finish() -> None:
    r = request("a", max_tokens=50)

    async def test(e: Engine, client: AsyncEngineClient) -> None:
        task = asyncio.ensure_future(collect(client.stream(r)))
        await asyncio.sleep(0)
        draining = asyncio.ensure_future(client.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable):
            await collect(client.stream(request("b")))
        await draining
        assert len(tokens(await task)) == 50

    on_a_loop(test, FakeRunner(token=slowly))


def test_drain_cuts_off_what_takes_too_long() -> None:
    async def test(e: Engine, client: AsyncEngineClient) -> None:
        running = asyncio.ensure_future(collect(client.stream(request("a", max_tokens=1000))))
        waiting = asyncio.ensure_future(collect(client.stream(request("b"))))
        while not e.stats().num_generated_tokens:
            await asyncio.sleep(0.001)
        await client.drain(0.01)
        deltas = await running
        assert deltas[-1].finish is FinishReason.ERROR and "stopping" in (deltas[-1].error or "")
        with pytest.raises(EngineUnavailable):
            await waiting

    on_a_loop(test, FakeRunner(token=slowly), max_concurrency=1)


def test_a_device_failure_is_raised_or_ends_the_stream() -> None:
    runner = FakeRunner(fail=lambda rows: DeviceError("gone") if rows[0].kv_len > 6 else None)

    async def test(e: Engine, client: AsyncEngineClient) -> None:
        running = asyncio.ensure_future(collect(client.stream(request("a", max_tokens=1000))))
        waiting = asyncio.ensure_future(collect(client.stream(request("b"))))
        deltas = await running
        assert deltas[-1].finish is FinishReason.ERROR
        with pytest.raises(EngineUnavailable):
            await waiting
        with pytest.raises(EngineUnavailable):
            await collect(client.stream(request("c")))

    on_a_loop(test, runner, max_concurrency=1)


def test_a_loop_that_has_gone_does_not_stop_the_engine() -> None:
    e = engine(FakeRunner(token=slowly))
    e.start()

    async def leave() -> None:
        await anext(AsyncEngineClient(e).stream(request("a", max_tokens=200)))

    asyncio.run(leave())
    r = request("b", max_tokens=3)

    async def again() -> list[Delta]:
        return await collect(AsyncEngineClient(e).stream(r))

    assert len(tokens(asyncio.run(again()))) == 3
    e.close()


def test_random_disconnects_leave_nothing_behind() -> None:
    rng = random.Random(3)
    runner = FakeRunner(fail=lambda rows: ValueError("now and then") if rng.random() < 0.01 else None)

    async def visitor(client: AsyncEngineClient, n: int) -> str:
        r = request(f"r{n}", rng.randint(1, 600), max_tokens=rng.randint(1, 60))
        patience = rng.choice([0, 1, 5, 1000])
        try:
            async with aclosing(client.stream(r)) as stream:
                got: list[Delta] = []
                async for delta in stream:
                    got.append(delta)
                    if len(got) > patience:
                        return "left"
        except NinferError:
            return "refused"
        if got[-1].finish is FinishReason.ERROR:
            return "failed"
        assert tokens(got) == expected(r)
        return "served"

    async def test(e: Engine, client: AsyncEngineClient) -> None:
        tasks = []
        for n in range(300):
            tasks.append(asyncio.ensure_future(visitor(client, n)))
            await asyncio.sleep(rng.random() * 0.004)
            if rng.random() < 0.2:
                rng.choice(tasks).cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [end for end in ends if isinstance(end, BaseException)]
        assert all(isinstance(error, asyncio.CancelledError) for error in errors)
        assert {"left", "served"} <= {end for end in ends if isinstance(end, str)}

    on_a_loop(test, runner, max_pending_requests=10)
