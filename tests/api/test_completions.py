"""Legacy completions: prompts as text and tokens, several at once, echo, log-probabilities."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.api.conftest import MODEL, Server


def complete(server: Server, **body: Any) -> Any:
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def prompts(server: Server) -> list[str]:
    return [server.tokenizer.decode(r.prompt_ids) for r in server.client.requests]


def test_the_official_client_completes(server: Server) -> None:
    server.says("Hel", "lo")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    whole = client.completions.create(model=MODEL, prompt="hi")
    assert whole.object == "text_completion"
    assert whole.choices[0].text == "Hello"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.prompt_tokens == 2
    chunks = list(client.completions.create(model=MODEL, prompt="hi", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "Hello"
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, "stop"]


def test_no_template_is_applied_and_control_tokens_are_read(server: Server) -> None:
    complete(server, prompt="a<|end|>")
    assert server.client.requests[0].prompt_ids == (*server.ids("a"), server.tokenizer.token_to_id("<|end|>"))


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ("ab", ["ab"]),
        (["ab"], ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([65, 66], ["bc"]),
        ([[65], [66]], ["b", "c"]),
        ([65, "x", 66], ["bxc"]),
    ],
)
def test_prompts_are_text_tokens_or_several_of_them(server: Server, prompt: Any, seen: list[str]) -> None:
    assert server.tokenizer.decode([65, 66]) == "bc"
    body = complete(server, prompt=prompt, n=2)
    assert sorted(prompts(server)) == sorted(seen * 2)
    assert [c["index"] for c in body["choices"]] == list(range(2 * len(seen)))
    assert body["usage"]["prompt_tokens"] == sum(len(s) for s in seen)


def test_echo_puts_each_prompt_before_its_reply(server: Server) -> None:
    server.says("!")
    body = complete(server, prompt=["a", [65]], echo=True)
    assert [c["text"] for c in body["choices"]] == ["a!", "b!"]
    events = server.events("/v1/completions", prompt="a", echo=True)
    assert "".join(c["text"] for e in events[:-1] for c in e["choices"]) == "a!"
    assert complete(server, prompt="a", echo=True, max_tokens=1)["choices"][0]["text"] == "a!"


def test_log_probabilities_have_the_legacy_shape(server: Server) -> None:
    server.says("hé")
    logprobs = complete(server, prompt="x", logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "\ufffd", "\ufffd"]
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["token_logprobs"] == pytest.approx([-i / 1000 for i in server.ids("hé")])
    assert len(logprobs["top_logprobs"][0]) == 2
    assert complete(server, prompt="x", logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] == [{}, {}, {}]
    assert complete(server, prompt="x")["choices"][0]["logprobs"] is None


def test_usage_comes_last_when_it_is_wanted(server: Server) -> None:
    server.says("a")
    events = server.events("/v1/completions", prompt="xyz", stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["prompt_tokens"] == 3
    assert all(e["usage"] is None for e in events[:-2])


def test_think_tags_of_plain_completions_are_text(server: Server) -> None:
    server.says("<think>", "a</think>b")
    assert complete(server, prompt="x")["choices"][0]["text"] == "<think>a</think>b"
