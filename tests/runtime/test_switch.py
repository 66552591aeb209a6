"""What comes behind the switch of a request is drawn otherwise, from that very token on, drafts or not."""

from __future__ import annotations

import numpy as np
import pytest

from ninfer.ir.step import PROMPT_BIT
from ninfer.runtime.engine import Engine, drive
from ninfer.runtime.request import GenerateRequest, Sampling, Switch
from tests.runtime.fake_runner import FakeRunner, config, engine, expected, next_token, request, speculative, tokens
from tests.runtime.test_engine_on_models import runner

LATER = Sampling(temperature=0.5, seed=8)


def switched(at: int, **more: object) -> tuple[GenerateRequest, list[int]]:
    """A request whose switch is token `at` of its reply, and what it is told."""
    plain = request("a", 70, max_tokens=20)
    first = expected(plain)[: at + 1]
    assert first[-1] not in first[:-1]
    history = [*plain.prompt_ids, *first]
    while len(history) < 90:
        history.append(next_token(history, 8))
    return request("a", 70, max_tokens=20, switch=Switch(first[-1], LATER), **more), history[70:]


@pytest.mark.parametrize("at", [0, 1, 5])
def test_the_switch_changes_how_the_next_token_is_drawn(at: int) -> None:
    r, told = switched(at)
    fake = FakeRunner()
    assert told[at + 1 :] != expected(r)[at + 1 :]
    assert tokens(drive(engine(fake), [r])["a"]) == told
    drawn = [s.draw.sampling for step in fake.steps for s in step if s.draw is not None]
    assert drawn == [r.sampling] * (at + 1) + [LATER] * (19 - at)


@pytest.mark.parametrize("num_drafts", [1, 3, 7, 15])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_draft_of_the_switch_changes_no_text(num_drafts: int, at: int) -> None:
    r, told = switched(at)
    e, _ = speculative(FakeRunner(), num_drafts)  # right up to the switch, which lies inside a round
    assert tokens(drive(e, [r])["a"]) == told


def test_a_switch_without_a_seed_keeps_the_seed() -> None:
    plain = request("a", 70, max_tokens=20)
    other = Switch(expected(plain)[3], Sampling(temperature=0.5))
    assert tokens(drive(engine(), [request("a", 70, max_tokens=20, switch=other)])["a"]) == expected(plain)


def test_penalties_behind_the_switch_know_the_whole_reply() -> None:
    """counts of a model: what its kernels would see, as the bits of ir/step.py."""
    prompt = tuple(range(3, 90))
    sampling = Sampling(temperature=1.0, seed=5)
    free = drive(Engine(runner(), config()), [GenerateRequest(id="a", prompt_ids=prompt, sampling=sampling)])["a"]
    after = tokens(free)[4]
    strong = Sampling(temperature=0, presence_penalty=2.0)
    model = runner()
    r = GenerateRequest(id="a", prompt_ids=prompt, sampling=sampling, max_tokens=12, switch=Switch(after, strong))
    told = tokens(drive(Engine(model, config()), [r])["a"])
    assert told[:5] == tokens(free)[:5]
    wanted = np.zeros(500, np.int32)
    wanted[list(prompt)] = PROMPT_BIT
    np.add.at(wanted, told[:-1], 1)  # the last one is never a row
    np.testing.assert_array_equal(model.states["counts"][0][:500], wanted)
