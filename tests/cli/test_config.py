from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from ninfer.config import EngineConfig, SamplingDefaults, ServeConfig, parse
from ninfer.errors import UsageError


def serve(*argv: str, **more: Any) -> ServeConfig:
    return parse(ServeConfig, argv, prog="ninfer-serve", description="", version="1", **more)


def test_no_arguments_are_the_defaults_of_the_classes() -> None:
    assert serve("m") == ServeConfig(engine=EngineConfig(model="m"))
    assert serve("m").engine.max_concurrency == 8
    assert serve("m").port == 8080


def test_both_spellings_and_the_last_value_wins() -> None:
    config = serve("m", "--port=1", "--port", "2", "--temperature=0.5", "--presence-penalty", "-1.5", "--cors")
    assert (config.port, config.defaults.temperature, config.defaults.presence_penalty) == (2, 0.5, -1.5)
    assert config.cors and not config.engine.deterministic


def test_flags_may_stand_before_the_model() -> None:
    assert serve("--threads", "2", "--explain", "m").engine == EngineConfig(model="m", threads=2, explain=True)


def test_repeated_flags_gather() -> None:
    assert serve("m", "--api-key", "a", "--api-key=b").api_keys == ("a", "b")
    assert serve("m").api_keys == ()


def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nk1\n\n k2 \n")
    config = serve("m", "--api-key", "k0", "--api-key-file", str(file))
    assert config.all_api_keys() == ("k0", "k1", "k2")
    file.write_text("\n")
    with pytest.raises(UsageError, match="--api-key-file"):
        config.all_api_keys()


def test_kv_capacity_auto_is_its_default() -> None:
    assert serve("m", "--kv-capacity", "auto") == serve("m")
    assert serve("m", "--kv-capacity", "4096").engine.kv_capacity == 4096


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["m", "--port", "eighty"], "--port"),
        (["m", "--port=65536"], "--port"),
        (["m", "--port"], "--port"),
        (["m", "--max-concurrency", "0"], "--max-concurrency"),
        (["m", "--max-concurrency", "65"], "--max-concurrency"),
        (["m", "--max-context", "-5"], "--max-context"),
        (["m", "--kv-capacity", "lots"], "--kv-capacity"),
        (["m", "--temperature", "2.1"], "--temperature"),
        (["m", "--temperature", "nan"], "--temperature"),
        (["m", "--device", "cuda:x"], "--device"),
        (["m", "--device", "cpu:1"], "--device"),
        (["m", "--device-profile", "on"], "--device-profile"),
        (["m", "--chat-template", "no/such/file"], "--chat-template"),
        (["m", "--api-key", ""], "--api-key"),
        (["m", "--no-such-flag"], "--no-such-flag"),
        (["m", "--por", "80"], "--por"),
        (["m", "extra"], "extra"),
        ([], "MODEL"),
    ],
)
def test_an_error_is_one_line_that_names_the_flag(argv: list[str], flag: str) -> None:
    with pytest.raises(UsageError) as error:
        serve(*argv)
    assert flag in str(error.value) and "\n" not in str(error.value)


def test_a_command_knows_more_choices_and_defaults() -> None:
    assert serve("m", "--kv-dtype", "f16", choices={"kv_dtype": ("bf16", "f16")}).engine.kv_dtype == "f16"
    with pytest.raises(UsageError, match=r"--kv-dtype.*bf16"):
        serve("m", "--kv-dtype", "f17", choices={"kv_dtype": ("bf16", "f16")})
    assert serve(defaults={"model": "demo"}).engine.model == "demo"


def test_classes_refuse_what_their_flags_refuse() -> None:
    with pytest.raises(UsageError, match="--max-concurrency"):
        EngineConfig(model="m", max_concurrency=65)
    with pytest.raises(UsageError, match="--device-profile"):
        EngineConfig(model="m", device_profile="on")
    with pytest.raises(UsageError, match="--top-p"):
        SamplingDefaults(top_p=1.5)
    assert attrs.evolve(EngineConfig(model="m"), threads=3).threads == 3


def test_every_flag_has_a_help_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        serve("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for a in (*attrs.fields(EngineConfig), *attrs.fields(SamplingDefaults)):
        assert a.metadata["help"].split()[0] in shown
    assert "--decode-rounds-per-prefill" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        serve("--version")
    assert stop.value.code == 0 and capsys.readouterr().out == "ninfer-serve 1\n"
