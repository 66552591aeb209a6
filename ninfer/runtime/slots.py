"""What a slot held last, and how it leaves the cache and comes back: the sessions behind llama.cpp's slot actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ninfer.errors import NinferError
from ninfer.ir.step import PAGE
from ninfer.runtime.kv.cache import ContextCache
from ninfer.runtime.kv.prefix import ROOT, Chunk, chunks
from ninfer.runtime.kv.session import SavedImage, Session, SessionError, Tokens
from ninfer.runtime.kv.tiers import Image, StoredPage, image_of
from ninfer.runtime.sequence import Sequence as Seq

MAX_IMAGES = 2  # of a saved session: where it ends, and the last place before


class SlotBusy(NinferError):
    """A sequence runs in the slot."""


class OtherSession(NinferError):
    """The slot holds another session than the one that was meant."""


class Slots:
    """Sessions of the engine's slots. But for `stats`, used by the engine's thread, between steps.

    running: the sequences in the slots. fingerprint: of everything that changes what cached bytes mean.
    """

    def __init__(self, running: Sequence[Seq | None], cache: ContextCache | None, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._running = running
        self._cache = cache
        self._held: list[Tokens | None] = [None] * len(running)

    def note(self, seq: Seq) -> None:
        """A sequence ends well, and leaves its slot."""
        end = seq.kv_len
        if self._cache is not None and self._cache.options.deterministic:
            end = min(end, seq.prompt_len)
        self._held[seq.slot] = Tokens((*seq.request.prompt_ids, *seq.generated)[:end])

    def stats(self, slot: int) -> Mapping[str, object]:
        held = self._held[slot]
        return {
            "retained": held is not None,
            "n_retained": 0 if held is None else len(held.ids),
            "session_digest": None if held is None else held.digest,
        }

    def save(self, slot: int, if_digest: str | None = None) -> Session:
        """What the cache has of the slot's last session. Raises SlotBusy, OtherSession or SessionError."""
        held, cache = self._meant(slot, if_digest), self._with_cache()
        try:
            return self._collect(slot, held, cache)
        finally:
            cache.settle()  # another thread writes it

    def _collect(self, slot: int, held: Tokens | None, cache: ContextCache) -> Session:
        if held is None:
            raise SessionError(f"slot {slot} has held no sequence yet")
        parts = list(chunks(held.ids))
        pages: list[StoredPage] = []
        for chunk in parts:
            page = cache.find_page(chunk) if len(chunk.tokens) == PAGE else None
            if page is None:
                break
            pages.append(page)
        if not cache.recurrent:
            if not pages:
                raise SessionError(f"the cache holds no whole page of {PAGE} tokens of slot {slot}'s session")
            return Session(Tokens(held.ids[: len(pages) * PAGE]), [p.data for p in pages])
        images = self._images(cache, parts[: len(pages) + 1], len(pages))
        if not images:
            raise SessionError(f"the cache holds no state of slot {slot}'s session any more, or it was too short")
        depth = images[-1].depth
        end = depth * PAGE + images[-1].tail_len
        return Session(Tokens(held.ids[:end]), [p.data for p in pages[:depth]], images)

    @staticmethod
    def _images(cache: ContextCache, parts: Sequence[Chunk], depth: int) -> list[SavedImage]:
        """Those on the way, the last ones, ascending."""
        found: list[Image] = []
        for whole in range(depth, -1, -1):
            following = parts[whole].tokens if whole < len(parts) else ()
            found += sorted(cache.images_at(parts, whole, following), key=lambda i: -len(i.tail))
        saved: list[SavedImage] = []
        for image in found:
            data = image.load() if len(saved) < MAX_IMAGES else None
            if data is not None:
                saved.append(SavedImage(image.depth, len(image.tail), *data))
        return saved[::-1]

    def restore(self, slot: int, session: Session) -> int:
        """Put a session where prompts find it; the slot counts as having held it. Returns its tokens.

        Raises SlotBusy, or SessionError where there is no room in host memory.
        """
        self._meant(slot, None)
        cache, ids = self._with_cache(), session.tokens.ids
        parts = list(chunks(ids))
        parents = [ROOT, *(part.key for part in parts)]
        stored = [StoredPage(parts[i], parents[i], data) for i, data in enumerate(session.pages)]
        images = [
            image_of(parents[i.depth], i.depth, ids[i.depth * PAGE :][: i.tail_len], i.state, i.tail)
            for i in session.images
        ]
        for name, room, needed in (
            ("pages", cache.host.capacity_bytes, sum(p.nbytes for p in stored)),
            ("states", cache.images.capacity_bytes, sum(i.nbytes for i in images)),
        ):
            if needed > room:
                raise SessionError(
                    f"the session has {needed >> 10} KiB of {name}, and there is room for {room >> 10}; "
                    "serve with a larger --host-cache-mib"
                )
        for page in reversed(stored):  # what was put first goes first, and that must be the end
            cache.host.put(page)
        for image in images:
            cache.images.put(image, image.num_tokens)
        self._held[slot] = session.tokens
        return len(ids)

    def erase(self, slot: int, if_digest: str | None = None) -> int:
        """Forget the slot's session, but for the beginning that others have too. Returns the tokens forgotten."""
        held = self._meant(slot, if_digest)
        if held is None:
            return 0
        self._held[slot] = None
        return self._with_cache().erase(held.ids)

    def _meant(self, slot: int, if_digest: str | None) -> Tokens | None:
        if self._running[slot] is not None:
            raise SlotBusy(f"slot {slot} is at work; wait until its request has ended")
        held = self._held[slot]
        if if_digest is not None and (held is None or held.digest != if_digest.lower()):
            there = "none" if held is None else held.digest
            raise OtherSession(f"slot {slot} holds session {there}, not {if_digest[:32]}")
        return held

    def _with_cache(self) -> ContextCache:
        if self._cache is None:
            raise SessionError("sessions are kept by the prefix cache, and it is off")
        return self._cache
