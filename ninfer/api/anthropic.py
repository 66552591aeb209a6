"""Anthropic's Messages API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, frozen
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler

from ninfer.api.anthropic_input import read_choice, read_messages, read_tools, signed
from ninfer.api.ask import Ask, Chat, Head, Prompt
from ninfer.api.common import sampling
from ninfer.api.errors import Dialect
from ninfer.api.fields import Value, boolean, choice, decode, integer, number, text
from ninfer.api.formats import response_format
from ninfer.api.post_thinking import post_thinking
from ninfer.api.prepare import encode_prompts
from ninfer.api.serving import Serving
from ninfer.api.sse import PING, Event, body_of, pack
from ninfer.api.told import Finish, Part, Tally, Teller
from ninfer.api.tools import chosen
from ninfer.runtime.request import FinishReason
from ninfer.text.parts import CallArguments, CallBegin, CallEnd, Reasoning, Text
from ninfer.text.parts import Part as Told

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_STOPS = 32


@frozen(kw_only=True)
class View:
    """hidden: reasoning is told only inside its signature."""

    model: str
    hidden: bool = False


def parse(body: Value, head: Head) -> tuple[Ask, MessageStream]:
    ask, view = read(body, head.model)
    return ask, MessageStream(head, view)


def read(body: Value, served: str) -> tuple[Ask, View]:
    """The model's name is a label: whatever it is, the served model answers."""
    label = body["model"].maybe(text)
    messages, prefill = read_messages(body)
    mode, names, parallel = read_choice(body["tool_choice"])
    declared = read_tools(body["tools"])
    shown, tools = chosen(declared, mode, names, parallel=parallel, at=body["tool_choice"])
    config = body["output_config"]
    _refuse_unserved(body)
    told = config["format"] if config.given and config["format"].given else body["output_format"]
    if told.given:
        choice("json_schema")(told["type"])
    format = response_format(told, flat=True)
    drawn = sampling(body)
    if body["temperature"].given:
        drawn["temperature"] = number(0, 1)(body["temperature"])
    options, hidden, budget = _thinking(body)
    if prefill:
        options.setdefault("enable_thinking", False)
    ask = Ask(
        prompts=(Chat(messages=tuple(messages), tools=shown, prefill=prefill, options=options),),
        prompt_path="messages",
        sampling=drawn,
        max_tokens=body["max_tokens"].maybe(integer(1)),
        stop=_stops(body["stop_sequences"]),
        stream=body["stream"].maybe(boolean) or False,
        tools=tools,
        thinking_budget=budget,
        graft=body["graft"].maybe(text),
        post_thinking=post_thinking(body),
        format=evolve(format, strict=True) if format is not None else None,
    )
    return ask, View(model=label or served, hidden=hidden)


def _refuse_unserved(body: Value) -> None:
    for name in ("mcp_servers", "container"):
        if body[name].raw:
            raise body[name].unsupported("nothing but the model runs here; leave it out")
    if body["metadata"].given:
        body["metadata"]["user_id"].maybe(text)
    for name, read in (("cache_control", Value.object), ("service_tier", text), ("preserve_thinking", boolean)):
        body[name].maybe(read)


def _stops(value: Value) -> tuple[str, ...]:
    found = tuple(text(v) for v in value.items()) if value.given else ()
    if "" in found or len(found) > MAX_STOPS:
        raise value.refused(f"up to {MAX_STOPS} strings, none of them empty")
    return found


def _thinking(body: Value) -> tuple[dict[str, Any], bool, int | None]:
    """What the template is told, whether reasoning stays hidden, and its tokens at most."""
    options: dict[str, Any] = {}
    thinking, config = body["thinking"], body["output_config"]
    hidden, budget = False, None
    if thinking.given:
        kind = choice("enabled", "adaptive", "disabled")(thinking["type"])
        options["enable_thinking"] = kind != "disabled"
        budget = thinking["budget_tokens"].maybe(integer(1)) if kind != "disabled" else None
        hidden = thinking["display"].maybe(choice("summarized", "omitted")) == "omitted"
    effort = config["effort"].maybe(choice(*EFFORTS)) if config.given else None
    if effort == "none":
        options.setdefault("enable_thinking", False)
    elif effort is not None:
        options["reasoning_effort"] = effort
    return options, hidden, budget


@define
class MessageStream(Teller):
    """Blocks one after the other, each begun, filled and stopped; then how the message ended."""

    head: Head
    view: View
    dialect: Dialect = Dialect.ANTHROPIC
    ping: bytes = PING + pack([Event({"type": "ping"}, name="ping")])  # some clients do not count comments as life
    late: bool = True
    tally: Tally = field(init=False, factory=lambda: Tally(1))
    _index: int = field(init=False, default=-1)
    _open: str | None = field(init=False, default=None)  # the type of the block under way
    _thought: str = field(init=False, default="")
    _finish: Finish | None = field(init=False, default=None)

    def open(self, prompts: Sequence[Prompt]) -> Iterable[Event]:
        cached = prompts[0].num_cached
        usage = {
            "input_tokens": len(prompts[0].ids) - cached,
            "cache_creation_input_tokens": None,
            "cache_read_input_tokens": cached,
            "output_tokens": 0,
        }
        yield _event("message_start", message=self._message([], usage))

    def feed(self, part: Part) -> Iterable[Event]:
        self.tally.add(part)
        self._finish = part.finish or self._finish
        for told in part.told:
            yield from self._tell(told)

    def close(self) -> Iterable[Event]:
        yield from self._stop()
        delta = {"stop_reason": self._reason(), "stop_sequence": self._finish.stop if self._finish else None}
        yield _event("message_delta", delta=delta, usage=self._usage())
        yield _event("message_stop")

    def whole(self, prompts: Sequence[Prompt], replies: Sequence[Part]) -> Mapping[str, Any]:
        [reply] = replies
        self.tally.add(reply)
        self._finish = reply.finish
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            shown, signature = self._shown(reply.reasoning)
            content.append({"type": "thinking", "thinking": shown, "signature": signature})
        if reply.text:
            content.append({"type": "text", "text": reply.text})
        for call in reply.calls:
            content.append({"type": "tool_use", "id": _call_id(call.id), "name": call.name, "input": call.input()})
        return self._message(content, self._usage())

    def _tell(self, told: Told) -> Iterable[Event]:
        match told:
            case Reasoning(text):
                yield from self._start("thinking", thinking="", signature="")
                self._thought += text
                if not self.view.hidden:
                    yield self._delta("thinking_delta", thinking=text)
            case Text(text):
                yield from self._start("text", text="")
                yield self._delta("text_delta", text=text)
            case CallBegin(_, id, name):
                yield from self._stop()
                yield from self._start("tool_use", id=_call_id(id), name=name, input={})
            case CallArguments(_, json):
                yield self._delta("input_json_delta", partial_json=json)
            case CallEnd():
                yield from self._stop()

    def _start(self, kind: str, **fields: Any) -> Iterable[Event]:
        """A block of this type, unless one is under way."""
        if self._open == kind:
            return
        yield from self._stop()
        self._open, self._index = kind, self._index + 1
        yield _event("content_block_start", index=self._index, content_block={"type": kind, **fields})

    def _stop(self) -> Iterable[Event]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=self._shown(self._thought)[1])
            self._thought = ""
        yield _event("content_block_stop", index=self._index)
        self._open = None

    def _delta(self, kind: str, **fields: Any) -> Event:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _shown(self, reasoning: str) -> tuple[str, str]:
        """thinking and signature."""
        return ("", signed(reasoning)) if self.view.hidden else (reasoning, f"msg_{self.head.id}")

    def _message(self, content: list[dict[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.head.id}",
            "type": "message",
            "role": "assistant",
            "model": self.view.model,
            "content": content,
            "stop_reason": self._reason(),
            "stop_sequence": self._finish.stop if self._finish else None,
            "usage": usage,
        }

    def _reason(self) -> str | None:
        finish = self._finish
        if finish is None:
            return None
        if finish.stop is not None:
            return "stop_sequence"
        if finish.reason is FinishReason.LENGTH:
            return "max_tokens"
        return "tool_use" if finish.called else "end_turn"

    def _usage(self) -> dict[str, Any]:
        t = self.tally.timings
        return {
            "input_tokens": t.num_prompt_tokens - t.num_cached_tokens,
            "cache_creation_input_tokens": None,
            "cache_read_input_tokens": t.num_cached_tokens,
            "output_tokens": t.num_generated_tokens,
            "output_tokens_details": {"thinking_tokens": self.tally.num_reasoning_tokens},
        }


def _event(kind: str, **fields: Any) -> Event:
    return Event({"type": kind, **fields}, name=kind)


def _call_id(id: str) -> str:
    return "toolu_" + id.removeprefix("call_")


def routes(serving: Serving) -> Sequence[HTTPRouteHandler]:
    @post([f"{v}/messages/count_tokens" for v in ("/v1", "/v1/v1")], status_code=200)
    async def count_tokens(request: Request[Any, Any, Any]) -> dict[str, int]:
        ask, _ = read(decode(await body_of(request)), serving.model_id)
        [prompt] = await asyncio.to_thread(encode_prompts, serving, ask)
        return {"input_tokens": len(prompt.ids)}

    return [count_tokens]
