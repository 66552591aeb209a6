"""Gemma's tool calls out of streamed text: one result however the text is cut, and the values that were written."""

# ruff: noqa: E501  (a case is a line)
from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from ninfer.text.parts import CallArguments, CallBegin, CallEnd, Part, Text
from ninfer.text.tools_gemma import GemmaParser
from tests.text.streamed import calls, read

TOOLS: dict[str, dict[str, Any]] = {"weather": {}, "ping": {}}
Q = '<|"|>'


def parse(text: str, cuts: Sequence[int] = (), **kwargs: Any) -> list[Part]:
    return read(GemmaParser, TOOLS, text, cuts, **kwargs)


def said(parts: list[Part]) -> str:
    return "".join(p.text for p in parts if isinstance(p, Text))


def call(body: str, name: str = "weather") -> str:
    return f"<|tool_call>call:{name}{{{body}}}<tool_call|>"


def written(value: Any) -> str:
    """A value in Gemma's notation, as its template writes it."""
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


CASES = [
    ("plain <|tool and <tool_call|> text", "plain <|tool and <tool_call|> text", []),
    ("Let me see.\n" + call(f"city:{Q}Köln{Q},days:3"), "Let me see.", [("weather", {"city": "Köln", "days": 3})]),
    (call("", "ping") + call("", "ping"), "", [("ping", {}), ("ping", {})]),
    (call("", "ping") + "\n" + call("a:1") + "\n\nDone.", "\n\nDone.", [("ping", {}), ("weather", {"a": 1})]),
    (call(f'city:{Q}a "b"\n\\c <x> }}],:{{ <tool_call|> <|" d{Q}'), "", [("weather", {"city": 'a "b"\n\\c <x> }],:{ <tool_call|> <|" d'})]),
    (call(f"a:true,b:null,c:-1.5e3,d:[],e:{{}},f:[1,{Q}x{Q},[{{g:{Q}{Q}}}]]"), "", [("weather", {"a": True, "b": None, "c": -1500.0, "d": [], "e": {}, "f": [1, "x", [{"g": ""}]]})]),
    (call("\n a : 1 ,\n b : [ 1 , 2 ] \n"), "", [("weather", {"a": 1, "b": [1, 2]})]),
    (call("city:New York,n:007"), "", [("weather", {"city": "New York", "n": "007"})]),
    (call('"city":"Rome \\"x\\"",' + f"{Q}n{Q}:1"), "", [("weather", {"city": 'Rome "x"', "n": 1})]),
    (call("a:,b:1,c"), "", [("weather", {"a": None, "b": 1, "c": None})]),
    ("<|tool_call>call:weather{a:[{b:1<tool_call|>ok", "ok", [("weather", {"a": [{"b": 1}]})]),
    ("<|tool_call> call: weather {a:1}} <tool_call|>", "", [("weather", {"a": 1})]),
    (call("a:1", "unknown"), call("a:1", "unknown"), []),
    ("<|tool_call> is a tag, call:weather{} too", "<|tool_call> is a tag, call:weather{} too", []),
    ("<|tool_call><|tool_call>call:ping{}<tool_call|>", "<|tool_call>", [("ping", {})]),
    ("<|tool_call>call:wea", "<|tool_call>call:wea", []),
    ("ends in half a tag <|tool_c", "ends in half a tag <|tool_c", []),
    ("ends in blanks \n\n", "ends in blanks \n\n", []),
    (f"<|tool_call>call:weather{{a:[1,{{city:{Q}Ro", "", [("weather", {"a": [1, {"city": "Ro"}]})]),
    ("<|tool_call>call:weather{a:12", "", [("weather", {"a": 12})]),
    ("<|tool_call>call:weather{a:1}<tool_", "", [("weather", {"a": 1})]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "plain", "called"), CASES, ids=range(len(CASES)))
def test_calls_are_read_the_same_however_the_text_is_cut(text: str, plain: str, called: list[Any]) -> None:
    whole = parse(text)
    assert said(whole) == plain
    assert calls(whole) == called
    assert parse(text, list(range(1, len(text)))) == whole
    pairs = list(combinations(range(1, len(text)), 2))
    for cuts in random.Random(text).sample(pairs, min(400, len(pairs))):
        assert parse(text, cuts) == whole, cuts


def drawn(rng: random.Random, depth: int) -> Any:
    """Any JSON value."""
    kind = rng.randrange(8 if depth else 6)
    if kind < 3:
        return "".join(rng.choice('ab "\\\n<|>{}[]:,é🙂') for _ in range(rng.randrange(6)))
    if kind < 6:
        return rng.choice([0, -7, 12.5, 1e-9, True, False, None])
    if kind == 6:
        return [drawn(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {f"k{i}": drawn(rng, depth - 1) for i in range(rng.randrange(4))}


def test_any_value_comes_back_as_it_was_written() -> None:
    rng = random.Random(11)
    for _ in range(800):
        arguments = {f"p{i}": drawn(rng, 3) for i in range(rng.randrange(4))}
        text = "so " + call(written(arguments)[1:-1]) + "!"
        cuts = sorted(rng.sample(range(1, len(text)), rng.randrange(min(8, len(text) - 1))))
        parts = parse(text, cuts)
        assert (said(parts), calls(parts)) == ("so!", [("weather", arguments)]), (text, cuts)


def test_random_markup_never_raises_and_never_depends_on_the_cuts() -> None:
    rng = random.Random(5)
    bits = ["<|tool_call>", "<tool_call|>", "call:ping", "call:weather{", "{", "}", "[", "]", ":", ",", Q, '"', "\\",
            "\n", " ", "x", "<", "<|", "7", "null", "call:", "city:"]  # fmt: skip
    for _ in range(2500):
        text = "".join(rng.choice(bits) for _ in range(rng.randrange(1, 16)))
        if rng.random() < 0.6:
            text = "<|tool_call>call:weather{" + text
        complete = rng.random() < 0.7
        whole = parse(text, complete=complete)
        assert parse(text, list(range(1, len(text))), complete=complete) == whole, repr(text)
        for part in whole if complete else []:
            if isinstance(part, CallArguments):
                json.loads(part.json)


def test_arguments_stream_as_they_are_written() -> None:
    parser = GemmaParser(TOOLS, new_id=lambda: "id")
    assert parser.feed("<|tool_call>call:weather{") == [CallBegin(0, "id", "weather"), CallArguments(0, "{")]
    assert parser.feed(f"city:{Q}New") == [CallArguments(0, '"city": "New')]
    assert parser.feed(" York") == [CallArguments(0, " York")]
    assert parser.feed("<|") == []
    assert parser.feed("y") == [CallArguments(0, "<|y")]
    assert parser.feed(f"{Q},days:[1") == [CallArguments(0, '", "days": [')]
    assert parser.feed("]") == [CallArguments(0, "1]")]
    assert parser.feed("}") == [CallArguments(0, "}"), CallEnd(0)]


def test_text_is_held_back_only_while_it_may_be_a_tag() -> None:
    parser = GemmaParser(TOOLS)
    assert parser.feed("see <") == [Text("see")]
    assert parser.feed("b> and") == [Text(" <b> and")]


def test_a_call_that_a_limit_cut_stays_open() -> None:
    parts = parse(f"<|tool_call>call:weather{{city:{Q}Ro", complete=False)
    assert parts[1:] == [CallArguments(0, '{"city": "Ro')]


def test_without_parallel_calls_only_the_first_counts() -> None:
    assert calls(parse(call("", "ping") * 2 + " more", parallel=False)) == [("ping", {})]
    assert said(parse(call("", "ping") * 2 + " more", parallel=False)) == ""
