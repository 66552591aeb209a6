"""Grafts on a real model behind real sockets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ninfer.artifacts import open_artifact
from ninfer.models import identify
from ninfer.models.qwen3_5 import Qwen35Spec
from tests.checkpoints import TINY_GGUF
from tests.clients.conftest import Process, serve
from tests.graft_writer import write_graft

HIDDEN: list[Any] = [
    {"role": "user", "content": "Hello! Please write a JSON record about a shepherd, and count from three. " * 3},
    {"role": "assistant", "content": "Hello! I am a very small model."},
]
ASKED = [{"role": "user", "content": "And the shepherds said"}]


def said(server: Process, **body: Any) -> tuple[str, dict[str, Any]]:
    reply = server.http.post("/v1/chat/completions", json={"temperature": 0, "max_tokens": 30, **body}).json()
    return reply["choices"][0]["message"]["content"], reply["usage"]


def test_hidden_turns_say_what_they_would_say_as_messages(tiny: Process, tmp_path: Path) -> None:
    spec = identify(open_artifact(TINY_GGUF).config)[1]
    assert isinstance(spec, Qwen35Spec)
    prompt = tiny.http.post("/apply-template", json={"messages": HIDDEN + ASKED}).json()["prompt"]
    bare = tiny.http.post("/apply-template", json={"messages": ASKED}).json()["prompt"]
    hidden = prompt[: len(prompt) - len(bare)]
    assert hidden + bare == prompt and "very small model" in hidden
    ids = tiny.http.post("/tokenize", json={"content": hidden}).json()["tokens"]
    wanted = said(tiny, messages=HIDDEN + ASKED)[0]
    assert wanted != said(tiny, messages=ASKED)[0]
    turns = write_graft(tmp_path / "turns.bin", spec, ids=ids)
    state = write_graft(tmp_path / "state.bin", spec, "direct_kv", n=70)
    flags = ("--graft", f"turns={turns}", "--graft", f"state={state}", "--default-graft", "turns")
    with serve(str(TINY_GGUF), "--max-context", "512", *flags) as server:
        told, usage = said(server, messages=ASKED)
        assert told == wanted and usage["prompt_tokens_details"]["cached_tokens"] == 0
        told, usage = said(server, messages=[{"role": "user", "content": "And the kings said"}])
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(ids) // 64 * 64 > 0
        told, usage = said(server, messages=ASKED, graft="state")  # noise: what it says is of no account
        assert usage["prompt_tokens_details"]["cached_tokens"] == 70
        assert said(server, messages=ASKED, graft="")[0] == said(tiny, messages=ASKED)[0]
        assert server.idle() and server.stop() == 0


def test_a_graft_for_another_model_is_refused_at_start(tmp_path: Path) -> None:
    spec = identify(open_artifact(TINY_GGUF).config)[1]
    assert isinstance(spec, Qwen35Spec)
    path = write_graft(tmp_path / "g.bin", spec, n=3, ids=(1, 2, 3), meta={"conv_k": 5})
    told = json.loads(path.with_suffix(".json").read_text())
    assert told["conv_k"] == 5
    try:
        with serve(str(TINY_GGUF), "--graft", f"g={path}"):
            raise RuntimeError("it started")
    except AssertionError as error:
        assert "--graft g: its conv_k is 5, this model's is 4" in str(error)
