"""What CPU routes promise beside agreeing with the reference: bits that depend neither on the cut of the work, nor on
the width of the step, nor on which of the routes with one numerics tag was chosen; and decoders of every format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from numpy.typing import NDArray

from ninfer.devices.cpu import CpuDevice, cpu_info
from ninfer.devices.programs import ProgramCache, find_compiler
from ninfer.formats.quant import FORMATS, Packed, QuantFormat, by_name
from ninfer.ir import casework as cw
from ninfer.ir.op import Case, Op
from ninfer.ir.ops import OPS
from ninfer.ir.ops.embed import Embed
from ninfer.ir.ops.linear import Linear, LinearAdd, LinearSwiglu
from ninfer.ir.types import Env, Sym, T, TensorType
from ninfer.routes.lower import Lowering
from ninfer.routes.profile import DeviceProfile
from ninfer.routes.render import Renderer
from ninfer.routes.route import Candidate
from ninfer.routes.select import Selector
from ninfer.routes.tables import REGISTRY
from tests.routes.harness import Result, lower_case, run_case, wider

DATA = Path(__file__).resolve().parent.parent / "data" / "quant"


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuDevice]:
    compiler = find_compiler()
    assert compiler is not None, "these tests need a C++ compiler"
    info = cpu_info()
    device = CpuDevice(info, ProgramCache(compiler, tmp_path_factory.mktemp("programs"), info.arch), threads=2)
    yield device
    device.close()


@pytest.fixture(scope="module")
def lowering(device: CpuDevice) -> Lowering:
    profile = DeviceProfile(device.info.hardware_class)
    return Lowering(Selector(REGISTRY, device.info, profile), Renderer(device.info))


def all_widths(case: Case, device: CpuDevice) -> list[Candidate]:
    """The candidates of every width, whatever the case's own is."""
    found = {
        c.id: c
        for rows in (1, 2, 8, 64, 1024)
        for c in REGISTRY.candidates(case.op, case.types, evolve(case.env, rows=rows), device.info)
    }
    return list(found.values())


def compile_all(device: CpuDevice, lowering: Lowering, work: Iterable[tuple[Case, Candidate]]) -> None:
    launches = [x for case, c in work for x in lower_case(lowering, case, c, wider(case.env))[0]]
    assert device.programs is not None
    device.programs.addresses(list(dict.fromkeys(x.source for x in launches if x.source is not None)))


def bits(result: Result, case: Case) -> list[bytes]:
    states = [result.arguments[i] for i in case.op.mutates]
    return [a.tobytes() for a in (*result.outputs, *states) if not isinstance(a, Packed)]


def some_cases(op: type[Op], count: int = 4) -> list[Case]:
    cases = list(op.cases())
    return cases[:: max(1, len(cases) // count)]


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS.ops, ids=lambda op: op.__name__)
def test_no_bit_depends_on_how_the_work_is_cut(device: CpuDevice, lowering: Lowering, op: type[Op]) -> None:
    work = [(case, c) for case in some_cases(op) for c in all_widths(case, device)]
    compile_all(device, lowering, work)
    for case, candidate in work:
        first = bits(run_case(device, lowering, case, candidate), case)
        for chunks in ([1], [3, 2], [17, 5]):
            again = bits(run_case(device, lowering, case, candidate, chunks), case)
            assert again == first, f"{case.op.key} {case.name} by {candidate.id} in {chunks} chunks"


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS.ops, ids=lambda op: op.__name__)
def test_routes_of_one_numerics_tag_give_equal_bits(device: CpuDevice, lowering: Lowering, op: type[Op]) -> None:
    work = [(case, c) for case in some_cases(op, 8) for c in all_widths(case, device)]
    compile_all(device, lowering, work)
    seen: dict[tuple[str, str], tuple[str, list[bytes]]] = {}
    for case, candidate in work:
        tag = candidate.route.numerics
        if tag:
            mine = bits(run_case(device, lowering, case, candidate), case)
            other, expected = seen.setdefault((case.name, tag), (candidate.id, mine))
            assert mine == expected, f"{case.op.key} {case.name}: {candidate.id} and {other} differ"


def sliced(case: Case, rows: slice) -> Case:
    """The case with some of its rows; only for ops whose rows do not depend on each other."""
    arrays = tuple(
        np.ascontiguousarray(a[rows]) if t.shape[0] is Sym.T and not isinstance(a, Packed) else a
        for t, a in zip(case.types, case.arrays, strict=True)
    )
    return evolve(case, arrays=arrays, env=evolve(case.env, rows=rows.stop - rows.start))


@pytest.mark.parametrize("op", [Linear, LinearAdd, LinearSwiglu], ids=lambda op: op.__name__)
def test_a_product_has_the_same_bits_at_every_width(device: CpuDevice, lowering: Lowering, op: type[Op]) -> None:
    """Narrow steps take another route than wide ones; a row does not notice."""
    trials = []
    for name in ("q4_1", "q8_0", "q6_k", "q4_g64", "iq4_nl", "q2_k"):
        case = product(op, by_name(name), rows=37, n=50, k=512)
        whole = first_candidate(case, device)
        for width in (1, 2, 3, 5, 8, 12, 37):
            part = slice(37 - width, 37)
            less = sliced(case, part)
            trials.append((case, whole, part, less, first_candidate(less, device)))
    work = [x for case, whole, _, less, chosen in trials for x in ((case, whole), (less, chosen))]
    compile_all(device, lowering, work)
    for case, whole, part, less, chosen in trials:
        assert chosen.route.numerics == whole.route.numerics
        (want,) = run_case(device, lowering, case, whole).outputs
        (got,) = run_case(device, lowering, less, chosen).outputs
        np.testing.assert_array_equal(got, want[part], err_msg=f"{case.name}, rows {part} by {chosen.id}")


def first_candidate(case: Case, device: CpuDevice) -> Candidate:
    return REGISTRY.candidates(case.op, case.types, case.env, device.info)[0]


def product(op: type[Op], fmt: QuantFormat, *, rows: int, n: int, k: int) -> Case:
    weight = cw.matrix(fmt, n, k)
    typed = [cw.rows(T, rows, k, seed=3), weight]
    if op is LinearSwiglu:
        typed.append(weight)
    if op is LinearAdd:
        typed.append(cw.rows(T, rows, n, seed=4))
    types, arrays = tuple(t for t, _ in typed), tuple(a for _, a in typed)
    return Case(op(), f"{fmt.name}-n{n}-k{k}", types, arrays, Env(rows, 1, 1))


def stored_blocks(fmt: QuantFormat) -> NDArray[np.uint8]:
    """Blocks that ggml made, or for a format without a sample, encoded normal values."""
    path = DATA / f"{fmt.name.removesuffix('_ggml').upper()}.npz"
    if path.exists():
        sample = np.load(path)
        raw = next(sample[key] for key in sample.files if sample[key].dtype == np.uint8)
        blocks: NDArray[np.uint8] = raw.reshape(-1, fmt.block_bytes)
        return blocks[: len(blocks) // 2 * 2]
    x = np.random.default_rng(0).standard_normal((8, 2 * fmt.block * max(1, 128 // fmt.block)))
    raw = fmt.pack(x.astype(np.float32))
    return raw if fmt.split else raw.reshape(-1, fmt.block_bytes)


CODED = [f for f in FORMATS if not f.is_plain]


def decoding(fmt: QuantFormat) -> Case:
    """Every row of stored blocks, looked up."""
    raw = stored_blocks(fmt)
    if fmt.split:
        n, k = 8, 2 * fmt.block * max(1, 128 // fmt.block)
    else:
        n, k = len(raw) // 2, 2 * fmt.block
    weight = Packed(fmt, np.ascontiguousarray(raw).reshape(-1), (n, k))
    tokens = np.arange(n, dtype=np.int32)
    types = (TensorType((T,), cw.ints(T, [0])[0].dtype), TensorType((n, k), fmt=fmt))
    return Case(Embed(), fmt.name, types, (tokens, weight), Env(n, 1, 1))


@pytest.fixture(scope="module")
def decoders(device: CpuDevice, lowering: Lowering) -> dict[str, tuple[Case, Candidate]]:
    """Compiled all at once, which takes a fraction of one after the other."""
    found = {}
    for fmt in CODED:
        case = decoding(fmt)
        found[fmt.name] = case, first_candidate(case, device)
    compile_all(device, lowering, found.values())
    return found


@pytest.mark.parametrize("fmt", CODED, ids=str)
def test_decoders_give_the_values_of_numpy(
    device: CpuDevice, lowering: Lowering, decoders: dict[str, tuple[Case, Candidate]], fmt: QuantFormat
) -> None:
    case, candidate = decoders[fmt.name]
    (got,) = run_case(device, lowering, case, candidate).outputs
    weight = case.arrays[1]
    assert isinstance(weight, Packed)
    np.testing.assert_array_equal(got, weight.f32())


def test_a_nan_in_an_activation_reaches_the_output(device: CpuDevice, lowering: Lowering) -> None:
    """16-bit activations have no NaN; their scale has."""
    case = product(Linear, by_name("q4_1"), rows=9, n=16, k=64)
    x = np.array(case.arrays[0])
    x[4, 40], x[6, 3] = np.nan, np.inf
    case = evolve(case, arrays=(x, *case.arrays[1:]))
    every = all_widths(case, device)
    compile_all(device, lowering, [(case, candidate) for candidate in every])
    for candidate in every:
        (y,) = run_case(device, lowering, case, candidate).outputs
        finite = np.isfinite(y).all(axis=1)
        assert not finite[4] and not finite[6] and finite[[0, 1, 2, 3, 5, 7, 8]].all(), candidate.id
