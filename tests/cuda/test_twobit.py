"""Products of a few rows with two-bit weights, in the simulation: rotated rows, and codes in groups of 128."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ninfer.devices.base import DeviceInfo
from ninfer.devices.cuda_sim import SIM_FEATURES, SimPrograms
from ninfer.formats.quant import by_name
from ninfer.ir import casework as cw
from ninfer.ir.op import Case
from ninfer.ir.ops.packed_act import FusedLinear, packed_types, quantize
from ninfer.ir.ops.rotated_linear import RotatedLinear
from ninfer.ir.types import Env, T, f32_array
from ninfer.routes.route import Candidate, RouteRegistry
from ninfer.routes.twobit_cuda import routes
from tests.cuda.parity import Trial, check, lowering_for
from tests.cuda.sim import SimRun

INFO = DeviceInfo("cuda", "simulated", "simulated", SIM_FEATURES | {"sm90a"}, "sim", 5, 1 << 34)
REGISTRY = RouteRegistry(routes(INFO.units))


def packed_cases() -> Iterator[Case]:
    """Rows of 1, 4 and 11 tiles for five blocks, one and several groups of columns for a warp."""
    for name, n_rows, n, k in (("t2_g128", 1, 176, 2560), ("t2_g128", 2, 64, 384), ("t2_g128", 4, 96, 1024)):
        fmt, env = by_name(name), Env(rows=n_rows, logit_rows=1, seqs=1)
        (_, x), (wt, w), (rt, r) = cw.rows(T, n_rows, k), cw.matrix(fmt, n, k), cw.rows(T, n_rows, n, seed=6)
        (ut, u), (codes, d) = cw.matrix(fmt, n, k, seed=4), quantize(f32_array(x), 128)
        given = packed_types(T, k, 128)
        yield Case(FusedLinear(packed=128), f"{name}-r{n_rows}", (*given, wt, ut), (codes, d, w, u), env)
        swiglu = FusedLinear(packed=128, epilogue="swiglu")
        yield Case(swiglu, f"{name}-swiglu-r{n_rows}", (*given, wt, ut), (codes, d, w, u), env)
        yield Case(
            FusedLinear(packed=128, epilogue="add"), f"{name}-add-r{n_rows}", (*given, wt, rt), (codes, d, w, r), env
        )


def trials() -> Iterator[Trial]:
    """Of two cases all tunings, also those that leave warps without columns; of others the first. Of a few, warps that
    multiply just the columns that they rotate."""
    for case in (*RotatedLinear.cases(), *packed_cases()):
        for route in dict.fromkeys(c.route for c in REGISTRY.candidates(case.op, case.types, case.env, INFO)):
            several = case.name.startswith(("t2_g128-add-r1", "norm-straight-b1024"))
            for tuning in (t for t in route.tunings if "pieces" not in t or route.fits(case.op, case.types, t)):
                if not several and tuning is not route.tunings[0]:
                    continue
                yield Trial(case, Candidate(route, tuning), case.env)
            if "b1024-r1" in case.name:
                wide = [{"pieces": 1}, {"pieces": 2, "tall": 2, "span": 1}] if "wide" in route.name else []
                for more in wide or [{"split": 4}, {"tall": 2}]:
                    own: dict[str, int] = {**route.tunings[0], "warps": 4, "span": 2, "stages": 3, **more}
                    yield Trial(case, Candidate(route, {**own, "warps": 8, "span": 1}), case.env)
                    yield Trial(case, Candidate(route, own), case.env)


TRIALS = list(trials())


@pytest.mark.parametrize("trial", TRIALS, ids=lambda t: t.id)
def test_a_product_of_two_bits(trial: Trial, sim_programs: SimPrograms) -> None:
    for order in (0, 1):
        error = check(trial, lowering_for(INFO), SimRun(sim_programs, order))
        assert error < 0.015
        if trial.case.op.packed:  # type: ignore[attr-defined]  # the same codes: sums differ by their order
            assert error < 2e-6


def test_other_products_are_refused() -> None:
    case = next(iter(packed_cases()))
    names = [c.route.name for c in REGISTRY.candidates(case.op, case.types, case.env, INFO)]
    assert names[0] == "fused_linear.twobit.1"
    k = 2560
    given, (q4, _) = packed_types(T, k, 128), cw.matrix(by_name("q4_g64"), 96, k)
    assert not REGISTRY.candidates(FusedLinear(packed=128), (*given, q4), case.env, INFO)
    assert not REGISTRY.candidates(FusedLinear(packed=64), (*packed_types(T, k, 64), case.types[2]), case.env, INFO)
    assert not REGISTRY.candidates(case.op, case.types, Env(rows=5, logit_rows=1, seqs=1), INFO)
