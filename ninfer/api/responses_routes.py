"""Stored responses as resources, and token counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from litestar import Request, delete, get, post
from litestar.handlers import HTTPRouteHandler

from ninfer.api.ask import Head
from ninfer.api.errors import NotFound
from ninfer.api.fields import Value, choice, decode
from ninfer.api.openai_responses import Responses
from ninfer.api.prepare import encode_prompts
from ninfer.api.responses_store import Record, ResponseStore
from ninfer.api.serving import Serving
from ninfer.api.sse import body_of
from ninfer.errors import BadRequest

PREFIXES = ("/v1/responses", "/v1/v1/responses", "/responses")


def routes(serving: Serving, responses: Responses) -> Sequence[HTTPRouteHandler]:
    store = responses.store

    @get(_paths("/{id:str}"), sync_to_thread=False)
    def read(request: Request[Any, Any, Any]) -> dict[str, Any]:
        return dict(_record(store, request).response)

    @delete(_paths("/{id:str}"), status_code=200, sync_to_thread=False)
    def drop(request: Request[Any, Any, Any]) -> dict[str, Any]:
        id = _record(store, request).response["id"]
        return {"id": id, "object": "response.deleted", "deleted": store.drop(id)}

    @get(_paths("/{id:str}/input_items"), sync_to_thread=False)
    def input_items(request: Request[Any, Any, Any]) -> dict[str, Any]:
        return _page(_record(store, request), Value(dict(request.query_params)))

    @post(_paths("/{id:str}/cancel"), status_code=200, sync_to_thread=False)
    def cancel(request: Request[Any, Any, Any]) -> None:
        raise BadRequest(
            "a response is made while its client waits; close the connection to stop it", code="cancel_not_supported"
        )

    @post(_paths("/compact"), status_code=200, sync_to_thread=False)
    def compact() -> None:
        raise BadRequest("this server does not compact histories", code="compaction_not_supported")

    @post(_paths("/input_tokens"), status_code=200)
    async def input_tokens(request: Request[Any, Any, Any]) -> dict[str, Any]:
        head = Head(id="0", created=int(time.time()), model=serving.model_id)
        ask, _ = responses.parse(decode(await body_of(request)), head)
        [prompt] = await asyncio.to_thread(encode_prompts, serving, ask)
        return {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}

    return [read, drop, input_items, cancel, compact, input_tokens]


def _paths(rest: str) -> list[str]:
    return [prefix + rest for prefix in PREFIXES]


def _record(store: ResponseStore, request: Request[Any, Any, Any]) -> Record:
    id: str = request.path_params["id"]
    record = store.get(id)
    if record is None:
        raise NotFound(f"the response {id[:80]!a} is not stored here")
    return record


def _page(record: Record, query: Value) -> dict[str, Any]:
    """limit, order and after, as OpenAI pages lists."""
    limit = query["limit"]
    if limit.given and not (limit.raw.isdecimal() and 1 <= int(limit.raw) <= 100):
        raise limit.wrong("a whole number from 1 to 100")
    count = int(limit.raw or 20)
    items = [_named(item, i) for i, item in enumerate(record.input)]
    if (query["order"].maybe(choice("asc", "desc")) or "desc") == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    start = ids.index(query["after"].raw) + 1 if query["after"].raw in ids else 0
    data = items[start : start + count]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + count < len(items),
    }


def _named(item: Mapping[str, Any], at: int) -> dict[str, Any]:
    return {"id": f"item_{at}", "type": "message", **item}
