"""A model made of lists, which refuses what a real cache would silently spoil."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.config import EngineConfig
from ninfer.ir.step import MASK_ROWS, PAGE
from ninfer.runtime.batch import Draw, Drawn, Limits, SeqRows
from ninfer.runtime.draft.drafter import Advance, Want
from ninfer.runtime.draft.rounds import Speculation
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
        self.verified: list[list[SeqRows]] = []
        self.closed = False
        self._memory: dict[tuple[int, int], int] = {}  # (page, offset) -> token
        self._table: dict[tuple[int, int], int] = {}  # (slot, index) -> page
        self._cached: dict[int, list[int]] = {}  # by slot: what the page memory should say
        self.cache_store = FakeStore(self)
        self.bias: dict[int, Mapping[int, float]] = {}
        self.masks: dict[tuple[int, int], Any] = {}

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        assert 0 <= slot < self.limits.slots and first + len(pages) <= self.limits.max_pages
        assert all(0 <= page < self.limits.pages for page in pages)
        for i, page in enumerate(pages, first):
            self._table[slot, i] = page

    def set_bias(self, slot: int, bias: Mapping[int, float]) -> None:
        self.bias[slot] = dict(bias)

    def set_mask(self, slot: int, words: Any, row: int = 0) -> None:
        assert words.shape == ((self.limits.domain + 31) // 32,) and row < MASK_ROWS
        self.masks[slot, row] = words.copy()

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
        return self._draw(s.slot, s.draw_at(0), history)

    def verify(self, seqs: Sequence[SeqRows]) -> Mapping[str, Any]:
        """The "verify" graph: a draw after every row; what the slots hold stays as it was until `fold`."""
        error = self.fail(seqs)
        if error is not None:
            raise error
        self.verified.append(list(seqs))
        found: list[Drawn] = []
        for s in seqs:
            cached = self._cached[s.slot]
            assert s.kv_len == len(cached), f"slot {s.slot} holds {len(cached)} tokens, rows extend {s.kv_len}"
            assert s.draw is not None and s.num_draws == len(s.tokens) <= MASK_ROWS
            history = [self._memory[self._place(s.slot, i)] for i in range(len(cached))]
            for i, token in enumerate(s.tokens):
                self._memory[self._place(s.slot, len(history))] = token
                history.append(token)
                found.append(self._draw(s.slot, s.draw_at(i), history, i))
        return {
            "token": np.array([d.token for d in found], np.int32),
            "logprob": np.array([[-1.0 - i] for i in range(len(found))], np.float32),
            "top": np.zeros((len(found), 0), np.int32),
        }

    def fold(self, seqs: Sequence[SeqRows]) -> Mapping[str, Any]:
        """The "fold" graph: the slots hold these rows of the last verification too."""
        for s in seqs:
            last = next(v for v in self.verified[-1] if v.slot == s.slot)
            assert s.kv_len == last.kv_len and s.tokens == last.tokens[: len(s.tokens)] and s.draw is None
            self._cached[s.slot] += s.tokens
        return {}

    def _draw(self, slot: int, draw: Draw, history: list[int], row: int = 0) -> Drawn:
        assert dict(draw.sampling.logit_bias) == dict(self.bias.get(slot, {})), f"slot {slot}: stale logit bias"
        token = self.token(history, draw.seed)
        if draw.masked:
            words = self.masks[slot, row]
            while not words[token >> 5] >> (token & 31) & 1:
                token = (token + 1) % self.limits.domain
        return Drawn(token, -1.0 if draw.logprobs is not None else None)

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        assert position < self.limits.context_len
        return self._table[slot, position // PAGE], position % PAGE

    def close(self) -> None:
        self.closed = True


class FakeStore:
    """The runner's pages and slots for the context cache.   recurrent: a slot's state is its whole history."""

    def __init__(self, runner: FakeRunner, recurrent: bool = False) -> None:
        self.runner = runner
        self.page_bytes = 4 * PAGE
        self.image_bytes = 4 * runner.limits.context_len if recurrent else 0

    def read_page(self, page: int) -> NDArray[np.uint8]:
        tokens = [self.runner._memory.get((page, i), -1) for i in range(PAGE)]
        return np.array(tokens, np.int32).view(np.uint8)

    def write_page(self, page: int, data: NDArray[np.uint8]) -> None:
        for i, token in enumerate(data.view(np.int32).tolist()):
            self.runner._memory[page, i] = token

    def copy_page(self, source: int, to: int) -> None:
        self.write_page(to, self.read_page(source))

    def read_image(self, slot: int) -> NDArray[np.uint8]:
        image = np.full(self.image_bytes // 4, -1, np.int32)
        history = self.runner._cached[slot]
        image[: len(history)] = history
        return image.view(np.uint8)

    def settle(self) -> None:
        pass

    def reserve(self, pages: int, images: int) -> None:
        self.reserved = pages, images

    def write_image(self, slot: int, data: NDArray[np.uint8]) -> None:
        self.runner._cached[slot] = [t for t in data.view(np.int32).tolist() if t >= 0]

    def resume(self, slot: int, tokens: Sequence[int], skip: int = 0) -> None:
        if self.image_bytes:
            assert self.runner._cached[slot] == list(tokens), "the state is of another history"
        self.runner._cached[slot] = list(tokens)


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


class Foresight:
    """A drafter that knows the model, and is wrong wherever `wrong(position)` says so."""

    name = "foresight"

    def __init__(self, runner: FakeRunner, wrong: Callable[[int], bool] = lambda position: False) -> None:
        self.runner, self.wrong = runner, wrong
        self.known: dict[int, list[int]] = {}  # by slot
        self.seeds: dict[int, int] = {}  # by the first token of a prompt, which requests of a test have to themselves

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        self.known[slot] = list(prompt)

    def end(self, slot: int) -> None:
        self.known.pop(slot, None)

    def advance(self, parts: Sequence[Advance]) -> None:
        for p in parts:
            known = self.known[p.slot]
            assert p.kv_len < len(known) and p.following, "tokens came out of order"
            del known[p.kv_len + 1 :]
            known += p.following

    def propose(self, wants: Sequence[Want]) -> list[tuple[int, ...]]:
        return [self._propose(w) for w in wants]

    def _propose(self, w: Want) -> tuple[int, ...]:
        history = list(self.known[w.slot])
        assert len(history) == w.kv_len + 1 and history[-1] == w.last
        n = len(history)
        for _ in range(w.limit):
            token = self.runner.token(history, self.seeds.get(history[0], 7))
            history.append((token + self.wrong(len(history))) % DOMAIN)
        return tuple(history[n:])


def speculative(
    runner: FakeRunner, num_drafts: int, *, wrong: Callable[[int], bool] = lambda position: False, **changes: Any
) -> tuple[Engine, Foresight]:
    """An engine with drafts, and its drafter."""
    drafter = Foresight(runner, wrong)
    speculation = Speculation(runner.verify, runner.fold, drafter, None, num_drafts, 0)
    return Engine(runner, config(**changes), speculation=speculation, clock=Clock()), drafter


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
