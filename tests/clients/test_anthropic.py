"""The official anthropic client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import ToolChoiceParam

from ninfer.text.grammar import available
from tests.clients.conftest import Process

HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
GREETING = "Hello! I am a very small model. How can I help?"
WEATHER: Any = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASK_WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Jerusalem?"}]
GREEDY = {"temperature": 0}


@pytest.fixture
def client(tiny: Process) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0)


def test_a_message_is_the_reference_text_streamed_or_not(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="any", max_tokens=50, messages=HELLO, extra_body=GREEDY)
    assert [b.text for b in whole.content if b.type == "text"] == [GREETING]
    assert whole.stop_reason == "end_turn" and whole.model == "any"
    with client.messages.stream(model="any", max_tokens=50, messages=HELLO, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == GREETING and len(pieces) > 5
    assert final.usage.output_tokens == whole.usage.output_tokens and final.stop_reason == "end_turn"


def test_tokens_are_counted_before_they_are_used(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="any", messages=ASK_WEATHER, tools=[WEATHER], system="Be brief.")
    used = client.messages.create(
        model="any", max_tokens=1, messages=ASK_WEATHER, tools=[WEATHER], system="Be brief."
    ).usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_the_split_of_cached_tokens_is_the_same_streamed_or_not(client: anthropic.Anthropic) -> None:
    """message_start already tells what message_delta will."""
    long: list[Any] = [{"role": "user", "content": "Count from 7 to 15. " * 30}]
    for _ in range(2):
        events = list(client.messages.create(model="any", max_tokens=3, messages=long, stream=True))
        start, delta = (next(e for e in events if e.type == t) for t in ("message_start", "message_delta"))
        assert start.type == "message_start" and delta.type == "message_delta"
        assert start.message.usage.input_tokens == delta.usage.input_tokens
        assert start.message.usage.cache_read_input_tokens == delta.usage.cache_read_input_tokens


def test_a_tool_is_used_and_answered(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="any", max_tokens=80, messages=ASK_WEATHER, tools=[WEATHER], extra_body=GREEDY)
    [use] = [b for b in whole.content if b.type == "tool_use"]
    assert whole.stop_reason == "tool_use" and use.name == "get_weather" and list(use.input) == ["city"]
    with client.messages.stream(
        model="any", max_tokens=80, messages=ASK_WEATHER, tools=[WEATHER], extra_body=GREEDY
    ) as stream:
        pieces = [e.partial_json for e in stream if e.type == "input_json"]
        [streamed] = [b for b in stream.get_final_message().content if b.type == "tool_use"]
    assert streamed.input == use.input == json.loads("".join(pieces))
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    turns: list[Any] = [
        *ASK_WEATHER,
        {"role": "assistant", "content": [b.model_dump() for b in whole.content]},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(model="any", max_tokens=20, messages=turns, tools=[WEATHER])
    assert after.usage.input_tokens + (after.usage.cache_read_input_tokens or 0) > whole.usage.input_tokens + 20


@pytest.mark.skipif(not available(), reason="needs xgrammar")
def test_a_tool_can_be_forced(client: anthropic.Anthropic) -> None:
    choices: list[ToolChoiceParam] = [{"type": "any"}, {"type": "tool", "name": "get_weather"}]
    for choice in choices:
        reply = client.messages.create(
            model="any",
            max_tokens=200,
            extra_body=GREEDY,  # a random draw may write a city until no tokens are left
            messages=HELLO,
            tools=[WEATHER],
            tool_choice=choice,
        )
        assert next(b.name for b in reply.content if b.type == "tool_use") == "get_weather"
        assert reply.stop_reason == "tool_use"


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_a_budget_really_ends_thinking(client: anthropic.Anthropic, budget: int) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": budget}
    for seed in range(6):
        reply = client.messages.create(
            model="any", max_tokens=60, messages=HELLO, thinking=thinking, extra_body={"seed": seed}
        )
        details: Any = reply.usage.output_tokens_details
        assert details.thinking_tokens <= budget + 2  # a line break and the end tag
        assert reply.content[-1].type == "text", "an answer follows"
        with client.messages.stream(
            model="any", max_tokens=60, messages=HELLO, thinking=thinking, extra_body={"seed": seed}
        ) as stream:
            streamed = stream.get_final_message()
        assert [b.type for b in streamed.content] == [b.type for b in reply.content]


def test_stop_sequences_end_a_message(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(
        model="any", max_tokens=50, messages=HELLO, stop_sequences=["small"], extra_body=GREEDY
    )
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "small")
    assert [b.text for b in reply.content if b.type == "text"] == ["Hello! I am a very "]


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(model="any", max_tokens=0, messages=HELLO)
    body: Any = bad.value.body
    assert body["error"]["type"] == "invalid_request_error" and bad.value.request_id == body["request_id"]
