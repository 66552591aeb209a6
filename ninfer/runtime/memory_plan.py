"""What fits: from the flags, the model's sizes and the memory there is, to the limits of an engine.

Weights, state and arena have the sizes they have; the KV pages get what is left, up to what all slots could use.
A model that does not fit is refused with what it needs, what there is, and the context that would fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from attrs import frozen

from ninfer.config import EngineConfig
from ninfer.errors import UsageError
from ninfer.ir.step import PAGE
from ninfer.runtime.batch import Limits
from ninfer.runtime.kv.pages import num_pages

DEFAULT_CONTEXT = 8192
HEADROOM = 0.05  # of the memory there is: left to the host program and to allocators


@frozen(kw_only=True)
class ModelSizes:
    """context_len: the model's window. page_bytes: of all planes of all layers. slot_bytes: recurrent state, counts,
    bias and masks of one slot. arena_bytes: scratch of the widest step."""

    context_len: int
    domain: int
    weight_bytes: int
    page_bytes: int
    slot_bytes: int = 0
    arena_bytes: int = 0


@frozen(kw_only=True)
class MemoryPlan:
    """The limits, and where the bytes go."""

    limits: Limits
    weight_bytes: int
    kv_bytes: int
    state_bytes: int
    arena_bytes: int
    free_bytes: int | None  # None: it is not known how much there is

    @property
    def token_bytes(self) -> int:
        """KV of a token, all layers."""
        return self.kv_bytes // (self.limits.pages * PAGE)

    def line(self, kv_name: str) -> str:
        """The start-up line. Kinds of memory in GiB."""
        free = "" if self.free_bytes is None else f"  free {gib(self.free_bytes)}"
        return (
            f"weights {gib(self.weight_bytes)}  kv {gib(self.kv_bytes)} ({self.limits.pages:,} pages, {kv_name}, "
            f"{self.token_bytes:,} B/token)  "
            f"state {gib(self.state_bytes)}  arena {gib(self.arena_bytes)}{free} GiB"
        )


def plan_memory(config: EngineConfig, sizes: ModelSizes, available_bytes: int | None = None) -> MemoryPlan:
    """Raises UsageError with the numbers that would work."""
    context = config.max_context or min(sizes.context_len, DEFAULT_CONTEXT)
    if context > sizes.context_len:
        raise UsageError(
            f"--max-context {context} exceeds the model's window of {sizes.context_len} tokens; "
            f"use {sizes.context_len} or less"
        )
    slots = config.max_concurrency
    fixed = sizes.weight_bytes + slots * sizes.slot_bytes + sizes.arena_bytes
    each = num_pages(context)
    room = None
    if available_bytes is not None:
        room = max(0, int(available_bytes * (1 - HEADROOM)) - fixed) // sizes.page_bytes
    if config.kv_capacity is None:
        pages = slots * each if room is None else min(slots * each, room)
        if pages < each:
            _refuse(f"a context of {context} tokens", fixed, each * sizes.page_bytes, available_bytes, room)
    else:
        pages = num_pages(config.kv_capacity)
        if pages < each:
            raise UsageError(
                f"--kv-capacity {config.kv_capacity} holds less than one context of {context} tokens; "
                f"use --kv-capacity {each * PAGE} or --max-context {pages * PAGE}"
            )
        if room is not None and pages > room:
            _refuse(f"--kv-capacity {config.kv_capacity}", fixed, pages * sizes.page_bytes, available_bytes, room, each)
    kv = pages * sizes.page_bytes
    return MemoryPlan(
        limits=Limits(
            max_rows=max(config.prefill_chunk, slots),
            max_seqs=slots,
            slots=slots,
            pages=pages,
            max_pages=each,
            context_len=context,
            domain=sizes.domain,
        ),
        weight_bytes=sizes.weight_bytes,
        kv_bytes=kv,
        state_bytes=slots * sizes.slot_bytes,
        arena_bytes=sizes.arena_bytes,
        free_bytes=None if available_bytes is None else available_bytes - fixed - kv,
    )


def _refuse(
    what: str, fixed: int, kv: int, available: int | None, room: int | None, each: int | None = None
) -> NoReturn:
    """room: pages that fit. each: of a context, where more than one was asked for."""
    advice = "a smaller model, or --quantize, may fit"
    if room:
        flags = [] if each is None else [f"--kv-capacity {room * PAGE}"]
        flags += [f"--max-context {room * PAGE}"] if each is None or room < each else []
        advice = f"{' '.join(flags)} would fit"
    raise UsageError(
        f"{what} needs {gib(fixed + kv)} GiB ({gib(fixed)} for the model, {gib(kv)} for KV pages), "
        f"but {gib(available or 0)} GiB are available; {advice}"
    )


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"


def host_available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process may still take, by the kernel's account and the control group's; None: unknown."""
    found = []
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            left = int((root / limit).read_text()) - int((root / used).read_text())
        except (OSError, ValueError):  # absent, or "max"
            continue
        found.append(max(0, left))
    return min(found, default=None)
