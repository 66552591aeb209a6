"""The Messages API through the official client: blocks, event order, tools, thinking, errors."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

from ninfer.errors import EngineUnavailable, Overloaded, QueueTimeout
from tests.api.conftest import FakeClient, Server, Start
from tests.api.test_tools_and_formats import CALL, TEMPLATE, needs_grammar

anthropic = pytest.importorskip("anthropic")

TOOLS: Any = [
    {
        "name": "weather",
        "description": "the weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    }
]
USER: Any = [{"role": "user", "content": "hi"}]
RESULT: Any = {"type": "tool_result", "tool_use_id": "a", "content": "sun"}


@pytest.fixture
def server(start: Start) -> Server:
    return start(FakeClient(context_len=4096), template=TEMPLATE)


@pytest.fixture
def client(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def post(server: Server, **body: Any) -> httpx.Response:
    return server.http.post("/v1/messages", json={"messages": USER, "max_tokens": 400, **body})


def events(server: Server, **body: Any) -> list[Any]:
    frames = post(server, stream=True, **body).text.split("\n\n")[:-1]
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    return found


def prompt(server: Server) -> str:
    return server.tokenizer.decode(server.client.requests[-1].prompt_ids)


def test_a_plain_message(server: Server, client: Any) -> None:
    server.says("Hello")
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=123"},
        {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}},
    ]
    message = client.messages.create(model="claude", max_tokens=50, messages=USER, system=system)
    assert message.content[0].text == "Hello" and message.stop_reason == "end_turn" and message.model == "claude"
    assert message.usage.cache_read_input_tokens == 1
    assert message.usage.input_tokens == len(server.client.requests[0].prompt_ids) - 1
    assert message._request_id.startswith("req_")
    assert prompt(server).startswith("<|turn|>system\nbe kind<|end|>")


def test_the_events_of_thinking_text_and_a_tool_come_in_order(server: Server) -> None:
    server.says("hm", "\n</think>", "So", ":\n", *CALL)
    found = events(server, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
    kinds = [e["type"] + ":" + e.get("delta", e.get("content_block", {})).get("type", "") for e in found]
    runs = [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k]
    assert runs == [
        "message_start:",
        *("content_block_start:thinking", "content_block_delta:thinking_delta", "content_block_delta:signature_delta"),
        *("content_block_stop:", "content_block_start:text", "content_block_delta:text_delta", "content_block_stop:"),
        *("content_block_start:tool_use", "content_block_delta:input_json_delta", "content_block_stop:"),
        *("message_delta:", "message_stop:"),
    ]
    assert [e["index"] for e in found if e["type"] == "content_block_start"] == [0, 1, 2]
    arguments = "".join(e["delta"]["partial_json"] for e in found if e.get("delta", {}).get("partial_json"))
    assert json.loads(arguments) == {"city": "Köln", "days": 3}
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] > 10


def test_the_official_stream_helper_builds_the_same_message(server: Server, client: Any) -> None:
    server.says("hm\n</think>", "So:\n", *CALL)
    fields: Any = {"model": "m", "max_tokens": 200, "messages": USER, "tools": TOOLS}
    fields["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    assert [b.type for b in whole.content] == ["thinking", "text", "tool_use"]
    assert [b.type for b in streamed.content] == ["thinking", "text", "tool_use"]
    assert whole.content[0].thinking == streamed.content[0].thinking == "hm"
    assert whole.content[2].input == streamed.content[2].input == {"city": "Köln", "days": 3}
    assert whole.content[2].id.startswith("toolu_")
    assert (whole.stop_reason, streamed.stop_reason) == ("tool_use", "tool_use")


def test_a_history_of_blocks_becomes_turns(server: Server) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "why", "signature": "s"},
                {"type": "text", "text": "calling"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "snow"}]},
                {"type": "tool_result", "tool_use_id": "t1", "content": "sun", "is_error": False},
            ],
        },
    ]
    assert post(server, messages=messages, tools=TOOLS).status_code == 200
    text = prompt(server)
    assert "user\none two<|end|>" in text and "assistant\ncalling<tool_call>" in text
    assert text.index("Rome") < text.index("Oslo") < text.index("sun") < text.index("snow") < text.index("user\nand")


@pytest.mark.parametrize(
    ("following", "path"),
    [
        ([], "messages[1].content[0]"),
        ([{"role": "user", "content": "well?"}], "messages[1].content[0]"),
        ([{"role": "system", "content": "be kind"}, {"role": "user", "content": [RESULT]}], "messages[1].content[0]"),
        ([{"role": "user", "content": [{**RESULT, "tool_use_id": "b"}]}], "messages[2].content[0].tool_use_id"),
        ([{"role": "user", "content": [RESULT, RESULT]}], "messages[2].content[1].tool_use_id"),
    ],
)
def test_every_call_has_one_result_in_the_turn_after_it(
    server: Server, following: list[dict[str, Any]], path: str
) -> None:
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [call]}]
    refused = post(server, messages=[*history, *following])
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(f"{path}: ")
    answered = [*history, {"role": "user", "content": [RESULT]}]
    assert post(server, messages=answered).status_code == 200
    only = [{"role": "user", "content": [RESULT]}]
    assert post(server, messages=only).status_code == 200


def test_hidden_thinking_travels_in_its_signature(server: Server) -> None:
    server.says("secret</think>", "Hi")
    thinking = {"type": "adaptive", "display": "omitted"}
    block = post(server, thinking=thinking).json()["content"][0]
    assert block["thinking"] == "" and base64.b64decode(block["signature"].split(":")[1]) == b"secret"
    streamed = [e["delta"] for e in events(server, thinking=thinking) if e["type"] == "content_block_delta"]
    assert streamed[0] == {"type": "signature_delta", "signature": block["signature"]}
    messages = [*USER, {"role": "assistant", "content": [block, {"type": "text", "text": "Hi"}]}, *USER]
    assert post(server, messages=messages).status_code == 200


def test_stop_sequences_and_limits(server: Server) -> None:
    server.says("one STOP two")
    reply = post(server, stop_sequences=["STOP"]).json()
    assert (reply["content"][0]["text"], reply["stop_reason"], reply["stop_sequence"]) == (
        "one ", "stop_sequence", "STOP",
    )  # fmt: skip
    assert post(server, max_tokens=3).json()["stop_reason"] == "max_tokens"


def test_a_last_assistant_message_is_gone_on_with(server: Server) -> None:
    server.says(" world")
    messages = [*USER, {"role": "assistant", "content": "Hello"}]
    assert post(server, messages=messages).json()["content"][0]["text"] == " world"
    assert prompt(server).endswith("<|turn|>assistant\nHello")


@needs_grammar
def test_any_and_formats_are_enforced(server: Server) -> None:
    server.says(CALL)
    assert post(server, tools=TOOLS, tool_choice={"type": "any"}).json()["stop_reason"] == "tool_use"
    format = {"type": "json_schema", "schema": {"type": "object"}}
    server.says("{}")
    assert post(server, output_config={"format": format}).json()["content"][0]["text"] == "{}"
    assert all(r.mask is not None for r in server.client.requests)


def test_tokens_are_counted_as_they_would_be_sent(server: Server, client: Any) -> None:
    count = client.messages.count_tokens(model="m", messages=USER, tools=TOOLS, system="s").input_tokens
    client.messages.create(model="m", max_tokens=5, messages=USER, tools=TOOLS, system="s")
    assert count == len(server.client.requests[0].prompt_ids)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        ({"temperature": 1.5}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ],
)
def test_what_is_wrong_is_named_in_anthropics_shape(server: Server, fields: dict[str, Any], path: str) -> None:
    response = post(server, **fields)
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["error"]["message"].startswith(path)
    assert body["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (Overloaded("full", retry_after_s=3), 529, "overloaded_error"),
        (QueueTimeout("late"), 504, "timeout_error"),
        (EngineUnavailable("stopping"), 503, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_anthropics_codes(start: Start, refusal: Any, status: int, kind: str, stream: bool) -> None:
    response = post(start(FakeClient(refusal=refusal)), stream=stream)
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert response.headers["retry-after"]


def test_a_failure_under_way_is_an_error_event(server: Server, client: Any) -> None:
    server.client.script = lambda request: [server.ids("half")]
    server.client.failure = EngineUnavailable("the server is stopping")
    last = events(server)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    with (
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(model="m", max_tokens=9, messages=USER) as stream,
    ):
        stream.get_final_message()


def test_silence_is_filled_with_pings(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ninfer.api.app.PING_S", 0.05)
    server = start(FakeClient(before_s=0.4))
    text = post(server, stream=True).text
    assert text.count('event: ping\ndata: {"type": "ping"}\n\n') >= 2 and text.rstrip().endswith("}")
    assert text.index("event: ping") < text.index("event: message_start")  # which tells what was cached
