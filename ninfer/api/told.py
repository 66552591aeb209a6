"""What is told of replies, and the dialects' side of the telling."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from attrs import define, field, frozen

from ninfer.api.ask import Ask, Head, Prompt
from ninfer.api.errors import Dialect, Rendered
from ninfer.api.fields import Value
from ninfer.api.sse import PING, Event
from ninfer.runtime.request import FinishReason, Timings
from ninfer.text.parts import CallArguments, CallBegin, Reasoning, Text, joined
from ninfer.text.parts import Part as Told


@frozen(kw_only=True)
class TokenText:
    """A token of the answer with its log-probability. at: the character of the answer where it begins."""

    id: int
    data: bytes
    logprob: float
    at: int = 0
    top: tuple[TokenText, ...] = ()

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@frozen(kw_only=True)
class Finish:
    """How a reply ended: at an end token, at the stop string `stop`, or at its limit."""

    reason: FinishReason  # STOP or LENGTH
    stop: str | None = None
    stop_id: int | None = None
    called: bool = False  # tools
    num_reasoning_tokens: int = 0
    timings: Timings = field(factory=Timings)


@frozen(kw_only=True)
class Call:
    """A tool call, whole.   arguments: JSON text."""

    id: str
    name: str
    arguments: str

    def input(self) -> Mapping[str, Any]:
        """The arguments as an object; none if they were cut short."""
        try:
            found = json.loads(self.arguments)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


@frozen(kw_only=True)
class Part:
    """What one delta adds to reply `index`: `told`, in order. All of a reply in one part is a whole reply."""

    index: int
    told: tuple[Told, ...] = ()  # in the order it came; neighbours of one kind are one
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenText, ...] = ()  # of tokens whose first byte is in `text`
    finish: Finish | None = None
    timings: Timings | None = None  # so far, where the request asked for them on the way
    num_prefilled: int | None = None  # prompt tokens so far, in parts that say only that

    @property
    def text(self) -> str:
        return "".join(t.text for t in self.told if isinstance(t, Text))

    @property
    def reasoning(self) -> str:
        return "".join(t.text for t in self.told if isinstance(t, Reasoning))

    @property
    def calls(self) -> list[Call]:
        """Of a whole reply."""
        begun = [t for t in self.told if isinstance(t, CallBegin)]
        written = [t for t in self.told if isinstance(t, CallArguments)]
        return [
            Call(id=b.id, name=b.name, arguments="".join(w.json for w in written if w.index == b.index)) for b in begun
        ]


def merge(parts: Sequence[Part]) -> Part:
    """The parts of one reply as one."""
    return Part(
        index=parts[0].index,
        told=tuple(joined(chain.from_iterable(p.told for p in parts))),
        tokens=tuple(chain.from_iterable(p.tokens for p in parts)),
        logprobs=tuple(chain.from_iterable(p.logprobs for p in parts)),
        finish=parts[-1].finish,
    )


@define
class Tally:
    """Counts over the replies of a request.   num_replies: how many will finish."""

    num_replies: int
    num_per_prompt: int = 1
    num_reasoning_tokens: int = 0
    timings: Timings = field(factory=Timings)
    _num_finished: int = 0

    def add(self, part: Part) -> None:
        if part.finish is None:
            return
        self._num_finished += 1
        self.num_reasoning_tokens += part.finish.num_reasoning_tokens
        one, sum = part.finish.timings, self.timings
        first = part.index % self.num_per_prompt == 0  # a prompt counts once, however many replies it has
        self.timings = Timings(
            num_prompt_tokens=sum.num_prompt_tokens + (one.num_prompt_tokens if first else 0),
            num_cached_tokens=sum.num_cached_tokens + (one.num_cached_tokens if first else 0),
            num_generated_tokens=sum.num_generated_tokens + one.num_generated_tokens,
            queue_s=max(sum.queue_s, one.queue_s),
            prefill_s=max(sum.prefill_s, one.prefill_s),
            decode_s=max(sum.decode_s, one.decode_s),
            num_drafted_tokens=sum.num_drafted_tokens + one.num_drafted_tokens,
            num_accepted_tokens=sum.num_accepted_tokens + one.num_accepted_tokens,
            slot=one.slot if self.num_replies == 1 else None,
        )

    @property
    def complete(self) -> bool:
        return self._num_finished == self.num_replies


class Teller(Protocol):
    """Shapes the replies to one request in a dialect: as events, or as one body.   ping: what is sent in silence.

    late: `open` waits for the engine's first word, and so knows what it had cached.
    """

    dialect: Dialect
    ping: bytes = PING
    late: bool = False

    def open(self, prompts: Sequence[Prompt]) -> Iterable[Event]:
        """Before the first part."""

    def feed(self, part: Part) -> Iterable[Event]: ...

    def close(self) -> Iterable[Event]:
        """After the last part of the last reply."""

    def failed(self, error: Rendered) -> Iterable[Event]:
        """Instead of the rest."""
        return [Event(error.body, name="error" if self.dialect is Dialect.ANTHROPIC else None)]

    def whole(self, prompts: Sequence[Prompt], replies: Sequence[Part]) -> Mapping[str, Any]: ...


Parse = Callable[[Value, Head], tuple[Ask, Teller]]
"""Raises BadRequest."""
