"""Schemas of every kind that is served, forced on a small model at temperature 1: each reply validates.

Strings are bounded, and no schema has names of its own making: what may go on for ever does, with a model this small.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import jsonschema
import pytest

from ninfer.text.grammar import available
from tests.clients.conftest import Process

pytestmark = pytest.mark.skipif(not available(), reason="needs xgrammar")

SAMPLES = 20
WORD = {"type": "string", "maxLength": 12}
INT = {"type": "integer", "minimum": -99, "maximum": 99}


FORMATS = jsonschema.FormatChecker()


def _date(text: object) -> bool:
    """RFC 3339 has a year 0000, a leap year, which Python's own check refuses."""
    return not isinstance(text, str) or bool(datetime.date.fromisoformat(text.replace("0000-", "2000-", 1)))


FORMATS.checks("date", raises=ValueError)(_date)


def obj(*, optional: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """A closed object; what is not optional is required."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def array(items: Any, low: int = 0, high: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


TREE = {
    "$defs": {"node": obj(value=INT, children=array({"$ref": "#/$defs/node"}, 0, 2), optional=("children",))},
    "$ref": "#/$defs/node",
}
MANY: Any = {f"field_{i}": {"type": "boolean"} for i in range(12)}
ODD: Any = {"with space": INT, 'quo"te': INT, "Straße": INT, "": INT}
SCHEMAS: dict[str, Any] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer", "minimum": -(10**6), "maximum": 10**6},
    "integer from": {"type": "integer", "minimum": 7, "maximum": 9},
    "integer exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 4},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "number exclusive": {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.5},
    "string bounded": {"type": "string", "minLength": 2, "maxLength": 5},
    "string exact": {"type": "string", "minLength": 4, "maxLength": 4},
    "string pattern": {"type": "string", "pattern": "^[a-z]{2,6}-[0-9]{3}$"},
    "string alternatives": {"type": "string", "pattern": "^(red|green|blue)( light)?$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "enum of strings": {"enum": ["yes", "no", "it depends"]},
    "enum of kinds": {"enum": [1, "one", None, True, [1], {"a": 1}]},
    "const": {"const": {"version": 1, "name": 'Köln "quoted"'}},
    "type union": {"type": ["integer", "null", "boolean"]},
    "any of": {"anyOf": [{"type": "boolean"}, WORD, INT]},
    "one of": {"oneOf": [{"type": "null"}, {"type": "string", "maxLength": 6}]},
    "array": array(INT),
    "array exact": array({"type": "boolean"}, 3, 3),
    "array of arrays": array(array(INT, 1, 2), 1, 3),
    "array of choices": array({"anyOf": [INT, {"type": "null"}]}, 2, 4),
    "tuple": {"type": "array", "prefixItems": [INT, WORD, {"type": "boolean"}], "items": False, "minItems": 3},
    "empty array": {"type": "array", "maxItems": 0},
    "empty object": obj(),
    "object": obj(name=WORD, age=INT),
    "optional members": obj(a=INT, b=WORD, c={"type": "boolean"}, optional=("a", "c")),
    "all optional": obj(a=INT, b=WORD, optional=("a", "b")),
    "many members": obj(**MANY),
    "nested": obj(a=obj(b=obj(c=obj(d=INT)))),
    "odd names": obj(**ODD),
    "list of objects": obj(items=array(obj(id=INT, tag={"enum": ["x", "y"]}), 1, 3)),
    "definitions": {
        "definitions": {"point": obj(x=INT, y=INT)},
        **obj(start={"$ref": "#/definitions/point"}, end={"$ref": "#/definitions/point"}),
    },
    "recursive": TREE,
    "variants": {
        "anyOf": [obj(kind={"const": "circle"}, radius=INT), obj(kind={"const": "box"}, width=INT, height=INT)]
    },
    "single allOf": {"allOf": [obj(a=INT)]},
    "annotated": {"title": "T", "description": "d", "$comment": "c", "examples": [{"a": 1}], **obj(a=INT)},
    "person": obj(
        name=WORD,
        born={"type": "string", "format": "date"},
        married={"type": "boolean"},
        children=array(obj(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}), 0, 2),
        address=obj(street=WORD, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
        note={"anyOf": [WORD, {"type": "null"}]},
        optional=("address", "note"),
    ),
    "deep mixture": obj(
        steps=array(
            {"anyOf": [obj(op={"const": "add"}, args=array(INT, 2, 2)), obj(op={"const": "say"}, text=WORD)]}, 1, 3
        ),
        score={"type": "number", "minimum": 0, "maximum": 10},
        state={"enum": ["open", "closed", None]},
    ),
    "multiple of": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50},
}
CI = 6  # every so many runs without `-m slow`


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if i % CI else []) for i, name in enumerate(SCHEMAS)]
)
def test_every_reply_keeps_to_the_schema(tiny: Process, name: str) -> None:
    schema = SCHEMAS[name]
    body = {
        "messages": [{"role": "user", "content": f"Give a JSON value: {name}."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}},
        "n": SAMPLES,
        "seed": 17,
        "temperature": 1.0,
        "max_tokens": 600,
    }
    response = tiny.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert len(choices) == SAMPLES
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    for choice in choices:
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "stop", text
        validator.validate(json.loads(text))


def test_there_are_forty_and_each_refuses_something() -> None:
    assert len(SCHEMAS) >= 40
    values: list[Any] = [None, True, 0, 1000000007, "a long string that is no date", [[[]]], {"other": 1}]
    for name, schema in SCHEMAS.items():
        validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        assert any(not validator.is_valid(value) for value in values), name
