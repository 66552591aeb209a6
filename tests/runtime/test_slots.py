"""Sessions of slots: saved from wherever the cache has them, brought back into another engine, and forgotten."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ninfer.config import EngineConfig
from ninfer.errors import EngineUnavailable
from ninfer.runtime.engine import Engine, drive
from ninfer.runtime.kv.session import Session, SessionError, Tokens, read_session, write_session
from ninfer.runtime.load import load
from ninfer.runtime.request import GenerateRequest, Sampling, TokenOut
from ninfer.runtime.slots import OtherSession, SlotBusy
from tests.checkpoints import TINY_GGUF, tiny_cases
from tests.runtime.fake_runner import DOMAIN, FakeRunner, FakeStore, engine, expected, limits, request, tokens

PROMPT = tuple(range(200))


def fake(recurrent: bool, **changes: Any) -> Engine:
    runner = FakeRunner()
    runner.cache_store = FakeStore(runner, recurrent=recurrent)
    return engine(runner, **changes)


def save(e: Engine, slot: int = 0, if_digest: str | None = None) -> Session:
    found = e.act(lambda slots: slots.save(slot, if_digest))
    e.step()
    return found.result(0)


def restore(e: Engine, session: Session, slot: int = 0) -> int:
    found = e.act(lambda slots: slots.restore(slot, session))
    e.step()
    return found.result(0)


def erase(e: Engine, slot: int = 0, if_digest: str | None = None) -> int:
    found = e.act(lambda slots: slots.erase(slot, if_digest))
    e.step()
    e.check()
    return found.result(0)


def ask(e: Engine, id: str, prompt: tuple[int, ...], max_tokens: int = 20) -> tuple[list[int], int]:
    r = request(id, prompt, max_tokens=max_tokens)
    deltas = drive(e, [r])[id]
    e.check()
    assert tokens(deltas) == expected(r) and deltas[-1].timings is not None
    return tokens(deltas), deltas[-1].timings.num_cached_tokens


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_session_goes_on_in_another_engine(tmp_path: Path, recurrent: bool) -> None:
    e = fake(recurrent)
    reply, _ = ask(e, "a", PROMPT)
    assert e.stats().slots[0]["retained"] and e.stats().slots[0]["n_retained"] == 219
    session = save(e)
    count = 219 if recurrent else 192  # whole pages, and with a state also what comes after them
    assert session.tokens.ids == (*PROMPT, *reply)[:count]
    size = write_session(tmp_path / "s", session, "f" * 24)
    assert size == (tmp_path / "s").stat().st_size and [p.name for p in tmp_path.iterdir()] == ["s"]
    again, read = read_session(tmp_path / "s", "f" * 24)
    assert read == size
    other = fake(recurrent)
    assert restore(other, again, slot=3) == count
    assert other.stats().slots[3]["session_digest"] == session.tokens.digest
    assert ask(other, "b", (*PROMPT, *reply, 5, 6, 7))[1] == count
    assert ask(fake(recurrent), "c", (*PROMPT, *reply, 5, 6, 7))[1] == 0


def test_a_prompt_can_be_asked_again_after_a_restore() -> None:
    """The state at the prompt's last page end comes along with the one at the end of the reply."""
    e, other = fake(True), fake(True)
    ask(e, "a", PROMPT)
    session = save(e)
    assert [i.depth * 64 + i.tail_len for i in session.images] == [192, 219]
    restore(other, session)
    assert ask(other, "b", PROMPT)[1] == 192


@pytest.mark.parametrize("recurrent", [True, False])
def test_what_left_the_device_is_saved_as_well(recurrent: bool) -> None:
    runner = FakeRunner(limits(pages=6))
    runner.cache_store = FakeStore(runner, recurrent=recurrent)
    e = engine(runner, max_concurrency=1)
    reply, _ = ask(e, "a", PROMPT)
    held = e.stats().slots[0]["session_digest"]
    e.submit(request("b", tuple(range(500, 800)), max_tokens=1), lambda deltas: None)
    e.cancel("b")
    while e.step():
        pass
    assert e.stats().slots[0]["session_digest"] == held  # a request that never ran leaves the slot as it was
    ask(e, "c", tuple(range(300, 600)))  # takes the whole pool
    restored = restore(e, Session(Tokens(()), ()))
    assert restored == 0
    other = fake(recurrent)
    ask(other, "d", PROMPT)
    restore(e, save(other))
    assert ask(e, "e", (*PROMPT, *reply, 9))[1] >= 192


def test_what_is_saved_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of a device may come later: the thread that writes the file must not."""
    e = fake(True)
    ask(e, "a", PROMPT)
    settled: list[bool] = []
    monkeypatch.setattr(FakeStore, "settle", lambda self: settled.append(True))
    save(e)
    assert settled


def test_who_works_is_left_alone() -> None:
    e = fake(True)
    e.submit(request("a", PROMPT, max_tokens=20), lambda deltas: None)
    e.step()
    session = Session(Tokens((1, 2, 3)), ())
    for action in (lambda s: s.save(0), lambda s: s.restore(0, session), lambda s: s.erase(0)):
        result = e.act(action)
        e.step()
        with pytest.raises(SlotBusy, match="slot 0 is at work"):
            result.result(0)
    while e.step():
        pass
    assert len(save(e).tokens.ids) == 219


def test_a_digest_names_the_session_that_is_meant() -> None:
    e = fake(True)
    with pytest.raises(OtherSession, match="slot 0 holds session none, not 00"):
        save(e, if_digest="00")
    with pytest.raises(SessionError, match="slot 0 has held no sequence yet"):
        save(e)
    ask(e, "a", PROMPT)
    digest = str(e.stats().slots[0]["session_digest"])
    assert digest == Tokens(expected_tokens(e)).digest
    assert save(e, if_digest=digest.upper()).tokens.digest == digest
    with pytest.raises(OtherSession, match=f"slot 0 holds session {digest}, not beef"):
        erase(e, if_digest="beef")
    assert Tokens(()).digest == "cbf29ce484222325"  # FNV-1a of nothing
    assert Tokens((0x6F6F66, 0x726162)).digest == fnv(b"foo\0bar\0")


def expected_tokens(e: Engine) -> tuple[int, ...]:
    return (*PROMPT, *expected(request("a", PROMPT, max_tokens=19)))


def fnv(data: bytes) -> str:
    value = 14695981039346656037
    for byte in data:
        value = ((value ^ byte) * 1099511628211) % 2**64
    return f"{value:016x}"


@pytest.mark.parametrize("recurrent", [True, False])
def test_an_erased_session_is_gone(recurrent: bool, tmp_path: Path) -> None:
    e = fake(recurrent, disk_kv_path=tmp_path, disk_kv_restore=True)
    reply, _ = ask(e, "a", PROMPT)
    assert erase(e) == 219 and erase(e) == 0
    assert not e.stats().slots[0]["retained"]
    assert list(tmp_path.rglob("*.kv")) == []
    used = {t["name"]: t["used_bytes"] for t in e.stats().tiers}
    assert used["device"] == used["host"] == used["images"] == used["disk"] == 0
    assert ask(e, "b", (*PROMPT, *reply, 5))[1] == 0


@pytest.mark.parametrize("recurrent", [True, False])
def test_the_beginning_that_others_have_stays(recurrent: bool) -> None:
    e = fake(recurrent)
    ask(e, "a", (*PROMPT, *range(300, 400)))
    ask(e, "b", (*PROMPT, *range(500, 600)))
    assert erase(e) == 319 - 192
    assert ask(e, "c", (*PROMPT, *range(300, 400), 5), max_tokens=1)[1] >= 256
    assert ask(e, "d", (*PROMPT, *range(500, 600), 5), max_tokens=1)[1] <= 200


def test_erasing_at_random_leaks_nothing() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    runner = FakeRunner(limits(pages=12))
    runner.cache_store = FakeStore(runner, recurrent=dice.random() < 0.5)
    e = engine(runner, max_concurrency=2)
    for i in range(60):
        start = dice.choice([0, 64, 100, 200])
        tail = tuple(dice.randrange(DOMAIN) for _ in range(dice.randrange(1, 150)))
        ask(e, str(i), (*range(start), *tail), max_tokens=dice.randrange(1, 30))
        if dice.random() < 0.5:
            assert erase(e) >= 0
    erase(e)


def test_a_session_that_has_no_room_is_refused() -> None:
    e = fake(True)
    ask(e, "a", PROMPT)
    session = save(e)
    with pytest.raises(SessionError, match=r"of pages, and there is room for 0; serve with a larger --host-cache-mib"):
        restore(fake(True, host_cache_mib=0), session)
    with pytest.raises(SessionError, match="sessions are kept by the prefix cache, and it is off"):
        save(fake(True, no_prefix_reuse=True))


@pytest.mark.parametrize("damage", ["cut", "bit", "owner", "version", "magic", "none"])
def test_a_file_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    e = fake(True)
    ask(e, "a", PROMPT)
    path = tmp_path / "s"
    write_session(path, save(e), "mine")
    raw = bytearray(path.read_bytes())
    told = {
        "cut": "s is damaged; save the session again",
        "bit": "s is damaged; save the session again",
        "owner": "s was saved by another model, or with other settings",
        "version": "s is of version 9, and 1 is read",
        "magic": "s is no saved session",
        "none": "s cannot be read: No such file or directory",
    }
    if damage == "bit":
        raw[dice_place(raw)] ^= 4
    elif damage == "version":
        raw[8] = 9
    elif damage == "magic":
        raw[0] = 0
    path.write_bytes(raw[:-9] if damage == "cut" else raw)
    if damage == "none":
        path.unlink()
    with pytest.raises(SessionError) as error:
        read_session(path, "other" if damage == "owner" else "mine")
    assert str(error.value).startswith(told[damage])


def dice_place(raw: bytearray) -> int:
    place = random.randrange(60, len(raw))
    print(f"place {place}")
    return place


def test_an_engine_that_has_failed_says_so() -> None:
    e = engine(FakeRunner(fail=lambda rows: None))
    e.close()
    with pytest.raises(EngineUnavailable):
        e.act(lambda slots: 1)


def real(**changes: Any) -> Engine:
    config = EngineConfig(
        model=str(TINY_GGUF),
        max_context=1024,
        max_concurrency=2,
        deterministic=True,
        **changes,
    )
    loaded = load(config)
    return Engine(loaded.runner, config, speculation=loaded.speculation)


def told(e: Engine, id: str, prompt: tuple[int, ...]) -> tuple[list[TokenOut], int]:
    r = GenerateRequest(id=id, prompt_ids=prompt, sampling=Sampling(temperature=0.8, seed=5), max_tokens=24, logprobs=5)
    deltas = drive(e, [r])[id]
    timings = deltas[-1].timings
    assert timings is not None
    return [t for d in deltas for t in d.tokens], timings.num_cached_tokens


def test_a_round_trip_through_a_file_changes_no_bit(tmp_path: Path) -> None:
    """Another process's engine goes on exactly as one that computed everything: tokens and log-probabilities."""
    prompt = tuple(tiny_cases()[0]["prompt_ids"] * 20)[:300]
    with real() as e:
        reply, _ = told(e, "a", prompt)
        session = save(e)
        fingerprint = e.act(lambda slots: slots.fingerprint)
        e.step()
        write_session(tmp_path / "s", session, fingerprint.result(0))
        assert len(session.tokens.ids) == 256
    more = (*prompt, *(t.id for t in reply), *tiny_cases()[1]["prompt_ids"])
    with real() as cold:
        wanted, cached = told(cold, "b", more)
        assert cached == 0
    with real() as e:
        found = e.act(lambda slots: slots.fingerprint)
        e.step()
        session, _ = read_session(tmp_path / "s", found.result(0))
        assert restore(e, session) == 256
        got, cached = told(e, "b", more)
        assert cached == 256 and got == wanted
        assert told(e, "a", prompt) == (reply, 256)
    with real(kv_dtype="int8") as e:
        found = e.act(lambda slots: slots.fingerprint)
        e.step()
        with pytest.raises(SessionError, match="was saved by another model, or with other settings"):
            read_session(tmp_path / "s", found.result(0))
