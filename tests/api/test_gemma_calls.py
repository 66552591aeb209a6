"""Tool calls and reasoning of a model that spells them as Gemma 4 does, on every dialect that has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ninfer.text.grammar import available
from tests.api.conftest import FakeClient, Server, Start

TEMPLATE = (
    "{% if enable_thinking | default(false) %}<|think|>{% endif %}"
    "{% for t in tools or [] %}<|tool>declaration:{{ t.function.name }}<tool|>{% endfor %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name ~ '{' }}"
    '{% for k, v in c.function.arguments | items %}{{ k }}:<|"|>{{ v }}<|"|>{% endfor %}'
    "}<tool_call|>{% endfor %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>model\n"
    "{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALLS = '<|tool_call>call:weather{city:<|"|>Köln "x"<|"|>}<tool_call|><|tool_call>call:ping{}<tool_call|>'
ARGUMENTS = [("weather", {"city": 'Köln "x"'}), ("ping", {})]
FUNCTIONS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "ping"}},
]
USER: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server(start: Start) -> Server:
    return start(FakeClient(context_len=4096), template=TEMPLATE)


def test_chat_streams_the_calls_it_tells_whole(server: Server) -> None:
    server.says("So.\n", *CALLS)
    choice = server.chat(tools=FUNCTIONS).json()["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "So.")
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == ARGUMENTS
    assert len({c["id"] for c in calls}) == 2

    deltas = [
        e["choices"][0]["delta"] for e in server.events("/v1/chat/completions", messages=USER, tools=FUNCTIONS)[:-1]
    ]
    told = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert [t["function"]["name"] for t in told if "id" in t] == ["weather", "ping"]
    for i, call in enumerate(calls):
        pieces = [t["function"]["arguments"] for t in told if t["index"] == i]
        assert "".join(pieces) == call["function"]["arguments"]
    assert len(told) > 12, "arguments stream"
    assert "".join(d.get("content", "") for d in deltas) == "So."


def test_messages_and_responses_tell_the_same_calls(server: Server) -> None:
    server.says(*CALLS)
    tools = [{"name": "weather", "input_schema": SCHEMA}, {"name": "ping", "input_schema": {"type": "object"}}]
    body = {"messages": USER, "max_tokens": 500, "tools": tools}
    told = server.http.post("/v1/messages", json=body).json()
    assert told["stop_reason"] == "tool_use"
    assert [(b["name"], b["input"]) for b in told["content"]] == ARGUMENTS
    flat = [{"type": "function", **t["function"]} for t in FUNCTIONS]
    told = server.http.post("/v1/responses", json={"input": "hi", "tools": flat}).json()
    assert [(i["name"], json.loads(i["arguments"])) for i in told["output"]] == ARGUMENTS


@pytest.mark.skipif(not available(), reason="needs xgrammar")
def test_calls_can_be_required_or_named(server: Server) -> None:
    server.says(*CALLS)
    for choice, good, bad in (
        ("required", CALLS, "So"),
        ({"type": "function", "function": {"name": "ping"}}, "<|tool_call>call:ping{}", "<|tool_call>call:w"),
    ):
        server.client.requests.clear()
        assert server.chat(tools=FUNCTIONS, tool_choice=choice).status_code == 200
        mask = server.client.requests[0].mask
        assert mask is not None
        accepted = [mask.accept(id) for id in server.ids(bad)]
        assert not all(accepted)
        mask.rollback(sum(accepted))
        assert all(mask.accept(id) for id in server.ids(good))
