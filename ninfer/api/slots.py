"""llama.cpp's slots: what is in them, and their sessions saved to files, brought back and erased."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from attrs import frozen
from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler

from ninfer.api.common import NO_STORE
from ninfer.api.errors import Conflict, Disabled
from ninfer.api.fields import Value, decode, text
from ninfer.api.serving import Serving
from ninfer.api.sse import body_of
from ninfer.errors import BadRequest, EngineUnavailable
from ninfer.runtime.kv.session import Session, SessionError, Tokens, read_session, write_session
from ninfer.runtime.slots import OtherSession, SlotBusy, Slots

ACTIONS = ("save", "restore", "erase")
NAME = re.compile(r"(?!\.)[a-z0-9._-]{1,128}(?<!\.)")
DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?")  # no file names everywhere


def routes(serving: Serving) -> tuple[HTTPRouteHandler, ...]:
    @get("/slots", sync_to_thread=False, response_headers=NO_STORE)
    def slots(request: Request[Any, Any, Any]) -> list[dict[str, Any]]:
        found = [dict(slot) for slot in serving.client.stats().slots]
        if request.query_params.get("fail_on_no_slot") and all(slot["is_processing"] for slot in found):
            raise EngineUnavailable("no slot is idle")
        return found

    @post("/slots/{id:str}", status_code=200, response_headers=NO_STORE)
    async def act(request: Request[Any, Any, Any]) -> dict[str, Any]:
        if serving.slot_save_path is None:
            raise Disabled("sessions are not kept in files here; serve with --slot-save-path")
        slot = _slot(serving, request.path_params["id"])
        raw = await body_of(request)
        body = decode(raw) if raw.strip() else Value({})
        action = request.query_params.get("action")
        if action not in ACTIONS:
            shown = "missing" if action is None else f"{action[:20]!a}"
            raise BadRequest(f"action is {shown}: one of {', '.join(ACTIONS)}", path="action", code="invalid_action")
        found = await getattr(_Files(serving, serving.slot_save_path, slot), action)(body)
        return {"id_slot": slot, **found}

    return slots, act


@frozen
class _Files:
    """The actions of a slot."""

    serving: Serving
    folder: Path
    slot: int

    async def save(self, body: Value) -> dict[str, Any]:
        path, begun = self._path(body), time.monotonic()
        digest = body["if_digest"].maybe(text)

        def collect(slots: Slots) -> tuple[Session, str]:
            return slots.save(self.slot, digest), slots.fingerprint

        session, fingerprint = await self._do(lambda: self.serving.client.act(collect), "slot_save_failed")
        try:
            size = await asyncio.to_thread(write_session, path, session, fingerprint)
        except OSError as error:
            reason = error.strerror or str(error)
            raise BadRequest(f"{path.name} cannot be written: {reason}", code="slot_save_failed") from None
        return {
            "filename": path.name,
            "n_saved": len(session.tokens.ids),
            "n_written": size,
            "session_digest": session.tokens.digest,
            "timings": {"save_ms": _ms(begun)},
        }

    async def restore(self, body: Value) -> dict[str, Any]:
        path, begun = self._path(body), time.monotonic()

        async def bring_back() -> tuple[Tokens, int]:
            fingerprint = await self.serving.client.act(lambda slots: slots.fingerprint)
            session, size = await asyncio.to_thread(read_session, path, fingerprint)
            await self.serving.client.act(lambda slots: slots.restore(self.slot, session))
            return session.tokens, size

        tokens, size = await self._do(bring_back, "slot_restore_failed")
        return {
            "filename": path.name,
            "n_restored": len(tokens.ids),
            "n_read": size,
            "session_digest": tokens.digest,
            "timings": {"restore_ms": _ms(begun)},
        }

    async def erase(self, body: Value) -> dict[str, Any]:
        digest = body["if_digest"].maybe(text)
        count = await self._do(
            lambda: self.serving.client.act(lambda slots: slots.erase(self.slot, digest)), "slot_erase_failed"
        )
        return {"n_erased": count}

    def _path(self, body: Value) -> Path:
        name = text(body["filename"]).lower()
        if not NAME.fullmatch(name) or DEVICES.fullmatch(name):
            raise body["filename"].refused(
                "1 to 128 letters, digits, dots, underscores and dashes, not beginning or ending with a dot",
                code="invalid_filename",
            )
        return self.folder / name

    @staticmethod
    async def _do(work: Callable[[], Awaitable[Any]], code: str) -> Any:
        try:
            return await work()
        except SlotBusy as error:
            raise Conflict(str(error), code="slot_busy") from None
        except OtherSession as error:
            raise Conflict(str(error), code="slot_session_mismatch") from None
        except SessionError as error:
            raise BadRequest(str(error), code=code) from None


def _slot(serving: Serving, id: str) -> int:
    count = len(serving.client.stats().slots)
    if not (id.isascii() and id.isdecimal() and int(id) < count):
        raise BadRequest(f"there is no slot {id[:20]!a}; there are 0 to {count - 1}", code="invalid_slot")
    return int(id)


def _ms(begun: float) -> float:
    return round((time.monotonic() - begun) * 1e3, 3)
