"""What each endpoint says to a request that is wrong in one field: the status, the shape and the path, for every field.

A table holds a whole request of each endpoint and what kind of value stands where. Every kind has values that it is
not; each is put in its place, one at a time.
"""

# ruff: noqa: E501  (a case is a line)
from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from attrs import frozen

from ninfer.errors import EngineUnavailable
from tests.api.conftest import MODEL, FakeClient, Server, Start
from tests.api.test_tools_and_formats import TEMPLATE

CHAT, COMPLETE, NATIVE, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/completion",
    "/v1/responses",
    "/v1/messages",
)
ANTHROPIC = (MESSAGES, "/v1/messages/count_tokens")
PIXEL = "iVBORw0KGgo="  # how a PNG begins

# Kinds, as the values that are none of them

TEXT: Sequence[Any] = (3, {})
BOOL: Sequence[Any] = ("yes", 1)
OBJECT: Sequence[Any] = ("x", [1])
LIST: Sequence[Any] = ("x", {"a": 1})
NAME: Sequence[Any] = (*TEXT, "no such name")  # one of a few


def whole(low: int | None = None, high: int | None = None) -> Sequence[Any]:
    outside = ([] if low is None else [low - 1]) + ([] if high is None else [high + 1])
    return ("x", True, 1.5, *outside)


def real(low: float, high: float) -> Sequence[Any]:
    return ("x", True, low - 0.01, high + 0.01)


PENALTY = real(-2, 2)
DRAWN = {
    "temperature": real(0, 2),
    "top_p": real(0, 1),
    "top_k": whole(-1),
    "min_p": real(0, 1),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": ("x", 0, 11),
    "seed": whole(-(2**63), 2**64 - 1),
    "logit_bias": ("x", 3, {"cat": 1}, [[1, 2, 3]]),
    "logit_bias.65": ("x", 101, -101, [], {}),
}
PLAIN = DRAWN | {"temperature": ("x", 2.01, []), "top_k": ("x", 1.5)}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "strict": True, "schema": {}}}
STOP: tuple[Any, ...] = (3, True, {}, "", [3], [""], ["a"] * 33)
GRAMMAR = {"grammar": TEXT, "regex": TEXT}
IDLE = {"user": TEXT, "stream_options": OBJECT}
FUNCTION = {"name": "ping", "description": "d", "parameters": {"type": "object"}, "strict": True}


@frozen
class Endpoint:
    """body: a request that is answered. fields: path -> what may not stand there. needs: what may not be missing."""

    path: str
    body: Mapping[str, Any]
    fields: Mapping[str, Sequence[Any]]
    needs: Sequence[str] = ()


ENDPOINTS = (
    Endpoint(
        CHAT,
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "u"},
                {
                    "role": "assistant",
                    "content": [{"type": "refusal", "refusal": "no"}],
                    "reasoning_content": "hm",
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "ping", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "a", "content": "pong"},
            ],
            "tools": [
                {"type": "function", "function": FUNCTION},
                {"type": "custom", "custom": {"name": "free", "description": "d"}},
            ],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "ping"}]}},
            "logprobs": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": False},
            "logit_bias": {"65": 0},
            "response_format": {"type": "text"},
            "metadata": {},
            "modalities": ["text"],
        },
        {
            **DRAWN,
            **GRAMMAR,
            "model": TEXT,
            "messages": (*LIST, []),
            "messages[0]": ("x", 3, []),
            "messages[1].role": NAME,
            "messages[1].content": (3, True, {}),
            "messages[1].content[0]": ("x", 3, []),
            "messages[1].content[0].type": (*TEXT, "novel", "refusal"),
            "messages[1].content[0].text": TEXT,
            "messages[1].name": TEXT,
            "messages[2].content[0].refusal": TEXT,
            "messages[2].reasoning_content": TEXT,
            "messages[2].tool_calls": LIST,
            "messages[2].tool_calls[0]": ("x", 3, []),
            "messages[2].tool_calls[0].id": TEXT,
            "messages[2].tool_calls[0].function": OBJECT,
            "messages[2].tool_calls[0].function.name": TEXT,
            "messages[2].tool_calls[0].function.arguments": (3, True, [1], "{", "[]"),
            "messages[3].tool_call_id": TEXT,
            "tools": LIST,
            "tools[0]": ("x", 3, []),
            "tools[0].type": (*NAME, "web_search"),
            "tools[0].function": OBJECT,
            "tools[0].function.name": TEXT,
            "tools[0].function.description": TEXT,
            "tools[0].function.parameters": OBJECT,
            "tools[1].custom": OBJECT,
            "tools[1].custom.name": TEXT,
            "tool_choice": (3, [], "sometimes", {"type": "function", "name": "nobody"}),
            "tool_choice.type": NAME,
            "tool_choice.allowed_tools.mode": NAME,
            "tool_choice.allowed_tools.tools": LIST,
            "tool_choice.allowed_tools.tools[0].name": TEXT,
            "parallel_tool_calls": BOOL,
            "max_tokens": whole(-1),
            "max_completion_tokens": whole(-1),
            "stop": STOP[:4],
            "n": whole(1, 128),
            "logprobs": BOOL,
            "top_logprobs": whole(0, 20),
            "ignore_eos": BOOL,
            "stream": BOOL,
            "stream_options": OBJECT,
            "stream_options.include_usage": BOOL,
            "chat_template_kwargs": OBJECT,
            "chat_template_kwargs.enable_thinking": BOOL,
            "chat_template_kwargs.preserve_thinking": BOOL,
            "chat_template_kwargs.messages": ([],),
            "chat_template_kwargs.tools": ([],),
            "enable_thinking": (*BOOL, True),  # chat_template_kwargs says otherwise
            "preserve_thinking": BOOL,
            "reasoning_effort": NAME,
            "thinking_budget": whole(1),
            "post_thinking": OBJECT,
            "post_thinking.temperature": real(0, 2),
            "graft": TEXT,
            "response_format": OBJECT,
            "response_format.type": (*NAME, "yaml"),
            "user": TEXT,
            "metadata": OBJECT,
            "safety_identifier": TEXT,
            "service_tier": TEXT,
            "prompt_cache_key": TEXT,
            "prompt_cache_retention": NAME,
            "verbosity": NAME,
            "store": BOOL,
            "modalities": LIST,
            "modalities[0]": NAME,
            "timings_per_token": BOOL,
        },
        needs=("messages", "messages[0].role", "messages[1].content", "messages[1].content[0].type",
               "messages[1].content[0].text", "tools[0].type", "tools[0].function", "tools[0].function.name",
               "messages[2].tool_calls[0].function", "messages[2].tool_calls[0].function.name",
               "response_format.type", "tool_choice.type"),
    ),
    Endpoint(
        COMPLETE,
        {"model": MODEL, "prompt": [65, "a"], "logit_bias": {"65": 0}, "stream_options": {"include_usage": True}},
        {
            **PLAIN,
            **GRAMMAR,
            **IDLE,
            "model": TEXT,
            "prompt": (3, True, {}, "", []),
            "prompt[0]": (-1, 1.5, True, {}),
            "prompt[1]": (None, {}),
            "max_tokens": whole(-1),
            "stop": STOP[:4],
            "n": whole(1, 128),
            "best_of": (*whole(1, 128), 2),
            "logprobs": whole(0, 20),
            "echo": BOOL,
            "suffix": (*TEXT, "b"),
            "ignore_eos": BOOL,
            "stream": BOOL,
            "stream_options.include_usage": BOOL,
            "response_format": OBJECT,
            "response_format.type": NAME,
        },
        needs=("prompt",),
    ),
    Endpoint(
        NATIVE,
        {"prompt": "a", "logit_bias": [[65, 0], [66, False]], "response_fields": ["content"], "samplers": ["top_k"]},
        {
            **{k: v for k, v in PLAIN.items() if "logit_bias" not in k},
            **GRAMMAR,
            "prompt": (3, True, {}, "", [], ["a", "b"]),
            "model": TEXT,
            "n_predict": ("x", 1.5, True, []),
            "max_tokens": ("x", 1.5, True, []),
            "stop": STOP[:4],
            "n_probs": whole(0, 20),
            "ignore_eos": BOOL,
            "stream": BOOL,
            "return_tokens": BOOL,
            "response_fields": LIST,
            "response_fields[0]": TEXT,
            "repeat_penalty": ("x", 0, 11),
            "logit_bias": ("x", 3),
            "logit_bias[0]": ("x", [65], [65, 1, 2]),
            "json_schema": ("x", 3, []),
            "response_format": OBJECT,
            "cache_prompt": BOOL,
            "id_slot": ("x", 1.5),
            "n_keep": ("x", 1.5),
            **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier", "n_indent"), ("x", 2)),
            **dict.fromkeys(("typical_p", "tfs_z"), ("x", 0.5)),
            **dict.fromkeys(("top_n_sigma", "t_max_predict_ms"), ("x", 2)),
            "lora": ([{"id": 0}],),
        },
        needs=("prompt",),
    ),
    Endpoint(
        RESPONSES,
        {
            "model": MODEL,
            "input": [
                {"role": "developer", "content": "d"},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
                {"type": "function_call", "call_id": "a", "name": "ping", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "pong"},
            ],
            "tools": [
                {"type": "function", **FUNCTION},
                {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "f"}]},
                {"type": "web_search"},
            ],
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "none"},
            "chat_template_kwargs": {},
            "metadata": {"a": "b"},
            "include": ["reasoning.encrypted_content"],
            "truncation": "disabled",
            "logit_bias": {"65": 0},
        },
        {
            **DRAWN,
            "model": TEXT,
            "input": (3, True, {}, []),
            "input[0]": ("x", 3, []),
            "input[0].role": NAME,
            "input[1].type": NAME,
            "input[1].content": (3, {}),
            "input[1].content[0].type": (*TEXT, "novel"),
            "input[1].content[0].text": TEXT,
            "input[2].content": LIST,
            "input[2].content[0].text": TEXT,
            "input[3].call_id": TEXT,
            "input[3].name": TEXT,
            "input[3].arguments": (3, "{", "[]"),
            "input[4].call_id": TEXT,
            "input[4].output": (3, {}),
            "instructions": TEXT,
            "previous_response_id": (3, "resp_nothing"),
            "max_output_tokens": whole(1),
            "stream": BOOL,
            "store": BOOL,
            "background": (*BOOL, True),
            "truncation": (*NAME, "auto"),
            "metadata": (*OBJECT, {str(i): "" for i in range(17)}),
            "metadata.a": (*TEXT, "x" * 513),
            "reasoning": OBJECT,
            "reasoning.effort": NAME,
            "reasoning.summary": NAME,
            "text": OBJECT,
            "text.format": OBJECT,
            "text.format.type": NAME,
            "tools": LIST,
            "tools[0]": ("x", 3, []),
            "tools[0].type": TEXT,
            "tools[0].name": TEXT,
            "tools[0].description": TEXT,
            "tools[0].parameters": OBJECT,
            "tools[1].name": TEXT,
            "tools[1].tools": LIST,
            "tools[1].tools[0].name": TEXT,
            "tool_choice": (3, [], "sometimes", {"type": "function", "name": "nobody"}),
            "parallel_tool_calls": BOOL,
            "max_tool_calls": whole(1),
            "include": LIST,
            "include[0]": NAME,
            "top_logprobs": whole(0, 20),
            "chat_template_kwargs": OBJECT,
            "chat_template_kwargs.enable_thinking": BOOL,
            "preserve_thinking": BOOL,
            "thinking_budget": whole(1),
            "post_thinking": OBJECT,
            "graft": TEXT,
            "service_tier": TEXT,
            "user": TEXT,
            "safety_identifier": TEXT,
            "prompt_cache_key": TEXT,
            "client_metadata": OBJECT,
            "stream_options": OBJECT,
            "conversation": ("x", {}),
            "prompt": ({"id": "x"},),
            "novel": (1,),
        },
        needs=("input", "input[1].content[0].type", "input[3].call_id", "input[3].name",
               "input[4].output", "tools[0].type", "tools[0].name", "tools[1].tools", "text.format.type"),
    ),
    *(
        Endpoint(
            path,
            {
                "model": "any label",
                "max_tokens": 5,
                "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "hm", "signature": "s"},
                            {"type": "redacted_thinking", "data": "x"},
                            {"type": "tool_use", "id": "a", "name": "ping", "input": {}},
                        ],
                    },
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": "a", "is_error": False,
                         "content": [{"type": "text", "text": "pong"}]},
                    ]},
                ],
                "tools": [{"name": "ping", "description": "d", "input_schema": {"type": "object"}, "strict": False}],
                "tool_choice": {"type": "auto"},
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "output_config": {"effort": "low"},
                "metadata": {"user_id": "u"},
                "stop_sequences": ["z"],
                "novel": 1,
            },
            {
                "model": TEXT,
                "max_tokens": (*whole(1), 0),
                "system": (3, {}),
                "system[0]": ("x", 3, []),
                "system[0].type": NAME,
                "system[0].text": TEXT,
                "system[0].cache_control": OBJECT,
                "messages": (*LIST, []),
                "messages[0]": ("x", 3, []),
                "messages[0].role": (*NAME, "tool"),
                "messages[0].content": (3, {}),
                "messages[0].content[0].type": (*TEXT, "novel", "tool_use"),
                "messages[0].content[0].text": TEXT,
                "messages[1].content[0].type": NAME,
                "messages[1].content[0].thinking": TEXT,
                "messages[1].content[0].signature": TEXT,
                "messages[1].content[2].id": TEXT,
                "messages[1].content[2].name": TEXT,
                "messages[1].content[2].input": OBJECT,
                "messages[2].content[0].tool_use_id": TEXT,
                "messages[2].content[0].is_error": BOOL,
                "messages[2].content[0].content": (3, {}),
                "messages[2].content[0].content[0].text": TEXT,
                "tools": LIST,
                "tools[0]": ("x", 3, []),
                "tools[0].type": (*TEXT, "web_search_20250305"),
                "tools[0].name": TEXT,
                "tools[0].description": TEXT,
                "tools[0].input_schema": OBJECT,
                "tools[0].strict": (*BOOL, True),
                "tools[0].defer_loading": (*BOOL, True),
                "tool_choice": ("auto", 3, {"type": "tool", "name": "nobody"}),
                "tool_choice.type": (*NAME, "required"),
                "tool_choice.disable_parallel_tool_use": BOOL,
                "thinking": OBJECT,
                "thinking.type": NAME,
                "thinking.budget_tokens": whole(1),
                "thinking.display": NAME,
                "output_config": OBJECT,
                "output_config.effort": NAME,
                "output_config.format": OBJECT,
                "temperature": real(0, 1),
                "top_p": real(0, 1),
                "top_k": whole(-1),
                "stop_sequences": (*LIST, [""]),
                "stop_sequences[0]": TEXT,
                "stream": BOOL,
                "metadata": OBJECT,
                "metadata.user_id": TEXT,
                "mcp_servers": ([{"name": "x"}],),
                "container": ("x",),
                "graft": TEXT,
                "post_thinking": OBJECT,
            },
            needs=("messages", "messages[0].role", "messages[0].content", "messages[0].content[0].type",
                   "messages[1].content[2].id", "messages[1].content[2].name", "messages[1].content[2].input",
                   "messages[2].content[0].tool_use_id", "tools[0].name", "tool_choice.type", "thinking.type"),
        )
        for path in ANTHROPIC
    ),
    Endpoint(
        "/tokenize",
        {"content": "a"},
        {"content": TEXT, **dict.fromkeys(("add_special", "parse_special", "with_pieces"), BOOL)},
        needs=("content",),
    ),
    Endpoint(
        "/detokenize", {"tokens": [65]}, {"tokens": LIST, "tokens[0]": whole(0, 99_999)}, needs=("tokens",)
    ),
    Endpoint(
        "/apply-template",
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": (*LIST, []), "messages[0].role": NAME, "tools": LIST},
        needs=("messages",),
    ),
    Endpoint(
        "/v1/responses/input_tokens", {"input": "a"}, {"input": (3, []), "tools": LIST, "novel": (1,)}, needs=("input",)
    ),
    Endpoint(
        "/v1/rerank",
        {"query": "q", "documents": ["d", {"text": "e"}]},
        {"query": (*TEXT, ""), "documents": (*LIST, []), "documents[1].text": TEXT, "top_n": whole(1),
         "return_documents": BOOL, "instruction": TEXT, "model": TEXT},
        needs=("query", "documents"),
    ),
)  # fmt: skip
UNREAD = object()


def placed(body: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The body with another value, or none (UNREAD), at a path; members on the way are made."""
    found = copy.deepcopy(dict(body))
    steps: list[Any] = [int(i) if i else name for name, i in re.findall(r"([^.\[\]]+(?![^\[]*\]))|\[(\d+)\]", path)]
    at: Any = found
    for step, following in itertools.pairwise(steps):
        if isinstance(at, dict) and not isinstance(at.get(step), dict | list):
            at[step] = [] if isinstance(following, int) else {}
        at = at[step]
    if value is UNREAD:
        del at[steps[-1]]
    else:
        at[steps[-1]] = value
    return found


def wrong(endpoint: Endpoint) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    for path, values in itertools.islice(
        endpoint.fields.items(), None, None, 9 if endpoint.path == ANTHROPIC[1] else 1
    ):
        for value in values:
            yield path, value, placed(endpoint.body, path, value)
    if endpoint.path == ANTHROPIC[1]:
        return  # the reader is that of messages; a few of all will do
    for path in endpoint.needs:
        yield path, "nothing", placed(endpoint.body, path, UNREAD)


@pytest.fixture(scope="module")
def server(module_start: Start) -> Server:
    return module_start(FakeClient(context_len=4096), template=TEMPLATE)


def shape(path: str, response: Any) -> str:
    """The path that an error names, the error being of the dialect's shape."""
    told = response.json()
    if path in ANTHROPIC:
        assert set(told) == {"type", "error", "request_id"} and told["type"] == "error", told
        assert told["request_id"] == response.headers["request-id"]
        assert set(told["error"]) == {"type", "message"} and told["error"]["type"] == "invalid_request_error"
        return re.split(r": | is missing", told["error"]["message"])[0]
    assert set(told) == {"error"} and set(told["error"]) == {"message", "type", "param", "code"}, told
    assert told["error"]["type"] == "invalid_request_error"
    assert response.headers["x-request-id"].startswith("req_")
    return str(told["error"]["param"])


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: e.path)
def test_each_field_is_named_when_it_is_wrong(server: Server, endpoint: Endpoint) -> None:
    if endpoint.path != "/v1/rerank":  # the toy's tokenizer has no yes and no
        assert server.http.post(endpoint.path, json=dict(endpoint.body)).status_code == 200
    server.client.requests.clear()
    faults: list[tuple[object, ...]] = []
    for path, value, body in wrong(endpoint):
        response = server.http.post(endpoint.path, json=body)
        if response.status_code != 400:
            faults.append((path, value, response.status_code, response.text[:100]))
            continue
        named = shape(endpoint.path, response)
        inside = named.startswith(f"{path}[") or named.startswith(f"{path}.")
        if named != path and not (isinstance(value, list | dict) and inside):
            faults.append((path, value, named, response.text[:200]))
    assert not faults, "\n".join(map(str, faults))
    assert server.client.requests == []


def user(path: str, part: dict[str, Any]) -> dict[str, Any]:
    """A request whose user says text and this part."""
    said = [{"type": "input_text" if path == RESPONSES else "text", "text": "see"}, part]
    return {"input" if path == RESPONSES else "messages": [{"role": "user", "content": said}]}


IMAGES: tuple[tuple[str, dict[str, Any], str, str | None], ...] = (
    (CHAT, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}", "detail": "auto"}}, "", "vision_disabled"),
    (CHAT, {"type": "image_url", "image_url": "https://example.org/a.png"}, "", "vision_disabled"),
    (CHAT, {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}, "", "vision_disabled"),
    (CHAT, {"type": "image_url"}, ".image_url", None),
    (CHAT, {"type": "image_url", "image_url": {}}, ".image_url.url", None),
    (CHAT, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, ".image_url.url", "invalid_media"),
    (CHAT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,***"}}, ".image_url.url", "invalid_media"),
    (CHAT, {"type": "image_url", "image_url": {"url": "http://x/y", "detail": "vast"}}, ".image_url.detail", None),
    (CHAT, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "", "content_not_supported"),
    (CHAT, {"type": "file", "file": {"file_id": "f"}}, "", "content_not_supported"),
    (RESPONSES, {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}, "", "vision_disabled"),
    (RESPONSES, {"type": "input_video", "video_url": "https://example.org/a.mp4"}, "", "vision_disabled"),
    (RESPONSES, {"type": "input_image"}, ".image_url", None),
    (RESPONSES, {"type": "input_image", "image_url": "a.png"}, ".image_url", "invalid_media"),
    (RESPONSES, {"type": "input_image", "file_id": "f"}, ".file_id", "file_id_not_supported"),
    (RESPONSES, {"type": "input_file", "file_id": "f"}, "", "content_not_supported"),
    (MESSAGES, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}, "", None),
    (MESSAGES, {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}, "", None),
    (MESSAGES, {"type": "image"}, ".source", None),
    (MESSAGES, {"type": "image", "source": {"type": "file", "file_id": "f"}}, ".source.type", None),
    (MESSAGES, {"type": "image", "source": {"type": "base64", "media_type": "text/html", "data": PIXEL}}, ".source.media_type", None),
    (MESSAGES, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "***"}}, ".source.data", None),
    (MESSAGES, {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}, "", None),
)  # fmt: skip


@pytest.mark.parametrize(("path", "part", "where", "code"), IMAGES, ids=range(len(IMAGES)))
def test_parts_that_are_no_text_are_refused_by_their_path(
    server: Server, path: str, part: dict[str, Any], where: str, code: str | None
) -> None:
    response = server.http.post(path, json=user(path, part))
    base = "input[0].content[1]" if path == RESPONSES else "messages[0].content[1]"
    assert response.status_code == 400, response.text
    assert shape(path, response) == base + where
    if path != MESSAGES:
        assert response.json()["error"]["code"] == code


def test_images_in_results_of_tools_are_refused_by_their_path(server: Server) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    response = server.http.post(MESSAGES, json={"messages": [{"role": "user", "content": [result]}]})
    assert shape(MESSAGES, response) == "messages[0].content[0].content[0]"


def test_a_body_over_the_limit_is_a_413_in_each_shape(start: Start) -> None:
    small = start(max_request_mib=1)
    for path in (CHAT, RESPONSES, MESSAGES):
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL[:4] * (1 << 18)}
        response = small.http.post(path, json=user(path, {"type": "image", "source": source}))
        error = response.json()["error"]
        assert (response.status_code, str(1 << 20) in error["message"]) == (413, True)
        assert path != MESSAGES or error["type"] == "request_too_large"
        assert path == MESSAGES or error["code"] == "request_too_large"


def test_fields_that_nobody_knows_pass_where_the_dialect_lets_them(server: Server) -> None:
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "hi", "novel": 1}], "novel": [1]}),
        (COMPLETE, {"prompt": "hi", "novel": [1]}),
        (NATIVE, {"prompt": "hi", "novel": [1]}),
        (MESSAGES, {"messages": [{"role": "user", "content": "hi", "novel": 1}], "novel": [1]}),
        (RESPONSES, {"input": [{"role": "user", "content": "hi", "novel": 1}]}),
    ):
        assert server.http.post(path, json=body).status_code == 200, path


FAILED = "the server is stopping"
ERRORS: Mapping[str, tuple[dict[str, Any], str, dict[str, Any]]] = {  # path -> request, event line, members of its data
    CHAT: ({"messages": [{"role": "user", "content": "hi"}]}, "", {"code": "service_unavailable", "param": None}),
    COMPLETE: ({"prompt": "hi"}, "", {"code": "service_unavailable", "param": None}),
    NATIVE: ({"prompt": "hi"}, "", {"code": "service_unavailable", "param": None}),
    MESSAGES: ({"messages": [{"role": "user", "content": "hi"}]}, "event: error\n", {"type": "api_error"}),
    RESPONSES: ({"input": "hi"}, "event: response.failed\n", {"code": "service_unavailable"}),
}


def test_an_error_after_the_first_byte_is_the_dialects_event_and_the_last(start: Start) -> None:
    client = FakeClient(step_s=0.15, failure=EngineUnavailable(FAILED))
    failing = start(client)
    client.script = lambda request: [failing.ids("abc")]
    for path, (body, line, members) in ERRORS.items():
        response = failing.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200
        last = response.text.split("\n\n")[-2]
        assert last.startswith(line + "data: {"), last
        told = json.loads(last.removeprefix(line).removeprefix("data: "))
        error = told["response"]["error"] if path == RESPONSES else told["error"]
        assert error["message"] == FAILED and members.items() <= error.items(), told
        if path == MESSAGES:
            assert told["type"] == "error" and told["request_id"] == response.headers["request-id"]
        if path == RESPONSES:
            assert told["type"] == "response.failed" and told["response"]["status"] == "failed"
        assert "[DONE]" not in response.text and "abc" in response.text
