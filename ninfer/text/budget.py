"""A bound on how long a reply may think."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

import numpy as np

OPENS_WITHIN = 3  # tokens: a reply that thinks without having been told to begins with the tag, but for a blank or two


class Mask(Protocol):
    """The engine's TokenMask."""

    def fill(self, row: object) -> bool: ...

    def accept(self, token: int) -> bool: ...

    def rollback(self, num_tokens: int) -> None: ...


class _Where(Enum):
    BEFORE = "before"
    IN = "in"
    AFTER = "after"


class ThinkingBudget:
    """A TokenMask that lets a reply think for so many tokens, and then leaves it nothing but the tokens of `closing`.

    closing: ends with the end tag, which may also come earlier by itself. open: the reply begins inside the tags;
    otherwise `open_id` opens them. inner: the mask that holds as well.
    """

    def __init__(
        self, budget: int, closing: tuple[int, ...], *, open: bool, open_id: int | None, inner: Mask | None = None
    ) -> None:
        self._budget = budget
        self._closing = closing
        self._open_id = open_id
        self._inner = inner
        self._log = [(_Where.IN if open else _Where.BEFORE, 0)]  # after each token: where, and tokens there

    def fill(self, row: Any) -> bool:
        """row: int32 [ceil(V/32)], 1 for an allowed token."""
        forced = self._forced()
        if forced is None:
            return self._inner is not None and self._inner.fill(row)
        row[:] = 0
        row[forced >> 5] = np.uint32(1 << (forced & 31)).view(np.int32)
        return True

    def accept(self, token: int) -> bool:
        forced = self._forced()
        if forced is not None and token != forced:
            return False
        if self._inner is not None and not self._inner.accept(token):
            return False
        where, count = self._log[-1]
        if where is _Where.IN:
            self._log.append((_Where.AFTER, 0) if token == self._closing[-1] else (where, count + 1))
        elif where is _Where.BEFORE and token == self._open_id:
            self._log.append((_Where.IN, 0))
        else:
            over = where is _Where.AFTER or count + 1 >= OPENS_WITHIN
            self._log.append((_Where.AFTER, 0) if over else (where, count + 1))
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._log[-num_tokens:]
            if self._inner is not None:
                self._inner.rollback(num_tokens)

    def _forced(self) -> int | None:
        where, count = self._log[-1]
        if where is not _Where.IN or count < self._budget:
            return None
        return self._closing[count - self._budget]
