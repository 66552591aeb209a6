"""What can be set, once: frozen classes whose fields carry their command-line flags.

Scripts build the classes directly; commands build them from arguments with `parse`. There are no environment switches
and no module-level settings. A field whose default is None is decided at start, and the start-up lines say how.
"""
# ruff: noqa: RUF009  (flag and group make attrs fields)

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import attrs
from attrs import field, frozen

from ninfer.errors import UsageError

C = TypeVar("C")


SPECS = ("none", "mtp", "dflash", "dflash2", "ngram")
DEVICES = ("cpu", "cpu-numpy", "cuda", "cuda-sim", "auto")

# Values: text to value. What they raise becomes one line that names the flag.


def whole(low: int = 0, high: int | None = None) -> Callable[[str], int]:
    """A decimal integer in the range."""

    def parse(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise ValueError
        return value

    parse.__doc__ = f"a whole number from {low}" + ("" if high is None else f" to {high}")
    return parse


def real(low: float, high: float) -> Callable[[str], float]:
    """A number in the range."""

    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError
        return value

    parse.__doc__ = f"a number from {low:g} to {high:g}"
    return parse


def text(value: str) -> str:
    """a non-empty text"""
    if not value:
        raise ValueError
    return value


def file(value: str) -> Path:
    """a file that exists"""
    path = Path(value)
    if not path.is_file():
        raise ValueError
    return path


def graft(value: str) -> str:
    """a name, = and a file that exists"""
    name, _, path = value.partition("=")
    if not name or not Path(path).is_file():
        raise ValueError
    return value


def tokens_or_auto(value: str) -> int | None:
    """a whole number from 64, or auto"""
    return None if value == "auto" else whole(64)(value)


def device(value: str) -> str:
    """cpu, cpu-numpy, cuda, cuda:N, cuda-sim or auto"""
    kind, colon, index = value.partition(":")
    if kind not in DEVICES or (colon and not (kind == "cuda" and index.isdecimal())):
        raise ValueError
    return value


def flag(
    help: str,
    parse: Callable[[str], Any] = text,
    *,
    default: Any = None,
    choices: Iterable[str] = (),
    value: str = "N",
    name: str | None = None,
) -> Any:
    """A field with its flag. A bool default makes a switch, a tuple default a flag that may be repeated."""
    metadata = {"help": help, "parse": parse, "choices": tuple(choices), "value": value, "flag": name}
    return field(default=default, validator=_validate, metadata=metadata)


def _validate(self: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A value given by a script is good if its text would be as an argument."""
    meta = attribute.metadata
    if value is None or isinstance(value, bool):
        return
    for one in value if isinstance(value, tuple) else (value,):
        if meta["choices"] and one not in meta["choices"]:
            raise UsageError(f"{_flag_of(attribute)}: {one!r} is none of {', '.join(meta['choices'])}")
        try:
            meta["parse"](str(one))
        except ValueError:
            raise UsageError(f"{_flag_of(attribute)}: {str(one)!r} is not {meta['parse'].__doc__}") from None


def _flag_of(attribute: attrs.Attribute[Any]) -> str:
    name: str = attribute.metadata["flag"] or "--" + attribute.name.replace("_", "-")
    return name


def positional(help: str, parse: Callable[[str], Any] = text) -> Any:
    """A field that is given by place. It has no default here; a command may have one."""
    return field(metadata={"help": help, "parse": parse})


def group(cls: type, **default: Any) -> Any:
    """A field that is a class of flags itself."""
    return field(metadata={"group": cls}, **default)


@frozen(kw_only=True)
class EngineConfig:
    """The model, the device, and how requests share them."""

    model: str = positional("a model file or directory, demo, or synthetic:NAME")
    max_context: int | None = flag("tokens of a prompt and its reply (the model's window, at most 8192)", whole(64))
    max_concurrency: int = flag("sequences decoded together", whole(1, 64), default=8)
    prefill_chunk: int = flag("prompt tokens per step", whole(16, 65536), default=512)
    prefill_activations: str = flag(
        "what products of a prompt's wide chunks take on a GPU; 8bit rounds activations and weights to 8 bits a row, "
        "which is faster and changes results a little; 4bit takes nvfp4 weights by activations of 4 bits on sm_120a",
        choices=("16bit", "8bit", "4bit"),
        default="16bit",
    )
    decode_rounds_per_prefill: int = flag(
        "decode rounds after each prefill chunk while others generate; 0: a round per 64 tokens", whole(), default=0
    )
    rope_yarn: float | None = flag(
        "stretch the model's window by this factor with YaRN, e.g. 4 for 1,048,576 of 262,144", real(1, 32), value="F"
    )
    kv_dtype: str = flag("how the KV cache is stored", value="FORMAT", default="bf16")
    kv_capacity: int | None = flag("tokens that the KV pages of all sequences hold, or auto (auto)", tokens_or_auto)
    no_prefix_reuse: bool = flag("compute every prompt anew", default=False)
    use_alt_prefix_caching: bool = flag("running requests share pages as soon as they are full", default=False)
    host_cache_mib: int = flag("host memory for cached states and pages that left the device", whole(), default=1024)
    disk_kv_path: Path | None = flag("a folder in which cached contexts outlive the process", Path, value="DIR")
    disk_kv_gib: int = flag("disk space for cached contexts", whole(1), default=64)
    disk_kv_restore: bool = flag("read cached contexts back from --disk-kv-path", default=False)
    device: str = flag("cpu, cpu-numpy (no compiler), cuda, cuda:N or auto", device, value="DEVICE", default="auto")
    threads: int | None = flag("processor threads of the cpu device (all cores)", whole(1, 1024))
    quantize: str | None = flag("convert dense weights to this format while loading", value="FORMAT")
    gdn_state_fp16: bool = flag("keep recurrent states in 16 bits", default=False)
    embedding_q4: bool = flag("convert the embedding to q4_g64 while loading", default=False)
    lm_head_q6: bool = flag("convert the head to q6_g64 while loading", default=False)
    format: str | None = flag("weight format of a synthetic model", value="FORMAT")
    spec: str = flag("who drafts tokens ahead of the model", choices=SPECS, default="none")
    draft_model: Path | None = flag("the drafter of --spec dflash or dflash2: a folder", Path, value="PATH")
    draft_tokens: int | None = flag("drafts per round (what suits the drafter)", whole(1, 15))
    adaptive_mtp: bool = flag("let survival and time choose how many drafts a round of --spec mtp has", default=False)
    lm_head_draft: bool = flag("draft by the file's proposal head; an error where it has none", default=False)
    full_draft_head: bool = flag("draft by the model's head where the file has a proposal head", default=False)
    ngram_draft_tokens: int = flag(
        "longest copy of earlier text drafted in a round with --spec", whole(0, 15), default=15
    )
    ngram_min_match: int = flag("tokens that must agree before a copy", whole(4, 64), default=12)
    decode_kernels: str = flag(
        "steps of few rows on an sm_90 GPU: a launch for each op, or a persistent kernel for those of several layers",
        default="chained",
        choices=("chained", "woven"),
    )
    deterministic: bool = flag("make a reply independent of what shares its steps, at some speed", default=False)
    device_profile: str = flag(
        "measured routes: use a stored profile, none, or measure now",
        choices=("auto", "off", "calibrate"),
        default="auto",
    )
    device_profile_path: Path | None = flag("the profile's file (the user's cache)", Path, value="FILE")
    explain: bool = flag("print the plans and why each route was chosen", default=False)
    model_id: str | None = flag("the name under which the model is served (its own)", value="NAME")
    chat_template: Path | None = flag("a Jinja file that replaces the model's template", file, value="FILE")
    max_pending_requests: int = flag("requests that may wait beyond those that run", whole(), default=16)
    pending_timeout_ms: int = flag("how long a request may wait to start", whole(1), default=600_000)


@frozen(kw_only=True)
class SamplingDefaults:
    """What a request gets that does not say otherwise. None: the model's own preset."""

    default_max_tokens: int | None = flag("reply tokens of a request that names no limit (what fits)", whole(1))
    temperature: float | None = flag("0..2; 0 takes the likeliest token", real(0, 2), value="F")
    top_p: float | None = flag("0..1", real(0, 1), value="F")
    top_k: int | None = flag("0: all", whole())
    min_p: float | None = flag("0..1", real(0, 1), value="F")
    presence_penalty: float | None = flag("-2..2", real(-2, 2), value="F")
    frequency_penalty: float | None = flag("-2..2", real(-2, 2), value="F")
    seed: int | None = flag("of every draw (random for each request)", whole())
    greedy: bool = flag("always take the likeliest token, whatever requests say", default=False)
    default_thinking_budget: int | None = flag("tokens after which thinking is ended (none)", whole(1))
    thinking_budget_message: str = flag("what thinking that is ended ends with", str, value="TEXT", default="\n")
    no_thinking: bool = flag("turn the model's thinking off unless a request asks for it", default=False)


_SAMPLER = {
    **{"temp": ("temperature", real(0, 2)), "top_p": ("top_p", real(0, 1)), "top_k": ("top_k", whole())},
    **{"min_p": ("min_p", real(0, 1)), "presence": ("presence_penalty", real(-2, 2))},
    "frequency": ("frequency_penalty", real(-2, 2)),
}


def sampler_fields(value: str) -> dict[str, float]:
    """fields such as temp=0.2,top_p=0.9,top_k=20, also min_p, presence and frequency"""
    found: dict[str, float] = {}
    for part in value.split(","):
        name, _, given = part.partition("=")
        if name not in _SAMPLER:
            raise ValueError
        field_name, read = _SAMPLER[name]
        found[field_name] = read(given)
    return found


def sampler(value: str) -> str:
    sampler_fields(value)
    return value


sampler.__doc__ = sampler_fields.__doc__


@frozen(kw_only=True)
class PostThinking:
    """How replies are drawn once their reasoning is over, where requests do not say so. Any of the flags turns it on.

    Later flags of the class go over the sampler.
    """

    post_thinking: bool = flag("draw what follows reasoning apart from it, at temperature 0.2", default=False)
    post_thinking_sampler: str | None = flag(
        "how to draw what follows reasoning: temp=F,top_p=F,top_k=N and also min_p, presence, frequency",
        sampler,
        value="FIELDS",
    )
    post_thinking_temperature: float | None = flag("of what follows reasoning", real(0, 2), value="F")
    post_thinking_top_p: float | None = flag("of what follows reasoning", real(0, 1), value="F")
    post_thinking_top_k: int | None = flag("of what follows reasoning", whole())

    def fields(self) -> Mapping[str, float] | None:
        """By the names of Sampling; None: no flag was given."""
        found = sampler_fields(self.post_thinking_sampler) if self.post_thinking_sampler else {}
        for name in ("temperature", "top_p", "top_k"):
            value = getattr(self, f"post_thinking_{name}")
            if value is not None:
                found[name] = value
        return found if found or self.post_thinking else None


@frozen(kw_only=True)
class ServeConfig:
    """A server around an engine."""

    engine: EngineConfig = group(EngineConfig)
    defaults: SamplingDefaults = group(SamplingDefaults, factory=SamplingDefaults)
    post_thinking: PostThinking = group(PostThinking, factory=PostThinking)
    grafts: tuple[str, ...] = flag(
        "a prompt graft that requests may name: its file, with a .json beside it; may be repeated",
        graft,
        value="NAME=PATH",
        name="--graft",
        default=(),
    )
    default_graft: str | None = flag("the graft of requests that name none", value="NAME")
    slot_save_path: Path | None = flag("a folder for sessions saved by POST /slots", Path, value="DIR")
    host: str = flag("address to listen on", value="HOST", default="127.0.0.1")
    port: int = flag("port to listen on; 0: any free one", whole(0, 65535), default=8080)
    api_keys: tuple[str, ...] = flag(
        "a key that clients must send; may be repeated", value="KEY", name="--api-key", default=()
    )
    api_key_file: Path | None = flag("a file with one key per line", file, value="FILE")
    cors: bool = flag("let web pages of any origin call the server", default=False)
    webui: bool = flag("serve a chat page at /", default=False)
    request_log_jsonl: Path | None = flag("append what became of each request to this file", Path, value="FILE")
    request_log_max_mib: int = flag("where the log's file is closed and the next begun; 0: never", whole(), default=0)
    request_log_keep: int = flag("how many closed log files stay", whole(1), default=4)
    request_log_prompts: bool = flag("write prompts and replies into the request log too", default=False)
    request_timeout_ms: int = flag("how long a request may take from its arrival; 0: any time", whole(), default=0)
    max_request_mib: int = flag("largest request body", whole(1), default=384)
    drain_timeout_ms: int = flag("how long running requests may go on when the server stops", whole(), default=5000)
    log_level: str = flag(
        "what goes to stderr", choices=("debug", "info", "warning", "error", "critical", "off"), default="info"
    )

    def __attrs_post_init__(self) -> None:
        if self.default_graft and self.default_graft not in (g.partition("=")[0] for g in self.grafts):
            raise UsageError(f"--default-graft {self.default_graft}: no --graft has this name")
        if self.slot_save_path is not None and self.engine.no_prefix_reuse:
            raise UsageError("--slot-save-path: sessions are kept by the prefix cache; leave out --no-prefix-reuse")

    def all_api_keys(self) -> tuple[str, ...]:
        """Those given and those in the file. Raises UsageError when the file cannot be read or has none."""
        if self.api_key_file is None:
            return self.api_keys
        try:
            lines = self.api_key_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file: cannot read {self.api_key_file}: {error}") from None
        keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
        if not keys:
            raise UsageError(f"--api-key-file: {self.api_key_file} has no key")
        return self.api_keys + keys


# From classes to argparse and back


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace("unrecognized arguments:", "unknown option")
        raise UsageError(f"{message} (see {self.prog} --help)")


def parse(
    cls: type[C],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    version: str,
    choices: Mapping[str, Iterable[str]] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> C:
    """An instance from arguments. choices, defaults: by field, what only the command knows. Raises UsageError."""
    parser = Parser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{prog} {version}", help="print the version")
    for a in _fields(cls):
        _add(parser, a, tuple((choices or {}).get(a.name, ())), (defaults or {}).get(a.name, attrs.NOTHING))
    return _build(cls, vars(parser.parse_args(argv)))


def _attributes(cls: type[Any]) -> tuple[attrs.Attribute[Any], ...]:
    found: tuple[attrs.Attribute[Any], ...] = attrs.fields(cls)
    return found


def _fields(cls: type[Any]) -> Iterator[attrs.Attribute[Any]]:
    for a in _attributes(cls):
        if "group" in a.metadata:
            yield from _fields(a.metadata["group"])
        else:
            yield a


def _build(cls: type[C], values: Mapping[str, Any]) -> C:
    def value(a: attrs.Attribute[Any]) -> Any:
        return _build(a.metadata["group"], values) if "group" in a.metadata else values[a.name]

    return cls(**{a.name: value(a) for a in _attributes(cls)})


def _add(parser: Parser, a: attrs.Attribute[Any], choices: tuple[str, ...], default: Any) -> None:
    meta = a.metadata
    if "flag" not in meta:
        more: dict[str, Any] = {} if default is attrs.NOTHING else {"nargs": "?", "default": default}
        parser.add_argument(a.name, metavar=a.name.upper(), type=_value(meta["parse"]), help=meta["help"], **more)
        return
    if default is attrs.NOTHING:
        default = a.default
    name = _flag_of(a)
    if isinstance(default, bool):
        parser.add_argument(name, dest=a.name, action="store_true", help=meta["help"])
        return
    repeated = isinstance(default, tuple)
    action: dict[str, Any] = {"action": _Append} if repeated else {}
    shown = f" [{default}]" if default is not None and not repeated else ""
    parser.add_argument(
        name,
        dest=a.name,
        type=_value(meta["parse"]),
        default=default,
        choices=choices or meta["choices"] or None,
        metavar=None if choices or meta["choices"] else meta["value"],
        help=meta["help"] + shown,
        **action,
    )


class _Append(argparse.Action):
    """A tuple of all values given."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), values))


def _value(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(given: str) -> Any:
        try:
            return convert(given)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{given!r} is not {convert.__doc__}") from None

    return parse
