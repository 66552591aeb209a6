"""Products of prompts with 8-bit activations, simulated, and who gets them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from ninfer.config import EngineConfig
from ninfer.devices.base import DeviceInfo
from ninfer.devices.cuda import features_of
from ninfer.devices.cuda_sim import SimDevice, SimPrograms, sim_info
from ninfer.devices.nvrtc import ARCHITECTURES, CubinCache, nvrtc_missing
from ninfer.devices.plan import Plan
from ninfer.errors import UsageError
from ninfer.formats.bits import F32Array
from ninfer.formats.quant import Packed, by_name
from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Kind, Node, Value
from ninfer.ir.op import Case
from ninfer.ir.ops.linear import Linear, LinearAdd, LinearSwiglu
from ninfer.ir.ops.packed_act import FusedLinear
from ninfer.ir.types import Env, T, f32_array, plain
from ninfer.routes.cuda import cuda_routes
from ninfer.routes.cuda_layout import device_layout
from ninfer.routes.gemm8_cuda import PREFILL_8BIT, ROUTES
from ninfer.routes.lower import Lowering
from ninfer.routes.profile import DeviceProfile, cache_dir
from ninfer.routes.render import Renderer
from ninfer.routes.route import Candidate, RouteRegistry
from ninfer.routes.select import Selector
from ninfer.runtime.backend import open_backend
from ninfer.runtime.load import no_progress, no_report

ROWS, ROOM = 21, 130  # a plan's room makes it wide; the step has few rows
FORMATS = ("f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k", "q4_g64", "q5_g64", "q6_g64", "q8_g32",
           "t2_g128")  # fmt: skip


def cases() -> Iterator[Case]:
    env = Env(rows=ROWS, logit_rows=1, seqs=1)
    for i, name in enumerate(FORMATS):
        k = (512, 768)[i % 2]
        (xt, x), (wt, w) = cw.rows(T, ROWS, k, seed=i), cw.matrix(by_name(name), 52, k, seed=i + 1)
        yield Case(Linear(), name, (xt, wt), (x, w), env)
    for k in (64, 320, 9216):  # one slice a tile; a row of more than a thread's share
        (xt, x), (wt, w), (rt, r) = cw.rows(T, ROWS, k), cw.matrix(by_name("q4_g64"), 32, k), cw.rows(T, ROWS, 32)
        yield Case(LinearAdd(), f"add-k{k}", (xt, wt, rt), (x, w, r), env)
    (xt, x), (nt, n) = cw.rows(T, ROWS, 512), cw.vector(512)
    (gt, g), (ut, u), (bt, b) = (
        cw.matrix(by_name(f), 96, 512, seed=5 + i) for i, f in enumerate(("q4_g64", "q4_g64", "bf16"))
    )
    yield Case(LinearSwiglu(), "swiglu", (xt, gt, ut), (x, g, u), env)
    yield Case(FusedLinear(norm=True, epilogue="swiglu"), "norm-swiglu", (xt, nt, gt, ut), (x, n, g, u), env)
    yield Case(FusedLinear(norm=True, offset=1.0), "norm-mixed", (xt, nt, gt, bt), (x, n, g, b), env)


CASES = {f"{c.op.key}-{c.name}": c for c in cases()}


def lowered(case: Case, info: DeviceInfo) -> tuple[Graph, Plan]:
    registry = RouteRegistry(cuda_routes(info.units, opted=[PREFILL_8BIT]))
    lowering = Lowering(Selector(registry, info, DeviceProfile("test")), Renderer(info))
    kinds = [Kind.WEIGHT if t.shape[0] != T else Kind.STATE for t in case.types]
    args = [Value(f"a{i}", t, k) for i, (t, k) in enumerate(zip(case.types, kinds, strict=True))]
    outs = [Value(f"y{i}", t, Kind.NODE) for i, t in enumerate(case.op.infer(case.types))]
    graph = Graph()
    graph.nodes = [Node(case.op, tuple(args), tuple(outs), None)]
    graph.outputs = {v.name: v for v in outs}
    return graph, lowering.lower(graph, evolve(case.env, rows=ROOM))


def outputs(case: Case, sim_programs: SimPrograms) -> Mapping[str, Any]:
    device = SimDevice(sim_programs, device_layout)
    graph, plan = lowered(case, device.info)
    assert {x.route.split(".")[-1] for x in plan.launches} == {"gemm8"}
    args = graph.nodes[0].args
    env = evolve(case.env, rows=ROOM)
    states = {a.name: a.type for a in args if a.kind is Kind.STATE}
    weights = {a.name: x for a, x in zip(args, case.arrays, strict=True) if a.kind is Kind.WEIGHT}
    memory = device.memory(weights, states, env, plan.arena_bytes)
    memory.arena[:] = 0xFF
    for a, x in zip(args, case.arrays, strict=True):
        if a.kind is Kind.STATE:
            assert not isinstance(x, Packed)
            memory.states[a.name][: len(x)] = x
    executable = device.bind(plan, memory, {}, device.compile([plan]))
    executable.header["rows"] = case.env.rows
    return executable.launch()


QUICK = ("linear-q4_g64", "linear_add-add-k320", "fused_linear-norm-mixed")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_products_are_those_of_the_reference(name: str, sim_programs: SimPrograms) -> None:
    case = CASES[name]
    for got, want in zip(outputs(case, sim_programs).values(), case.op.reference(case.arrays), strict=True):
        want = plain(want)
        # a value off by up to half a step of 1 / 127 of the row's largest, on both sides of the product
        limit = 0.03 if "swiglu" in name else 0.015
        assert got.shape == want.shape and np.linalg.norm(got - want) < limit * np.linalg.norm(want)
        assert np.linalg.norm(got - want) > 1e-4 * np.linalg.norm(want)  # it is this route


def test_what_stands_out_is_spread(sim_programs: SimPrograms) -> None:
    """A channel 60 times the others, as models have, would leave those 4 codes; the transform gives them 30."""
    env = Env(rows=ROWS, logit_rows=1, seqs=1)
    (xt, x), (wt, w) = cw.rows(T, ROWS, 512), cw.matrix(by_name("q4_g64"), 64, 512)
    x = f32_array(x).copy()
    x[:, 77] = 60
    case = Case(Linear(), "", (xt, wt), (x, w), env)
    (got,), (want,) = outputs(case, sim_programs).values(), case.op.reference(case.arrays)
    rest = plain(want) - 60 * f32_array(w)[:, 77]  # what the channel alone does not give
    error = float(np.linalg.norm(got - plain(want)) / np.linalg.norm(rest))

    def rounded(a: F32Array) -> F32Array:
        step = np.abs(a).max(1, keepdims=True) / np.float32(127)
        return np.asarray(np.rint(a / step) * step, np.float32)

    without = rounded(x) @ rounded(f32_array(w)).T
    assert error < 0.35 * float(np.linalg.norm(without - plain(want)) / np.linalg.norm(rest))


def test_a_row_that_is_not_finite_stays_so(sim_programs: SimPrograms) -> None:
    case = CASES["linear-q4_g64"]
    x = f32_array(case.arrays[0]).copy()
    x[3, 5], x[4, 6] = np.nan, np.inf
    (got,) = outputs(evolve(case, arrays=(x, *case.arrays[1:])), sim_programs).values()
    assert not np.isfinite(got[3:5]).any() and np.isfinite(got[:3]).all() and np.isfinite(got[5:]).all()


@pytest.mark.slow
@pytest.mark.skipif(nvrtc_missing() is not None, reason=nvrtc_missing() or "")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile(arch: str) -> None:
    info = DeviceInfo("cuda", arch, arch, features_of(arch), arch, 100, 0)
    sources = {s.entry: s for name in QUICK for s in lowered(CASES[name], info)[1].sources}
    assert CubinCache(cache_dir() / "programs", arch).cubins(list(sources.values())).keys() == sources.keys()


def test_nobody_gets_it_who_did_not_ask() -> None:
    assert not any(r.opt_in for r in cuda_routes(132))
    assert [r.name for r in cuda_routes(132, opted=[PREFILL_8BIT]) if r.opt_in] == [r.name for r in ROUTES]


def test_a_profile_measured_without_it_does_not_decide() -> None:
    info, case = sim_info(), CASES["linear-q4_g64"]
    registry, env = RouteRegistry(cuda_routes(4, opted=[PREFILL_8BIT])), evolve(case.env, rows=ROOM)
    found = [c.id for c in registry.candidates(case.op, case.types, env, info)]
    key = "linear/768+52x768:q4_g64"
    for first, chosen in ((1.0, found[0]), (9.0, found[1])):
        times = {found[0]: first, found[1]: 5.0}
        for seen, expected in ((times, chosen), ({found[1]: 5.0}, found[0])):
            best = min(seen, key=lambda c: seen[c])
            profile = DeviceProfile("", {key: ((1000, best),)}, {}, {key: {"1000": seen}})
            got = Selector(registry, info, profile).choose(case.op, case.types, env)
            assert isinstance(got, Candidate) and got.id == expected


@pytest.mark.parametrize("more", [{"device": "cpu"}, {"device": "cuda-sim", "deterministic": True}])
def test_what_cannot_be_asked_for_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--prefill-activations 8bit"):
        open_backend(EngineConfig(model="demo", prefill_activations="8bit", **more), no_report, no_progress)
