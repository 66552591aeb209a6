"""Tool calls and reasoning out of streamed text: one result however the text is cut."""

# ruff: noqa: E501  (a case is a line)
from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from ninfer.text.parts import CallArguments, CallBegin, CallEnd, Part, Reasoning, Text, joined
from ninfer.text.reasoning import ReasoningSplit
from ninfer.text.tools import ToolParser
from tests.text.streamed import calls, read

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "unit": {"type": "string", "enum": ["c", "a b"]},
            "spec": {"$ref": "#/$defs/spec"},
        },
        "$defs": {"spec": {"type": "object"}},
    },
    "ping": {},
}


def parse(text: str, cuts: Sequence[int] = (), **kwargs: Any) -> list[Part]:
    return read(ToolParser, TOOLS, text, cuts, **kwargs)


def xml(name: str, **values: str) -> str:
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


CASES = [
    ("plain text, 1 < 2 and <b>bold</b>", "plain text, 1 < 2 and <b>bold</b>", []),
    ("Let me see.\n\n" + xml("weather", city="Köln", days="3"), "Let me see.", [("weather", {"city": "Köln", "days": 3})]),
    (xml("ping") + "\n" + xml("ping"), "", [("ping", {}), ("ping", {})]),
    (xml("weather", city='a "b"\n\\c <x> </parameter> d\t🙂'), "", [("weather", {"city": 'a "b"\n\\c <x> </parameter> d\t🙂'})]),
    (xml("weather", unit="  a b\n "), "", [("weather", {"unit": "a b"})]),
    (xml("weather", unit=" x"), "", [("weather", {"unit": " x"})]),
    (xml("weather", days="soon"), "", [("weather", {"days": "soon"})]),
    (xml("weather", spec='{"a": [1, {"b": "</parameter>"}]}'), "", [("weather", {"spec": {"a": [1, {"b": "</parameter>"}]}})]),
    (xml("weather", city="\n indented\n"), "", [("weather", {"city": "\n indented\n"})]),
    (xml("weather", city="", where="null"), "", [("weather", {"city": "", "where": "null"})]),
    (xml("unknown", city="x"), xml("unknown", city="x"), []),
    ("<tool_call> is a tag, <function=weather> too", "<tool_call> is a tag, <function=weather> too", []),
    ("<tool_call><tool_call>", "<tool_call><tool_call>", []),
    ('<tool_call>\n{"name": "weather", "arguments": {"city": "}]\\"{", "days": 2}}\n</tool_call>', "", [("weather", {"city": '}]"{', "days": 2})]),
    ('<tool_call>{"arguments": {"days": 1}, "name": "weather"}</tool_call>', "", [("weather", {"days": 1})]),
    ('<tool_call>{"name": "ping"}</tool_call> ok', " ok", [("ping", {})]),
    ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', []),
    ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
    ("so:\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>", "so:", [("weather", {"city": "Rome"})]),
    ('<function_calls><invoke name="weather"><param name="city">Rome</param></invoke></function_calls>', "", [("weather", {"city": "Rome"})]),
    ("<tool_call>\n<function=weather>\n<parameter=city>\nRome", "", [("weather", {"city": "Rome"})]),
    ("<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n", "", [("weather", {"city": "Rome"})]),
    ("<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</function>\n</tool_call>", "", [("weather", {"city": "Rome"})]),
    ("ends in a half tag <tool_ca", "ends in a half tag <tool_ca", []),
    ("ends in blanks \n\n", "ends in blanks \n\n", []),
    (xml("ping") + "\n\nDone.", "\n\nDone.", [("ping", {})]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said", "called"), CASES, ids=range(len(CASES)))
def test_calls_are_read_the_same_however_the_text_is_cut(text: str, said: str, called: list[Any]) -> None:
    whole = parse(text)
    assert "".join(p.text for p in whole if isinstance(p, Text)) == said
    assert calls(whole) == called
    assert parse(text, list(range(1, len(text)))) == whole
    rng = random.Random(text)
    for _ in range(60):
        cuts = sorted(rng.sample(range(1, len(text)), rng.randrange(1, min(9, len(text)))))
        assert parse(text, cuts) == whole, cuts


def test_random_markup_never_raises_and_never_depends_on_the_cuts() -> None:
    rng = random.Random(5)
    bits = ["<tool_call>", "</tool_call>", "<function=ping>", "<function=weather>", "</function>", "<parameter=city>",
            "</parameter>", "\n", " ", "x", "<", "{", '{"name": "ping", "arguments": ', "{}", "}", '"', "<invoke name=",
            "<function", "</", "days>", "<parameter=days>", "7"]  # fmt: skip
    for _ in range(1500):
        text = "".join(rng.choice(bits) for _ in range(rng.randrange(1, 14)))
        complete = rng.random() < 0.5
        whole = parse(text, complete=complete)
        assert parse(text, list(range(1, len(text))), complete=complete) == whole, repr(text)
        for part in whole if complete else []:
            if isinstance(part, CallArguments) and CallEnd(part.index) in whole:
                json.loads(part.json)


def test_string_arguments_stream_as_they_are_written() -> None:
    parser = ToolParser(TOOLS)
    parser.feed("<tool_call>\n<function=weather>\n<parameter=city>\n")
    assert parser.feed("New") == [CallArguments(0, '"New')]
    assert parser.feed(" York") == [CallArguments(0, " York")]
    assert parser.feed("\n</par") == []
    assert parser.feed("ty") == [CallArguments(0, "\\n</party")]


def test_text_is_held_back_only_while_it_may_be_a_tag() -> None:
    parser = ToolParser(TOOLS)
    assert parser.feed("see <") == [Text("see")]
    assert parser.feed("b> and") == [Text(" <b> and")]


def test_a_call_that_a_limit_cut_stays_open() -> None:
    parts = parse("<tool_call>\n<function=weather>\n<parameter=city>\nRo", complete=False)
    assert isinstance(parts[0], CallBegin) and CallEnd(0) not in parts
    assert parts[1] == CallArguments(0, '{"city": "Ro')


def test_without_parallel_calls_only_the_first_counts() -> None:
    assert calls(parse(xml("ping") + "\n" + xml("ping") + " more", parallel=False)) == [("ping", {})]


def think(text: str, cuts: list[int], **kwargs: Any) -> list[Part]:
    split = ReasoningSplit(**kwargs)
    parts: list[Part] = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += split.feed(text[begin:end])
    return joined(parts + split.flush())


@pytest.mark.parametrize(
    ("text", "open", "expected"),
    [
        ("a thought\n</think>\n\nThe answer", True, [Reasoning("a thought"), Text("The answer")]),
        ("\n\n</think>\n\nThe answer", True, [Text("The answer")]),
        ("cut\nshort</thin", True, [Reasoning("cut\nshort</thin")]),
        ("<think>\nhm\n</think>\nyes", False, [Reasoning("hm"), Text("yes")]),
        ("  <thinking> is no tag", False, [Text("  <thinking> is no tag")]),
        ("no <think> here", False, [Text("no <think> here")]),
        ("<thi", False, [Text("<thi")]),
    ],
)
def test_reasoning_is_split_the_same_however_the_text_is_cut(text: str, open: bool, expected: list[Part]) -> None:
    rng = random.Random(text)
    for _ in range(60):
        cuts = sorted(rng.sample(range(1, len(text)), rng.randrange(min(6, len(text) - 1))))
        assert think(text, cuts, open=open, by_token=False) == expected
