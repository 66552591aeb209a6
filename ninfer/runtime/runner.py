"""The compiled model: plans for a few step widths, bound to one memory, driven through the ModelRunner protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from ninfer.devices.base import Device, Executable, Memory
from ninfer.devices.plan import Plan
from ninfer.errors import UsageError
from ninfer.ir.graph import Graph
from ninfer.ir.types import Env, TensorType
from ninfer.routes.lower import Lowering
from ninfer.runtime.batch import Drawn, Limits, SeqRows
from ninfer.runtime.kv.given import GivenTier
from ninfer.runtime.kv.store import CacheStore
from ninfer.runtime.steps import fill_step, read_drawn


def row_buckets(max_rows: int) -> list[int]:
    """Widths that get a plan of their own: powers of two up to the largest step."""
    buckets = [1]
    while buckets[-1] < max_rows:
        buckets.append(min(2 * buckets[-1], max_rows))
    return buckets


@define
class CompiledRunner:
    """One model on one device, with its states. `plans` are by width bucket, ascending."""

    limits: Limits
    device: Device
    memory: Memory
    executables: Mapping[int, Executable]
    cache_store: CacheStore | None = None
    fingerprint: str = "model"  # of the model and everything that changes what its cached bytes mean
    given: GivenTier | None = None  # states that stand before prompts
    _bias_slots: set[int] = field(factory=set)

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        self.memory.write_state("page_table", (slot, slice(first, first + len(pages))), np.array(pages, np.int32))

    def set_bias(self, slot: int, bias: Mapping[int, float]) -> None:
        if bias or slot in self._bias_slots:
            row = np.zeros(self.memory.states["bias"].shape[1], np.float32)
            for token, value in bias.items():
                row[token] = value
            self.memory.write_state("bias", slot, row)
        (self._bias_slots.add if bias else self._bias_slots.discard)(slot)

    def set_mask(self, slot: int, words: NDArray[Any], row: int = 0) -> None:
        self.memory.write_state("mask", (slot, row, slice(len(words))), words.view(np.uint32))

    def step(self, seqs: Sequence[SeqRows]) -> Sequence[Drawn | None]:
        rows = sum(len(s.tokens) for s in seqs)
        executable = next((e for width, e in self.executables.items() if rows <= width), None)
        if executable is None or len(seqs) > self.limits.max_seqs:
            raise ValueError(f"a step of {rows} rows and {len(seqs)} sequences exceeds {self.limits}")
        fill_step(seqs, executable.step, executable.header)
        return read_drawn(seqs, executable.launch())

    def close(self) -> None:
        self.device.close()


@define
class Scorer:
    """A plan in score or logits mode: the graph's outputs for every row of a chunk."""

    executable: Executable
    memory: Memory

    def __call__(self, seqs: Sequence[SeqRows], targets: Sequence[int] | None = None) -> Mapping[str, NDArray[Any]]:
        """All rows are logit rows. targets: the token asked of each row (score mode)."""
        step, header = self.executable.step, self.executable.header
        rows = fill_step(seqs, step, header)
        step["logit_rows"][:rows] = np.arange(rows)
        header["logit_rows"] = rows
        if targets is not None:
            step["targets"][:rows] = targets
        return self.executable.launch()


def plan_widths(lowering: Lowering, graph_at: Callable[[Env], Graph], limits: Limits) -> dict[int, Plan]:
    """A plan for each width bucket, of the graph as the device runs it at that width."""
    envs = [env_of(limits, w) for w in row_buckets(limits.max_rows)]
    return {env.rows: lowering.lower(graph_at(env), env) for env in envs}


def env_of(limits: Limits, rows: int, logit_rows: int | None = None) -> Env:
    """A step of so many rows has at most so many sequences."""
    seqs = min(rows, limits.max_seqs)
    return Env(
        rows=rows,
        logit_rows=seqs if logit_rows is None else logit_rows,
        seqs=seqs,
        slots=limits.slots,
        pages=limits.pages,
        max_pages=limits.max_pages,
    )


def state_types(*graphs: Graph) -> dict[str, TensorType]:
    """The states of graphs that share memory. The same name must mean the same type."""
    types: dict[str, TensorType] = {}
    for graph in graphs:
        for name, value in graph.states.items():
            if types.setdefault(name, value.type) != value.type:
                raise UsageError(f"state {name} is {types[name]} in one graph and {value.type} in another")
    return types


def const_arrays(*graphs: Graph) -> dict[str, NDArray[Any]]:
    """Of graphs of one model, where equal names mean equal arrays."""
    return {value.name: np.ascontiguousarray(array) for graph in graphs for value, array in graph.consts.items()}
