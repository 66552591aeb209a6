"""How the two launches of experts in a decode step deal out work and shared memory."""

from __future__ import annotations

from attrs import frozen

from ninfer.formats.quant import align_up
from ninfer.ir.ops.fused_experts import FusedExperts
from ninfer.ir.types import TensorType, Types
from ninfer.routes.cuda_layout import TILE_ROWS
from ninfer.routes.experts_cuda import Body, stack_body
from ninfer.routes.route import Tuning

GA = 64  # columns that share an activation scale


@frozen
class First:
    """The launch of gates and ups. spans: runs of `span` tiles of K that a warp asks for at once; period: tiles of an
    expert; codes, scales, sums, bars, end: byte offsets in shared memory, which begins with the rings."""

    warps: int
    stages: int
    stage_bytes: int
    span: int
    spans: int
    pieces: int  # runs of 4 activations, of a thread
    period: int
    codes: int
    scales: int
    sums: int
    bars: int
    end: int

    @property
    def threads(self) -> int:
        return 32 * self.warps


@frozen
class Second:
    """The launch of the sums. items: spans of K of all picks (`picked`, `spans` of each) and of the branch beside;
    width, dense_width: columns of codes; wide: where sums of the branch beside begin in the workspace, in floats."""

    warps: int
    stages: int
    stage_bytes: int
    span: int
    spans: int
    dense_span: int
    dense_k: int
    dense_width: int
    picked: int
    items: int
    width: int
    wide: int
    codes: int
    scales: int
    sums: int
    bars: int
    end: int

    @property
    def threads(self) -> int:
        return 32 * self.warps


@frozen
class Units:
    """The launch of gates and ups by units of 16 of a pick. each: of a block; tiles: of a pick; chunks: tiles of K
    that a warp has at most; cuts: parts of K of the branch beside, wide_tiles its gates' tiles, beside where a block's
    are in shared memory; width: columns of codes."""

    warps: int
    each: int
    units: int
    tiles: int
    stages: int
    stage_bytes: int
    warp_bytes: int
    chunks: int
    pieces: int
    period: int
    cuts: int
    wide_tiles: int
    beside: int
    width: int
    codes: int
    scales: int
    bars: int
    end: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def blocks(self) -> int:
        return -(-self.units // self.each)


def even(items: int, most: int) -> int:
    """Warps of up to `most`, so that each has as many items as the fullest."""
    return -(-items // -(-items // most))


def _span(b: Body, kib: int) -> int:
    """Tiles along K of up to so many KiB, in runs that are as equal as can be."""
    assert b.tiling is not None
    most = max(1, min(b.chunks, (kib << 10) // b.tiling.tile_bytes))
    return -(-b.chunks // -(-b.chunks // most))


def _places(ring: int, width: int, sums: bool, bars: int) -> tuple[int, int, int, int, int]:
    """Of codes, scales, sums and barriers behind the rings, and the end. A scale, or sum, has room for 8 rows."""
    codes = align_up(ring, 128)
    scales = codes + align_up(width, 128)
    first_sum = scales + width // GA * 32
    at = first_sum + (width // 16 * 32 if sums else 0)
    return codes, scales, first_sum, at, at + 8 * bars


def first_launch(op: FusedExperts, types: Types, tuning: Tuning) -> First:
    b, k = bodies_of(op, types)[0], width_of(types[0])
    assert b.tiling is not None
    span = _span(b, tuning["span"])
    spans = -(-b.chunks // span)
    warps = even(spans, tuning["warps"])
    stages = min(2 * -(-spans // warps), max(2, tuning["ring"]))
    stage_bytes, width = span * b.tiling.tile_bytes, b.chunks * b.tiling.columns
    places = _places(warps * stages * stage_bytes, width, b.tiling.m_kind != "", warps * stages)
    period = op.glu.inner * (3 - op.num_stacks) // TILE_ROWS
    return First(warps, stages, stage_bytes, span, spans, -(-max(k, width) // (128 * warps)), period, *places)


def second_launch(op: FusedExperts, types: Types, tuning: Tuning) -> Second:
    _, b, dense = bodies_of(op, types)
    assert b.tiling is not None
    span = _span(b, tuning["reach"])
    spans = -(-b.chunks // span)
    picked, items, stage_bytes = op.pick.top_k * spans, op.pick.top_k * spans, span * b.tiling.tile_bytes
    width, dense_width, dense_span, dense_k, sums = b.chunks * b.tiling.columns, 0, 0, 0, b.tiling.m_kind != ""
    if dense is not None:
        assert dense.tiling is not None and op.roles.dense is not None
        dense_k, dense_width = width_of(types[op.roles.dense[2]]), dense.chunks * dense.tiling.columns
        dense_span = _span(dense, tuning["reach"])
        items += -(-dense.chunks // dense_span)
        stage_bytes = max(stage_bytes, dense_span * dense.tiling.tile_bytes)
        sums = sums or dense.tiling.m_kind != ""
    warps = even(items, tuning.get("then", tuning["warps"]))
    stages = min(-(-items // warps), max(2, tuning["ring"]))
    places = _places(warps * stages * stage_bytes, op.pick.top_k * width + dense_width, sums, warps * stages)
    return Second(
        warps, stages, stage_bytes, span, spans, dense_span, dense_k, dense_width, picked, items, width, 0, *places
    )


def unit_launch(op: FusedExperts, types: Types, tuning: Tuning) -> Units:
    b, wide = bodies_of(op, types)[0], wide_body(op, types)
    assert b.tiling is not None
    tiles = op.glu.inner // TILE_ROWS
    units, each = op.pick.top_k * tiles, tuning["each"]
    warps = even(b.chunks, tuning["warps"])
    chunks = -(-b.chunks // warps)
    stage_bytes, width, stages = chunks * b.tiling.tile_bytes, b.chunks * b.tiling.columns, 2 * each
    warp_bytes, cuts, wide_tiles, side = 2 * each * stage_bytes, 1, 0, 0
    if wide is not None:
        assert wide.tiling is not None and op.roles.dense is not None
        n = types[op.roles.dense[0]].shape[0]
        assert isinstance(n, int)
        wide_tiles = -(-n // TILE_ROWS)
        cuts = max(1, min(-(-units // each) // (2 * wide_tiles), wide.chunks))
        side = -(-wide.chunks // cuts) * wide.tiling.tile_bytes
        width, stages = max(width, wide.chunks * wide.tiling.columns), stages + 1
    beside = warps * warp_bytes
    codes, scales, _, bars, end = _places(beside + side, width, False, warps * stages)
    pieces = -(-max(width_of(types[0]), width) // (128 * warps))
    period = op.glu.inner * (3 - op.num_stacks) // TILE_ROWS
    return Units(
        warps, each, units, tiles, stages, stage_bytes, warp_bytes, chunks, pieces, period, cuts, wide_tiles, beside,
        width, codes, scales, bars, end,
    )  # fmt: skip


def wide_body(op: FusedExperts, types: Types) -> Body | None:
    """Gates and ups of the branch beside, where they are products yet to be made."""
    return stack_body(types[op.roles.dense[0]]) if op.parts and op.roles.dense is not None else None


def width_of(t: TensorType) -> int:
    k = t.shape[-1]
    assert isinstance(k, int)
    return k


def bodies_of(op: FusedExperts, types: Types) -> tuple[Body, Body, Body | None]:
    """Of gates and ups, of down, and of the matrix beside."""
    r = op.roles
    dense = None if r.dense is None else stack_body(types[r.dense[2]])
    return stack_body(types[r.stacks[0]]), stack_body(types[r.down]), dense
