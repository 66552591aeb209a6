"""Which JSON schemas can be kept to. What a grammar would silently ignore is refused instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ninfer.errors import BadRequest

# Keywords that the grammar compiler accepts and does not enforce.
IGNORED = (
    *("uniqueItems", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "contains", "propertyNames"),
    *("minContains", "maxContains", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef"),
)
MAX_DEPTH = 64


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
    if len(schema.get("allOf") or ()) > 1:
        raise _refused(f"{path}.allOf", "cannot be enforced with more than one member; merge them")
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


def _mapping(schema: Mapping[str, Any], key: str, path: str) -> Mapping[str, Any]:
    value = schema.get(key, {})
    if not isinstance(value, dict):
        raise _refused(f"{path}.{key}", "must be an object")
    return value


def _refused(path: str, why: str) -> BadRequest:
    return BadRequest(f"{path} {why}", path=path, code="schema_not_supported")
