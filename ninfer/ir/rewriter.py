"""A graph whose nodes are being replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from attrs import define, field

from ninfer.ir.graph import Graph, Kind, Node, Value
from ninfer.ir.op import Op
from ninfer.ir.types import Types

GROUP = 32  # values that share a scale where codes pass between ops

Accepts = Callable[[Op, Types], bool]
O = TypeVar("O", bound=Op)


@define
class Rewriter:
    """A graph's nodes as they are now. accepts: whether the device has a route for an op of these arguments."""

    graph: Graph
    accepts: Accepts
    nodes: list[Node] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.nodes = list(self.graph.nodes)

    def made_by(self, value: Value, kind: type[O]) -> Node | None:
        """The node of that kind whose only result this is, if nothing but one node reads it."""
        if value.kind is not Kind.NODE or value in self.graph.outputs.values():
            return None
        for node in self.nodes:
            if value in node.outs:
                alone = len(node.outs) == 1 and len(self.readers(value)) == 1
                return node if alone and type(node.op) is kind else None
        return None

    def readers(self, value: Value) -> list[Node]:
        return [n for n in self.nodes for a in n.args if a is value]

    def only_reader(self, value: Value, kind: type[O]) -> Node | None:
        readers = self.readers(value)
        alone = len(readers) == 1 and value not in self.graph.outputs.values()
        return readers[0] if alone and type(readers[0].op) is kind else None

    def put(
        self, old: Sequence[Node], op: Op, args: Sequence[Value], outs: Sequence[Value], *, first: bool = False
    ) -> bool:
        """Replace nodes by one at the place of the last of them, or of the first."""
        if not self.accepts(op, tuple(a.type for a in args)):
            return False
        at = (min if first else max)(self.nodes.index(n) for n in old)
        self.nodes[at] = Node(op, tuple(args), tuple(outs), self.nodes[at].layer)
        self.nodes = [n for n in self.nodes if not any(n is o for o in old)]
        return True

    def done(self) -> Graph:
        """A graph of these nodes over the same weights, states and step inputs."""
        made, graph = Graph(), self.graph
        made.nodes, made.weights, made.states = self.nodes, graph.weights, graph.states
        made.consts, made.outputs, made.step = graph.consts, graph.outputs, graph.step
        return made
