"""Products whose blocks each own a part of K: activations of that part alone, sums through memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from attrs import evolve

from ninfer.devices.cuda_sim import SimPrograms, sim_source
from ninfer.formats.quant import by_name
from ninfer.ir import casework as cw
from ninfer.ir.op import Case
from ninfer.ir.ops.packed_act import FusedLinear, packed_types, quantize
from ninfer.ir.types import Env, T, f32_array, plain
from ninfer.routes import linear_cuda
from ninfer.routes.route import Candidate, Tuning
from tests.cuda.products import REGISTRY, Trial, error_of, run, sources

K, N, GROUP = 8 * 256, 96, 32  # eight chunks of K, three units of outputs
CUT: Tuning = {"warps": 3, "stages": 2, "bulk": 0, "split": 8, "apart": 1, "late": 0}


def cases() -> Iterator[Case]:
    for name, rows in (("q5_g64", 1), ("iq3_s", 2), ("q4_g64", 4), ("q5_g64", 8), ("q4_k", 3), ("q5_g64", 16)):
        fmt = by_name(name)
        (_, x), (rt, r), (nt, n) = cw.rows(T, rows, K, seed=rows), cw.rows(T, rows, N, seed=6), cw.vector(N, seed=7)
        big, other = cw.matrix(fmt, N, K, seed=3), cw.matrix(fmt, N, K, seed=4)
        codes, d = quantize(f32_array(x), GROUP)
        packed = packed_types(T, K, GROUP)
        squares = np.square(f32_array(x)).reshape(rows, -1, GROUP).sum(axis=2)
        env = Env(rows=rows, logit_rows=1, seqs=1)
        weigh = FusedLinear(packed=GROUP, epilogue="add", offset=1.0, weigh=GROUP)
        yield Case(weigh, f"weigh-{name}-r{rows}", (*packed, big[0], rt, nt), (codes, d, big[1], r, n), env)
        glu = FusedLinear(norm=True, packed=GROUP, eps=1e-5, epilogue="swiglu", quant=GROUP)
        arrays = (codes, d, squares, big[1], other[1])
        yield Case(glu, f"glu-{name}-r{rows}", (*packed, packed[1], big[0], other[0]), arrays, env)
        # rows of a plain matrix beside it are dealt out to all blocks: each wants all columns of the activations
        gates, late = cw.matrix(by_name("bf16"), 20, K, seed=5), FusedLinear(norm=True, packed=GROUP, eps=1e-5)
        arrays = (codes, d, squares, big[1], gates[1])
        yield Case(late, f"gates-{name}-r{rows}", (*packed, packed[1], big[0], gates[0]), arrays, env)


def trials() -> Iterator[Trial]:
    for case in cases():
        rows = case.env.rows
        high = next(h for low, h in linear_cuda.WIDTHS if low <= rows <= h)
        route, bulk = (
            next(r for r in REGISTRY.routes if r.name == f"fused_linear.{kind}.{high}") for kind in ("stream", "bulk")
        )
        units = 3 if case.name.startswith("weigh") else 6
        if rows > 8:  # more than an accumulator has columns, so that parts of K are not kept apart
            for blocks in (3 * units + 1, 2 * units):
                tuning = {**CUT, "blocks": blocks, "bulk": 1, "apart": 0}
                yield Trial(case, Candidate(bulk, tuning), evolve(case.env, rows=high))
            continue
        # all units cut, in parts that do not divide the warps' chunks, with blocks to spare; and some cut, others whole
        for blocks in (3 * units + 1, 2 * units, units - 1):
            for more in ({}, {"apart": 0, "early": 1}) if blocks == 2 * units else ({"early": 1},):
                tuning = {**CUT, "blocks": blocks, **more}
                yield Trial(case, Candidate(route, tuning), evolve(case.env, rows=high))
            # codes copied as they lie; two tiles at a time, of which the last block's may be one
            for more in ({"copied": 1, "early": blocks % 2}, {"tall": 2, "span": 2}, {"copied": 1, "tall": 2}):
                tuning = {**CUT, "blocks": blocks, "bulk": 1, **more}
                yield Trial(case, Candidate(bulk, tuning), evolve(case.env, rows=high))
        # units of several groups, of which the last has fewer; sums of cuts beside whole units handed over by all warps
        for more in (
            {"groups": 2, "blocks": 2 * units},
            {"blocks": units - 1, "together": 1},
            {"groups": 2, "blocks": 1},
            {"groups": 2, "blocks": units // 2 - (units == 3), "split": 8},
        ):
            yield Trial(case, Candidate(route, {**CUT, **more}), evolve(case.env, rows=high))


TRIALS = list(trials())


@pytest.mark.parametrize("order", [0, 1])
def test_blocks_of_parts_of_k_add_up(sim_programs: SimPrograms, order: int) -> None:
    wanted = {s.entry: sim_source(s) for t in TRIALS for s, _ in sources(t) if s is not None}
    compiled = sim_programs.addresses(list(wanted.values()))
    for trial in TRIALS:
        want = [plain(y) for y in trial.case.op.reference(trial.case.arrays)]
        got = run(trial, want, order, compiled)
        rtol = trial.candidate.route.rtol
        assert rtol is not None
        assert error_of(got, want) <= rtol, trial.id


def test_activations_of_a_part_take_less_memory() -> None:
    trial = next(t for t in TRIALS if t.case.name == "weigh-q5_g64-r8" and t.candidate.tuning["blocks"] == 10)
    types = (*trial.case.types, *trial.case.op.infer(trial.case.types))
    context = [
        linear_cuda.stream(trial.case.op, types, trial.env, {**trial.candidate.tuning, "blocks": blocks})
        for blocks in (10, 3)
    ]
    (cut,), (whole,) = (c["bodies"] for c in context)
    assert cut.parts == 3 and cut.compact == 1 and cut.blocks == 10 and whole.parts == 1 and not whole.compact
    assert context[0]["x_stride"] * 2 < context[1]["x_stride"]
