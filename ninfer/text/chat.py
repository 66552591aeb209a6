"""Chat templates: the model's own Jinja, in a sandbox, as Hugging Face renders it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from attrs import define, field, frozen
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ninfer.errors import ArtifactError, BadRequest

THINK, END_THINK = "<think>", "</think>"
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
MAX_KNOWN_OPTIONS = 256  # clients choose them, and could fill the memory with new ones
PROBE = ({"role": "user", "content": "hi"},)


@frozen
class ThinkTags:
    """open, close: the tokens around reasoning; name: what stands right behind the opening one."""

    open: str
    close: str
    name: str = ""

    @property
    def begin(self) -> str:
        return self.open + self.name


THINK_TAGS = ThinkTags(THINK, END_THINK)
CHANNEL = ThinkTags("<|channel>", "<channel|>", "thought")  # Gemma 4


# What ends a model's turn beside the end tokens of its config, where its template has it: Gemma's end of a turn, and
# the place where the result of a tool comes.
TURN_ENDS = ("<turn|>", "<|tool_response>", "<end_of_turn>")


class CallStyle(Enum):
    XML = "xml"  # <tool_call><function=NAME><parameter=P>value</parameter></function></tool_call>
    JSON = "json"  # <tool_call>{"name": ..., "arguments": ...}</tool_call>
    GEMMA = "gemma"  # <|tool_call>call:NAME{key:<|"|>value<|"|>}<tool_call|>


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


@define(slots=False)
class ChatTemplate:
    """source: Jinja text. specials: bos_token and the like, by name, as the template may want them."""

    source: str
    specials: Mapping[str, str] = field(factory=dict)
    _template: jinja2.Template = field(init=False)
    _opens_thinking: dict[str, bool] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        env.filters["tojson"] = _tojson
        env.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
        try:
            self._template = env.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ArtifactError(f"the chat template does not parse: line {error.lineno}: {error.message}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """The prompt text. Raises BadRequest with what the template says against the messages."""
        try:
            return self._template.render(
                **{**self.specials, **options},
                messages=[dict(m) for m in messages],
                tools=[dict(t) for t in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise BadRequest(f"the model's chat template refuses the messages: {error}", path="messages") from None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise BadRequest(f"the model's chat template fails on the messages: {error}", path="messages") from None

    def opens_thinking(self, **options: Any) -> bool:
        """Whether a prompt rendered with these options ends inside the tags, so that the reply begins with reasoning.

        Found by rendering a message of our own: what clients write must not decide.
        """
        key = json.dumps(options, sort_keys=True, default=str)
        if key not in self._opens_thinking:
            try:
                asked = self.render(PROBE, **options)
                plain = self.render(PROBE, add_generation_prompt=False, **options)
            except BadRequest:
                return False  # the request's own rendering will say why
            opener = asked.removeprefix(plain)
            if len(self._opens_thinking) >= MAX_KNOWN_OPTIONS:
                self._opens_thinking.clear()
            self._opens_thinking[key] = opener.rfind(self.tags.begin) > opener.rfind(self.tags.close)
        return self._opens_thinking[key]

    @cached_property
    def tags(self) -> ThinkTags:
        """How replies mark their reasoning."""
        return CHANNEL if CHANNEL.begin in self.source else THINK_TAGS

    @property
    def knows_thinking(self) -> bool:
        """Whether replies may hold reasoning."""
        return self.tags.begin in self.source

    @cached_property
    def thinks_when_asked(self) -> bool:
        """Whether the model reasons only where the prompt says so (`enable_thinking`), and not otherwise."""
        return self.tags is CHANNEL

    @cached_property
    def folds_results(self) -> bool:
        """Whether results of tools stand in the message that called them, as its `tool_responses`."""
        return "tool_responses" in self.source

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the prompt says which tools there are."""
        tool = {"type": "function", "function": {"name": "probe_name", "description": "", "parameters": {}}}
        try:
            return "probe_name" in self.render(PROBE, tools=[tool])
        except BadRequest:
            return False

    def nearest_effort(self, effort: str) -> str:
        """The reasoning effort that the template accepts and that is nearest to the one asked for; ties go up."""
        if effort not in EFFORTS:
            return effort
        at = EFFORTS.index(effort)
        order = sorted(EFFORTS, key=lambda e: (abs(EFFORTS.index(e) - at), -EFFORTS.index(e)))
        return next((e for e in order if e in self._efforts), effort)

    @cached_property
    def _efforts(self) -> frozenset[str]:
        found = set()
        for effort in EFFORTS:
            try:
                self.render(PROBE, reasoning_effort=effort, enable_thinking=True)
                found.add(effort)
            except BadRequest:
                continue
        return frozenset(found)

    @cached_property
    def call_style(self) -> CallStyle | None:
        """How replies spell tool calls, seen from how the template renders one."""
        call = {"type": "function", "function": {"name": "probe_name", "arguments": {"probe_key": "probe_value"}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text = self.render([*PROBE, turn], add_generation_prompt=False)
        except BadRequest:
            return None
        if "<function=probe_name>" in text:
            return CallStyle.XML
        if "<|tool_call>call:probe_name{" in text:
            return CallStyle.GEMMA
        return CallStyle.JSON if "<tool_call>" in text and "probe_name" in text else None
