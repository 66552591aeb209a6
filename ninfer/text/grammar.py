"""Grammars that keep a reply to a format: JSON, a schema, a regular expression, an EBNF grammar, tool calls.

xgrammar's Python package needs torch; its native core does not. So the core is loaded by itself, which ties this file
to xgrammar 0.2.x. No other file knows it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import threading
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from attrs import field, frozen

from ninfer.errors import BadRequest
from ninfer.text.chat import CallStyle
from ninfer.text.schema import check_schema
from ninfer.text.tokenizer import Tokenizer

CACHE_BYTES = 256 << 20
THREADS = 2
MAX_BLANKS = 8  # in a row: without a bound, models fill replies with them
MAX_BREAKS = 2  # tokens of line breaks between reasoning and the format

GEMMA_MARKS = ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>")  # never inside of arguments

# What a reply is kept to


@frozen(kw_only=True)
class JsonSchema:
    """strict: objects that do not say otherwise have no more members than declared.   path: where errors point."""

    schema: Any = field(factory=lambda: {"type": "object"})
    strict: bool = True
    path: str = "schema"


@frozen(kw_only=True)
class Regex:
    pattern: str
    path: str = "regex"


@frozen(kw_only=True)
class Ebnf:
    """Rules in GBNF; the first is `root`."""

    text: str
    path: str = "grammar"


@frozen(kw_only=True)
class Calls:
    """At least one call of these tools: name -> schema of the parameters. or_json: or else JSON of this schema."""

    tools: Mapping[str, Mapping[str, Any]]
    style: CallStyle
    parallel: bool = True
    or_json: JsonSchema | None = None


Format = JsonSchema | Regex | Ebnf | Calls


def available() -> bool:
    """Whether the grammar library is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("xgrammar", "tvm_ffi"))


class Grammars:
    """Compiles formats for one vocabulary, and remembers them. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int], vocab_size: int | None = None) -> None:
        core = _core()
        size = vocab_size or tokenizer.vocab_size
        control = tokenizer.is_special  # spelled as nothing, and so never allowed
        vocab = [b"" if control(i) else tokenizer.token_bytes(i) for i in range(size)]
        self._vocab_size = size
        self._matcher = core.GrammarMatcher
        info = core.TokenizerInfo(vocab, 0, size, sorted(stop_ids), False)
        self._compiler = core.GrammarCompiler(info, THREADS, True, CACHE_BYTES, False)
        self._breaks = frozenset(i for i, text in enumerate(vocab) if text and not text.strip(b"\n"))
        self._lock = threading.Lock()

    def matcher(
        self, format: Format, *, after: int | None = None, opened_by: int | None = None
    ) -> Matcher | AfterReasoning:
        """A mask for one reply.   after: the token that ends its reasoning, which the format leaves alone.

        opened_by: the reply does not begin with reasoning, but may with this token.

        Raises BadRequest with the path for what cannot be compiled.
        """
        with self._lock:
            compiled = self._compile(format)
        matcher = Matcher(self._matcher(compiled, None, False, -1, None))
        return matcher if after is None else AfterReasoning(matcher, after, self._breaks, opened_by)

    def _compile(self, format: Format) -> Any:
        compiler = self._compiler
        match format:
            case JsonSchema(schema=schema, strict=strict, path=path):
                text = check_schema(schema, path)
                args = (text, True, None, None, strict, MAX_BLANKS, False)
                return _compiled(lambda: compiler.compile_json_schema(*args), path)
            case Regex(pattern=pattern, path=path):
                return _compiled(lambda: compiler.compile_regex(pattern), path)
            case Ebnf(text=text, path=path):
                return _compiled(lambda: compiler.compile_grammar_from_strings(text, "root"), path)
            case Calls():
                return self._compile_calls(format)

    def _compile_calls(self, format: Calls) -> Any:
        if format.or_json is not None:
            check_schema(format.or_json.schema, format.or_json.path)
        try:
            return _compiled(lambda: self._compiler.compile_structural_tag(_calls(format, typed=True)), "tools")
        except BadRequest:  # a schema beyond the grammar's means; the names at least can be kept to
            return _compiled(lambda: self._compiler.compile_structural_tag(_calls(format, typed=False)), "tools")


class Matcher:
    """A TokenMask: where in the grammar one reply is."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def fill(self, row: Any) -> bool:
        """row: int32 [ceil(V/32)], 1 for an allowed token."""
        if self._native.is_terminated():
            return False
        return bool(self._native.fill_next_token_bitmask(row, 0, False))

    def accept(self, token: int) -> bool:
        return not self._native.is_terminated() and bool(self._native.accept_token(token, False))

    def rollback(self, num_tokens: int) -> None:
        self._native.rollback(num_tokens)


class AfterReasoning:
    """A TokenMask that lets everything pass until reasoning ends, then line breaks, and then keeps to the format.

    open_id: what must begin the reasoning, or there is none.
    """

    def __init__(self, matcher: Matcher, close_id: int, breaks: frozenset[int], open_id: int | None = None) -> None:
        self._matcher = matcher
        self._close_id = close_id
        self._breaks = breaks
        self._open_id = open_id
        self._log: list[str] = []  # what each token was: reasoning, close, break or format

    def fill(self, row: Any) -> bool:
        if self._where() == "reasoning":
            return False
        masked = self._matcher.fill(row)
        for id in self._also() if masked else ():
            row[id >> 5] |= np.int32(np.uint32(1 << (id & 31)).view(np.int32))
        return masked

    def accept(self, token: int) -> bool:
        where = self._where()
        if where == "reasoning":
            self._log.append("close" if token == self._close_id else "reasoning")
            return True
        if where == "start" and token == self._open_id:
            self._log.append("reasoning")
            return True
        if where != "start" and token in self._also():
            self._log.append("break")
            return True
        if not self._matcher.accept(token):
            return False
        self._log.append("format")
        return True

    def rollback(self, num_tokens: int) -> None:
        gone = self._log[len(self._log) - num_tokens :]
        del self._log[len(self._log) - num_tokens :]
        if count := gone.count("format"):
            self._matcher.rollback(count)

    def _where(self) -> str:
        if self._log:
            return self._log[-1]
        return "reasoning" if self._open_id is None else "start"

    def _also(self) -> frozenset[int]:
        """What may come beside the format."""
        where = self._where()
        if where == "start":
            return frozenset() if self._open_id is None else frozenset({self._open_id})
        may_break = where in ("close", "break") and self._log[-MAX_BREAKS:] != ["break"] * MAX_BREAKS
        return self._breaks if may_break else frozenset()


# Tool calls as the library's structural tags


def _calls(format: Calls, *, typed: bool) -> str:
    spell = {CallStyle.XML: _xml_tag, CallStyle.JSON: _json_tag, CallStyle.GEMMA: _gemma_tag}[format.style]
    tags = [spell(name, schema if typed else {}, typed) for name, schema in format.tools.items()]
    tree: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "" if format.style is CallStyle.GEMMA else "\n",
        "at_least_one": True,
        "stop_after_first": not format.parallel,
    }
    if format.or_json is not None:
        tree = {"type": "or", "elements": [_json(format.or_json.schema), tree]}
    return json.dumps({"type": "structural_tag", "format": tree}, ensure_ascii=False)


def _xml_tag(name: str, schema: Mapping[str, Any], typed: bool) -> Mapping[str, Any]:
    begin, end = f"<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"
    if typed and not schema.get("properties"):
        return _tag(begin, {"type": "const_string", "value": end[:-1]}, end[-1:])
    if not typed:
        return _tag(begin, {"type": "any_text"}, end)
    return _tag(begin, _json(schema) | {"style": "qwen_xml"}, "\n" + end)


def _json_tag(name: str, schema: Mapping[str, Any], typed: bool) -> Mapping[str, Any]:
    begin = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": '
    return _tag(begin, _json(dict(schema) or {"type": "object"}), "}\n</tool_call>")


def _gemma_tag(name: str, schema: Mapping[str, Any], typed: bool) -> Mapping[str, Any]:
    arguments = _json(dict(schema) or {"type": "object"}) | {"style": "gemma", "excludes": list(GEMMA_MARKS)}
    return _tag(f"<|tool_call>call:{name}", arguments, "<tool_call|>")


def _json(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_BLANKS}


def _tag(begin: str, content: Mapping[str, Any], end: str) -> Mapping[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


# The library


def _compiled(compile: Callable[[], Any], path: str) -> Any:
    try:
        return compile()
    except (RuntimeError, ValueError, TypeError) as error:
        text = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip().split("\n")[0]
        raise BadRequest(f"{path} cannot be compiled: {text}", path=path, code="grammar_not_supported") from None


def _core() -> Any:
    """The native core, without the package's own __init__."""
    if not available():
        raise BadRequest(
            "this server has no grammar library: pip install apache-tvm-ffi; pip install --no-deps xgrammar==0.2.9",
            code="response_format_not_supported",
        )
    with _LOADING:
        if "xgrammar" not in sys.modules:
            _hollow("xgrammar")
        for name in ("exception", "load_binding"):
            importlib.import_module(f"xgrammar.{name}")
        return importlib.import_module("xgrammar.base")._core


_LOADING = threading.Lock()


def _hollow(name: str) -> None:
    """A package that has its modules, but whose __init__ has not run."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations is not None
    module = types.ModuleType(name)
    module.__path__ = list(spec.submodule_search_locations)
    module.__spec__, module.__package__ = spec, name
    sys.modules[name] = module
