"""Every weight format on a GPU: its layout keeps every value, every op has a route, and the routes are right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.devices.base import DeviceInfo
from ninfer.devices.cuda import features_of
from ninfer.devices.cuda_sim import SimPrograms, sim_info, sim_source
from ninfer.devices.nvrtc import ARCHITECTURES, compile_cubin, nvrtc_missing
from ninfer.formats.dtypes import I32
from ninfer.formats.quant import FLOATS, FORMATS, QuantFormat, by_name, nvfp4
from ninfer.ir import casework as cw
from ninfer.ir.op import Case, Op
from ninfer.ir.ops.embed import Embed
from ninfer.ir.ops.experts import ExpertGlu, ExpertSum
from ninfer.ir.ops.linear import Linear, LinearAdd, LinearSwiglu
from ninfer.ir.types import Env, T, TensorType, Types, plain
from ninfer.routes import fp4_cuda
from ninfer.routes.cuda import cuda_routes
from ninfer.routes.cuda_layout import layout_of
from ninfer.routes.route import RouteRegistry
from tests.cuda.parity import Trial as AnyTrial
from tests.cuda.parity import check, lay_out, lowering_for
from tests.cuda.products import INFO, REGISTRY, Trial, error_of, run, sources
from tests.cuda.sim import SimRun

TILED = [f for f in (*FORMATS, *FLOATS, nvfp4(2)) if not f.is_plain]
K = 512
# Bytes on the device over bytes in the file, where it is more than 1.03: what is written out is in cuda_layout.py.
MORE = {"iq1_s": 1.08, "iq1_m": 1.04, "iq2_xxs": 1.07, "iq2_xs": 1.06, "iq3_xxs": 1.05, "tq1_0": 1.23, "q3_k": 1.04}


def height(fmt: QuantFormat) -> int:
    return max(40, fmt.least_rows(1))


@pytest.mark.parametrize("fmt", TILED, ids=str)
def test_the_layout_keeps_every_value(fmt: QuantFormat) -> None:
    for n, k in ((50, 512), (16, 256), (7, 768), (33, 576), (5, 288)):
        n = -(-n // fmt.least_rows(1)) * fmt.least_rows(1)
        if not fmt.split and k % fmt.block:
            continue
        packed_type, packed = cw.matrix(fmt, n, k, seed=k)
        layout = layout_of(fmt)
        assert packed_type.fmt is fmt and not isinstance(packed, np.ndarray)
        moved = layout.repack(packed.raw, (n, k))
        assert moved.nbytes == layout.nbytes((n, k))
        assert np.array_equal(layout.unpack(moved, (n, k)), fmt.unpack(packed.raw, (n, k)))


@pytest.mark.parametrize("fmt", TILED, ids=str)
def test_the_layout_takes_hardly_more_bytes_than_the_file(fmt: QuantFormat) -> None:
    shape = (1024, 4096)
    assert layout_of(fmt).nbytes(shape) <= fmt.nbytes(shape) * MORE.get(fmt.name, 1.03)


def signatures(fmt: QuantFormat) -> Iterator[tuple[Op, Types]]:
    w, x, y = TensorType((512, K), fmt=fmt), TensorType((T, K)), TensorType((T, 512))
    ids, places = TensorType((T, 2), I32), TensorType((8,), I32)
    yield Linear(), (x, w)
    yield LinearAdd(), (x, w, y)
    yield LinearSwiglu(), (x, w, w)
    yield Embed(), (TensorType((T,), I32), w)
    yield ExpertGlu(2, 64), (x, ids, places, TensorType((8 * 128, K), fmt=fmt))
    down = TensorType((8 * 512, 256), fmt=fmt)
    yield ExpertSum(2, 512), (TensorType((T, 512)), ids, TensorType((T, 2)), places, down)


@pytest.mark.parametrize("fmt", TILED, ids=str)
def test_every_op_reads_every_format_at_every_width(fmt: QuantFormat) -> None:
    """On the oldest and the newest of the cards; products by a kernel that is meant to be fast."""
    for arch in (ARCHITECTURES[0], ARCHITECTURES[-1]):
        info = DeviceInfo("cuda", arch, arch, features_of(arch), arch, 100, 1 << 34)
        registry = RouteRegistry(cuda_routes(info.units))
        for op, types in signatures(fmt):
            for width in (1, 2, 3, 8, 16, 32, 33, 512):
                found = registry.candidates(op, types, Env(width, 1, 1), info)
                assert found, registry.explain(op, types, Env(width, 1, 1), info)
                assert "exact" not in found[0].id


def product_trials(widths: Sequence[int], *, every: bool) -> Iterator[Trial]:
    """A route for a few rows and one for many of each format, or all of them."""
    for fmt in TILED:
        for rows in widths:
            env, (xt, x) = Env(rows, 1, 1), cw.rows(T, rows, K, seed=rows)
            wt, w = cw.matrix(fmt, height(fmt), K)
            case = Case(Linear(), f"{fmt.name}-r{rows}", (xt, wt), (x, w), env)
            found = REGISTRY.candidates(case.op, case.types, env, INFO)
            names = ("linear.stream", "linear.mma", "linear.grid", "linear.lookup", "linear.float8")
            last = {c.route.name: c for c in found if c.route.name.startswith(names)}  # many copies, sixteen columns
            first = {c.route.name: c for c in reversed(found)}
            for candidate in (*first.values(), *(c for c in found if "grid" in c.tuning)) if every else last.values():
                yield Trial(case, candidate, env)


def check_products(trials: Sequence[Trial], sim: SimPrograms) -> None:
    wanted = {s.entry: sim_source(s) for t in trials for s, _ in sources(t) if s is not None}
    compiled = sim.addresses(list(wanted.values()))
    for trial in trials:
        want = [plain(y) for y in trial.case.op.reference(trial.case.arrays)]
        error = error_of(run(trial, want, 0, compiled), want)
        limit = trial.candidate.route.rtol or 1e-6  # float32 sums of 512 products: some 3e-7
        assert error <= limit, f"{trial.id}: relative L2 {error:.1e} exceeds {limit:.0e}"


def test_every_format_is_multiplied_by_the_routes_for_few_rows_and_for_many(sim_programs: SimPrograms) -> None:
    trials = list(product_trials([3], every=False))
    names = {(t.case.name, t.candidate.route.name) for t in trials}
    wanted = {(f.name, r) for f in TILED for r in ("linear.stream.4", "linear.mma-direct")}
    wanted |= {(f.name, r) for f in TILED if f.is_grid for r in ("linear.grid.4", "linear.lookup.4")}
    wanted |= {(f"fp8_e4m3fn_row_{scale}", "linear.float8.4") for scale in ("bf16", "fp16")}
    assert names == {(f"{f}-r3", r) for f, r in wanted}
    check_products(trials, sim_programs)


def test_scales_of_a_single_part_are_read_where_they_lie(sim_programs: SimPrograms) -> None:
    """Tiles of one slice, whose part of K has one scale for one row: an odd tile's is no pair's beginning."""
    trials = []
    for name in ("fp8_e4m3fn_row_bf16", "q4_g64"):
        (xt, x), (wt, w) = cw.rows(T, 1, 5 * 64), cw.matrix(by_name(name), 48, 5 * 64)
        case = Case(Linear(), name, (xt, wt), (x, w), Env(1, 1, 1))
        found = REGISTRY.candidates(case.op, case.types, case.env, INFO)
        trials.append(Trial(case, next(c for c in found if c.tuning.get("apart")), case.env))
    check_products(trials, sim_programs)


@pytest.mark.slow
def test_every_format_is_multiplied_by_every_route(sim_programs: SimPrograms) -> None:
    check_products(list(product_trials([1, 9, 40], every=True)), sim_programs)


def embed_cases() -> Iterator[Case]:
    for fmt in TILED:
        (tt, t), (wt, w) = cw.ints(T, [0, 39, 7]), cw.matrix(fmt, height(fmt), K)
        yield Case(Embed(), fmt.name, (tt, wt), (t, w), Env(3, 1, 1), rtol=1e-6, atol=1e-7)


def expert_cases(formats: Sequence[QuantFormat], widths: Sequence[int]) -> Iterator[Case]:
    for fmt in formats:
        for rows in widths:
            env, ids = Env(rows, 1, 1), np.stack([np.arange(2, dtype=np.int32) + i % 3 for i in range(rows)])
            picks, places = (TensorType((T, 2), I32), ids), (TensorType((4,), I32), np.array([2, 0, 3, 1], np.int32))
            x, gates = cw.rows(T, rows, 256, seed=rows), cw.matrix(fmt, 4 * 128, 256)
            h, weights, down = cw.rows(T, rows, 2 * 256), cw.rows(T, rows, 2), cw.matrix(fmt, 4 * 128, 256)
            for op, operands in (
                (ExpertGlu(2, 64), (x, picks, places, gates)),
                (ExpertSum(2, 128), (h, picks, weights, places, down)),
            ):
                types, arrays = zip(*operands, strict=True)
                # sums of 512 float32 products in another order, then a product of two of them
                yield Case(op, f"{fmt.name}-r{rows}", types, arrays, env, rtol=1e-4, atol=1e-4)


def check_cases(cases: Iterator[Case], sim: SimPrograms) -> None:
    lowering, run_launches = lowering_for(sim_info()), SimRun(sim)
    registry = RouteRegistry(cuda_routes(sim_info().units))
    trials = [AnyTrial(c, registry.candidates(c.op, c.types, c.env, sim_info())[0], c.env) for c in cases]
    launches = [x for t in trials for x in lay_out(t, lowering).launches]
    sim.addresses([sim_source(s) for s in {x.source.entry: x.source for x in launches if x.source}.values()])
    for trial in trials:
        check(trial, lowering, run_launches)


def test_embeddings_and_experts_read_the_formats(sim_programs: SimPrograms) -> None:
    check_cases(embed_cases(), sim_programs)
    check_cases(expert_cases([by_name(n) for n in ("iq3_s", "fp8_e4m3fn_row_bf16")], [2]), sim_programs)
    check_cases(expert_cases([by_name(n) for n in ("iq1_m", "nvfp4")], [20]), sim_programs)


@pytest.mark.slow
def test_experts_read_every_format(sim_programs: SimPrograms) -> None:
    check_cases(expert_cases([f for f in TILED if f is not nvfp4(2)], [2, 20]), sim_programs)


FP4 = DeviceInfo("cuda", "fp4", "fp4", features_of("sm_120a"), "sm_120a", 100, 1 << 34)


def as_fp4(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each row in NVFP4 with a divisor of its own."""
    fmt, out = by_name("nvfp4"), np.empty_like(x)
    for i, row in enumerate(x):
        rows = row[None].repeat(128, axis=0)
        out[i] = fmt.unpack(fmt.pack(rows), rows.shape)[0]
    return out


def fp4_trials() -> Iterator[Trial]:
    registry, env, fmt = RouteRegistry(fp4_cuda.ROUTES), Env(40, 1, 1), by_name("nvfp4")
    for k in (512, 320):
        (xt, x), (gt, gate), (ut, up) = (
            cw.rows(T, 40, k, seed=3),
            cw.matrix(fmt, 128, k),
            cw.matrix(fmt, 128, k, seed=9),
        )
        rt, r = cw.rows(T, 40, 128, seed=8)
        for op, types, arrays in (
            (Linear(), (xt, gt), (x, gate)),
            (Linear(), (xt, gt, ut), (x, gate, up)),
            (LinearAdd(), (xt, gt, rt), (x, gate, r)),
            (LinearSwiglu(), (xt, gt, ut), (x, gate, up)),
        ):
            for candidate in registry.candidates(op, types, env, FP4) if k == 512 else ():
                yield Trial(Case(op, f"k{k}", types, arrays, env), candidate, env)
            if k != 512:
                yield Trial(Case(op, f"k{k}", types, arrays, env), registry.candidates(op, types, env, FP4)[-1], env)


def test_four_bit_activations_are_multiplied_as_they_are_quantised(sim_programs: SimPrograms) -> None:
    """Against products of activations that numpy has quantised: the cost of four bits is not in the tolerance."""
    trials = list(fp4_trials())
    compiled = sim_programs.addresses(
        list({s.entry: sim_source(s) for t in trials for s, _ in sources(t) if s is not None}.values())
    )
    for trial in trials:
        x, *others = trial.case.arrays
        assert isinstance(x, np.ndarray)
        want = [plain(y) for y in trial.case.op.reference((as_fp4(x.astype(np.float32)), *others))]
        error = error_of(run(trial, want, 0, compiled), want)
        assert error < 6e-3, f"{trial.id}: {error:.1e}"  # bf16 sums, twice through SwiGLU


@pytest.mark.skipif(nvrtc_missing() is not None, reason=nvrtc_missing() or "")
def test_four_bit_products_compile_for_their_card() -> None:
    trial = next(fp4_trials())
    for source, _ in sources(trial):
        assert source is not None
        assert compile_cubin(source, "sm_120a")[1].spill_bytes == 0


def test_four_bit_activations_are_taken_only_where_they_were_asked_for() -> None:
    case = next(fp4_trials()).case
    for opted in ((), (fp4_cuda.PREFILL_4BIT,)):
        registry = RouteRegistry(cuda_routes(FP4.units, opted=opted))
        found = registry.candidates(case.op, case.types, case.env, FP4)
        assert found and ("fp4" in found[0].id) == bool(opted)
        decode = registry.candidates(case.op, case.types, Env(8, 1, 1), FP4)
        assert decode and not any("fp4" in c.id for c in decode)
