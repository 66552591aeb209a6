"""What a client asks for and what the engine answers, free of any dialect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from attrs import field, frozen

T = TypeVar("T")


@frozen(kw_only=True)
class Sampling:
    """How a token is drawn. Filters apply in the order top_k, top_p, min_p, after penalties and bias.

    temperature 0 is argmax; top_k 0, top_p 1 and min_p 0 filter nothing. seed None: drawn per request.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(factory=dict)

    @property
    def has_penalties(self) -> bool:
        """Whether draws depend on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@frozen
class Switch:
    """From the token behind `after` on, a reply is drawn otherwise. seed None: the one it had; the bias stays."""

    after: int
    sampling: Sampling


class FinishReason(StrEnum):
    STOP = "stop"  # an end token, or a stop string found by the text stream
    LENGTH = "length"  # max_tokens, or the window is full
    CANCELLED = "cancelled"
    ERROR = "error"


class TokenMask(Protocol):
    """A grammar matcher: says which tokens may come next, and is told what came."""

    def fill(self, row: object) -> bool:
        """Write the bit mask of allowed tokens into an int32 array [ceil(V/32)]; False: all are allowed."""

    def accept(self, token: int) -> bool: ...

    def rollback(self, num_tokens: int) -> None: ...


@frozen(kw_only=True)
class GenerateRequest:
    """One sequence to generate. Text-level work (template, tokenizer, stop strings) is done outside."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling = field(factory=Sampling)
    max_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()  # end tokens; empty: generate to max_tokens
    logprobs: int | None = None  # None: no log-probabilities; n: the drawn token's and the n best (0..20)
    mask: TokenMask | None = None
    switch: Switch | None = None
    prefix_len: int = 0  # prompt tokens that other requests begin with as well
    prefix_given: bool = False  # these stand for a state that was given, and cannot be computed from them
    timed: bool = False  # timings in every delta, and a delta for every chunk of the prompt but the last


@frozen
class TokenOut:
    """A generated token. logprob and top are of the model's raw distribution (before bias and filters)."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@frozen(kw_only=True)
class Timings:
    """Seconds and counts of a request, filled in as far as it has come."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    slot: int | None = None  # that it ran in


@frozen(kw_only=True)
class Delta:
    """What one step gave one request. The last delta has `finish`; an end token is not among `tokens`."""

    request_id: str
    tokens: tuple[TokenOut, ...] = ()
    num_cached_tokens: int = 0  # of the prompt: not computed anew
    finish: FinishReason | None = None
    stop_id: int | None = None  # the end token that finished it
    error: str | None = None  # with finish ERROR
    timings: Timings | None = None  # with finish, after rounds of drafts (a stop string may lie inside), and if timed
    num_prefilled_tokens: int | None = None  # of the prompt, so far: in deltas that say only that


@frozen(kw_only=True)
class DraftStats:
    """Counts since start. A sequence's part of a round counts as a round; plain: those of them without drafts.

    accepted_at: accepted drafts by their place in the round; copied: drafts that were copies of earlier text.
    """

    num_rounds: int = 0
    num_plain_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    num_copied: int = 0
    num_copies_accepted: int = 0


@frozen(kw_only=True)
class EngineStats:
    """A snapshot for /metrics, /slots and /health."""

    num_running: int = 0
    num_waiting: int = 0
    max_concurrency: int = 1
    num_pages: int = 0
    num_free_pages: int = 0
    num_prompt_tokens: int = 0  # since start
    num_generated_tokens: int = 0  # since start
    num_requests: int = 0  # finished since start
    num_cancelled: int = 0
    num_cached_tokens: int = 0  # prompt tokens that were not computed anew, of finished requests
    num_rounds: int = 0  # decode steps
    num_round_rows: int = 0  # rows of those
    prefill_s: float = 0.0
    decode_s: float = 0.0
    seconds_since_step: float = 0.0
    failure: str | None = None
    slots: tuple[Mapping[str, object], ...] = ()
    queue: tuple[tuple[str, float], ...] = ()  # ids of the first that wait, and for how many seconds
    tiers: tuple[Mapping[str, object], ...] = ()  # of the context cache: name, used_bytes, capacity_bytes and counters
    drafts: DraftStats | None = None  # None: the engine has no drafter


class EngineClient(Protocol):
    """How asynchronous code reaches an engine. Implemented by runtime/client.py, and by fakes in tests."""

    @property
    def context_len(self) -> int: ...

    def stream(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Submit and iterate the deltas. Raises Overloaded, ContextTooLong or EngineUnavailable before the first.

        Closing the iterator (or cancelling the task that runs it) cancels the request.
        """

    async def act(self, action: Callable[[Any], T]) -> T:
        """Do something with the engine's Slots (runtime/slots.py) between two steps."""

    def stats(self) -> EngineStats: ...
