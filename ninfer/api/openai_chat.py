"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from ninfer.api.ask import Ask, Head, Prompt
from ninfer.api.common import (
    MAX_LOGPROBS,
    chat,
    output_limit,
    read_idle,
    sampling,
    stops,
    thinking_budget,
    timings,
    usage,
)
from ninfer.api.errors import Dialect
from ninfer.api.fields import Value, boolean, choice, integer, text
from ninfer.api.formats import one_format
from ninfer.api.post_thinking import post_thinking
from ninfer.api.sse import Event
from ninfer.api.told import Finish, Part, Tally, Teller, TokenText
from ninfer.api.tools import read_tools
from ninfer.api.way import Way, way
from ninfer.runtime.request import FinishReason
from ninfer.text.parts import CallArguments, CallBegin, Reasoning, Text


@frozen(kw_only=True)
class View:
    """How the client wants to be told."""

    n: int = 1
    logprobs: bool = False
    include_usage: bool = False
    way: Way = field(factory=Way)


def parse(body: Value, head: Head) -> tuple[Ask, Stream]:
    _refuse_unserved(body)
    shown, tools = read_tools(body)
    prompt = chat(body, shown)
    wants_logprobs = body["logprobs"].maybe(boolean) or False
    top = body["top_logprobs"].maybe(integer(0, MAX_LOGPROBS)) or 0
    if top and not wants_logprobs:
        raise body["top_logprobs"].refused("needs logprobs: true")
    n = body["n"].maybe(integer(1, 128)) or 1
    options = body["stream_options"]
    on_the_way = way(body)
    ask = Ask(
        prompts=(prompt,),
        prompt_path="messages",
        model=body["model"].maybe(text),
        sampling=sampling(body),
        max_tokens=output_limit(body, "max_completion_tokens", "max_tokens"),
        stop=stops(body["stop"]),
        n=n,
        logprobs=top if wants_logprobs else None,
        ignore_eos=body["ignore_eos"].maybe(boolean) or False,
        stream=body["stream"].maybe(boolean) or False,
        timed=on_the_way.any,
        tools=tools,
        thinking_budget=thinking_budget(body),
        graft=body["graft"].maybe(text),
        post_thinking=post_thinking(body),
        format=one_format(body),
    )
    include_usage = bool(options.given and options["include_usage"].maybe(boolean))
    return ask, Stream(head, View(n=n, logprobs=wants_logprobs, include_usage=include_usage, way=on_the_way))


# What is known and not served: field, and what to do instead.
_UNSERVED = {
    "functions": "say it with tools and tool_choice",
    "function_call": "say it with tools and tool_choice",
    "audio": "this model writes text",
    "web_search_options": "this server searches nothing",
    "mm_processor_kwargs": "this model reads text",
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        "say it with response_format, json_schema, regex or grammar",
    ),
}


def _refuse_unserved(body: Value) -> None:
    for name, instead in _UNSERVED.items():
        if body[name].raw:
            raise body[name].unsupported(instead)
    modalities = body["modalities"]
    for one in modalities.items() if modalities.given else ():
        if choice("text", "audio")(one) == "audio":
            raise modalities.unsupported("this model writes text")
    if (body["verbosity"].maybe(choice("low", "medium", "high")) or "medium") != "medium":
        raise body["verbosity"].unsupported("the model's own is the only one; say it in the prompt")
    if body["store"].maybe(boolean):
        raise body["store"].unsupported("only /v1/responses stores")
    read_idle(body, ("prediction", Value.object))


@define
class Stream(Teller):
    """A role chunk, reasoning, content, a finish chunk for each choice; usage; [DONE]."""

    head: Head
    view: View
    dialect: Dialect = Dialect.OPENAI
    tally: Tally = field(init=False)
    _more: Mapping[str, Any] = field(factory=dict)  # members of the events of one part

    def __attrs_post_init__(self) -> None:
        self.tally = Tally(self.view.n, self.view.n)

    def open(self, prompts: Sequence[Prompt]) -> Iterable[Event]:
        for index in range(self.view.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def feed(self, part: Part) -> Iterable[Event]:
        self.tally.add(part)
        self._more = self.view.way.more(part)
        for news in self.view.way.news(part):
            yield self._chunk(part.index, {}, prompt_progress=news)
        records = part.logprobs
        for told in part.told:
            match told:
                case Reasoning(text):
                    yield self._chunk(part.index, {"reasoning_content": text})
                case Text(text):
                    yield self._chunk(part.index, {"content": text}, logprobs=records)
                    records = ()
                case CallBegin(index, id, name):
                    call = {"index": index, "id": id, "type": "function"}
                    call |= {"function": {"name": name, "arguments": ""}}
                    yield self._chunk(part.index, {"tool_calls": [call]})
                case CallArguments(index, json):
                    call = {"index": index, "function": {"arguments": json}}
                    yield self._chunk(part.index, {"tool_calls": [call]})
        if records:  # of tokens whose text is a call's, or cut off
            yield self._chunk(part.index, {"content": ""}, logprobs=records)
        if part.finish is not None:
            last = self.tally.complete and not self.view.include_usage
            yield self._chunk(part.index, {}, finish=part.finish, last=last)

    def close(self) -> Iterable[Event]:
        if self.view.include_usage:
            told = {"usage": usage(self.tally), "timings": timings(self.tally.timings)}
            yield Event({**self._frame("chat.completion.chunk"), "choices": [], **told})
        yield Event("[DONE]")

    def whole(self, prompts: Sequence[Prompt], replies: Sequence[Part]) -> dict[str, Any]:
        for reply in replies:
            self.tally.add(reply)
        slot = self.tally.timings.slot
        return {
            **self._frame("chat.completion"),
            "choices": [self._choice(reply) for reply in replies],
            "usage": usage(self.tally),
            "timings": timings(self.tally.timings),
            **({} if slot is None else {"id_slot": slot}),
        }

    def _choice(self, reply: Part) -> dict[str, Any]:
        calls = reply.calls
        message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if calls:
            message["content"] = reply.text or None
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ]
        return {
            "index": reply.index,
            "message": message,
            "logprobs": self._logprobs(reply.logprobs) if self.view.logprobs else None,
            "finish_reason": _reason(reply.finish),
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: Sequence[TokenText] = (),
        finish: Finish | None = None,
        last: bool = False,
        **members: Any,
    ) -> Event:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            "finish_reason": _reason(finish),
        }
        more: dict[str, Any] = {"usage": None} if self.view.include_usage else {}
        more |= self._more
        if last:
            more["timings"] = timings(self.tally.timings)
        return Event({**self._frame("chat.completion.chunk"), "choices": [choice], **more, **members})

    def _frame(self, object: str) -> dict[str, Any]:
        id = f"chatcmpl-{self.head.id}"
        return {"id": id, "object": object, "created": self.head.created, "model": self.head.model}

    @staticmethod
    def _logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
        return {
            "content": [{**_record(t), "top_logprobs": [_record(o) for o in t.top]} for t in tokens],
            "refusal": None,
        }


def _record(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def _reason(finish: Finish | None) -> str | None:
    if finish is None:
        return None
    return "tool_calls" if finish.called and finish.reason is FinishReason.STOP else finish.reason.value
