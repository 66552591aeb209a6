"""A batch as step arrays, and the reference runner over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ninfer.ir.step import (
    COUNT_GENERATED,
    COUNT_PROMPT,
    FLAG_COUNTS,
    FLAG_LOGPROBS,
    NUM_TOP,
    SAMPLE_PARAMS,
    USE_BIAS,
    USE_LOGPROBS,
    USE_MASK,
    USE_PENALTIES,
)
from ninfer.ir.types import Env
from ninfer.runtime.batch import Draw, Drawn, SeqRows
from ninfer.runtime.request import Sampling
from ninfer.runtime.steps import fill_step, read_drawn, step_arrays

ENV = Env(rows=16, logit_rows=4, seqs=4, slots=4, pages=8, max_pages=2)


def draw(seed: int = 7, logprobs: int | None = None, masked: bool = False, **sampling: Any) -> Draw:
    return Draw(sampling=Sampling(**sampling), seed=seed, logprobs=logprobs, masked=masked)


def seq(slot: int, kv_len: int, *tokens: int, generated: bool = False, draw: Draw | None = None) -> SeqRows:
    return SeqRows(slot=slot, kv_len=kv_len, tokens=tokens, generated=generated, draw=draw)


def test_every_field_of_a_mixed_step() -> None:
    step, header = step_arrays(ENV)
    seqs = [
        seq(2, 10, 5, generated=True, draw=draw(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)),
        seq(0, 64, 6, 7, 8),
        seq(3, 0, 9, 10, draw=draw(seed=-1, logprobs=2, masked=True, logit_bias={4: 1.0})),
    ]
    assert fill_step(seqs, step, header) == 6
    assert [int(header[n]) for n in ("rows", "seqs", "logit_rows")] == [6, 3, 2]
    assert step["tokens"][:6].tolist() == [5, 6, 7, 8, 9, 10]
    assert step["positions"][:6].tolist() == [10, 64, 65, 66, 0, 1]
    assert step["row_seq"][:6].tolist() == [0, 1, 1, 1, 2, 2]
    assert step["count_mode"][:6].tolist() == [COUNT_GENERATED] + [COUNT_PROMPT] * 5
    assert step["row_start"][:3].tolist() == [0, 1, 4] and step["row_count"][:3].tolist() == [1, 3, 2]
    assert step["seq_slot"][:3].tolist() == [2, 0, 3] and step["kv_len"][:3].tolist() == [10, 64, 0]
    assert step["logit_rows"][:2].tolist() == [0, 5]
    first, second = step["params"].view(SAMPLE_PARAMS.numpy).reshape(-1)[:2]
    assert first["temperature"] == np.float32(0.5) and first["top_p"] == np.float32(0.9)
    assert (first["top_k"], first["min_p"], first["flags"]) == (3, np.float32(0.1), 0)
    assert (first["seed"], first["position"], first["slot"]) == (7, 11, 2), "the position that the token will fill"
    assert second["flags"] == USE_LOGPROBS | USE_MASK | USE_BIAS
    assert (second["seed"], second["position"], second["slot"]) == (2**64 - 1, 2, 3)


@pytest.mark.parametrize(
    ("sampling", "uses", "flags"),
    [
        ({}, 0, 0),
        ({"repetition_penalty": 1.1}, USE_PENALTIES, FLAG_COUNTS),
        ({"presence_penalty": 0.5}, USE_PENALTIES, FLAG_COUNTS),
        ({"frequency_penalty": -0.5}, USE_PENALTIES, FLAG_COUNTS),
        ({"logprobs": 0}, USE_LOGPROBS, FLAG_LOGPROBS),
    ],
    ids=str,
)
def test_flags(sampling: dict[str, Any], uses: int, flags: int) -> None:
    step, header = step_arrays(ENV)
    fill_step([seq(0, 1, 5, draw=draw(**sampling))], step, header)
    assert header["flags"] == flags
    assert step["params"].view(SAMPLE_PARAMS.numpy).reshape(-1)[0]["flags"] == uses


def test_chunks_that_draw_nothing_are_counted() -> None:
    # the sequence's sampling is not known then, and its prompt must be counted if it turns out to have penalties
    step, header = step_arrays(ENV)
    fill_step([seq(0, 0, 5, 6)], step, header)
    assert header["flags"] == FLAG_COUNTS and header["logit_rows"] == 0


def test_a_step_leaves_nothing_to_the_next() -> None:
    step, header = step_arrays(ENV)
    fill_step([seq(0, 0, 5, draw=draw(logprobs=3, repetition_penalty=2.0, masked=True))] * 3, step, header)
    fill_step([seq(1, 4, 6, generated=True, draw=draw())], step, header)
    params = step["params"].view(SAMPLE_PARAMS.numpy).reshape(-1)[0]
    assert params["flags"] == 0 and params["repetition_penalty"] == 1 and header["flags"] == 0
    assert header["step"] == 2 and header["seqs"] == 1


def test_results_go_to_the_sequences_that_draw() -> None:
    seqs = [seq(0, 0, 1), seq(1, 0, 1, draw=draw()), seq(2, 0, 1, draw=draw(logprobs=2)), seq(3, 0, 1, draw=draw())]
    outputs = {
        "token": np.array([11, 12, -1], np.int32),
        "logprob": np.full((3, 1 + NUM_TOP), -9, np.float32),
        "top": np.zeros((3, NUM_TOP), np.int32),
    }
    outputs["logprob"][1, :3], outputs["top"][1, :2] = [-0.5, -0.25, -0.75], [8, 12]
    assert read_drawn(seqs, outputs) == [None, Drawn(11), Drawn(12, -0.5, ((8, -0.25), (12, -0.75))), Drawn(-1)]
