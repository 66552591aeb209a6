"""A graph whose nodes are being replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from attrs import define, field

from ninfer.ir.graph import Graph, Node, Value
from ninfer.ir.op import Op
from ninfer.ir.types import Types

GROUP = 32  # values that share a scale where codes pass between ops

Accepts = Callable[[Op, Types], bool]
O = TypeVar("O", bound=Op)


def over(graph: Graph, nodes: list[Node]) -> Graph:
    """A graph of these nodes over the same weights, states and step inputs."""
    made = Graph()
    made.nodes, made.weights, made.states = nodes, graph.weights, graph.states
    made.consts, made.outputs, made.step = graph.consts, graph.outputs, graph.step
    return made


@define
class Rewriter:
    """A graph's nodes as they are now. accepts: whether the device has a route for an op of these arguments."""

    graph: Graph
    accepts: Accepts
    nodes: list[Node] = field(init=False)  # changed by `put` alone
    _maker: dict[Value, Node] = field(init=False, factory=dict)
    _readers: dict[Value, list[Node]] = field(init=False, factory=dict)  # once for each argument

    def __attrs_post_init__(self) -> None:
        self.nodes = list(self.graph.nodes)
        for node in self.nodes:
            self._know(node)

    def _know(self, node: Node) -> None:
        self._maker.update(dict.fromkeys(node.outs, node))
        for value in node.args:
            self._readers.setdefault(value, []).append(node)

    def _forget(self, node: Node) -> None:
        for value in node.outs:
            if self._maker.get(value) is node:
                del self._maker[value]
        for value in node.args:
            self._readers[value].remove(node)

    def maker(self, value: Value) -> Node | None:
        """The node that this is a result of."""
        return self._maker.get(value)

    def only_maker(self, value: Value) -> Node | None:
        """The node whose only result this is."""
        node = self.maker(value)
        return node if node is not None and len(node.outs) == 1 else None

    def made_by(self, value: Value, kind: type[O]) -> Node | None:
        """The node of that kind whose only result this is, if nothing but one node reads it."""
        node = self.only_maker(value)
        if node is None or value in self.graph.outputs.values() or len(self.readers(value)) != 1:
            return None
        return node if type(node.op) is kind else None

    def readers(self, value: Value) -> list[Node]:
        """In the order of the graph."""
        found = self._readers.get(value, [])
        return sorted(found, key=self.nodes.index) if len(found) > 1 else list(found)

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
        places = sorted(self.nodes.index(n) for n in old)
        at = places[0 if first else -1]
        node = Node(op, tuple(args), tuple(outs), self.nodes[at].layer)
        for place in places:
            self._forget(self.nodes[place])
        self.nodes[at] = node
        for place in reversed(places):
            if place != at:
                del self.nodes[place]
        self._know(node)
        return True

    def done(self) -> Graph:
        return over(self.graph, self.nodes)
