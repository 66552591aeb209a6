"""What llama.cpp's clients may ask to be told on the way."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Server

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello there"}]},
    "/v1/completions": {"prompt": "hello there"},
    "/completion": {"prompt": "hello there"},
}
PATHS = pytest.mark.parametrize("path", BODIES)


@PATHS
def test_progress_begins_with_what_was_cached_and_ends_with_the_prompt_before_any_text(
    server: Server, path: str
) -> None:
    server.says("Hel", "lo")
    events = [e for e in server.events(path, **BODIES[path], return_progress=True) if isinstance(e, dict)]
    news = [e["prompt_progress"] for e in events if "prompt_progress" in e]
    total = len(server.client.requests[-1].prompt_ids)
    assert [n["processed"] for n in news] == [1, 2, total]
    assert all((n["total"], n["cache"]) == (total, 1) for n in news)
    assert [n["time_ms"] for n in news] == [0, 500, 500]
    firsts = [i for i, e in enumerate(events) if "Hel" in str(e)]
    assert max(i for i, e in enumerate(events) if "prompt_progress" in e) < firsts[0]
    assert "timings" not in events[firsts[0]]


@PATHS
def test_timings_are_in_every_event_of_a_reply(server: Server, path: str) -> None:
    server.says("a", "b", "c")
    events = [e for e in server.events(path, **BODIES[path], timings_per_token=True) if isinstance(e, dict)]
    counts = [e["timings"]["predicted_n"] for e in events if "timings" in e]
    assert counts == sorted(counts) and counts[0] == len(server.ids("a")) and len(counts) >= 4
    assert not any("prompt_progress" in e for e in events)


@PATHS
def test_who_does_not_ask_is_told_at_the_end(server: Server, path: str) -> None:
    server.says("a", "b")
    events = [e for e in server.events(path, **BODIES[path]) if isinstance(e, dict)]
    assert ["timings" in e for e in events] == [False] * (len(events) - 1) + [True]
    assert not server.client.requests[-1].timed


@PATHS
def test_a_whole_body_has_no_way(server: Server, path: str) -> None:
    server.says("a")
    asked = {"return_progress": True, "timings_per_token": True}
    told = server.http.post(path, json={**BODIES[path], **asked}).json()
    assert "timings" in told and "prompt_progress" not in told
    assert not server.client.requests[-1].timed
