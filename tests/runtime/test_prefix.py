from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ninfer.ir.step import PAGE
from ninfer.runtime.kv import prefix
from ninfer.runtime.kv.pages import Pages, num_pages
from ninfer.runtime.kv.prefix import ROOT, Chain, Match, Media, PrefixIndex, chunks


def text(*parts: tuple[int, int]) -> list[int]:
    """(token, times) after one another."""
    return [token for token, times in parts for _ in range(times)]


class Cache:
    """An index with its pool, and what each page holds."""

    def __init__(self, count: int = 32) -> None:
        self.pages = Pages(count)
        self.index = PrefixIndex(self.pages)
        self.content: dict[int, tuple[int, ...]] = {}
        self.live: list[Chain] = []

    def admit(self, tokens: Sequence[int], media: Sequence[Media] = ()) -> tuple[Chain, Match] | None:
        """What admission does: match, hold, make room, take pages, fill and offer them."""
        prompt = list(chunks(tokens, media))
        match = self.index.match(prompt)
        chain = self.index.start(match)
        need = len(prompt) - len(chain.pages)
        self.index.evict(need - self.pages.num_free)
        if need > self.pages.num_free:
            self.index.release(chain)
            return None
        chain.pages += self.pages.take(need)
        for chunk, page in zip(prompt, chain.pages, strict=True):
            if page in match.pages:
                assert self.content[page] == chunk.tokens
            self.content[page] = chunk.tokens
        for chunk in prompt[len(match.pages) :]:
            self.index.extend(chain, chunk)
        self.live.append(chain)
        return chain, match

    def finish(self, chain: Chain) -> None:
        self.live.remove(chain)
        self.index.release(chain)

    def run(self, tokens: Sequence[int], media: Sequence[Media] = ()) -> Match:
        admitted = self.admit(tokens, media)
        assert admitted
        self.finish(admitted[0])
        return admitted[1]

    def check(self) -> None:
        self.index.check()
        self.pages.check([self.index.held(), *(chain.held() for chain in self.live)])


def test_a_repeated_prompt_is_found_but_for_its_last_token() -> None:
    cache = Cache()
    tokens = text((1, 3 * PAGE))
    assert cache.run(tokens).num_tokens == 0
    match = cache.run(tokens)
    assert (len(match.pages), match.tail_tokens, match.num_tokens) == (2, PAGE - 1, 3 * PAGE - 1)
    longer = cache.run([*tokens, 5])
    assert (len(longer.pages), longer.tail_tokens) == (3, 0)


def test_a_tail_is_found_at_any_token() -> None:
    cache = Cache()
    cache.run(text((1, 100), (2, 50)))
    match = cache.run(text((1, 100), (3, 50)))
    assert (len(match.pages), match.tail_tokens) == (1, 36)
    assert cache.content[match.tail or 0][:36] == (1,) * 36


def test_equal_pages_after_different_histories_are_different() -> None:
    cache = Cache()
    cache.run(text((1, PAGE), (9, PAGE), (0, 1)))
    match = cache.run(text((2, PAGE), (9, PAGE), (0, 1)))
    assert match.num_tokens == 0


def test_media_are_part_of_the_identity() -> None:
    cache = Cache()
    tokens = text((1, PAGE), (7, 10), (1, 2 * PAGE))
    cat, dog = ([Media(PAGE, PAGE + 10, digest)] for digest in (b"cat", b"dog"))
    cache.run(tokens, cat)
    assert cache.run(tokens, dog).num_tokens == PAGE
    assert cache.run(tokens, cat).num_whole_tokens == 3 * PAGE
    assert cache.run(tokens).num_tokens == PAGE


def test_a_key_names_the_whole_history() -> None:
    keys = [c.key for c in chunks(text((1, 2 * PAGE)))]
    assert len({ROOT, *keys}) == 3
    assert keys == [c.key for c in chunks(text((1, 2 * PAGE), (5, 7)))][:2]
    cache = Cache()
    cache.run(text((1, 2 * PAGE), (5, 7)))
    assert cache.index.match(list(chunks(text((1, 2 * PAGE), (6, 7))))).key == keys[1]


def test_hashes_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "page_key", lambda parent, tokens, extra=b"": bytes([parent[0] + 1]) * 16)
    cache = Cache()
    a, b = text((1, 3 * PAGE), (0, 1)), text((1, PAGE), (2, 2 * PAGE), (0, 1))
    cache.run(a)
    assert len(cache.run(b).pages) == 1
    assert len(cache.run(a).pages) == 3
    cache.check()


def test_two_who_compute_the_same_keep_one_page_known() -> None:
    cache = Cache()
    tokens = text((1, 2 * PAGE))
    prompt = list(chunks(tokens))
    a, b = (cache.index.start(cache.index.match(prompt)) for _ in range(2))
    for chain in (a, b):
        chain.pages += cache.pages.take(4)
        cache.live.append(chain)
    for chunk in prompt:
        cache.index.extend(a, chunk)
        cache.index.extend(b, chunk)
    assert b.pinned == dict(enumerate(a.pages[:2]))
    own = list(chunks([*tokens, *text((3, PAGE))]))[2]
    cache.index.extend(b, own)  # b goes on, on top of pages that a computed
    cache.check()
    cache.finish(a)
    cache.check()
    assert cache.index.num_evictable == 0
    cache.finish(b)
    cache.check()
    assert cache.index.num_evictable == 3
    assert len(cache.index.match(list(chunks([*tokens, *text((3, PAGE)), 0]))).pages) == 3


def test_what_is_used_is_never_evicted() -> None:
    cache = Cache(4)
    admitted = cache.admit(text((1, 2 * PAGE)))
    assert admitted
    cache.run(text((2, 2 * PAGE)))
    assert cache.index.evict(99) == 2
    assert cache.pages.num_free == 2
    assert cache.admit(text((3, 3 * PAGE))) is None
    cache.check()
    cache.finish(admitted[0])
    assert cache.admit(text((3, 3 * PAGE)))
    cache.check()


def test_a_chain_is_evicted_from_its_end_and_the_oldest_goes_first() -> None:
    cache = Cache()
    old, new = text((1, 3 * PAGE), (0, 1)), text((2, 3 * PAGE), (0, 1))
    cache.run(old)
    cache.run(new)
    cache.index.evict(3)  # the partial page, and two whole ones
    found = [len(cache.index.match(list(chunks(t))).pages) for t in (old, new)]
    assert found == [1, 3]


def test_using_a_chain_makes_it_young() -> None:
    cache = Cache()
    old, new = text((1, 2 * PAGE)), text((2, 2 * PAGE))
    cache.run(old)
    cache.run(new)
    cache.run(old)
    cache.index.evict(3)
    found = [cache.index.match(list(chunks(t))).num_tokens for t in (old, new)]
    assert found[0] > 0 and found[1] == 0


def test_a_longer_tail_replaces_the_one_it_continues() -> None:
    cache = Cache()
    cache.run(text((1, 70)))
    cache.run(text((1, 80)))
    assert len(cache.index) == 2
    cache.run(text((1, 75), (2, 20)))
    assert len(cache.index) == 3


def test_clear_forgets_all_that_is_idle() -> None:
    cache = Cache()
    cache.run(text((1, 200)))
    cache.index.clear()
    assert len(cache.index) == 0 and cache.pages.num_free == 32


def common_pages(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while (n + 1) * PAGE <= min(len(a), len(b)) and a[n * PAGE : (n + 1) * PAGE] == b[n * PAGE : (n + 1) * PAGE]:
        n += 1
    return n


@pytest.mark.parametrize("seed", range(10))
def test_random_conversations_keep_the_books_and_find_what_is_there(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice([12, 40, 400])
    cache = Cache(count)
    histories: list[list[int]] = []
    for _ in range(400):
        if cache.live and rng.random() < 0.5:
            cache.finish(rng.choice(cache.live))
        elif rng.random() < 0.1:
            cache.index.evict(rng.randint(0, 4))
        else:
            base = rng.choice(histories) if histories and rng.random() < 0.8 else []
            tokens = base[: rng.randint(0, len(base))] + text((rng.randint(1, 3), rng.randint(1, 150)))
            if num_pages(len(tokens)) > count:
                continue
            admitted = cache.admit(tokens)
            if admitted is None:
                assert cache.live
                cache.check()
                continue
            best = max((common_pages(tokens[:-1], h) for h in histories), default=0)
            assert len(admitted[1].pages) <= best
            histories.append(tokens)
        cache.check()
    for chain in list(cache.live):
        cache.finish(chain)
    cache.check()
    cache.index.clear()
    assert cache.pages.num_free == count


def test_without_eviction_the_longest_beginning_is_always_found() -> None:
    rng = random.Random(5)
    cache = Cache(4000)
    histories: list[list[int]] = []
    for _ in range(150):
        base = rng.choice(histories) if histories else []
        tokens = base[: rng.randint(0, len(base))] + text((rng.randint(1, 3), rng.randint(1, 150)))
        best = max((common_pages(tokens[:-1], h) for h in histories), default=0)
        assert len(cache.run(tokens).pages) == best
        histories.append(tokens)
