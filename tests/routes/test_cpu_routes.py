"""Every op case by every host route that accepts it, for this CPU and for a portable one, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.devices.base import DeviceInfo
from ninfer.devices.cpu import CpuDevice, cpu_info
from ninfer.devices.plan import BufferRef, Place, Plan
from ninfer.devices.programs import ProgramCache, find_compiler
from ninfer.formats.quant import Packed
from ninfer.ir.graph import Kind, Node, Value
from ninfer.ir.op import Case
from ninfer.ir.ops import OPS
from ninfer.ir.ops.sample import Sample
from ninfer.ir.types import Array, Sym, TensorType
from ninfer.routes.lower import Arena, Lowering
from ninfer.routes.profile import DeviceProfile
from ninfer.routes.render import Renderer
from ninfer.routes.route import Candidate
from ninfer.routes.select import Selector
from ninfer.routes.tables import REGISTRY

CANARY = 0xA5
GUARD = 256

CASES = [c for op in OPS.ops for c in op.cases()]


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[Case]:
    only = request.config.getoption("--op")
    found = [c for c in CASES if not only or c.op.key == only]
    assert found, f"no op is called {only}"
    return found


def info_of(isa: str) -> DeviceInfo:
    return cpu_info(portable=isa == "portable")


@pytest.fixture(scope="module", params=["native", "portable"])
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuDevice:
    compiler = find_compiler()
    assert compiler is not None, "these tests need a C++ compiler"
    info = info_of(request.param)
    portable = request.param == "portable"
    directory = tmp_path_factory.mktemp("programs")
    # The portable text is what is tested, and compiles in half the time without the late passes.
    cache = ProgramCache(compiler, directory, info.arch, portable=portable, extra=("-O1",) if portable else ())
    return CpuDevice(info, cache, threads=2)


def node_of(case: Case) -> Node:
    args = tuple(Value(f"x{i}", t, Kind.NODE) for i, t in enumerate(case.types))
    outs = tuple(Value(f"y{i}", t, Kind.NODE) for i, t in enumerate(case.op.infer(case.types)))
    return Node(case.op, args, outs, None)


def lowering_of(device: CpuDevice) -> Lowering:
    profile = DeviceProfile(device.info.hardware_class)
    return Lowering(Selector(REGISTRY, device.info, profile), Renderer(device.info))


def candidates(device: CpuDevice, case: Case) -> tuple[Candidate, ...]:
    """All routes. All their tunings too for this CPU and the formats of the models at hand, else the first."""
    found = REGISTRY.candidates(case.op, case.types, case.env, device.info)
    names = {t.fmt.name for t in case.types if t.fmt is not None}
    if device.info.features and names <= {"q4_1", "q8_0", "q4_g64"}:
        return found
    return tuple({c.route.name: c for c in reversed(found)}.values())


def build(lowering: Lowering, case: Case, candidate: Candidate) -> tuple[Plan, list[tuple[int, int]]]:
    """The case as a plan; where each operand lies in the arena, with guard bytes around it."""
    node, arena = node_of(case), Arena()
    spots: list[tuple[int, int]] = []
    for value in (*node.args, *node.outs):
        offset, _ = arena.take(value.type.nbytes(case.env) + 2 * GUARD)
        spots.append((offset + GUARD, value.type.nbytes(case.env)))
    args = [BufferRef(Place.ARENA, offset=o) for o, _ in spots]
    types = tuple(v.type for v in (*node.args, *node.outs))
    launches = lowering.launches(node, types, case.env, candidate, args, arena)
    return Plan(case.env, tuple(launches), arena.end, arena.total, {}), spots


def run(device: CpuDevice, case: Case, plan: Plan, spots: list[tuple[int, int]], entries: dict[str, int]) -> list[Any]:
    """Operands after the launch, as arrays; asserts that nothing outside of them was touched."""
    memory = device.memory({}, {}, case.env, plan.arena_bytes)
    executable = device.bind(plan, memory, {}, entries)
    executable.header["rows"], executable.header["seqs"] = case.env.rows, case.env.seqs
    executable.header["logit_rows"], executable.header["flags"] = case.env.logit_rows, case.header_flags
    workspace_from = max(o + n + GUARD for o, n in spots)
    memory.arena[:workspace_from] = CANARY
    for (offset, nbytes), array in zip(spots, case.arrays, strict=False):
        memory.arena[offset : offset + nbytes] = bytes_of(array)
    executable.launch()
    outside = np.ones(workspace_from, bool)
    for offset, nbytes in spots:
        outside[offset : offset + nbytes] = False
    assert (memory.arena[:workspace_from][outside] == CANARY).all(), "a kernel wrote outside of its operands"
    return [memory.arena[o : o + n].copy() for o, n in spots]


def bytes_of(array: Array) -> NDArray[np.uint8]:
    if isinstance(array, Packed):
        return array.raw.reshape(-1)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def view(raw: NDArray[np.uint8], type: TensorType, case: Case) -> NDArray[Any]:
    return raw.view(type.dtype.numpy).reshape(type.concrete(case.env))


def test_every_route_agrees_with_the_reference(device: CpuDevice, cases: list[Case]) -> None:
    lowering = lowering_of(device)
    work = [(c, k, *build(lowering, c, k)) for c in cases for k in candidates(device, c)]
    assert work, "no route accepts a case"
    entries = device.compile([plan for _, _, plan, _ in work])
    failures = []
    for case, candidate, plan, spots in work:
        try:
            check(device, case, candidate, plan, spots, entries)
        except AssertionError as error:
            failures.append(f"{case.op.key} {case.name} by {candidate.id}: {str(error).strip()[:300]}")
    assert not failures, f"{len(failures)} of {len(work)}:\n" + "\n".join(failures)


def check(
    device: CpuDevice,
    case: Case,
    candidate: Candidate,
    plan: Plan,
    spots: list[tuple[int, int]],
    entries: dict[str, int],
) -> None:
    after = run(device, case, plan, spots, entries)
    arrays = tuple(a if isinstance(a, Packed) else np.array(a) for a in case.arrays)
    expected = case.op.reference(arrays)
    out_types = case.op.infer(case.types)
    rtol, atol = case.rtol, case.atol
    for i, (array, raw) in enumerate(zip(arrays, after, strict=False)):
        if i in case.op.mutates and not isinstance(array, Packed):
            got = view(raw, case.types[i], case)
            np.testing.assert_allclose(got, array, rtol=rtol, atol=atol, err_msg=f"state {i}")
        else:
            np.testing.assert_array_equal(raw, bytes_of(case.arrays[i]), err_msg=f"input {i} was changed")
    for i, (want, type) in enumerate(zip(expected, out_types, strict=True)):
        got = view(after[len(case.arrays) + i], type, case)
        assert not isinstance(want, Packed)
        if isinstance(case.op, Sample) and i > 0:  # log-probabilities are given where they were asked for
            from ninfer.ir.step import SAMPLE_PARAMS, USE_LOGPROBS

            params = np.ascontiguousarray(case.arrays[1]).view(SAMPLE_PARAMS.numpy).reshape(-1)
            asked = (params["flags"] & USE_LOGPROBS) != 0
            got, want = got[asked], want[asked]
        if candidate.route.rtol is not None:  # activations are quantised: relative L2, row by row
            scale = np.linalg.norm(want, axis=-1) + 1e-30
            error = np.linalg.norm(got - want, axis=-1) / scale
            assert (error <= candidate.route.rtol).all(), f"output {i} is off by {error.max():.2e}"
        else:
            np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=f"output {i}")


def test_rows_are_the_same_bits_alone_and_together(device: CpuDevice, cases: list[Case]) -> None:
    """For routes that promise it with a numerics tag: ops whose rows do not depend on each other."""
    lowering = lowering_of(device)
    work = []
    for case in cases:
        if case.env.rows == 1 or any(Sym.B in t.shape or Sym.L in t.shape for t in case.types):
            continue
        for candidate in candidates(device, case):
            if candidate.route.numerics:
                work.append((case, candidate, *build(lowering, case, candidate), one_row(case)))
    singles = [build(lowering, single, candidate) for _, candidate, _, _, single in work]
    entries = device.compile([w[2] for w in work] + [plan for plan, _ in singles])
    for (case, candidate, plan, spots, single), (one_plan, one_spots) in zip(work, singles, strict=True):
        together = run(device, case, plan, spots, entries)[len(case.arrays) :]
        alone = run(device, single, one_plan, one_spots, entries)[len(case.arrays) :]
        for a, b, t in zip(together, alone, case.op.infer(case.types), strict=True):
            last = view(a, t, case)[-1:]
            np.testing.assert_array_equal(last, view(b, t, single), err_msg=f"{case.op.key} {case.name} {candidate.id}")


def one_row(case: Case) -> Case:
    """The case with its last row alone."""
    from attrs import evolve

    arrays = tuple(
        a[-1:].copy() if t.shape and t.shape[0] is Sym.T and not isinstance(a, Packed) else a
        for t, a in zip(case.types, case.arrays, strict=True)
    )
    return evolve(case, arrays=arrays, env=evolve(case.env, rows=1))


def test_fewer_rows_than_a_plan_has_room_for_leave_the_rest_untouched(device: CpuDevice, cases: list[Case]) -> None:
    from attrs import evolve

    lowering = lowering_of(device)
    small = [c for c in cases if c.env.rows in (3, 5, 9)]
    work = []
    for case in small:
        for candidate in candidates(device, case):
            roomy = evolve(case, env=evolve(case.env, rows=case.env.rows + 7))
            work.append((case, roomy, *build(lowering, roomy, candidate)))
    entries = device.compile([w[2] for w in work])
    for case, _roomy, plan, spots in work:
        memory = device.memory({}, {}, plan.env, plan.arena_bytes)
        executable = device.bind(plan, memory, {}, entries)
        header = executable.header
        header["rows"], header["seqs"] = case.env.rows, case.env.seqs
        header["logit_rows"], header["flags"] = case.env.logit_rows, case.header_flags
        end = max(o + n + GUARD for o, n in spots)
        memory.arena[:end] = CANARY
        for (offset, _), array in zip(spots, case.arrays, strict=False):
            raw = bytes_of(array)
            memory.arena[offset : offset + raw.size] = raw
        executable.launch()
        for (offset, nbytes), t in zip(spots[len(case.arrays) :], case.op.infer(case.types), strict=True):
            if t.shape[0] is Sym.T:
                used = t.nbytes(case.env)
                rest = memory.arena[offset + used : offset + nbytes]
                assert (rest == CANARY).all(), f"{case.op.key} {case.name}: rows beyond the step were written"
