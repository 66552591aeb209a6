"""What a route is: one way to compute an op on one kind of device, as a template and its launch geometry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from attrs import field, frozen

from ninfer.devices.base import DeviceInfo
from ninfer.devices.base import Geometry as Geometry
from ninfer.errors import NoRoute
from ninfer.formats.kv import KVFormat
from ninfer.ir.op import Op
from ninfer.ir.types import Env, Sym, Types

O = TypeVar("O", bound=Op)

Tuning = Mapping[str, int]  # finite template constants: tile sizes, warps, stages
NO_TUNING: Tuning = {}


def width_of(types: Types, env: Env) -> int:
    """Rows of an op's step: of tokens, of logits or of sequences, whichever its first such argument has."""
    for type in types:
        first = type.shape[0] if type.shape else None
        if first in (Sym.T, Sym.L, Sym.B):
            return type.concrete(env)[0]
    return env.rows


def _nothing(op: Op, types: Types) -> str | None:
    return None


def _any_tuning(op: Op, types: Types, tuning: Tuning) -> bool:
    return True


def _no_workspace(op: Op, types: Types, env: Env, tuning: Tuning) -> int:
    return 0


def _no_context(op: Op, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {}


@frozen(kw_only=True)
class Stage(Generic[O]):
    """A further kernel of a route, launched after the first with the same arguments (e.g. the split-K combine).

    library: instead of a template, a library call that the device knows by name ("gemm_bf16"), its parameters from
    `context`.
    """

    template: str = ""
    geometry: Callable[[O, Types, Env, Tuning], Geometry] = lambda op, types, env, tuning: Geometry()
    library: str | None = None


@frozen(kw_only=True, eq=False)
class Route(Generic[O]):
    """A kernel gets pointers only: the step header, the arguments, the outputs, the workspace, in this order.

    Shapes, attributes and tuning are rendered into the source; the step's real counts are read from the header.
    numerics: equal tags promise bit-equal rows at every width. rtol: the tolerance of routes that quantise
    activations (relative L2 of a result), else the case's own holds. opt_in: a class of accuracy that someone must
    have asked for before the route is offered. bits: of the activations that an opt-in route makes; it
    is not offered for weights whose file wants more.
    """

    name: str  # "linear.cpu.f32"
    op: type[O]
    device: str  # "cpu" or "cuda"
    template: str  # below ninfer/templates
    geometry: Callable[[O, Types, Env, Tuning], Geometry]
    widths: tuple[int, int] = (1, 1 << 30)  # inclusive range of width_of
    needs: tuple[str, ...] = ()  # features of the device, e.g. "avx2", "sm80", "sm90a"
    refuse: Callable[[O, Types], str | None] = _nothing
    tunings: tuple[Tuning, ...] = (NO_TUNING,)
    fits: Callable[[O, Types, Tuning], bool] = _any_tuning  # tunings that do not are left out for these operands
    then: tuple[Stage[O], ...] = ()
    workspace: Callable[[O, Types, Env, Tuning], int] = _no_workspace
    context: Callable[[O, Types, Env, Tuning], Mapping[str, Any]] = _no_context  # extra template variables
    numerics: str = ""
    rtol: float | None = None
    opt_in: str = ""
    bits: int = 0
    sim: bool = True  # the host shim can run it (CUDA)

    def refusal(self, op: O, types: Types, env: Env, device: DeviceInfo) -> str | None:
        """None: the route can compute this; otherwise a sentence that says why not."""
        low, high = self.widths
        if not low <= width_of(types, env) <= high:
            return f"serves widths {low}-{high}"
        return self.refusal_at_any_width(op, types, device)

    def refusal_at_any_width(self, op: O, types: Types, device: DeviceInfo) -> str | None:
        if device.kind != self.device and not (device.kind == "cuda-sim" and self.device == "cuda"):
            return f"runs on {self.device}"
        if device.kind == "cuda-sim" and not self.sim:
            return "needs instructions that the simulation lacks"
        missing = [f for f in self.needs if f not in device.features]
        if missing:
            return f"needs {', '.join(missing)}"
        least = max((t.least_bits for t in types), default=0)
        if 0 < self.bits < least:
            return f"makes activations of {self.bits} bits, but the model's file allows {least} or more"
        return self.refuse(op, types)


@frozen(eq=False)
class Candidate:
    """A route with one tuning. id: as profiles write it."""

    route: Route[Any]
    tuning: Tuning
    id: str = field(init=False)

    @id.default
    def _id(self) -> str:
        settings = ",".join(f"{k}{v}" for k, v in sorted(self.tuning.items()))
        return f"{self.route.name}/{settings}" if settings else self.route.name


@frozen
class RouteRegistry:
    """An immutable set of routes, in default order: the first that accepts wins where nothing was measured."""

    routes: tuple[Route[Any], ...]
    _at_any_width: dict[object, tuple[Candidate, ...]] = field(factory=dict, init=False, eq=False, repr=False)
    _found: dict[object, tuple[Candidate, ...]] = field(factory=dict, init=False, eq=False, repr=False)

    def candidates(self, op: Op, types: Types, env: Env, device: DeviceInfo) -> tuple[Candidate, ...]:
        """Those of equal ops are found once: a model asks for the same few in each of its layers, and again and again
        while it is fused for each width."""
        width = width_of(types, env)
        key = (op, types, width, device)
        if key not in self._found:
            found = self._of_every_width(op, types, device)
            self._found[key] = tuple(c for c in found if c.route.widths[0] <= width <= c.route.widths[1])
        return self._found[key]

    def _of_every_width(self, op: Op, types: Types, device: DeviceInfo) -> tuple[Candidate, ...]:
        key = (op, types, device)
        if key not in self._at_any_width:
            self._at_any_width[key] = tuple(
                Candidate(route, tuning)
                for route in self.routes
                if route.op is type(op) and route.refusal_at_any_width(op, types, device) is None
                for tuning in route.tunings
                if route.fits(op, types, tuning)
            )
        return self._at_any_width[key]

    def explain(self, op: Op, types: Types, env: Env, device: DeviceInfo) -> str:
        """Every route of the op with what it says, a line each."""
        lines = []
        for route in self.routes:
            if route.op is type(op):
                reason = route.refusal(op, types, env, device)
                lines.append(f"  {route.name:32} {'accepts' if reason is None else reason}")
        return "\n".join(lines) or "  (no route computes this op)"

    def no_route(self, op: Op, types: Types, env: Env, device: DeviceInfo) -> NoRoute:
        args = " ".join(str(t) for t in types)
        cache = getattr(op, "fmt", None)
        coded = isinstance(cache, KVFormat) and not cache.is_plain
        other = "--kv-dtype bf16" if coded else "a smaller --prefill-chunk, another --quantize format"
        return NoRoute(
            f"no route for {op.key} {args} at width {width_of(types, env)} on {device.name}\n"
            f"{self.explain(op, types, env, device)}\n"
            f"  try: {other}, or add a route in ninfer/routes/"
        )

    def without_routes(self) -> RouteRegistry:
        """An empty registry: on a CPU every op then runs its reference."""
        return RouteRegistry(())

    def with_routes(self, *more: Route[Any]) -> RouteRegistry:
        return RouteRegistry((*more, *self.routes))
