"""OpenAI's legacy completions: plain text in, plain text out, no template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from ninfer.api.ask import Ask, Head, Prompt
from ninfer.api.common import MAX_LOGPROBS, output_limit, plain_sampling, plains, read_idle, stops, timings, usage
from ninfer.api.errors import Dialect
from ninfer.api.fields import Value, boolean, integer, text
from ninfer.api.formats import one_format
from ninfer.api.sse import Event
from ninfer.api.told import Finish, Part, Tally, Teller, TokenText
from ninfer.api.way import Way, way


@frozen(kw_only=True)
class View:
    """How the client wants to be told."""

    num_prompts: int = 1
    n: int = 1
    logprobs: bool = False
    echo: bool = False
    include_usage: bool = False
    way: Way = field(factory=Way)


def parse(body: Value, head: Head) -> tuple[Ask, Stream]:
    prompts = plains(body["prompt"])
    n = body["n"].maybe(integer(1, 128)) or 1
    best_of = body["best_of"]
    if (best_of.maybe(integer(1, 128)) or n) != n:
        raise best_of.unsupported("replies are not ranked here; leave it out, or make it equal to n")
    if body["suffix"].maybe(text):
        raise body["suffix"].unsupported("text is only continued here; leave suffix out")
    read_idle(body)
    logprobs = body["logprobs"].maybe(integer(0, MAX_LOGPROBS))
    echo = body["echo"].maybe(boolean) or False
    if echo and logprobs is not None:
        raise body["echo"].refused("log-probabilities of a prompt are not computed; leave echo or logprobs out")
    options = body["stream_options"]
    on_the_way = way(body)
    ask = Ask(
        prompts=prompts,
        prompt_path="prompt",
        model=body["model"].maybe(text),
        sampling=plain_sampling(body),
        max_tokens=output_limit(body, "max_tokens"),
        stop=stops(body["stop"]),
        n=n,
        logprobs=logprobs,
        ignore_eos=body["ignore_eos"].maybe(boolean) or False,
        stream=body["stream"].maybe(boolean) or False,
        timed=on_the_way.any,
        format=one_format(body),
    )
    view = View(
        num_prompts=len(prompts),
        n=n,
        logprobs=logprobs is not None,
        echo=echo,
        include_usage=bool(options.given and options["include_usage"].maybe(boolean)),
        way=on_the_way,
    )
    return ask, Stream(head, view)


@define
class Stream(Teller):
    """The prompts if they are echoed, text, a finish chunk for each choice; usage; [DONE]."""

    head: Head
    view: View
    dialect: Dialect = Dialect.OPENAI
    tally: Tally = field(init=False)
    _more: Mapping[str, Any] = field(factory=dict)  # members of the events of one part

    def __attrs_post_init__(self) -> None:
        self.tally = Tally(self.view.num_prompts * self.view.n, self.view.n)

    def open(self, prompts: Sequence[Prompt]) -> Iterable[Event]:
        if self.view.echo:
            for index in range(len(prompts) * self.view.n):
                yield self._chunk(self._choice(index, prompts[index // self.view.n].text))

    def feed(self, part: Part) -> Iterable[Event]:
        self.tally.add(part)
        self._more = self.view.way.more(part)
        for news in self.view.way.news(part):
            yield self._chunk(self._choice(part.index, ""), prompt_progress=news)
        if part.text or part.logprobs:
            yield self._chunk(self._choice(part.index, part.text, part.logprobs))
        if part.finish is not None:
            last = self.tally.complete and not self.view.include_usage
            yield self._chunk(self._choice(part.index, "", finish=part.finish), last=last)

    def close(self) -> Iterable[Event]:
        if self.view.include_usage:
            yield Event({**self._frame(), "choices": [], **self._totals()})
        yield Event("[DONE]")

    def whole(self, prompts: Sequence[Prompt], replies: Sequence[Part]) -> dict[str, Any]:
        choices = []
        for reply in replies:
            self.tally.add(reply)
            echoed = prompts[reply.index // self.view.n].text if self.view.echo else ""
            choices.append(self._choice(reply.index, echoed + reply.text, reply.logprobs, reply.finish))
        return {**self._frame(), "choices": choices, **self._totals()}

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenText] = (), finish: Finish | None = None
    ) -> dict[str, Any]:
        wanted = self.view.logprobs and (logprobs or finish is None or text)
        return {
            "index": index,
            "text": text,
            "logprobs": _logprobs(logprobs) if wanted else None,
            "finish_reason": None if finish is None else finish.reason.value,
        }

    def _chunk(self, choice: dict[str, Any], *, last: bool = False, **members: Any) -> Event:
        more: dict[str, Any] = {"usage": None} if self.view.include_usage else {}
        more |= self._more
        if last:
            more["timings"] = timings(self.tally.timings)
        return Event({**self._frame(), "choices": [choice], **more, **members})

    def _frame(self) -> dict[str, Any]:
        head = self.head
        return {"id": f"cmpl-{head.id}", "object": "text_completion", "created": head.created, "model": head.model}

    def _totals(self) -> dict[str, Any]:
        return {"usage": usage(self.tally), "timings": timings(self.tally.timings)}


def _logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    return {
        "tokens": [t.text for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [{o.text: o.logprob for o in t.top} for t in tokens],
        "text_offset": [t.at for t in tokens],
    }
