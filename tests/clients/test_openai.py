"""The official openai client."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from ninfer.text.grammar import available
from tests.clients.conftest import Process

HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
GREETING = "Hello! I am a very small model. How can I help?"  # greedy, as another implementation has it too
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"]},
    },
}
ASK_WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Jerusalem?"}]
needs_grammar = pytest.mark.skipif(not available(), reason="needs xgrammar")


class Person(BaseModel):
    name: str
    age: int
    kind: Literal["king", "shepherd", "prophet"]


@pytest.fixture
def client(tiny: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)


def test_a_chat_is_the_reference_text_streamed_or_not(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny-qwen35", messages=HELLO, temperature=0)
    assert reply.choices[0].message.content == GREETING and reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    chunks = list(
        client.chat.completions.create(
            model="", messages=HELLO, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(texts) == GREETING and len(texts) > 5, "text comes in pieces"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].usage == reply.usage


def test_several_replies_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        reply = client.chat.completions.create(
            model="", messages=ASK_WEATHER, n=3, seed=5, temperature=1.0, max_tokens=20
        )
        return [c.message.content for c in reply.choices]

    first = ask()
    assert first == ask() and len(set(first)) > 1


def test_logprobs_are_those_of_the_tokens(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="", messages=HELLO, temperature=0, logprobs=True, top_logprobs=3)
    assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.content is not None
    records = reply.choices[0].logprobs.content
    assert "".join(r.token for r in records) == GREETING
    assert all(r.logprob == max(t.logprob for t in r.top_logprobs) for r in records)


def test_reasoning_is_apart_and_a_budget_ends_it(client: openai.OpenAI) -> None:
    def think(**more: Any) -> tuple[Any, int]:
        body = {"enable_thinking": True, **more}
        reply = client.chat.completions.create(model="", messages=HELLO, temperature=0, max_tokens=64, extra_body=body)
        assert reply.usage is not None and reply.usage.completion_tokens_details is not None
        return reply.choices[0].message, reply.usage.completion_tokens_details.reasoning_tokens or 0

    free, num_free = think()
    short, num_short = think(thinking_budget=3)
    assert num_free > 5 and num_short == 5  # three, a line break, the end tag
    assert free.reasoning_content.startswith(short.reasoning_content)
    assert short.content and "think" not in short.content


def test_an_answer_behind_reasoning_can_be_drawn_apart_from_it(client: openai.OpenAI, tiny: Process) -> None:
    """Six drawn tokens of reasoning, and behind them what the model itself finds likeliest there."""

    def post(path: str, **body: Any) -> Any:
        return tiny.http.post(path, json=body).json()

    opened = post("/apply-template", messages=HELLO, enable_thinking=True)["prompt"]
    ids = post("/tokenize", content=opened)["tokens"]
    closing = post("/tokenize", content="\n")["tokens"] + post("/tokenize", content="</think>")["tokens"]
    seen = set()
    for seed in range(3):
        drawn: Any = {"temperature": 1.5, "seed": seed}
        thought = post("/completion", prompt=ids, n_predict=6, return_tokens=True, **drawn)["tokens"]
        likeliest = post("/completion", prompt=ids + thought + closing, temperature=0, n_predict=20)["content"]
        body: Any = {"enable_thinking": True, "thinking_budget": 6, "post_thinking": {"temperature": 0}}
        reply = client.chat.completions.create(
            model="", messages=HELLO, max_tokens=6 + len(closing) + 20, extra_body=body, **drawn
        )
        assert reply.choices[0].message.content == likeliest.lstrip("\n")
        seen.add(tuple(thought))
    assert len(seen) == 3


def test_a_tool_is_called_and_answered(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="", messages=ASK_WEATHER, tools=[WEATHER], temperature=0)
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls" and message.tool_calls is not None
    [call] = message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["city"]
    turns = [*ASK_WEATHER, message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    after = client.chat.completions.create(model="", messages=turns, tools=[WEATHER], temperature=0, max_tokens=30)
    assert after.usage is not None and reply.usage is not None
    assert after.usage.prompt_tokens > reply.usage.prompt_tokens + 20


def test_the_streaming_helper_sees_the_same_call(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="", messages=ASK_WEATHER, tools=[WEATHER], temperature=0)
    with client.chat.completions.stream(model="", messages=ASK_WEATHER, tools=[WEATHER], temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.choices[0].message.tool_calls and whole.choices[0].message.tool_calls
    a, b = final.choices[0].message.tool_calls[0], whole.choices[0].message.tool_calls[0]
    assert a.type == b.type == "function"
    assert (a.function.name, a.function.arguments) == (b.function.name, b.function.arguments)


@needs_grammar
@pytest.mark.parametrize(
    "choice, names",
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
    ],
    ids=["required", "named"],
)
def test_a_call_can_be_forced(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    for seed in range(5):
        reply = client.chat.completions.create(
            model="", messages=HELLO, tools=[WEATHER, TIME], tool_choice=choice, seed=seed, max_tokens=300
        )
        assert reply.choices[0].message.tool_calls, reply
        for call in reply.choices[0].message.tool_calls:
            assert call.type == "function" and call.function.name in names
            arguments = json.loads(call.function.arguments)
            if call.function.name == "get_time":
                assert arguments["zone"] in ("utc", "cet")


@needs_grammar
def test_parse_gives_an_object_of_the_class(client: openai.OpenAI, demo: Process) -> None:
    other = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)
    ask: list[Any] = [{"role": "user", "content": "Give a JSON object with name Moses, age 80 and kind prophet."}]
    for one in (client, other):
        reply = one.chat.completions.parse(model="", messages=ask, response_format=Person, temperature=0)
        assert isinstance(reply.choices[0].message.parsed, Person)
        answer = one.responses.parse(model="", input="Tell of Moses.", text_format=Person, temperature=0)
        assert isinstance(answer.output_parsed, Person)


def test_responses_create_stream_and_follow(client: openai.OpenAI) -> None:
    first = client.responses.create(model="", input="Hello!", temperature=0)
    assert first.output_text == GREETING and first.status == "completed"
    with client.responses.stream(model="", input="Hello!", temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == GREETING
    follow = client.responses.create(model="", input="Who are you?", previous_response_id=final.id, temperature=0)
    assert follow.usage is not None and first.usage is not None
    assert follow.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(follow.id).output_text == follow.output_text
    client.responses.delete(follow.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(follow.id)


def test_responses_call_functions(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"], "strict": False}
    first = client.responses.create(model="", input="What is the weather in Jerusalem?", tools=[tool], temperature=0)
    [call] = [item for item in first.output if item.type == "function_call"]
    assert call.name == "get_weather"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    after = client.responses.create(
        model="", input=[result], previous_response_id=first.id, tools=[tool], temperature=0, max_output_tokens=30
    )
    assert after.status in ("completed", "incomplete")


def test_completions_go_on_with_the_text(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="", prompt="And it came to pass", temperature=0, max_tokens=8, logprobs=2)
    assert reply.choices[0].text.startswith(", when the king of Ai") and reply.choices[0].finish_reason == "length"
    assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.tokens is not None
    assert "".join(reply.choices[0].logprobs.tokens) == reply.choices[0].text


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="", messages=HELLO, temperature=9)
    assert bad.value.param == "temperature" and bad.value.request_id
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="", messages=[{"role": "user", "content": "word " * 3000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as model:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert model.value.code == "model_not_found"
