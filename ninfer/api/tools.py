"""What a request says about tools, in OpenAI's chat form; other dialects bring theirs into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve, frozen

from ninfer.api.ask import Tools
from ninfer.api.fields import Value, boolean, choice, text
from ninfer.errors import BadRequest

CUSTOM = {  # a tool that takes free text
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


@frozen(kw_only=True)
class Tool:
    """shown: what the template sees."""

    name: str
    schema: Mapping[str, Any]
    shown: Mapping[str, Any]


def tool(name: str, description: str | None, schema: Mapping[str, Any] | None) -> Tool:
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = schema or {"type": "object", "properties": {}}
    return Tool(name=name, schema=schema or {}, shown={"type": "function", "function": function})


def chat_tool(value: Value) -> Tool:
    """{"type": "function", "function": {...}}, or a custom tool."""
    kind = choice("function", "custom")(value["type"])
    body = value[kind]
    name, description = text(body["name"]), body["description"].maybe(text)
    if kind == "custom":
        return tool(name, description, CUSTOM)
    schema = body["parameters"].object() if body["parameters"].given else None
    return Tool(name=name, schema=schema or {}, shown=value.object())


def read_tools(body: Value) -> tuple[tuple[Mapping[str, Any], ...], Tools]:
    """tools, tool_choice and parallel_tool_calls: what the template sees, and what may be called."""
    declared = [chat_tool(t) for t in body["tools"].items()] if body["tools"].given else []
    parallel = body["parallel_tool_calls"].maybe(boolean)
    return chosen(declared, *read_choice(body["tool_choice"]), parallel=parallel is not False, at=body["tool_choice"])


def read_choice(value: Value) -> tuple[str, tuple[str, ...]]:
    """auto, none or required, and the names it is restricted to, if any."""
    if not value.given:
        return "auto", ()
    if isinstance(value.raw, str):
        return choice("auto", "none", "required")(value), ()
    kind = choice("function", "custom", "allowed_tools")(value["type"])
    if kind == "allowed_tools":
        allowed = value["allowed_tools"] if value["allowed_tools"].given else value
        return choice("auto", "required")(allowed["mode"]), tuple(_named(t) for t in allowed["tools"].items())
    return "required", (_named(value),)


def _named(value: Value) -> str:
    """The name in {"type": T, T: {"name"}} or in the flat {"type": T, "name"}."""
    inner = value[text(value["type"])]
    return text((inner if inner.given else value)["name"])


def chosen(
    declared: Iterable[Tool], mode: str, names: tuple[str, ...], *, parallel: bool, at: Value
) -> tuple[tuple[Mapping[str, Any], ...], Tools]:
    """Tools under a choice.   at: the field that an error names."""
    declared = list(declared)
    known = {t.name: t.schema for t in declared}
    if len(known) < len(declared):
        raise BadRequest("two tools have the same name", path="tools")
    for name in names:
        if name not in known:
            raise at.refused(f"there is no tool {name[:60]!r} among tools")
    if mode == "none":
        return (), Tools()
    if mode == "required" and not known:
        raise at.refused("a call is required, but there are no tools")
    found = Tools(schemas={n: known[n] for n in names} if names else known, must=mode == "required", parallel=parallel)
    if found.must and len(names) == 1:
        found = evolve(found, parallel=False)
    return tuple(t.shown for t in declared), found
