"""What became of each request: counted, timed, and handed on as records for the log."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from ninfer.api.ask import Ask, Chat, Plain, Prompt
from ninfer.api.errors import Dialect, render
from ninfer.api.told import Part, merge
from ninfer.errors import Cancelled
from ninfer.runtime.request import Timings

KEPT = 512  # requests whose times are remembered
WINDOW_S = 10  # of the recent rates
OUTCOMES = ("done", "cancelled", "rejected", "failed")

Clock = Callable[[], float]
Write = Callable[[str, Mapping[str, Any]], None]


@frozen(kw_only=True)
class Times:
    """Seconds of a request that ended. None: it did not come so far."""

    queue: float
    first_token: float | None
    total: float


class Rate:
    """A sum over the last WINDOW_S seconds, in buckets of one second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: deque[tuple[int, int]] = deque(maxlen=WINDOW_S + 1)

    def add(self, count: int) -> None:
        now = int(self._clock())
        if self._buckets and self._buckets[-1][0] == now:
            count += self._buckets.pop()[1]
        self._buckets.append((now, count))

    def per_second(self) -> float:
        since = int(self._clock()) - WINDOW_S
        return sum(count for second, count in self._buckets if second > since) / WINDOW_S


class Journal:
    """Belongs to the event loop.   write: takes the name of an event and its fields.

    texts: whether prompts and replies are among those.
    """

    def __init__(self, write: Write | None = None, *, texts: bool = False, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.texts = texts
        self.outcomes: dict[str, dict[str, int]] = {}  # endpoint -> outcome -> count
        self.num_open = 0
        self.peak_open = 0
        self.generated, self.prompt, self.ended = Rate(clock), Rate(clock), Rate(clock)
        self.times: deque[Times] = deque(maxlen=KEPT)
        self.write: Write = write or (lambda event, fields: None)

    def begin(self, endpoint: str, request_id: str) -> Entry:
        self.num_open += 1
        self.peak_open = max(self.peak_open, self.num_open)
        return Entry(self, endpoint, request_id, self.clock())

    def count(self, outcome: str) -> int:
        return sum(counts[outcome] for counts in self.outcomes.values())

    def close(self, entry: Entry, outcome: str) -> None:
        self.num_open -= 1
        self.outcomes.setdefault(entry.endpoint, dict.fromkeys(OUTCOMES, 0))[outcome] += 1
        self.ended.add(1)
        if entry.first_s is not None:
            first = entry.first_s - entry.began_s
            self.times.append(Times(queue=entry.timings.queue_s, first_token=first, total=self.clock() - entry.began_s))

    def percentiles(self) -> dict[str, dict[str, float | None]]:
        """Of the remembered requests, in seconds."""
        columns = {
            "queue_seconds": [t.queue for t in self.times],
            "first_token_seconds": [t.first_token for t in self.times if t.first_token is not None],
            "total_seconds": [t.total for t in self.times],
        }
        return {name: _percentiles(values) for name, values in columns.items()}


@define(eq=False)
class Entry:
    """A request under way. It ends once, whoever says so first."""

    journal: Journal
    endpoint: str
    request_id: str
    began_s: float
    ask: Ask | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    first_s: float | None = None
    timings: Timings = field(factory=Timings)
    finishes: list[str] = field(factory=list)
    parts: list[Part] = field(factory=list)  # if texts are wanted
    _ended: bool = False

    def prompted(self, ask: Ask, prompts: Sequence[Prompt]) -> None:
        """It is understood, and goes to the engine."""
        self.ask = ask
        self.num_prompt_tokens = sum(len(p.ids) for p in prompts)
        told = {**self._named(), **_asked(ask), "prompt_tokens": self.num_prompt_tokens}
        if self.journal.texts:
            told["prompts"] = [_text(prompt) for prompt in ask.prompts]
        self.journal.write("request_start", told)

    def fed(self, part: Part) -> None:
        if part.num_prefilled is not None:
            return
        if self.first_s is None:
            self.first_s = self.journal.clock()
            self.journal.prompt.add(self.num_prompt_tokens)
        self.num_generated_tokens += len(part.tokens)
        self.journal.generated.add(len(part.tokens))
        if self.journal.texts:
            self.parts.append(part)
        if part.finish is not None:
            self.finishes.append("tool_calls" if part.finish.called else part.finish.reason.value)
            self.timings = part.finish.timings

    def end(self, error: BaseException | None = None) -> None:
        """error: what kept it from its end; none if it came there."""
        if self._ended:
            return
        self._ended = True
        outcome, told = _outcome(error)
        self.journal.close(self, outcome)
        event = {"done": "request_done", "rejected": "request_rejected"}.get(outcome, "request_error")
        self.journal.write(event, {**self._named(), **self._measured(), **self._replies(), **told})

    def _named(self) -> dict[str, Any]:
        return {"request_id": self.request_id, "endpoint": self.endpoint}

    def _replies(self) -> dict[str, Any]:
        if not self.journal.texts:
            return {}
        indices = sorted({part.index for part in self.parts})
        replies = [merge([part for part in self.parts if part.index == i]) for i in indices]
        calls = [[{"name": c.name, "arguments": c.arguments} for c in reply.calls] for reply in replies]
        return {
            "replies": [
                {"reasoning": reply.reasoning, "text": reply.text, "tool_calls": called}
                for reply, called in zip(replies, calls, strict=True)
            ]
        }

    def _measured(self) -> dict[str, Any]:
        """The last reply's times, where there were several."""
        now, t = self.journal.clock(), self.timings
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": t.num_cached_tokens,
            "generated_tokens": self.num_generated_tokens,
            "finish_reasons": self.finishes,
            "timings_seconds": {
                "queue": round(t.queue_s, 6),
                "first_token": None if self.first_s is None else round(self.first_s - self.began_s, 6),
                "prefill": round(t.prefill_s, 6),
                "decode": round(t.decode_s, 6),
                "total": round(now - self.began_s, 6),
            },
            "drafts": {"drafted_tokens": t.num_drafted_tokens, "accepted_tokens": t.num_accepted_tokens},
        }


def _asked(ask: Ask) -> dict[str, Any]:
    return {
        "stream": ask.stream,
        "replies": len(ask.prompts) * ask.n,
        "max_tokens": ask.max_tokens,
        "sampling": {k: v for k, v in ask.sampling.items() if k != "logit_bias"},
        "tools": len(ask.tools.schemas),
        "constrained": ask.format is not None or ask.tools.must,
    }


def _text(prompt: Chat | Plain) -> Any:
    """A prompt as it was asked: messages, or text and token ids."""
    return [dict(m) for m in prompt.messages] if isinstance(prompt, Chat) else list(prompt.pieces)


def _outcome(error: BaseException | None) -> tuple[str, dict[str, Any]]:
    """What the request counts as, and what is told of the error: never its text, which may quote the request."""
    if error is None:
        return "done", {}
    if isinstance(error, Cancelled | asyncio.CancelledError | GeneratorExit) or not isinstance(error, Exception):
        return "cancelled", {"error": "client_disconnected"}
    found = render(error, Dialect.OPENAI)
    told = {"status": found.status, "error": found.body["error"]["code"] or found.body["error"]["type"]}
    return ("rejected" if found.status < 500 else "failed"), told


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"p50": None, "p95": None, "max": None}
    order = sorted(values)
    return {
        "p50": round(order[len(order) // 2], 6),
        "p95": round(order[min(len(order) - 1, len(order) * 95 // 100)], 6),
        "max": round(order[-1], 6),
    }
