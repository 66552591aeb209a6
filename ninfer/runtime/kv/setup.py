"""The context cache that a config asks for."""

from __future__ import annotations

from collections.abc import Mapping, Set
from hashlib import sha256
from typing import Any

import attrs
import numpy as np

from ninfer.config import EngineConfig
from ninfer.runtime.batch import ModelRunner
from ninfer.runtime.kv.cache import CacheOptions, ContextCache, PageSource, PlainPages
from ninfer.runtime.kv.disk import DiskTier
from ninfer.runtime.kv.given import GivenTier
from ninfer.runtime.kv.pages import Pages
from ninfer.runtime.kv.store import CacheStore


def page_source(pages: Pages, runner: ModelRunner, config: EngineConfig) -> PageSource:
    """Plain pages for a runner that cannot give its states, and with --no-prefix-reuse. Raises UsageError."""
    store: CacheStore | None = getattr(runner, "cache_store", None)
    if store is None or config.no_prefix_reuse:
        return PlainPages(pages)
    options = CacheOptions(
        host_bytes=config.host_cache_mib << 20,
        deterministic=config.deterministic,
        shared=config.use_alt_prefix_caching,
        ladder_tokens=max(4096, 2 * config.prefill_chunk),
    )
    disk = None
    if config.disk_kv_path is not None:
        folder = config.disk_kv_path / getattr(runner, "fingerprint", "model")
        disk = DiskTier(folder, config.disk_kv_gib << 30, restore=config.disk_kv_restore)
    given: GivenTier | None = getattr(runner, "given", None)
    return ContextCache(pages, store, options, disk, () if given is None else (given,))


def fingerprint(facts: Mapping[str, object]) -> str:
    """A folder's name for everything that changes what cached bytes mean."""
    return sha256(stable(facts).encode()).hexdigest()[:24]


def stable(value: object) -> str:
    """A value as text that is the same in every process: sets have an order of their own in each."""
    if isinstance(value, np.ndarray):
        return sha256(value.tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{stable(k)}:{stable(v)}" for k, v in value.items())) + "}"
    if isinstance(value, Set):
        return "{" + ",".join(sorted(map(stable, value))) + "}"
    if isinstance(value, list | tuple):
        return "(" + ",".join(map(stable, value)) + ")"
    kind: Any = type(value)
    if attrs.has(kind):
        return str(kind.__name__) + stable({a.name: getattr(value, a.name) for a in attrs.fields(kind)})
    return repr(value)
