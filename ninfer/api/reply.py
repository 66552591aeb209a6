"""From the engine's deltas to parts of a reply."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import attrs

from ninfer.api.ask import Prompt, Tools
from ninfer.api.told import Finish, Part, TokenText
from ninfer.runtime.request import Delta, FinishReason, Timings, TokenOut
from ninfer.text.calls import call_parser
from ninfer.text.parts import CallBegin, Text, joined
from ninfer.text.parts import Part as Told
from ninfer.text.reasoning import ReasoningSplit
from ninfer.text.stream import TextStream
from ninfer.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Reply:
    """Turns the deltas of one reply into parts: whole characters, no stop strings, reasoning apart."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        tools: Tools,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.index = index
        self.done = False
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, stop)
        self._close_id = tokenizer.token_to_id(prompt.tags.close)
        by_token = self._close_id is not None and tokenizer.token_to_id(prompt.tags.open) is not None
        self._split = None
        if prompt.thinking is not None:
            self._split = ReasoningSplit(open=prompt.thinking, by_token=by_token, tags=prompt.tags)
        self._tools = call_parser(prompt.style, tools.schemas, parallel=tools.parallel) if tools.schemas else None
        self._called = False
        self._clock = clock
        self._started_s = clock()
        self._first_s: float | None = None
        self._num_tokens = 0
        self._num_reasoning_tokens = 0
        self._num_shown = 0  # characters, reasoning included
        self._records: deque[TokenText] = deque()  # of tokens whose first byte is not shown yet

    def feed(self, delta: Delta) -> Part:
        """What the delta adds. After a stop string the reply is done, though the engine goes on."""
        if delta.num_prefilled_tokens is not None:
            return Part(index=self.index, timings=delta.timings, num_prefilled=delta.num_prefilled_tokens)
        if self._first_s is None:
            self._first_s = self._clock()
        told: list[Told] = []
        used = 0
        for token in delta.tokens:
            used += 1
            self._read(token, told)
            if self._stream.stopped is not None:
                break
        self._num_tokens += used
        self.done = self._stream.stopped is not None or delta.finish is not None
        if self.done:
            self._take(self._stream.flush(), told)
            told += self._split.flush() if self._split is not None else []
        said = tuple(joined(self._calls(told, delta)))
        self._called |= any(isinstance(t, CallBegin) for t in said)
        return Part(
            index=self.index,
            told=said,
            tokens=tuple(t.id for t in delta.tokens[:used]),
            logprobs=tuple(self._shown_records()),
            finish=self._finish(delta) if self.done else None,
            timings=delta.timings,
        )

    def _calls(self, told: Iterable[Told], delta: Delta) -> Iterable[Told]:
        """The same with tool calls read out of the text."""
        if self._tools is None:
            yield from told
            return
        for part in told:
            if isinstance(part, Text):
                yield from self._tools.feed(part.text)
            else:
                yield part
        if self.done:
            yield from self._tools.finish(complete=delta.finish is not FinishReason.LENGTH)

    def _read(self, token: TokenOut, told: list[Told]) -> None:
        split = self._split
        reasoning = split is not None and split.open
        self._num_reasoning_tokens += reasoning
        if split is not None and reasoning and token.id == self._close_id:
            self._take(self._stream.flush(), told)
            told += split.close()
            return
        if not reasoning and token.logprob is not None and not self._tokenizer.is_special(token.id):
            top = tuple(self._record(id, logprob) for id, logprob in token.top)
            at = self._num_shown + self._stream.held_len
            self._records.append(attrs.evolve(self._record(token.id, token.logprob), at=at, top=top))
        self._take(self._stream.feed([token.id])[0], told)
        if not reasoning and split is not None and split.open:  # the reply opened the block itself
            self._records.clear()
            self._num_reasoning_tokens += 1

    def _take(self, text: str, told: list[Told]) -> None:
        self._num_shown += len(text)
        if text:
            told += self._split.feed(text) if self._split is not None else [Text(text)]

    def _record(self, id: int, logprob: float) -> TokenText:
        return TokenText(id=id, data=self._tokenizer.token_bytes(id), logprob=max(logprob, LEAST_LOGPROB))

    def _shown_records(self) -> Iterable[TokenText]:
        while self._records and self._records[0].at < self._num_shown:
            yield self._records.popleft()

    def _finish(self, delta: Delta) -> Finish:
        now = self._clock()
        first = now if self._first_s is None else self._first_s
        timings = delta.timings or Timings(
            num_prompt_tokens=len(self._prompt.ids),
            num_generated_tokens=self._num_tokens,
            prefill_s=first - self._started_s,
            decode_s=now - first,
        )
        stop = self._stream.stopped
        if stop is not None:  # a round of drafts goes on after it, but the reply does not
            timings = attrs.evolve(timings, num_generated_tokens=self._num_tokens)
        length = delta.finish is FinishReason.LENGTH and stop is None
        return Finish(
            reason=FinishReason.LENGTH if length else FinishReason.STOP,
            stop=stop,
            stop_id=delta.stop_id if stop is None else None,
            called=self._called,
            num_reasoning_tokens=self._num_reasoning_tokens,
            timings=timings,
        )
