"""Grammars over a byte vocabulary: what they allow, and that speculation can take tokens back."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from ninfer.errors import BadRequest
from ninfer.text.chat import CallStyle
from ninfer.text.grammar import Calls, Ebnf, Format, Grammars, JsonSchema, Regex, available
from ninfer.text.tokenizer import _BYTE_OF, Tokenizer

pytestmark = pytest.mark.skipif(not available(), reason="needs xgrammar")

SPECIAL = ["<|end|>", "<|start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
TOKENS = [*sorted(_BYTE_OF, key=_BYTE_OF.__getitem__), *SPECIAL]
END, START, CLOSE = 256, 257, 259


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    kinds = [1] * 256 + [3, 3, 4, 4, 4, 4]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": TOKENS, "token_type": kinds, "merges": []}
    return Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in keys.items()}, "test")


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, {END})


def allowed(mask: Any) -> set[int]:
    row = np.full((len(TOKENS) + 31) // 32, -1, np.int32)
    mask.fill(row)
    return {i for i in range(len(TOKENS)) if int(row[i >> 5]) >> (i & 31) & 1}


def fits(grammars: Grammars, tokenizer: Tokenizer, format: Format, text: str) -> bool:
    """Whether the text is whole under the format, each token being in the mask before it is accepted."""
    mask = grammars.matcher(format)
    for id in [*tokenizer.encode(text), END]:
        ok = id in allowed(mask)
        assert mask.accept(id) == ok
        if not ok:
            return False
    return True


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}, "required": ["city"]}
XML = Calls(tools={"f": SCHEMA, "ping": {}}, style=CallStyle.XML)
JSON = Calls(tools={"f": SCHEMA, "ping": {}}, style=CallStyle.JSON, parallel=False)
GEMMA = Calls(tools={"f": SCHEMA, "ping": {}}, style=CallStyle.GEMMA)
G_CALL = '<|tool_call>call:f{city:<|"|>Köln "x"<|"|>,n:3}<tool_call|>'
G_PING = "<|tool_call>call:ping{}<tool_call|>"
F_CALL = "<tool_call>\n<function=f>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>"
PING = "<tool_call>\n<function=ping>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        (JsonSchema(), ['{"a": [1]}', "{}"], ["[1]", "x", " {}"]),
        (JsonSchema(schema=SCHEMA), ['{"city": "München – 日本"}'], ['{"n": 1}', '{"city": "a", "x": 1}']),
        (JsonSchema(schema=SCHEMA, strict=False), ['{"city": "a", "x": 1}'], ['{"n": 1}']),
        (Regex(pattern=r"\d{2}:\d{2}"), ["12:30"], ["1:30", "12:300"]),
        (Ebnf(text='root ::= "yes" | "no"'), ["yes", "no"], ["maybe", "yesno"]),
        (XML, [F_CALL.replace("Köln", "x" + " " * 40 + "y")], [F_CALL.replace("<par", " " * 9 + "<par")]),
        (XML, [F_CALL, PING, PING + "\n" + F_CALL], ["hello", F_CALL.replace("=f>", "=g>"), PING + "x"]),
        (
            JSON,
            ['<tool_call>\n{"name": "f", "arguments": {"city": "x"}}\n</tool_call>'],
            ['<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', PING],
        ),
        (
            GEMMA,
            [G_CALL, G_PING, G_PING + G_CALL],
            [
                "hello",
                G_CALL.replace(":f{", ":g{"),
                G_CALL.replace('<|"|>', '"'),
                G_CALL.replace("n:3", "n:x"),
                G_PING + "x",
            ],
        ),
        (evolve(GEMMA, parallel=False), [G_CALL], [G_PING + G_PING, G_CALL.replace('"x"', "<tool_call|>")]),
        (evolve(GEMMA, or_json=JsonSchema()), ["{}", G_PING], ["hello"]),
        (Calls(tools={"ping": {}}, style=CallStyle.XML, or_json=JsonSchema()), ["{}", PING], ["hello"]),
    ],
)
def test_a_format_allows_what_fits_and_nothing_else(
    grammars: Grammars, tokenizer: Tokenizer, format: Format, good: list[str], bad: list[str]
) -> None:
    assert [t for t in good if not fits(grammars, tokenizer, format, t)] == []
    assert [t for t in bad if fits(grammars, tokenizer, format, t)] == []


def test_control_tokens_are_never_allowed_and_the_end_only_when_it_is_whole(grammars: Grammars) -> None:
    mask = grammars.matcher(Regex(pattern="a*b"))
    assert allowed(mask) == {ord("a"), ord("b")}
    assert mask.accept(ord("b")) and allowed(mask) == {END}


def test_the_format_begins_after_reasoning_and_its_line_breaks(grammars: Grammars) -> None:
    mask = grammars.matcher(JsonSchema(), after=CLOSE)
    for id in b"any {text":
        assert len(allowed(mask)) > 256 and mask.accept(id)
    assert mask.accept(CLOSE)
    assert allowed(mask) == {ord("{"), ord("\n")}
    assert mask.accept(ord("\n")) and mask.accept(ord("\n"))
    assert allowed(mask) == {ord("{")}
    assert not mask.accept(ord("\n")) and not mask.accept(ord("x")) and mask.accept(ord("{"))
    assert ord("\n") in allowed(mask) and ord("x") not in allowed(mask)


def test_reasoning_that_the_reply_itself_opens_comes_before_the_format(grammars: Grammars) -> None:
    opener = TOKENS.index("<think>")
    mask = grammars.matcher(JsonSchema(), after=CLOSE, opened_by=opener)
    assert allowed(mask) == {ord("{"), opener}
    assert mask.accept(ord("{")) and opener not in allowed(mask) and not mask.accept(opener)
    mask.rollback(1)
    assert mask.accept(opener) and mask.accept(ord("x")) and len(allowed(mask)) > 256
    assert mask.accept(CLOSE) and allowed(mask) == {ord("{"), ord("\n")}
    mask.rollback(3)
    assert allowed(mask) == {ord("{"), opener}


@pytest.mark.parametrize("seed", range(6))
def test_taking_tokens_back_leads_to_the_same_masks(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    text = "why\n</think>\n\n" + rng.choice([F_CALL, PING + "\n" + PING])
    ids = [*tokenizer.encode(text), END]
    mask = grammars.matcher(XML, after=CLOSE)
    seen: list[set[int]] = []  # the mask before each token
    at = 0
    while at < len(ids):
        row = allowed(mask)
        if at < len(seen):
            assert row == seen[at]
        else:
            seen.append(row)
        assert mask.accept(ids[at])
        at += 1
        if rng.random() < 0.3:
            back = rng.randrange(0, min(at, 7) + 1)
            mask.rollback(back)
            at -= back
            if rng.random() < 0.5:
                assert mask.accept(START) == (at <= ids.index(CLOSE))
                if at <= ids.index(CLOSE):
                    mask.rollback(1)


INT = {"type": "integer"}
TEXT = {"type": "string"}
# Schemas of which the compiler would ignore a part.
UNREAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"anyOf": [TEXT, INT], "minimum": 5}, "s.minimum"),
    ({"properties": {"a": INT}, "anyOf": [{"required": ["a"]}]}, "s.properties"),
    ({"$ref": "#/$defs/x", "minimum": 5, "$defs": {"x": INT}}, "s.minimum"),
    ({"enum": ["abc"], "maxLength": 1}, "s.maxLength"),
    ({"type": "string", "enum": ["a", 1]}, "s.type"),
    ({"type": "string", "const": 5}, "s.type"),
    ({"type": "integer", "anyOf": [TEXT]}, "s.type"),
    ({**TEXT, "pattern": "^[a-z]+$", "maxLength": 2}, "s.maxLength"),
    ({**TEXT, "format": "date", "pattern": "^2"}, "s.format"),
    ({**TEXT, "format": "nope"}, "s.format"),
    ({"type": "number", "multipleOf": 0.5}, "s.multipleOf"),
    ({"minimum": 5}, "s.minimum"),
    ({"items": {"maxLength": 5}}, "s.items.maxLength"),
    ({"required": ["a"]}, "s.required"),
    ({"patternProperties": {"^a": INT}, "properties": {"ab": TEXT}}, "s.patternProperties.^a"),
)


def test_what_is_refused_would_have_been_ignored(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """The compiler, unwatched, lets pass what the schemas forbid. When it no longer does, the refusals can go."""
    for schema, text in (
        ({"anyOf": [TEXT, INT], "minimum": 5}, "1"),
        ({"enum": ["abc"], "maxLength": 1}, '"abc"'),
        ({"type": "string", "const": 5}, "5"),
        ({**TEXT, "pattern": "^[a-z]+$", "maxLength": 2}, '"abcd"'),
        ({"type": "number", "multipleOf": 0.5}, "0.3"),
        ({"minimum": 5}, "1"),
    ):
        args = (json.dumps(schema), True, None, None, True, 8, False)
        native = grammars._matcher(grammars._compiler.compile_json_schema(*args), None, False, -1, None)
        assert all(native.accept_token(id, False) for id in tokenizer.encode(text)), schema


@pytest.mark.parametrize(
    ("format", "path"),
    [
        (JsonSchema(schema={"properties": {"a": {"not": {}}}}, path="s"), "s.properties.a.not"),
        (JsonSchema(schema={"items": {"uniqueItems": True}}, path="s"), "s.items.uniqueItems"),
        (JsonSchema(schema={"$ref": "http://x/y"}, path="s"), "s.$ref"),
        (JsonSchema(schema={"allOf": [{}, {}]}, path="s"), "s.allOf"),
        (JsonSchema(schema={"type": "what"}, path="s"), "s"),
        *((JsonSchema(schema=schema, path="s"), where) for schema, where in UNREAD),
        (JsonSchema(schema=[], path="s"), "s"),
        (Regex(pattern="(", path="r"), "r"),
        (Ebnf(text="root ::= ", path="g"), "g"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_path(grammars: Grammars, format: Format, path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammars.matcher(format)
    assert caught.value.path == path and "/cpp/" not in str(caught.value)


def test_the_library_is_loaded_without_torch() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None);"
        "from ninfer.text.grammar import _core; _core().GrammarMatcher; print('xgrammar.matcher' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
