"""Trained models: the texts that float32 references wrote, and nothing else up to the first near tie."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from attrs import evolve

from ninfer.artifacts.demo import demo_path
from ninfer.routes.profile import cache_dir
from ninfer.runtime.batch import Drawn, SeqRows
from tests.checkpoints import DATA, GREEDY, TINY_GGUF, part, runner, tiny_cases, tiny_qwen35_folder

STEPS = 16  # of the 64 that the SmolLM2 reference has


class Stepping(Protocol):
    """What the reference runner and compiled ones have in common."""

    def step(self, seqs: Sequence[SeqRows], /) -> Sequence[Drawn | None]: ...


def draws(r: Stepping, seqs: Sequence[SeqRows]) -> list[Drawn]:
    drawn = [d for d in r.step(seqs) if d is not None]
    assert len(drawn) == len(seqs)
    return drawn


def generate(r: Stepping, prompts: list[list[int]], budgets: list[int]) -> list[list[Drawn]]:
    """Prompts one by one, then all sequences together."""
    texts = [draws(r, [part(p, slot=i, draw=GREEDY)]) for i, p in enumerate(prompts)]
    while live := [i for i, text in enumerate(texts) if len(text) < budgets[i]]:
        rows = [part([texts[i][-1].token], len(prompts[i]) + len(texts[i]) - 1, slot=i, draw=GREEDY) for i in live]
        for i, drawn in zip(live, draws(r, [evolve(row, generated=True) for row in rows]), strict=True):
            texts[i].append(drawn)
    return texts


def equal_steps(text: list[Drawn], ids: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(text, ids, strict=True)) if a.token != b), len(ids))


def compare(source: Path, cases: list[dict[str, Any]]) -> int:
    """Generate all cases; returns how many texts are equal to their ends."""
    r = runner(source, "sample", seqs=len(cases))
    texts = generate(r, [c["prompt_ids"] for c in cases], [len(c["greedy_ids"]) for c in cases])
    whole = 0
    for case, text in zip(cases, texts, strict=True):
        ids, best = case["greedy_ids"], case["top5_logprobs"]
        n = equal_steps(text, ids)
        whole += n == len(ids)
        # The reference has bf16 weights, the file six-bit ones: that moves log-probabilities by up to 0.7, so a step
        # whose two best tokens are closer than 0.5 may part the texts.
        assert n == len(ids) or best[n][0] - best[n][1] < 0.5, f"{case['prompt']!r} parts at step {n}"
        for drawn, (logprob, *_) in zip(text[:n], best, strict=False):
            assert drawn.logprob is not None and abs(drawn.logprob - logprob) < 1.0
    return whole


def test_tiny_qwen35_writes_the_reference_texts() -> None:
    assert compare(TINY_GGUF, tiny_cases()) >= 8


def test_tiny_qwen35_as_a_folder_is_the_same_model(tmp_path: Path) -> None:
    assert compare(tiny_qwen35_folder(tmp_path), tiny_cases()[:2]) == 2


def smollm2_reference() -> tuple[dict[str, Any], Any]:
    return json.loads((DATA / "smollm2" / "reference.json").read_text()), np.load(DATA / "smollm2" / "float32.npz")


@pytest.mark.slow
def test_smollm2_writes_the_reference_texts() -> None:
    reference, exact = smollm2_reference()
    prompts = [run["prompt_ids"] for run in reference["runs"]]
    texts = generate(runner(demo_path(cache_dir()), "sample", seqs=5), prompts, [STEPS] * 5)
    for i, text in enumerate(texts):
        ids = exact["greedy_ids"][i][:STEPS].tolist()
        n = equal_steps(text, ids)
        # float32 both: 1.3e-4 at most between two orders of summation
        assert n == STEPS or exact["greedy_gap"][i][n] < 1e-3, f"prompt {i} parts at step {n}"
        for step in range(min(n, 8)):
            want = dict(zip(exact["top_ids"][i, step].tolist(), exact["top_logprobs"][i, step].tolist(), strict=True))
            for token, logprob in text[step].top:
                assert abs(logprob - want[token]) < 5e-4


@pytest.mark.slow
def test_smollm2_scores_the_text() -> None:
    reference, exact = smollm2_reference()
    ids = reference["text_ids"][:129]
    got = runner(demo_path(cache_dir()), "score", pages_each=5).outputs([part(ids[:-1])], ids[1:])["nll"]
    np.testing.assert_allclose(-got, exact["text_nll"][:128], rtol=0, atol=5e-4)
