"""The graph of a model: nodes in program order over inputs, weights and states.

Adding a node infers its types at once, so a wrong shape fails on the model author's line. Effects are ordered by
program order among the nodes that touch one state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

from attrs import define, field, frozen
from numpy.typing import NDArray

from ninfer.errors import ShapeError
from ninfer.formats.quant import QuantFormat
from ninfer.ir.op import Op
from ninfer.ir.step import HEADER_FIELD, STATE_PAGE_TABLE, STEP_FIELDS
from ninfer.ir.types import TensorType


class Kind(Enum):
    STEP = "step"
    WEIGHT = "weight"
    STATE = "state"
    CONST = "const"
    RESULT = "result"  # an output of an earlier graph of the same plan
    NEXT = "next"  # a field of the record of the step that follows
    NODE = "node"


@frozen(eq=False)
class Value:
    """An edge of the graph. name: unique among its kind; of a node's result, `op.index`."""

    name: str
    type: TensorType
    kind: Kind
    layer: int | None = None


@frozen
class Rows:
    """Rows of one stored matrix: the whole of it, or `count` of every `period` rows from `start` on.

    Qwen's q_proj, for instance, holds query and gate of a head side by side: the gates are
    Rows("…q_proj.weight", start=256, count=256, period=512). Only whole rows are taken, so any block format can.
    """

    param: str
    start: int = 0
    count: int | None = None
    period: int | None = None


@frozen
class WeightSpec:
    """How a weight value is made from stored parameters: row pieces, stacked. A vector is one piece."""

    pieces: tuple[Rows, ...]


@frozen(eq=False)
class Node:
    op: Op
    args: tuple[Value, ...]
    outs: tuple[Value, ...]
    layer: int | None


@define(eq=False)
class Graph:
    """Built once per model and output mode by `models/<family>.py`; read-only afterwards."""

    nodes: list[Node] = field(factory=list)
    weights: dict[Value, WeightSpec] = field(factory=dict)
    states: dict[str, Value] = field(factory=dict)
    consts: dict[Value, NDArray[Any]] = field(factory=dict)  # numpy arrays computed by the model, e.g. rope frequencies
    outputs: dict[str, Value] = field(factory=dict)
    step: dict[str, Value] = field(factory=dict)
    following: dict[str, Value] = field(factory=dict)  # the next step's record, where the graph writes it
    _layer: int | None = None

    def __attrs_post_init__(self) -> None:
        for f in STEP_FIELDS:
            self.step[f.name] = Value(f.name, f.type, Kind.STEP)
        for f in (HEADER_FIELD, *STEP_FIELDS):
            self.following[f.name] = Value(f.name, f.type, Kind.NEXT)
        self.state(*STATE_PAGE_TABLE)

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Tag the nodes and weights added inside, for partitioning and printing."""
        outer, self._layer = self._layer, index
        try:
            yield
        finally:
            self._layer = outer

    def weight(self, name: str, type: TensorType, spec: WeightSpec | None = None) -> Value:
        """A leaf bound to stored parameters; by default to the whole parameter of that name."""
        value = Value(name, type, Kind.WEIGHT, self._layer)
        self.weights[value] = spec or WeightSpec((Rows(name),))
        return value

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        fmt: QuantFormat,
        spec: WeightSpec | None = None,
        *,
        least_bits: int = 0,
    ) -> Value:
        return self.weight(name, TensorType(shape, fmt=fmt, least_bits=least_bits), spec)

    def const(self, name: str, type: TensorType, array: NDArray[Any]) -> Value:
        value = Value(name, type, Kind.CONST, self._layer)
        self.consts[value] = array
        return value

    def state(self, name: str, type: TensorType) -> Value:
        if name in self.states:
            raise ShapeError(f"state {name} is declared twice")
        self.states[name] = value = Value(name, type, Kind.STATE, self._layer)
        return value

    def result(self, name: str, type: TensorType) -> Value:
        """What an earlier graph of the plan gave under that name."""
        return Value(name, type, Kind.RESULT)

    def add(self, op: Op, *args: Value) -> tuple[Value, ...]:
        """Append a node.   Raises ShapeError naming the op, the node's place and the argument."""
        try:
            types = op.infer(tuple(a.type for a in args))
        except ShapeError as error:
            where = "" if self._layer is None else f" in layer {self._layer}"
            names = ", ".join(f"{a.name}: {a.type}" for a in args)
            raise ShapeError(f"{error}{where} ({names})") from None
        for i in op.mutates:
            if args[i].kind not in (Kind.STATE, Kind.NEXT):
                raise ShapeError(f"{op.key}: argument {i} ({args[i].name}) is written, so it must be a state")
        index = len(self.nodes)
        outs = tuple(Value(f"{op.key}.{index}.{i}", t, Kind.NODE, self._layer) for i, t in enumerate(types))
        self.nodes.append(Node(op, args, outs, self._layer))
        return outs

    def one(self, op: Op, *args: Value) -> Value:
        (out,) = self.add(op, *args)
        return out

    def inputs_used(self) -> Sequence[Value]:
        used = {a for node in self.nodes for a in node.args if a.kind is Kind.STEP}
        return [v for v in self.step.values() if v in used]
