"""Input items of the Responses API to messages for the template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from ninfer.api.fields import Value, choice, text
from ninfer.api.media import responses_image
from ninfer.api.responses_store import Item

ROLES = ("user", "assistant", "system", "developer")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # part -> its field


def read_items(value: Value) -> tuple[Item, ...]:
    """The request's input, checked: a string is one user message."""
    if isinstance(value.raw, str):
        return ({"type": "message", "role": "user", "content": value.raw},)
    items = tuple(value.items())
    for item in items:
        _READ[_kind(item)](item)
    return tuple(item.object() for item in items)


def messages(items: Iterable[Item], spelled: Callable[[str, str | None], str]) -> list[dict[str, Any]]:
    """Checked items as messages. What an assistant did in a row becomes one turn: reasoning, text, calls.

    spelled: how the model sees a tool's name and namespace.
    """
    found: list[dict[str, Any]] = []
    for item in items:
        value = Value(item)
        kind, told = _kind(value), _READ[_kind(value)](value)
        if (kind == "message" and told["role"] != "assistant") or kind == "function_call_output":
            found.append(told)
        elif kind == "reasoning":
            found.append({"role": "assistant", "content": "", "reasoning_content": told})
        elif kind == "message":
            turn = _turn(found)
            if turn.get("tool_calls"):
                turn = _new_turn(found)
            turn["content"] += told["content"]
        else:
            function = {**told["function"], "name": spelled(told["function"]["name"], value["namespace"].maybe(text))}
            _turn(found).setdefault("tool_calls", []).append({**told, "function": function})
    return found


def _turn(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's turn that is under way."""
    return found[-1] if found and found[-1]["role"] == "assistant" else _new_turn(found)


def _new_turn(found: list[dict[str, Any]]) -> dict[str, Any]:
    found.append({"role": "assistant", "content": ""})
    return found[-1]


def _kind(item: Value) -> str:
    if not item["type"].given and item["role"].given:
        return "message"
    return choice(*_READ)(item["type"])


def _message(item: Value) -> dict[str, Any]:
    role = choice(*ROLES)(item["role"])
    return {"role": "system" if role == "developer" else role, "content": _content(item["content"])}


def _content(value: Value) -> str:
    if isinstance(value.raw, str):
        return value.raw
    if not isinstance(value.raw, list):
        raise value.wrong("a string or an array of parts")
    return "".join(_part(p) for p in value.items())


def _part(value: Value) -> str:
    kind = text(value["type"])
    if kind in ("input_image", "input_video"):
        raise responses_image(value)
    if kind in ("input_file", "input_audio"):
        raise value.refused(f"this model reads text, not {kind}; leave the part out", code="content_not_supported")
    if kind not in TEXTS:
        raise value["type"].refused(f"no part of a message is of type {kind[:40]!r}", code="content_not_supported")
    return text(value[TEXTS[kind]])


def _reasoning(item: Value) -> str:
    parts = list(item["content"].items()) if item["content"].given else []
    if parts:
        return "".join(text(p["text"]) for p in parts)
    return item["encrypted_content"].maybe(text) or ""  # ours: the text as it is


def _function_call(item: Value) -> dict[str, Any]:
    given = item["arguments"]
    try:
        arguments = json.loads(text(given) or "{}")
    except ValueError:
        raise given.wrong("the JSON text of an object") from None
    if not isinstance(arguments, dict):
        raise given.wrong("the JSON text of an object")
    function = {"name": text(item["name"]), "arguments": arguments}
    return {"id": text(item["call_id"]), "type": "function", "function": function}


def _function_call_output(item: Value) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": text(item["call_id"]), "content": _content(item["output"])}


_READ: dict[str, Callable[[Value], Any]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
}
