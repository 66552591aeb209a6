"""llama.cpp's own routes: completion, the tokenizer, the template, properties and slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen
from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler

from ninfer.api.ask import Ask, Head, Prompt
from ninfer.api.common import MAX_LOGPROBS, SAMPLING, chat, plain_sampling, plains, stops, timings
from ninfer.api.errors import Dialect
from ninfer.api.fields import Value, boolean, decode, integer, number, text
from ninfer.api.formats import one_format
from ninfer.api.prepare import template_options
from ninfer.api.serving import Serving
from ninfer.api.sse import Event, body_of
from ninfer.api.told import Finish, Part, Tally, Teller, TokenText
from ninfer.api.tools import read_tools
from ninfer.api.way import Way, way
from ninfer.runtime.request import FinishReason
from ninfer.text.prompt import encode, render
from ninfer.text.tokenizer import Tokenizer

# Completion

_NEUTRAL: Mapping[str, float] = {  # fields that are not served, and the value that asks for nothing
    "typical_p": 1,
    "tfs_z": 1,
    "dynatemp_range": 0,
    "mirostat": 0,
    "xtc_probability": 0,
    "dry_multiplier": 0,
    "n_indent": 0,
}
_EMPTY = ("lora",)
_ENDINGS = ("top_n_sigma", "t_max_predict_ms")  # 0 and below: off


_IDLE: Mapping[str, Callable[[Value], Any]] = {  # change nothing here
    "cache_prompt": boolean,
    "post_sampling_probs": boolean,
    "n_keep": integer(),
    "min_keep": integer(),
    "id_slot": integer(-1),
    "repeat_last_n": integer(-1),
}


@frozen(kw_only=True)
class View:
    """How the client wants to be told."""

    logprobs: bool = False
    return_tokens: bool = False
    response_fields: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(factory=dict)
    way: Way = field(factory=Way)


def parse(body: Value, head: Head) -> tuple[Ask, Stream]:
    prompts = plains(body["prompt"])
    if len(prompts) > 1:
        raise body["prompt"].refused("one prompt at a time is served here", code="multiple_prompts_not_supported")
    _refuse_unserved(body)
    drawn = plain_sampling(body)
    penalty = body["repeat_penalty"]
    if penalty.given:
        drawn["repetition_penalty"] = SAMPLING["repetition_penalty"](penalty)
    limits = [body[name].maybe(integer()) for name in ("n_predict", "max_tokens")]
    num_probs = body["n_probs"].maybe(integer(0, MAX_LOGPROBS)) or 0
    fields = body["response_fields"]
    on_the_way = way(body)
    ask = Ask(
        prompts=prompts,
        prompt_path="prompt",
        model=body["model"].maybe(text),
        sampling=drawn,
        max_tokens=limits[0] if limits[0] is not None else limits[1],
        stop=stops(body["stop"]),
        logprobs=num_probs or None,
        ignore_eos=body["ignore_eos"].maybe(boolean) or False,
        stream=body["stream"].maybe(boolean) or False,
        timed=on_the_way.any,
        format=one_format(body),
    )
    settings = {k: v for k, v in drawn.items() if k != "logit_bias"}
    view = View(
        logprobs=num_probs > 0,
        return_tokens=body["return_tokens"].maybe(boolean) or False,
        response_fields=tuple(map(text, fields.items())) if fields.given else (),
        settings={"n_predict": ask.max_tokens, "stop": list(ask.stop), "stream": ask.stream, **settings},
        way=on_the_way,
    )
    return ask, Stream(head, view)


def _refuse_unserved(body: Value) -> None:
    for name, neutral in _NEUTRAL.items():
        if body[name].given and number()(body[name]) != neutral:
            raise body[name].unsupported(f"only {neutral:g} is served")
    for name in _ENDINGS:
        if body[name].given and number()(body[name]) > 0:
            raise body[name].unsupported("only 0 is served")
    for name in _EMPTY:
        if body[name].raw:
            raise body[name].unsupported("this server generates without it; leave it out")
    for name, read in _IDLE.items():
        body[name].maybe(read)


@define
class Stream(Teller):
    """Events with text; the last one says everything else. No [DONE]."""

    head: Head
    view: View
    dialect: Dialect = Dialect.OPENAI
    tally: Tally = field(factory=lambda: Tally(1))
    _prompt: Prompt = field(factory=lambda: Prompt(ids=()))
    _tokens: list[int] = field(factory=list)
    _new_line: bool = False

    def open(self, prompts: Sequence[Prompt]) -> Iterable[Event]:
        (self._prompt,) = prompts
        return ()

    def feed(self, part: Part) -> Iterable[Event]:
        self.tally.add(part)
        self._tokens += part.tokens
        self._new_line |= "\n" in part.text
        told: dict[str, Any] = {
            "index": 0,
            "content": part.text,
            "tokens": list(part.tokens),
            "stop": False,
            "tokens_predicted": len(self._tokens),
            "tokens_evaluated": len(self._prompt.ids),
            **self.view.way.more(part),
        }
        for news in self.view.way.news(part):
            yield Event(told | {"content": "", "tokens": [], "tokens_predicted": 0, "prompt_progress": news})
        if part.text or part.logprobs:
            yield Event(told | self._probabilities(part.logprobs))
        if part.finish is not None:
            yield Event(self._last("", part.finish, ()))

    def close(self) -> Iterable[Event]:
        return ()

    def whole(self, prompts: Sequence[Prompt], replies: Sequence[Part]) -> Mapping[str, Any]:
        (self._prompt,), (reply,) = prompts, replies
        self.tally.add(reply)
        self._tokens = list(reply.tokens)
        self._new_line = "\n" in reply.text
        assert reply.finish is not None
        return self._last(reply.text, reply.finish, reply.logprobs)

    def _last(self, content: str, finish: Finish, logprobs: Sequence[TokenText]) -> dict[str, Any]:
        t = self.tally.timings
        told = {
            "index": 0,
            "content": content,
            "tokens": self._tokens if self.view.return_tokens else [],
            "stop": True,
            "stop_type": _stop_type(finish),
            "stopping_word": finish.stop or "",
            "tokens_predicted": t.num_generated_tokens,
            "tokens_evaluated": t.num_prompt_tokens,
            "tokens_cached": t.num_cached_tokens,
            "prompt": self._prompt.text,
            "generation_settings": dict(self.view.settings),
            "has_new_line": self._new_line,
            "truncated": False,
            "model": self.head.model,
            "id_slot": -1 if t.slot is None else t.slot,
            "timings": timings(t),
            **self._probabilities(logprobs),
        }
        return _selected(told, self.view.response_fields)

    def _probabilities(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        if not (self.view.logprobs and tokens):
            return {}
        return {
            "completion_probabilities": [{**_record(t), "top_logprobs": [_record(o) for o in t.top]} for t in tokens]
        }


def _record(token: TokenText) -> dict[str, Any]:
    return {"id": token.id, "token": token.text, "bytes": list(token.data), "logprob": token.logprob}


def _stop_type(finish: Finish) -> str:
    if finish.reason is FinishReason.LENGTH:
        return "limit"
    return "eos" if finish.stop is None else "word"


def _selected(told: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The fields asked for, each under the path that was asked: a/b is member b of a."""
    if not fields:
        return told
    found = {}
    for path in fields:
        value: Any = told
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found


# The rest


def routes(serving: Serving) -> tuple[HTTPRouteHandler, ...]:
    tokenizer = serving.tokenizer

    @post("/tokenize", status_code=200)
    async def tokenize(request: Request[Any, Any, Any]) -> dict[str, Any]:
        body = decode(await body_of(request))
        special = body["parse_special"].maybe(boolean)
        ids = await asyncio.to_thread(
            encode,
            tokenizer,
            text(body["content"]),
            add_special=body["add_special"].maybe(boolean) or False,
            parse_special=special is not False,
        )
        if body["with_pieces"].maybe(boolean):
            return {"tokens": [{"id": i, "piece": _piece(tokenizer, i)} for i in ids]}
        return {"tokens": ids}

    @post("/detokenize", status_code=200)
    async def detokenize(request: Request[Any, Any, Any]) -> dict[str, Any]:
        body = decode(await body_of(request))
        known = integer(0, tokenizer.vocab_size - 1)
        return {"content": tokenizer.decode([known(v) for v in body["tokens"].items()])}

    @post("/apply-template", status_code=200)
    async def apply_template(request: Request[Any, Any, Any]) -> dict[str, Any]:
        body = decode(await body_of(request))
        asked = chat(body, read_tools(body)[0])
        options = template_options(serving, asked)
        template = serving.template()
        prompt = await asyncio.to_thread(lambda: render(template, asked.messages, tools=asked.tools or None, **options))
        return {"prompt": prompt}

    @get("/props", sync_to_thread=False)
    def props() -> dict[str, Any]:
        return properties(serving)

    return tokenize, detokenize, apply_template, props


def properties(serving: Serving) -> dict[str, Any]:
    drawn = serving.sampling({})
    limit = serving.defaults.default_max_tokens
    params = {
        "n_predict": -1 if limit is None else limit,
        "max_tokens": -1 if limit is None else limit,
        "temperature": drawn.temperature,
        "top_k": drawn.top_k,
        "top_p": drawn.top_p,
        "min_p": drawn.min_p,
        "presence_penalty": drawn.presence_penalty,
        "frequency_penalty": drawn.frequency_penalty,
        "repeat_penalty": drawn.repetition_penalty,
        "seed": -1 if drawn.seed is None else drawn.seed,
    }
    return {
        "default_generation_settings": {"n_ctx": serving.client.context_len, "params": params},
        "total_slots": serving.client.stats().max_concurrency,
        "model_alias": serving.model_id,
        "model_path": serving.model_id,
        "modalities": {"vision": False, "audio": False},
        "chat_template": serving.chat_template.source if serving.chat_template is not None else "",
        "endpoint_slots": True,
        "endpoint_props": True,
        "endpoint_metrics": True,
        "cors_proxy_enabled": False,
    }


def _piece(tokenizer: Tokenizer, id: int) -> str | list[int]:
    """A token's text, or its bytes where they are no text by themselves."""
    data = tokenizer.token_bytes(id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
