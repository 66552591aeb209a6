"""What an exception becomes in each dialect: one table, and one function per dialect for the body."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from enum import Enum
from typing import Any

from attrs import field, frozen
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import Scope

from ninfer.errors import (
    BadRequest,
    BodyTooLarge,
    Cancelled,
    ContextTooLong,
    EngineUnavailable,
    NinferError,
    Overloaded,
    QueueTimeout,
    RequestTimeout,
    UnknownModel,
)

log = logging.getLogger(__name__)


class Unauthorized(NinferError):
    """The request carries no key that is valid."""


class NotFound(NinferError):
    """No route, or no object, of this name."""


class MethodNotAllowed(NinferError):
    """The route exists for other methods."""


class Conflict(NinferError):
    """What is asked does not go with what is there now."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class Disabled(NinferError):
    """The server was started without it."""


class Dialect(Enum):
    OPENAI = "openai"  # llama.cpp's too
    ANTHROPIC = "anthropic"

    @staticmethod
    def of(path: str) -> Dialect:
        return Dialect.ANTHROPIC if path.startswith(("/v1/messages", "/v1/v1/messages")) else Dialect.OPENAI


@frozen
class _Row:
    """Status, type and code of the OpenAI envelope; status and type of Anthropic's."""

    openai: tuple[int, str, str | None]
    anthropic: tuple[int, str]


_INVALID = "invalid_request_error"
_TABLE: Mapping[type[Exception], _Row] = {
    BadRequest: _Row((400, _INVALID, None), (400, _INVALID)),
    Unauthorized: _Row((401, _INVALID, "invalid_api_key"), (401, "authentication_error")),
    NotFound: _Row((404, _INVALID, "not_found"), (404, "not_found_error")),
    UnknownModel: _Row((404, _INVALID, "model_not_found"), (404, "not_found_error")),
    MethodNotAllowed: _Row((405, _INVALID, "method_not_allowed"), (405, _INVALID)),
    Conflict: _Row((409, _INVALID, None), (409, _INVALID)),
    Disabled: _Row((501, "not_supported_error", "slot_persistence_disabled"), (501, "api_error")),
    BodyTooLarge: _Row((413, _INVALID, "request_too_large"), (413, "request_too_large")),
    Cancelled: _Row((499, "request_cancelled", "client_disconnected"), (499, "api_error")),
    Overloaded: _Row((429, "rate_limit_error", "server_overloaded"), (529, "overloaded_error")),
    QueueTimeout: _Row((503, "server_error", "request_queue_timeout"), (504, "timeout_error")),
    RequestTimeout: _Row((504, "server_error", "request_timeout"), (504, "timeout_error")),
    EngineUnavailable: _Row((503, "server_error", "service_unavailable"), (503, "api_error")),
    Exception: _Row((500, "server_error", "internal_error"), (500, "api_error")),
}
_OWN = "x-should-retry"  # read by the official clients, which would otherwise repeat the work


@frozen
class Rendered:
    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(factory=dict)


def render(error: Exception, dialect: Dialect, request_id: str = "") -> Rendered:
    """Status, body and headers. Unknown exceptions tell nothing of themselves but that they happened."""
    row = next(_TABLE[c] for c in type(error).__mro__ if c in _TABLE)
    message = str(error) if isinstance(error, NinferError) else "internal error; the server's log says more"
    headers = {}
    if isinstance(error, Overloaded | QueueTimeout | EngineUnavailable):
        headers["retry-after"] = str(max(1, round(getattr(error, "retry_after_s", 2.0))))
    if row is _TABLE[Exception] or isinstance(error, RequestTimeout | Conflict | Disabled):
        headers[_OWN] = "false"
    numbers = {}
    if isinstance(error, ContextTooLong):
        numbers = {"n_prompt_tokens": error.num_prompt_tokens, "n_ctx": error.context_len}
    if dialect is Dialect.ANTHROPIC:
        status, kind = row.anthropic
        body = {"type": "error", "error": {"type": kind, "message": message, **numbers}, "request_id": request_id}
        return Rendered(status, body, headers)
    status, kind, code = row.openai
    param = error.path if isinstance(error, BadRequest) else None
    if isinstance(error, BadRequest | Conflict) and error.code is not None:
        code = error.code
    return Rendered(
        status, {"error": {"message": message, "type": kind, "param": param, "code": code, **numbers}}, headers
    )


def request_id(scope: Scope) -> str:
    """Made when it is first asked for; on every response, and in Anthropic's errors."""
    state: dict[str, Any] = scope["state"]
    found: str = state.setdefault("request_id", f"req_{secrets.token_hex(8)}")
    return found


def failure(error: Exception, dialect: Dialect, request_id: str = "") -> Rendered:
    """What ends a stream that has begun."""
    if not isinstance(error, NinferError):
        log.error("a streamed reply failed", exc_info=error)
    return render(error, dialect, request_id)


def handle(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """The exception handler of the application."""
    path = request.scope["path"]
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers.update(error.headers or {})
        error = _own(error, request)
    if isinstance(error, Cancelled):
        log.info("%s: the client has gone", path)
    elif not isinstance(error, NinferError):
        log.error("%s %s failed", request.method, path, exc_info=error)
    found = render(error, Dialect.of(path), request_id(request.scope))
    return Response(dict(found.body), status_code=found.status, headers={**headers, **found.headers})


def _own(error: HTTPException, request: Request[Any, Any, Any]) -> Exception:
    """What the framework raises, in our terms."""
    path = request.scope["path"]
    if error.status_code == 404:
        return NotFound(f"there is no {path} here; GET /v1/models lists what is served")
    if error.status_code == 405:
        return MethodNotAllowed(f"{path} does not take {request.method}")
    if error.status_code == 413:
        limit = request.app.request_max_body_size
        return BodyTooLarge(f"the body is over the limit of {limit} bytes; serve with a larger --max-request-mib")
    if error.status_code < 500:
        return BadRequest(error.detail)
    return error
