"""Copies of earlier text: found where the last tokens occurred before, never across a special token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ninfer.runtime.draft.drafter import Advance, Want
from ninfer.runtime.draft.ngram import NgramDrafter

SPECIAL = frozenset([900, 901])


def drafter(prompt: Sequence[int], reply: Sequence[int] = (), *, min_match: int = 4, beyond: int = 0) -> NgramDrafter:
    """The first token of the reply came with the prompt's last chunk, the others one by one."""
    made = NgramDrafter(SPECIAL, min_match, beyond)
    made.begin(0, prompt)
    if reply:
        made.advance([Advance(slot=0, kv_len=0, following=(*prompt[1:], reply[0]), limit=0)])
    for i, token in enumerate(reply[1:]):
        made.advance([Advance(slot=0, kv_len=len(prompt) + i, following=(token,), limit=0)])
    return made


def propose(made: NgramDrafter, limit: int = 15) -> list[int]:
    (found,) = made.propose([Want(slot=0, kv_len=0, last=0, limit=limit)])
    return list(found)


def slow(ids: Sequence[int], limit: int, min_match: int) -> set[tuple[int, ...]]:
    """Continuations of the longest matches of the last tokens, whatever order they are found in."""
    best, found = 0, set[tuple[int, ...]]()
    now = len(ids)
    for end in range(1, now):
        n = 0
        while n < min(64, end) and ids[end - 1 - n] == ids[now - 1 - n] and ids[now - 1 - n] not in SPECIAL:
            n += 1
        if n < min_match:
            continue
        rest = list[int]()
        while len(rest) < limit + 2 and end + len(rest) < now and ids[end + len(rest)] not in SPECIAL:
            rest.append(ids[end + len(rest)])
        if n > best:
            best, found = n, set()
        if n == best:
            found.add(tuple(rest[: min(limit, max(0, len(rest) - 2))]))
    return found


def test_a_repeated_passage_is_copied_up_to_the_limit() -> None:
    text = list(range(100, 160))
    assert propose(drafter([*text, 1, 2], text[:8])) == text[8:23]
    assert propose(drafter([*text, 1, 2], text[:8]), limit=3) == text[8:11]
    assert propose(drafter([*text, 1, 2], text[:3])) == [], "three tokens are not enough"
    assert propose(drafter([*text, 1, 2], text[:8], min_match=9)) == []


def test_the_reply_itself_is_a_source() -> None:
    reply = [*range(10, 30), *range(10, 18)]
    assert propose(drafter([1], reply)) == [*range(18, 30), 10, 11, 12]


def test_the_newest_of_equal_matches_wins() -> None:
    prompt = [5, 6, 7, 8, *range(100, 130), 5, 6, 7, 8, *range(200, 230), 1]
    assert propose(drafter(prompt, [5, 6, 7, 8])) == [*range(200, 215)]


def test_the_longest_match_wins_over_a_newer_one() -> None:
    prompt = [3, 4, 5, 6, 7, 8, *range(100, 130), 9, 9, 5, 6, 7, 8, *range(200, 230), 1]
    assert propose(drafter(prompt, [3, 4, 5, 6, 7, 8])) == [*range(100, 115)]


def test_special_tokens_bound_windows_and_copies() -> None:
    prompt = [1, 2, 900, 3, 4, *range(100, 110), 901, *range(110, 130)]
    assert propose(drafter(prompt, [1, 2, 900, 3, 4])) == [], "the window would reach over a special token"
    assert propose(drafter(prompt, [100, 101, 102, 103])) == [104, 105, 106, 107], "two tokens before it are left"


def test_a_short_copy_is_left_to_the_other_drafter() -> None:
    prompt = [*range(100, 112), 901]
    assert propose(drafter(prompt, range(100, 105))) == [105, 106, 107, 108, 109]
    assert propose(drafter(prompt, range(100, 105), beyond=4)) == [105, 106, 107, 108, 109]
    assert propose(drafter(prompt, range(100, 105), beyond=5)) == []
    assert propose(drafter(range(100, 160), range(100, 105), beyond=5), limit=3) == [105, 106, 107], "not cut short"


def test_slots_are_apart_and_forgotten() -> None:
    made = drafter(range(100, 160), range(100, 108))
    made.begin(1, [1, 2, 3])
    assert [len(x) for x in made.propose([Want(slot=s, kv_len=0, last=0, limit=4) for s in (1, 0)])] == [0, 4]
    made.end(0)
    made.end(0)
    made.begin(0, [1])
    assert propose(made) == []


@pytest.mark.parametrize("seed", range(40))
def test_random_texts_against_a_slow_search(seed: int) -> None:
    dice = random.Random(seed)
    phrases = [[dice.randrange(300) for _ in range(dice.randrange(4, 40))] for _ in range(4)]
    order = phrases * 2
    dice.shuffle(order)
    ids = [t for phrase in order for t in (*phrase, *([900] if dice.random() < 0.2 else []))]
    ids += dice.choice(phrases)[: dice.randrange(1, 20)]
    cut = dice.randrange(1, len(ids) - 1)
    found, want = tuple(propose(drafter(ids[:cut], ids[cut:]), 6)), slow(ids, 6, 4)
    assert found in want or (not found and not want), f"seed {seed}"
