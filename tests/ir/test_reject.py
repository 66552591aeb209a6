"""Rejection sampling gives the target's distribution, whatever the drafts' was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.ir.ops.block import proposal
from ninfer.ir.ops.reject import SampleRejecting
from ninfer.ir.ops.sample import kept
from ninfer.ir.step import MASK_ROWS, PROPOSAL_COPY, PROPOSAL_DRAWN, SAMPLE_PARAMS, USE_MASK

V, COUNT = 24, 16


def target_of(logits: NDArray[np.float32], p: Any) -> NDArray[np.float64]:
    z = logits / p["temperature"]
    e = np.where(kept(z, p), np.exp((z - z.max()).astype(np.float64)), 0)
    return np.asarray(e / e.sum())


def drawn(
    logits: NDArray[np.float32],
    q_scores: NDArray[np.float32],
    settings: dict[str, Any],
    n: int,
    *,
    copy: bool,
    first: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Drafts and tokens of n seeds, each with one draft behind the row that draws."""
    params = np.zeros(n, SAMPLE_PARAMS.numpy)
    params["top_p"] = params["repetition_penalty"] = 1
    for name, value in settings.items():
        params[name] = value
    params["seed"], params["position"] = np.arange(first, first + n), 41
    params["proposal"] = PROPOSAL_COPY if copy else PROPOSAL_DRAWN
    ids = np.arange(COUNT) + 4  # the draft's candidates and the target's support overlap in part
    proposals = np.zeros((1, MASK_ROWS, 2 * COUNT), np.float32)
    proposals[0, 0, :COUNT] = ids
    drafts = np.zeros(n, np.int32)
    for i in range(n):
        p = params[i].copy()
        p["position"] = 42  # of the token after the draft's place
        q, rank = proposal(q_scores, p)
        proposals[0, 0, COUNT:] = q
        drafts[i] = 7 if copy else ids[rank]
    tokens = np.stack([np.zeros(n, np.int32), drafts], axis=1).reshape(-1)
    mask = np.full((1, MASK_ROWS, 1), 0x00FFF0F7, np.uint32)
    rows = np.arange(n, dtype=np.int32)
    arguments = (
        np.broadcast_to(logits, (n, V)),
        params.view(np.uint32).reshape(n, -1),
        np.zeros((1, V), np.int32),
        np.zeros((1, V), np.float32),
        mask,
        tokens,
        np.repeat(rows, 2),
        2 * rows,
        2 * rows,
        proposals,
    )
    return drafts, np.asarray(SampleRejecting(V).reference(arguments)[0])


@pytest.mark.parametrize("n", [2_000, pytest.param(30_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("settings", "copy"),
    [
        ({"temperature": 1.0}, False),
        ({"temperature": 0.7, "top_k": 12, "top_p": 0.9}, False),
        ({"temperature": 1.2, "flags": USE_MASK, "min_p": 0.02}, False),
        ({"temperature": 1.0}, True),
    ],
    ids=["plain", "filters", "mask", "copy"],
)
def test_tokens_follow_the_target_by_chi_square(settings: dict[str, Any], copy: bool, n: int) -> None:
    """30,000 draws each, 120,000 in all; and in a second, 8,000."""
    dice = np.random.default_rng(11)
    logits = (dice.standard_normal(V) * 1.5).astype(np.float32)
    scores = (dice.standard_normal(COUNT) * 1.5).astype(np.float32)
    drafts, tokens = drawn(logits, scores, settings, n, copy=copy, first=1)
    p = np.zeros((), SAMPLE_PARAMS.numpy)
    p["top_p"] = 1
    for name, value in settings.items():
        p[name] = value
    allowed = np.array([not settings.get("flags") or (0x00FFF0F7 >> i) & 1 for i in range(V)], bool)
    want = target_of(np.where(allowed, logits, -np.inf).astype(np.float32), p)
    counts = np.bincount(tokens, minlength=V)
    assert (counts[want == 0] == 0).all(), "a token outside the target's support"
    expected = n * want[want > 0]
    chi = float((((counts[want > 0] - expected) ** 2) / expected).sum())
    freedom = len(expected) - 1
    assert chi < freedom + 4 * np.sqrt(2 * freedom), f"chi-square {chi:.1f} of {freedom} degrees of freedom"
    if copy:
        share, q = want[7], np.eye(V)[7]
    else:
        settings_q = p.copy()
        settings_q["seed"], settings_q["position"] = 1, 42
        q = np.zeros(V)
        q[np.arange(COUNT) + 4] = proposal(scores, settings_q)[0]
    share = np.minimum(want, q).sum()
    assert abs(np.mean(drafts == tokens) - share) < 4 * np.sqrt(0.25 / n), "kept as often as p and q overlap"


def test_greedy_rows_keep_the_likeliest_draft_only() -> None:
    logits = np.linspace(0, 1, V).astype(np.float32)
    logits[9] = 2
    scores = np.zeros(COUNT, np.float32)
    for best in (5, 3):  # candidate 5 is token 9
        s = scores.copy()
        s[best] = 1
        drafts, tokens = drawn(logits, s, {"temperature": 0.0}, 3, copy=False, first=1)
        assert drafts.tolist() == [best + 4] * 3 and tokens.tolist() == [9] * 3
