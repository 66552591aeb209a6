"""Perplexity of a text: exp of the mean negative log-probability of its tokens, every one scored once.

The text is cut into windows of `context` tokens that advance by `stride`; the first window scores all its tokens but
the first, later ones their last `stride`. Each window starts from an empty state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.runtime.batch import Limits, SeqRows
from ninfer.runtime.runner import Scorer


@frozen
class Score:
    """nll: of each scored token, in nats, in text order."""

    nll: NDArray[np.float64]

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll.mean()))


def windows(num_tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, first scored token) of each window."""
    end = min(context, num_tokens)
    yield 0, end, 1
    while end < num_tokens:
        scored = end
        end = min(end + stride, num_tokens)
        yield max(0, end - context), end, scored


def score_text(
    scorer: Scorer,
    limits: Limits,
    tokens: Sequence[int],
    *,
    context: int | None = None,
    stride: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
    """Score a token sequence.   context: tokens of a window (the engine's); stride: half of it by default."""
    context = min(context or limits.context_len, limits.context_len)
    stride = stride or max(1, context // 2)
    scorer.memory.write_state("page_table", (0, slice(None)), np.arange(limits.max_pages, dtype=np.int32))
    nll: list[NDArray[np.float64]] = []
    for start, end, first in windows(len(tokens), context, stride):
        window = tokens[start:end]
        for at in range(0, len(window) - 1, limits.max_rows):
            part = window[at : min(at + limits.max_rows, len(window) - 1)]
            row = SeqRows(slot=0, kv_len=at, tokens=tuple(part), generated=False, draw=None)
            logprobs = scorer([row], window[at + 1 : at + 1 + len(part)])["nll"]
            skip = max(0, first - (start + at + 1))
            nll.append(-logprobs[skip : len(part)].astype(np.float64))
            progress(start + at + len(part) + 1, len(tokens))
    return Score(np.concatenate(nll))
