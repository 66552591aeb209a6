"""What is refused, how it is told, and who may ask."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from ninfer.config import EngineConfig
from ninfer.errors import EngineUnavailable, NinferError, Overloaded, QueueTimeout
from tests.api.conftest import MODEL, FakeClient, Server, Start, parse_events

CHAT, COMPLETE, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
HI = [{"role": "user", "content": "hi"}]


def turn(**fields: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "user", **fields}]}


def part(**fields: Any) -> dict[str, Any]:
    return turn(content=[{"type": "text", "text": "a"}, fields])


# path, body, where the fault is
MALFORMED: tuple[tuple[str, dict[str, Any], str | None], ...] = (
    (CHAT, {}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [{}]}, "messages[0].role"),
    (CHAT, {"messages": [*HI, {"role": "robot", "content": "x"}]}, "messages[1].role"),
    (CHAT, turn(), "messages[1].content"),
    (CHAT, turn(content=3), "messages[1].content"),
    (CHAT, turn(content=["a"]), "messages[1].content[0]"),
    (CHAT, part(), "messages[1].content[1].type"),
    (CHAT, part(type=1), "messages[1].content[1].type"),
    (CHAT, part(type="text"), "messages[1].content[1].text"),
    (CHAT, part(type="image_url", image_url={"url": "x"}), "messages[1].content[1].image_url.url"),
    (CHAT, turn(content="a", name=3), "messages[1].name"),
    (CHAT, {"messages": HI, "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": HI, "temperature": 2.5}, "temperature"),
    (CHAT, {"messages": HI, "temperature": True}, "temperature"),
    (CHAT, {"messages": HI, "top_p": -0.1}, "top_p"),
    (CHAT, {"messages": HI, "top_k": 1.5}, "top_k"),
    (CHAT, {"messages": HI, "top_k": -2}, "top_k"),
    (CHAT, {"messages": HI, "min_p": 2}, "min_p"),
    (CHAT, {"messages": HI, "presence_penalty": 3}, "presence_penalty"),
    (CHAT, {"messages": HI, "frequency_penalty": []}, "frequency_penalty"),
    (CHAT, {"messages": HI, "repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"messages": HI, "seed": "x"}, "seed"),
    (CHAT, {"messages": HI, "seed": 10**30}, "seed"),
    (CHAT, {"messages": HI, "stop": 3}, "stop"),
    (CHAT, {"messages": HI, "stop": ""}, "stop"),
    (CHAT, {"messages": HI, "stop": ["a", 3]}, "stop[1]"),
    (CHAT, {"messages": HI, "stop": ["a", ""]}, "stop[1]"),
    (CHAT, {"messages": HI, "stop": ["a"] * 33}, "stop"),
    (CHAT, {"messages": HI, "n": 0}, "n"),
    (CHAT, {"messages": HI, "n": 100}, "n"),
    (CHAT, {"messages": HI, "max_tokens": -2}, "max_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": "many"}, "max_completion_tokens"),
    (CHAT, {"messages": HI, "stream": "yes"}, "stream"),
    (CHAT, {"messages": HI, "stream_options": 1}, "stream_options"),
    (CHAT, {"messages": HI, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (CHAT, {"messages": HI, "logprobs": 3}, "logprobs"),
    (CHAT, {"messages": HI, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": HI, "logit_bias": 3}, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"cat": 1}}, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"65": "x"}}, "logit_bias.65"),
    (CHAT, {"messages": HI, "logit_bias": {"65": 101}}, "logit_bias.65"),
    (CHAT, {"messages": HI, "chat_template_kwargs": 3}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
    (CHAT, {"messages": HI, "enable_thinking": "no"}, "enable_thinking"),
    (CHAT, {"messages": HI, "reasoning_effort": "heroic"}, "reasoning_effort"),
    (CHAT, {"messages": HI, "model": 3}, "model"),
    (COMPLETE, {}, "prompt"),
    (COMPLETE, {"prompt": 3}, "prompt"),
    (COMPLETE, {"prompt": ""}, "prompt"),
    (COMPLETE, {"prompt": [1, 2.5]}, "prompt[1]"),
    (COMPLETE, {"prompt": [[1], ["a", None]]}, "prompt[1][1]"),
    (COMPLETE, {"prompt": [-1]}, "prompt[0]"),
    (COMPLETE, {"prompt": [100_000]}, "prompt"),
    (COMPLETE, {"prompt": "a", "best_of": 3}, "best_of"),
    (COMPLETE, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETE, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETE, {"prompt": "a", "logprobs": 1, "echo": True}, "echo"),
    (COMPLETE, {"prompt": "a", "echo": 1}, "echo"),
    (NATIVE, {"prompt": ["a", "b"]}, "prompt"),
    (NATIVE, {"prompt": "a", "n_predict": "x"}, "n_predict"),
    (NATIVE, {"prompt": "a", "mirostat": 2}, "mirostat"),
    (NATIVE, {"prompt": "a", "logit_bias": [[65]]}, "logit_bias[0]"),
    (NATIVE, {"prompt": "a", "response_fields": [1]}, "response_fields[0]"),
    ("/tokenize", {}, "content"),
    ("/tokenize", {"content": 1}, "content"),
    ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
    ("/detokenize", {"tokens": [100_000]}, "tokens[0]"),
    ("/apply-template", {"messages": 1}, "messages"),
)


@pytest.fixture(scope="module")
def shared(module_start: Start) -> Server:
    return module_start()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "where"), MALFORMED, ids=lambda v: json.dumps(v)[:60])
def test_a_malformed_field_is_a_400_that_names_it(
    shared: Server, path: str, body: dict[str, Any], where: str, stream: bool
) -> None:
    response = shared.http.post(path, json={"stream": stream, **body} if path in (CHAT, COMPLETE, NATIVE) else body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, where), error
    assert error["type"] == "invalid_request_error"
    assert where in error["message"] or where.split(".")[-1] in error["message"]
    assert shared.client.requests == []


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"null", b'{"a": NaN}', b"\xff\xfe", b"[" * 100_000, b'{"messages": "\\ud800"}', b"9" * 5000],
    ids=lambda b: repr(b[:12]),
)
def test_a_body_that_is_no_json_object_is_a_400(shared: Server, body: bytes) -> None:
    response = shared.http.post(CHAT, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_unknown_fields_and_content_types_pass(shared: Server) -> None:
    body = json.dumps({"messages": HI, "user": "u", "metadata": {}, "novel": [1]})
    response = shared.http.post(CHAT, content=body, headers={"content-type": "application/x-www-form-urlencoded"})
    assert response.status_code == 200
    shared.client.requests.clear()


def test_a_prompt_that_is_too_long_is_a_400_before_any_byte(start: Start) -> None:
    server = start(FakeClient(context_len=20))
    for stream in (False, True):
        response = server.chat("x" * 30, stream=stream)
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["code"], error["param"], error["n_ctx"]) == ("context_length_exceeded", "messages", 20)
        assert error["n_prompt_tokens"] > 30
        assert str(error["n_prompt_tokens"]) in error["message"]
    error = server.http.post(COMPLETE, json={"prompt": "x" * 30}).json()["error"]
    assert (error["param"], error["n_prompt_tokens"]) == ("prompt", 30)


def test_a_model_without_a_template_refuses_chats(start: Start) -> None:
    server = start(template=None)
    response = server.chat()
    assert response.status_code == 400
    assert "chat template" in response.json()["error"]["message"]
    assert server.http.post("/apply-template", json={"messages": HI}).status_code == 400
    assert server.http.post(COMPLETE, json={"prompt": "a"}).status_code == 200


def test_a_template_that_raises_is_a_400(start: Start) -> None:
    server = start(template="{{ raise_exception('no system turn, please') }}")
    response = server.chat()
    assert response.status_code == 400
    assert "no system turn, please" in response.json()["error"]["message"]


def test_another_model_is_a_404(server: Server) -> None:
    response = server.chat(model="gpt-9")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert MODEL in response.json()["error"]["message"]
    for name in (MODEL, "", None):
        assert server.chat(model=name).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (Overloaded("full", retry_after_s=3.2), 429, "server_overloaded", "3"),
        (QueueTimeout("late"), 503, "request_queue_timeout", "2"),
        (EngineUnavailable("stopping"), 503, "service_unavailable", "2"),
        (NinferError("the step failed"), 500, "internal_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_before_the_first_byte_are_http_errors(
    server: Server, error: NinferError, status: int, code: str, retry: str | None, stream: bool
) -> None:
    server.client.refusal = error
    response = server.chat(stream=stream)
    assert response.status_code == status
    assert response.json()["error"] == {
        "message": str(error),
        "type": response.json()["error"]["type"],
        "param": None,
        "code": code,
    }
    assert response.headers.get("retry-after") == retry
    assert response.headers.get("x-should-retry") == ("false" if status == 500 else None)


def test_one_of_n_refused_refuses_all_and_cancels_the_others(server: Server) -> None:
    server.client.room = 2
    server.client.hold = True
    response = server.chat(n=3)
    assert response.status_code == 429
    assert len(server.client.cancelled) == 2


def test_an_error_after_the_first_byte_is_an_event_and_nothing_follows(server: Server) -> None:
    server.client.script = lambda request: [server.ids("abc")]
    server.client.step_s = 0.3
    server.client.failure = EngineUnavailable("the server is stopping")
    events = server.events(CHAT, messages=HI)
    assert events[-1]["error"]["code"] == "service_unavailable"
    assert "[DONE]" not in events
    assert not any(c["finish_reason"] for e in events[:-1] for c in e["choices"])
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError, match="the server is stopping"):
        list(client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True))
    assert server.chat().status_code == 503


def test_a_bug_is_a_500_that_tells_nothing_of_itself(server: Server) -> None:
    def script(request: object) -> Any:
        raise RuntimeError("a secret")

    server.client.script = script
    response = server.chat()
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["code"] == "internal_error"


def test_unknown_routes_and_methods_are_json(server: Server) -> None:
    for response, status, code in (
        (server.http.get("/v1/files"), 404, "not_found"),
        (server.http.post("/nothing"), 404, "not_found"),
        (server.http.get(CHAT), 405, "method_not_allowed"),
        (server.http.delete("/v1/models"), 405, "method_not_allowed"),
    ):
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert response.headers["x-request-id"].startswith("req_")


def test_too_large_bodies_are_a_413_whether_or_not_they_say_so(start: Start) -> None:
    server = start(max_request_mib=1)
    big = json.dumps({"messages": [{"role": "user", "content": "x" * (1 << 20)}]}).encode()
    response = server.http.post(CHAT, content=big)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert str(1 << 20) in response.json()["error"]["message"]
    chunked = server.http.post(CHAT, content=(big[i : i + 65536] for i in range(0, len(big), 65536)))
    assert chunked.status_code == 413


def test_keys_are_asked_of_all_but_health(start: Start) -> None:
    server = start(api_keys=("one", "two"))
    for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}, {"x-api-key": "ones"}):
        response = server.http.get("/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert server.chat().status_code == 401
    for headers in ({"authorization": "Bearer one"}, {"authorization": "bearer  two"}, {"x-api-key": "two"}):
        assert server.http.get("/v1/models", headers=headers).status_code == 200
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/nothing").status_code == 404
    openai.OpenAI(base_url=f"{server.url}/v1", api_key="one").models.list()
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="three").models.list()


def test_pages_of_any_origin_may_call_with_cors(start: Start) -> None:
    server = start(cors=True, api_keys=("one",))
    asked = {
        "origin": "http://page",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-novel",
    }
    preflight = server.http.options(CHAT, headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "*"
    assert "x-novel" in preflight.headers["access-control-allow-headers"]
    assert "POST" in preflight.headers["access-control-allow-methods"]
    for response in (
        server.http.get("/health", headers={"origin": "http://page"}),
        server.http.get("/nothing", headers={"origin": "http://page"}),
        server.http.get("/v1/models", headers={"origin": "http://page"}),
    ):
        assert response.headers["access-control-allow-origin"] == "*"
        assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_without_cors_no_page_is_let_in(server: Server) -> None:
    assert "access-control-allow-origin" not in server.http.get("/health", headers={"origin": "http://page"}).headers


@pytest.mark.parametrize("path", [CHAT, "/v1/v1/chat/completions", "/chat/completions"])
def test_routes_answer_under_their_other_names(server: Server, path: str) -> None:
    assert server.http.post(path, json={"messages": HI}).status_code == 200


def test_more_replies_than_the_server_holds_are_a_400(start: Start) -> None:
    server = start(engine=EngineConfig(model="demo", max_concurrency=2, max_pending_requests=1))
    assert server.chat(n=3).status_code == 200
    assert server.chat(n=4).json()["error"]["param"] == "n"


def test_streams_say_that_they_are_not_to_be_stored(server: Server) -> None:
    with server.http.stream("POST", CHAT, json={"messages": HI, "stream": True}) as response:
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert "content-length" not in response.headers
        assert parse_events(response.read().decode())[-1] == "[DONE]"


def test_an_odd_path_is_a_404(server: Server) -> None:
    assert httpx.get(f"{server.url}/%00").status_code == 404
