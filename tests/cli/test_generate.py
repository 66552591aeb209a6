from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ninfer.cli import generate, main
from ninfer.cli.generate import GenerateConfig, Session, rates, read_messages, sampling_of, speak
from ninfer.cli.output import Console
from ninfer.config import EngineConfig, SamplingDefaults
from ninfer.errors import UsageError
from ninfer.runtime.request import FinishReason, Sampling, Timings
from tests.runtime.fake_runner import FakeRunner, engine, limits


class Letters:
    """A text side whose tokens are characters; a message is its role's first letter and its text."""

    stop_ids = frozenset({ord(".")})

    def chat(self, messages: Sequence[Any], tools: Sequence[Any]) -> tuple[int, ...]:
        return self.raw("".join(f"{m['role'][0]}{m['content']}|" for m in messages) + "a")

    def raw(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def stream(self) -> Letters:
        return self

    def feed(self, ids: Sequence[int]) -> tuple[str, bool]:
        text = "".join(map(chr, ids))
        return ("", True) if text == "Z" else (text, False)

    def flush(self) -> str:
        return "!"


def echo(history: Sequence[int], seed: int) -> int:
    """Repeats the last user message in capitals, then ends."""
    text = bytes(history).decode()
    prompt, _, said = text.rpartition("|a")
    asked = prompt.rpartition("u")[2].upper()
    return ord((asked + ".")[len(said)])


def session(
    runner: FakeRunner | None = None, max_tokens: int | None = None
) -> tuple[Session, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    e = engine(runner or FakeRunner(token=echo))
    return Session(e, Letters(), Sampling(), max_tokens, out, Console(err)), out, err


def test_an_answer_streams_to_stdout_and_its_rates_to_stderr() -> None:
    s, out, err = session()
    assert s.answer(Letters().chat([{"role": "user", "content": "hi"}], ())) == "HI!"
    assert out.getvalue() == "HI!\n"
    assert "prompt 5 tokens" in err.getvalue() and "reply 3 tokens" in err.getvalue()
    assert err.getvalue().endswith("stop\n")


def test_a_conversation_keeps_its_history_until_reset() -> None:
    seen: list[str] = []

    def watch(history: Sequence[int], seed: int) -> int:
        seen.append(bytes(history).decode())
        return ord(".")

    s, _, err = session(FakeRunner(token=watch))
    s.converse("S", iter(["one", "", "two", "/what", "/reset", "three", "/quit", "four"]))
    assert seen == ["sS|uone|a", "sS|uone|a!|utwo|a", "sS|uthree|a"]
    assert "/reset" in err.getvalue()


def test_a_message_too_long_leaves_the_conversation_as_it_was() -> None:
    s, out, err = session(FakeRunner(limits(context_len=40), token=echo))
    s.converse(None, iter(["hi", "x" * 50, "yo"]))
    assert out.getvalue() == "HI!\nYO!\n"
    assert "context window is 40" in err.getvalue()


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    def interrupt(history: Sequence[int], seed: int) -> int:
        if len(history) == 8:
            signal.raise_signal(signal.SIGINT)
        return ord("x")

    s, out, err = session(FakeRunner(token=interrupt))
    before = signal.getsignal(signal.SIGINT)
    s.converse(None, iter(["hi", "ho"]))
    assert out.getvalue().splitlines()[0] == "xxxx!"
    assert err.getvalue().splitlines()[0].endswith("cancelled")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_stop_string_ends_the_answer() -> None:
    s, _, err = session()
    assert s.answer(Letters().chat([{"role": "user", "content": "abzcd"}], ())) == "AB!"
    assert "reply 4 tokens" in err.getvalue() or "reply 3 tokens" in err.getvalue()
    assert err.getvalue().endswith("stop\n")


def test_rates_count_what_was_computed() -> None:
    t = Timings(
        num_prompt_tokens=30, num_cached_tokens=10, num_generated_tokens=11, queue_s=0.5, prefill_s=2.0, decode_s=4.0
    )
    assert (
        rates(t, FinishReason.LENGTH)
        == "prompt 30 tokens 10.0 tok/s  reply 11 tokens 2.5 tok/s  first token 2.50 s  length"
    )
    assert "- tok/s" in rates(Timings(), None)


def test_flags_win_over_the_models_preset() -> None:
    preset = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "do_sample": True,
        "min_p": None,
    }
    s = sampling_of(SamplingDefaults(top_p=0.5, seed=3), preset)
    assert s == Sampling(temperature=0.6, top_k=20, top_p=0.5, repetition_penalty=1.1, seed=3)
    assert sampling_of(SamplingDefaults(greedy=True), preset).temperature == 0
    assert sampling_of(SamplingDefaults(), {"do_sample": False}).temperature == 0
    assert sampling_of(SamplingDefaults(temperature=0.7), {"do_sample": False}).temperature == 0.7
    assert sampling_of(SamplingDefaults(), {}) == Sampling()


def test_messages_come_with_or_without_tools(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    messages = [{"role": "user", "content": "hi"}]
    path.write_text(json.dumps(messages))
    assert read_messages(path) == (messages, [])
    path.write_text(json.dumps({"messages": messages, "tools": [1]}))
    assert read_messages(path) == (messages, [1])
    for bad in ("[]", "{}", '["hi"]', "nonsense", '{"messages": [{"role": "user"}], "tools": 3}'):
        path.write_text(bad)
        with pytest.raises(UsageError, match="--messages"):
            read_messages(path)


def test_speak_does_what_the_flags_say(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.json"
    path.write_text('[{"role": "user", "content": "file"}]')
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped"))
    model = EngineConfig(model="fake")
    for config, shown in (
        (GenerateConfig(engine=model, prompt="hi"), "HI!\n"),
        (GenerateConfig(engine=model, prompt="hi", max_tokens=1), "H!\n"),
        (GenerateConfig(engine=model, prompt="-"), "PIPED!\n"),
        (GenerateConfig(engine=model, messages=path), "FILE!\n"),
        (GenerateConfig(engine=model, prompt="|uraw|a", raw=True), "RAW!\n"),
    ):
        assert speak(config, engine(FakeRunner(token=echo)), Letters(), {}, Console(io.StringIO())) == 0
        assert capsys.readouterr().out == shown


def test_a_prompt_that_does_not_fit_is_a_usage_error() -> None:
    config = GenerateConfig(engine=EngineConfig(model="fake"), prompt="x" * 2000)
    with pytest.raises(UsageError, match="context window"):
        speak(config, engine(), Letters(), {}, Console(io.StringIO()))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--prompt", "a", "--messages", __file__], "exclude"),
        (["--raw"], "--raw"),
        (["--nonsense"], "--nonsense"),
        (["--messages", __file__], "--messages"),
        (["perplexity"], "FILE"),
        (["perplexity", "no-such-file"], "FILE: 'no-such-file' is not a file that exists"),
        (["perplexity", __file__, "--stride", "0"], "--stride"),
        (["inspect"], "MODEL"),
        (["inspect", "no/such/model"], "no/such/model: no such file"),
        (["calibrate", "--repeat", "1"], "--repeat"),
        (["serve"], "MODEL"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(argv) == 2
    out, err = capsys.readouterr()
    [line] = err.splitlines()
    assert line.startswith("ninfer") and said in line and not out


@pytest.mark.parametrize("argv", [[], *([c] for c in main.COMMANDS)])
def test_every_command_has_a_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main([*argv, "--help"])
    assert stop.value.code == 0 and capsys.readouterr().out.startswith("usage: ninfer")


def test_the_engine_default_of_this_command_is_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[GenerateConfig] = []
    monkeypatch.setattr(generate, "configure_logging", lambda level: None)

    def load_speech(config: GenerateConfig, console: Console, chatty: bool) -> Any:
        configs.append(config)
        return engine(FakeRunner(token=echo)), Letters(), {}

    monkeypatch.setitem(sys.modules, "ninfer.cli.speech", SimpleNamespace(load_speech=load_speech))
    assert generate.body(["--prompt", "hi"]) == 0
    assert (configs[0].engine.model, configs[0].engine.max_concurrency) == ("demo", 1)
