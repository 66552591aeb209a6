"""Run a graph with the ops' references: the oracle that every route and plan is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from ninfer.ir.graph import Graph, Kind, Node, Value
from ninfer.ir.types import Array, plain


def interpret(
    graph: Graph,
    *,
    step: Mapping[str, Array],
    weights: Mapping[str, Array],
    states: Mapping[str, Array],
    watch: Callable[[Node, tuple[Array, ...]], None] | None = None,
) -> dict[str, NDArray[Any]]:
    """Evaluate all nodes in order.   step, weights, states: arrays by value name, with this step's exact counts.

    States are changed in place. `watch` sees each node's results. Returns the graph's outputs by name.
    """
    values: dict[Value, Array] = {}

    def read(value: Value) -> Array:
        match value.kind:
            case Kind.STEP:
                return step[value.name]
            case Kind.WEIGHT:
                return weights[value.name]
            case Kind.STATE:
                return states[value.name]
            case Kind.CONST:
                return graph.consts[value]
            case Kind.NODE:
                return values[value]
            case Kind.RESULT | Kind.NEXT:
                raise ValueError(f"{value.name} is of another step; a plan has several, a graph by itself has one")

    for node in graph.nodes:
        results = node.op.reference(tuple(read(a) for a in node.args))
        values.update(zip(node.outs, results, strict=True))
        if watch is not None:
            watch(node, results)
    return {name: plain(read(value)) for name, value in graph.outputs.items()}
