"""The application: routes, keys, limits, and how errors are told."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from litestar import Litestar, Request, Response, post
from litestar.config.cors import CORSConfig
from litestar.connection import ASGIConnection
from litestar.datastructures import MutableScopeHeaders
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.plugins import PluginProtocol
from litestar.types import Guard, Message, Scope

from ninfer.api import (
    anthropic,
    llamacpp,
    openai_chat,
    openai_completions,
    pages,
    rerank,
    responses_routes,
    slots,
    status,
)
from ninfer.api.ask import Head
from ninfer.api.errors import Dialect, Unauthorized, handle, request_id
from ninfer.api.fields import decode
from ninfer.api.generate import frames, whole
from ninfer.api.journal import Journal
from ninfer.api.openai_responses import Responses
from ninfer.api.request_log import RequestLog
from ninfer.api.responses_store import ResponseStore
from ninfer.api.serving import Serving
from ninfer.api.sse import PING_S, body_of, stream, unless_gone
from ninfer.api.told import Parse
from ninfer.config import ServeConfig
from ninfer.runtime.load import Loaded
from ninfer.runtime.request import EngineClient

Any_Request = Request[Any, Any, Any]

GENERATION: tuple[tuple[str, tuple[str, ...], Parse], ...] = (
    (
        "openai_chat_completions",
        ("/v1/chat/completions", "/v1/v1/chat/completions", "/chat/completions"),
        openai_chat.parse,
    ),
    ("openai_completions", ("/v1/completions", "/v1/v1/completions"), openai_completions.parse),
    ("llamacpp_completion", ("/completion", "/completions"), llamacpp.parse),
    ("anthropic_messages", ("/v1/messages", "/v1/v1/messages"), anthropic.parse),
)


class _App(Litestar):
    """Without the plugin for models of pydantic: none are used, and its imports take a fifth of a second."""

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return plugins


def build_app(loaded: Loaded, client: EngineClient, config: ServeConfig, log: RequestLog | None = None) -> Litestar:
    """The application of one model around the client of its engine.   log: closed when the application ends."""
    serving = Serving(
        client=client,
        tokenizer=loaded.tokenizer,
        chat_template=loaded.chat_template,
        model_id=loaded.model_id,
        eos_ids=loaded.eos_ids,
        generation_config=loaded.generation_config,
        defaults=config.defaults,
        post_thinking=config.post_thinking.fields(),
        grafts=loaded.grafts,
        default_graft=config.default_graft,
        slot_save_path=config.slot_save_path,
        max_replies=config.engine.max_concurrency + config.engine.max_pending_requests,
        max_pending=config.engine.max_pending_requests,
        memory=loaded.memory,
        timeout_s=config.request_timeout_ms / 1000 or None,
        journal=Journal(None if log is None else log.write, texts=config.request_log_prompts),
        started=int(time.time()),
        ping_s=PING_S,
    )
    return application(serving, config, on_shutdown=() if log is None else (log.close,))


def application(serving: Serving, config: ServeConfig, *, on_shutdown: Sequence[Callable[[], None]] = ()) -> Litestar:
    responses = Responses(ResponseStore())
    generation = (*GENERATION, ("openai_responses", responses_routes.PREFIXES, responses.parse))
    generating = [_generation(serving, name, paths, parse) for name, paths, parse in generation]
    keys = config.all_api_keys()
    return _App(
        [
            *generating,
            *anthropic.routes(serving),
            *llamacpp.routes(serving),
            *responses_routes.routes(serving, responses),
            *rerank.routes(serving),
            *slots.routes(serving),
            *status.routes(serving),
            *pages.routes(chat=config.webui),
        ],
        guards=[_key_guard(keys)] if keys else [],
        exception_handlers={Exception: handle},
        cors_config=_cors() if config.cors else None,
        before_send=[_identify],
        on_shutdown=on_shutdown,
        request_max_body_size=config.max_request_mib << 20,
        openapi_config=None,
        logging_config=None,
    )


def _generation(serving: Serving, endpoint: str, paths: Sequence[str], parse: Parse) -> HTTPRouteHandler:
    @post(list(paths), status_code=200)
    async def generate(request: Any_Request) -> Response[Any]:
        entry = serving.journal.begin(endpoint, request_id(request.scope))
        try:
            body = decode(await body_of(request))
            head = Head(id=secrets.token_hex(8), created=int(time.time()), model=serving.model_id)
            ask, teller = parse(body, head)
            if ask.stream:  # the stream ends the entry
                return await stream(request, frames(serving, ask, teller, head.id, entry))
            reply = await unless_gone(request, whole(serving, ask, teller, head.id, entry))
        except BaseException as error:
            entry.end(error)
            raise
        entry.end()
        return Response(reply)

    return generate


def _key_guard(keys: Sequence[str]) -> Guard:
    """Handlers with opt public=True need no key."""
    valid = [key.encode() for key in keys]

    def guard(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        if handler.opt.get("public"):
            return
        scheme, _, token = connection.headers.get("authorization", "").strip().partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else connection.headers.get("x-api-key", "").strip()
        matches = [hmac.compare_digest(given.encode(), key) for key in valid]  # all of them, in constant time
        if not any(matches):
            raise Unauthorized("missing or invalid API key; send it as Authorization: Bearer KEY or as x-api-key")

    return guard


def _cors() -> CORSConfig:
    return CORSConfig(
        allow_origins=["*"],
        allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
        expose_headers=["x-request-id", "request-id"],
    )


async def _identify(message: Message, scope: Scope) -> None:
    """A request id on every response, under the name that the dialect's client looks for."""
    if message["type"] == "http.response.start":
        anthropic = Dialect.of(scope["path"]) is Dialect.ANTHROPIC
        headers = MutableScopeHeaders.from_message(message)
        headers["request-id" if anthropic else "x-request-id"] = request_id(scope)
