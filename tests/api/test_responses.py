"""The Responses API through the official client: items, event order, stored histories."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ninfer.api.responses_store import ResponseStore
from ninfer.errors import EngineUnavailable
from tests.api.conftest import FakeClient, Server, Start
from tests.api.test_tools_and_formats import CALL, TEMPLATE, needs_grammar

TOOLS: Any = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        "strict": False,
    }
]


@pytest.fixture
def server(start: Start) -> Server:
    return start(FakeClient(context_len=4096), template=TEMPLATE)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def events(server: Server, **body: Any) -> list[Any]:
    """Data of the events; every one is named by its type."""
    with server.http.stream("POST", "/v1/responses", json={**body, "stream": True}) as response:
        frames = response.read().decode().split("\n\n")[:-1]
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    return found


def prompt(server: Server, at: int = -1) -> str:
    return server.tokenizer.decode(server.client.requests[at].prompt_ids)


def test_a_plain_response(server: Server, client: openai.OpenAI) -> None:
    server.says("Hello", " there")
    response = client.responses.create(model="toy/model-1", input="hi", instructions="be kind", temperature=0.5)
    assert response.output_text == "Hello there" and response.status == "completed"
    assert response.output[0].type == "message" and response.usage is not None
    assert response.usage.output_tokens == 12 and response.usage.input_tokens_details.cached_tokens == 1
    assert (response.instructions, response.temperature) == ("be kind", 0.5)
    assert prompt(server).startswith("<|turn|>system\nbe kind<|end|>\n<|turn|>user\nhi<|end|>")


def test_the_events_of_reasoning_text_and_a_call_come_in_order(server: Server) -> None:
    server.says("hm", "\n</think>", "So", ":\n", *CALL)
    found = events(server, model="", input="hi", tools=TOOLS, reasoning={"effort": "low"})
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    kinds = [e["type"].removeprefix("response.") for e in found]
    runs = [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k]
    assert runs == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    output = found[-1]["response"]["output"]
    assert [o["type"] for o in output] == ["reasoning", "message", "function_call"]
    assert output[0]["content"][0]["text"] == "hm" and output[1]["content"][0]["text"] == "So:"
    assert json.loads(output[2]["arguments"]) == {"city": "Köln", "days": 3}
    for index, kind in enumerate(["reasoning_text", "output_text", "function_call_arguments"]):
        deltas = [e for e in found if e["type"] == f"response.{kind}.delta"]
        assert {e["output_index"] for e in deltas} == {index} and {e["item_id"] for e in deltas} == {
            output[index]["id"]
        }
        whole = output[index]["arguments"] if index == 2 else output[index]["content"][0]["text"]
        assert "".join(e["delta"] for e in deltas) == whole


def test_the_official_stream_helper_reads_it(server: Server, client: openai.OpenAI) -> None:
    server.says("Hel", "lo")
    with client.responses.stream(model="", input="hi") as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "Hello"
    assert "".join(deltas) == "Hello"


def test_a_history_goes_on_from_its_id_with_calls_and_outputs(server: Server, client: openai.OpenAI) -> None:
    server.says(CALL)
    with client.responses.stream(model="", input="weather?", tools=TOOLS, instructions="short") as stream:
        first = stream.until_done().get_final_response()
    call = first.output[0]
    assert call.type == "function_call"
    server.says("Sun.")
    outputs: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    second = client.responses.create(model="", input=outputs, previous_response_id=first.id, tools=TOOLS)
    assert second.output_text == "Sun." and second.previous_response_id == first.id
    text = prompt(server)
    assert "user\nweather?" in text and "<parameter=city>\nKöln\n" in text and "tool\nsun<|end|>" in text
    assert "short" not in text, "instructions are not inherited"
    client.responses.create(model="", input="and then?", previous_response_id=second.id)
    assert "assistant\nSun.<|end|>" in prompt(server)


def test_stored_responses_are_resources(server: Server, client: openai.OpenAI) -> None:
    made = client.responses.create(model="", input="hi", metadata={"k": "v"})
    assert client.responses.retrieve(made.id).output_text == made.output_text
    items = client.responses.input_items.list(made.id).data
    assert len(items) == 1 and items[0].type == "message"
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    unkept = client.responses.create(model="", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="", input="hi", previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"


def test_what_clients_send_in_full_is_read(server: Server) -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "user", "content": "go"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
        {"type": "function_call", "call_id": "1", "name": "read", "namespace": "fs", "arguments": '{"p": "x"}'},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "data"}]},
    ]
    space = {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "read", "parameters": {}}]}
    server.says("<tool_call>\n<function=fs__read>\n</function>\n</tool_call>")
    body = {"model": "", "input": items, "tools": [space, {"type": "web_search"}], "include": []}
    response = server.http.post("/v1/responses", json=body).json()
    text = prompt(server)
    assert "system\nrules" in text and "assistant\nok<tool_call>\n<function=fs__read>" in text and "tool\ndata" in text
    assert "web_search" not in text
    assert (response["output"][0]["name"], response["output"][0]["namespace"]) == ("read", "fs")


def test_the_limit_makes_it_incomplete(server: Server, client: openai.OpenAI) -> None:
    server.says(*"a long reply")
    response = client.responses.create(model="", input="hi", max_output_tokens=4)
    assert response.status == "incomplete" and response.output_text == "a lo"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert events(server, model="", input="hi", max_output_tokens=4)[-1]["type"] == "response.incomplete"


def test_an_empty_reply_is_an_empty_message(server: Server, client: openai.OpenAI) -> None:
    server.says("")
    assert client.responses.create(model="", input="hi").output[0].type == "message"


def test_a_failure_under_way_is_a_failed_response(server: Server) -> None:
    server.says("half")
    server.client.script = lambda request: [server.ids("half")]
    server.client.failure = EngineUnavailable("the server is stopping")
    last = events(server, model="", input="hi")[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "service_unavailable"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"colour": 1}, "colour", "unknown_parameter"),
        ({"input": []}, "input", None),
        ({"input": [{"type": "image"}]}, "input[0].type", None),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y"}]}]}, "input[0].content[0]", "vision_disabled"),  # noqa: E501
        ({"conversation": "c"}, "conversation", "conversation_not_supported"),
        ({"background": True}, "background", "background_not_supported"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", None),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", None),
        ({"include": ["everything"]}, "include[0]", None),
        ({"model": "other"}, None, "model_not_found"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(server: Server, fields: dict[str, Any], param: str | None, code: str | None) -> None:
    error = server.http.post("/v1/responses", json={"input": "hi", **fields}).json()["error"]
    assert (error["param"], error["code"]) == (param, code)


@needs_grammar
def test_a_text_format_is_parsed_by_the_client(server: Server, client: openai.OpenAI) -> None:
    from pydantic import BaseModel

    class Answer(BaseModel):
        n: int

    server.says('{"n": 4}')
    assert client.responses.parse(model="", input="hi", text_format=Answer).output_parsed == Answer(n=4)
    assert server.client.requests[0].mask is not None


def test_logprobs_and_encrypted_reasoning_on_request(server: Server) -> None:
    server.says("hm</think>", "Hi")
    body = {"input": "hi", "reasoning": {"effort": "high"}, "include": ["reasoning.encrypted_content"]}
    output = server.http.post("/v1/responses", json={**body, "top_logprobs": 2}).json()["output"]
    assert output[0]["encrypted_content"] == "hm"
    assert [len(r["top_logprobs"]) for r in output[1]["content"][0]["logprobs"]] == [2, 2]


def test_token_counts_and_refused_routes(server: Server) -> None:
    count = server.http.post("/v1/responses/input_tokens", json={"input": "hi"}).json()
    server.http.post("/v1/responses", json={"input": "hi"})
    assert count["input_tokens"] == len(server.client.requests[0].prompt_ids)
    assert server.http.post("/v1/responses/compact", json={}).status_code == 400
    assert server.http.post("/v1/responses/resp_1/cancel").status_code == 400


def test_the_store_is_bounded() -> None:
    store = ResponseStore(max_records=3, max_bytes=2000)
    for i in range(5):
        store.put({"id": str(i), "output": []}, ({"type": "message", "content": "x"},))
    assert [store.get(str(i)) is not None for i in range(5)] == [False, False, True, True, True]
    store.get("2")
    store.put({"id": "5", "output": []}, ())
    assert store.get("3") is None and store.get("2") is not None
    store.put({"id": "big", "output": ["x" * 3000]}, ())
    assert store.get("big") is None
    store.put({"id": "half", "output": ["x" * 1900]}, ())
    assert store.get("half") is not None and len(store) == 1
