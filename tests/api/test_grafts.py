"""`graft` in the dialects that have it: whose ids come first, what they count as, and who is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.config import EngineConfig, ServeConfig, parse
from ninfer.errors import UsageError
from ninfer.runtime.grafts import Graft, GraftState
from tests.api.conftest import Server, Start

HI = [{"role": "user", "content": "hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI},
}
COUNTS = {"/v1/responses/input_tokens": PATHS["/v1/responses"], "/v1/messages/count_tokens": PATHS["/v1/messages"]}
TURNS = Graft(name="turns", ids=(1, 2, 3))
NOTHING = np.zeros(0, np.uint16)
STATE = Graft(name="state", ids=(9,) * 70, state=GraftState(NOTHING, NOTHING, NOTHING, np.zeros(0, np.float32)))


@pytest.fixture
def grafted(start: Start) -> Server:
    return start(loads=(TURNS, STATE))


def ids(server: Server, path: str, **fields: Any) -> tuple[int, ...]:
    response = server.http.post(path, json={**PATHS[path], **fields})
    assert response.status_code == 200, response.text
    return server.client.requests[-1].prompt_ids


@pytest.mark.parametrize("path", PATHS)
def test_the_ids_of_a_graft_come_before_the_prompt(grafted: Server, path: str) -> None:
    bare = ids(grafted, path)
    assert ids(grafted, path, graft=None) == ids(grafted, path, graft="") == bare
    assert (grafted.client.requests[-1].prefix_len, grafted.client.requests[-1].prefix_given) == (0, False)
    assert ids(grafted, path, graft="turns") == (1, 2, 3, *bare)
    assert (grafted.client.requests[-1].prefix_len, grafted.client.requests[-1].prefix_given) == (3, False)
    assert ids(grafted, path, graft="state") == (*STATE.ids, *bare)
    assert (grafted.client.requests[-1].prefix_len, grafted.client.requests[-1].prefix_given) == (70, True)


def test_a_grafts_tokens_count_as_prompt_and_against_the_window(grafted: Server) -> None:
    usage = [grafted.chat("hi", graft=graft).json()["usage"]["prompt_tokens"] for graft in ("", "state")]
    assert usage[1] == usage[0] + 70
    error = grafted.chat("x" * 200, graft="state").json()["error"]
    assert error["code"] == "context_length_exceeded" and error["n_prompt_tokens"] > 256
    assert grafted.chat("x" * 200).status_code == 200


@pytest.mark.parametrize("path", COUNTS)
def test_counting_counts_it_too(grafted: Server, path: str) -> None:
    counts = []
    for graft in ("", "turns"):
        response = grafted.http.post(path, json={**COUNTS[path], "model": "", "graft": graft})
        assert response.status_code == 200, response.text
        counts.append(response.json()["input_tokens"])
    assert counts[1] == counts[0] + 3


def test_a_default_graft_is_for_requests_that_name_none(start: Start, tmp_path: Path) -> None:
    (tmp_path / "g").write_text("")
    server = start(loads=(TURNS, STATE), grafts=(f"turns={tmp_path / 'g'}",), default_graft="turns")
    for path in PATHS:
        bare = ids(server, path, graft="")
        assert ids(server, path) == ids(server, path, graft=None) == (1, 2, 3, *bare)
        assert ids(server, path, graft="state") == (*STATE.ids, *bare)
    server.http.post("/v1/completions", json={"prompt": "hi"})
    assert server.client.requests[-1].prompt_ids == tuple(server.ids("hi"))


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_graft_and_one_that_is_no_name_are_refused(grafted: Server, path: str) -> None:
    anthropic = path == "/v1/messages"
    for graft, code, told in (
        ("other", "unknown_graft", "graft: 'other' is not loaded; there are turns, state"),
        (7, None, "graft: expected a string, got 7"),
    ):
        response = grafted.http.post(path, json={**PATHS[path], "graft": graft})
        error = response.json()["error"]
        assert response.status_code == 400 and told in error["message"]
        if not anthropic:
            assert (error["param"], error["code"]) == ("graft", code)
    assert grafted.client.requests == []


def test_flags_that_name_no_file_or_no_graft_are_refused(tmp_path: Path) -> None:
    def read(*argv: str) -> ServeConfig:
        return parse(ServeConfig, ["demo", *argv], prog="x", description="", version="1")

    (tmp_path / "g").write_text("")
    assert read("--graft", f"a={tmp_path / 'g'}", "--default-graft", "a").default_graft == "a"
    for bad in ("a", f"={tmp_path / 'g'}", f"a={tmp_path / 'h'}"):
        with pytest.raises(UsageError, match=r"--graft: .* is not a name, = and a file that exists"):
            read("--graft", bad)
    with pytest.raises(UsageError, match="--default-graft b: no --graft has this name"):
        ServeConfig(engine=EngineConfig(model="demo"), grafts=(f"a={tmp_path / 'g'}",), default_graft="b")
