"""What several dialects read or tell in the same words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ninfer.api.ask import Chat, Plain
from ninfer.api.fields import Value, boolean, choice, integer, number, text
from ninfer.api.media import chat_image
from ninfer.api.told import Tally
from ninfer.runtime.request import Timings

MAX_STOPS = 32
MAX_LOGPROBS = 20
BAN = -1000.0  # a bias that no logit outweighs

NO_STORE = {"cache-control": "no-store"}

_PENALTY = number(-2, 2)
ANY_SEED = integer(-(2**63), 2**64 - 1)
SAMPLING: Mapping[str, Callable[[Value], float]] = {
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": integer(-1),
    "min_p": number(0, 1),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": number(0.01, 10),
    "seed": ANY_SEED,
}
PLAIN_SAMPLING = {**SAMPLING, "temperature": number(-1000, 2), "top_k": integer()}  # of routes without a template


def sampling(body: Value, readers: Mapping[str, Callable[[Value], float]] = SAMPLING) -> dict[str, Any]:
    """The sampling fields that the body names, as fields of Sampling."""
    found: dict[str, Any] = {name: read(body[name]) for name, read in readers.items() if body[name].given}
    if "top_k" in found:
        found["top_k"] = max(0, found["top_k"])  # -1: all, as 0
    if body["logit_bias"].given:
        found["logit_bias"] = logit_bias(body["logit_bias"])
    return found


def plain_sampling(body: Value) -> dict[str, Any]:
    """The same where llama.cpp's meanings hold: a temperature below 0 is greedy, a seed below 0 is drawn."""
    drawn = sampling(body, PLAIN_SAMPLING)
    if "temperature" in drawn:
        drawn["temperature"] = max(0.0, drawn["temperature"])
    if drawn.get("seed", 0) < 0:
        del drawn["seed"]
    return drawn


# Fields that change nothing here are read all the same: what is malformed in them is a mistake of the client's.
IDLE: Mapping[str, Callable[[Value], Any]] = {
    "user": text,
    "safety_identifier": text,
    "service_tier": text,
    "prompt_cache_key": text,
    "prompt_cache_retention": choice("in_memory", "in-memory", "24h"),
    "prompt_cache_options": Value.object,
    "metadata": Value.object,
    "stream_options": Value.object,
}


def read_idle(body: Value, *more: tuple[str, Callable[[Value], Any]]) -> None:
    for name, read in (*IDLE.items(), *more):
        body[name].maybe(read)


def output_limit(body: Value, *names: str) -> int | None:
    """The first of these fields that is given; -1: what fits."""
    found = [body[name].maybe(integer(-1)) for name in names]
    return next((limit for limit in found if limit is not None), None)


def logit_bias(value: Value) -> dict[int, float]:
    """{"id": bias}, or llama.cpp's [[id, bias]], where false forbids a token."""
    if isinstance(value.raw, list):
        pairs = [
            (integer(0)(Value(pair[0], v.path)), Value(pair[1], v.path)) for v in value.items() if (pair := _pair(v))
        ]
    else:
        for id in value.object():
            if not (id.isascii() and id.isdecimal() and len(id) < 10):
                raise value.refused(f"its keys are token ids, and {id[:20]!r} is none")
        pairs = [(int(id), value[id]) for id in value.object()]
    return {id: BAN if bias.raw is False else number(-100, 100)(bias) for id, bias in pairs}


def _pair(value: Value) -> list[Any]:
    if not isinstance(value.raw, list) or len(value.raw) != 2:
        raise value.wrong("a pair of a token id and a bias")
    return value.raw


def stops(value: Value) -> tuple[str, ...]:
    """A string, or an array of strings."""
    if not value.given:
        return ()
    if isinstance(value.raw, str):
        return (_stop(value),)
    found = tuple(_stop(v) for v in value.items())
    if len(found) > MAX_STOPS:
        raise value.refused(f"{len(found)} stop strings, and at most {MAX_STOPS} are served")
    return found


def _stop(value: Value) -> str:
    if value.raw == "":
        raise value.wrong("a string of at least one character")
    return text(value)


def plain(value: Value) -> Plain:
    """A prompt without a template: a string, or an array of token ids and strings."""
    if isinstance(value.raw, str):
        return Plain(pieces=(value.raw,))
    return Plain(pieces=tuple(v.raw if isinstance(v.raw, str) else integer(0, 2**31)(v) for v in value.items()))


def plains(value: Value) -> tuple[Plain, ...]:
    """One prompt, or several: an array with a number in it is one."""
    raw = value.raw
    if isinstance(raw, list) and raw and all(isinstance(item, str | list) for item in raw):
        return tuple(plain(item) for item in value.items())
    if not isinstance(raw, str | list):
        raise value.wrong("a string, or an array of strings or of token ids")
    return (plain(value),)


# Messages

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def chat(body: Value, tools: tuple[Mapping[str, Any], ...] = ()) -> Chat:
    """The messages and template options of a body with OpenAI's messages."""
    messages = tuple(_message(m) for m in body["messages"].items())
    if not messages:
        raise body["messages"].wrong("at least one message")
    return Chat(messages=messages, tools=tools, options=_options(body))


def thinking_budget(body: Value) -> int | None:
    return body["thinking_budget"].maybe(integer(1))


def _message(value: Value) -> dict[str, Any]:
    role = choice(*_ROLES)(value["role"])
    told = "system" if role == "developer" else "tool" if role == "function" else role  # what templates know
    found: dict[str, Any] = {"role": told, "content": _content(value["content"], role)}
    for name in ("reasoning_content", "name", "tool_call_id"):
        if value[name].given:
            found[name] = text(value[name])
    if "reasoning_content" not in found and value["reasoning"].given:
        found["reasoning_content"] = text(value["reasoning"])
    if value["tool_calls"].given and value["tool_calls"].raw:
        found["tool_calls"] = [_tool_call(c) for c in value["tool_calls"].items()]
    return found


def _content(value: Value, role: str) -> str:
    if not value.given and role == "assistant":
        return ""
    if isinstance(value.raw, str):
        return value.raw
    if not isinstance(value.raw, list):
        raise value.wrong("a string or an array of parts")
    return "".join(_part(p, role) for p in value.items())


def _part(value: Value, role: str) -> str:
    kind = text(value["type"])
    if kind == "text":
        return text(value["text"])
    if kind == "refusal" and role == "assistant":
        return text(value["refusal"])
    if kind in ("image_url", "video_url"):
        raise chat_image(value)
    if kind in ("input_audio", "file"):
        raise value.refused(f"this model reads text, not {kind}; leave the part out", code="content_not_supported")
    raise value["type"].refused(f"no part of a message is of type {kind[:20]!r}", code="content_not_supported")


def _tool_call(value: Value) -> dict[str, Any]:
    """Templates want the arguments as an object."""
    function = value["function"]
    given = function["arguments"]
    arguments: Any = given.raw or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise given.wrong("the JSON text of an object") from None
    if not isinstance(arguments, dict):
        raise given.wrong("the JSON text of an object")
    called = {"name": text(function["name"]), "arguments": arguments}
    return {"id": value["id"].maybe(text), "type": "function", "function": called}


_THINKING = ("enable_thinking", "preserve_thinking")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def template_kwargs(body: Value) -> dict[str, Any]:
    """What chat_template_kwargs says to the template."""
    kwargs = body["chat_template_kwargs"]
    if not kwargs.given:
        return {}
    found = {k: v for k, v in kwargs.object().items() if v is not None}
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in found:
            raise kwargs[name].refused("the request sets this itself")
    for name in _THINKING:
        kwargs[name].maybe(boolean)
    kwargs["reasoning_effort"].maybe(text)
    return found


def _agreed(found: Mapping[str, Any], typed: Value, value: Any) -> Any:
    """A field that chat_template_kwargs may say as well."""
    if found.get(typed.path, value) != value:
        raise typed.refused("chat_template_kwargs says something else of it")
    return value


def _options(body: Value) -> dict[str, Any]:
    """chat_template_kwargs, and the typed fields that mean the same."""
    found = template_kwargs(body)
    for name in _THINKING:
        if body[name].given:
            found[name] = _agreed(found, body[name], boolean(body[name]))
    effort = body["reasoning_effort"].maybe(choice("auto", "default", *_EFFORTS))
    if effort in _EFFORTS:
        _agreed(found, body["reasoning_effort"], effort)
    if effort == "none":
        found.setdefault("enable_thinking", False)
    elif effort in _EFFORTS:
        found.setdefault("reasoning_effort", effort)
    return found


# What is told


def usage(tally: Tally) -> dict[str, Any]:
    """OpenAI's usage object."""
    t = tally.timings
    return {
        "prompt_tokens": t.num_prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": t.num_cached_tokens},
        "completion_tokens": t.num_generated_tokens,
        "completion_tokens_details": {"reasoning_tokens": tally.num_reasoning_tokens},
        "total_tokens": t.num_prompt_tokens + t.num_generated_tokens,
    }


def timings(t: Timings) -> dict[str, Any]:
    """llama.cpp's timings object. Decode speed counts the intervals between tokens."""
    prompt_n = t.num_prompt_tokens - t.num_cached_tokens
    intervals = max(0, t.num_generated_tokens - 1)
    found: dict[str, Any] = {
        "cache_n": t.num_cached_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": t.prefill_s * 1e3,
        "prompt_per_token_ms": _ratio(t.prefill_s * 1e3, prompt_n),
        "prompt_per_second": _ratio(prompt_n, t.prefill_s),
        "predicted_n": t.num_generated_tokens,
        "predicted_ms": t.decode_s * 1e3,
        "predicted_per_token_ms": _ratio(t.decode_s * 1e3, intervals),
        "predicted_per_second": _ratio(intervals, t.decode_s),
    }
    if t.num_drafted_tokens:
        found["draft_n"] = t.num_drafted_tokens
        found["draft_n_accepted"] = t.num_accepted_tokens
    return found


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0
