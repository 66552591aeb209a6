"""The pages: a dashboard, and a chat if it is wanted. Plain files of the package, without anything from elsewhere."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Any

from attrs import frozen
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from ninfer.api.errors import NotFound

KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}  # UTF-8, which is added
CHAT = ("index.html", "chat.js", "markdown.js", "store.js")
# Whatever a model writes, the browser loads and sends nothing beyond this server.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@frozen
class File:
    data: bytes
    kind: str
    tag: str


def files(*, chat: bool) -> dict[str, File]:
    """By name. chat: those of the chat too."""
    found = {}
    for entry in (resources.files("ninfer") / "web").iterdir():
        kind = KINDS.get(entry.name.rpartition(".")[2])
        if kind is not None and (chat or entry.name not in CHAT):
            data = entry.read_bytes()
            found[entry.name] = File(data, kind, f'"{hashlib.sha256(data).hexdigest()[:16]}"')
    return found


def routes(*, chat: bool) -> tuple[HTTPRouteHandler, ...]:
    """They need no key: they hold nothing, and ask for one themselves."""
    known = files(chat=chat)

    def answer(request: Request[Any, Any, Any], name: str) -> Response[bytes]:
        file = known.get(name)
        if file is None:
            raise NotFound(f"there is no {request.scope['path']} here")
        headers = {**HEADERS, "etag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(b"", status_code=304, headers=headers, media_type=file.kind)
        return Response(file.data, headers=headers, media_type=file.kind)

    @get("/dashboard", opt={"public": True}, sync_to_thread=False)
    def dashboard(request: Request[Any, Any, Any]) -> Response[bytes]:
        return answer(request, "dashboard.html")

    @get("/web/{name:str}", opt={"public": True}, sync_to_thread=False)
    def file(request: Request[Any, Any, Any]) -> Response[bytes]:
        return answer(request, request.path_params["name"])

    @get("/", opt={"public": True}, sync_to_thread=False)
    def index(request: Request[Any, Any, Any]) -> Response[bytes]:
        return answer(request, "index.html")

    return (dashboard, file, index) if chat else (dashboard, file)
