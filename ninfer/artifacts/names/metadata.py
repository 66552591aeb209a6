"""Metadata of a GGUF file, checked key by key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from ninfer.errors import ArtifactError


@frozen
class Metadata:
    """Keys below the architecture's name, checked."""

    path: Path
    values: Mapping[str, Any]
    arch: str

    def _error(self, key: str, problem: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: metadata key {self.arch}.{key} {problem}")

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = (1 << 31) - 1) -> int:
        value = self.values.get(f"{self.arch}.{key}", default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # one number per layer, all the same
        if value is None:
            raise self._error(key, "is missing: the file is not a complete model")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._error(key, f"is {short(value)}, not a whole number from {least} to {most}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.values.get(f"{self.arch}.{key}", default)
        if value is None:
            raise self._error(key, "is missing: the file is not a complete model")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self._error(key, f"is {short(value)}, not a positive number")
        return float(str(np.float32(value)))  # 1e-06 rather than the digits of its float32

    def wholes(self, key: str, count: int) -> list[int]:
        """The first `count` items of an array."""
        value = self.values.get(f"{self.arch}.{key}")
        if not isinstance(value, list) or len(value) < count or not all(is_count(v) for v in value[:count]):
            raise self._error(key, f"is {short(value)}, not a list of {count} whole numbers")
        return value[:count]

    def flags(self, key: str, count: int) -> list[bool] | None:
        """An array of as many booleans; None: there is none."""
        value = self.values.get(f"{self.arch}.{key}")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or not all(isinstance(v, bool) for v in value):
            raise self._error(key, f"is {short(value)}, not a list of {count} booleans")
        return value[:count]

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.arch}.{key}")


def is_count(v: object) -> bool:
    return isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 31


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
