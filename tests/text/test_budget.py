"""Thinking ends after its budget, whatever the model would rather write."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ninfer.text.budget import ThinkingBudget

SIZE = 70
OPEN, CLOSE, BREAK = 40, 41, 42


class Evens:
    """A mask that allows even tokens, and counts what it was told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def fill(self, row: object) -> bool:
        assert isinstance(row, np.ndarray)
        row[:] = 0x55555555
        return True

    def accept(self, token: int) -> bool:
        self.told.append(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.told[len(self.told) - num_tokens :]


def allowed(mask: ThinkingBudget) -> set[int] | None:
    """None: all."""
    row = np.full((SIZE + 31) // 32, -1, np.int32)
    if not mask.fill(row):
        return None
    return {i for i in range(SIZE) if int(row[i >> 5]) >> (i & 31) & 1}


def test_after_the_budget_only_the_closing_is_left_and_then_the_inner_mask() -> None:
    inner = Evens()
    mask = ThinkingBudget(2, (BREAK, CLOSE), open=True, open_id=OPEN, inner=inner)
    for token in (1, 3):
        assert allowed(mask) == set(range(0, SIZE, 2))
        assert mask.accept(token)
    assert allowed(mask) == {BREAK} and not mask.accept(7) and mask.accept(BREAK)
    assert allowed(mask) == {CLOSE} and mask.accept(CLOSE)
    assert allowed(mask) == set(range(0, SIZE, 2))
    assert inner.told == [1, 3, BREAK, CLOSE]


def test_thinking_that_ends_by_itself_is_left_alone() -> None:
    mask = ThinkingBudget(2, (CLOSE,), open=True, open_id=OPEN)
    assert all(mask.accept(t) for t in (1, CLOSE, 2, 3, OPEN, 4, 5))
    assert allowed(mask) is None


@pytest.mark.parametrize("tokens, forced", [((OPEN, 1), True), ((BREAK, OPEN, 1), True), ((1, 2, 3, OPEN, 1), False)])
def test_a_reply_may_open_its_thinking_itself(tokens: tuple[int, ...], forced: bool) -> None:
    mask = ThinkingBudget(1, (CLOSE,), open=False, open_id=OPEN)
    assert all(mask.accept(t) for t in tokens)
    assert (allowed(mask) == {CLOSE}) is forced


def test_rollback_is_as_if_it_had_not_been(seed: int = 7) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        budget, opened = rng.randrange(1, 5), rng.random() < 0.5
        inner = Evens()
        mask = ThinkingBudget(budget, (BREAK, CLOSE), open=opened, open_id=OPEN, inner=inner)
        kept: list[int] = []
        for _ in range(30):
            choices = allowed(mask)
            token = rng.choice([OPEN, CLOSE, BREAK, 2, 4] if choices is None or len(choices) > 1 else sorted(choices))
            assert mask.accept(token)
            kept.append(token)
            if rng.random() < 0.3:
                count = rng.randrange(0, len(kept) + 1)
                mask.rollback(count)
                kept = kept[: len(kept) - count]
            fresh = ThinkingBudget(budget, (BREAK, CLOSE), open=opened, open_id=OPEN, inner=Evens())
            assert all(fresh.accept(t) for t in kept)
            assert allowed(mask) == allowed(fresh) and inner.told == kept
