"""Graph to plan: choose routes, render kernels, place buffers in one arena, emit launches."""

from __future__ import annotations

from attrs import define, field

from ninfer.devices.base import Geometry, Source
from ninfer.devices.plan import BufferRef, Launch, Place, Plan
from ninfer.ir.graph import Graph, Kind, Node, Value
from ninfer.ir.types import Env, Types
from ninfer.routes.render import Renderer
from ninfer.routes.route import Candidate
from ninfer.routes.select import Selector

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


@define
class Lowering:
    """Lowers graphs for one device. Rendered sources are memoised across plans."""

    selector: Selector
    renderer: Renderer
    _sources: dict[object, Source] = field(factory=dict)

    def lower(self, graph: Graph, env: Env) -> Plan:
        """Raises NoRoute where no route of the device accepts a node."""
        last_use = {a: i for i, node in enumerate(graph.nodes) for a in node.args}
        last_use.update((v, len(graph.nodes)) for v in graph.outputs.values())
        arena, held = Arena(), dict[Value, tuple[int, int]]()
        launches: list[Launch] = []

        def ref(value: Value) -> BufferRef:
            if value.kind is Kind.NODE:
                return BufferRef(Place.ARENA, offset=held[value][0])
            return BufferRef(PLACES[value.kind], value.name)

        for i, node in enumerate(graph.nodes):
            types: Types = tuple(v.type for v in (*node.args, *node.outs))
            candidate = self.selector.choose(node.op, types[: len(node.args)], env)
            for out in node.outs:
                held[out] = arena.take(out.type.nbytes(env))
            args = [ref(v) for v in (*node.args, *node.outs)]
            launches += self.launches(node, types, env, candidate, args, arena)
            for value in {*node.args, *node.outs}:
                if value in held and last_use.get(value, i) <= i:
                    arena.give(*held.pop(value))

        outputs = {name: (ref(v), v.type) for name, v in graph.outputs.items()}
        return Plan(env, tuple(launches), arena.end, arena.total, outputs)

    def launches(
        self,
        node: Node,
        types: Types,
        env: Env,
        candidate: Candidate | None,
        args: list[BufferRef],
        arena: Arena,
    ) -> list[Launch]:
        num_inputs = len(node.args)

        def launch(
            route: str,
            source: Source | None,
            library: tuple[str, dict[str, object]] | None,
            geometry: Geometry,
        ) -> Launch:
            return Launch(node.op, route, source, library, geometry, tuple(args), types, num_inputs, node.layer)

        if candidate is None:
            return [launch("reference", None, None, Geometry())]
        route, tuning, op = candidate.route, candidate.tuning, node.op
        workspace = route.workspace(op, types, env, tuning)
        if workspace:
            block = arena.take(workspace)
            args.append(BufferRef(Place.ARENA, offset=block[0]))
        stages = [
            (route.template, route.geometry, None),
            *((s.template, s.geometry, s.library) for s in route.then),
        ]
        launches = []
        for template, geometry, library in stages:
            if library is not None:
                context = dict(route.context(op, types, env, tuning))
                launches.append(launch(candidate.id, None, (library, context), Geometry()))
            else:
                source = self._render(candidate, node, types, env, template)
                launches.append(launch(candidate.id, source, None, geometry(op, types, env, tuning)))
        if workspace:
            arena.give(*block)
        return launches

    def _render(self, candidate: Candidate, node: Node, types: Types, env: Env, template: str) -> Source:
        # CPU kernels read every count from the header; others may be specialised to the Env.
        key = (candidate.id, node.op, types, template, None if self.renderer.device.kind == "cpu" else env)
        if key not in self._sources:
            self._sources[key] = self.renderer.render(candidate, node.op, types, env, template=template)
        return self._sources[key]
