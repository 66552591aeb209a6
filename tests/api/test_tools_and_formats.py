"""Tool calls, thinking and formats on chat completions, through the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ninfer.text.grammar import available
from tests.api.conftest import FakeClient, Server, Start

TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t | tojson }}</tool>{% endfor %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "ping"}},
]
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"  # noqa: E501
USER: Any = [{"role": "user", "content": "hi"}]
needs_grammar = pytest.mark.skipif(not available(), reason="needs xgrammar")


@pytest.fixture
def server(start: Start) -> Server:
    return start(FakeClient(context_len=4096), template=TEMPLATE)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_calls_are_the_same_whole_and_streamed(server: Server, client: openai.OpenAI) -> None:
    server.says("Let me", " see.\n\n", *CALL)
    whole = client.chat.completions.create(model="", messages=USER, tools=TOOLS)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me see."
    [call] = message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Köln", "days": 3}

    with client.chat.completions.stream(model="", messages=USER, tools=TOOLS) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    [streamed] = final.choices[0].message.tool_calls or []
    assert final.choices[0].finish_reason == "tool_calls" and final.choices[0].message.content == "Let me see."
    assert streamed.function.arguments == call.function.arguments and streamed.id.startswith("call_")


def test_only_the_first_fragment_of_a_call_has_id_type_and_name(server: Server) -> None:
    server.says(*CALL)
    deltas = [e["choices"][0]["delta"] for e in server.events("/v1/chat/completions", messages=USER, tools=TOOLS)[:-1]]
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert set(calls[0]) == {"index", "id", "type", "function"} and calls[0]["function"]["arguments"] == ""
    assert all(set(c) == {"index", "function"} and set(c["function"]) == {"arguments"} for c in calls[1:])
    assert len(calls) > 5, "arguments stream"
    assert not any("<" in d.get("content", "") for d in deltas)


def test_without_tools_markup_is_text(server: Server) -> None:
    server.says(CALL)
    reply = server.chat().json()["choices"][0]
    assert reply["message"]["content"] == CALL and reply["finish_reason"] == "stop"
    assert "tool_calls" not in reply["message"]


def test_reasoning_and_calls_come_apart(server: Server) -> None:
    server.says("I <tool_call> think", "\n</think>", "\n\nSo: ", CALL)
    message = server.chat(tools=TOOLS, enable_thinking=True).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "I <tool_call> think"
    assert message["content"] == "So:" and len(message["tool_calls"]) == 1


def test_a_call_cut_by_the_limit_is_no_finished_call(server: Server) -> None:
    server.says(*CALL)
    choice = server.chat(tools=TOOLS, max_tokens=60).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city": "K')


def test_history_shows_calls_and_their_results_in_the_order_of_the_calls(server: Server) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "ping", "arguments": ""}}
    other = {"id": "b", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "b", "content": "sun"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "pong"}]},
    ]
    assert server.http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS}).status_code == 200
    prompt = server.tokenizer.decode(server.client.requests[0].prompt_ids)
    assert "<function=weather>\n<parameter=city>\nRome" in prompt
    assert prompt.index("pong") < prompt.index("sun")
    assert prompt.startswith('<tool>{"type": "function", "function": {"name": "weather"')


def test_tool_choice_none_shows_no_tools(server: Server) -> None:
    server.says(CALL)
    message = server.chat(tools=TOOLS, tool_choice="none").json()["choices"][0]["message"]
    assert message["content"] == CALL
    assert "<tool>" not in server.tokenizer.decode(server.client.requests[0].prompt_ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_what_is_wrong_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    response = server.chat(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_template_without_tools_says_so(start: Start) -> None:
    response = start().chat(tools=TOOLS)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "tools_not_supported")


@needs_grammar
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_call_is_enforced(server: Server, choice: Any) -> None:
    server.says(CALL)
    assert server.chat(tools=TOOLS, tool_choice=choice).json()["choices"][0]["finish_reason"] == "tool_calls"
    mask = server.client.requests[0].mask
    assert mask is not None
    assert all(mask.accept(id) for id in server.ids(CALL)) and not mask.accept(server.ids("x")[0])


@needs_grammar
def test_a_format_is_enforced_told_and_turns_thinking_off(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    given = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    server.says('{"a": 1}')
    assert server.chat(response_format=given).json()["choices"][0]["message"]["content"] == '{"a": 1}'
    request = server.client.requests[0]
    assert request.mask is not None and request.mask.accept(server.ids("{")[0])
    assert not request.mask.accept(server.ids("}")[0])
    assert '"required": ["a"]' in server.tokenizer.decode(request.prompt_ids)


@needs_grammar
def test_with_thinking_the_format_begins_after_it(server: Server) -> None:
    server.says("hm\n</think>\n\n", "{}")
    reply = server.chat(response_format={"type": "json_object"}, enable_thinking=True).json()["choices"][0]["message"]
    assert (reply["reasoning_content"], reply["content"]) == ("hm", "{}")
    mask = server.client.requests[0].mask
    assert mask is not None and all(mask.accept(id) for id in server.ids("anything</think>\n\n{}"))


@needs_grammar
@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"json_schema": {"type": "array"}}, "[1]", "{"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes", "maybe"),
        ({"regex": "[0-9]+"}, "42", "x"),
    ],
)
def test_llama_cpps_formats(server: Server, fields: dict[str, Any], good: str, bad: str) -> None:
    server.says(good)
    assert server.http.post("/completion", json={"prompt": "p", **fields}).json()["content"] == good
    mask = server.client.requests[0].mask
    assert mask is not None and not mask.accept(server.ids(bad)[0])
    assert all(mask.accept(id) for id in server.ids(good))


@needs_grammar
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"json_schema": {"not": {}}}, "json_schema.not"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"regex": "("}, "regex"),
        ({"regex": "a", "grammar": 'root ::= "a"'}, "regex"),
    ],
)
def test_formats_that_cannot_be_kept_to_are_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    response = server.http.post("/completion", json={"prompt": "p", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
