"""Anthropic's messages, system text and tools to messages and tools for the template."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Any

from ninfer.api.fields import Value, boolean, choice, text
from ninfer.api.media import anthropic_image
from ninfer.api.tools import Tool, tool

BILLING = "x-anthropic-billing-header:"  # a line that differs from request to request, and would spoil every prefix
SIGNATURE = "ninfer-reasoning.v1:"  # what follows is the reasoning, base64


def read_messages(body: Value) -> tuple[list[dict[str, Any]], str]:
    """Messages for the template, and how the reply begins: a last assistant message is gone on with."""
    found = [{"role": "system", "content": s} for s in _system(body["system"])]
    _check_results(body["messages"])
    for message in body["messages"].items():
        role = choice("user", "assistant", "system")(message["role"])
        if role == "assistant":
            found.append(_assistant(message["content"]))
        else:
            found += _user(message["content"], role)
    if not any(m["role"] != "system" for m in found):
        raise body["messages"].wrong("at least one message")
    found = _joined(found)
    last = found[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return found, ""
    if not last["content"]:
        raise body["messages"].refused("the last message has nothing to go on with")
    return found[:-1], last["content"]


def _check_results(messages: Value) -> None:
    """Every call of an assistant turn has one result in the user turn after it. A history may begin with results."""
    open_calls: dict[str, Value] = {}
    for message in messages.items():
        content = message["content"]
        blocks = [] if isinstance(content.raw, str) else list(content.items())
        if message["role"].raw == "assistant":
            open_calls |= {text(b["id"]): b for b in blocks if b["type"].raw == "tool_use"}
            continue
        called = bool(open_calls)
        for block in blocks:
            if called and block["type"].raw == "tool_result":
                id = text(block["tool_use_id"])
                if open_calls.pop(id, None) is None:
                    raise block["tool_use_id"].refused(f"the turn before has no call {id[:40]!r} that waits for this")
        for call in open_calls.values():
            raise call.refused("has no tool_result in the turn after it")
    for call in open_calls.values():
        raise call.refused("has no tool_result in the turn after it")


def _system(value: Value) -> Iterable[str]:
    if not value.given:
        return
    blocks = [value.raw] if isinstance(value.raw, str) else [_text(b) for b in value.items()]
    kept = [b for b in blocks if not b.startswith(BILLING)]
    if kept:
        yield "\n\n".join(kept)


def _text(block: Value) -> str:
    kind = text(block["type"])
    if kind == "image":
        raise anthropic_image(block)
    if kind in ("document", "search_result"):
        raise block.refused(f"this model reads text, not a {kind}; leave it out", code="content_not_supported")
    if kind != "text":
        raise block["type"].refused(f"no block of type {kind[:40]!r} is read here", code="content_not_supported")
    block["cache_control"].maybe(Value.object)
    return text(block["text"])


def _texts(value: Value) -> str:
    """A string, or text blocks."""
    if not value.given:
        return ""
    return value.raw if isinstance(value.raw, str) else "".join(_text(b) for b in value.items())


def _user(content: Value, role: str) -> list[dict[str, Any]]:
    """Tool results first: they answer the calls of the turn before."""
    if isinstance(content.raw, str):
        return [{"role": role, "content": content.raw}]
    results: list[dict[str, Any]] = []
    said: list[str] = []
    for block in content.items():
        if block["type"].raw == "tool_result":
            block["is_error"].maybe(boolean)
            id = text(block["tool_use_id"])
            results.append({"role": "tool", "tool_call_id": id, "content": _texts(block["content"])})
        else:
            said.append(_text(block))
    return results + ([{"role": role, "content": "".join(said)}] if said or not results else [])


def _assistant(content: Value) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    if isinstance(content.raw, str):
        return turn | {"content": content.raw}
    for block in content.items():
        kind = choice("text", "thinking", "redacted_thinking", "tool_use")(block["type"])
        if kind == "text":
            turn["content"] += text(block["text"])
        elif kind == "thinking":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _thinking(block)
        elif kind == "tool_use":
            function = {"name": text(block["name"]), "arguments": dict(block["input"].object())}
            call = {"id": text(block["id"]), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
    return turn


def _thinking(block: Value) -> str:
    shown, signature = text(block["thinking"]), block["signature"].maybe(text) or ""
    if shown or not signature.startswith(SIGNATURE):
        return shown
    try:
        return base64.b64decode(signature.removeprefix(SIGNATURE), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise block["signature"].refused("is not one of ours", code="invalid_thinking_signature") from None


def signed(reasoning: str) -> str:
    """A signature that carries the reasoning, for clients that do not want to see it."""
    return SIGNATURE + base64.b64encode(reasoning.encode()).decode()


def _joined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of one role as one turn."""
    found: list[dict[str, Any]] = []
    for message in messages:
        last = found[-1] if found else None
        if last is None or last["role"] != message["role"] or message["role"] == "tool" or "tool_calls" in last:
            found.append(message)
            continue
        between = "\n\n" if last["content"] and message["content"] and message["role"] != "assistant" else ""
        merged = {**last, **message, "content": last["content"] + between + message["content"]}
        thoughts = [m["reasoning_content"] for m in (last, message) if "reasoning_content" in m]
        found[-1] = merged | ({"reasoning_content": "".join(thoughts)} if thoughts else {})
    return found


def read_tools(value: Value) -> list[Tool]:
    return [_tool(t) for t in value.items()] if value.given else []


def _tool(value: Value) -> Tool:
    kind = value["type"].maybe(text) or "custom"
    if kind != "custom":
        raise value["type"].refused(f"tools of type {kind[:40]!r} run on no server here", code="tool_not_supported")
    for name in ("strict", "defer_loading"):
        if value[name].maybe(boolean):
            raise value[name].unsupported("tools are shown as they are; tool_choice makes a call sure")
    value["cache_control"].maybe(Value.object)
    schema = value["input_schema"].object() if value["input_schema"].given else None
    return tool(text(value["name"]), value["description"].maybe(text), schema)


def read_choice(value: Value) -> tuple[str, tuple[str, ...], bool]:
    """auto, none or required; the names it is restricted to; whether calls may be parallel."""
    if not value.given:
        return "auto", (), True
    kind = choice("auto", "any", "tool", "none")(value["type"])
    parallel = value["disable_parallel_tool_use"].maybe(boolean) is not True
    if kind == "tool":
        return "required", (text(value["name"]),), parallel
    return ("required" if kind == "any" else kind), (), parallel
