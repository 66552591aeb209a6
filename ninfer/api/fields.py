"""Typed reads of a JSON body. What is malformed fails with its path, such as `messages[2].content[0].type`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from attrs import frozen

from ninfer.errors import BadRequest

T = TypeVar("T")
SHOWN = 60  # characters of an offending value


@frozen
class Value:
    """A JSON value and where it stands. null counts as absent."""

    raw: Any
    path: str = ""

    @property
    def given(self) -> bool:
        return self.raw is not None

    def __getitem__(self, name: str) -> Value:
        """A member, which may be absent. Raises BadRequest if this is no object."""
        return Value(self.object().get(name), f"{self.path}.{name}" if self.path else name)

    def object(self) -> Mapping[str, Any]:
        if not isinstance(self.raw, dict):
            raise self.wrong("an object")
        return self.raw

    def items(self) -> Iterator[Value]:
        if not isinstance(self.raw, list):
            raise self.wrong("an array")
        for i, item in enumerate(self.raw):
            yield Value(item, f"{self.path}[{i}]")

    def maybe(self, read: Callable[[Value], T]) -> T | None:
        return read(self) if self.given else None

    def wrong(self, expected: str, *, code: str | None = None) -> BadRequest:
        """The error of a value that is not what was expected."""
        where = self.path or "the body"
        if self.raw is None:
            return BadRequest(f"{where} is missing: expected {expected}", path=self.path or None, code=code)
        return self.refused(f"expected {expected}, got {_shown(self.raw)}", code=code)

    def refused(self, reason: str, *, code: str | None = None) -> BadRequest:
        return BadRequest(f"{self.path or 'the body'}: {reason}", path=self.path or None, code=code)

    def unsupported(self, reason: str) -> BadRequest:
        """The error of a field whose meaning is known, and not served."""
        name = self.path.rsplit(".", 1)[-1].split("[")[0]
        return self.refused(reason, code=f"{name}_not_supported")


def _shown(raw: Any) -> str:
    text = json.dumps(raw)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


# Readers: value to what it says, or BadRequest


def text(value: Value) -> str:
    if not isinstance(value.raw, str):
        raise value.wrong("a string")
    return value.raw


def boolean(value: Value) -> bool:
    if not isinstance(value.raw, bool):
        raise value.wrong("true or false")
    return value.raw


def integer(low: int | None = None, high: int | None = None) -> Callable[[Value], int]:
    expected = f"a whole number{_range(low, high)}"

    def read(value: Value) -> int:
        raw = value.raw
        if isinstance(raw, float) and raw.is_integer():
            raw = int(raw)
        if isinstance(raw, bool) or not isinstance(raw, int):
            raise value.wrong(expected)
        if (low is not None and raw < low) or (high is not None and raw > high):
            raise value.wrong(expected)
        return raw

    return read


def number(low: float | None = None, high: float | None = None) -> Callable[[Value], float]:
    expected = f"a number{_range(low, high)}"

    def read(value: Value) -> float:
        if isinstance(value.raw, bool) or not isinstance(value.raw, (int, float)):
            raise value.wrong(expected)
        try:
            found = float(value.raw)
        except OverflowError:
            raise value.wrong(expected) from None
        if not math.isfinite(found) or (low is not None and found < low) or (high is not None and found > high):
            raise value.wrong(expected)
        return found

    return read


def choice(*names: str) -> Callable[[Value], str]:
    def read(value: Value) -> str:
        if value.raw not in names or not isinstance(value.raw, str):
            raise value.wrong(f"one of {', '.join(names)}")
        return value.raw

    return read


def _range(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    if high is None:
        return f" from {low:g}"
    return f" up to {high:g}" if low is None else f" from {low:g} to {high:g}"


def decode(body: bytes) -> Value:
    """The JSON object of a request body. Raises BadRequest."""
    try:
        raw = json.loads(body or b"null", parse_constant=_no_constant)
        if b"\\u" in body:
            json.dumps(raw, ensure_ascii=False).encode()  # a lone surrogate is no text
    except UnicodeError:
        raise BadRequest("the body is not UTF-8 text", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise Value(raw).wrong("a JSON object", code="invalid_json")
    return Value(raw)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
