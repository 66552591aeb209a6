"""One op case through one route: operands and results side by side in one guarded arena.

The same for the simulation and for a GPU; what runs the launches is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from ninfer.devices.base import DeviceInfo
from ninfer.devices.plan import BufferRef, Launch, Place
from ninfer.formats.dtypes import I32, U8
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.formats.quant import Packed
from ninfer.ir.graph import Kind, Node, Value
from ninfer.ir.op import Case, Op
from ninfer.ir.ops import OPS
from ninfer.ir.ops.attention import Attention, page_views
from ninfer.ir.ops.block import BLOCK_OPS
from ninfer.ir.ops.fused import FUSED, FusedAttention
from ninfer.ir.ops.fused_draft import FUSED_DRAFT
from ninfer.ir.ops.fused_experts import FusedExperts
from ninfer.ir.ops.fused_rounds import FUSED_ROUNDS
from ninfer.ir.ops.join_linear import JoinLinear
from ninfer.ir.ops.journal import JOURNAL_OPS
from ninfer.ir.ops.linear import Linear, LinearAdd, LinearSwiglu
from ninfer.ir.ops.packed_act import FusedLinear, QuantizeRows, RmsNormQuant, dequantize
from ninfer.ir.ops.recurrent import CausalConvSilu, GatedDelta
from ninfer.ir.ops.reject import REJECT_OPS
from ninfer.ir.ops.rotated_linear import RotatedLinear
from ninfer.ir.ops.sample import Sample
from ninfer.ir.ops.scored_add import ScoredAdd
from ninfer.ir.ops.turn_heads import TurnHeads
from ninfer.ir.step import HEADER, SAMPLE_PARAMS, USE_LOGPROBS
from ninfer.ir.types import B, Env, M, P, S, Sym, T, TensorType, plain
from ninfer.routes.cuda import cuda_routes
from ninfer.routes.cuda_layout import device_layout
from ninfer.routes.lower import Arena, Lowering
from ninfer.routes.profile import DeviceProfile
from ninfer.routes.render import Renderer
from ninfer.routes.route import Candidate, RouteRegistry
from ninfer.routes.select import Selector

Pair = tuple[NDArray[Any], NDArray[Any]]  # got, wanted
Operand = tuple[TensorType, NDArray[Any]]
GUARD = 512
FILL = 0xA5
BF16_KV, F16_KV = "bf16", "f16"
LINEAR_OPS = (FusedLinear, RotatedLinear, QuantizeRows, RmsNormQuant)
BLOCKS = (*BLOCK_OPS, *REJECT_OPS)
MIXERS: tuple[type[Op], ...] = (*FUSED, *FUSED_ROUNDS, *FUSED_DRAFT, FusedExperts, JoinLinear, ScoredAdd, TurnHeads)
ALL_OPS: tuple[type[Op], ...] = tuple(dict.fromkeys((*OPS.ops, *MIXERS, *JOURNAL_OPS, *BLOCKS, *LINEAR_OPS)))
LINEAR = (Linear, LinearAdd, LinearSwiglu, *LINEAR_OPS)
WIDE = 96  # rows of a plan that is made for chunks of a prompt

# launches, arena, header bytes, bytes of each operand by offset
Run = Callable[[Sequence[Launch], NDArray[np.uint8], NDArray[np.uint8], dict[int, int]], None]


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


def long_cases() -> Iterator[Case]:
    """Two sequences in one step, 75 rows that extend 70 tokens and 3 that start: past every piece, page and stage."""
    counts, past, slots, rng = [75, 3], [70, 0], [1, 2], np.random.default_rng(7)
    n = sum(counts)

    def i32(sym: Sym, x: list[int]) -> Operand:
        return TensorType((sym,), I32), np.array(x, np.int32)

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32)

    row_seq, row_start = i32(T, [0] * 75 + [1] * 3), i32(B, [0, 75])
    row_count, seq_slot, kv_len = i32(B, counts), i32(B, slots), i32(B, past)
    env = Env(rows=n, logit_rows=1, seqs=2, slots=3, pages=5, max_pages=3)
    table = np.array([[-1, -1, -1], [4, 0, 2], [3, -1, -1]], np.int32)
    for fmt, d, heads, kv_heads in (
        (BF16_KV, 256, 6, 1),
        (F16_KV, 128, 4, 2),
        (BF16_KV, 64, 9, 3),
        ("rk8v4", 256, 6, 1),
        ("nvfp4", 128, 4, 2),
        ("rk2v4-e8", 64, 9, 3),
    ):
        pages = kv_by_name(fmt).page_bytes(kv_heads, d)
        cache = np.zeros((5, pages), np.uint8)
        for rows in page_views(cache, kv_by_name(fmt), kv_heads, d):
            rows.store(..., normal(5, kv_heads, 64, d))
        paging = ((TensorType((S, M), I32), table), row_seq, row_start, seq_slot, kv_len)
        operands = ((TensorType((T, heads * d)), normal(n, heads * d)), (TensorType((P, pages), U8), cache), *paging)
        for window in (None, 50):
            op = Attention(kv_by_name(fmt), heads, kv_heads, d, d**-0.5, window)
            yield _case(op, f"long-{fmt}-d{d}-w{window}", env, operands, 1e-4, 2e-5)
    sequences = (row_start, row_count, seq_slot, kv_len)
    c = 200
    conv = (
        (TensorType((T, c)), normal(n, c)),
        (TensorType((c, 4)), normal(c, 4)),
        (TensorType((S, c, 3)), normal(3, c, 3)),
    )
    yield _case(CausalConvSilu(), "long", env, (*conv, *sequences), 1e-5, 1e-5)
    hk, hv, dk, dv = 2, 4, 128, 128
    width = 2 * hk * dk + hv * dv
    delta = (
        (TensorType((T, width)), normal(n, width)),
        (TensorType((T, hv)), normal(n, hv)),
        (TensorType((T, hv)), normal(n, hv)),
        (TensorType((hv,)), 0.3 + 0.2 * normal(hv)),
        (TensorType((hv,)), -1 + 0.2 * normal(hv)),
        (TensorType((S, hv, dv, dk)), 0.3 * normal(3, hv, dv, dk)),
    )
    # 75 steps of a recurrence in float32
    yield _case(GatedDelta(hk, hv, dk, dv), "long", env, (*delta, *sequences), 2e-4, 5e-5)


def _case(op: Op, name: str, env: Env, operands: Sequence[Operand], rtol: float, atol: float) -> Case:
    types, arrays = zip(*operands, strict=True)
    return Case(op, name, types, arrays, env, rtol, atol)


def trials(info: DeviceInfo) -> Iterator[Trial]:
    registry = RouteRegistry(cuda_routes(info.units))
    for op in ALL_OPS:
        for case in (*op.cases(), *(c for c in long_cases() if type(c.op) is op)):
            for rows in dict.fromkeys((case.env.rows + (2 if case.env.rows > 1 else 0), max(case.env.rows, WIDE))):
                env = evolve(case.env, rows=rows, logit_rows=case.env.logit_rows + 1, seqs=case.env.seqs + 1)
                for candidate in registry.candidates(case.op, case.types, env, info):
                    # splits of coded caches are those of plain ones, which go through all tunings; those of wide heads
                    # are as many as there are pages here, whatever the tuning
                    if (
                        not candidate.route.name.endswith(("_coded", ".wide"))
                        or candidate.tuning == candidate.route.tunings[0]
                    ):
                        yield Trial(case, candidate, env)


def lowering_for(info: DeviceInfo) -> Lowering:
    return Lowering(Selector(RouteRegistry(cuda_routes(info.units)), info, DeviceProfile("test")), Renderer(info))


@frozen
class Layout:
    launches: tuple[Launch, ...]
    inputs: tuple[int, ...]  # offsets
    outputs: tuple[int, ...]
    spans: dict[int, int]  # bytes of each operand by offset, workspaces too
    nbytes: int


def lay_out(trial: Trial, lowering: Lowering) -> Layout:
    """Launches over offsets in one arena with guards between all operands."""
    case, at = trial.case, GUARD
    outs = case.op.infer(case.types)
    offsets, spans = [], dict[int, int]()
    for i, type in enumerate((*case.types, *outs)):
        offsets.append(at)
        nbytes = _device_bytes(case.arrays[i]).nbytes if i < len(case.types) else 0
        spans[at] = max(type.nbytes(trial.env), nbytes)
        at += -(-spans[at] // 256) * 256 + GUARD
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
    spans.update((ref.offset, space.end - ref.offset) for x in launches for ref in x.args if ref.offset not in spans)
    return Layout(tuple(launches), tuple(offsets[:n]), tuple(offsets[n:]), spans, space.end + GUARD)


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
        run(layout.launches, arena, header.reshape(1).view(np.uint8), layout.spans)
        arenas.append(arena)

    arrays = tuple(a if isinstance(a, Packed) else a.copy() for a in case.arrays)
    results = op.reference(arrays)
    if isinstance(op, FusedAttention) and not op.fmt.is_plain:  # a new value may have fallen to another code there
        written = arenas[0][layout.inputs[3] :][: plain(case.arrays[3]).nbytes].reshape(plain(case.arrays[3]).shape)
        results = op.attended((*arrays[:3], written.copy(), *arrays[4:]))
    expected, allowed = start.copy(), np.zeros(layout.nbytes, bool)
    worst, codes = 0.0, None
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
        allowed[part] = True
        if want.dtype == np.int8:  # codes are judged with their scales
            codes = got, want
        elif codes is not None:
            worst, codes = max(worst, _compare_codes(trial, codes, (got, want), what)), None
        else:
            worst = max(worst, _compare(trial, got, want, what))
    for launch in layout.launches:  # a workspace may hold anything
        for ref in launch.args[len(case.types) + len(layout.outputs) :]:
            allowed[ref.offset : layout.nbytes - GUARD] = True
    touched = np.flatnonzero((arenas[0] != expected) & ~allowed)
    assert not len(touched), f"{len(touched)} bytes were written outside of the results, first at {touched[0]}"
    checked = np.concatenate([np.arange(o, o + w.nbytes) for o, w, _ in places if not isinstance(w, Packed)])
    assert (arenas[0][checked] == arenas[1][checked]).all(), "a second run gave other bits"
    return worst


def _compare_codes(trial: Trial, codes: Pair, scales: Pair, what: str) -> float:
    """A value between two codes may fall to either, and its scale is a float32 quotient."""
    got, want = (dequantize(c, d) for c, d in zip(codes, scales, strict=True))
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if trial.candidate.route.rtol is not None:
        assert error <= trial.candidate.route.rtol, f"{what}: relative L2 {error:.2e}"
    else:
        step = np.repeat(np.maximum(*scales), want.shape[1] // scales[0].shape[1], axis=1)
        assert (np.abs(got - want) <= step * 1.01 + trial.case.rtol * np.abs(want)).all(), f"{what}: codes differ"
    return error


def _compare(trial: Trial, got: NDArray[Any], want: NDArray[Any], what: str) -> float:
    case, route = trial.case, trial.candidate.route
    if (
        isinstance(case.op, FusedAttention | TurnHeads) and want.dtype == np.uint8
    ):  # keys are rounded to the cache's type
        op = case.op
        if not op.fmt.is_plain:  # sums in another order: a value between two codes may fall to either
            changed, wrong = int(np.count_nonzero(want != case.arrays[3])), int(np.count_nonzero(got != want))
            assert wrong <= 0.02 * changed, f"{what}: {wrong} bytes differ of {changed} written"
            return 0.0
        for a, b in zip(*(page_views(x, op.fmt, op.kv_heads, op.head_dim) for x in (got, want)), strict=True):
            np.testing.assert_allclose(a.load(...), b.load(...), rtol=2**-7, atol=1e-5, err_msg=what)
        return 0.0
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
