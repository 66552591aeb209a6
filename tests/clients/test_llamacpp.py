"""A client as llama.cpp's users write it: plain requests to its own endpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ninfer.text.grammar import available
from tests.clients.conftest import Process

needs_grammar = pytest.mark.skipif(not available(), reason="needs xgrammar")


def post(server: Process, path: str, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def stream(server: Process, **body: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", "/completion", json={**body, "stream": True}) as response:
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]


def test_a_template_applied_by_hand_completes_to_the_chats_reply(tiny: Process) -> None:
    prompt = post(tiny, "/apply-template", messages=[{"role": "user", "content": "Hello!"}])["prompt"]
    whole = post(tiny, "/completion", prompt=prompt, temperature=0, n_predict=40, cache_prompt=True)
    assert whole["content"] == "Hello! I am a very small model. How can I help?" and whole["stop_type"] == "eos"
    events = stream(tiny, prompt=prompt, temperature=0, n_predict=40)
    assert "".join(e["content"] for e in events) == whole["content"]
    assert [e["stop"] for e in events] == [False] * (len(events) - 1) + [True]
    last = events[-1]
    assert last["tokens_predicted"] == whole["tokens_predicted"] == last["timings"]["predicted_n"]
    assert last["timings"]["cache_n"] + last["timings"]["prompt_n"] == last["tokens_evaluated"]


def test_tokens_there_and_back(tiny: Process) -> None:
    text = "In the beginning 日本 🙂"
    tokens = post(tiny, "/tokenize", content=text)["tokens"]
    assert post(tiny, "/detokenize", tokens=tokens)["content"] == text
    pieces = post(tiny, "/tokenize", content=text, with_pieces=True)["tokens"]
    data = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert data.decode() == text and [p["id"] for p in pieces] == tokens
    assert post(tiny, "/completion", prompt=tokens, n_predict=1)["tokens_evaluated"] == len(tokens)


@needs_grammar
def test_output_keeps_to_a_schema_and_to_a_grammar(tiny: Process) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 5}}, "required": ["n"]}
    for seed in range(5):
        reply = post(tiny, "/completion", prompt="numbers", json_schema=schema, n_predict=60, seed=seed)
        assert json.loads(reply["content"])["n"] in (3, 4, 5)
        reply = post(tiny, "/completion", prompt="yes or no", grammar='root ::= "yes" | "no"', n_predict=9, seed=seed)
        assert reply["content"] in ("yes", "no") and reply["stop_type"] == "eos"


def test_stop_words_and_limits(tiny: Process) -> None:
    reply = post(tiny, "/completion", prompt="And it came to pass", temperature=0, n_predict=20, stop=["king"])
    assert (reply["stop_type"], reply["stopping_word"], reply["content"]) == ("word", "king", ", when the ")
    reply = post(tiny, "/completion", prompt="And it came to pass", n_predict=0)
    assert (reply["content"], reply["tokens_predicted"], reply["stop_type"]) == ("", 0, "limit")


def test_what_the_server_says_of_itself(tiny: Process) -> None:
    props = tiny.http.get("/props").json()
    assert props["total_slots"] == 4 == len(tiny.http.get("/slots").json())
    assert props["default_generation_settings"]["n_ctx"] == 2048 and "<|im_start|>" in props["chat_template"]
    assert tiny.http.get("/health").json() == {"status": "ok"}
    metrics = tiny.http.get("/metrics").text
    value = next(line.split()[1] for line in metrics.splitlines() if line.startswith("llamacpp:tokens_predicted_total"))
    post(tiny, "/completion", prompt="again", n_predict=3, ignore_eos=True)
    after = tiny.stats()["counters"]["generated_tokens"]
    assert after >= float(value) + 3
