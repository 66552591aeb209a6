"""The context cache: what a new prompt shares with earlier ones is not computed again.

Pages are found by content (prefix.py). A recurrent model can go on only where its state was kept too: an image, at the
end of a reply (endpoint), at the last page end of a prompt (for a turn that is generated again or edited), where a
prompt parts from what is known (branch), and now and then in a long prompt. At least one prompt token is always
computed.

In a deterministic engine prompts go on at page ends only, from pages and images that prompts left: what a step
computes then starts where it would have started without the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import define, evolve, field, frozen

from ninfer.ir.step import PAGE
from ninfer.runtime.kv.disk import DiskTier
from ninfer.runtime.kv.pages import Pages
from ninfer.runtime.kv.prefix import ROOT, Chain, Chunk, Key, Match, PrefixIndex, chunks
from ninfer.runtime.kv.store import Bytes, CacheStore
from ninfer.runtime.kv.tiers import HostTier, Image, ImageTier, StoredPage, Tier, image_of
from ninfer.runtime.sequence import Sequence as Seq

log = logging.getLogger(__name__)

MAX_TAPS = 8  # images taken during one prompt


@frozen(kw_only=True)
class CacheOptions:
    """shared: pages are known to others as soon as they are full, else when their sequence is done.

    ladder_tokens: between images of a long prompt, doubling backwards.
    """

    host_bytes: int = 1 << 30
    deterministic: bool = False
    shared: bool = False
    ladder_tokens: int = 4096


@frozen
class Plan:
    """How a prompt begins. match: pages on the device; stored: keys of whole pages that follow, in other tiers.

    image: for a recurrent model that does not begin anew. num_tokens: what is not computed. num_known: tokens whose
    pages are known, though no image allows to use them all.
    """

    match: Match
    stored: tuple[Chunk, ...] = ()
    image: Image | None = None
    num_tokens: int = 0
    num_known: int = 0


COLD = Plan(Match((), ROOT))


@define(eq=False)
class _Live:
    """A sequence that runs."""

    plan: Plan
    chain: Chain
    chunks: list[Chunk]
    taps: list[int] = field(factory=list)


class ContextCache:
    """Gives sequences their pages, and takes them back. Used by the engine's thread."""

    def __init__(
        self,
        pages: Pages,
        store: CacheStore,
        options: CacheOptions | None = None,
        disk: DiskTier | None = None,
        more: Sequence[Tier] = (),
    ) -> None:
        """more: tiers that are read alone."""
        self.options = options or CacheOptions()
        self.pages = pages
        self.index = PrefixIndex(pages, self._spill)
        self.recurrent = store.image_bytes > 0
        self._store = store
        # images are larger than pages, and as many as conversations
        share = self.options.host_bytes // 2 if self.recurrent else 0
        self.images = ImageTier(share, self.knows)
        self.host = HostTier(self.options.host_bytes - share)
        store.reserve((self.options.host_bytes - share) // max(store.page_bytes, 1), share // max(store.image_bytes, 1))
        self.disk = disk
        self.num_evicted = 0
        self._tiers: tuple[Tier, ...] = (self.images, self.host, *(() if disk is None else (disk,)), *more)
        self._live: dict[Seq, _Live] = {}
        self._chunks: dict[Seq, list[Chunk]] = {}  # of those that wait

    def knows(self, key: Key) -> bool:
        """Whether a page is anywhere."""
        return key in self.index or any(tier.has_page(key) for tier in self._tiers)

    # For the scheduler

    def reserve(self, seq: Seq, count: int) -> list[int] | None:
        """`count` pages, known ones first; None: there are not so many now."""
        parts = self._chunks.get(seq)
        if parts is None:
            parts = self._chunks[seq] = list(chunks(seq.request.prompt_ids))
        plan = self._plan(parts)
        chain = self._take(plan, count)
        if chain is None and plan.match.tail is not None:  # a page to copy from is one more than there may be
            plan = evolve(plan, match=self._trimmed(plan.match, parts, len(plan.match.pages)))
            chain = self._take(plan, count)
        if chain is None:
            return None
        del self._chunks[seq]
        self._live[seq] = _Live(plan, chain, parts)
        return chain.pages

    def _take(self, plan: Plan, count: int) -> Chain | None:
        chain = self.index.start(plan.match)
        if plan.match.tail is not None:
            self.index.hold(plan.match.tail)
        short = count - len(chain.pages) - self.pages.num_free
        if short > self.index.num_evictable:
            self._unhold_tail(plan)
            self.index.release(chain)
            return None
        if short > 0:
            self.num_evicted += self.index.evict(short)
        chain.pages.extend(self.pages.take(count - len(chain.pages)))
        return chain

    def release(self, seq: Seq) -> None:
        """The sequence's pages are its own no longer. A no-op for one that has none."""
        self._chunks.pop(seq, None)
        live = self._live.pop(seq, None)
        if live is not None:
            self._unhold_tail(live.plan)
            self.index.release(live.chain)

    def next_stop(self, seq: Seq) -> int:
        """Where the next prompt step ends at the latest."""
        live = self._live.get(seq)
        taps = () if live is None else live.taps
        return next((tap for tap in taps if tap > seq.kv_len), seq.prompt_len)

    # For the engine

    def resume(self, seq: Seq) -> None:
        """Bring the slot of an admitted sequence to where its plan goes on."""
        live = self._live[seq]
        at = self._restore(live)
        plan = live.plan
        if plan.match.tail is not None:
            if at == plan.match.num_whole_tokens + PAGE * len(plan.stored):
                self._store.copy_page(plan.match.tail, live.chain.pages[at // PAGE])
                at += plan.match.tail_tokens
            self._unhold_tail(plan)
        if self.recurrent:
            at = self._restore_image(seq, live, at)
        live.plan = Plan(Match(plan.match.pages, plan.match.key), num_tokens=at, num_known=plan.num_known)
        live.taps = self._taps(seq, live.plan)
        if at:
            given = seq.request.prefix_len if seq.request.prefix_given else 0
            self._store.resume(seq.slot, seq.request.prompt_ids[:at], given)
        seq.kv_len = seq.num_cached = at

    def progress(self, seq: Seq) -> None:
        """A prompt step of a sequence is in."""
        live = self._live[seq]
        if self.options.shared:
            self._publish(live, live.chunks, seq.kv_len)
        if seq.kv_len in live.taps:
            depth = seq.kv_len // PAGE
            state = self._store.read_image(seq.slot)
            self._keep_image(live, image_of(live.chunks[depth - 1].key, depth, (), state, None))

    def finish(self, seq: Seq) -> None:
        """A sequence ends well: what it computed is of use to others. Comes before `release`.

        The slot's recurrent state is that after kv_len tokens, so it is kept where these are the reply's: a round of
        drafts that verifies what was drawn may go on behind an end token.
        """
        live = self._live.get(seq)
        if live is None:
            return
        end = min(seq.kv_len, seq.prompt_len) if self.options.deterministic else seq.kv_len
        tokens = (*seq.request.prompt_ids, *seq.generated)[:end]
        end = len(tokens)
        parts = live.chunks if len(tokens) == seq.prompt_len else list(chunks(tokens))
        self._publish(live, parts, end)
        tail = end % PAGE
        if not self.options.deterministic and end > seq.num_cached:
            if self.recurrent and end == seq.kv_len:
                key = parts[end // PAGE - 1].key if end >= PAGE else ROOT
                page = self._store.read_page(live.chain.pages[end // PAGE]) if tail else None
                state = self._store.read_image(seq.slot)
                self._keep_image(live, image_of(key, end // PAGE, parts[-1].tokens if tail else (), state, page))
            elif tail and not self.recurrent and not live.chain.closed and live.chain.num_known == end // PAGE:
                self.index.extend(live.chain, parts[-1])
        if self.disk is not None:
            self._write_through(self.disk, live, parts[: end // PAGE])

    # For saved sessions

    def find_page(self, chunk: Chunk) -> StoredPage | None:
        """A whole page, wherever it is; its parent is of no account here."""
        page = self.index.page_of(chunk)
        return self._stored_page(chunk) if page is None else StoredPage(chunk, ROOT, self._store.read_page(page))

    def settle(self) -> None:
        """Wait until all that was read is there."""
        self._store.settle()

    def images_at(self, parts: Sequence[Chunk], whole: int, following: tuple[int, ...]) -> list[Image]:
        """Images after `whole` pages of a chain whose next tokens are `following`."""
        key = parts[whole - 1].key if whole else ROOT
        found = (i for tier in self._tiers for i in tier.images(key))
        fits = [i for i in found if i.depth == whole and i.num_tokens and i.tail == following[: len(i.tail)]]
        return list({i.tail: i for i in reversed(fits)}.values())  # the nearest tier's

    def erase(self, tokens: Sequence[int]) -> int:
        """Forget a chain from its end, up to where others continue it or use it. Returns the tokens forgotten."""
        parts = list(chunks(tokens))
        keeping = (self.images, self.host) if self.disk is None else (self.images, self.host, self.disk)
        if self.disk is not None:
            self.disk.flush()
        if len(tokens) % PAGE:
            self.index.drop(parts[-1])
        for whole in range(len(tokens) // PAGE, 0, -1):
            part, following = parts[whole - 1], parts[whole].tokens if whole < len(parts) else ()
            gone = self.index.drop(part)
            for tier in keeping:
                tier.drop(part.key, following, page=gone)
            if not gone:
                return len(tokens) - whole * PAGE
        for tier in keeping:
            tier.drop(ROOT, tuple(tokens[:PAGE]), page=False)
        return len(tokens)

    def close(self) -> None:
        """Wait for what is being written."""
        if self.disk is not None:
            self.disk.close()

    def held(self) -> Iterator[list[int]]:
        """Holders of pages, for Pages.check."""
        yield self.index.held()
        for live in self._live.values():
            yield live.chain.held()
            if live.plan.match.tail is not None:
                yield [live.plan.match.tail]

    @property
    def num_idle(self) -> int:
        """Pages that only the cache holds, and would give up."""
        return self.index.num_evictable

    def stats(self) -> tuple[Mapping[str, object], ...]:
        size = self._store.page_bytes
        device: dict[str, object] = {
            "name": "device",
            "used_bytes": size * len(self.index),
            "capacity_bytes": size * self.pages.count,
            "pages": len(self.index),
            "evicted": self.num_evicted,
        }
        return (device, *(tier.stats() for tier in self._tiers))

    # Plans

    def _unhold_tail(self, plan: Plan) -> None:
        if plan.match.tail is not None:
            self.index.unhold(plan.match.tail)

    def _plan(self, parts: Sequence[Chunk]) -> Plan:
        limit = sum(len(part.tokens) for part in parts) - 1
        if self.options.deterministic:
            limit = limit // PAGE * PAGE
        match = self.index.match(parts)
        whole = min(len(match.pages), limit // PAGE)
        stored: list[Chunk] = []
        while (whole + len(stored) + 1) * PAGE <= limit and self._is_stored(parts[whole + len(stored)].key):
            stored.append(parts[whole + len(stored)])
        known = (whole + len(stored)) * PAGE
        if not self.recurrent:
            use_tail = not stored and match.tail is not None and not self.options.deterministic
            trimmed = self._trimmed(match, parts, whole)
            if use_tail and whole == len(match.pages):
                return Plan(match, num_tokens=match.num_tokens, num_known=known)
            return Plan(trimmed, tuple(stored), None, known, known)
        image = self._best_image(parts, known // PAGE, limit)
        if image is None:
            return Plan(COLD.match, num_known=known)
        on_device = min(whole, image.depth)
        return Plan(
            self._trimmed(match, parts, on_device),
            tuple(stored[: image.depth - on_device]),
            image,
            image.num_tokens,
            known,
        )

    @staticmethod
    def _trimmed(match: Match, parts: Sequence[Chunk], whole: int) -> Match:
        return Match(match.pages[:whole], parts[whole - 1].key if whole else ROOT)

    def _is_stored(self, key: Key) -> bool:
        return any(tier.has_page(key) for tier in self._tiers)

    def _best_image(self, parts: Sequence[Chunk], depth: int, limit: int) -> Image | None:
        """The one that covers most of a prompt whose first `depth` pages are to be had."""
        for whole in range(depth, -1, -1):
            key = parts[whole - 1].key if whole else ROOT
            following = parts[whole].tokens if whole < len(parts) else ()
            best: Image | None = None
            for image in (i for tier in self._tiers for i in tier.images(key)):
                fits = image.depth == whole and 0 < image.num_tokens <= limit
                fits &= image.tail == following[: len(image.tail)]
                fits &= not (self.options.deterministic and image.tail)
                if fits and (best is None or len(image.tail) > len(best.tail)):
                    best = image
            if best is not None:
                return best
        return None

    def _taps(self, seq: Seq, plan: Plan) -> list[int]:
        """Places of a prompt where its state is kept: page ends, ascending."""
        if not self.recurrent:
            return []
        last = (seq.prompt_len - 1) // PAGE * PAGE
        wanted = [last, *(min(n // PAGE * PAGE, last) for n in (plan.num_known, seq.request.prefix_len))]
        step = self.options.ladder_tokens
        while step < seq.prompt_len and len(wanted) < MAX_TAPS:
            wanted.append((seq.prompt_len - step) // PAGE * PAGE)
            step *= 2
        return sorted({tap for tap in wanted if tap > plan.num_tokens})

    # Between tiers

    def _restore(self, live: _Live) -> int:
        """Whole pages of the plan into the sequence's own. Tokens that are there now: fewer where a tier lost one."""
        at = live.plan.match.num_whole_tokens
        for chunk in live.plan.stored:
            page = self._stored_page(chunk)
            if page is None:
                break
            self._store.write_page(live.chain.pages[at // PAGE], page.data)
            self.index.extend(live.chain, chunk)
            at += PAGE
        return at

    def _stored_page(self, chunk: Chunk) -> StoredPage | None:
        for tier in self._tiers:
            page = tier.page(chunk.key)
            if page is not None and page.chunk == chunk and len(page.data) == self._store.page_bytes:
                return page
        return None

    def _restore_image(self, seq: Seq, live: _Live, at: int) -> int:
        """The state, where all pages below it are. Returns the tokens that need not be computed.

        Pages past it that others know are written again, with what they hold already.
        """
        image = live.plan.image
        while image is not None:
            data = image.load() if image.depth * PAGE <= at else None
            if data is not None and self._fits(image, *data):
                state, page = data
                if page is not None:
                    self._store.write_page(live.chain.pages[image.depth], page)
                self._store.write_image(seq.slot, state)
                self.images.hit(image)
                return image.num_tokens
            # lost or damaged, or a page below it was: one less deep may still do
            log.info("the image at token %d of %s is lost", image.num_tokens, seq.request.id)
            image = self._best_image(live.chunks, min(at // PAGE, image.depth), image.num_tokens - 1)
        return 0

    def _fits(self, image: Image, state: Bytes, page: Bytes | None) -> bool:
        if len(state) != self._store.image_bytes or bool(image.tail) != (page is not None):
            return False
        return page is None or len(page) == self._store.page_bytes

    def _publish(self, live: _Live, parts: Sequence[Chunk], end: int) -> None:
        while not live.chain.closed and (live.chain.num_known + 1) * PAGE <= end:
            self.index.extend(live.chain, parts[live.chain.num_known])

    def _keep_image(self, live: _Live, image: Image) -> None:
        self.images.put(image, image.num_tokens - live.plan.num_tokens)
        if self.disk is not None:
            self._store.settle()
            self.disk.put_image(image)

    def _spill(self, chunk: Chunk, parent: Key, page: int) -> None:
        """A page leaves the device."""
        if self.host.capacity_bytes and len(chunk.tokens) == PAGE:
            self.host.put(StoredPage(chunk, parent, self._store.read_page(page)))

    def _write_through(self, disk: DiskTier, live: _Live, parts: Iterable[Chunk]) -> None:
        parent = ROOT
        for place, chunk in enumerate(parts):
            if not disk.has_written(chunk.key):
                data = self._store.read_page(live.chain.pages[place])
                self._store.settle()
                disk.put_page(StoredPage(chunk, parent, data))
            parent = chunk.key


class PlainPages:
    """Pages without a cache: the same methods for the scheduler."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self._live: dict[Seq, list[int]] = {}

    def reserve(self, seq: Seq, count: int) -> list[int] | None:
        if count > self.pages.num_free:
            return None
        self._live[seq] = self.pages.take(count)
        return self._live[seq]

    def release(self, seq: Seq) -> None:
        self.pages.release(reversed(self._live.pop(seq, [])))  # the page freed last is the warmest

    def next_stop(self, seq: Seq) -> int:
        return seq.prompt_len

    def held(self) -> Iterator[list[int]]:
        yield from self._live.values()

    @property
    def num_idle(self) -> int:
        return 0


PageSource = ContextCache | PlainPages

__all__ = ["CacheOptions", "ContextCache", "PageSource", "PlainPages"]
