"""Candidates of a step's ops for a random search: those of the registry, and ones with a few values changed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence

from attrs import define, field, frozen

from ninfer.devices.base import Source
from ninfer.devices.plan import BufferRef, Launch, Place, Plan
from ninfer.errors import NinferError
from ninfer.ir.graph import Graph, Node
from ninfer.ir.op import Op
from ninfer.ir.types import Env, Types
from ninfer.routes.lower import Arena, Lowering
from ninfer.routes.profile import op_key
from ninfer.routes.render import Renderer
from ninfer.routes.route import Candidate
from ninfer.routes.select import Selector

SHARED = 227 << 10  # of a block, at most
ABSENT = -1  # a value that leaves the key out
# Beside the values in the tunings of the op's routes. Keys that a route does not read give sources that are known.
SPACE: Mapping[str, tuple[int, ...]] = {
    "warps": (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 17, 20, 24),
    "stages": (2, 3, 4, 5, 6, 8, 12),
    "span": (1, 2, 3, 4, 5),
    "tall": (1, 2, 3, 4),
    "groups": (1, 2, 3, 5),
    "limit": (24, 30, 36, 44, 54, 72, 100, 112, 150, 200, 227),
    "late": (ABSENT, 0, 1, 2, 4),
    "split": (1, 2, 4, 8),
    "apart": (0, 1),
    "bulk": (0, 1),
    "resident": (1, 2, 3, 4),
    "early": (ABSENT, 1, 2, 3, 4, 6),
    "copied": (0, 1),
}


@define
class Chosen(Selector):
    """table: candidates by op key, before all others."""

    table: dict[str, Candidate] = field(factory=dict)

    def choose(self, op: Op, types: Types, env: Env) -> Candidate | None:
        return self.table.get(op_key(op, types)) or super().choose(op, types, env)


@frozen
class Trial:
    """table: the candidates that it changes, by op key."""

    table: Mapping[str, Candidate]
    sources: tuple[Source, ...]


@define
class Search:
    """What is tried next. best: the winner of each kind of op; a kind: nodes of equal op and types."""

    graph: Graph
    env: Env
    selector: Chosen
    random: random.Random
    wanted: Sequence[str] = ()
    kinds: dict[str, tuple[Node, tuple[Candidate, ...]]] = field(factory=dict)
    best: dict[str, Candidate] = field(factory=dict)
    first: dict[str, Candidate] = field(factory=dict)
    _lock: threading.Lock = field(factory=threading.Lock)
    _lowering: Lowering = field(init=False)
    _seen: set[object] = field(factory=set)
    _listed: Iterator[dict[str, Candidate]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._lowering = Lowering(self.selector, Renderer(self.selector.info))
        for node in self.graph.nodes:
            types = tuple(a.type for a in node.args)
            key = op_key(node.op, types)
            found = self.selector.registry.candidates(node.op, types, self.env, self.selector.info)
            if key in self.kinds or len(found) < 2 or not any(w in key for w in self.wanted or ("",)):
                continue
            chosen = self.selector.choose(node.op, types, self.env)
            assert chosen is not None
            self.kinds[key], self.best[key], self.first[key] = (node, found), chosen, chosen
        self._listed = iter(self._tables())

    def _tables(self) -> list[dict[str, Candidate]]:
        """Each listed tuning for all ops that have it, since small blocks win only beside small ones; then for one."""
        one, all_of = list[dict[str, Candidate]](), dict[str, dict[str, Candidate]]()
        for key, (_, found) in self.kinds.items():
            for c in found:
                one.append({key: c})
                if c.tuning:
                    all_of.setdefault(str(sorted(c.tuning.items())), {}).setdefault(key, c)
        together = [table for table in all_of.values() if len(table) > 1]
        self.random.shuffle(one)
        self.random.shuffle(together)
        return together + one

    def plan(self, table: Mapping[str, Candidate]) -> Plan:
        with self._lock:
            self.selector.table = dict(table)
            return self._lowering.lower(self.graph, self.env)

    def propose(self) -> Trial | None:
        """Candidates for one kind of op or several. None: they are known, or fit no block."""
        table = next(self._listed, None) or self._changed()
        known, sources = list[object](), list[Source]()
        for key, candidate in table.items():
            launches = self._launches(key, candidate)
            if not launches or any(x.geometry.shared > SHARED or x.geometry.block > 1024 for x in launches):
                return None
            known += [key, *((x.source, x.geometry, str(x.library)) for x in launches)]
            sources += [x.source for x in launches if x.source]
        if tuple(known) in self._seen:
            return None
        self._seen.add(tuple(known))
        return Trial(table, tuple(sources))

    def _launches(self, key: str, candidate: Candidate) -> list[Launch]:
        """Of one op, its operands nowhere; none if this is no tuning of the route."""
        node, _ = self.kinds[key]
        types = tuple(v.type for v in (*node.args, *node.outs))
        args = [BufferRef(Place.ARENA)] * len(types)
        try:
            if not candidate.route.fits(node.op, types[: len(node.args)], candidate.tuning):
                return []
            with self._lock:
                return self._lowering.launches(node, types, self.env, candidate, args, Arena())
        except (ArithmeticError, AssertionError, LookupError, ValueError, NinferError):
            return []

    def _changed(self) -> dict[str, Candidate]:
        """Mostly one op, sometimes all that have a like tuning, with the same new values."""
        key = self.random.choice(list(self.kinds))
        node, found = self.kinds[key]
        now = self.best[key] if self.random.random() < 0.85 else self.random.choice(found)
        values = self._values(node, found)
        if not values:
            return {key: self.random.choice(found)}
        names = self.random.sample(list(values), k=min(len(values), self.random.choice((1, 1, 2, 2, 3, 4))))
        changes = {name: self.random.choice(values[name]) for name in names}
        keys = [key]
        if self.random.random() < 0.2:
            keys = [k for k, c in self.best.items() if set(names) <= {*c.tuning, *SPACE} and "stages" in c.tuning] or [
                key
            ]
        return {k: _with(now if k == key else self.best[k], changes) for k in keys}

    def _values(self, node: Node, found: Sequence[Candidate]) -> dict[str, list[int]]:
        """For each key of the tunings of the op's routes."""
        values: dict[str, set[int]] = {}
        for c in found:
            for name, value in c.tuning.items():
                values.setdefault(name, set(SPACE.get(name, ()))).add(value)
        if "stages" in values:
            for name in SPACE:
                values.setdefault(name, set(SPACE[name]))
        if "blocks" in values:
            units = self.selector.info.units
            heights = [t.shape[0] for t in (a.type for a in node.args) if t.fmt is not None]
            tiles = {h // step for h in heights if isinstance(h, int) for step in (16, 32, 48, 64, 128)}
            values["blocks"] |= {units * n // 2 for n in (1, 2, 3, 4, 6, 8, 10, 12, 16)}
            values["blocks"] |= {n for n in tiles if units // 2 <= n <= 10 * units}
        return {name: sorted(v) for name, v in values.items() if len(v) > 1}


def _with(candidate: Candidate, changes: Mapping[str, int]) -> Candidate:
    tuning = {**candidate.tuning, **changes}
    return Candidate(candidate.route, {name: value for name, value in tuning.items() if value != ABSENT})
