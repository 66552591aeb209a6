"""Model families: every file beside this one that has a FAMILY is one; a new one is such a file and nothing else."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ninfer.models.family import Config, Family, ModelSpec
from ninfer.models.family import identify as _identify

_MODULES = [import_module(f"{__name__}.{m.name}") for m in iter_modules(__path__)]
FAMILIES: tuple[Family, ...] = tuple(m.FAMILY for m in _MODULES if hasattr(m, "FAMILY"))


def identify(config: Config) -> tuple[Family, ModelSpec]:
    """The family of a config, and the config checked.   Raises ArtifactError listing what is supported."""
    return _identify(config, FAMILIES)
