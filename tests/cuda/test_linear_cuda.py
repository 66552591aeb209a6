"""Products on a GPU: formats through every kind of route, simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from numpy.typing import NDArray

from ninfer.devices.cuda_sim import SimPrograms, sim_source
from ninfer.formats.quant import by_name
from ninfer.ir import casework as cw
from ninfer.ir.op import Case, Op
from ninfer.ir.ops.linear import Linear, LinearAdd, LinearSwiglu
from ninfer.ir.ops.packed_act import FusedLinear, QuantizeRows, RmsNormQuant, dequantize, packed_types, quantize
from ninfer.ir.types import Env, T, f32_array, plain
from ninfer.routes import linear_cuda
from ninfer.routes.route import Candidate
from tests.cuda.products import INFO, REGISTRY, Trial, error_of, run, sources

pytestmark = pytest.mark.slow  # some minutes: python -m pytest -m slow

NAMES = ("f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k", "q4_g64", "q5_g64", "q6_g64", "q8_g32",
         "t2_g128")  # fmt: skip


def cases() -> Iterator[Case]:
    for name in NAMES:
        fmt, k = by_name(name), 512
        for rows in (1, 3, 8, 40):
            (xt, x), env = cw.rows(T, rows, k, seed=rows), Env(rows=rows, logit_rows=1, seqs=1)
            (gt, gate), (ut, up) = cw.matrix(fmt, 96, k, seed=6), cw.matrix(fmt, 96, k, seed=7)
            rt, r = cw.rows(T, rows, 96, seed=8)
            yield Case(Linear(), f"{name}-r{rows}", (xt, gt), (x, gate), env)
            if rows in (3, 40):
                yield Case(LinearAdd(), f"{name}-add-r{rows}", (xt, gt, rt), (x, gate, r), env)
                yield Case(LinearSwiglu(), f"{name}-swiglu-r{rows}", (xt, gt, ut), (x, gate, up), env)
    mixed = [cw.matrix(by_name(n), rows, 256, seed=i) for i, (n, rows) in enumerate(
        (("q4_g64", 36), ("bf16", 20), ("q5_g64", 64), ("q4_g64", 16), ("f32", 8)))]  # fmt: skip
    for rows in (1, 5, 40):
        xt, x = cw.rows(T, rows, 256, seed=rows)
        types, arrays = zip((xt, x), *mixed, strict=True)
        yield Case(Linear(), f"mixed-r{rows}", types, arrays, Env(rows, 1, 1))
    for op in (FusedLinear, QuantizeRows, RmsNormQuant):
        yield from op.cases()
    # wider groups of activations: formats with minima, and the codes of rotated rows
    for group, name in ((64, "q4_1"), (128, "q4_1"), (64, "t2_g128")):
        xt, x = cw.rows(T, 2, 512)
        (wt, w), (codes, d) = cw.matrix(by_name(name), 96, 512), quantize(f32_array(x), group)
        types = (*packed_types(T, 512, group), wt)
        yield Case(FusedLinear(packed=group), f"packed{group}-{name}", types, (codes, d, w), Env(2, 1, 1))


def trials() -> Iterator[Trial]:
    for case in cases():
        room = case.env.rows + (2 if case.env.rows > 1 else 0)  # a plan may have room for more rows than a step has
        for rows in dict.fromkeys((room, 40) if isinstance(case.op, FusedLinear) else (room,)):
            env = evolve(case.env, rows=rows)
            names = set[str]()
            for candidate in REGISTRY.candidates(case.op, case.types, env, INFO):
                first = candidate.route.name not in names
                names.add(candidate.route.name)
                if first or case.name.startswith(("mixed", "q5_g64")):
                    yield Trial(case, candidate, env)


TRIALS = list(trials())


@pytest.fixture(scope="module")
def compiled(sim_programs: SimPrograms) -> dict[str, int]:
    """All kernels at once, so that the compiler runs in parallel."""
    wanted = {s.entry: sim_source(s) for trial in TRIALS for s, _ in sources(trial) if s is not None}
    return sim_programs.addresses(list(wanted.values()))


def decoded(codes: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """What int8 codes and their float32 factors stand for."""
    return dequantize(codes[0].astype(np.int8, copy=False), codes[1].astype(np.float32, copy=False))


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("trial", TRIALS, ids=lambda t: t.id)
def test_a_route_computes_its_product(trial: Trial, order: int, compiled: dict[str, int]) -> None:
    case, route = trial.case, trial.candidate.route
    want = [plain(y) for y in case.op.reference(case.arrays)]
    got = run(trial, want, order, compiled)
    if want[0].dtype == np.int8:  # a value in the middle of two codes may round to either: compare what they stand for
        assert np.abs(got[0].astype(int) - want[0]).max() <= 1 or route.op is FusedLinear
        want, got = [decoded(want)], [decoded(got)]
    for a, b in zip(got, want, strict=True):
        error = float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b))
        limit = route.rtol or 1e-6  # float32 sums of 512 products: some 3e-7
        assert error <= limit, f"relative L2 {error:.1e} exceeds {limit:.0e}"
    if isinstance(case.op, FusedLinear) and case.op.packed and not case.op.quant and case.env.rows <= 8:
        rounds = "bf16" in case.name or ".mma" in route.name or trial.env.rows > 8  # operands to bf16
        assert rounds or error_of(got[:1], want[:1]) < 1e-6


def test_exact_rows_do_not_depend_on_the_width(compiled: dict[str, int], sim_programs: SimPrograms) -> None:
    x, w = cw.rows(T, 11, 512, seed=3), cw.matrix(by_name("q4_k"), 40, 512)
    route = next(r for r in REGISTRY.routes if r.name == "linear.exact")
    rows = []
    for n in (1, 3, 11):
        env = Env(rows=n, logit_rows=1, seqs=1)
        case = Case(Linear(), "", (x[0], w[0]), (f32_array(x[1])[:n], w[1]), env)
        trial = Trial(case, Candidate(route, route.tunings[0]), env)
        more = sim_programs.addresses([sim_source(s) for s, _ in sources(trial) if s is not None])
        rows.append(run(trial, [plain(y) for y in case.op.reference(case.arrays)], 0, more)[0])
    assert (rows[0] == rows[2][:1]).all() and (rows[1] == rows[2][:3]).all()


def test_blocks_are_shared_out_by_bytes() -> None:
    op: Op = Linear()
    types = (cw.rows(T, 1, 512)[0], *(cw.matrix(by_name(n), r, 512)[0] for n, r in (("q4_g64", 640), ("bf16", 96))))
    context = linear_cuda.stream(op, types, Env(1, 1, 1), {"warps": 4, "stages": 2, "blocks": 20})
    q4, bf16 = context["bodies"]
    assert q4.blocks + bf16.blocks == context["blocks"] and bf16.last_block == context["blocks"]
    assert q4.blocks == round(20 * q4.nbytes / (q4.nbytes + bf16.nbytes))


def test_a_row_count_that_does_not_fit_is_refused_with_the_bytes() -> None:
    types = (cw.rows(T, 1, 17408)[0], cw.matrix(by_name("q4_g64"), 16, 17408)[0])
    reasons = REGISTRY.explain(Linear(), types, Env(8, 1, 1), INFO)
    assert "rows need" in reasons and "bytes of shared memory" in reasons
