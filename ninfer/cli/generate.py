"""ninfer MODEL: one answer, or a conversation. The answer goes to stdout, everything else to stderr."""
# ruff: noqa: RUF009  (flag and group make attrs fields)

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TextIO

from attrs import frozen

from ninfer.cli.output import Console, configure_logging, version
from ninfer.cli.starting import starting
from ninfer.config import EngineConfig, SamplingDefaults, file, flag, group, parse, whole
from ninfer.errors import BadRequest, UsageError
from ninfer.formats.kv import KV_FORMATS
from ninfer.runtime.engine import Engine
from ninfer.runtime.request import Delta, FinishReason, GenerateRequest, Sampling, Timings

DESCRIPTION = """Generate text: one answer with --prompt or --messages, a conversation without.
Also: ninfer serve, ninfer perplexity, ninfer inspect, ninfer calibrate (each with --help)."""
HELP = "/reset forgets the conversation, /quit leaves; Ctrl+C stops an answer"

Message = Mapping[str, Any]


@frozen(kw_only=True)
class GenerateConfig:
    """One sequence at a time on an engine of its own."""

    engine: EngineConfig = group(EngineConfig)
    defaults: SamplingDefaults = group(SamplingDefaults, factory=SamplingDefaults)
    prompt: str | None = flag("the user's message; - reads it from stdin", value="TEXT")
    messages: Path | None = flag('a JSON file: an array of messages, or {"messages", "tools"}', file, value="FILE")
    system: str | None = flag("the system message of --prompt or of the conversation", value="TEXT")
    raw: bool = flag("continue the text of --prompt as it is, without the chat template", default=False)
    max_tokens: int | None = flag("reply tokens (what fits)", whole(1))
    stop: tuple[str, ...] = flag("end the reply before this text; may be repeated", value="TEXT", default=())
    log_level: str = flag(
        "what goes to stderr; info: how the model was loaded",
        choices=("debug", "info", "warning", "error", "critical", "off"),
        default="warning",
    )


class TextStream(Protocol):
    """Tokens of one reply to text, as soon as whole characters are there. ninfer.text.stream has the real one."""

    def feed(self, ids: Sequence[int]) -> tuple[str, bool]:
        """(new text, whether a stop string was met)."""

    def flush(self) -> str: ...


class Speech(Protocol):
    """The text side of a model."""

    stop_ids: frozenset[int]

    def chat(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[int, ...]:
        """The prompt that asks for the next assistant message."""

    def raw(self, text: str) -> tuple[int, ...]: ...

    def stream(self) -> TextStream: ...


class Session:
    """Asks an engine on this thread and prints as it answers."""

    def __init__(
        self, engine: Engine, speech: Speech, sampling: Sampling, max_tokens: int | None, out: TextIO, console: Console
    ) -> None:
        self._engine = engine
        self._speech = speech
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._out = out
        self._console = console
        self._ids = count()

    def answer(self, prompt: tuple[int, ...]) -> str:
        """Stream the reply to a prompt; the rates follow on stderr. Ctrl+C ends it where it is."""
        stream = self._speech.stream()
        deltas: list[Delta] = []
        texts: list[str] = []
        request = GenerateRequest(
            id=str(next(self._ids)),
            prompt_ids=prompt,
            sampling=self._sampling,
            max_tokens=self._max_tokens or self._engine.context_len,
            stop_ids=self._speech.stop_ids,
        )
        self._engine.submit(request, deltas.extend)
        stopped = False
        with _interrupts(lambda: self._engine.cancel(request.id)):
            while not deltas or deltas[-1].finish is None:
                news = len(deltas)
                self._engine.step()
                for delta in deltas[news:]:
                    text, met = stream.feed([token.id for token in delta.tokens])
                    self._print(text, texts)
                    stopped |= met
                if stopped:
                    self._engine.cancel(request.id)
        self._print(stream.flush(), texts)
        print(file=self._out, flush=True)
        last = deltas[-1]
        if last.finish is FinishReason.ERROR:
            self._console.line(f"error: {last.error}")
        if last.timings is not None:
            self._console.line(rates(last.timings, FinishReason.STOP if stopped else last.finish))
        return "".join(texts)

    def _print(self, text: str, texts: list[str]) -> None:
        if text:
            texts.append(text)
            self._out.write(text)
            self._out.flush()

    def converse(self, system: str | None, lines: Iterator[str]) -> None:
        """Answer line after line, each with all that was said before."""
        opening = [{"role": "system", "content": system}] if system else []
        history: list[Message] = list(opening)
        for line in lines:
            match line.strip():
                case "":
                    continue
                case "/quit" | "/exit":
                    return
                case "/reset":
                    history = list(opening)
                    continue
                case command if command.startswith("/"):
                    self._console.line(HELP)
                    continue
            history.append({"role": "user", "content": line})
            try:
                text = self.answer(self._speech.chat(history, ()))
            except BadRequest as error:  # too long, as a rule: what was said before stays
                history.pop()
                self._console.line(f"{error}; /reset forgets the conversation")
                continue
            history.append({"role": "assistant", "content": text})


def rates(t: Timings, finish: FinishReason | None) -> str:
    """`prompt 12 tokens 240.0 tok/s  reply 40 tokens 31.2 tok/s  first token 0.05 s  stop`."""
    computed = t.num_prompt_tokens - t.num_cached_tokens
    drafts = f"drafts kept {t.num_accepted_tokens} of {t.num_drafted_tokens}  " if t.num_drafted_tokens else ""
    return (
        f"prompt {t.num_prompt_tokens} tokens {_rate(computed, t.prefill_s)}  "
        f"reply {t.num_generated_tokens} tokens {_rate(t.num_generated_tokens - 1, t.decode_s)}  "
        f"{drafts}first token {t.queue_s + t.prefill_s:.2f} s  {finish}"
    )


def _rate(num: int, seconds: float) -> str:
    return f"{num / seconds:.1f} tok/s" if num > 0 and seconds > 0 else "- tok/s"


@contextmanager
def _interrupts(first: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl+C inside calls `first`; the next one interrupts as usual, wherever it strikes."""

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        first()

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def sampling_of(defaults: SamplingDefaults, preset: Mapping[str, Any]) -> Sampling:
    """The flags over the model's generation_config."""
    greedy = defaults.greedy or (defaults.temperature is None and preset.get("do_sample") is False)

    def pick(name: str, neutral: float) -> float:
        given = getattr(defaults, name, None)
        found = preset.get(name) if given is None else given
        return neutral if found is None else float(found)

    return Sampling(
        temperature=0.0 if greedy else pick("temperature", 1.0),
        top_k=int(pick("top_k", 0)),
        top_p=pick("top_p", 1.0),
        min_p=pick("min_p", 0.0),
        repetition_penalty=pick("repetition_penalty", 1.0),
        presence_penalty=pick("presence_penalty", 0.0),
        frequency_penalty=pick("frequency_penalty", 0.0),
        seed=defaults.seed,
    )


def read_messages(path: Path) -> tuple[list[Message], list[Any]]:
    """Messages and tools of a file. Raises UsageError."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--messages: {path}: {error}") from None
    if isinstance(data, list):
        data = {"messages": data}
    messages, tools = (data.get("messages"), data.get("tools") or []) if isinstance(data, dict) else (None, [])
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise UsageError(f"--messages: {path} has no array of messages with roles")
    if not isinstance(tools, list):
        raise UsageError(f"--messages: tools of {path} is not an array")
    return messages, tools


def typed_lines(console: Console) -> Iterator[str]:
    """What the user types, until the end of input. Ctrl+C discards a line; a second one in a row leaves."""
    if sys.stdin.isatty():
        console.line(HELP)
        import readline  # noqa: F401  (line editing for input)
    interrupted = False
    while True:
        try:
            if sys.stdin.isatty():
                sys.stderr.write("> ")
                sys.stderr.flush()
            line = input()
            interrupted = False
            yield line
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            console.line("")


def speak(config: GenerateConfig, engine: Engine, speech: Speech, preset: Mapping[str, Any], console: Console) -> int:
    """What the flags ask for, with a loaded model."""
    limit = config.max_tokens or config.defaults.default_max_tokens
    session = Session(engine, speech, sampling_of(config.defaults, preset), limit, sys.stdout, console)
    system: list[Message] = [{"role": "system", "content": config.system}] if config.system else []
    try:
        if config.messages is not None:
            session.answer(speech.chat(*read_messages(config.messages)))
        elif config.prompt is not None:
            text = sys.stdin.read() if config.prompt == "-" else config.prompt
            user = {"role": "user", "content": text}
            session.answer(speech.raw(text) if config.raw else speech.chat([*system, user], ()))
        else:
            session.converse(config.system, typed_lines(console))
    except BadRequest as error:
        raise UsageError(str(error)) from None
    return 1 if engine.stats().failure else 0


def body(argv: Sequence[str]) -> int:
    config = parse(
        GenerateConfig,
        argv,
        prog="ninfer",
        description=DESCRIPTION,
        version=version(),
        choices={"kv_dtype": [f.name for f in KV_FORMATS]},
        defaults={"model": "demo", "max_concurrency": 1},
    )
    if config.prompt is not None and config.messages is not None:
        raise UsageError("--prompt and --messages exclude each other")
    if config.raw and config.prompt is None:
        raise UsageError("--raw needs --prompt")
    if config.messages is not None:
        read_messages(config.messages)
    configure_logging(config.log_level)
    console = Console()
    chatty = config.engine.explain or config.log_level in ("debug", "info")
    with starting(config.engine.device):
        from ninfer.cli.speech import load_speech  # late: a bad flag is told at once

        engine, speech, preset = load_speech(config, console, chatty)
    with engine:
        return speak(config, engine, speech, preset, console)
