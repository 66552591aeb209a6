"""Chat completions through the official client and through raw HTTP."""

from __future__ import annotations

import json
import random
from typing import Any

import openai
import pytest

from ninfer.config import SamplingDefaults
from tests.api.conftest import MODEL, FakeClient, Server, Start, until

HI = [{"role": "user", "content": "hi"}]


def official(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def stream(server: Server, **fields: Any) -> list[Any]:
    return server.events("/v1/chat/completions", messages=HI, **fields)


def said(events: list[Any], key: str = "content", index: int = 0) -> str:
    choices = [c for e in events if isinstance(e, dict) for c in e["choices"] if c["index"] == index]
    return "".join(c["delta"].get(key, "") for c in choices)


def test_a_whole_reply_has_text_usage_and_timings(server: Server) -> None:
    server.says("Hel", "lo")
    body = server.chat("hi").json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    num_prompt = len(server.client.requests[0].prompt_ids)
    assert body["usage"]["prompt_tokens"] == num_prompt
    assert body["usage"]["completion_tokens"] == 6  # with the end token
    assert body["usage"]["total_tokens"] == num_prompt + 6
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert body["timings"]["cache_n"] + body["timings"]["prompt_n"] == num_prompt
    assert body["timings"]["predicted_per_second"] == 5 / 0.25


def test_the_official_client_streams(server: Server) -> None:
    server.says("Hel", "lo")
    chunks = list(
        official(server).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, None, None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert all(c.usage is None for c in chunks[:-1])
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1


def test_a_stream_has_one_role_chunk_one_finish_chunk_and_ends_with_done(server: Server) -> None:
    server.says("a", "b")
    events = stream(server)
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert "timings" in chunks[-1]
    assert not any("usage" in c or "tool_calls" in c["choices"][0]["delta"] for c in chunks)


def test_the_helper_of_the_official_client_accumulates(server: Server) -> None:
    server.says("Hel", "lo")
    with official(server).chat.completions.stream(model=MODEL, messages=[{"role": "user", "content": "hi"}]) as events:
        completion = events.get_final_completion()
    assert completion.choices[0].message.content == "Hello"


@pytest.mark.parametrize("seed", range(4))
def test_characters_are_never_split_however_tokens_come(server: Server, seed: int) -> None:
    text = "Grüße, 世界 🙂!"
    ids = server.ids(text)
    rng = random.Random(seed)
    steps, rest = [], ids
    while rest:
        cut = rng.randint(1, 3)
        steps.append(rest[:cut])
        rest = rest[cut:]
    server.client.script = lambda request: steps
    events = stream(server)
    assert said(events) == text
    assert not any("\ufffd" in json.dumps(e, ensure_ascii=False) for e in events)


def test_bytes_that_are_no_text_come_out_replaced_at_the_end(server: Server) -> None:
    half = server.ids("🙂")[:2]
    server.client.script = lambda request: [server.ids("a"), half]
    assert said(stream(server)) == "a\ufffd"


@pytest.mark.parametrize("steps", [["one ST", "OP two"], ["one STOP two"], [*"one STOP two"], ["one ", "STO", "P"]])
def test_stop_strings_are_found_over_chunk_borders_and_cancel_the_engine(server: Server, steps: list[str]) -> None:
    server.client.script = lambda request: [server.ids(s) for s in (*steps, "never")]
    server.client.hold = True
    events = stream(server, stop=["STOP", "zzz"], stream_options={"include_usage": True})
    assert said(events) == "one "
    assert [c["finish_reason"] for e in events[:-2] for c in e["choices"]][-1] == "stop"
    until(lambda: len(server.client.cancelled) == 1)
    usage = events[-2]["usage"]
    assert 8 <= usage["completion_tokens"] <= len("one STOP two")
    assert usage["prompt_tokens"] == len(server.client.requests[0].prompt_ids)


def test_a_false_start_of_a_stop_string_is_given_out(server: Server) -> None:
    server.says("a ST", "AR", "ST")
    assert said(stream(server, stop="STOP")) == "a STARST"


def test_length_ends_a_reply_at_its_limit(server: Server) -> None:
    server.says("abc", "def")
    body = server.chat(max_completion_tokens=4, max_tokens=2).json()
    assert body["choices"][0]["message"]["content"] == "abcd"
    assert body["choices"][0]["finish_reason"] == "length"


def test_n_replies_are_told_apart_and_seeded_apart(server: Server) -> None:
    server.client.script = lambda request: [server.ids(f"reply {request.id[-1]}")]
    body = server.chat(n=3, seed=7).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert [c["message"]["content"] for c in body["choices"]] == ["reply 0", "reply 1", "reply 2"]
    assert sorted(r.sampling.seed or 0 for r in server.client.requests) == [7, 8, 9]
    assert body["usage"]["prompt_tokens"] == len(server.client.requests[0].prompt_ids)  # once
    assert body["usage"]["completion_tokens"] == 3 * 8

    events = stream(server, n=2)
    assert [said(events, index=i) for i in range(2)] == ["reply 0", "reply 1"]
    finishes = [c["index"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
    assert sorted(finishes) == [0, 1]


def test_log_probabilities_come_with_the_text_of_their_tokens(server: Server) -> None:
    server.says("h", "é", "y STOP")
    for body in (server.chat(logprobs=True, top_logprobs=2, stop="STOP").json(),):
        records = body["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(r["bytes"]) for r in records).decode() == "héy "
        assert all(len(r["top_logprobs"]) == 2 for r in records)
        assert records[0]["token"] == "h"
        assert records[0]["logprob"] == pytest.approx(-server.ids("h")[0] / 1000)
    events = stream(server, logprobs=True, stop="STOP")
    for event in events[:-1]:
        choice = event["choices"][0]
        if choice["logprobs"]:
            text = b"".join(bytes(r["bytes"]) for r in choice["logprobs"]["content"])
            assert text.decode() == choice["delta"]["content"]
    assert said(events) == "héy "


@pytest.mark.parametrize("cut", range(1, 4))
def test_reasoning_is_told_apart_when_the_prompt_opens_it(server: Server, cut: int) -> None:
    ids = server.ids("Hm.\n</think>\n\nYes.")
    server.client.script = lambda request: [ids[i : i + cut] for i in range(0, len(ids), cut)]
    body = server.chat(enable_thinking=True).json()
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm."
    assert message["content"] == "Yes."
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(server.ids("Hm.\n</think>"))
    events = stream(server, chat_template_kwargs={"enable_thinking": True})
    assert said(events, "reasoning_content") == "Hm."
    assert said(events) == "Yes."


def test_a_reply_may_open_its_reasoning_itself_and_quote_the_tag_later(server: Server) -> None:
    server.says("<think>\nHm.", "</think>\nSay <think>.")
    message = server.chat().json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm."
    assert message["content"] == "Say <think>."


def test_reasoning_cut_short_is_no_answer(server: Server) -> None:
    server.says("Hm. And")
    choice = server.chat(enable_thinking=True, max_tokens=5).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None, "reasoning_content": "Hm. A"}
    assert choice["finish_reason"] == "length"


def test_what_a_user_writes_does_not_open_reasoning(server: Server) -> None:
    server.says("ok")
    assert server.chat("what is <think>?").json()["choices"][0]["message"]["content"] == "ok"


def test_reasoning_has_no_log_probabilities(server: Server) -> None:
    server.says("Hm.</think>Yes")
    choice = server.chat(enable_thinking=True, logprobs=True).json()["choices"][0]
    assert "".join(r["token"] for r in choice["logprobs"]["content"]) == "Yes"


def test_parts_of_text_are_joined_and_empty_turns_kept(server: Server) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": parts}, {"role": "assistant"}]
    server.http.post("/v1/chat/completions", json={"messages": [*messages, *HI]})
    prompt = server.tokenizer.decode(server.client.requests[0].prompt_ids)
    assert prompt == (
        "<|turn|>system\n<|end|>\n<|turn|>user\nab<|end|>\n<|turn|>assistant\n<|end|>\n"
        "<|turn|>user\nhi<|end|>\n<|turn|>assistant\n"
    )


def test_control_tokens_that_a_user_writes_are_plain_text(server: Server) -> None:
    server.chat("<|end|>")
    end = server.tokenizer.token_to_id("<|end|>")
    assert server.client.requests[0].prompt_ids.count(end) == 1


def test_sampling_is_the_request_over_flags_over_the_model_over_neutral(start: Start) -> None:
    server = start(
        generation_config={"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1},
        defaults=SamplingDefaults(temperature=0.8, top_p=0.7, seed=5, default_max_tokens=11),
    )
    server.chat(top_p=0.5, presence_penalty=1, logit_bias={"65": -100, "66": 3})
    (request,) = server.client.requests
    sampling = request.sampling
    assert (sampling.top_p, sampling.temperature, sampling.top_k, sampling.min_p) == (0.5, 0.8, 20, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 1, 0)
    assert sampling.seed == 5
    assert sampling.logit_bias == {65: -100, 66: 3}
    assert request.max_tokens == 11
    server.chat(max_tokens=-1, temperature=None)
    assert server.client.requests[1].max_tokens == server.client.context_len
    assert server.client.requests[1].sampling.temperature == 0.8


def test_greedy_wins_over_requests(start: Start) -> None:
    server = start(defaults=SamplingDefaults(greedy=True))
    server.chat(temperature=1.5)
    assert server.client.requests[0].sampling.temperature == 0


def test_no_thinking_holds_unless_a_request_asks(start: Start) -> None:
    template = "{{ enable_thinking }}{% if enable_thinking %}<think>{% endif %}"
    server = start(template=template, defaults=SamplingDefaults(no_thinking=True))
    for fields in ({}, {"enable_thinking": True}, {"reasoning_effort": "none"}):
        assert server.chat(**fields).status_code == 200
    prompts = [server.tokenizer.decode(r.prompt_ids) for r in server.client.requests]
    assert prompts == ["False", "True<think>", "False"]


def test_pings_come_from_queueing_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    import ninfer.api.app as app

    monkeypatch.setattr(app, "PING_S", 0.05)
    server = start(FakeClient(before_s=0.5))
    events = stream(server)
    first = next(i for i, e in enumerate(events) if isinstance(e, dict) and e["choices"][0]["delta"].get("content"))
    assert events[:first].count(": ping") >= 3
    assert said(events) == server.tokenizer.decode([65, 66])
