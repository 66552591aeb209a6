"""Which JSON schemas can be kept to. What a grammar would silently ignore is refused instead."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ninfer.errors import BadRequest

# Keywords that the grammar compiler accepts and does not enforce.
IGNORED = (
    *("uniqueItems", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "contains", "propertyNames"),
    *("minContains", "maxContains", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef"),
)
MAX_DEPTH = 64
# Where one of these stands, the compiler reads it alone, and no other constraint beside it.
ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
# Constraints, and the types beside which they are read. Without one of those they would be ignored.
OF_TYPE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), ("integer", "number")),
    "multipleOf": ("integer",),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), ("string",)),
    **dict.fromkeys(("minItems", "maxItems"), ("array",)),
    **dict.fromkeys(("minProperties", "maxProperties", "required"), ("object",)),
}
SHAPES = ("properties", "patternProperties", "additionalProperties", "items", "prefixItems")
FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference"),
    *("uri-template", "json-pointer", "relative-json-pointer"),
)
TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def check_schema(schema: Any, path: str) -> str:
    """The schema's JSON text. Raises BadRequest with the path of the first part that could not be enforced."""
    _walk(schema, path, 0)
    return json.dumps(schema, ensure_ascii=False)


def _walk(schema: Any, path: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _refused(path, "must be a schema: an object, true or false")
    if depth > MAX_DEPTH:
        raise _refused(path, "is nested too deeply")
    for key in IGNORED:
        if schema.get(key) not in (False, None):
            raise _refused(f"{path}.{key}", "cannot be enforced; leave it out")
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        raise _refused(f"{path}.$ref", "must point into the schema itself, as in #/$defs/name")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise _refused(f"{path}.allOf", "cannot be enforced with more than one member; merge them")
    _combined(schema, path)
    _bounded(schema, path)
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        for name, value in _mapping(schema, key, path).items():
            _walk(value, f"{path}.{key}.{name}", depth + 1)
    for key in ("items", "additionalProperties"):
        if key in schema:
            _walk(schema[key], f"{path}.{key}", depth + 1)
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        branches = schema.get(key, [])
        if not isinstance(branches, list):
            raise _refused(f"{path}.{key}", "must be an array of schemas")
        for i, value in enumerate(branches):
            _walk(value, f"{path}.{key}[{i}]", depth + 1)


def _combined(schema: Mapping[str, Any], path: str) -> None:
    """Refuses what stands beside a keyword that is read alone."""
    alone = next((key for key in ALONE if key in schema), None)
    if alone is None:
        return
    for key in (*ALONE, *OF_TYPE, *SHAPES):
        if key in schema and key != alone:
            raise _refused(
                f"{path}.{key}", f"cannot be enforced beside {alone}; put it into the other, or leave it out"
            )
    if "type" not in schema:
        return
    given = schema[alone]
    if alone in ("const", "enum"):
        values = given if alone == "enum" and isinstance(given, list) else [given]
        told = all(any(_is(value, kind) for kind in _types(schema)) for value in values)
    else:
        told = isinstance(given, list) and all(isinstance(b, dict) and b.get("type") == schema["type"] for b in given)
    if not told:
        raise _refused(f"{path}.type", f"is not what {alone} says, and cannot be enforced beside it")


def _bounded(schema: Mapping[str, Any], path: str) -> None:
    """Refuses bounds that would be ignored."""
    types = _types(schema) or (("object",) if "properties" in schema else ())
    for key, wanted in OF_TYPE.items():
        if key in schema and not set(types) & set(wanted):
            raise _refused(f"{path}.{key}", f"is enforced only beside type {' or '.join(wanted)}")
    if "multipleOf" in schema and "number" in types:
        raise _refused(f"{path}.multipleOf", "is enforced only beside type integer")
    if schema.get("format", "date") not in FORMATS:
        raise _refused(f"{path}.format", f"is none of those that can be enforced: {', '.join(FORMATS)}")
    textual = [key for key in ("pattern", "format", "minLength", "maxLength") if key in schema]
    if len(textual) > 1 and textual[0] in ("pattern", "format"):
        raise _refused(f"{path}.{textual[1]}", f"cannot be enforced beside {textual[0]}; say it in a pattern")
    for pattern in _mapping(schema, "patternProperties", path):
        for name in _mapping(schema, "properties", path):
            if _matches(pattern, name):
                raise _refused(f"{path}.patternProperties.{pattern}", f"cannot be enforced for the property {name!r}")


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = schema.get("type")
    return tuple(k for k in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(k, str))


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES.get(kind, ())) or (kind == "integer" and isinstance(value, float) and value % 1 == 0)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True  # who knows


def _mapping(schema: Mapping[str, Any], key: str, path: str) -> Mapping[str, Any]:
    value = schema.get(key, {})
    if not isinstance(value, dict):
        raise _refused(f"{path}.{key}", "must be an object")
    return value


def _refused(path: str, why: str) -> BadRequest:
    return BadRequest(f"{path} {why}", path=path, code="schema_not_supported")
