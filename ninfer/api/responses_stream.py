"""What the Responses API tells: items, their parts, and the events that build them up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from ninfer.api.ask import Head, Prompt
from ninfer.api.errors import Dialect, Rendered
from ninfer.api.sse import Event
from ninfer.api.told import Finish, Part, Tally, Teller, TokenText
from ninfer.runtime.request import FinishReason
from ninfer.text.parts import CallArguments, CallBegin, CallEnd, Reasoning, Text
from ninfer.text.parts import Part as Told


@frozen(kw_only=True)
class View:
    """echo: the request's settings, as the response repeats them. names: tools as the model sees them."""

    echo: Mapping[str, Any]
    logprobs: bool = False
    encrypted: bool = False  # reasoning also as `encrypted_content`, for clients that store nothing here
    names: Mapping[str, tuple[str, str | None]] = field(factory=dict)  # -> name, namespace


@define
class ResponseStream(Teller):
    """One reply as a response. keep: takes the finished response before its last event is told."""

    head: Head
    view: View
    keep: Callable[[Mapping[str, Any]], None] = lambda response: None
    dialect: Dialect = Dialect.OPENAI
    tally: Tally = field(init=False, factory=lambda: Tally(1))
    _number: int = 0  # of the next event
    _output: list[dict[str, Any]] = field(init=False, factory=list)
    _open: _Item | None = field(init=False, default=None)
    _records: list[TokenText] = field(init=False, factory=list)
    _finish: Finish | None = field(init=False, default=None)

    @property
    def id(self) -> str:
        return f"resp_{self.head.id}"

    def open(self, prompts: Sequence[Prompt]) -> Iterable[Event]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def feed(self, part: Part) -> Iterable[Event]:
        self.tally.add(part)
        self._records += part.logprobs
        for told in part.told:
            yield from self._tell(told)
        self._finish = part.finish or self._finish

    def close(self) -> Iterable[Event]:
        assert self._finish is not None
        whole = self._finish.reason is not FinishReason.LENGTH
        if whole and self._open is None and not self._output:
            yield from self._begin(_Message(self._new_id("msg")))
        yield from self._end("completed" if whole else "incomplete")
        status = "completed" if whole else "incomplete"
        response = self._response(status)
        self.keep(response)
        yield self._event(f"response.{status}", response=response)

    def failed(self, error: Rendered) -> Iterable[Event]:
        detail = error.body["error"]
        response = self._response("failed")
        response["error"] = {"code": detail["code"] or "server_error", "message": detail["message"]}
        yield self._event("response.failed", response=response)

    def whole(self, prompts: Sequence[Prompt], replies: Sequence[Part]) -> Mapping[str, Any]:
        for reply in replies:
            list(self.feed(reply))
        last = list(self.close())[-1].data
        assert isinstance(last, Mapping)
        response: Mapping[str, Any] = last["response"]
        return response

    # Events

    def _tell(self, told: Told) -> Iterable[Event]:
        match told:
            case Reasoning(text):
                if not isinstance(self._open, _Thought):
                    yield from self._begin(_Thought(self._new_id("rs"), self.view.encrypted))
                yield from self._add(text)
            case Text(text):
                if not isinstance(self._open, _Message):
                    yield from self._begin(_Message(self._new_id("msg")))
                yield from self._add(text)
            case CallBegin(_, id, name):
                known, space = self.view.names.get(name, (name, None))
                yield from self._begin(_Called(self._new_id("fc"), id, known, space))
            case CallArguments(_, json):
                yield from self._add(json)
            case CallEnd():
                yield from self._end("completed")

    def _begin(self, item: _Item) -> Iterable[Event]:
        yield from self._end("completed")
        self._open = item
        yield self._event("response.output_item.added", output_index=len(self._output), item=item.shown("in_progress"))
        if item.part("") is not None:
            yield self._at("response.content_part.added", item, content_index=0, part=item.part(""))

    def _add(self, text: str) -> Iterable[Event]:
        item = self._open
        assert item is not None
        item.text += text
        more: dict[str, Any] = {}
        if isinstance(item, _Message):
            told = [_record(r) for r in self._records] if self.view.logprobs else []
            self._records.clear()
            item.logprobs += told
            more["logprobs"] = told
        yield self._at(item.delta, item, **item.indexed, delta=text, **more)

    def _end(self, status: str) -> Iterable[Event]:
        item = self._open
        if item is None:
            return
        yield self._at(item.delta.removesuffix("delta") + "done", item, **item.indexed, **item.done())
        if (part := item.part(item.text)) is not None:
            yield self._at("response.content_part.done", item, content_index=0, part=part)
        shown = item.shown(status)
        yield self._event("response.output_item.done", output_index=len(self._output), item=shown)
        self._output.append(shown)
        self._open = None

    def _at(self, kind: str, item: _Item, **more: Any) -> Event:
        return self._event(kind, item_id=item.id, output_index=len(self._output), **more)

    def _event(self, kind: str, **more: Any) -> Event:
        self._number += 1
        return Event({"type": kind, "sequence_number": self._number - 1, **more}, name=kind)

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self.head.id}{len(self._output):x}"

    def _response(self, status: str) -> dict[str, Any]:
        done = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.head.created,
            "completed_at": self.head.created if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.head.model,
            "output": list(self._output),
            **self.view.echo,
            "usage": self._usage() if done else None,
        }

    def _usage(self) -> dict[str, Any]:
        t = self.tally.timings
        return {
            "input_tokens": t.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": t.num_cached_tokens},
            "output_tokens": t.num_generated_tokens,
            "output_tokens_details": {"reasoning_tokens": self.tally.num_reasoning_tokens},
            "total_tokens": t.num_prompt_tokens + t.num_generated_tokens,
        }


# Items of the output, one under way at a time


@define
class _Thought:
    id: str
    encrypted: bool
    text: str = ""
    delta = "response.reasoning_text.delta"
    indexed: Mapping[str, int] = {"content_index": 0}

    def part(self, text: str) -> dict[str, Any] | None:
        return {"type": "reasoning_text", "text": text}

    def done(self) -> dict[str, Any]:
        return {"text": self.text}

    def shown(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part(self.text)]
        more = {"encrypted_content": self.text} if self.encrypted else {}
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content, **more}


@define
class _Message:
    id: str
    text: str = ""
    logprobs: list[dict[str, Any]] = field(factory=list)
    delta = "response.output_text.delta"
    indexed: Mapping[str, int] = {"content_index": 0}

    def part(self, text: str) -> dict[str, Any] | None:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}

    def done(self) -> dict[str, Any]:
        return {"text": self.text, "logprobs": list(self.logprobs)}

    def shown(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part(self.text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


@define
class _Called:
    id: str
    call_id: str
    name: str
    namespace: str | None
    text: str = ""
    delta = "response.function_call_arguments.delta"
    indexed: Mapping[str, int] = {}

    def part(self, text: str) -> dict[str, Any] | None:
        return None

    def done(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": self.text}

    def shown(self, status: str) -> dict[str, Any]:
        shown = {"id": self.id, "type": "function_call", "status": status, "call_id": self.call_id, "name": self.name}
        more = {"namespace": self.namespace} if self.namespace else {}
        return {**shown, **more, "arguments": self.text}


_Item = _Thought | _Message | _Called


def _record(token: TokenText) -> dict[str, Any]:
    top = [{"token": t.text, "logprob": t.logprob} for t in token.top]
    return {"token": token.text, "logprob": token.logprob, "top_logprobs": top}
