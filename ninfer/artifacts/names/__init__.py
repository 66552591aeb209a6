"""GGUF architectures: their metadata as a Hugging Face config, their tensor names, and what converters did to them.

Every file beside this one that has an ARCHITECTURE is one; a new one is such a file and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from ninfer.artifacts.names.metadata import short
from ninfer.artifacts.names.table import Architecture
from ninfer.errors import ArtifactError


@cache
def architectures() -> tuple[Architecture, ...]:
    modules = [import_module(f"{__name__}.{m.name}") for m in iter_modules(__path__)]
    found = [m.ARCHITECTURE for m in modules if hasattr(m, "ARCHITECTURE")]
    assert all(isinstance(a, Architecture) for a in found)
    return tuple(found)


def architecture(path: Path, values: Mapping[str, Any]) -> Architecture:
    name = values.get("general.architecture")
    for arch in architectures():
        if arch.name == name:
            return arch
    known = ", ".join(a.name for a in architectures())
    if name is None:
        raise ArtifactError(f"{path}: no metadata key general.architecture; supported architectures are {known}")
    raise ArtifactError(f"{path}: architecture {short(name)} is not supported; supported are {known}")
