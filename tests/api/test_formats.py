"""Formats of replies on every endpoint that has them: what holds a reply, when it begins, how refusals are told."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.text.grammar import available
from tests.api.conftest import FakeClient, Server, Start
from tests.api.test_tools_and_formats import TEMPLATE

pytestmark = pytest.mark.skipif(not available(), reason="needs xgrammar")

CHAT, COMPLETE, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BAD = {"type": "object", "properties": {"a": {"not": {}}}}


def named(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


def flat(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "name": "n", "schema": schema, **fields}


# path, request, what it allows, what it does not
HELD: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, '{"x": [1]}', "[1]"),
    (CHAT, {"messages": HI, "response_format": named(OPEN, strict=True)}, '{"a": 1}', '{"a": 1, "b"'),
    (CHAT, {"messages": HI, "response_format": named(OPEN)}, '{"a": 1, "b": 2}', '{"b"'),
    (CHAT, {"messages": HI, "json_schema": OPEN}, '{"a": 1}', "["),
    (CHAT, {"messages": HI, "grammar": 'root ::= "yes" | "no"'}, "yes", "may"),
    (CHAT, {"messages": HI, "regex": "[0-9]+"}, "42", "x"),
    (COMPLETE, {"prompt": "p", "response_format": named(OPEN, strict=True)}, '{"a": 1}', '{"a": 1, "b"'),
    (COMPLETE, {"prompt": "p", "grammar": 'root ::= "yes" | "no"'}, "no", "may"),
    (NATIVE, {"prompt": "p", "json_schema": OPEN}, '{"a": 1}', "["),
    (NATIVE, {"prompt": "p", "json_schema": {}}, "[1, null]", "x"),
    (NATIVE, {"prompt": "p", "grammar": 'root ::= digit+\ndigit ::= [0-9] # one of ten'}, "42", "x"),
    (NATIVE, {"prompt": "p", "regex": "a|bc"}, "bc", "x"),
    (NATIVE, {"prompt": "p", "response_format": {"type": "json_object"}}, "{}", "["),
    (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_object"}}}, "{}", "["),
    (RESPONSES, {"input": "hi", "text": {"format": flat(OPEN, strict=True)}}, '{"a": 1}', '{"a": 1, "b"'),
    (RESPONSES, {"input": "hi", "text": {"format": flat(OPEN, strict=False)}}, '{"a": 1, "b": 2}', '{"b"'),
    (MESSAGES, {"messages": HI, "output_config": {"format": flat(OPEN)}}, '{"a": 1}', '{"a": 1, "b"'),
    (MESSAGES, {"messages": HI, "output_format": flat(OPEN)}, '{"a": 1}', '{"a": 1, "b"'),
)  # fmt: skip


@pytest.fixture(scope="module")
def server(module_start: Start) -> Server:
    return module_start(FakeClient(context_len=4096), template=TEMPLATE)


@pytest.mark.parametrize(("path", "body", "good", "bad"), HELD, ids=range(len(HELD)))
def test_the_reply_is_held_to_the_format(server: Server, path: str, body: dict[str, Any], good: str, bad: str) -> None:
    server.client.requests.clear()
    server.says(good)
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    [request] = server.client.requests
    mask = request.mask
    assert mask is not None
    accepted = [mask.accept(id) for id in server.ids(bad)]
    assert not all(accepted)
    mask.rollback(sum(accepted))
    assert all(mask.accept(id) for id in server.ids(good))
    if path in (CHAT, RESPONSES, MESSAGES):
        assert not server.tokenizer.decode(request.prompt_ids).endswith("<think>\n"), "thinking is off"


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    (CHAT, {"messages": HI, "response_format": named(BAD)}, "response_format.json_schema.schema.properties.a.not"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"messages": HI, "response_format": named(3)}, "response_format.json_schema.schema"),
    (CHAT, {"messages": HI, "response_format": named(OPEN), "regex": "a"}, "regex"),
    (COMPLETE, {"prompt": "p", "response_format": named(BAD)}, "response_format.json_schema.schema.properties.a.not"),
    (COMPLETE, {"prompt": "p", "regex": "("}, "regex"),
    (NATIVE, {"prompt": "p", "json_schema": BAD}, "json_schema.properties.a.not"),
    (NATIVE, {"prompt": "p", "grammar": "root ::= ("}, "grammar"),
    (RESPONSES, {"input": "hi", "text": {"format": flat(BAD)}}, "text.format.schema.properties.a.not"),
    (
        MESSAGES,
        {"messages": HI, "output_config": {"format": flat(BAD)}},
        "output_config.format.schema.properties.a.not",
    ),
)


@pytest.mark.parametrize(("path", "body", "where"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_held_is_a_400_by_its_path(
    server: Server, path: str, body: dict[str, Any], where: str, stream: bool
) -> None:
    response = server.http.post(path, json={**body, "stream": stream})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert (error["message"].split()[0].rstrip(":") if path == MESSAGES else error["param"]) == where


def test_each_of_n_replies_has_a_place_of_its_own(server: Server) -> None:
    server.client.requests.clear()
    server.says("{}")
    assert server.chat(n=2, response_format={"type": "json_object"}).status_code == 200
    first, second = (request.mask for request in server.client.requests)
    assert first is not None and second is not None and first is not second
    assert all(first.accept(id) for id in server.ids('{"a')) and not second.accept(server.ids("a")[0])


SELF_OPENED = TEMPLATE.replace(
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}",
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
)


def test_a_model_that_opens_its_reasoning_itself_may_before_the_format(start: Start) -> None:
    assert SELF_OPENED != TEMPLATE
    server = start(FakeClient(context_len=4096), template=SELF_OPENED)
    server.says("<think>", "hm\n", "</think>", "\n\n{}")
    told = server.chat(response_format={"type": "json_object"}, enable_thinking=True).json()["choices"][0]["message"]
    assert (told["reasoning_content"], told["content"]) == ("hm", "{}")
    mask = server.client.requests[0].mask
    assert mask is not None and not mask.accept(server.ids("h")[0])
    assert all(mask.accept(id) for id in server.ids("<think>hm</think>\n\n{}"))
    server.chat(response_format={"type": "json_object"})
    mask = server.client.requests[1].mask
    assert mask is not None and not mask.accept(server.ids("<think>")[0])
