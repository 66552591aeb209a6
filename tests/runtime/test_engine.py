from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.errors import (
    BadRequest,
    ContextTooLong,
    DeviceError,
    EngineUnavailable,
    Overloaded,
    QueueTimeout,
    UsageError,
)
from ninfer.ir.step import PAGE
from ninfer.runtime.engine import Engine, drive
from ninfer.runtime.request import Delta, FinishReason, GenerateRequest, Sampling
from ninfer.runtime.sequence import Failed
from tests.runtime.fake_runner import DOMAIN, Clock, FakeRunner, engine, expected, limits, next_token, request, tokens


def finish(deltas: Sequence[Delta]) -> FinishReason | None:
    assert all(d.finish is None for d in deltas[:-1])
    return deltas[-1].finish


def run_out(e: Engine, *requests: GenerateRequest) -> dict[str, list[Delta]]:
    """Drive by hand, checking the books after each step."""
    got: dict[str, list[Delta]] = {r.id: [] for r in requests}
    for r in requests:
        e.submit(r, got[r.id].extend)
    while e.step():
        e.check()
    return got


# What a request gets


@pytest.mark.parametrize("prompt", [1, 63, 64, 65, 200, 700, 1000])
def test_a_reply_is_what_the_model_says_alone(prompt: int) -> None:
    r = request("a", prompt, max_tokens=20)
    got = drive(engine(), [r])["a"]
    assert tokens(got) == expected(r)
    assert finish(got) is FinishReason.LENGTH
    assert got[-1].timings is not None
    assert got[-1].timings.num_prompt_tokens == prompt
    assert got[-1].timings.num_generated_tokens == 20


@pytest.mark.parametrize("changes", [{}, {"deterministic": True}, {"prefill_chunk": 64}, {"prefill_chunk": 17}])
def test_replies_do_not_depend_on_what_shares_the_engine(changes: dict[str, Any]) -> None:
    requests = [request(f"r{'x' * i}", 30 * i + 1, max_tokens=3 * i + 1, sampling=Sampling(seed=i)) for i in range(12)]
    got = run_out(engine(**changes), *requests)
    for r in requests:
        assert tokens(got[r.id]) == expected(r), r.id
        assert finish(got[r.id]) is FinishReason.LENGTH


def test_a_stop_id_ends_the_reply_and_is_not_part_of_it() -> None:
    r = request("a", 5, max_tokens=10)
    stop = expected(r)[3]
    r = request("a", 5, max_tokens=10, stop_ids=frozenset([stop]))
    got = drive(engine(), [r])["a"]
    first = expected(r).index(stop)
    assert tokens(got) == expected(r)[:first]
    assert (finish(got), got[-1].stop_id) == (FinishReason.STOP, stop)


def test_max_tokens_zero_prefills_only() -> None:
    runner = FakeRunner()
    got = drive(engine(runner), [request("a", 5, max_tokens=0)])["a"]
    assert tokens(got) == [] and finish(got) is FinishReason.LENGTH
    assert [s.draw for step in runner.steps for s in step] == [None]


def test_a_reply_is_clamped_to_the_window() -> None:
    got = drive(engine(), [request("a", 1000, max_tokens=500)])["a"]
    assert len(tokens(got)) == 24 and finish(got) is FinishReason.LENGTH


def test_a_prompt_that_exactly_fits_gets_one_token() -> None:
    got = drive(engine(), [request("a", 1024, max_tokens=500)])["a"]
    assert len(tokens(got)) == 1 and finish(got) is FinishReason.LENGTH


def test_a_prompt_longer_than_the_window_is_refused_with_both_numbers() -> None:
    with pytest.raises(ContextTooLong) as error:
        engine().submit(request("a", 1025), print)
    assert (error.value.num_prompt_tokens, error.value.context_len) == (1025, 1024)


def test_the_window_is_at_most_the_pool() -> None:
    e = engine(FakeRunner(limits(pages=3)))
    assert e.context_len == 3 * PAGE
    assert len(tokens(run_out(e, request("a", 100, max_tokens=500))["a"])) == 92


@pytest.mark.parametrize(
    "bad",
    [
        request("a", ()),
        request("a", (3, DOMAIN)),
        request("a", (-1,)),
        request("a", max_tokens=-1),
        request("a", sampling=Sampling(logit_bias={DOMAIN: 1.0})),
    ],
)
def test_what_no_model_can_run_is_a_bad_request(bad: GenerateRequest) -> None:
    e = engine()
    with pytest.raises(BadRequest):
        e.submit(bad, print)
    assert e.num_live == 0


def test_tokens_count_as_prompt_or_as_generated() -> None:
    runner = FakeRunner()
    drive(engine(runner, prefill_chunk=64), [request("a", 100, max_tokens=3)])
    assert [(s.generated, s.kv_len, len(s.tokens), s.draw is None) for [s] in runner.steps] == [
        (False, 0, 64, True),
        (False, 64, 36, False),
        (True, 100, 1, False),
        (True, 101, 1, False),
    ]


def test_a_seed_is_drawn_per_request_and_kept() -> None:
    runner = FakeRunner()
    drive(engine(runner), [request(id, sampling=Sampling()) for id in ("a", "b")])
    parts = [part for step in runner.steps for part in step if part.draw is not None]
    seeds = {s.slot: {p.draw.seed for p in parts if p.draw and p.slot == s.slot} for s in runner.steps[-1]}
    assert all(len(s) == 1 for s in seeds.values()) and seeds[0] != seeds[1]


def test_logprobs_reach_the_tokens() -> None:
    [delta, *_] = drive(engine(), [request("a", logprobs=2)])["a"]
    assert delta.tokens[0].logprob == -1.0


def test_logit_bias_is_set_for_its_request_only() -> None:
    """The fake asserts that a slot's bias is that of the request that draws."""
    bias = Sampling(seed=1, logit_bias={3: 5.0})
    requests = [request("a" * i, sampling=bias if i % 2 else Sampling(seed=1)) for i in range(1, 7)]
    got = run_out(engine(max_concurrency=2), *requests)
    assert all(finish(d) is FinishReason.LENGTH for d in got.values())


def test_who_asks_is_told_of_every_chunk_and_the_time_of_every_token() -> None:
    r = request("a", 200, max_tokens=3, timed=True)
    got = drive(engine(prefill_chunk=64), [r, request("b", 200, max_tokens=3)])
    assert [d.num_prefilled_tokens for d in got["b"]] == [None] * 3
    read = [d.num_prefilled_tokens for d in got["a"] if d.num_prefilled_tokens is not None]
    assert read == sorted(read) and len(read) >= 3 and max(read) < 200
    assert tokens(got["a"]) == expected(r)
    replied = got["a"][len(read) :]  # chunks come first
    assert [d.timings.num_generated_tokens for d in replied if d.timings] == [1, 2, 3]


# Grammar


class EvenTokens:
    """Allows even tokens; lets everything pass at its second question."""

    def __init__(self) -> None:
        self.asked = 0
        self.accepted: list[int] = []

    def fill(self, row: NDArray[np.int32]) -> bool:
        self.asked += 1
        row[:] = np.int32(0x55555555)
        return self.asked != 2

    def accept(self, token: int) -> bool:
        self.accepted.append(token)
        return self.asked == 2 or token % 2 == 0

    def rollback(self, num_tokens: int) -> None:
        raise AssertionError


def test_a_grammar_is_asked_before_and_told_after_each_draw() -> None:
    mask = EvenTokens()
    runner = FakeRunner(token=lambda history, seed: 2 * len(history) + 1)
    got = drive(engine(runner), [request("a", 5, mask=mask), request("b", 5)])
    assert tokens(got["a"]) == mask.accepted == [12, 13, 16, 18]
    assert tokens(got["b"]) == [11, 13, 15, 17]


class Refusing(EvenTokens):
    def accept(self, token: int) -> bool:
        return False


class Broken(EvenTokens):
    def fill(self, row: NDArray[np.int32]) -> bool:
        raise RuntimeError("no such rule")


@pytest.mark.parametrize("mask", [Refusing(), Broken()])
def test_a_failing_grammar_ends_its_request_only(mask: EvenTokens) -> None:
    other = request("b")
    got = run_out(engine(), request("a", mask=mask), other)
    assert finish(got["a"]) is FinishReason.ERROR and got["a"][-1].error
    assert tokens(got["b"]) == expected(other)


def test_a_stop_token_may_end_a_finished_grammar() -> None:
    got = run_out(engine(FakeRunner(token=lambda *_: 8)), request("a", mask=Refusing(), stop_ids=frozenset([8])))
    assert finish(got["a"]) is FinishReason.STOP


# Admission and the queue


def test_no_more_requests_wait_than_the_queue_takes() -> None:
    e = engine(max_concurrency=2, max_pending_requests=3)
    for i in range(5):
        e.submit(request(str(i)), print)
    with pytest.raises(Overloaded) as error:
        e.submit(request("x"), print)
    assert error.value.retry_after_s >= 1
    e.step()
    with pytest.raises(Overloaded):
        e.submit(request("x"), print)
    e.cancel("4")
    e.step()
    e.submit(request("x"), print)


def test_requests_are_admitted_in_order_even_if_a_later_one_would_fit() -> None:
    runner = FakeRunner(limits(pages=16))
    e = engine(runner)
    order: list[str] = []
    sink = lambda deltas: order.extend(d.request_id for d in deltas if d.finish)  # noqa: E731
    e.submit(request("long", 600, max_tokens=200), sink)
    e.submit(request("blocked", 600, max_tokens=3), sink)
    e.submit(request("short", 1, max_tokens=1), sink)
    while e.step():
        e.check()
    assert order[0] == "long"
    assert set(order) == {"long", "blocked", "short"}


def test_a_request_that_waits_too_long_times_out() -> None:
    clock = Clock()
    e = engine(clock=clock, max_concurrency=1, pending_timeout_ms=1000)
    got: dict[str, list[Delta]] = {"a": [], "b": []}
    e.submit(request("a", max_tokens=100), got["a"].extend)
    e.step()
    e.submit(request("b"), got["b"].extend)
    clock.now = 0.9
    e.step()
    assert not got["b"]
    clock.now = 1.1
    e.step()
    [delta] = got["b"]
    assert isinstance(delta, Failed) and isinstance(delta.exception, QueueTimeout)
    assert got["a"][-1].finish is None
    e.check()


def test_times_are_told_apart() -> None:
    clock = Clock()
    runner = FakeRunner(fail=lambda rows: setattr(clock, "now", clock.now + 1))
    e = engine(runner, clock, max_concurrency=1, prefill_chunk=64, no_prefix_reuse=True)
    got = run_out(e, request("a", 128, max_tokens=3), request("b", 64, max_tokens=2))
    a, b = got["a"][-1].timings, got["b"][-1].timings
    assert a and b
    assert (a.queue_s, a.prefill_s, a.decode_s) == (0, 2, 2)
    assert (b.queue_s, b.prefill_s, b.decode_s) == (4, 1, 1)
    stats = e.stats()
    assert (stats.prefill_s, stats.decode_s) == (3, 3)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_requests) == (192, 5, 2)
    assert stats.num_free_pages == stats.num_pages


def test_stats_show_slots_and_queue() -> None:
    clock = Clock()
    e = engine(clock=clock, max_concurrency=2)
    for id in "abc":
        e.submit(request(id, max_tokens=9), print)
    e.step()
    clock.now = 5.0
    stats = e.stats()
    assert (stats.num_running, stats.num_waiting, stats.max_concurrency) == (2, 1, 2)
    assert [s["request_id"] for s in stats.slots] == ["a", "b"]
    assert stats.seconds_since_step == 5.0


# Cancellation


def test_cancel_in_the_queue() -> None:
    e = engine(max_concurrency=1)
    got: list[Delta] = []
    e.submit(request("a"), print)
    e.submit(request("b"), got.extend)
    e.cancel("b")
    e.step()
    assert finish(got) is FinishReason.CANCELLED
    e.cancel("b")
    while e.step():
        e.check()
    assert len(got) == 1 and e.stats().num_cancelled == 1


@pytest.mark.parametrize("steps", [1, 2, 3, 9])
def test_cancel_during_prefill_or_decode_frees_every_page(steps: int) -> None:
    e = engine(prefill_chunk=64)
    got: list[Delta] = []
    e.submit(request("a", 128, max_tokens=50), got.extend)
    for _ in range(steps):
        e.step()
    e.cancel("a")
    e.cancel("a")
    assert e.step()
    assert finish(got) is FinishReason.CANCELLED and len(tokens(got)) == max(0, steps - 1)
    e.check()
    assert e.num_live == 0 and not e.step()


def test_cancelling_one_leaves_the_others_alone() -> None:
    a, b = request("a", 70, max_tokens=30), request("b", 90, max_tokens=30)
    e = engine()
    got: list[Delta] = []
    e.submit(a, print)
    e.submit(b, got.extend)
    for _ in range(6):
        e.step()
    e.cancel("a")
    e.submit(request("c", 100, max_tokens=30), print)  # takes over a's pages
    while e.step():
        e.check()
    assert tokens(got) == expected(b)


# Failure


def test_a_failed_step_fails_its_requests_and_no_others() -> None:
    bad = request("bad", (900, 901))
    good = request("good", 300, max_tokens=3)
    late = request("late", max_tokens=9)
    runner = FakeRunner(fail=lambda rows: ValueError("no") if any(900 in s.tokens for s in rows) else None)
    e = engine(runner, deterministic=True)  # a step per prompt
    got = run_out(e, bad, good, late)
    assert finish(got["bad"]) is FinishReason.ERROR and "no" in (got["bad"][0].error or "")
    assert tokens(got["good"]) == expected(good) and tokens(got["late"]) == expected(late)
    assert e.stats().failure is None


def test_logits_that_are_not_finite_end_their_request_only() -> None:
    a, b = request("a", (900, 901), max_tokens=9), request("b", max_tokens=9)
    runner = FakeRunner(token=lambda h, s: -1 if h[:2] == [900, 901] and len(h) == 5 else next_token(h, s))
    got = run_out(engine(runner), a, b)
    assert finish(got["a"]) is FinishReason.ERROR and tokens(got["a"]) == expected(a, 3)
    assert tokens(got["b"]) == expected(b)


def test_a_device_error_fails_everything_and_is_remembered() -> None:
    runner = FakeRunner()
    e = engine(runner, max_concurrency=1)
    got: list[Delta] = []
    e.submit(request("a"), got.extend)
    e.step()
    e.submit(request("b"), got.extend)
    runner.fail = lambda rows: DeviceError("the card fell off")
    e.step()
    assert [d.request_id for d in got if d.finish is FinishReason.ERROR] == ["a", "b"]
    assert e.stats().failure == "the card fell off"
    with pytest.raises(EngineUnavailable, match="fell off"):
        e.submit(request("c"), print)
    assert not e.step()
    e.check()
    e.close()
    assert runner.closed


def test_a_failing_sink_harms_nobody() -> None:
    def broken(deltas: Sequence[Delta]) -> None:
        raise RuntimeError

    e = engine()
    b = request("b")
    got: list[Delta] = []
    e.submit(request("a"), broken)
    e.submit(b, got.extend)
    while e.step():
        pass
    assert tokens(got) == expected(b)


def test_a_step_is_published_once_per_sink() -> None:
    calls: list[int] = []
    sink = lambda deltas: calls.append(len(deltas))  # noqa: E731
    e = engine()
    for id in "abc":
        e.submit(request(id), sink)
    while e.step():
        pass
    assert calls == [3, 3, 3, 3]


def test_close_ends_what_is_left() -> None:
    e = engine(max_concurrency=1)
    got: list[Delta] = []
    for id in "ab":
        e.submit(request(id, max_tokens=99), got.extend)
    e.step()
    e.close()
    e.close()
    assert [d.request_id for d in got if d.finish] == ["a", "b"]
    with pytest.raises(EngineUnavailable):
        e.submit(request("c"), print)
    e.check()


# Scheduling


def kinds(runner: FakeRunner) -> str:
    return "".join("r" if step[0].generated else "P" for step in runner.steps)


@pytest.mark.parametrize(("rounds", "pattern"), [(1, "PrPrPrP"), (3, "PrrrPrrrP"), (0, "PrrPrrP")])
def test_rounds_and_chunks_alternate(rounds: int, pattern: str) -> None:
    runner = FakeRunner()
    e = engine(runner, prefill_chunk=128, decode_rounds_per_prefill=rounds)
    e.submit(request("a", 64, max_tokens=100), print)
    e.step()
    e.submit(request("b", 900, max_tokens=5), print)
    runner.steps.clear()
    while len(runner.steps) < 20:
        e.step()
    assert pattern in kinds(runner)


def test_short_prompts_share_a_chunk() -> None:
    runner = FakeRunner()
    run_out(engine(runner), *[request("x" * i, 20) for i in range(1, 6)])
    assert kinds(runner) == "Prrr"


def test_deterministic_prefill_is_alone_and_starts_at_page_ends() -> None:
    runner = FakeRunner()
    e = engine(runner, deterministic=True, prefill_chunk=200)
    run_out(e, *[request("x" * i, 170 * i, max_tokens=3) for i in range(1, 5)])
    prefills = [step for step in runner.steps if not step[0].generated]
    assert all(len(step) == 1 and step[0].kv_len % PAGE == 0 for step in prefills)
    chunks = [(s.kv_len, len(s.tokens)) for [s] in prefills if s.slot == 3]
    assert chunks == [(0, 192), (192, 192), (384, 192), (576, 104)]


def test_deterministic_needs_a_page_of_rows() -> None:
    with pytest.raises(UsageError, match="prefill-chunk"):
        engine(deterministic=True, prefill_chunk=32)


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    runner = FakeRunner()
    e = engine(runner, prefill_chunk=64, max_pending_requests=100, decode_rounds_per_prefill=1)
    done: list[str] = []
    e.submit(request("long", 1000, max_tokens=1), lambda ds: done.extend(d.request_id for d in ds if d.finish))
    for i in range(400):
        if e.num_live < 6:
            e.submit(request(f"s{i}", 64, max_tokens=1), lambda ds: None)
        e.step()
        if done:
            break
    assert done == ["long"]
    assert len(runner.steps) < 16 * 8


def test_a_short_prompt_overtakes_a_long_one() -> None:
    runner = FakeRunner()
    e = engine(runner, prefill_chunk=64)
    e.submit(request("long", 1000), print)
    e.step()
    got: list[Delta] = []
    e.submit(request("s", 30), got.extend)
    e.step()
    assert got


def test_every_ready_sequence_gets_its_turn_when_a_step_cannot_hold_them_all() -> None:
    runner = FakeRunner(limits(max_seqs=3))
    requests = [request("x" * i, 10, max_tokens=20) for i in range(1, 9)]
    got = run_out(engine(runner), *requests)
    assert all(tokens(got[r.id]) == expected(r) for r in requests)
    rounds = [step for step in runner.steps if step[0].generated]
    assert max(map(len, rounds)) == 3
    assert len(rounds) <= -(-8 * 19 // 3) + 8


# All of it at once


@pytest.mark.parametrize("seed", range(12))
def test_random_commands_keep_the_books(seed: int) -> None:
    rng = random.Random(seed)
    clock = Clock()
    pages = rng.choice([4, 16, 40])
    runner = FakeRunner(
        limits(pages=pages, max_seqs=rng.choice([2, 8]), max_rows=rng.choice([64, 512])),
        fail=lambda rows: ValueError("now and then") if rng.random() < 0.03 else None,
    )
    chunk = rng.choice([16, 64, 100, 512])
    e = engine(
        runner,
        clock,
        max_concurrency=rng.randint(1, 8),
        max_pending_requests=rng.randint(0, 6),
        prefill_chunk=chunk,
        decode_rounds_per_prefill=rng.randint(0, 3),
        deterministic=chunk >= PAGE and rng.random() < 0.3,
        pending_timeout_ms=5000,
    )
    got: dict[str, list[Delta]] = {}
    wanted = {}
    for i in range(1500):
        what = rng.random()
        if what < 0.15:
            r = request(f"r{i}", rng.randint(1, e.context_len), rng.choice([0, 1, 5, 60]), sampling=Sampling(seed=i))
            try:
                got.setdefault(r.id, [])
                e.submit(r, got[r.id].extend)
                wanted[r.id] = r
            except Overloaded:
                del got[r.id]
        elif what < 0.2 and got:
            e.cancel(rng.choice(list(got)))
        else:
            clock.now += rng.random() * 0.2
            e.step()
            e.check()
    while e.step():
        e.check()
    assert e.num_live == 0
    reasons = {finish(d) for d in got.values()}
    assert FinishReason.LENGTH in reasons
    for id, deltas in got.items():
        whole = expected(wanted[id], len(tokens(deltas)))
        assert tokens(deltas) == whole, id
        if deltas[-1].finish is FinishReason.LENGTH:
            window = max(1, e.context_len - len(wanted[id].prompt_ids))
            assert len(whole) == min(wanted[id].max_tokens, window)


# The thread


def test_the_engine_thread_serves_many_threads() -> None:
    e = engine(max_pending_requests=100)
    e.start()
    requests = [request("x" * i, 20 * i, max_tokens=15) for i in range(1, 20)]
    got: dict[str, list[Delta]] = {r.id: [] for r in requests}
    done = {r.id: threading.Event() for r in requests}

    def ask(r: GenerateRequest) -> None:
        def sink(deltas: Sequence[Delta]) -> None:
            got[r.id].extend(deltas)
            if deltas[-1].finish:
                done[r.id].set()

        e.submit(r, sink)

    threads = [threading.Thread(target=ask, args=(r,)) for r in requests]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for r in requests:
        assert done[r.id].wait(30)
        assert tokens(got[r.id]) == expected(r)
    e.close()
    e.check()


def test_the_engine_thread_stops_at_a_device_error_and_still_closes() -> None:
    runner = FakeRunner(fail=lambda rows: DeviceError("gone"))
    e = engine(runner)
    e.start()
    failed = threading.Event()
    e.submit(request("a"), lambda deltas: failed.set())
    assert failed.wait(30)
    e.close()
    assert runner.closed and e.stats().failure == "gone"


def test_close_interrupts_a_running_thread() -> None:
    e = engine()
    e.start()
    first = threading.Event()
    got: list[Delta] = []

    def sink(deltas: Sequence[Delta]) -> None:
        got.extend(deltas)
        first.set()

    e.submit(request("a", 5, max_tokens=1000), sink)
    assert first.wait(30)
    e.close()
    assert got[-1].finish is not None
    e.check()
