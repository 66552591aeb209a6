"""Tool calls out of a reply's text as it streams, however it is cut.

Two spellings, told apart by what follows the tag:
    <tool_call> <function=NAME> <parameter=P> value </parameter> </function> </tool_call>
    <tool_call> {"name": NAME, "arguments": {...}} </tool_call>
Also read: <function name="N">, <invoke name="N">, <param name="P">, a wrapping <function_calls>, and calls without
<tool_call> that begin a line. Whatever does not name a declared tool stays text. Nothing here raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ninfer.text.call_reader import MAX_TAG, CallReader, call_id
from ninfer.text.parts import CallArguments, CallBegin, CallEnd, Part, Text
from ninfer.text.stream import overlap

BARE = ("<function=", "<function name=", "<invoke name=")
OPENERS = ("<tool_call>", "<function_calls>", *BARE)
CLOSERS = ("</tool_call>", "</function_calls>", "</function>", "</invoke>")

_WRAP = re.compile(r"\s*(?:<function_calls>\s*)?(<tool_call>)?\s*")
_NAMED = re.compile(r"<(?:function|invoke)(?:=|\s+name\s*=\s*)\"?([\w.:-]+)\"?\s*>")
_UNNAMED = re.compile(r"<(?:function|invoke)(?:=|\s+name\s*=?\s*)?\"?[\w.:-]*\"?\s*")
_JSON_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_PARAMETER = re.compile(r"\s*<param(?:eter)?(?:=|\s+name\s*=\s*)\"?([^\">\n]+)\"?\s*>")
_CLOSER = re.compile(r"\s*</(?:tool_call|function_calls|function|invoke)>")
_VALUE_END = re.compile(r"\n?(?:</param(?:eter)?>(?=\s*<)|(?=</function>\s*</tool_call>))")
_LAST_VALUE_END = re.compile(r"\n?(?:</param(?:eter)?>\s*)?\Z")
_ENDS_OF_VALUE = ("</parameter>", "</param>", "</function></tool_call>")


class ToolParser(CallReader):
    """Of the spellings above."""

    def __init__(
        self, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool = True, new_id: Callable[[], str] = call_id
    ) -> None:
        super().__init__(tools, parallel=parallel, new_id=new_id)
        self._last = "\n"  # the text's last character
        self._schema: Mapping[str, Any] = {}
        self._num_parameters = 0
        self._value: _Value | None = None
        self._scan = _JsonScan()

    def finish(self, *, complete: bool) -> list[Part]:
        parts: list[Part] = []
        state = self._state
        if state == self._head:
            self._refuse(parts)
            self._run(parts)
            state = self._state
        if state in (self._text, self._head):
            self._say(self._buf, parts)
        elif complete and state == self._in_value:
            found = _LAST_VALUE_END.search(self._buf)
            self._close_value(self._buf[: found.start()] if found else self._buf, parts)
            self._close_call(parts)
        elif complete and state == self._in_call:
            self._close_call(parts)
        self._buf = ""
        return parts

    # States

    def _text(self, parts: list[Part]) -> bool:
        at = min((i for o in OPENERS if (i := self._buf.find(o)) >= 0), default=-1)
        while at >= 0 and not self._may_open(at):
            later = [i for o in OPENERS if (i := self._buf.find(o, at + 1)) >= 0]
            at = min(later, default=-1)
        if at < 0:
            at = len(self._buf) - max(overlap(self._buf, o) for o in OPENERS)
        else:
            self._state = self._head
        begin = len(self._buf[:at].rstrip())  # blanks before a call belong to it
        self._say(self._buf[:begin], parts)
        self._buf = self._buf[begin:]
        return self._state == self._head

    def _head(self, parts: list[Part]) -> bool:
        wrap = _WRAP.match(self._buf)
        assert wrap is not None  # it matches nothing, too
        rest = self._buf[wrap.end() :]
        if found := _NAMED.match(rest):
            if found[1] not in self._tools:
                return self._refuse(parts)
            self._begin(found[1], rest[found.end() :], self._in_call, parts)
            return True
        if rest.startswith("{") and wrap[1]:
            return self._json_head(rest, parts)
        undecided = not rest or any(o.startswith(rest) and o != rest for o in OPENERS)
        if undecided or (len(rest) < MAX_TAG and _UNNAMED.fullmatch(rest)):
            return False
        return self._refuse(parts)

    def _json_head(self, rest: str, parts: list[Part]) -> bool:
        if found := _JSON_HEAD.match(rest):
            if found[1] not in self._tools:
                return self._refuse(parts)
            self._scan = _JsonScan()
            self._begin(found[1], rest[found.end() :], self._in_json, parts)
            return True
        if "}" not in rest:
            return False
        try:  # members in another order, or arguments of another kind: the whole object decides
            call, end = json.JSONDecoder().raw_decode(rest)
        except ValueError:
            return self._refuse(parts) if "</tool_call>" in rest else False
        arguments = call.get("arguments", call.get("parameters"))
        if not isinstance(call.get("name"), str) or call["name"] not in self._tools:
            return self._refuse(parts)
        self._begin(call["name"], rest[end:], self._after, parts)
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        parts += [CallArguments(self._index, text), CallEnd(self._index)]
        return True

    def _in_json(self, parts: list[Part]) -> bool:
        end = self._scan.feed(self._buf)
        if self._buf[:end]:
            parts.append(CallArguments(self._index, self._buf[:end]))
        self._buf = self._buf[end:]
        if not self._scan.done:
            return False
        parts.append(CallEnd(self._index))
        self._state = self._json_tail
        return True

    def _json_tail(self, parts: list[Part]) -> bool:
        """The brace of the call's own object."""
        rest = self._buf.lstrip()
        if not rest:
            return False
        self._buf = rest.removeprefix("}")
        self._state = self._after
        return True

    def _in_call(self, parts: list[Part]) -> bool:
        """Between parameters."""
        if found := _PARAMETER.match(self._buf):
            key = found[1].strip()
            lead = ", " if self._num_parameters else "{"
            self._num_parameters += 1
            parts.append(CallArguments(self._index, f"{lead}{_quoted(key)}: "))
            self._value = _Value(streams=_admits_text(self._schema, key), choices=_choices(self._schema, key))
            self._buf = self._buf[found.end() :]
            self._state = self._in_value
            return True
        if _CLOSER.match(self._buf):
            self._close_call(parts)
            return True
        rest = self._buf.lstrip()
        if not rest or (rest[0] == "<" and ">" not in rest and len(rest) < MAX_TAG):
            return False
        after = rest.find("<", 1)  # nothing that belongs here
        self._buf = rest[after:] if after >= 0 else ""
        return after >= 0

    def _in_value(self, parts: list[Part]) -> bool:
        if found := _VALUE_END.search(self._buf):
            self._close_value(self._buf[: found.start()], parts)
            self._buf = self._buf[found.end() :]
            self._state = self._in_call
            return True
        assert self._value is not None
        known = len(self._buf) - _held_of_value(self._buf)
        if piece := self._value.feed(self._buf[:known]):
            parts.append(CallArguments(self._index, piece))
        self._buf = self._buf[known:]
        return False

    def _after(self, parts: list[Part]) -> bool:
        if found := _CLOSER.match(self._buf):
            self._buf = self._buf[found.end() :]
            return True
        rest = self._buf.lstrip()
        if not rest or any(c.startswith(rest) for c in CLOSERS):
            return False
        self._end_call()
        self._last = "\n"
        return True

    # Steps

    def _may_open(self, at: int) -> bool:
        """A call without its outer tag begins a line; in the middle of one it is talked about."""
        if not self._buf.startswith(BARE, at):
            return True
        before = (self._last + self._buf[:at]).rstrip(" \t")
        return not before or before.endswith("\n")

    def _say(self, text: str, parts: list[Part]) -> None:
        if text:
            parts.append(Text(text))
            self._last = text[-1]

    def _refuse(self, parts: list[Part]) -> bool:
        """It only looked like a call: text up to and with the bracket, and the rest may hold another."""
        end = self._buf.index("<") + 1
        self._say(self._buf[:end], parts)
        self._buf = self._buf[end:]
        self._state = self._text
        return True

    def _begin(self, name: str, rest: str, state: Callable[[list[Part]], bool], parts: list[Part]) -> None:
        self._index += 1
        self._schema = self._tools[name]
        self._num_parameters = 0
        self._buf, self._state = rest, state
        parts.append(CallBegin(self._index, self._new_id(), name))

    def _close_value(self, rest: str, parts: list[Part]) -> None:
        assert self._value is not None
        if piece := self._value.close(rest):
            parts.append(CallArguments(self._index, piece))
        self._value = None

    def _close_call(self, parts: list[Part]) -> None:
        parts += [CallArguments(self._index, "}" if self._num_parameters else "{}"), CallEnd(self._index)]
        self._state = self._after


class _Value:
    """A parameter's value to JSON text. One line break on each side is framing.

    streams: any text is meant, so it is quoted piece by piece; otherwise the whole is JSON already, or else text.
    choices: the texts that are meant; blanks around one are not.
    """

    def __init__(self, *, streams: bool, choices: Collection[str] = ()) -> None:
        self._streams = streams and not choices
        self._choices = choices
        self._raw = ""
        self._begun = False

    def feed(self, text: str) -> str:
        if not text:
            return ""
        if not self._streams:
            self._raw += text
            return ""
        if self._begun:
            return _quoted(text)[1:-1]
        self._begun = True
        return '"' + _quoted(text.removeprefix("\n"))[1:-1]

    def close(self, text: str) -> str:
        if self._streams:
            piece = self.feed(text)
            return piece + ('"' if self._begun else '""')
        raw = (self._raw + text).removeprefix("\n")
        if self._choices:
            return _quoted(raw.strip() if raw.strip() in self._choices else raw)
        try:
            json.loads(raw, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return _quoted(raw)
        return raw.strip()


class _JsonScan:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._text = self._escape = False
        self.done = False

    def feed(self, text: str) -> int:
        """How much of the text belongs to the object."""
        for i, c in enumerate(text):
            if self._escape:
                self._escape = False
            elif self._text:
                self._escape, self._text = c == "\\", c != '"'
            elif c == '"':
                self._text = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.done = True
                    return i + 1
        return len(text)


def _held_of_value(text: str) -> int:
    """How many of the last characters may belong to the end of a value."""
    begin = len(text)
    at = len(text)
    for _ in range(2):
        at = text.rfind("<", 0, at)
        if at < 0:
            break
        tail = "".join(text[at:].split())
        if any(e.startswith(tail) for e in _ENDS_OF_VALUE):
            begin = at
    if begin and text[begin - 1] == "\n":
        begin -= 1
    return len(text) - begin


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _admits_text(schema: Mapping[str, Any], key: str) -> bool:
    """Whether a parameter may be a string. One that is not declared is one."""
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, dict) else None
    return _is_text(declared, schema, 8) if isinstance(declared, dict) else True


def _choices(schema: Mapping[str, Any], key: str) -> Collection[str]:
    """The values of a parameter that can only be one of some strings."""
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, dict) else None
    values = declared.get("enum") if isinstance(declared, dict) else None
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        return ()
    return values


def _is_text(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> bool:
    kinds = schema.get("type")
    if kinds is not None:
        return "string" in (kinds if isinstance(kinds, list) else [kinds])
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and depth:
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        return _is_text(target, root, depth - 1) if isinstance(target, dict) else True
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return any(isinstance(v, str) for v in values)
    branches = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(branches, list) and depth:
        return any(isinstance(b, dict) and _is_text(b, root, depth - 1) for b in branches)
    return True
