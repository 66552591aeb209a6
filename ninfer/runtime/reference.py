"""A model run by the ops' references alone: needs numpy only, and is what compiled runners are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from ninfer.formats.quant import Packed
from ninfer.ir.graph import Graph, Node
from ninfer.ir.interp import interpret
from ninfer.ir.step import STEP_FIELDS
from ninfer.ir.types import Array, Dim, Env, Sym
from ninfer.runtime.batch import Drawn, Limits, SeqRows
from ninfer.runtime.steps import fill_step, read_drawn, step_arrays

Watch = Callable[[Node, tuple[Array, ...]], None]
_COUNTS: dict[Dim, str] = {Sym.T: "rows", Sym.L: "logit_rows", Sym.B: "seqs"}


@define
class ReferenceRunner:
    """A ModelRunner over a graph and its bound weights. Make it with `reference_runner`."""

    limits: Limits
    graph: Graph
    weights: Mapping[str, Array]
    states: dict[str, NDArray[Any]]
    step_arrays: dict[str, NDArray[Any]]
    header: NDArray[Any]
    watch: Watch | None = field(default=None)

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        self.states["page_table"][slot, first : first + len(pages)] = pages

    def set_bias(self, slot: int, bias: Mapping[int, float]) -> None:
        row = self.states["bias"][slot]
        row[:] = 0
        for token, value in bias.items():
            row[token] = value

    def set_mask(self, slot: int, words: NDArray[Any], row: int = 0) -> None:
        self.states["mask"][slot, row, : len(words)] = words.view(np.uint32)

    def step(self, seqs: Sequence[SeqRows]) -> Sequence[Drawn | None]:
        fill_step(seqs, self.step_arrays, self.header)
        outputs = self._run()
        return read_drawn(seqs, outputs)

    def outputs(self, seqs: Sequence[SeqRows], targets: Sequence[int] | None = None) -> dict[str, NDArray[Any]]:
        """The graph's outputs with every row a logit row (modes "score" and "logits"). targets: of each row."""
        rows = fill_step(seqs, self.step_arrays, self.header)
        self.step_arrays["logit_rows"][:rows] = np.arange(rows)
        self.header["logit_rows"] = rows
        if targets is not None:
            self.step_arrays["targets"][:rows] = targets
        return self._run()

    def _run(self) -> dict[str, NDArray[Any]]:
        counts = {f.name: _COUNTS[f.type.shape[0]] for f in STEP_FIELDS}
        step = {name: array[: self.header[counts[name]]] for name, array in self.step_arrays.items()}
        return interpret(self.graph, step=step, weights=self.weights, states=self.states, watch=self.watch)

    def close(self) -> None:
        pass


def reference_runner(
    graph: Graph,
    weights: Mapping[str, Array],
    limits: Limits,
    *,
    decode_weights: bool = False,
    logit_rows: int | None = None,
) -> ReferenceRunner:
    """States for all slots and pages, zeroed.

    decode_weights: keep matrices as float32, which costs memory and saves decoding them at every step.
    logit_rows: of a step; by default one per sequence.
    """
    env = Env(
        rows=limits.max_rows,
        logit_rows=limits.max_seqs if logit_rows is None else logit_rows,
        seqs=limits.max_seqs,
        slots=limits.slots,
        pages=limits.pages,
        max_pages=limits.max_pages,
    )
    states = {name: np.zeros(v.type.concrete(env), v.type.dtype.numpy) for name, v in graph.states.items()}
    if decode_weights:
        weights = {name: w.f32() if isinstance(w, Packed) else w for name, w in weights.items()}
    step, header = step_arrays(env)
    return ReferenceRunner(limits, graph, weights, states, step, header)
