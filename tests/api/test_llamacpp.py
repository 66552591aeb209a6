"""llama.cpp's routes."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from ninfer.config import SamplingDefaults
from tests.api.conftest import MODEL, Server, Start


def post(server: Server, path: str, **body: Any) -> Any:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_completion_says_everything(server: Server, path: str) -> None:
    server.says("a\n", "b")
    body = post(server, path, prompt="hi", n_predict=9, return_tokens=True)
    assert body["content"] == "a\nb"
    assert body["tokens"] == server.ids("a\nb")
    assert body["stop"] is True
    assert (body["stop_type"], body["stopping_word"]) == ("eos", "")
    assert (body["tokens_predicted"], body["tokens_evaluated"], body["tokens_cached"]) == (4, 2, 1)
    assert body["prompt"] == "hi"
    assert body["has_new_line"] is True
    assert body["truncated"] is False
    assert body["generation_settings"]["n_predict"] == 9
    assert body["timings"]["predicted_n"] == 4


def test_endings_are_told_apart(server: Server) -> None:
    server.says("a STOP b")
    word = post(server, "/completion", prompt="x", stop=["STOP"])
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("a ", "word", "STOP")
    assert post(server, "/completion", prompt="x", n_predict=2)["stop_type"] == "limit"


def test_a_stream_ends_with_the_whole_object_and_without_done(server: Server) -> None:
    server.says("a", "b")
    events = server.events("/completion", prompt="x", return_tokens=True)
    assert [e["content"] for e in events] == ["a", "b", ""]
    assert [e["stop"] for e in events] == [False, False, True]
    assert [e["tokens_predicted"] for e in events] == [1, 2, 3]
    assert events[-1]["tokens"] == server.ids("ab")


def test_probabilities_and_chosen_fields(server: Server) -> None:
    server.says("a")
    body = post(server, "/completion", prompt="x", n_probs=2)
    (record,) = body["completion_probabilities"]
    assert record["id"] == server.ids("a")[0]
    assert record["bytes"] == [97]
    assert len(record["top_logprobs"]) == 2
    chosen = post(server, "/completion", prompt="x", response_fields=["content", "timings/predicted_n", "nothing"])
    assert chosen == {"content": "a", "timings/predicted_n": 2}


def test_its_spellings_of_sampling(server: Server) -> None:
    post(server, "/completion", prompt="x", temperature=-1, seed=-1, repeat_penalty=1.2, top_k=-1, n_predict=-1)
    post(server, "/completion", prompt="x", logit_bias=[[65, 2], [66, False]])
    first, second = server.client.requests
    sampling = first.sampling
    assert (sampling.temperature, sampling.seed, sampling.repetition_penalty, sampling.top_k) == (0, None, 1.2, 0)
    assert first.max_tokens == server.client.context_len
    assert second.sampling.logit_bias[65] == 2
    assert second.sampling.logit_bias[66] <= -1000


def test_tokenize_and_detokenize(server: Server) -> None:
    text = "é<|end|>"
    ids = server.ids(text)
    assert post(server, "/tokenize", content=text) == {"tokens": ids}
    plain = post(server, "/tokenize", content=text, parse_special=False)["tokens"]
    assert len(plain) == len(text.encode())
    pieces = post(server, "/tokenize", content=text, with_pieces=True)["tokens"]
    assert [p["piece"] for p in pieces] == [[0xC3], [0xA9], "<|end|>"]
    assert [p["id"] for p in pieces] == ids
    assert post(server, "/detokenize", tokens=ids) == {"content": text}


def test_apply_template_gives_the_prompt_of_a_chat(server: Server) -> None:
    prompt = post(server, "/apply-template", messages=[{"role": "user", "content": "hi"}], enable_thinking=True)
    assert prompt == {"prompt": "<|turn|>user\nhi<|end|>\n<|turn|>assistant\n<think>\n"}
    assert server.client.requests == []


def test_props_tell_the_defaults(start: Start) -> None:
    server = start(generation_config={"top_k": 20}, defaults=SamplingDefaults(temperature=0.5))
    props = server.http.get("/props").json()
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == server.client.context_len
    assert (settings["params"]["temperature"], settings["params"]["top_k"]) == (0.5, 20)
    assert props["model_alias"] == MODEL
    assert props["total_slots"] == server.client.stats().max_concurrency


def test_slots_are_the_engines(server: Server) -> None:
    server.client.stats_now = attrs.evolve(server.client.stats_now, slots=({"id": 0, "is_processing": True},))
    response = server.http.get("/slots")
    assert response.json() == [{"id": 0, "is_processing": True}]
    assert response.headers["cache-control"] == "no-store"
