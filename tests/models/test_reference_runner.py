"""The reference runner as the engine uses it: chunks, draws, bias, masks, penalties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve

from ninfer.runtime.batch import Draw
from ninfer.runtime.request import Sampling
from tests.checkpoints import DATA, GREEDY, oracle, part, runner


def greedy(**sampling: Any) -> Draw:
    return evolve(GREEDY, sampling=Sampling(temperature=0, **sampling))


@pytest.mark.parametrize("name", ["llama", "qwen3_5_dense"])
def test_the_oracles_greedy_text_after_a_chunked_prompt(name: str) -> None:
    want = oracle(name)
    ids = want["input_ids"]
    r = runner(DATA / name, "sample")
    assert r.step([part(ids[:20], slot=1)]) == [None]
    assert r.step([part(ids[20:40], 20, slot=1)]) == [None]
    text, row = [], part(ids[40:], 40, slot=1, draw=GREEDY)
    for _ in range(8):
        (drawn,) = r.step([row])
        assert drawn is not None and drawn.logprob == drawn.top[0][1] and drawn.token == drawn.top[0][0]
        text.append(drawn.token)
        row = evolve(row, kv_len=row.kv_len + len(row.tokens), tokens=(drawn.token,), generated=True)
    assert text == want["greedy_ids"].tolist()


def test_bias_and_mask_decide() -> None:
    r = runner(DATA / "llama", "sample")
    ids = oracle("llama")["input_ids"]
    r.set_bias(0, {77: 1000.0})
    biased = part(ids, draw=greedy(logit_bias={77: 1000.0}))
    assert [d.token for d in r.step([biased]) if d] == [77]
    r.set_bias(0, {})
    (plain,) = r.step([part(ids, draw=GREEDY)])
    assert plain is not None and plain.token != 77
    words = np.zeros(16, np.int32)
    words[300 // 32] = 1 << 300 % 32
    r.set_mask(0, words)
    (masked,) = r.step([part(ids, draw=evolve(GREEDY, masked=True))])
    assert masked is not None and masked.token == 300
    assert r.step([part(ids, draw=GREEDY)]) == [plain]


def test_penalties_know_a_prompt_that_came_in_chunks() -> None:
    ids = oracle("llama")["input_ids"]
    draw = greedy(repetition_penalty=1.7, frequency_penalty=0.4)
    whole, chunked = runner(DATA / "llama", "sample"), runner(DATA / "llama", "sample")
    a = whole.step([part(ids, draw=draw)])
    chunked.step([part(ids[:30])])
    b = chunked.step([part(ids[30:], 30, draw=draw)])
    np.testing.assert_array_equal(whole.states["counts"], chunked.states["counts"])
    assert a[0] is not None and b[0] is not None and a[0].token == b[0].token
    again = part([a[0].token], len(ids), draw=draw)
    whole.step([evolve(again, generated=True)])
    assert whole.states["counts"][0, a[0].token] & 0xFF == 1
    whole.step([part(ids[:3], draw=draw)])
    assert np.count_nonzero(whole.states["counts"][0]) == len(set(ids[:3].tolist())), "a new sequence starts clean"


def test_a_drawn_text_does_not_depend_on_company() -> None:
    ids = oracle("qwen3_5_dense")["input_ids"]
    draw = Draw(sampling=Sampling(temperature=1.0, top_p=0.9), seed=11)
    alone, together = runner(DATA / "qwen3_5_dense", "sample"), runner(DATA / "qwen3_5_dense", "sample")
    (a,) = alone.step([part(ids, draw=draw)])
    *_, b = together.step([part(ids[:7], slot=0, draw=GREEDY), part(ids[:30], slot=1), part(ids, slot=3, draw=draw)])
    assert a == b
