"""What a client may ask to be told while a reply is under way: llama.cpp's timings_per_token and return_progress."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import define, field

from ninfer.api.common import timings
from ninfer.api.fields import Value, boolean
from ninfer.api.told import Part


@define
class Way:
    """llama.cpp's news on the way: timings in every event, and how far the prompt has been read.

    Timings are of the reply that the event is of. Progress begins with what was cached and ends with the whole prompt,
    before the reply's first event, and never goes back.
    """

    timings: bool = False
    progress: bool = False
    _told: dict[int, int] = field(factory=dict)  # reply -> prompt tokens told

    @property
    def any(self) -> bool:
        return self.timings or self.progress

    def more(self, part: Part) -> dict[str, Any]:
        """Members of an event of the part."""
        return {"timings": timings(part.timings)} if self.timings and part.timings is not None else {}

    def news(self, part: Part) -> Iterable[dict[str, Any]]:
        """prompt_progress objects before the part's own events."""
        t = part.timings
        if not self.progress or t is None:
            return
        here = t.num_prompt_tokens if part.num_prefilled is None else part.num_prefilled
        for processed, spent_s in ((t.num_cached_tokens, 0.0), (here, t.prefill_s)):
            if processed > self._told.get(part.index, -1):
                self._told[part.index] = processed
                yield {
                    "total": t.num_prompt_tokens,
                    "cache": t.num_cached_tokens,
                    "processed": processed,
                    "time_ms": round(spent_s * 1e3),
                }


def way(body: Value) -> Way:
    """As timings_per_token and return_progress say."""
    per_token, progress = (body[name].maybe(boolean) or False for name in ("timings_per_token", "return_progress"))
    return Way(timings=per_token, progress=progress)
