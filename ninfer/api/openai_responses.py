"""OpenAI's Responses API."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from ninfer.api.ask import Ask, Chat, Head
from ninfer.api.common import MAX_LOGPROBS, read_idle, sampling, template_kwargs, thinking_budget
from ninfer.api.fields import Value, boolean, choice, integer, text
from ninfer.api.formats import response_format
from ninfer.api.post_thinking import post_thinking
from ninfer.api.responses_input import messages, read_items
from ninfer.api.responses_store import Item, ResponseStore
from ninfer.api.responses_stream import ResponseStream, View
from ninfer.api.tools import Tool, chosen, read_choice, tool
from ninfer.errors import BadRequest

log = logging.getLogger(__name__)

READ = frozenset(
    (
        *("model", "input", "instructions", "previous_response_id", "max_output_tokens", "stream", "store"),
        *("metadata", "reasoning", "text", "tools", "tool_choice", "parallel_tool_calls", "truncation", "background"),
        *(
            "top_logprobs",
            "include",
            "chat_template_kwargs",
            "preserve_thinking",
            "thinking_budget",
            "post_thinking",
            "graft",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
        ),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    )
)
IGNORED = frozenset(
    (
        *("client_metadata", "max_tool_calls", "service_tier", "stream_options", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "safety_identifier", "user"),
    )
)
REFUSED = ("conversation", "prompt")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_PAIRS, MAX_KEY, MAX_TEXT = 16, 64, 512  # of metadata
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


@frozen
class Responses:
    """Reads requests in the light of what was answered before."""

    store: ResponseStore

    def parse(self, body: Value, head: Head) -> tuple[Ask, ResponseStream]:
        _refuse(body)
        history = self._history(body["previous_response_id"])
        items = history + (read_items(body["input"]) if body["input"].given else ())
        if not items:
            raise body["input"].wrong("a string or an array of items")
        declared = list(_tools(body["tools"])) if body["tools"].given else []
        names = {shown: (name, space) for shown, name, space, _ in declared}
        spelled = {(name, space): shown for shown, (name, space) in names.items()}
        parallel = body["parallel_tool_calls"].maybe(boolean) is not False
        mode, wanted = read_choice(body["tool_choice"])
        wanted = tuple(spelled.get((n, None), n) for n in wanted)
        shown, tools = chosen((t for *_, t in declared), mode, wanted, parallel=parallel, at=body["tool_choice"])
        instructions = body["instructions"].maybe(text)
        turns = [{"role": "system", "content": instructions}] if instructions else []
        turns += messages(items, lambda name, space: spelled.get((name, space), name))
        include = _include(body["include"])
        top = body["top_logprobs"].maybe(integer(0, MAX_LOGPROBS))
        format = body["text"]["format"] if body["text"].given else Value(None)
        ask = Ask(
            prompts=(Chat(messages=tuple(turns), tools=shown, options=_options(body)),),
            prompt_path="input",
            model=body["model"].maybe(text),
            sampling=sampling(body),
            max_tokens=body["max_output_tokens"].maybe(integer(1)),
            logprobs=(top or 0) if top is not None or LOGPROBS in include else None,
            stream=body["stream"].maybe(boolean) or False,
            tools=tools,
            thinking_budget=thinking_budget(body),
            graft=body["graft"].maybe(text),
            post_thinking=post_thinking(body),
            format=response_format(format, flat=True),
        )
        store = body["store"].maybe(boolean) is not False
        view = View(
            echo=_echo(body, store),
            logprobs=ask.logprobs is not None,
            encrypted=ENCRYPTED in include,
            names=names,
        )
        keep = (lambda response: self.store.put(response, items)) if store else (lambda response: None)
        return ask, ResponseStream(head, view, keep)

    def _history(self, value: Value) -> tuple[Item, ...]:
        """The items of an earlier response and of those before it."""
        id = value.maybe(text)
        if id is None:
            return ()
        record = self.store.get(id)
        if record is None:
            message = f"the response {id[:80]!a} is not stored here; send its items as input"
            raise BadRequest(message, path="previous_response_id", code="previous_response_not_found")
        return record.history


def _refuse(body: Value) -> None:
    for name, value in body.object().items():
        if name in REFUSED and value is not None:
            raise body[name].unsupported("this server does not keep those; send items as input")
        if name not in READ and name not in IGNORED:
            raise BadRequest(f"{name[:80]!a} is no parameter of a response", path=name, code="unknown_parameter")
    if body["background"].maybe(boolean):
        raise body["background"].unsupported("responses are made while the client waits")
    body["truncation"].maybe(choice("disabled"))
    read_idle(body, ("client_metadata", Value.object), ("max_tool_calls", integer(1)))
    metadata = body["metadata"].object() if body["metadata"].given else {}
    if len(metadata) > MAX_PAIRS:
        raise body["metadata"].refused(f"{len(metadata)} pairs, and at most {MAX_PAIRS} are kept")
    for name in metadata:
        if len(name) > MAX_KEY or len(text(body["metadata"][name])) > MAX_TEXT:
            limits = f"a key has up to {MAX_KEY} characters and its text up to {MAX_TEXT}"
            raise body["metadata"][name].refused(limits)


def _include(value: Value) -> tuple[str, ...]:
    return tuple(choice(ENCRYPTED, LOGPROBS)(v) for v in value.items()) if value.given else ()


def _options(body: Value) -> dict[str, Any]:
    found = template_kwargs(body)
    if body["preserve_thinking"].given:
        found["preserve_thinking"] = boolean(body["preserve_thinking"])
    reasoning = body["reasoning"]
    effort = reasoning["effort"].maybe(choice(*EFFORTS)) if reasoning.given else None
    for name in ("summary", "generate_summary") if reasoning.given else ():
        reasoning[name].maybe(choice("auto", "concise", "detailed"))
    if effort == "none":
        found["enable_thinking"] = False
    elif effort is not None:
        found |= {"enable_thinking": True, "reasoning_effort": effort}
    return found


def _tools(value: Value) -> Iterable[tuple[str, str, str | None, Tool]]:
    """As the model sees it, name, namespace, tool. Tools that a server would have to run itself are left out."""
    for one in value.items():
        kind = text(one["type"])
        if kind == "function":
            yield _function(one, None)
        elif kind == "namespace":
            space = text(one["name"])
            for inner in one["tools"].items():
                yield _function(inner, space)
        else:
            log.warning("a request offers a tool of type %.40r, which is not served; the model does not see it", kind)


def _function(value: Value, space: str | None) -> tuple[str, str, str | None, Tool]:
    name = text(value["name"])
    shown = f"{space}__{name}" if space else name
    schema = value["parameters"].object() if value["parameters"].given else None
    return shown, name, space, tool(shown, value["description"].maybe(text), schema)


def _echo(body: Value, store: bool) -> Mapping[str, Any]:
    """The settings that a response repeats."""
    raw = body.object()
    reasoning = raw.get("reasoning") or {}
    format = (raw.get("text") or {}).get("format") or {"type": "text"}
    return {
        "instructions": raw.get("instructions"),
        "max_output_tokens": raw.get("max_output_tokens"),
        "max_tool_calls": raw.get("max_tool_calls"),
        "metadata": raw.get("metadata") or {},
        "parallel_tool_calls": raw.get("parallel_tool_calls") is not False,
        "previous_response_id": raw.get("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "store": store,
        "temperature": raw.get("temperature"),
        "text": {"format": format},
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": raw.get("tools") or [],
        "top_logprobs": raw.get("top_logprobs") or 0,
        "top_p": raw.get("top_p"),
        "truncation": "disabled",
    }
