"""What a request says about the format of replies."""

from __future__ import annotations

from ninfer.api.fields import Value, boolean, choice, text
from ninfer.text.grammar import Ebnf, JsonSchema, Regex


def response_format(value: Value, *, flat: bool = False) -> JsonSchema | None:
    """OpenAI's response_format; flat: as in the Responses API, with the schema's fields beside the type."""
    if not value.given:
        return None
    kind = choice("text", "json_object", "json_schema")(value["type"])
    if kind == "text":
        return None
    body = value if flat or not value["json_schema"].given else value["json_schema"]
    if kind == "json_object" and not body["schema"].given:
        return JsonSchema(path=value.path)
    if not (flat or value["schema"].given) and kind == "json_schema":
        value["json_schema"].object()
    body["name"].maybe(text)
    body["description"].maybe(text)
    schema = body["schema"]
    schema.object()
    strict = body["strict"].maybe(boolean)
    return JsonSchema(schema=schema.raw, strict=strict is True, path=schema.path)


def one_format(body: Value) -> JsonSchema | Regex | Ebnf | None:
    """response_format, or one of the fields of llama.cpp."""
    first, second = response_format(body["response_format"]), grammar(body)
    if first is not None and second is not None:
        raise body[second.path].refused("one format at a time")
    return first or second


def grammar(body: Value) -> JsonSchema | Regex | Ebnf | None:
    """llama.cpp's json_schema, whose objects are closed as there, and grammar; and a regex."""
    found: list[JsonSchema | Regex | Ebnf] = []
    if body["json_schema"].given:
        found.append(JsonSchema(schema=body["json_schema"].raw, path=body["json_schema"].path))
    if body["grammar"].given and (rules := text(body["grammar"])):
        found.append(Ebnf(text=rules, path=body["grammar"].path))
    if body["regex"].given:
        found.append(Regex(pattern=text(body["regex"]), path=body["regex"].path))
    if len(found) > 1:
        raise body[found[1].path].refused("one format at a time")
    return found[0] if found else None
