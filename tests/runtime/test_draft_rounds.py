"""Rounds of drafts on a model made of lists: drafts change how many steps a reply takes, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from ninfer.runtime.engine import Engine, drive
from ninfer.runtime.request import Delta, FinishReason, GenerateRequest, Sampling
from tests.runtime.fake_runner import DOMAIN, FakeRunner, engine, expected, next_token, request, speculative, tokens


def run_out(e: Engine, requests: Sequence[GenerateRequest]) -> dict[str, list[Delta]]:
    got: dict[str, list[Delta]] = {r.id: [] for r in requests}
    for r in requests:
        e.submit(r, got[r.id].extend)
    while e.step():
        e.check()
    return got


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 7, 15])
@pytest.mark.parametrize("every", [1, 2, 3, 1000])
def test_drafts_never_change_a_reply(num_drafts: int, every: int) -> None:
    e, _ = speculative(FakeRunner(), num_drafts, wrong=lambda position: position % every == 0)
    r = request("a", 70, max_tokens=50)
    got = run_out(e, [r])["a"]
    assert tokens(got) == expected(r)
    assert got[-1].finish is FinishReason.LENGTH
    times = got[-1].timings
    assert times is not None and times.num_generated_tokens == 50
    assert times.num_accepted_tokens <= times.num_drafted_tokens
    assert times.num_accepted_tokens == sum(len(d.tokens) - 1 for d in got[1:])


def test_right_drafts_fill_a_round_and_wrong_ones_leave_a_step() -> None:
    right, _ = speculative(FakeRunner(), 4)
    r = request("a", 5, max_tokens=1 + 5 * 4)
    assert [len(d.tokens) for d in run_out(right, [r])["a"]] == [1, 5, 5, 5, 5]
    stats = right.stats().drafts
    assert stats is not None
    assert (stats.num_rounds, stats.num_drafted, stats.num_accepted, stats.num_plain_rounds) == (4, 16, 16, 0)
    assert stats.accepted_at == (4, 4, 4, 4)
    wrong, _ = speculative(FakeRunner(), 4, wrong=lambda position: True)
    assert [len(d.tokens) for d in run_out(wrong, [r])["a"]] == [1] * 21


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 4, 5, 6, 7, 8])
def test_a_round_never_exceeds_max_tokens(max_tokens: int) -> None:
    runner = FakeRunner()
    e, _ = speculative(runner, 7)
    r = request("a", 63, max_tokens=max_tokens)  # the reply begins a page
    got = run_out(e, [r])["a"]
    assert tokens(got) == expected(r) and got[-1].finish is FinishReason.LENGTH
    for step in runner.verified:
        assert all(s.kv_len + len(s.tokens) < 63 + max_tokens for s in step), "no row beyond the reserved pages"


@pytest.mark.parametrize("at", range(1, 9))
def test_a_stop_token_ends_a_reply_inside_a_round(at: int) -> None:
    r = request("a", 5, max_tokens=20)
    stop = expected(r)[at]
    assert stop not in expected(r)[:at]
    e, _ = speculative(FakeRunner(), 7)
    got = run_out(e, [request("a", 5, max_tokens=20, stop_ids=frozenset([stop]))])["a"]
    assert tokens(got) == expected(r)[:at]
    assert (got[-1].finish, got[-1].stop_id) == (FinishReason.STOP, stop)
    assert got[-1].timings is not None and got[-1].timings.num_generated_tokens == at + 1


def test_company_changes_nothing_and_slots_are_reused() -> None:
    dice = random.Random(5)
    runner = FakeRunner()
    e, drafter = speculative(runner, 5, wrong=lambda position: position % 4 == 0, max_concurrency=3)
    requests = []
    for i in range(12):
        prompt = [i, *(dice.randrange(DOMAIN) for _ in range(dice.randrange(1, 150)))]
        drafter.seeds[i] = i
        requests.append(request(f"r{i}", prompt, max_tokens=dice.randrange(1, 40), sampling=Sampling(seed=i)))
    got = run_out(e, requests)
    for r in requests:
        assert tokens(got[r.id]) == expected(r), r.id
    assert any(len({len(s.tokens) for s in step}) > 1 for step in runner.verified), "rounds of mixed widths"


def test_a_request_without_drafts_shares_rounds_with_one_that_has_them() -> None:
    e, _ = speculative(FakeRunner(), 3)
    assert e.speculation is not None
    e.speculation.rejects = True  # which does not know how penalties move within a round
    plain = request("p", 9, max_tokens=20, sampling=Sampling(seed=7, presence_penalty=0.5))
    drafted = request("dd", 9, max_tokens=20)
    got = run_out(e, [plain, drafted])
    assert tokens(got["p"]) == expected(plain) and tokens(got["dd"]) == expected(drafted)
    assert all(len(d.tokens) == 1 for d in got["p"]), "penalties: one token per round"
    assert max(len(d.tokens) for d in got["dd"]) == 4


def test_cancelling_inside_rounds_frees_everything() -> None:
    e, drafter = speculative(FakeRunner(), 3)
    got: list[Delta] = []
    e.submit(request("a", 5, max_tokens=500), got.extend)
    for _ in range(4):
        e.step()
    e.cancel("a")
    e.step()
    e.check()
    assert got[-1].finish is FinishReason.CANCELLED and not drafter.known
    assert e.stats().num_free_pages == e.scheduler.pages.count
    again = request("b", 5, max_tokens=9)
    assert tokens(drive(e, [again])["b"]) == expected(again)


def test_logprobs_are_those_of_the_rows_that_drew() -> None:
    e, _ = speculative(FakeRunner(), 3)
    got = run_out(e, [request("a", 5, max_tokens=9, logprobs=0)])["a"]
    assert [t.logprob for d in got for t in d.tokens] == [-1.0, *[-1.0, -2.0, -3.0, -4.0] * 2]


def test_logits_that_are_not_finite_end_the_request_after_what_was_sound() -> None:
    r = request("a", 5, max_tokens=20)
    broken = lambda history, seed: -1 if len(history) == 9 else next_token(history, seed)  # noqa: E731
    e, _ = speculative(FakeRunner(token=broken), 7)
    got = run_out(e, [r])["a"]
    assert tokens(got) == expected(r)[:4]
    assert got[-1].finish is FinishReason.ERROR and "not finite" in str(got[-1].error)


class Steps:
    """A grammar: each token is larger than the one before, modulo 400."""

    def __init__(self) -> None:
        self.said: list[int] = []

    def fill(self, row: object) -> bool:
        assert isinstance(row, np.ndarray)
        row[:] = 0
        last = self.said[-1] if self.said else 0
        for i in range(1, 400):
            token = (last + i) % DOMAIN
            row[token >> 5] |= np.int32(np.uint32(1 << (token & 31)).view(np.int32))
        return True

    def accept(self, token: int) -> bool:
        last = self.said[-1] if self.said else 0
        if not 1 <= (token - last) % DOMAIN < 400:
            return False
        self.said.append(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.said[len(self.said) - num_tokens :]


def next_allowed(history: Sequence[int], seed: int) -> int:
    """What the model says under the grammar after a prompt of five."""
    last, token = (history[-1] if len(history) > 5 else 0), next_token(history, seed)
    while not 1 <= (token - last) % DOMAIN < 400:
        token = (token + 1) % DOMAIN
    return token


@pytest.mark.parametrize("every", [2, 3, 1000])
def test_a_grammar_has_a_mask_for_every_draft(every: int) -> None:
    free, mask = Steps(), Steps()
    alone = drive(engine(), [request("a", 5, 30, mask=free)])["a"]
    drafted, drafter = speculative(FakeRunner(), 5, wrong=lambda position: position % every == 0)
    drafter.runner = FakeRunner(token=next_allowed)
    got = run_out(drafted, [request("a", 5, 30, mask=mask)])["a"]
    assert tokens(got) == tokens(alone) == mask.said == free.said
    assert len(got) < len(alone), "some drafts were kept"


def test_drafts_that_the_grammar_refuses_are_not_verified() -> None:
    runner = FakeRunner()
    e, _ = speculative(runner, 5)  # its drafter does not know the grammar
    got = run_out(e, [request("a", 5, 30, mask=Steps())])["a"]
    assert tokens(got) == tokens(drive(engine(), [request("a", 5, 30, mask=Steps())])["a"])
    assert any(len(s.tokens) < 6 for step in runner.verified for s in step)
