"""Chat templates: the model's own Jinja, in a sandbox, as Hugging Face renders it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from attrs import define, field
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ninfer.errors import ArtifactError, BadRequest


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


@define
class ChatTemplate:
    """source: Jinja text. specials: bos_token and the like, by name, as the template may want them."""

    source: str
    specials: Mapping[str, str] = field(factory=dict)
    _template: jinja2.Template = field(init=False)

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

    @staticmethod
    def opens_thinking(prompt: str) -> bool:
        """Whether a rendered prompt ends inside an open <think> block, so that the reply begins with reasoning."""
        return prompt.rfind("<think>") > prompt.rfind("</think>")
