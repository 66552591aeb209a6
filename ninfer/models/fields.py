"""Reading a config mapping: every field checked, every complaint with the field, its value and what would work."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from attrs import frozen

from ninfer.errors import ArtifactError

_REQUIRED: Any = object()


@frozen
class Fields:
    """where: how messages call the mapping, e.g. `config` or `config.rope_parameters`. A null counts as absent."""

    values: Mapping[str, Any]
    where: str = "config"

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def fail(self, name: str, problem: str) -> NoReturn:
        raise ArtifactError(f"{self.where}: {name} is {short(self.values.get(name))}, {problem}")

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ArtifactError(f"{self.where}: {name} is missing, and it has no default; fetch the config again")
        return default

    def whole(self, name: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
            self.fail(name, f"but must be a whole number from {least}")
        return value

    def real(self, name: str, default: Any = _REQUIRED, *, above: float = 0.0) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < float("inf"):
            self.fail(name, f"but must be a number above {above:g}")
        return float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.fail(name, "but must be true or false")
        return value

    def reals(self, name: str, count: int) -> tuple[float, ...]:
        value = self.get(name)
        if not isinstance(value, list | tuple) or len(value) != count or not all(_is_real(v) for v in value):
            self.fail(name, f"but must be a list of {count} positive numbers")
        return tuple(float(v) for v in value)

    def must(self, name: str, only: object, *, why: str) -> None:
        """A field that may be absent, but has one value that works."""
        if name in self and self.values[name] != only:
            self.fail(name, f"but only {only!r} is supported: {why}")

    def choice(self, name: str, default: Any, allowed: Collection[str]) -> str:
        value = self.get(name, default)
        if value not in allowed:
            self.fail(name, f"but supported are {', '.join(allowed)}")
        return str(value)

    def below(self, name: str) -> Fields:
        """A mapping inside; empty if absent."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            self.fail(name, "but must be a mapping")
        return Fields(value, f"{self.where}.{name}")


def _is_real(v: object) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < float("inf")


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
