"""One op case through one route: operands and results side by side in one guarded arena.

The same for the simulation and for a GPU; what runs the launches is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from ninfer.devices.base import DeviceInfo
from ninfer.devices.plan import BufferRef, Launch, Place
from ninfer.formats.quant import Packed
from ninfer.ir.graph import Kind, Node, Value
from ninfer.ir.op import Case
from ninfer.ir.ops import OPS
from ninfer.ir.ops.sample import Sample
from ninfer.ir.step import HEADER, SAMPLE_PARAMS, USE_LOGPROBS
from ninfer.ir.types import Env
from ninfer.routes.cuda import CUDA_ROUTES
from ninfer.routes.cuda_layout import device_layout
from ninfer.routes.lower import Arena, Lowering
from ninfer.routes.profile import DeviceProfile
from ninfer.routes.render import Renderer
from ninfer.routes.route import Candidate, RouteRegistry
from ninfer.routes.select import Selector

REGISTRY = RouteRegistry(CUDA_ROUTES)
GUARD = 512
FILL = 0xA5
WIDE = 96  # rows of a plan that is made for chunks of a prompt

Run = Callable[[Sequence[Launch], NDArray[np.uint8], NDArray[np.uint8]], None]  # launches, arena, header bytes


@frozen
class Trial:
    """A case and a candidate that accepts it, with room for more rows than the step has, a little or a lot."""

    case: Case
    candidate: Candidate
    env: Env

    @property
    def id(self) -> str:
        wide = "-wide" if self.env.rows >= WIDE else ""
        return f"{self.case.op.key}-{self.case.name}-{self.candidate.id}{wide}"


def trials(info: DeviceInfo) -> Iterator[Trial]:
    for op in OPS.ops:
        for case in op.cases():
            for rows in (case.env.rows + (2 if case.env.rows > 1 else 0), WIDE):
                env = evolve(case.env, rows=rows, logit_rows=case.env.logit_rows + 1, seqs=case.env.seqs + 1)
                for candidate in REGISTRY.candidates(case.op, case.types, env, info):
                    yield Trial(case, candidate, env)


def lowering_for(info: DeviceInfo) -> Lowering:
    return Lowering(Selector(REGISTRY, info, DeviceProfile("test")), Renderer(info))


@frozen
class Layout:
    launches: tuple[Launch, ...]
    inputs: tuple[int, ...]  # offsets
    outputs: tuple[int, ...]
    nbytes: int


def lay_out(trial: Trial, lowering: Lowering) -> Layout:
    """Launches over offsets in one arena with guards between all operands."""
    case, at = trial.case, GUARD
    outs = case.op.infer(case.types)
    offsets = []
    for i, type in enumerate((*case.types, *outs)):
        offsets.append(at)
        nbytes = _device_bytes(case.arrays[i]).nbytes if i < len(case.types) else 0
        at += -(-max(type.nbytes(trial.env), nbytes) // 256) * 256 + GUARD
    values = [Value(f"a{i}", t, Kind.NODE) for i, t in enumerate((*case.types, *outs))]
    n = len(case.types)
    node = Node(case.op, tuple(values[:n]), tuple(values[n:]), None)
    space = Arena(end=at)
    launches = lowering.launches(
        node,
        (*case.types, *outs),
        trial.env,
        trial.candidate,
        [BufferRef(Place.ARENA, offset=o) for o in offsets],
        space,
    )
    return Layout(tuple(launches), tuple(offsets[:n]), tuple(offsets[n:]), space.end + GUARD)


def _device_bytes(array: NDArray[np.generic] | Packed) -> NDArray[np.uint8]:
    if isinstance(array, Packed):
        return device_layout(array.format)(array.raw.reshape(-1), array.shape)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def check(trial: Trial, lowering: Lowering, run: Run) -> float:
    """Run the trial twice and compare with the op's reference. Returns the worst relative L2 error.

    Raises AssertionError naming what differs: a value, a guard, an input that was written, or the second run.
    """
    case, layout = trial.case, lay_out(trial, lowering)
    op, env = case.op, case.env
    header = np.zeros((), HEADER.numpy)
    header["rows"], header["seqs"], header["logit_rows"] = env.rows, env.seqs, env.logit_rows
    header["flags"], header["step"] = case.header_flags, 1
    start = np.full(layout.nbytes, FILL, np.uint8)
    for offset, array in zip(layout.inputs, case.arrays, strict=True):
        raw = _device_bytes(array)
        start[offset : offset + raw.nbytes] = raw
    arenas = []
    for _ in range(2):
        arena = _aligned(start)
        run(layout.launches, arena, header.reshape(1).view(np.uint8))
        arenas.append(arena)

    arrays = tuple(a if isinstance(a, Packed) else a.copy() for a in case.arrays)
    results = op.reference(arrays)
    expected, allowed = start.copy(), np.zeros(layout.nbytes, bool)
    worst = 0.0
    places = [
        *((layout.inputs[i], arrays[i], f"state {i}") for i in op.mutates),
        *((o, r, f"output {j}") for j, (o, r) in enumerate(zip(layout.outputs, results, strict=True))),
    ]
    for offset, want, what in places:
        assert not isinstance(want, Packed)
        part = slice(offset, offset + want.nbytes)
        got = arenas[0][part].view(want.dtype).reshape(want.shape)
        if isinstance(op, Sample) and want.ndim == 2:  # rows that were not asked are unspecified
            params = np.ascontiguousarray(arrays[1]).view(SAMPLE_PARAMS.numpy).reshape(-1)
            asked = params["flags"] & USE_LOGPROBS != 0
            got, want = got[asked], want[asked]
        worst = max(worst, _compare(trial, got, want, what))
        allowed[part] = True
    for launch in layout.launches:  # a workspace may hold anything
        for ref in launch.args[len(case.types) + len(layout.outputs) :]:
            allowed[ref.offset : layout.nbytes - GUARD] = True
    touched = np.flatnonzero((arenas[0] != expected) & ~allowed)
    assert not len(touched), f"{len(touched)} bytes were written outside of the results, first at {touched[0]}"
    checked = np.concatenate([np.arange(o, o + w.nbytes) for o, w, _ in places if not isinstance(w, Packed)])
    assert (arenas[0][checked] == arenas[1][checked]).all(), "a second run gave other bits"
    return worst


def _compare(trial: Trial, got: NDArray[np.generic], want: NDArray[np.generic], what: str) -> float:
    case, route = trial.case, trial.candidate.route
    if want.dtype.kind in "iu" and want.dtype != np.uint8:
        assert (got == want).all(), f"{what}: {got[got != want][:8]} instead of {want[got != want][:8]}"
        return 0.0
    if want.dtype == np.uint8:  # cache bytes: exact
        wrong = int(np.count_nonzero(got != want))
        assert not wrong, f"{what}: {wrong} bytes differ"
        return 0.0
    difference = got.astype(np.float64) - want.astype(np.float64)
    error = float(np.linalg.norm(difference) / max(float(np.linalg.norm(want)), 1e-30))
    assert np.isfinite(got).all(), f"{what}: values that are not finite"
    if route.rtol is not None:
        assert error <= route.rtol, f"{what}: relative L2 {error:.2e} exceeds {route.rtol:.0e}"
    else:
        np.testing.assert_allclose(got, want, rtol=case.rtol, atol=case.atol, err_msg=what)
    return error


def _aligned(start: NDArray[np.uint8]) -> NDArray[np.uint8]:
    raw = np.empty(len(start) + 256, np.uint8)
    at = -raw.ctypes.data % 256
    raw[at : at + len(start)] = start
    return raw[at : at + len(start)]
