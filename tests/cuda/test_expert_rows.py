"""Experts of whole chunks of a prompt in the simulation: more picks than a tile has, and products of warpgroups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from attrs import evolve

from ninfer.devices.cuda_sim import SimPrograms, sim_info
from ninfer.formats.quant import by_name
from ninfer.ir import casework as cw
from ninfer.ir.op import Case
from ninfer.ir.ops.experts import ExpertGlu, ExpertSum, _picks
from ninfer.ir.types import Env, T
from ninfer.routes.cuda import cuda_routes
from ninfer.routes.route import RouteRegistry
from tests.cuda.parity import Trial, check, lowering_for
from tests.cuda.sim import SimRun

SIM = sim_info()
INFO = evolve(SIM, features=SIM.features | {"sm90a"})
LOWERING = lowering_for(INFO)
CHUNK = 1024  # rows that the plan has room for


def _cases() -> Iterator[Case]:
    """Some 110 picks of each expert, and 150, by three of six experts that a row picks."""
    for n_rows, name in ((220, "q4_g64"), (300, "q8_g32"), (300, "bf16"), (220, "q4_1"), (220, "iq3_s")):
        fmt, env = by_name(name), Env(rows=n_rows, logit_rows=1, seqs=1)
        ids, places = _picks(n_rows, top_k=3, seed=1)
        k = 256 if name == "iq3_s" else 128
        (xt, x), (ht, h) = cw.rows(T, n_rows, k, seed=3), cw.rows(T, n_rows, 3 * k, seed=4)
        (wt, w), (gt, gate_up), (dt, down) = (
            cw.rows(T, n_rows, 3, seed=5), cw.matrix(fmt, 6 * 64, k, seed=6), cw.matrix(fmt, 6 * 80, k, seed=7)
        )  # fmt: skip
        (it, i), (pt, p) = ids, places
        yield Case(ExpertGlu(3, 32), f"{name}-r{n_rows}", (xt, it, pt, gt), (x, i, p, gate_up), env)
        yield Case(ExpertSum(3, 80), f"{name}-r{n_rows}", (ht, it, wt, pt, dt), (h, i, w, p, down), env)


def _trials() -> Iterator[Trial]:
    registry, env = RouteRegistry(cuda_routes(INFO.units)), Env(rows=CHUNK, logit_rows=1, seqs=1)
    for case in _cases():
        for candidate in registry.candidates(case.op, case.types, env, INFO):
            if not candidate.route.name.endswith(".each"):
                yield Trial(case, candidate, env)


TRIALS = list(_trials())


@pytest.mark.parametrize("trial", TRIALS, ids=lambda t: t.id)
def test_a_route_of_many_rows_computes_its_op(trial: Trial, sim_programs: SimPrograms) -> None:
    check(trial, LOWERING, SimRun(sim_programs))


def test_products_of_warpgroups_are_among_them() -> None:
    assert {t.candidate.tuning["wgmma"] for t in TRIALS} == {0, 1}
