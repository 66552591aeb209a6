"""Calibration: time every candidate of a model's ops at every width, and write down where one beats the default.

A candidate is timed in a chain of all nodes of the graph that share its op and types, each with its own weights, so
that caches see what a real step shows them. A buffer larger than the caches is read between rounds. A candidate counts
only if its output agrees with the op's reference. It wins a width when it is 3 % faster than the default order's
choice, twice, the second time interleaved.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from attrs import define, frozen
from numpy.typing import NDArray

from ninfer.devices.base import DeviceInfo, Memory
from ninfer.devices.plan import BufferRef, Place, Plan
from ninfer.ir.graph import Graph, Kind, Node, Value
from ninfer.ir.types import Array, Env, TensorType, f32_array
from ninfer.routes.digest import stamped
from ninfer.routes.lower import PLACES, Arena, Lowering
from ninfer.routes.profile import Bands, DeviceProfile, op_key
from ninfer.routes.route import Candidate, width_of

MARGIN = 0.03
REPEAT = 11
MAX_CHAIN = 64
MAX_CHAIN_WIDTH = 32  # wider steps are long enough, and their activations large
REFERENCE_FLOPS, REFERENCE_BYTES = 400_000_000, 8 << 20  # what the host's reference does in a fraction of a second


class Bench(Protocol):
    """What calibration needs of a device: run a plan over given arena contents, and time it."""

    @property
    def info(self) -> DeviceInfo: ...

    def compile(self, plans: Sequence[Plan]) -> None:
        """Compile what the plans need, at once."""

    def begin(self, plans: Sequence[Plan]) -> None:
        """Make room for the largest plan, and let go of what was prepared before."""

    def prepare(
        self, plan: Plan, fill: Callable[[Mapping[str, NDArray[Any]], NDArray[Any]], None]
    ) -> Callable[[], float]:
        """Bind a plan that was begun, let `fill` write step and header, randomise activations.

        The result runs once and gives seconds; it is good until the next `begin`.
        """

    def operand(self, plan: Plan, ref: BufferRef, type: TensorType) -> Array:
        """A host copy of an operand as it is now."""

    def flush(self) -> None:
        """Push everything out of the caches."""

    @property
    def memory(self) -> Memory:
        """For states that a step needs to be set."""

    def close(self) -> None:
        """Give up the device."""


@frozen
class Timing:
    """One measured point. seconds: median of one launch of the op."""

    key: str
    width: int
    candidate: str
    seconds: float
    nbytes: int
    flops: int
    error: float  # relative L2 against the reference; inf: it failed
    default: bool


@frozen
class Calibration:
    profile: DeviceProfile
    timings: tuple[Timing, ...]


def op_groups(graph: Graph) -> dict[str, list[Node]]:
    """The nodes of a graph by profile key, with one entry for equal ops of equal types."""
    groups: dict[str, list[Node]] = {}
    for node in graph.nodes:
        groups.setdefault(op_key(node.op, tuple(a.type for a in node.args)), []).append(node)
    return groups


def chain_plan(lowering: Lowering, nodes: Sequence[Node], env: Env, candidate: Candidate) -> Plan:
    """The nodes one after another by one candidate; every activation has its own place in the arena."""
    arena, held, launches = Arena(), dict[Value, int](), []

    def ref(value: Value) -> BufferRef:
        if value.kind is not Kind.NODE:
            return BufferRef(PLACES[value.kind], value.name)
        if value not in held:
            held[value] = arena.take(value.type.nbytes(env))[0]
        return BufferRef(Place.ARENA, offset=held[value])

    for node in nodes:
        types = tuple(v.type for v in (*node.args, *node.outs))
        args = [ref(v) for v in (*node.args, *node.outs)]
        launches += lowering.launches(node, types, env, candidate, args, arena)
    return Plan(env, tuple(launches), arena.end, arena.total, {})


def calibrate(
    graph_at: Callable[[Env], Graph],
    lowering: Lowering,
    bench: Bench,
    envs: Sequence[Env],
    fill: Callable[[int, Mapping[str, NDArray[Any]], NDArray[Any]], None],
    *,
    only: str = "",
    repeat: int = REPEAT,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Calibration:
    """Measure all op groups whose key starts with `only`.

    envs: one for each step width, ascending. graph_at: the graph as the device runs it there. fill(rows, step, header).
    An op whose width is the same in several steps (a draw, in chunks of any size) is measured in the first.
    """
    jobs: dict[tuple[str, int], _Job] = {}
    for env in envs:
        for key, nodes in op_groups(graph_at(env)).items():
            width = width_of(tuple(a.type for a in nodes[0].args), env)
            if key.startswith(only) and (key, width) not in jobs:
                chain = nodes[: MAX_CHAIN if width <= MAX_CHAIN_WIDTH else 4]
                jobs[key, width] = _Job.of(lowering, key, width, chain, env)
    bench.compile([plan for job in jobs.values() for plan in job.plans])
    timings: list[Timing] = []
    routes: dict[str, list[tuple[int, str]]] = {}
    for i, (key, width) in enumerate(sorted(jobs)):
        progress(i, len(jobs), f"{key} at {width}")
        found = list(_measure(bench, jobs[key, width], fill, repeat))
        timings += [t for t, _ in found]
        best = _winner(found, repeat)
        routes.setdefault(key, []).append((width, best or ""))
    progress(len(jobs), len(jobs), "")
    measured: dict[str, dict[str, dict[str, float]]] = {}
    for t in timings:
        measured.setdefault(t.key, {}).setdefault(str(t.width), {})[t.candidate] = round(t.seconds * 1e6, 3)
    info = bench.info
    profile = DeviceProfile(
        info.hardware_class,
        {key: _bands(points) for key, points in routes.items() if any(name for _, name in points)},
        {},
        measured,
        {"name": info.name, "units": info.units, "date": datetime.date.today().isoformat()},
    )
    return Calibration(stamped(profile, lowering.selector.registry.routes), tuple(timings))


@frozen
class _Job:
    """The candidates of an op at a width, each with its plan of a chain of nodes."""

    key: str
    width: int
    nodes: Sequence[Node]
    env: Env
    candidates: Sequence[Candidate]
    plans: Sequence[Plan]

    @staticmethod
    def of(lowering: Lowering, key: str, width: int, nodes: Sequence[Node], env: Env) -> _Job:
        selector = lowering.selector
        types = tuple(a.type for a in nodes[0].args)
        candidates = selector.registry.candidates(nodes[0].op, types, env, selector.info)
        return _Job(key, width, nodes, env, candidates, [chain_plan(lowering, nodes, env, c) for c in candidates])


def _measure(
    bench: Bench, job: _Job, fill: Callable[[int, Mapping[str, NDArray[Any]], NDArray[Any]], None], repeat: int
) -> Iterator[tuple[Timing, Callable[[], float]]]:
    node, rows = job.nodes[0], job.env.rows
    work = node.op.work(tuple(a.type for a in node.args), job.env)
    bench.begin(job.plans)
    gate = _Gate(bench, work.flops > REFERENCE_FLOPS or work.nbytes > REFERENCE_BYTES)
    for i, (candidate, plan) in enumerate(zip(job.candidates, job.plans, strict=True)):
        run = bench.prepare(plan, lambda step, header: fill(rows, step, header))
        error = gate.error(plan, run)
        seconds = float("inf")
        if error <= gate.tolerance(candidate):
            seconds = statistics.median(_round(bench, run) for _ in range(repeat)) / len(job.nodes)
        yield Timing(job.key, job.width, candidate.id, seconds, work.nbytes, work.flops, error, i == 0), run


def _round(bench: Bench, run: Callable[[], float]) -> float:
    bench.flush()
    return run()


def _winner(found: Sequence[tuple[Timing, Callable[[], float]]], repeat: int) -> str | None:
    """The fastest candidate, if it beats the first by the margin and does so again side by side."""
    if len(found) < 2:
        return None
    (default, run_default), (best, run_best) = found[0], min(found, key=lambda f: f[0].seconds)
    if best.seconds >= default.seconds * (1 - MARGIN):
        return None
    if default.seconds == float("inf"):
        return best.candidate
    again = [(run_best(), run_default()) for _ in range(max(3, repeat // 2))]
    ours, theirs = (statistics.median(x) for x in zip(*again, strict=True))
    return best.candidate if ours < theirs * (1 - MARGIN / 2) else None


def _bands(points: Sequence[tuple[int, str]]) -> Bands:
    """Winners by width as bands; where none won (""), and beyond what was measured, the default holds."""
    bands: list[tuple[int, str]] = []
    for width, name in sorted(points):
        if bands and bands[-1][1] == name:
            bands[-1] = (width, name)
        else:
            bands.append((width, name))
    return tuple(bands)


@define
class _Gate:
    """Relative L2 of a candidate's first output against the reference, from the operands that were really used.

    Where the reference would take the host long (`large`), the first candidate's output stands in for it: it is the
    default, which the route tests hold against the reference. Ops that write states are left to those tests too.
    """

    bench: Bench
    large: bool
    _expected: NDArray[np.float32] | None = None
    _slack: float = 0.0  # the first candidate's own tolerance, where it stands in

    def tolerance(self, candidate: Candidate) -> float:
        own = max(1e-4, candidate.route.rtol or 0.0)
        if self.large and self._slack == 0.0:
            self._slack = own
        return own + self._slack

    def error(self, plan: Plan, run: Callable[[], float]) -> float:
        first = plan.launches[0]
        refs, types, n = first.args, first.types, first.num_inputs
        if first.op.mutates or len(types) == n:
            return 0.0
        if not self.large:
            inputs = [self.bench.operand(plan, r, t) for r, t in zip(refs[:n], types[:n], strict=True)]
            self._expected = f32_array(first.op.reference(tuple(inputs))[0])
        run()  # later outputs of a draw are unspecified in part
        got = f32_array(self.bench.operand(plan, refs[n], types[n]))
        if self._expected is None:
            self._expected = got.copy()
        scale = float(np.linalg.norm(self._expected)) or 1.0
        difference = float(np.linalg.norm(got - self._expected)) / scale
        return difference if np.isfinite(difference) else float("inf")


def time_once(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ranked_table(timings: Sequence[Timing]) -> str:
    """By op and width, the candidates from fast to slow, with their rates."""
    lines = [f"{'op':44} {'width':>6} {'candidate':36} {'us':>10} {'GB/s':>7} {'GFLOP/s':>9}"]
    for t in sorted(timings, key=lambda t: (t.key, t.width, t.seconds)):
        if t.seconds == float("inf"):
            lines.append(f"{t.key[:44]:44} {t.width:>6} {t.candidate:36} {'wrong':>10}")
            continue
        mark = " (default)" if t.default else ""
        lines.append(
            f"{t.key[:44]:44} {t.width:>6} {t.candidate + mark:36} {t.seconds * 1e6:>10.1f} "
            f"{t.nbytes / t.seconds / 1e9:>7.1f} {t.flops / t.seconds / 1e9:>9.1f}"
        )
    return "\n".join(lines)
