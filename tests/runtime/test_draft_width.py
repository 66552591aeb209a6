"""The width of a round follows survival and time."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from ninfer.runtime.draft.width import PRIORS, AdaptiveWidth, Survival


def settled(chance: float, seconds: Callable[[int], float], *, rounds: int = 600, most: int = 7) -> tuple[float, float]:
    """Drafts that survive their predecessor with this chance. The mean width, and the rate, of the last half."""
    dice = random.Random(3)
    policy, survival = AdaptiveWidth(most), Survival()
    width, widths, tokens, time = policy.width, list[int](), 0.0, 0.0
    for n in range(rounds):
        kept = 0
        while kept < width and dice.random() < chance:
            kept += 1
        survival.note(width, kept)
        policy.observe(1, width, seconds(width))
        if n >= rounds // 2:
            widths.append(width)
            tokens += 1 + kept
            time += seconds(width)
        width = policy.choose([survival])
    return sum(widths) / len(widths), tokens / time


def rate(chance: float, width: int, seconds: Callable[[int], float]) -> float:
    return sum(chance**i for i in range(width + 1)) / seconds(width)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("each", [0.02, 0.1, 0.3])
def test_the_rate_comes_near_the_best_fixed_width(chance: float, each: float) -> None:
    seconds = lambda w: 1 + each * w  # noqa: E731
    best = max(rate(chance, w, seconds) for w in range(8))
    width, got = settled(chance, seconds)
    assert got > 0.9 * best, f"width {width}"


def test_drafts_that_never_survive_are_given_up_and_good_ones_use_all_there_is() -> None:
    assert settled(0.0, lambda w: 1 + 0.2 * w)[0] < 0.5
    assert settled(1.0, lambda w: 1 + 0.02 * w)[0] > 6.5


def test_chances_fall_from_place_to_place_and_start_at_the_priors() -> None:
    survival = Survival()
    assert survival.chances()[0] == PRIORS[0]
    for accepted in (3, 0, 2, 3, 3, 1):
        survival.note(3, accepted)
        chances = survival.chances()
        assert all(a >= b for a, b in pairwise(chances))
    assert survival.expected(0) == 1 and survival.expected(3) == pytest.approx(1 + sum(chances[:3]))


def test_a_width_that_never_ran_is_costed_by_its_neighbours() -> None:
    policy = AdaptiveWidth(7)
    for _ in range(4):
        policy.observe(2, 3, 2.0)
    assert policy.cost(2, 3) == 2.0 and 2.0 < policy.cost(2, 5) < 3.0
    assert policy.cost(1, 1) < policy.cost(1, 7), "another number of sequences is another matter"
