"""The slot routes: who may act on what, and how refusals are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs
import httpx
import numpy as np
import pytest

from ninfer.cli.serve import make_slot_folder
from ninfer.config import EngineConfig, ServeConfig
from ninfer.errors import UsageError
from ninfer.runtime.kv.session import Session, SessionError, Tokens, write_session
from ninfer.runtime.request import EngineStats
from ninfer.runtime.slots import SlotBusy, Slots
from tests.api.conftest import FakeClient, Server, Start

T = TypeVar("T")
SESSION = Session(Tokens(tuple(range(64))), [np.arange(100, dtype=np.uint8)])
IDLE: tuple[dict[str, Any], ...] = ({"id": 0, "is_processing": False}, {"id": 1, "is_processing": True})


class FakeSlots(Slots):
    """Slot 0 holds SESSION; slot 1 is at work."""

    def __init__(self) -> None:
        super().__init__([None, None], None, "mine")
        self._held[0] = SESSION.tokens
        self.restored: list[tuple[int, Session]] = []

    def save(self, slot: int, if_digest: str | None = None) -> Session:
        self._meant(slot, if_digest)
        return SESSION

    def restore(self, slot: int, session: Session) -> int:
        self._meant(slot, None)
        self.restored.append((slot, session))
        return len(session.tokens.ids)

    def erase(self, slot: int, if_digest: str | None = None) -> int:
        return 0 if self._meant(slot, if_digest) is None else 64

    def _meant(self, slot: int, if_digest: str | None) -> Tokens | None:
        if slot == 1:
            raise SlotBusy("slot 1 is at work; wait until its request has ended")
        return super()._meant(slot, if_digest)


@attrs.define
class SlotClient(FakeClient):
    slots: FakeSlots = attrs.field(factory=FakeSlots)

    async def act(self, action: Callable[[Any], T]) -> T:
        return action(self.slots)


def act(server: Server, action: str | None, slot: object = 0, **body: Any) -> httpx.Response:
    return server.http.post(f"/slots/{slot}", params={"action": action} if action else {}, json=body)


def refused(response: httpx.Response, status: int, code: str, told: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code) and told in error["message"], response.text


@pytest.fixture
def server(start: Start, tmp_path: Path) -> Server:
    return start(SlotClient(stats_now=EngineStats(slots=IDLE)), slot_save_path=tmp_path)


def test_a_session_is_saved_restored_and_erased(server: Server, tmp_path: Path) -> None:
    saved = act(server, "save", filename="Mine.bin", if_digest=SESSION.tokens.digest).json()
    assert saved.pop("timings")["save_ms"] >= 0
    size = (tmp_path / "mine.bin").stat().st_size
    digest = SESSION.tokens.digest
    file = {"id_slot": 0, "filename": "mine.bin", "session_digest": digest}
    assert saved == {**file, "n_saved": 64, "n_written": size}
    restored = act(server, "restore", filename="mine.bin").json()
    assert restored.pop("timings")["restore_ms"] >= 0
    assert restored == {**file, "n_restored": 64, "n_read": size}
    assert isinstance(server.client, SlotClient)
    [(slot, session)] = server.client.slots.restored
    assert slot == 0 and session.tokens == SESSION.tokens
    np.testing.assert_array_equal(session.pages[0], SESSION.pages[0])
    assert act(server, "erase").json() == {"id_slot": 0, "n_erased": 64}
    assert server.http.post("/slots/0?action=erase").json() == {"id_slot": 0, "n_erased": 64}


def test_what_is_no_slot_no_action_or_no_name_is_refused(server: Server, tmp_path: Path) -> None:
    refused(act(server, "save", 7, filename="x"), 400, "invalid_slot", "there is no slot '7'; there are 0 to 1")
    refused(act(server, "save", "-1", filename="x"), 400, "invalid_slot", "there is no slot '-1'")
    refused(act(server, "swap"), 400, "invalid_action", "action is 'swap': one of save, restore, erase")
    refused(act(server, None), 400, "invalid_action", "action is missing: one of save, restore, erase")
    for name in ("../x", ".x", "x.", "", "a/b", "a\\b", "x" * 129, "nul", "COM1.bin", "ä", "x\n"):
        refused(act(server, "save", filename=name), 400, "invalid_filename", "filename: 1 to 128 letters")
    assert act(server, "save").json()["error"]["message"] == "filename is missing: expected a string"
    assert act(server, "save", filename="x" * 128).status_code == 200
    assert [p.name for p in tmp_path.iterdir()] == ["x" * 128]


def test_a_slot_at_work_or_with_another_session_is_a_conflict_that_no_client_repeats(server: Server) -> None:
    for action in ("save", "erase"):
        response = act(server, action, 1, filename="x")
        refused(response, 409, "slot_busy", "slot 1 is at work; wait until its request has ended")
        assert response.headers["x-should-retry"] == "false"
        response = act(server, action, 0, filename="x", if_digest="beef")
        refused(response, 409, "slot_session_mismatch", f"slot 0 holds session {SESSION.tokens.digest}, not beef")
        assert response.headers["x-should-retry"] == "false"


def test_a_file_that_is_missing_foreign_or_cannot_be_written_is_refused(server: Server, tmp_path: Path) -> None:
    refused(act(server, "restore", filename="other"), 400, "slot_restore_failed", "other cannot be read: No such")
    (tmp_path / "noise").write_bytes(b"noise" * 100)
    refused(act(server, "restore", filename="noise"), 400, "slot_restore_failed", "noise is no saved session")
    write_session(tmp_path / "foreign", SESSION, "another")
    told = "foreign was saved by another model"
    refused(act(server, "restore", filename="foreign"), 400, "slot_restore_failed", told)
    (tmp_path / "folder").mkdir()
    refused(act(server, "save", filename="folder"), 400, "slot_save_failed", "folder cannot be written: Is a directory")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "foreign", "noise"]


def test_what_the_cache_cannot_give_is_said(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: object, slot: int, if_digest: str | None = None) -> Session:
        raise SessionError("the cache holds no state of slot 0's session any more, or it was too short")

    monkeypatch.setattr(FakeSlots, "save", nothing)
    refused(act(server, "save", filename="x"), 400, "slot_save_failed", "the cache holds no state of slot 0's session")


def test_without_the_flag_there_are_no_actions(start: Start) -> None:
    server = start(SlotClient(stats_now=EngineStats(slots=IDLE)))
    response = act(server, "save", filename="x")
    refused(response, 501, "slot_persistence_disabled", "serve with --slot-save-path")
    assert response.headers["x-should-retry"] == "false"


def test_slots_tell_whether_one_is_idle(start: Start) -> None:
    server = start()
    assert server.http.get("/slots?fail_on_no_slot=1").status_code == 200
    server.client.stats_now = EngineStats(slots=(IDLE[1],))
    assert server.http.get("/slots").json() == [IDLE[1]]
    refused(server.http.get("/slots?fail_on_no_slot=1"), 503, "service_unavailable", "no slot is idle")


def test_a_folder_that_cannot_be_used_is_refused_at_start(tmp_path: Path) -> None:
    make_slot_folder(tmp_path / "not" / "yet")
    assert (tmp_path / "not" / "yet").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--slot-save-path: cannot use .*/x: Not a directory; choose another folder"):
        make_slot_folder(tmp_path / "file" / "x")
    with pytest.raises(UsageError, match=r"--slot-save-path: .*; leave out --no-prefix-reuse"):
        ServeConfig(engine=EngineConfig(model="demo", no_prefix_reuse=True), slot_save_path=tmp_path)
