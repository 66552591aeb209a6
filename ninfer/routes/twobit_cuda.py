"""CUDA products of a few rows with two-bit weights: rows rotated on their way in, or codes in groups of 128."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve

from ninfer.formats.quant import align_up
from ninfer.ir.op import Op, snake
from ninfer.ir.ops.packed_act import FusedLinear
from ninfer.ir.ops.rotated_linear import RotatedLinear
from ninfer.ir.types import Env, Types
from ninfer.routes.cuda_layout import SLICE, TILE_ROWS, layout_of
from ninfer.routes.linear_cuda import (
    RTOL,
    SHARED_80,
    SHARED_90,
    Riders,
    Weight,
    height,
    make_bodies,
    operands,
    parameter_names,
    rows_of,
    weighing,
)
from ninfer.routes.route import Geometry, Route, Tuning

GROUP = 128  # columns that share an activation scale: as many as share a weight scale
TURNED = 256  # values that a warp rotates at a time
LONG = 256 << 10  # bytes that a block reads, from where on a larger ring pays, filled behind the activations
WIDTHS = ((1, 1), (2, 2), (3, 4))


def _straight(op: Op, types: Types) -> tuple[int, ...]:
    """Matrices that read rows as they are."""
    count = op.straight if isinstance(op, RotatedLinear) else 0
    return tuple(i for i, _ in operands(op, types).weights[-count:]) if count else ()


def _refuse(op: Op, types: Types) -> str | None:
    o = operands(op, types)
    straight = _straight(op, types)
    if isinstance(op, RotatedLinear):
        if not 128 <= op.block <= 2048:
            return f"rotates blocks of 128 to 2048 values, not {op.block}"
        if o.k % TURNED:
            return f"rotates {TURNED} values at a time, not {o.k}"
    elif o.packed != GROUP or o.norm is not None:
        return f"takes codes in groups of {GROUP}, not normalised later"
    if o.quant or o.weigh or o.ahead or o.k % GROUP:
        return f"gives rows, of products with whole groups of {GROUP}"
    formats = {t.fmt for i, t in o.weights if i not in straight}
    for fmt in formats:
        assert fmt is not None
        layout = layout_of(fmt)
        two = layout.tiled and layout.bits == 2 and layout.code == "int" and not layout.m_kind
        if not two or layout.group != GROUP or layout.d_kind not in ("f16", "bf16"):
            return f"multiplies two-bit integers in groups of {GROUP}, not {fmt.name}"
    kinds = {t.fmt.dtype for i, t in o.weights if i in straight and t.fmt is not None}
    if len(formats) != 1 or len(kinds) > 1 or None in kinds:
        return "needs one format of the rotated matrices, and a plain one of the others"
    return None


def _riders(op: Op, types: Types, blocks: int) -> Riders | None:
    o, straight = operands(op, types), _straight(op, types)
    if not straight:
        return None
    outputs = {i: f"y{j}" for j, (i, _) in enumerate(o.weights)}
    weights, n = list[Weight](), 0
    for i, t in o.weights:
        if i in straight:
            assert t.fmt is not None
            weights.append(Weight(f"a{i}", outputs[i], height(t), 0, n, t.fmt))
            n += height(t)
    dtype = weights[0].fmt.dtype
    assert dtype is not None
    comment = f"{dtype.name}: " + ", ".join(f"{w.arg} [{w.n}, {o.k}]" for w in weights)
    return Riders(tuple(weights), n, dtype.name, dtype.nbytes, -(-n // blocks), 0, comment)


def context(op: Op, types: Types, env: Env, tuning: Tuning) -> dict[str, Any]:
    """tuning: warps, stages of span tiles along K and tall ones along rows (fewer stages where shared memory is short),
    blocks, bulk (1: sm_90's copy engine), resident (blocks per multiprocessor that the registers allow for), limit (KiB
    of shared memory), split (parts along K of what equal shares leave), stamps (1: blocks note the times of their
    phases), early (linear_turned: stages asked for before the activations, the others behind them; 0: all before),
    pieces (linear_wide: parts along K of a tile, each a stage of the block's ring)."""
    limit = tuning.get("limit", 227) << 10
    for stages in range(tuning["stages"], 1, -1):
        found = _context(op, types, env, tuning, stages)
        if found["at"]["end"] <= limit:
            break
    return found


def _context(op: Op, types: Types, env: Env, tuning: Tuning, stages: int) -> dict[str, Any]:
    o, straight = operands(op, types), _straight(op, types)
    rows, warps, span, tall = rows_of(o, env), tuning["warps"], tuning.get("span", 1), tuning.get("tall", 1)
    padded = 1 << (rows - 1).bit_length()
    (b,) = make_bodies(o, warps, span, tuning["blocks"], SLICE, tuning.get("split", 1), straight)
    assert b.tiling is not None
    pieces = tuning.get("pieces", 0)  # 0: a ring for each warp
    stage_bytes = tall * (b.chunks // pieces * b.tiling.tile_bytes if pieces else b.stage_bytes)
    b = evolve(b, prefix=f"{b.prefix}_{b.tiling.groups}", stage_bytes=stage_bytes)
    assert b.tiling is not None
    batch, threads = min(8 // tall, -(-b.most_tiles // tall)) * tall, 32 * warps
    once = b.parts == 1 and b.most_tiles <= batch  # the sums of all tiles meet at one time
    halves = 2 if rows <= 2 and not once else 1
    riders = _riders(op, types, b.blocks)
    kept = TILE_ROWS * b.most_tiles if o.residual is not None else 0
    holds = -(-kept * rows // threads)
    if holds > 8:
        kept = holds = 0
    turn = op.block if isinstance(op, RotatedLinear) else 0
    runs = o.k // TURNED if turn else 0
    combined = max(1, turn // TURNED)
    x_stride = align_up(o.k, 128) + 64
    at, offsets = 0, dict[str, int]()
    for name, nbytes in (
        ("ring", (1 if pieces else warps) * stages * b.stage_bytes),
        ("x", rows * x_stride), ("groups", o.k // GROUP * padded * 16),
        ("red", max(halves * batch * warps * 16 * rows * 4, 4 * o.k * (combined > 1))),
        ("squares", rows * warps * 4), ("inverse", rows * 4),
        ("kept", 4 * kept * rows), ("riders", riders.most * rows * warps * 4 if riders else 0),
        ("bars", 16 * stages if pieces else warps * stages * 8),
    ):  # fmt: skip
        offsets[name] = at
        at += align_up(nbytes, 128)
    single = b.parts == 1 and b.chunks == warps * span
    even = b.unit_tiles % tall == 0 and b.tiles % b.unit_tiles == 0
    n_out = o.weights[0][1].shape[0]
    return {
        "T": rows, "TP": padded, "K": o.k, "N": n_out, "warps": warps, "stages": stages, "b": b,
        "batch": batch, "once": once, "tall": tall, "halves": halves, "kept": kept, "holds": holds,
        "resident": tuning.get("resident", 1), "bulk": tuning.get("bulk", 0), "stamps": tuning.get("stamps", 0),
        "blocks": b.blocks, "tickets": b.left, "early": 0 if pieces else tuning.get("early", 0),
        "at": {**offsets, "end": at}, "x_stride": x_stride, "riders": riders,
        "per_lane": (-(-b.chunks // warps) * b.tiling.columns + 511) // 512, "x": "a0", "x_scale": "a1", "x_codes": o.k,
        "turn": turn, "runs": runs, "combined": combined, "passes": -(-runs // warps),
        "own": not turn and pieces <= 1, "single": single, "even": even, "pieces": pieces,
        "signs": f"a{1 + (o.norm is not None)}", "norm": "" if o.norm is None else f"a{o.norm}", "eps": o.eps,
        "offset": o.offset, "residual": "" if o.residual is None else f"a{o.residual}", "swiglu": o.swiglu, "quant": 0,
        **weighing(o), "parameters": parameter_names(o, types),
    }  # fmt: skip


def _geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c = context(op, types, env, tuning)
    return Geometry((c["blocks"], 1, 1), 32 * (c["warps"] + (c["pieces"] > 0)), c["at"]["end"])


def _cuts(op: Op, types: Types, env: Env, tuning: Tuning) -> int:
    """Bytes of the sums of cuts."""
    c = context(op, types, env, tuning)
    b = c["b"]
    return int(b.left * b.parts * b.unit_tiles * TILE_ROWS * c["T"] * 4)


def _needs(op: Op, types: Types, rows: int, tuning: Tuning) -> int:
    return int(_context(op, types, Env(rows=rows, logit_rows=rows, seqs=rows), tuning, 2)["at"]["end"])


def _idle(op: Op, types: Types, tuning: Tuning) -> float:
    """The share of the warps' time that uneven ranges of K cost."""
    pieces, warps = tuning.get("pieces", 0) or 1, tuning["warps"]
    chunks, cut = divmod(_chunks(op, types), pieces)
    if cut or not chunks:
        return math.inf
    return -(-chunks // warps) * warps / chunks - 1


def _chunks(op: Op, types: Types) -> int:
    """Of a row of tiles."""
    o, straight = operands(op, types), _straight(op, types)
    fmt = next(t.fmt for i, t in o.weights if i not in straight)
    assert fmt is not None
    return layout_of(fmt).tiling(o.k).num_tiles


def _bytes(op: Op, types: Types) -> int:
    """Of the two-bit matrices."""
    o, straight, found = operands(op, types), _straight(op, types), 0
    for i, t in o.weights:
        if i not in straight and t.fmt is not None:
            found += -(-height(t) // TILE_ROWS) * layout_of(t.fmt).tiling(o.k).row_bytes
    return found


def _fits(rows: int, limit: int, tunings: Sequence[Tuning]) -> Callable[[Op, Types, Tuning], bool]:
    def fits(op: Op, types: Types, tuning: Tuning) -> bool:
        if ("pieces" in tuning) != ("pieces" in tunings[0]):
            return False
        if tuning.get("early") and _bytes(op, types) < LONG * tuning["blocks"]:
            return False
        even = 0.0 if "pieces" in tuning else min(_idle(op, types, t) for t in tunings)
        return _idle(op, types, tuning) <= even + 0.1 < math.inf and _needs(op, types, rows, tuning) <= limit << 10

    return fits


def _route(
    op: type[Op], low: int, high: int, name: str, need: str, limit: int, tunings: Sequence[Tuning],
    template: str = "linear_turned",
) -> Route[Any]:  # fmt: skip
    fits = _fits(high, limit, tunings)

    def refuse(op: Op, types: Types) -> str | None:
        reason = _refuse(op, types)
        if reason is None and not any(fits(op, types, t) for t in tunings):
            return f"{high} rows do not fit {limit} KiB of shared memory"
        return reason

    return Route(
        name=f"{snake(op.__name__)}.{name}.{high}", op=op, device="cuda", template=f"cuda/{template}.cu.j2",
        geometry=_geometry, context=context, widths=(low, high), needs=(need,), refuse=refuse, tunings=tuple(tunings),
        fits=fits, rtol=RTOL, workspace=_cuts,
    )  # fmt: skip


def routes(units: int) -> tuple[Route[Any], ...]:
    """All of them, with grids for a GPU of so many multiprocessors."""
    one = {"bulk": 1, "resident": 1, "blocks": units}
    two = {"bulk": 1, "resident": 2, "blocks": units, "limit": 112}
    tunings = (
        {**one, "warps": 20, "stages": 4},
        {**one, "warps": 17, "stages": 4, "span": 2},
        {**one, "warps": 24, "stages": 4},
        {**one, "warps": 20, "stages": 4, "tall": 2},
        {**one, "warps": 20, "stages": 8},
        {**one, "warps": 17, "stages": 3, "tall": 3},
        {**one, "warps": 24, "stages": 2, "tall": 3},
        {**one, "warps": 17, "stages": 4, "span": 2, "split": 8},
        {**one, "warps": 24, "stages": 4, "split": 8},
        {**two, "warps": 10, "stages": 4, "span": 2},
        {**two, "warps": 12, "stages": 4, "span": 2},
    )
    # a row's products, found in whole steps: two tiles at a time, and for middling and long K a ring for the block
    tall: Tuning = {**one, "warps": 20, "stages": 2, "tall": 2, "limit": 112}
    long: Tuning = {**one, "warps": 20, "stages": 3, "tall": 2, "early": 1}
    wide = ({**one, "warps": 17, "pieces": 4, "stages": 4}, {**one, "warps": 12, "pieces": 1, "stages": 6})
    copies = {"warps": 8, "stages": 4, "span": 2, "bulk": 0, "blocks": units, "resident": 1, "limit": 99}
    found = []
    for op in (RotatedLinear, FusedLinear):
        for low, high in WIDTHS:
            if high == 1:
                found.append(_route(op, low, high, "twobit-wide", "sm90a", SHARED_90 >> 10, wide, "linear_wide"))
            some = (long, tall, *tunings) if high == 1 else tunings
            found.append(_route(op, low, high, "twobit", "sm90a", SHARED_90 >> 10, some))
            found.append(_route(op, low, high, "twobit-stream", "sm80", SHARED_80 >> 10, (copies,)))
    return tuple(found)


ROUTES: tuple[Route[Any], ...] = routes(132)
