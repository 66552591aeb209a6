"""What is asked, whatever the dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from ninfer.runtime.grafts import Graft
from ninfer.text.chat import THINK_TAGS, CallStyle, ThinkTags
from ninfer.text.grammar import Ebnf, JsonSchema, Regex


@frozen(kw_only=True)
class Head:
    """What identifies a response.   id: 16 hex digits; created: unix seconds."""

    id: str
    created: int
    model: str


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
    timed: bool = False  # timings and progress on the way
    tools: Tools = field(factory=Tools)
    thinking_budget: int | None = None  # tokens after which thinking is ended
    graft: str | None = None  # None: the server's default; "": none
    post_thinking: Mapping[str, Any] | None = None  # fields of Sampling for what comes after it
    format: JsonSchema | Regex | Ebnf | None = None  # what replies are kept to


@frozen(kw_only=True)
class Prompt:
    """A prompt as the model sees it."""

    ids: tuple[int, ...]
    text: str = ""  # of plain prompts
    num_cached: int = 0  # tokens that the engine had from earlier, once it has said so
    graft: Graft | None = None  # its ids come first
    thinking: bool | None = None  # whether the reply begins inside the tags; None: it knows no reasoning
    tags: ThinkTags = THINK_TAGS
    may_think: bool = False  # thinking is asked for, and the reply itself opens it
    style: CallStyle | None = None  # how the model spells tool calls
