"""Choose a candidate for a node: what was measured, else the registry's order."""

from __future__ import annotations

from attrs import define, field

from ninfer.devices.base import DeviceInfo
from ninfer.ir.op import Op
from ninfer.ir.types import Env, Types
from ninfer.routes.profile import DeviceProfile, op_key
from ninfer.routes.route import Candidate, RouteRegistry, width_of


@define
class Selector:
    """deterministic: one numerics tag per op, so that a row's bits do not depend on the width of its step."""

    registry: RouteRegistry
    info: DeviceInfo
    profile: DeviceProfile
    deterministic: bool = False
    used: dict[tuple[str, int], str] = field(factory=dict)  # (op key, width) -> candidate id, for --explain
    _chosen: dict[tuple[Op, Types, Env], Candidate | None] = field(factory=dict, init=False)

    def choose(self, op: Op, types: Types, env: Env) -> Candidate | None:
        """None: only the op's reference can compute this here (CPU). Raises NoRoute on other devices."""
        asked = (op, types, env)
        if asked not in self._chosen:
            self._chosen[asked] = self._choose(op, types, env)
        return self._chosen[asked]

    def _choose(self, op: Op, types: Types, env: Env) -> Candidate | None:
        candidates = self.registry.candidates(op, types, env, self.info)
        if not candidates:
            if self.info.kind == "cpu":
                return None
            raise self.registry.no_route(op, types, env, self.info)
        if self.deterministic:
            candidates = self._of_one_tag(op, types, env, candidates)
        key = op_key(op, types)
        wanted = self.profile.lookup(key, width_of(types, env))
        if candidates[0].route.opt_in and not self.profile.has_measured(key, candidates[0].id):
            wanted = None  # a choice among others, made without what was asked for
        chosen = next((c for c in candidates if c.id == wanted), candidates[0])
        self.used[key, width_of(types, env)] = chosen.id
        return chosen

    def _of_one_tag(self, op: Op, types: Types, env: Env, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Keep the routes of the first tag, in registry order, whose routes together serve every width."""
        for tag in dict.fromkeys(c.route.numerics for c in candidates):
            spans = sorted(
                r.widths
                for r in self.registry.routes
                if r.op is type(op) and tag and r.numerics == tag and not self._refused(r, op, types, env)
            )
            reach = 0
            for low, high in spans:
                if low <= reach + 1:
                    reach = max(reach, high)
            if reach >= 1 << 30:
                return tuple(c for c in candidates if c.route.numerics == tag)
        return candidates

    def _refused(self, route: object, op: Op, types: Types, env: Env) -> bool:
        from attrs import evolve

        from ninfer.routes.route import Route

        assert isinstance(route, Route)
        low = route.widths[0]
        return route.refusal(op, types, evolve(env, rows=low, logit_rows=low, seqs=low), self.info) is not None
