"""The pipeline that all dialects share: a parsed request, its tokens, the engine's deltas, parts of text.

A dialect parses a body into an `Ask` and makes a `Teller`, which shapes parts. Neither knows the engine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from itertools import chain
from typing import Any, Protocol, cast

import attrs
from attrs import define, field, frozen

from ninfer.api.errors import Dialect, Rendered, failure
from ninfer.api.fields import Value
from ninfer.api.serving import Serving
from ninfer.api.sse import PING, Event, pack
from ninfer.errors import BadRequest, ContextTooLong, EngineUnavailable, NinferError
from ninfer.runtime.request import Delta, FinishReason, GenerateRequest, Timings, TokenMask, TokenOut
from ninfer.runtime.sequence import Failed
from ninfer.text.chat import END_THINK, THINK
from ninfer.text.grammar import Calls, Ebnf, Format, JsonSchema, Regex
from ninfer.text.parts import CallArguments, CallBegin, Reasoning, Text, joined
from ninfer.text.parts import Part as Told
from ninfer.text.prompt import encode, encode_chat
from ninfer.text.reasoning import ReasoningSplit
from ninfer.text.stream import TextStream
from ninfer.text.tokenizer import Tokenizer
from ninfer.text.tools import ToolParser

HEAD_START_S = 0.1  # how long a stream waits for its first delta, so that a quick failure is a plain HTTP error

LEAST_LOGPROB = -9999.0  # JSON has no infinity

# What is asked


@frozen(kw_only=True)
class Chat:
    """Messages for the template. options: what else the template sees, such as enable_thinking.

    prefill: how the reply begins; it goes on from there.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    prefill: str = ""
    options: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class Tools:
    """What replies may call: name -> schema of the parameters.   must: at least one call, and nothing else."""

    schemas: Mapping[str, Mapping[str, Any]] = field(factory=dict)
    must: bool = False
    parallel: bool = True


@frozen(kw_only=True)
class Plain:
    """Text and token ids in order, without a template."""

    pieces: tuple[str | int, ...]


@frozen(kw_only=True)
class Ask:
    """A request of any dialect. n replies to each prompt; reply i belongs to prompt i // n."""

    prompts: tuple[Chat | Plain, ...]
    prompt_path: str  # of the field that holds the prompts
    model: str | None = None
    sampling: Mapping[str, Any] = field(factory=dict)  # fields of Sampling that the request names
    max_tokens: int | None = None  # None: the server's default; below 0: what fits
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False
    stream: bool = False
    tools: Tools = field(factory=Tools)
    format: JsonSchema | Regex | Ebnf | None = None  # what replies are kept to


@frozen(kw_only=True)
class Prompt:
    """A prompt as the model sees it."""

    ids: tuple[int, ...]
    text: str = ""  # of plain prompts
    thinking: bool | None = None  # whether the reply begins inside <think>; None: it knows no <think>


# What is told


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
        )

    @property
    def complete(self) -> bool:
        return self._num_finished == self.num_replies


@frozen(kw_only=True)
class Head:
    """What identifies a response.   id: 16 hex digits; created: unix seconds."""

    id: str
    created: int
    model: str


class Teller(Protocol):
    """Shapes the replies to one request in a dialect: as events, or as one body.   ping: what is sent in silence."""

    dialect: Dialect
    ping: bytes = PING

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


# From ask to tokens


def prepare(serving: Serving, ask: Ask) -> tuple[tuple[Prompt, ...], list[TokenMask | None]]:
    """The prompts, and a mask for each reply. Slow for long prompts and new grammars.

    Raises BadRequest, ContextTooLong or UnknownModel.
    """
    prompts = encode_prompts(serving, ask)
    format = whole_format(serving, ask)
    if format is None:
        return prompts, [None] * (len(prompts) * ask.n)
    close_id = serving.tokenizer.token_to_id(END_THINK)
    afters = [close_id if prompt.thinking else None for prompt in prompts for _ in range(ask.n)]
    masks: list[TokenMask | None] = [serving.grammars.matcher(format, after=after) for after in afters]
    return prompts, masks


def encode_prompts(serving: Serving, ask: Ask) -> tuple[Prompt, ...]:
    """Template and tokenizer applied. Raises as prepare does."""
    serving.check_model(ask.model)
    if ask.n * len(ask.prompts) > serving.max_replies:
        raise BadRequest(
            f"{ask.n * len(ask.prompts)} replies are asked for, and the server runs and queues {serving.max_replies}",
            path="n",
        )
    prompts = tuple(
        _chat(serving, p, ask) if isinstance(p, Chat) else _plain(serving.tokenizer, p, ask.prompt_path)
        for p in ask.prompts
    )
    for prompt in prompts:
        if len(prompt.ids) > serving.client.context_len:
            error = ContextTooLong(len(prompt.ids), serving.client.context_len)
            error.path = ask.prompt_path
            raise error
        if not prompt.ids:
            raise BadRequest(f"{ask.prompt_path}: the prompt is empty", path=ask.prompt_path, code="invalid_prompt")
    return prompts


def whole_format(serving: Serving, ask: Ask) -> Format | None:
    """The request's format and what it says about tools, as one."""
    tools = ask.tools
    if not tools.schemas or not (tools.must or ask.format):
        return ask.format
    style = serving.template().call_style
    if style is None:
        raise BadRequest("the model's chat template shows no spelling of tool calls to keep to", path="tool_choice")
    or_json = None if tools.must else ask.format
    if or_json is not None and not isinstance(or_json, JsonSchema):
        raise BadRequest("with tools, only a JSON format can be kept to", path="tools")
    return Calls(tools=tools.schemas, style=style, parallel=tools.parallel, or_json=or_json)


def template_options(serving: Serving, chat: Chat, *, structured: bool = False) -> dict[str, Any]:
    """structured: thinking is off unless it is asked for."""
    quiet = serving.defaults.no_thinking or (structured and "reasoning_effort" not in chat.options)
    options = ({"enable_thinking": False} if quiet else {}) | dict(chat.options)
    if isinstance(effort := options.get("reasoning_effort"), str):
        options["reasoning_effort"] = serving.template().nearest_effort(effort)
    return options


def _chat(serving: Serving, chat: Chat, ask: Ask) -> Prompt:
    template = serving.template()
    options = template_options(serving, chat, structured=ask.format is not None)
    if chat.tools and not template.takes_tools:
        raise BadRequest("the model's chat template has no place for tools", path="tools", code="tools_not_supported")
    messages = in_call_order(chat.messages)
    if isinstance(ask.format, JsonSchema):
        messages = instructed(messages, ask.format)
    ids = encode_chat(template, serving.tokenizer, messages, tools=chat.tools or None, **options)
    thinking = template.opens_thinking(**options) if template.knows_thinking else None
    if chat.prefill:
        if thinking:
            raise BadRequest("a reply that thinks first cannot be begun for it; turn thinking off", path="messages")
        ids += encode(serving.tokenizer, chat.prefill, parse_special=False)
    return Prompt(ids=tuple(ids), thinking=thinking)


def in_call_order(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Tool results in the order of the calls they answer, since templates show no ids."""
    found: list[Mapping[str, Any]] = []
    order: dict[str, int] = {}
    run = 0  # how many results the list ends with
    for message in messages:
        found.append(message)
        if message["role"] != "tool":
            order = {str(call["id"]): i for i, call in enumerate(message.get("tool_calls", ()))}
            run = 0
            continue
        run += 1
        if order:
            found[-run:] = sorted(found[-run:], key=lambda m: order.get(str(m.get("tool_call_id")), len(order)))
    return found


def instructed(messages: Sequence[Mapping[str, Any]], format: JsonSchema) -> Sequence[Mapping[str, Any]]:
    """The messages with the format told at their head: masks make a reply valid, knowing of them makes it good."""
    schema = json.dumps(format.schema, ensure_ascii=False)
    text = f"Answer with JSON alone, without any text around it. It must follow this JSON schema:\n{schema}"
    first = messages[0]
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]


def _plain(tokenizer: Tokenizer, plain: Plain, path: str) -> Prompt:
    ids: list[int] = []
    for i, piece in enumerate(plain.pieces):
        if isinstance(piece, str):
            ids += encode(tokenizer, piece, add_special=i == 0)
        elif 0 <= piece < tokenizer.vocab_size:
            ids.append(piece)
        else:
            raise BadRequest(f"{path}: token {piece} is not one of the model's {tokenizer.vocab_size}", path=path)
    whole = plain.pieces[0] if len(plain.pieces) == 1 else None
    return Prompt(text=whole if isinstance(whole, str) else tokenizer.decode(ids), ids=tuple(ids))


# From deltas to parts


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
        self._close_id = tokenizer.token_to_id(END_THINK)
        by_token = self._close_id is not None and tokenizer.token_to_id(THINK) is not None
        self._split = None if prompt.thinking is None else ReasoningSplit(open=prompt.thinking, by_token=by_token)
        self._tools = ToolParser(tools.schemas, parallel=tools.parallel) if tools.schemas else None
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
        length = delta.finish is FinishReason.LENGTH and stop is None
        return Finish(
            reason=FinishReason.LENGTH if length else FinishReason.STOP,
            stop=stop,
            stop_id=delta.stop_id if stop is None else None,
            called=self._called,
            num_reasoning_tokens=self._num_reasoning_tokens,
            timings=timings,
        )


class Run:
    """The replies to one request, under way. Closing it cancels those that are not done."""

    def __init__(self, serving: Serving, ask: Ask, id: str) -> None:
        self._serving = serving
        self._ask = ask
        self._id = id
        self.prompts: tuple[Prompt, ...] = ()
        self._replies: list[Reply] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._inbox: deque[tuple[int, Delta | Exception]] = deque()
        self._arrived = asyncio.Event()

    async def start(self) -> None:
        """Tokenise and submit. Raises what the request is refused for, as far as that comes soon."""
        self.prompts, masks = await asyncio.to_thread(prepare, self._serving, self._ask)
        for i in range(len(self.prompts) * self._ask.n):
            prompt = self.prompts[i // self._ask.n]
            reply = Reply(i, prompt, self._serving.tokenizer, self._ask.stop, self._ask.tools, clock=time.monotonic)
            self._replies.append(reply)
            self._tasks.append(asyncio.ensure_future(self._pump(i, self._request(i, prompt, masks[i]))))

    def _request(self, index: int, prompt: Prompt, mask: TokenMask | None) -> GenerateRequest:
        ask = self._ask
        sampling = self._serving.sampling(ask.sampling)
        if sampling.seed is not None and ask.n > 1:
            sampling = attrs.evolve(sampling, seed=sampling.seed + index % ask.n)  # or all n would be the same
        return GenerateRequest(
            id=f"{self._id}-{index}",
            prompt_ids=prompt.ids,
            sampling=sampling,
            max_tokens=self._serving.max_tokens(ask.max_tokens),
            stop_ids=frozenset() if ask.ignore_eos else self._serving.eos_ids,
            logprobs=ask.logprobs,
            mask=mask,
        )

    async def _pump(self, index: int, request: GenerateRequest) -> None:
        stream = cast("AsyncGenerator[Delta, None]", self._serving.client.stream(request))
        try:
            async with aclosing(stream):
                async for delta in stream:
                    self._post(index, delta)
        except Exception as error:
            self._post(index, error)

    def _post(self, index: int, found: Delta | Exception) -> None:
        self._inbox.append((index, found))
        self._arrived.set()

    @property
    def done(self) -> bool:
        return all(reply.done for reply in self._replies)

    async def settle(self, timeout_s: float) -> None:
        """Wait a moment for the first delta. Raises if it is a failure."""
        await self._wait(timeout_s)
        if self._inbox:
            _raise_failure(self._inbox[0][1])

    async def parts(self, timeout_s: float | None = None) -> list[Part]:
        """All that has come, after waiting for some. Empty: nothing came in time. Raises what a reply failed with."""
        await self._wait(timeout_s)
        found = []
        while self._inbox:
            index, delta = self._inbox.popleft()
            reply = self._replies[index]
            if reply.done:
                continue
            _raise_failure(delta)
            assert isinstance(delta, Delta)
            found.append(reply.feed(delta))
            if reply.done:
                self._tasks[index].cancel()  # a no-op unless a stop string ended it
        return found

    async def _wait(self, timeout_s: float | None) -> None:
        if self._inbox:
            return
        self._arrived.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


def _raise_failure(delta: Delta | Exception) -> None:
    if isinstance(delta, Exception):
        raise delta
    if isinstance(delta, Failed):
        raise delta.exception
    if delta.finish is FinishReason.ERROR:
        raise NinferError(delta.error or "the engine failed on this request")
    if delta.finish is FinishReason.CANCELLED:
        raise EngineUnavailable(delta.error or "the request was cancelled")


async def frames(
    serving: Serving, ask: Ask, teller: Teller, id: str, request_id: str = ""
) -> AsyncGenerator[bytes, None]:
    """The replies as server-sent events. Errors are raised before the first frame, and events after it."""
    run = Run(serving, ask, id)
    try:
        await run.start()
        await run.settle(HEAD_START_S)
        yield pack(teller.open(run.prompts))
        try:
            while not run.done:
                parts = await run.parts(serving.ping_s)
                yield pack(e for part in parts for e in teller.feed(part)) if parts else teller.ping
            yield pack(teller.close())
        except Exception as error:
            yield pack(teller.failed(failure(error, teller.dialect, request_id)))
    finally:
        run.close()


async def whole(serving: Serving, ask: Ask, teller: Teller, id: str) -> Mapping[str, Any]:
    """The replies as one body."""
    run = Run(serving, ask, id)
    try:
        await run.start()
        replies: dict[int, list[Part]] = {}
        while not run.done:
            for part in await run.parts():
                replies.setdefault(part.index, []).append(part)
        return teller.whole(run.prompts, [merge(replies[i]) for i in sorted(replies)])
    finally:
        run.close()
