"""Products on a GPU: the device layout against the formats, and every format through every kind of route, simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from attrs import evolve, frozen
from numpy.typing import NDArray

from ninfer.devices.base import DeviceInfo, Source
from ninfer.devices.cpu import aligned
from ninfer.devices.cuda_sim import SIM_FEATURES, SimPrograms, run_kernel, sim_info, sim_source
from ninfer.formats.dtypes import bf16_to_f32, f32_to_bf16
from ninfer.formats.quant import FORMATS, Packed, QuantFormat, by_name
from ninfer.ir import casework as cw
from ninfer.ir.op import Case, Op
from ninfer.ir.ops.linear import Linear, LinearAdd, LinearSwiglu
from ninfer.ir.ops.packed_act import FusedLinear, QuantizeRows, RmsNormQuant, dequantize, packed_types, quantize
from ninfer.ir.step import HEADER
from ninfer.ir.types import Env, T, f32_array, plain
from ninfer.routes import linear_cuda
from ninfer.routes.cuda_layout import layout_of
from ninfer.routes.render import Renderer
from ninfer.routes.route import Candidate, Geometry, RouteRegistry

pytestmark = pytest.mark.slow  # some minutes: python -m pytest -m slow

UNITS = 5
REGISTRY = RouteRegistry(linear_cuda.routes(UNITS))
# As a real GPU, so that routes around library products are offered; numpy stands for the library.
INFO = DeviceInfo("cuda", "simulated", "simulated", SIM_FEATURES | {"sm90a"}, "sim", UNITS, 1 << 34)
NAMES = ("f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k", "q4_g64", "q5_g64", "q6_g64", "q8_g32",
         "t2_g128")  # fmt: skip


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.can_pack], ids=str)
def test_the_layout_keeps_every_value(fmt: QuantFormat) -> None:
    for n, k in ((50, 512), (16, 256), (7, 768), (33, 576), (5, 288)):
        if not fmt.split and k % fmt.block:
            continue
        x = (cw.rng(k).standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)
        raw, layout = fmt.pack(x), layout_of(fmt)
        packed = layout.repack(raw, (n, k))
        assert packed.nbytes == layout.nbytes((n, k))
        assert np.array_equal(layout.unpack(packed, (n, k)), fmt.unpack(raw, (n, k)))


@pytest.mark.parametrize("name", [n for n in NAMES if layout_of(by_name(n)).tiled])
def test_the_layout_takes_hardly_more_bytes_than_the_file(name: str) -> None:
    fmt, shape = by_name(name), (1024, 2048)
    assert layout_of(fmt).nbytes(shape) <= fmt.nbytes(shape) * 1.03


@frozen
class Trial:
    case: Case
    candidate: Candidate
    env: Env

    @property
    def id(self) -> str:
        return f"{self.case.name}-{self.candidate.id}-for{self.env.rows}"


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
RENDERER = Renderer(sim_info(UNITS))


def sources(trial: Trial) -> Iterator[tuple[Source | None, Geometry]]:
    op, route, tuning = trial.case.op, trial.candidate.route, trial.candidate.tuning
    types = (*trial.case.types, *op.infer(trial.case.types))
    stages = [(route.template, route.geometry, None), *((s.template, s.geometry, s.library) for s in route.then)]
    for template, geometry, library in stages:
        if library is not None:
            yield None, Geometry()
        else:
            source = RENDERER.render(trial.candidate, op, types, trial.env, template=template)
            yield source, geometry(op, types, trial.env, tuning)


@pytest.fixture(scope="module")
def compiled(sim_programs: SimPrograms) -> dict[str, int]:
    """All kernels at once, so that the compiler runs in parallel."""
    wanted = {s.entry: sim_source(s) for trial in TRIALS for s, _ in sources(trial) if s is not None}
    return sim_programs.addresses(list(wanted.values()))


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("trial", TRIALS, ids=lambda t: t.id)
def test_a_route_computes_its_product(trial: Trial, order: int, compiled: dict[str, int]) -> None:
    case, route = trial.case, trial.candidate.route
    want = [plain(y) for y in case.op.reference(case.arrays)]
    got = run(trial, want, order, compiled)
    if want[0].dtype == np.int8:  # a value in the middle of two codes may round to either: compare what they stand for
        assert np.abs(got[0].astype(int) - want[0]).max() <= 1 or route.op is FusedLinear
        want, got = [dequantize(*want)], [dequantize(*got)]
    for a, b in zip(got, want, strict=True):
        error = float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b))
        limit = route.rtol or 1e-6  # float32 sums of 512 products: some 3e-7
        assert error <= limit, f"relative L2 {error:.1e} exceeds {limit:.0e}"
    if isinstance(case.op, FusedLinear) and case.op.packed and not case.op.quant and case.env.rows <= 8:
        rounds = "bf16" in case.name or ".mma" in route.name or trial.env.rows > 8  # operands to bf16
        assert rounds or error_of(got[:1], want[:1]) < 1e-6


def error_of(got: Sequence[NDArray[np.generic]], want: Sequence[NDArray[np.generic]]) -> float:
    pairs = zip(got, want, strict=True)
    return max(float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b)) for a, b in pairs)


def run(
    trial: Trial, want: Sequence[NDArray[np.generic]], order: int, compiled: dict[str, int]
) -> list[NDArray[np.generic]]:
    case, route, tuning = trial.case, trial.candidate.route, trial.candidate.tuning
    types = (*case.types, *case.op.infer(case.types))
    header = aligned(64)[: HEADER.numpy.itemsize].view(HEADER.numpy).reshape(())
    header["rows"] = case.env.rows
    operands = [on_device(a) for a in case.arrays]
    results = [on_device(np.full((trial.env.rows, *w.shape[1:]), 77).astype(w.dtype)) for w in want]
    workspace = aligned(max(route.workspace(case.op, types, trial.env, tuning), 16), 256)
    workspace[:] = 0xFF
    buffers = [*operands, *results, workspace]
    pointers = [header.ctypes.data, *(b.ctypes.data for b in buffers)]
    if not route.workspace(case.op, types, trial.env, tuning):
        pointers.pop()
    for source, g in sources(trial):
        if source is None:
            library(route.context(case.op, types, trial.env, tuning), buffers, case.env.rows)
        else:
            address = compiled[f"{source.entry}_sim"]
            run_kernel(source.entry, address, pointers, g.grid, g.block, g.shared, order=order)
    for r, w in zip(results, want, strict=True):
        assert (r[len(w) :] == np.full((), 77).astype(w.dtype)).all(), "rows that the step does not have were written"
    return [r[: len(w)] for r, w in zip(results, want, strict=True)]


def on_device(array: NDArray[np.generic] | Packed) -> NDArray[np.generic]:
    source = layout_of(array.format).repack(array.raw, array.shape) if isinstance(array, Packed) else array
    copy = aligned(source.nbytes, 256)[: source.nbytes].view(source.dtype).reshape(source.shape)
    copy[...] = source
    return copy


def library(context: object, buffers: Sequence[NDArray[np.generic]], rows: int) -> None:
    assert isinstance(context, dict)
    n, k = context["n"], context["k"]

    def words(name: str, count: int) -> NDArray[np.uint8]:
        flat = buffers[context[name]].reshape(-1).view(np.uint8)
        return flat[context[f"{name}_offset"] :][:count]

    a = bf16_to_f32(words("a", 2 * rows * k).view(np.uint16)).reshape(rows, k)
    b = bf16_to_f32(words("b", 2 * n * k).view(np.uint16)).reshape(n, k)
    c = a @ b.T
    if context["out"] == "f32":
        words("c", 4 * rows * n).view(np.float32)[:] = c.reshape(-1)
    else:
        words("c", 2 * rows * n).view(np.uint16)[:] = f32_to_bf16(c).reshape(-1)


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
