"""The engine: takes requests, asks the scheduler for the next step, runs it, and says what each request got.

Everything but `submit`, `cancel`, `act`, `stats`, `refuse` and `close` belongs to one thread: the engine's own after
`start`, or the caller's who drives `step` by hand. What those six do reaches it as commands. A step is committed before
it is published; a request's last delta is its only one with `finish`, and by then its slot and pages are free.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ninfer.config import EngineConfig
from ninfer.errors import (
    BadRequest,
    ContextTooLong,
    DeviceError,
    EngineUnavailable,
    NinferError,
    Overloaded,
    QueueTimeout,
)
from ninfer.runtime.batch import Drawn, ModelRunner, SeqRows
from ninfer.runtime.draft.rounds import Speculation
from ninfer.runtime.kv.cache import ContextCache
from ninfer.runtime.kv.setup import page_source
from ninfer.runtime.request import Delta, EngineStats, FinishReason, GenerateRequest, TokenMask, TokenOut
from ninfer.runtime.scheduler import Part, Scheduler, Step, StepKind
from ninfer.runtime.sequence import SEED_MASK, Failed, Phase, Sequence, Sink, draws_of
from ninfer.runtime.slots import Slots

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_QUEUE_SHOWN = 16
SERVICE_MEMORY = 0.8  # weight of the past in the mean time that a request takes


@frozen
class _Submit:
    seq: Sequence


@frozen
class _Cancel:
    request_id: str


@frozen
class _Abort:
    """End all requests with this error. stop: the thread's last command."""

    error: NinferError
    stop: bool = False
    done: threading.Event = field(factory=threading.Event)


@frozen
class _Act:
    """Do this between steps."""

    action: Callable[[Slots], Any]
    result: Future[Any] = field(factory=Future)


_Command = _Submit | _Cancel | _Abort | _Act


class Engine:
    """Owns a runner, and closes it.   speculation: drafts for it; None: a token per step. clock: seconds, monotonic."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        *,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.speculation = speculation
        self.limits = runner.limits
        self.scheduler = Scheduler(
            runner.limits,
            num_slots=config.max_concurrency,
            chunk=config.prefill_chunk,
            rounds_per_chunk=config.decode_rounds_per_prefill,
            deterministic=config.deterministic,
            source=lambda pages: page_source(pages, runner, config),
        )
        source = self.scheduler.source
        self._cache = source if isinstance(source, ContextCache) else None
        self._sessions = Slots(self.scheduler.slots, self._cache, getattr(runner, "fingerprint", "model"))
        self._max_pending = config.max_pending_requests
        self._pending_timeout_s = config.pending_timeout_ms / 1000
        self._clock = clock
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._outbox: dict[Sink, list[Delta]] = {}
        self._thread: threading.Thread | None = None
        self._stopped = False

        self._lock = threading.Lock()  # over the next four
        self._live: dict[str, Sequence] = {}  # submitted and not done
        self._refusal: str | None = None  # why nothing is admitted
        self._closed = False
        self._progress_s = clock()

        self._failure: str | None = None
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_requests = 0
        self._num_cancelled = 0
        self._num_rounds = 0
        self._num_round_rows = 0
        self._num_cached_tokens = 0
        self._prefill_s = 0.0
        self._decode_s = 0.0
        self._service_s = 1.0

    # From any thread

    @property
    def context_len(self) -> int:
        return self.scheduler.context_len

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Queue a request. Raises BadRequest, ContextTooLong, Overloaded or EngineUnavailable; nothing is queued then.

        The sink gets one list for all requests of a step that were submitted with an equal sink.
        """
        self._validate(request)
        num_prompt = len(request.prompt_ids)
        seed = request.sampling.seed
        seq = Sequence(
            request=request,
            sink=sink,
            seed=secrets.randbits(64) if seed is None else seed & SEED_MASK,
            max_tokens=min(request.max_tokens, max(1, self.context_len - num_prompt)),
            arrived_s=self._clock(),
        )
        with self._lock:
            if self._refusal is not None:
                raise EngineUnavailable(self._refusal)
            if request.id in self._live:
                raise ValueError(f"request id {request.id} is in use")
            places = len(self.scheduler.slots) + self._max_pending
            if len(self._live) >= places:
                raise Overloaded(
                    f"{len(self._live)} requests are running or waiting, and there is room for {places}; retry later",
                    retry_after_s=max(1.0, self._service_s / len(self.scheduler.slots)),
                )
            if not self._live:
                self._progress_s = seq.arrived_s
            self._live[request.id] = seq
            self._commands.put(_Submit(seq))

    def _validate(self, request: GenerateRequest) -> None:
        if not request.prompt_ids:
            raise BadRequest("the prompt is empty", path="messages", code="invalid_prompt")
        if len(request.prompt_ids) > self.context_len:
            raise ContextTooLong(len(request.prompt_ids), self.context_len)
        if request.max_tokens < 0:
            raise BadRequest(f"max_tokens is {request.max_tokens}, below 0", path="max_tokens")
        for path, ids in (("prompt", request.prompt_ids), ("logit_bias", request.sampling.logit_bias)):
            low, high = min(ids, default=0), max(ids, default=0)
            if low < 0 or high >= self.limits.domain:
                token = low if low < 0 else high
                raise BadRequest(f"token {token} is not one of the model's {self.limits.domain}", path=path)

    def cancel(self, request_id: str) -> None:
        """End a request at the next step boundary. A no-op for one that is done, or was never submitted."""
        self._commands.put(_Cancel(request_id))

    def act(self, action: Callable[[Slots], T]) -> Future[T]:
        """Do something with the sessions of slots, at the next step boundary. Raises EngineUnavailable."""
        command = _Act(action)
        with self._lock:
            if self._refusal is not None:
                raise EngineUnavailable(self._refusal)
            self._commands.put(command)
        return command.result

    def refuse(self, reason: str) -> None:
        """Admit no more requests. Those submitted go on."""
        with self._lock:
            if self._refusal is None:
                self._refusal = reason

    def abort(self, reason: str) -> None:
        """End every request at the next step boundary with EngineUnavailable."""
        self._commands.put(_Abort(EngineUnavailable(reason)))

    @property
    def num_live(self) -> int:
        """Requests submitted and not done."""
        return len(self._live)

    def stats(self) -> EngineStats:
        running = self.scheduler.num_running
        live = len(self._live)
        return EngineStats(
            num_running=running,
            num_waiting=max(0, live - running),
            max_concurrency=len(self.scheduler.slots),
            num_pages=self.scheduler.pages.count,
            num_free_pages=self.scheduler.pages.num_free + self.scheduler.source.num_idle,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_requests=self._num_requests,
            num_cancelled=self._num_cancelled,
            num_cached_tokens=self._num_cached_tokens,
            num_rounds=self._num_rounds,
            num_round_rows=self._num_round_rows,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            seconds_since_step=self._clock() - self._progress_s if live else 0.0,
            failure=self._failure,
            slots=tuple(self._slot_stats(i, seq) for i, seq in enumerate(self.scheduler.slots)),
            queue=self._queue_stats(),
            drafts=None if self.speculation is None else self.speculation.stats(),
            tiers=() if self._cache is None else self._cache.stats(),
        )

    def _queue_stats(self) -> tuple[tuple[str, float], ...]:
        now = self._clock()
        with self._lock:
            waiting = [seq for seq in self._live.values() if seq.phase is Phase.WAITING]
        return tuple((seq.request.id, max(0.0, now - seq.arrived_s)) for seq in waiting[:MAX_QUEUE_SHOWN])

    def _slot_stats(self, slot: int, seq: Sequence | None) -> Mapping[str, object]:
        told = {"id": slot, "is_processing": seq is not None, "n_ctx": self.context_len}
        told["speculative"] = self.speculation is not None
        if seq is None:
            return {**told, **self._sessions.stats(slot)}
        return {
            **told,
            "request_id": seq.request.id,
            "phase": seq.phase.value,
            "n_prompt_tokens": seq.prompt_len,
            "n_prompt_tokens_cache": seq.num_cached,
            "n_prompt_tokens_processed": min(seq.kv_len, seq.prompt_len),
            "n_decoded": seq.num_generated,
        }

    def start(self) -> None:
        """Run the loop on a thread of its own until `close`."""
        self._thread = threading.Thread(target=self._loop, name="ninfer-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End what is left with EngineUnavailable, stop the thread and close the runner. A second time is a no-op."""
        stop = _Abort(EngineUnavailable("the engine has stopped"), stop=True)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._refusal = self._refusal or "the engine has stopped"
            self._commands.put(stop)
        if self._thread is not None:
            self._thread.join()
        if not stop.done.is_set():  # no thread, or one that had stopped by itself
            self.step()
        if self._cache is not None:
            self._cache.close()
        self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # On the engine's thread

    def _loop(self) -> None:
        while not self._stopped and self._failure is None:
            try:
                if not self.step():
                    self._handle(self._commands.get())
                    self._publish()
            except Exception as error:
                log.exception("the engine loop failed")
                self._fail(f"{type(error).__name__}: {error}")

    def step(self) -> bool:
        """Take note of commands, admit, and run one step of the model. False: there was nothing to do."""
        worked = self._drain_commands()
        step = None
        if self._failure is None:
            worked |= self._expire()
            self._admit()
            step = self.scheduler.next()
        if step is not None:
            self._run(step)
        self._publish()
        return worked or step is not None

    def _drain_commands(self) -> bool:
        worked = False
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return worked
            self._handle(command)
            worked = True

    def _handle(self, command: _Command) -> None:
        match command:
            case _Submit(seq):
                if seq.phase is Phase.WAITING:  # else it was aborted meanwhile
                    self.scheduler.waiting.append(seq)
            case _Cancel(request_id):
                seq_or_none = self._live.get(request_id)
                if seq_or_none is not None:
                    self._num_cancelled += 1
                    self._finish(seq_or_none, FinishReason.CANCELLED)
            case _Abort(error, stop, done):
                self._fail_requests(list(self._live.values()), error)
                self._stopped |= stop
                done.set()
            case _Act(action, result):
                self._act(action, result)

    def _act(self, action: Callable[[Slots], Any], result: Future[Any]) -> None:
        if self._failure is not None:
            result.set_exception(EngineUnavailable(self._failure))
        elif result.set_running_or_notify_cancel():
            try:
                result.set_result(action(self._sessions))
            except Exception as error:
                result.set_exception(error)

    def _expire(self) -> bool:
        """All wait equally long at most, so those who have waited too long are at the head."""
        queue = self.scheduler.waiting
        latest = self._clock() - self._pending_timeout_s
        worked = False
        while queue and queue[0].arrived_s < latest:
            waited = self._clock() - queue[0].arrived_s
            self._fail_requests([queue[0]], QueueTimeout(f"waited {waited:.1f} s for a free slot; retry later"))
            worked = True
        return worked

    def _admit(self) -> None:
        while (seq := self.scheduler.admit()) is not None:
            seq.admitted_s = self._clock()
            try:
                self.runner.set_pages(seq.slot, 0, seq.pages)
                if self._cache is not None:
                    self._cache.resume(seq)
                if seq.request.prefix_given and seq.num_cached < seq.request.prefix_len:
                    raise NinferError("the state that stands before the prompt is not there")
                if seq.request.sampling.logit_bias:
                    self.runner.set_bias(seq.slot, seq.request.sampling.logit_bias)
                if self.speculation is not None:
                    self.speculation.admit(seq)
            except DeviceError as error:
                return self._fail(str(error))
            except Exception as error:
                log.exception("request %s could not be set up", seq.request.id)
                self._fail_requests([seq], _internal(error))

    def _run(self, step: Step) -> None:
        parts: list[Part] = []
        rows: list[SeqRows] = []
        speculation = self.speculation
        try:
            start = self._clock()
            if speculation is not None and step.kind is StepKind.ROUND:
                speculation.propose([part.seq for part in step.parts])
            for part in step.parts:
                try:
                    rows.append(self._rows(part))
                    parts.append(part)
                except DeviceError:
                    raise
                except Exception as error:
                    log.exception("the grammar of request %s failed", part.seq.request.id)
                    self._fail_requests([part.seq], _internal(error))
            if not parts:
                return
            seqs = [part.seq for part in parts]
            drafted = speculation is not None and speculation.is_round(seqs, rows)
            if speculation is not None and drafted:
                results = speculation.verify(seqs, rows)
            else:
                results = [() if drawn is None else (drawn,) for drawn in self.runner.step(rows)]
            if speculation is not None and drafted:
                speculation.fold(rows, [len(drawn) for drawn in results])  # before a reply's end takes an image
            now = self._clock()
            self._progress_s = now
            for part, row, drawn in zip(parts, rows, results, strict=True):
                self._commit_or_fail(part.seq, row, drawn, now)
            if speculation is not None:
                self._publish()
                self._advance(speculation, parts, rows, results)
        except DeviceError as error:
            log.exception("the device failed")
            return self._fail(str(error))
        except Exception as error:
            log.exception("a step failed")
            return self._fail_requests([part.seq for part in parts], _internal(error))
        took = self._clock() - start
        if step.kind is StepKind.PREFILL:
            self._prefill_s += took
        else:
            self._decode_s += took
            self._num_rounds += 1
            self._num_round_rows += len(parts)
            if speculation is not None:
                speculation.took(took)

    @staticmethod
    def _advance(
        speculation: Speculation, parts: Seq[Part], rows: Seq[SeqRows], results: Seq[tuple[Drawn, ...]]
    ) -> None:
        """Tell the drafters what the step made final of the sequences that go on."""
        seqs, kv_lens, following = list[Sequence](), list[int](), list[tuple[int, ...]]()
        for part, row, drawn in zip(parts, rows, results, strict=True):
            seq = part.seq
            if seq.phase is Phase.DONE:
                continue
            prompt = () if row.generated else seq.request.prompt_ids[row.kv_len + 1 : row.kv_len + part.count + 1]
            seqs.append(seq)
            kv_lens.append(row.kv_len)
            following.append((*prompt, *(d.token for d in drawn)))
        speculation.advance(seqs, kv_lens, following)

    def _rows(self, part: Part) -> SeqRows:
        """A sequence's rows of a step. The grammar masks of its draws are set on the way."""
        seq, request = part.seq, part.seq.request
        generated = seq.phase is Phase.DECODE
        end = seq.kv_len + part.count
        drafts = seq.drafts if generated else ()
        draw = later = None
        if generated or (end == seq.prompt_len and seq.max_tokens):
            masked = False
            if request.mask is not None:
                drafts, masked = self._set_masks(seq.slot, request.mask, drafts)
            draw, later = draws_of(seq, drafts, masked)
        return SeqRows(
            slot=seq.slot,
            kv_len=seq.kv_len,
            tokens=(seq.last, *drafts) if generated else request.prompt_ids[seq.kv_len : end],
            generated=generated,
            draw=draw,
            num_draws=1 + len(drafts),
            proposal=0 if self.speculation is None else self.speculation.proposal(seq),
            later=later,
        )

    def _set_masks(self, slot: int, mask: TokenMask, drafts: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """A mask for each draw, those after drafts included.

        Returns the drafts up to the first that the grammar refuses, and whether any draw is masked. The refused one is
        left out, unless verification must see what was drawn.
        """
        masks: list[NDArray[np.int32]] = []
        any_masked = False
        for i in range(1 + len(drafts)):
            words: NDArray[np.int32] = np.full((self.limits.domain + 31) // 32, -1, np.int32)
            masked = mask.fill(words)
            masks.append(words if masked else np.full_like(words, -1))
            any_masked |= masked
            if i == len(drafts) or not mask.accept(drafts[i]):
                break
        if len(masks) > 1:
            mask.rollback(len(masks) - 1)
        count = len(masks) - 1
        if count < len(drafts) and self.speculation is not None and self.speculation.rejects:
            masks.append(np.full_like(masks[0], -1))  # what is drawn after it is thrown away
            count += 1
        for i, words in enumerate(masks if any_masked else ()):
            self.runner.set_mask(slot, words, i)
        return drafts[:count], any_masked

    def _commit_or_fail(self, seq: Sequence, row: SeqRows, drawn: tuple[Drawn, ...], now: float) -> None:
        if seq.phase is Phase.DONE:
            return
        try:
            self._commit(seq, row, drawn, now)
        except Exception as error:
            log.exception("request %s failed", seq.request.id)
            self._fail_requests([seq], _internal(error))

    def _commit(self, seq: Sequence, row: SeqRows, drawn: tuple[Drawn, ...], now: float) -> None:
        """Take note of what a step did to a sequence, and say what it drew."""
        if row.generated:
            seq.kv_len += len(drawn)
        else:
            seq.kv_len += len(row.tokens)
            self._num_prompt_tokens += len(row.tokens)
            if self._cache is not None:
                self._cache.progress(seq)
        if row.draw is None:
            if seq.kv_len == seq.prompt_len:  # max_tokens is 0: the prompt was all that was asked
                seq.prefilled_s = now
                self._finish(seq, FinishReason.LENGTH)
            elif seq.request.timed:
                self._post(seq, self._prefilled(seq, now))
            return
        if not drawn:
            raise RuntimeError("the runner drew nothing")
        if not row.generated:
            seq.prefilled_s, seq.phase = now, Phase.DECODE
        tokens: list[TokenOut] = []
        end = self._take(seq, drawn, tokens)
        if row.generated and self.speculation is not None:
            self.speculation.note(seq, len(row.tokens) - 1, min(len(drawn) - 1, len(tokens)))
        if end is not None:
            self._finish(seq, tokens=tuple(tokens), **end)
            return
        seq.last = drawn[-1].token
        timings = seq.timings(now) if row.num_draws > 1 or seq.request.timed else None
        delta = Delta(
            request_id=seq.request.id, tokens=tuple(tokens), num_cached_tokens=seq.num_cached, timings=timings
        )
        self._post(seq, delta)

    @staticmethod
    def _prefilled(seq: Sequence, now: float) -> Delta:
        return Delta(
            request_id=seq.request.id,
            num_cached_tokens=seq.num_cached,
            timings=seq.timings(now),
            num_prefilled_tokens=seq.kv_len,
        )

    def _take(self, seq: Sequence, drawn: Seq[Drawn], tokens: list[TokenOut]) -> dict[str, Any] | None:
        """Add what was drawn to the reply, up to its end. Returns how it ended, as arguments of _finish."""
        request = seq.request
        for one in drawn:
            if one.token < 0:
                return {"reason": FinishReason.ERROR, "error": "the model's logits were not finite"}
            seq.num_generated += 1
            self._num_generated_tokens += 1
            stop = one.token in request.stop_ids
            if request.mask is not None and not request.mask.accept(one.token) and not stop:
                return {"reason": FinishReason.ERROR, "error": f"the grammar refused token {one.token}"}
            if stop:
                return {"reason": FinishReason.STOP, "stop_id": one.token}
            tokens.append(TokenOut(one.token, one.logprob, one.top))
            seq.generated.append(one.token)
            seq.switched |= request.switch is not None and one.token == request.switch.after
            if seq.num_generated >= seq.max_tokens:
                return {"reason": FinishReason.LENGTH}
        return None

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        *,
        tokens: tuple[TokenOut, ...] = (),
        stop_id: int | None = None,
        error: str | None = None,
    ) -> None:
        delta = Delta(
            request_id=seq.request.id,
            tokens=tokens,
            num_cached_tokens=seq.num_cached,
            finish=reason,
            stop_id=stop_id,
            error=error,
            timings=seq.timings(self._clock()),
        )
        self._post(seq, delta)
        if self._cache is not None and reason is not FinishReason.ERROR and seq.slot >= 0:
            self._cache.finish(seq)
            self._sessions.note(seq)
        self._free(seq)

    def _fail_requests(self, seqs: Iterable[Sequence], error: NinferError) -> None:
        for seq in seqs:
            if seq.phase is Phase.DONE:
                continue
            delta = Failed(
                request_id=seq.request.id,
                finish=FinishReason.ERROR,
                error=str(error),
                timings=seq.timings(self._clock()),
                exception=error,
            )
            self._post(seq, delta)
            self._free(seq)

    def _free(self, seq: Sequence) -> None:
        slot = seq.slot
        self.scheduler.remove(seq)
        if slot >= 0 and self.speculation is not None:
            self.speculation.free(slot)
        self._num_requests += 1
        self._num_cached_tokens += seq.num_cached
        with self._lock:
            self._live.pop(seq.request.id, None)
        took = self._clock() - seq.arrived_s
        self._service_s = SERVICE_MEMORY * self._service_s + (1 - SERVICE_MEMORY) * took
        if slot >= 0 and seq.request.sampling.logit_bias and self._failure is None:
            try:
                self.runner.set_bias(slot, {})
            except Exception as error:
                log.exception("the logit bias of slot %d could not be cleared", slot)
                self._fail(str(error))

    def _fail(self, reason: str) -> None:
        """The engine is beyond repair: everything ends here."""
        self._failure = reason
        with self._lock:
            self._refusal = f"the engine has failed: {reason}"
        self._fail_requests(list(self._live.values()), EngineUnavailable(self._refusal))
        self._drain_commands()  # nobody else would tell those who wait for an action
        self._publish()

    def _post(self, seq: Sequence, delta: Delta) -> None:
        self._outbox.setdefault(seq.sink, []).append(delta)

    def _publish(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for sink, deltas in outbox.items():
            try:
                sink(deltas)
            except Exception:
                log.exception("a sink failed")

    def check(self) -> None:
        """Raises AssertionError unless slots, pages and live requests agree. Call it between steps."""
        self.scheduler.check()
        with self._lock:
            live = {id(seq) for seq in self._live.values()}
        held = [*self.scheduler.waiting, *(seq for seq in self.scheduler.slots if seq is not None)]
        assert {id(seq) for seq in held} <= live, "a sequence is held that is not live"
        if not live:
            free = self.scheduler.pages.num_free + self.scheduler.source.num_idle
            assert free == self.scheduler.pages.count, "idle, but pages are held"


def _internal(error: Exception) -> NinferError:
    return error if isinstance(error, NinferError) else NinferError(f"internal error: {type(error).__name__}: {error}")


def drive(engine: Engine, requests: Seq[GenerateRequest]) -> dict[str, list[Delta]]:
    """Run requests to their ends on this thread: for scripts and tests. The deltas of each, in order."""
    deltas: dict[str, list[Delta]] = {request.id: [] for request in requests}

    def sink(news: Seq[Delta]) -> None:
        for delta in news:
            deltas[delta.request_id].append(delta)

    for request in requests:
        engine.submit(request, sink)
    while engine.step():
        pass
    return deltas
