"""Messages to token ids. Control tokens come from the template alone, never from what users or tools wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ninfer.errors import BadRequest
from ninfer.text.chat import ChatTemplate
from ninfer.text.tokenizer import Tokenizer

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: no text that is meant to be exchanged has them
FOREIGN = ("user", "tool")


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **options: Any,
) -> list[int]:
    """The prompt of a chat. Raises BadRequest as ChatTemplate.render does."""
    specials = re.compile("|".join(map(re.escape, tokenizer.special_texts())) or r"(?!)")
    quoted: list[str] = []

    def quote(found: re.Match[str]) -> str:
        quoted.append(found[0])
        return f"{OPEN}{len(quoted) - 1}{CLOSE}"

    def shielded(message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if message.get("role") not in FOREIGN or not isinstance(content, str) or not specials.search(content):
            return message
        return {**message, "content": specials.sub(quote, content)}

    turns = [shielded(m) for m in messages]
    text = render(template, turns, tools=tools, add_generation_prompt=add_generation_prompt, **options)
    if not quoted:
        return encode(tokenizer, text)
    ids: list[int] = []
    for i, piece in enumerate(re.split(f"{OPEN}([0-9]+){CLOSE}", text)):
        ids += encode(tokenizer, quoted[int(piece)], parse_special=False) if i % 2 else encode(tokenizer, piece)
    return ids


def render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **options: Any,
) -> str:
    """As the template does; one that refuses several system turns at the start gets them as one."""
    options["add_generation_prompt"] = add_generation_prompt
    if template.folds_results:
        messages = _folded(messages)
    try:
        return template.render(messages, tools=tools, **options)
    except BadRequest:
        merged = _one_system_turn(messages)
        if len(merged) == len(messages):
            raise
        return template.render(merged, tools=tools, **options)


def encode(tokenizer: Tokenizer, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
    """As Tokenizer.encode. Raises BadRequest for text that is no Unicode."""
    try:
        return tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
    except (UnicodeEncodeError, TypeError):
        raise BadRequest("the text has half of a surrogate pair in it", code="invalid_prompt") from None


def _folded(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Results of tools in the message that called them: `tool_responses`, each with a name and a response."""
    found: list[dict[str, Any]] = []
    for message in messages:
        calls = found[-1].get("tool_calls") if found else None
        if message.get("role") != "tool" or not calls:
            found.append(dict(message))
            continue
        responses = found[-1].setdefault("tool_responses", [])
        names = {call.get("id"): call["function"]["name"] for call in calls}
        in_order = calls[min(len(responses), len(calls) - 1)]["function"]["name"]
        name = names.get(message.get("tool_call_id"), message.get("name") or in_order)
        responses.append({"name": name, "response": _response(message.get("content"))})
    return list(found)


def _response(content: Any) -> Any:
    """An object where the tool gave one, as JSON."""
    try:
        value = json.loads(content) if isinstance(content, str) else content
    except ValueError:
        return content
    return value if isinstance(value, dict) else content


def _one_system_turn(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    count = next((i for i, m in enumerate(messages) if m.get("role") != "system"), len(messages))
    if count < 2:
        return list(messages)
    text = "\n\n".join(str(m.get("content") or "") for m in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]
