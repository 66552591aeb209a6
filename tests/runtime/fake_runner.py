"""A model made of lists, which refuses what a real cache would silently spoil."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ninfer.config import EngineConfig
from ninfer.ir.step import PAGE
from ninfer.runtime.batch import Draw, Drawn, Limits, SeqRows
from ninfer.runtime.engine import Engine
from ninfer.runtime.request import Delta, GenerateRequest, Sampling

DOMAIN = 1000


def limits(**changes: int) -> Limits:
    sizes = dict(max_rows=512, max_seqs=8, slots=8, pages=64, max_pages=16, context_len=1024, domain=DOMAIN)
    return Limits(**{**sizes, **changes})


def next_token(history: Sequence[int], seed: int) -> int:
    """What the model says after a history: any function of it will do."""
    return zlib.crc32(repr((tuple(history), seed)).encode()) % DOMAIN


class FakeRunner:
    """Tokens go to physical pages through the slot's page table; a step reads all of its history back from there.

    So a page shared by two sequences, a page used before it was set, or rows that do not continue the cache show up
    at once. fail: what a step should raise, given its rows.
    """

    def __init__(
        self,
        sizes: Limits | None = None,
        token: Callable[[Sequence[int], int], int] = next_token,
        fail: Callable[[Sequence[SeqRows]], Exception | None] = lambda rows: None,
    ) -> None:
        self.limits = sizes or limits()
        self.token = token
        self.fail = fail
        self.steps: list[list[SeqRows]] = []
        self.closed = False
        self._memory: dict[tuple[int, int], int] = {}  # (page, offset) -> token
        self._table: dict[tuple[int, int], int] = {}  # (slot, index) -> page
        self._cached: dict[int, list[int]] = {}  # by slot: what the page memory should say
        self.bias: dict[int, Mapping[int, float]] = {}
        self.masks: dict[int, Any] = {}

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        assert 0 <= slot < self.limits.slots and first + len(pages) <= self.limits.max_pages
        assert all(0 <= page < self.limits.pages for page in pages)
        for i, page in enumerate(pages, first):
            self._table[slot, i] = page

    def set_bias(self, slot: int, bias: Mapping[int, float]) -> None:
        self.bias[slot] = dict(bias)

    def set_mask(self, slot: int, words: Any) -> None:
        assert words.shape == ((self.limits.domain + 31) // 32,)
        self.masks[slot] = words.copy()

    def step(self, seqs: Sequence[SeqRows]) -> Sequence[Drawn | None]:
        assert not self.closed
        assert 1 <= len(seqs) <= self.limits.max_seqs
        assert 1 <= sum(len(s.tokens) for s in seqs) <= self.limits.max_rows
        assert all(s.tokens for s in seqs)
        assert len({s.slot for s in seqs}) == len(seqs)
        error = self.fail(seqs)
        if error is not None:
            raise error
        self.steps.append(list(seqs))
        return [self._one(s) for s in seqs]

    def _one(self, s: SeqRows) -> Drawn | None:
        if s.kv_len == 0:
            self._cached[s.slot] = []
        cached = self._cached[s.slot]
        assert s.kv_len == len(cached), f"slot {s.slot} holds {len(cached)} tokens, rows extend {s.kv_len}"
        for token in s.tokens:
            place = self._place(s.slot, len(cached))
            self._memory[place] = token
            cached.append(token)
        history = [self._memory[self._place(s.slot, i)] for i in range(len(cached))]
        assert history == cached, f"slot {s.slot}: somebody else wrote to its pages"
        if s.draw is None:
            return None
        return self._draw(s.slot, s.draw, history)

    def _draw(self, slot: int, draw: Draw, history: list[int]) -> Drawn:
        assert dict(draw.sampling.logit_bias) == dict(self.bias.get(slot, {})), f"slot {slot}: stale logit bias"
        token = self.token(history, draw.seed)
        if draw.masked:
            words = self.masks[slot]
            while not words[token >> 5] >> (token & 31) & 1:
                token = (token + 1) % self.limits.domain
        return Drawn(token, -1.0 if draw.logprobs is not None else None)

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        assert position < self.limits.context_len
        return self._table[slot, position // PAGE], position % PAGE

    def close(self) -> None:
        self.closed = True


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(model="fake", **changes)


def engine(runner: FakeRunner | None = None, clock: Clock | None = None, **changes: Any) -> Engine:
    return Engine(runner or FakeRunner(), config(**changes), clock=clock or Clock())


def request(id: str, prompt: int | Sequence[int] = 5, max_tokens: int = 4, **more: Any) -> GenerateRequest:
    """prompt: the tokens, or how many."""
    ids = tuple((len(id) + i) % DOMAIN for i in range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    more.setdefault("sampling", Sampling(seed=7))
    return GenerateRequest(id=id, prompt_ids=ids, max_tokens=max_tokens, **more)


def expected(r: GenerateRequest, count: int | None = None) -> list[int]:
    """What the model says to a request that runs alone."""
    history = list(r.prompt_ids)
    for _ in range(r.max_tokens if count is None else count):
        history.append(next_token(history, r.sampling.seed or 0))
    return history[len(r.prompt_ids) :]


def tokens(deltas: Sequence[Delta]) -> list[int]:
    return [token.id for delta in deltas for token in delta.tokens]
