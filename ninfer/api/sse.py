"""Server-sent events, and noticing that a client has gone, whether its reply is streamed or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from attrs import frozen
from litestar import Request
from litestar.exceptions import InternalServerException
from litestar.response import Stream

from ninfer.errors import Cancelled

T = TypeVar("T")
PING = b": ping\n\n"
PING_S = 5.0  # a peer that has died is found by writing to it
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@frozen
class Event:
    """data: JSON, or a bare word such as [DONE]."""

    data: Mapping[str, Any] | str
    name: str | None = None


def pack(events: Iterable[Event]) -> bytes:
    """The frames of some events, data on one line each."""
    return b"".join(map(_frame, events))


def _frame(event: Event) -> bytes:
    name = f"event: {event.name}\n" if event.name else ""
    data = event.data if isinstance(event.data, str) else json.dumps(event.data, ensure_ascii=False)
    return f"{name}data: {data}\n\n".encode()


async def stream(request: Request[Any, Any, Any], frames: AsyncGenerator[bytes, None]) -> Stream:
    """A streamed response. What `frames` raises before its first frame is raised here, as a plain HTTP error.

    The generator is running when this returns, so however the response ends, its `finally` runs.
    """
    first = await unless_gone(request, _first(frames))
    return Stream(_rest(first, frames), media_type="text/event-stream", headers=HEADERS, status_code=200)


async def _first(frames: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(frames)


async def _rest(first: bytes, frames: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for frame in frames:
            yield frame
    finally:
        await frames.aclose()


async def body_of(request: Request[Any, Any, Any]) -> bytes:
    """The whole body. Raises Cancelled if the client goes before it has sent it."""
    try:
        return await request.body()
    except InternalServerException:  # all that reading a body can raise of its own
        raise Cancelled("the client has gone") from None


async def unless_gone(request: Request[Any, Any, Any], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client goes first, work is cancelled and Cancelled raised.

    The body must have been read: what is received here is thrown away.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not task.done():
            raise Cancelled("the client has gone")
        return await task
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _gone(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
