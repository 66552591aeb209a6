"""A loaded model's text side, for the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ninfer.cli.generate import GenerateConfig, Message, Speech, TextStream
from ninfer.cli.output import Console
from ninfer.errors import UsageError
from ninfer.runtime.engine import Engine
from ninfer.runtime.load import Loaded, load
from ninfer.text.stream import TextStream as text_stream


class LoadedSpeech:
    def __init__(self, loaded: Loaded, config: GenerateConfig) -> None:
        if loaded.tokenizer is None:
            raise UsageError(f"{config.engine.model} has no tokenizer")
        if loaded.chat_template is None and not config.raw:
            raise UsageError(
                f"{config.engine.model} has no chat template; give --chat-template, or --raw with --prompt"
            )
        self.stop_ids = loaded.eos_ids
        self._tokenizer = loaded.tokenizer
        self._template = loaded.chat_template
        self._stop = config.stop
        self._thinking = {"enable_thinking": False} if config.defaults.no_thinking else {}

    def chat(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[int, ...]:
        assert self._template is not None
        text = self._template.render(messages, tools=tools or None, **self._thinking)
        return tuple(self._tokenizer.encode(text))

    def raw(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special=True))

    def stream(self) -> TextStream:
        return text_stream(self._tokenizer, self._stop)


def load_speech(config: GenerateConfig, console: Console, chatty: bool) -> tuple[Engine, Speech, Mapping[str, Any]]:
    """The engine (not started: it is driven by hand), the text side and the model's sampling preset."""
    report = console.report if chatty else lambda label, text: None
    loaded = load(config.engine, report, console.progress)
    if config.engine.explain:
        console.line(loaded.explain())
    return (
        Engine(loaded.runner, config.engine, speculation=loaded.speculation),
        LoadedSpeech(loaded, config),
        loaded.generation_config,
    )
