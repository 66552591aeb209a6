"""Which tokens a proposal head has, and in which order."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

from ninfer.errors import UsageError


def read_ranking(path: Path, domain: int) -> tuple[int, ...]:
    """Token ids, the most frequent first, from a JSON list.   Raises UsageError."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--ranking {path}: cannot be read as JSON: {str(error)[:200]}") from None
    if not isinstance(found, list):
        raise UsageError(f"--ranking {path}: not a list of token ids")
    wrong = [t for t in found if type(t) is not int or not 0 <= t < domain]
    if wrong:
        raise UsageError(
            f"--ranking {path}: {str(wrong[0])[:60]} is no token of the model, whose ids are below {domain}"
        )
    if len(set(found)) != len(found):
        raise UsageError(f"--ranking {path}: has a token twice")
    return tuple(found)


def shortlist(count: int, domain: int, special: Collection[int], ranking: Sequence[int] = ()) -> tuple[int, ...]:
    """`count` tokens below `domain`, in order of the ranking, with every special one among them.

    What a ranking leaves out follows by id: byte-pair vocabularies number tokens as they were merged, frequent ones
    first.   Raises UsageError.
    """
    needed = {t for t in special if 0 <= t < domain}
    if not len(needed) < count <= domain:
        raise UsageError(f"--proposal-rows {count}: from {len(needed) + 1} to {domain} are possible, since a head has "
                         f"every special token")  # fmt: skip
    order = tuple(dict.fromkeys((*ranking, *range(domain))))
    room, kept = count - len(needed), set[int]()
    for token in order:
        if token not in needed and room:
            kept.add(token)
            room -= 1
    return tuple(t for t in order if t in kept or t in needed)
