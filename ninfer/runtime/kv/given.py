"""States that were given, not computed: the pages and the image of each graft, where prompts find them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from ninfer.config import EngineConfig
from ninfer.errors import UsageError
from ninfer.formats.dtypes import bf16_to_f32
from ninfer.formats.kv import KVFormat
from ninfer.ir.ops.attention import page_views
from ninfer.ir.step import PAGE
from ninfer.models.qwen3_5 import FULL, LINEAR, Qwen35Spec
from ninfer.runtime.batch import Limits
from ninfer.runtime.grafts import Graft, GraftState
from ninfer.runtime.kv.pages import num_pages
from ninfer.runtime.kv.prefix import ROOT, Key, chunks
from ninfer.runtime.kv.store import Bytes, StateStore
from ninfer.runtime.kv.tiers import Image, StoredPage, image_of


@define
class GivenTier:
    """A tier that loses nothing, and is written at start alone."""

    name: str = field(init=False, default="grafts")
    _pages: dict[Key, StoredPage] = field(init=False, factory=dict)
    _images: dict[Key, list[Image]] = field(init=False, factory=dict)

    def put(self, graft: Graft, pages: Iterable[Bytes], state: Bytes) -> None:
        """pages: of all positions, the last one perhaps in part. state: the image after them."""
        key, depth, last = ROOT, 0, None
        tail: tuple[int, ...] = ()
        for chunk, data in zip(chunks(graft.ids), pages, strict=True):
            if len(chunk.tokens) < PAGE:
                tail, last = chunk.tokens, data
            else:
                self._pages[chunk.key] = StoredPage(chunk, key, data)
                key, depth = chunk.key, depth + 1
        self._images.setdefault(key, []).append(image_of(key, depth, tail, state, last))

    def has_page(self, key: Key) -> bool:
        return key in self._pages

    def page(self, key: Key) -> StoredPage | None:
        return self._pages.get(key)

    def images(self, key: Key) -> Iterator[Image]:
        return iter(self._images.get(key, ()))

    def stats(self) -> dict[str, object]:
        images = [i for group in self._images.values() for i in group]
        size = sum(p.nbytes for p in self._pages.values()) + sum(i.nbytes for i in images)
        return {
            "name": self.name,
            "used_bytes": size,
            "capacity_bytes": size,
            "pages": len(self._pages),
            "images": len(images),
        }


def check_grafts(grafts: Iterable[Graft], config: EngineConfig) -> None:
    """Raises UsageError where their states could not be used as the engine is set."""
    for graft in grafts:
        if graft.state is None:
            continue
        if config.no_prefix_reuse:
            raise UsageError(f"--graft {graft.name}: its state is kept like a prefix; leave out --no-prefix-reuse")
        if config.deterministic and len(graft.ids) % PAGE:
            raise UsageError(
                f"--graft {graft.name}: a state of {len(graft.ids)} positions does not end where a page of {PAGE} "
                "tokens does, as --deterministic needs it; leave one of them out"
            )


def given_tier(
    grafts: Iterable[Graft], spec: object, kv: KVFormat, store: StateStore, limits: Limits
) -> GivenTier | None:
    """The states of grafts in the form that this model stores them; None: there are none.

    Raises UsageError for a graft that leaves no room for a prompt.
    """
    tier = GivenTier()
    window = min(limits.context_len, PAGE * min(limits.max_pages, limits.pages))
    for graft in grafts:
        if len(graft.ids) >= window:
            raise UsageError(
                f"--graft {graft.name}: it has {len(graft.ids)} positions, and the context window is {window}; "
                "serve with a larger --max-context"
            )
        if graft.state is None:
            continue
        assert isinstance(spec, Qwen35Spec)
        layers = {kind: [i for i, k in enumerate(spec.layer_types) if k == kind] for kind in (FULL, LINEAR)}
        by_layer = {f"kv.{i}": rows for i, rows in zip(layers[FULL], _rows(graft.state, kv), strict=True)}
        pages = [
            store.page_of({name: rows[at] for name, rows in by_layer.items()})
            for at in range(num_pages(len(graft.ids)))
        ]
        states: dict[str, NDArray[np.float32]] = {}
        for at, layer in enumerate(layers[LINEAR]):
            states[f"conv.{layer}"] = bf16_to_f32(graft.state.conv[at])[:, 1:]  # the oldest is never read again
            states[f"delta.{layer}"] = graft.state.rec[at].swapaxes(1, 2)
        tier.put(graft, pages, store.image_of(states))
    return tier if tier.stats()["images"] else None


def _rows(state: GraftState, kv: KVFormat) -> Iterator[NDArray[np.uint8]]:
    """For each attention layer its pages, [count, page bytes], as appending the rows one by one leaves them."""
    _, n, heads, dim = state.k.shape
    pages, places = np.divmod(np.arange(n), PAGE)
    for k, v in zip(state.k, state.v, strict=True):
        found = np.zeros((num_pages(n), kv.page_bytes(heads, dim)), np.uint8)
        for side, values in zip(page_views(found, kv, heads, dim), (k, v), strict=True):
            side.store((pages, slice(None), places), bf16_to_f32(values))
        yield found
