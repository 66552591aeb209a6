"""Graph to plan: choose routes, render kernels, place buffers in one arena, emit launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field, frozen

from ninfer.devices.base import Geometry, Source
from ninfer.devices.plan import BufferRef, Launch, Place, Plan
from ninfer.ir.graph import Graph, Kind, Node, Value
from ninfer.ir.types import Env, TensorType, Types
from ninfer.routes.render import Renderer
from ninfer.routes.route import Candidate
from ninfer.routes.select import Selector
from ninfer.routes.weave import Weaver

ALIGN = 256

PLACES = {Kind.STEP: Place.STEP, Kind.WEIGHT: Place.WEIGHT, Kind.STATE: Place.STATE, Kind.CONST: Place.CONST}


@define
class Arena:
    """Best-fit placement of buffers whose lifetimes are known in order."""

    free: list[tuple[int, int]] = field(factory=list)  # (offset, size), by offset
    end: int = 0
    total: int = 0  # of all requests, as if nothing were reused

    def take(self, nbytes: int) -> tuple[int, int]:
        size = max(ALIGN, -(-nbytes // ALIGN) * ALIGN)
        self.total += size
        fits = [(s, o) for o, s in self.free if s >= size]
        if fits:
            s, offset = min(fits)
            self.free.remove((offset, s))
            if s > size:
                self._insert(offset + size, s - size)
            return offset, size
        if self.free and sum(self.free[-1]) == self.end:  # grow the last hole
            offset, _ = self.free.pop()
        else:
            offset = self.end
        self.end = offset + size
        return offset, size

    def give(self, offset: int, size: int) -> None:
        self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        holes = sorted([*self.free, (offset, size)])
        self.free = []
        for o, s in holes:
            if self.free and sum(self.free[-1]) == o:
                o0, s0 = self.free.pop()
                self.free.append((o0, s0 + s))
            else:
                self.free.append((o, s))


@frozen
class Part:
    """A graph of a plan of several.   env: of its step; frame: the record that it reads, before the one that it may
    write. suffix: to the names of its outputs."""

    graph: Graph
    env: Env
    frame: int = 0
    suffix: str = ""


@frozen
class Kernels:
    """Of a node: its workspace, and for each launch the source, the library call, the geometry."""

    workspace: int
    kernels: tuple[tuple[Source | None, tuple[str, dict[str, object]] | None, Geometry], ...]


@define
class Lowering:
    """Lowers graphs for one device. Rendered sources and geometries are memoised across plans.

    weaver: joins launches of few rows
    """

    selector: Selector
    renderer: Renderer
    weaver: Weaver | None = None
    _sources: dict[object, Source] = field(factory=dict)
    _kernels: dict[object, Kernels] = field(factory=dict)

    def lower(self, graph: Graph, env: Env) -> Plan:
        """Raises NoRoute where no route of the device accepts a node."""
        return self.join([Part(graph, env)])

    def join(self, parts: Sequence[Part]) -> Plan:
        """One plan of graphs that run one after another. Those that read a record have its extents."""
        frames = {part.frame: part.env for part in parts}
        assert sorted(frames) == list(range(len(frames))), "a record without a reader"
        results, outputs = Arena(), dict[str, tuple[BufferRef, TensorType]]()
        launches: list[Launch] = []
        arena_bytes = total = 0
        for part in parts:
            named = self._outputs(part, results)
            arena = Arena()
            launches += self._lower(part, arena, named, outputs)
            arena_bytes, total = max(arena_bytes, arena.end), max(total, arena.total)
            outputs.update((name + part.suffix, (named[v], v.type)) for name, v in part.graph.outputs.items())
        more = tuple(frames[i] for i in range(1, len(frames)))
        plan = Plan(frames[0], tuple(launches), arena_bytes, total, outputs, results.end, more)
        return plan if self.weaver is None else self.weaver.weave(plan)

    @staticmethod
    def _outputs(part: Part, results: Arena) -> dict[Value, BufferRef]:
        """Places side by side, which nothing else ever has: so that the host, and later graphs, may read them."""
        named: dict[Value, BufferRef] = {}
        for name, value in part.graph.outputs.items():
            if value not in named:
                offset, _ = results.take(value.type.nbytes(part.env))
                named[value] = BufferRef(Place.RESULT, name + part.suffix, offset, part.frame)
        return named

    def _lower(
        self,
        part: Part,
        arena: Arena,
        named: Mapping[Value, BufferRef],
        results: Mapping[str, tuple[BufferRef, TensorType]],
    ) -> list[Launch]:
        """named: places of the part's outputs; results: outputs of the parts before."""
        graph, env = part.graph, part.env
        last_use = {a: i for i, node in enumerate(graph.nodes) for a in node.args}
        held: dict[Value, tuple[int, int]] = {}
        launches: list[Launch] = []

        def ref(value: Value) -> BufferRef:
            match value.kind:
                case Kind.NODE:
                    return named.get(value) or BufferRef(Place.ARENA, offset=held[value][0])
                case Kind.RESULT:
                    return results[value.name][0]
                case Kind.STEP:
                    return BufferRef(Place.STEP, value.name, frame=part.frame)
                case Kind.NEXT:
                    return BufferRef(Place.STEP, value.name, frame=part.frame + 1)
            return BufferRef(PLACES[value.kind], value.name)

        for i, node in enumerate(graph.nodes):
            types: Types = tuple(v.type for v in (*node.args, *node.outs))
            candidate = self.selector.choose(node.op, types[: len(node.args)], env)
            for out in node.outs:
                if out not in named:
                    held[out] = arena.take(out.type.nbytes(env))
            args = [ref(v) for v in (*node.args, *node.outs)]
            launches += self.launches(node, types, env, candidate, args, arena, part.frame)
            for value in {*node.args, *node.outs}:
                if value in held and last_use.get(value, i) <= i:
                    arena.give(*held.pop(value))
        return launches

    def launches(
        self,
        node: Node,
        types: Types,
        env: Env,
        candidate: Candidate | None,
        args: list[BufferRef],
        arena: Arena,
        frame: int = 0,
    ) -> list[Launch]:
        num_inputs = len(node.args)

        def launch(
            route: str,
            source: Source | None,
            library: tuple[str, dict[str, object]] | None,
            geometry: Geometry,
        ) -> Launch:
            return Launch(node.op, route, source, library, geometry, tuple(args), types, num_inputs, node.layer, frame)

        if candidate is None:
            return [launch("reference", None, None, Geometry())]
        kernels = self._kernels_of(candidate, node, types, env)
        if kernels.workspace:
            block = arena.take(kernels.workspace)
            args.append(BufferRef(Place.ARENA, offset=block[0]))
        launches = [launch(candidate.id, *kernel) for kernel in kernels.kernels]
        if kernels.workspace:
            arena.give(*block)
        return launches

    def _kernels_of(self, candidate: Candidate, node: Node, types: Types, env: Env) -> Kernels:
        key = (candidate.id, node.op, types, env)
        if key in self._kernels:
            return self._kernels[key]
        route, tuning, op = candidate.route, candidate.tuning, node.op
        stages = [
            (route.template, route.geometry, None),
            *((s.template, s.geometry, s.library) for s in route.then),
        ]
        kernels: list[tuple[Source | None, tuple[str, dict[str, object]] | None, Geometry]] = []
        for template, geometry, library in stages:
            if library is not None:
                kernels.append((None, (library, dict(route.context(op, types, env, tuning))), Geometry()))
            else:
                source = self._render(candidate, node, types, env, template)
                kernels.append((source, None, geometry(op, types, env, tuning)))
        made = Kernels(route.workspace(op, types, env, tuning), tuple(kernels))
        return self._kernels.setdefault(key, made)

    def _render(self, candidate: Candidate, node: Node, types: Types, env: Env, template: str) -> Source:
        # CPU kernels read every count from the header; others may be specialised to the Env.
        key = (candidate.id, node.op, types, template, None if self.renderer.device.kind == "cpu" else env)
        if key not in self._sources:
            self._sources[key] = self.renderer.render(candidate, node.op, types, env, template=template)
        return self._sources[key]
