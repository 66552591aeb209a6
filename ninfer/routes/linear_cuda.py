"""CUDA routes of matrix products.

Numbers of activations: "int8" routes quantise them per group of columns (Route.rtol states the cost); "f32" routes
keep them, at the price of more instructions per weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import ceil
from typing import Any

from attrs import evolve, frozen

from ninfer.formats.quant import QuantFormat, align_up
from ninfer.ir.op import Op, snake
from ninfer.ir.ops.linear import Linear, LinearAdd, LinearSwiglu
from ninfer.ir.ops.packed_act import FusedLinear, QuantizeRows, RmsNormQuant
from ninfer.ir.types import B, Env, L, TensorType, Types
from ninfer.routes.cuda_layout import SLICE, TILE_ROWS, Tiling, layout_of
from ninfer.routes.route import Geometry, Route, Stage, Tuning

SHARED_90 = 227 << 10  # of one block on sm_90
SHARED_80 = 99 << 10  # on sm_86, sm_89 and sm_120


@frozen
class Weight:
    """A matrix of a launch. arg, out: C names; first_tile: of its body's tiles; first_row: of all matrices' rows."""

    arg: str
    out: str
    n: int
    first_tile: int
    first_row: int
    fmt: QuantFormat

    @property
    def tiles(self) -> int:
        return -(-self.n // TILE_ROWS)


@frozen
class Body:
    """The blocks of one format. unit: tiles that one block must own together."""

    prefix: str
    tiling: Tiling | None
    dtype: str
    weights: tuple[Weight, ...]
    tiles: int
    unit_tiles: int
    chunks: int
    span: int
    stage_bytes: int
    sums: int
    padded: int
    x_stride: int
    first_block: int = 0
    blocks: int = 0
    comment: str = ""
    whole: int = 0  # units of each block, the rest being cut along K into `parts` each
    parts: int = 1
    first_ticket: int = 0
    cuts_at: int = 0  # floats before this body's sums of cuts
    grid_bytes: int = 0  # that the copies of a grid may take
    dynamic: bool = False  # whether these begin the block's dynamic shared memory
    compact: int = 0  # chunks that a warp of a block has room for, where blocks hold activations of their cuts alone

    @property
    def units(self) -> int:
        return -(-self.tiles // self.unit_tiles)

    @property
    def last_block(self) -> int:
        return self.first_block + self.blocks

    @property
    def left(self) -> int:
        """Units that several blocks share."""
        return self.units - self.whole * self.blocks if self.parts > 1 else 0

    @property
    def cut(self) -> bool:
        """Whether every unit is cut along K."""
        return self.parts > 1 and self.whole == 0

    @property
    def most_tiles(self) -> int:
        """Of a block."""
        if self.parts > 1:
            return (self.whole + 1) * self.unit_tiles
        return -(-self.units // self.blocks) * self.unit_tiles

    @property
    def factor(self) -> float:
        return 1.0 if self.tiling is None else self.tiling.factor

    @property
    def copies(self) -> int:
        """Of a grid in shared memory."""
        return 1 if self.tiling is None else self.tiling.grid_copies(self.grid_bytes)

    @property
    def nbytes(self) -> int:
        k_bytes = self.tiling.row_bytes if self.tiling else self.chunks
        return self.tiles * k_bytes


@frozen
class Riders:
    """Rows of plain matrices that are dealt out to the blocks of tiled ones. most: rows of a block."""

    weights: tuple[Weight, ...]
    n: int
    dtype: str
    nbytes: int
    most: int
    pieces: int  # of 16 columns, of a lane
    comment: str


@frozen
class Places:
    """Byte offsets in shared memory."""

    grid: int
    ring: int
    x: int
    xd: int
    xs: int
    red: int
    squares: int
    inverse: int
    kept: int
    next: int
    riders: int
    bars: int
    turn: int
    end: int


@frozen
class Operands:
    """The arguments of a product op, by role."""

    x: TensorType
    k: int
    weights: tuple[tuple[int, TensorType], ...]
    norm: int | None
    packed: int
    residual: int | None
    swiglu: bool
    quant: int
    eps: float
    offset: float
    weigh: int = 0
    next_norm: int | None = None
    ahead: Operands | None = None  # of the product that comes next


def operands(op: Op, types: Types) -> Operands:
    if isinstance(op, FusedLinear):
        total = next(n for n in range(2, len(types) + 1) if _infers(op, types[:n], types[n:]))
        at, matrices = op.split(types[:total])
        num_inputs = total - op.ahead_weights
        ahead = _ahead(op.ahead, types, range(num_inputs, total)) if op.ahead and op.ahead_weights else None
        k = types[matrices[0]].shape[1]
        assert isinstance(k, int)
        return Operands(
            types[0], k, tuple((i, types[i]) for i in matrices), at if op.norm else None, op.packed,
            num_inputs - 1 - (op.weigh > 0) if op.epilogue == "add" else None, op.epilogue == "swiglu", op.quant,
            op.eps, op.offset, op.weigh, num_inputs - 1 if op.weigh else None, ahead,
        )  # fmt: skip
    k = types[0].shape[1]
    assert isinstance(k, int)
    count = 1 if isinstance(op, LinearAdd) else 2 if isinstance(op, LinearSwiglu) else _count_matrices(types)
    weights = tuple((i, types[i]) for i in range(1, 1 + count))
    residual = 2 if isinstance(op, LinearAdd) else None
    return Operands(types[0], k, weights, None, 0, residual, isinstance(op, LinearSwiglu), 0, 0.0, 0.0)


def _ahead(op: FusedLinear, types: Types, at: Sequence[int]) -> Operands:
    """What is known of the next product: its weights and what its blocks own together."""
    k, weights = types[at[0]].shape[1], tuple((i, types[i]) for i in at)
    assert isinstance(k, int)
    residual = 0 if op.epilogue == "add" else None
    return Operands(
        types[0], k, weights, None, op.packed, residual, op.epilogue == "swiglu", op.quant, 0.0, 0.0, op.weigh
    )


def _count_matrices(types: Types) -> int:
    return sum(t.fmt is not None for t in types)


def _infers(op: FusedLinear, inputs: Types, outs: Types) -> bool:
    """Whether `inputs` is where the outputs begin: types lists inputs and, once lowered, outputs."""
    if not any(t.fmt is not None for t in inputs):
        return False
    _, matrices = op.split(inputs)
    if not matrices or any(inputs[i].fmt is None for i in matrices) or any(t.fmt is not None for t in outs):
        return False
    if op.epilogue == "add":
        return len(inputs) == matrices[0] + 2 + (op.weigh > 0) + op.ahead_weights
    return True


@frozen
class Apart:
    """Parts of K that one accumulator keeps apart (templates/cuda/linear_columns.h.j2).

    step: columns of a part; rows: of activations in an accumulator, a power of two.
    """

    step: int
    rows: int

    def parts(self, b: Body) -> int:
        assert b.tiling is not None
        return min(8 // self.rows, b.tiling.columns // self.step)


def parts_apart(bodies: Sequence[Body], rows: int, ga: int) -> Apart | None:
    """None where there are more rows than columns of an accumulator, or scales of several pieces."""
    tilings = [b.tiling for b in bodies if b.tiling]
    kinds = ("f16", "bf16", "nibble")
    if not tilings or rows > 8 or any(t.d_kind not in kinds or t.m_kind for t in tilings):
        return None
    step = min(ga, SLICE, *(t.group for t in tilings))
    return None if any(t.group % step for t in tilings) else Apart(step, 1 << (rows - 1).bit_length())


def make_bodies(
    o: Operands,
    warps: int,
    span: int,
    blocks: int,
    ga: int,
    split: int = 1,
    without: Sequence[int] = (),
    groups: int = 1,
) -> tuple[Body, ...]:
    """One body per format, blocks shared out in proportion to bytes.   without: weights that are no body's; groups: of
    outputs that are one unit."""
    by_format: dict[QuantFormat, list[tuple[int, TensorType]]] = {}
    for i, t in o.weights:
        assert t.fmt is not None
        if i not in without:
            by_format.setdefault(t.fmt, []).append((i, t))
    bodies = []
    outputs = {i: f"y{j}" for j, (i, _) in enumerate(o.weights)}
    starts = {i: sum(height(t) for _, t in o.weights[:j]) for j, (i, _) in enumerate(o.weights)}
    for fmt, members in by_format.items():
        weights, tiles = [], 0
        for i, t in members:
            n = height(t)
            weights.append(Weight(f"a{i}", "y0" if o.swiglu else outputs[i], n, tiles, starts[i], fmt))
            tiles += -(-n // TILE_ROWS)
        unit = (o.quant // 8 if o.quant else 2) if o.swiglu else o.weigh // 16 if o.weigh else 1
        unit *= groups
        layout = layout_of(fmt)
        names = f"{fmt.name}: " + ", ".join(f"{w.arg} [{w.n}, {o.k}]" for w in weights)
        if layout.tiled:
            tiling = layout.tiling(o.k)
            prefix = f"Tile_{fmt.name}_{tiling.slices}"
            sums = min(tiling.group, ga, SLICE) if tiling.m_kind else 0
            bodies.append(Body(prefix, tiling, "", tuple(weights), tiles, unit, tiling.num_tiles, span,
                               span * tiling.tile_bytes, sums, 0, 0, comment=names))  # fmt: skip
        else:
            assert fmt.dtype is not None
            padded = align_up(o.k, 32)
            stride = (align_up(2 * padded, 128) + 64) // 2
            bodies.append(Body("", None, fmt.dtype.name, tuple(weights), tiles, unit,
                               TILE_ROWS * o.k * fmt.dtype.nbytes, 1, 0, 0, padded, stride, comment=names))  # fmt: skip
    return _share(bodies, blocks, split)


def bodies_of(o: Operands) -> tuple[Body, ...]:
    """The formats of an op's matrices, for kernels that deal out their blocks themselves."""
    return make_bodies(o, 1, 1, 1, SLICE)


def make_riders(o: Operands, plain: Sequence[int], warps: int, blocks: int) -> Riders | None:
    """The plain matrices, where they are few rows beside tiled ones, given codes, and only stored."""
    formats = {i: t.fmt for i, t in o.weights if t.fmt is not None}
    columns = {layout_of(f).tiling(o.k).columns for i, f in formats.items() if i not in plain}
    kinds = {formats[i].dtype for i in plain}
    if len(kinds) != 1 or len(columns) != 1 or not o.packed or o.swiglu or o.residual is not None or o.k % 16:
        return None
    ((tile,), (dtype,)) = columns, kinds
    assert dtype is not None
    outputs, weights, n = {i: f"y{j}" for j, (i, _) in enumerate(o.weights)}, list[Weight](), 0
    for i, t in o.weights:
        if i in plain:
            weights.append(Weight(f"a{i}", outputs[i], height(t), 0, n, formats[i]))
            n += height(t)
    chunks = -(-o.k // tile)
    pieces, most = -(-(-(-chunks // warps) * tile) // 512), -(-n // blocks)
    if most * pieces * dtype.nbytes > 8:
        return None
    comment = f"{dtype.name}: " + ", ".join(f"{w.arg} [{w.n}, {o.k}]" for w in weights)
    return Riders(tuple(weights), n, dtype.name, dtype.nbytes, most, pieces, comment)


def height(t: TensorType) -> int:
    n = t.shape[0]
    assert isinstance(n, int)
    return n


FEW_PLAIN = 8  # units of plain rows that are not more than a block's work each, since nothing streams them ahead


def _share(bodies: Sequence[Body], blocks: int, split: int) -> tuple[Body, ...]:
    """split: the most parts that a unit is cut into."""
    few = [b.tiling is None and b.units <= FEW_PLAIN for b in bodies]
    plain = sum(b.units for b, alone in zip(bodies, few, strict=True) if alone)
    if plain * 4 > blocks or all(few):
        few, plain = [False] * len(bodies), 0
    total = sum(b.nbytes for b, alone in zip(bodies, few, strict=True) if not alone)
    out, at, tickets, cuts_at = [], 0, 0, 0
    for b, alone in zip(bodies, few, strict=True):
        n = b.units if alone else max(1, round((blocks - plain) * b.nbytes / total))
        whole, left = divmod(b.units, n)
        parts = min(split, n // left, b.chunks) if left and b.tiling else 1
        if parts < 2:
            n, whole, parts = min(n, b.units), 0, 1
        b = evolve(b, first_block=at, blocks=n, whole=whole, parts=parts, first_ticket=tickets, cuts_at=cuts_at)
        out.append(b)
        at += n
        tickets += b.left
        cuts_at += b.left * b.parts * b.unit_tiles * TILE_ROWS
    return tuple(out)


def stream(op: Op, types: Types, env: Env, tuning: Tuning) -> dict[str, Any]:
    """All that the template and the geometry of the streaming kernel need.

    tuning: warps, stages of span tiles (fewer where shared memory is short), blocks (in all), bulk (1: sm_90's copy
    engine), resident (blocks per multiprocessor that the registers allow for), limit (KiB of shared memory), group
    (columns per activation scale, where the route quantises), late (fills of a warp's ring that are still to come when
    the next kernel may start; absent: it may at once), split (parts along K of what equal shares leave), stamps (1:
    blocks note the times of their phases), ahead (KiB of the next product's weights that a block fetches into L2 once
    its own are on their way), grid (KiB that copies of a grid may take in shared memory), apart (1: an
    accumulator's columns keep parts of K apart), early (stages that a warp fills before the wait; the others once it
    has asked for its activations, which else come behind them; absent: all), groups (of outputs that are one unit:
    where units are cut along K, activations are read less often), together (1: all warps hand over the sums of a cut
    beside whole units, not one of them), copied (1: codes of activations are copied as they lie, where parts are kept
    apart and the ring is filled by bulk copies), tall (tiles of the same columns that a warp multiplies at once, where
    parts are kept apart: 1, 2 or 4).
    """
    limit = tuning.get("limit", 227) << 10
    for stages in range(tuning["stages"], 1, -1):
        context = _stream(op, types, env, tuning, stages)
        if context["at"].end + context["grids"] <= limit:
            break
    return context


def _stream(op: Op, types: Types, env: Env, tuning: Tuning, stages: int) -> dict[str, Any]:
    o = operands(op, types)
    rows = rows_of(o, env)
    nt = -(-rows // 8)
    warps = tuning["warps"]
    ga = o.packed or tuning.get("group", 64)
    batch = o.quant // 8 if o.quant else o.weigh // 16 if o.weigh else 4 if rows <= 2 else 2
    halves = 2 if rows <= 4 else 1  # of the buffer of partial sums; one half costs a second barrier per batch
    span, blocks = tuning.get("span", 1), tuning["blocks"]
    split, plain = tuning.get("split", 1), [i for i, t in o.weights if t.fmt and t.fmt.dtype]
    groups, together = tuning.get("groups", 1), tuning.get("together", 0)
    bodies = make_bodies(o, warps, span, blocks, ga, split, plain, groups)
    riders = make_riders(o, plain, warps, sum(b.blocks for b in bodies))
    if plain and riders is None:
        bodies = make_bodies(o, warps, span, blocks, ga, split, (), groups)
    bodies = tuple(_with_grid(b, bodies, tuning.get("grid", 8) << 10) for b in bodies)
    alone = len(bodies) == 1 and riders is None  # riders want a whole row of every block
    if alone and bodies[0].cut and bodies[0].tiling and o.packed and bodies[0].tiling.columns % ga == 0:
        bodies = (evolve(bodies[0], compact=ceil(ceil(bodies[0].chunks / warps) / bodies[0].parts)),)
    blocks, threads = sum(b.blocks for b in bodies), 32 * warps
    kp = max([(b.compact * warps or b.tiling.num_tiles) * b.tiling.columns for b in bodies if b.tiling]
             + [b.padded for b in bodies])  # fmt: skip
    sums = [b.sums for b in bodies if b.sums]
    apart = parts_apart(bodies, rows, ga) if tuning.get("apart") else None
    tiled = all(b.tiling for b in bodies)
    copied = bool(tuning.get("copied") and tuning.get("bulk") and apart and o.packed and tiled)
    x_stride = align_up(kp, 128) + (16 if copied else 64)
    tall = tuning.get("tall", 1) if apart else 1
    bodies = tuple(evolve(b, stage_bytes=tall * b.stage_bytes) for b in bodies)
    stages = min(stages, max(2, *(_most_fills(b, warps, tall) for b in bodies)))
    at, offsets = 0, {}

    def place(name: str, nbytes: int) -> None:
        nonlocal at
        offsets[name] = at
        at += align_up(nbytes, 128)

    place("grid", max(b.tiling.grid_bytes * b.copies if b.tiling and b.dynamic else 0 for b in bodies))
    ring = max(warps * stages * b.stage_bytes for b in bodies)
    place("ring", ring)  # bodies of plain formats have none: their activations, two bytes each, begin here
    place("x", max([rows * x_stride] + [rows * 2 * b.x_stride - align_up(ring, 128) for b in bodies]))
    place("xd", kp // apart.step * apart.rows * 4 if apart else kp // ga * 8 * nt * 4)
    place("xs", max((kp // s * 8 * nt * 4 for s in sums), default=0))
    place("red", halves * batch * warps * 16 * rows * 4)
    place("squares", rows * warps * 4 if o.norm is not None and not o.packed else 0)
    place("inverse", rows * 4 if o.norm is not None else 0)
    kept = TILE_ROWS * max(b.most_tiles for b in bodies) if o.residual is not None else 0
    holds = -(-kept * rows // threads)
    if holds > 8:
        kept = holds = 0
    place("kept", 4 * kept * rows)
    place("next", 4 * kept if o.weigh else 0)
    place("riders", riders.most * rows * warps * 4 if riders else 0)
    place("bars", warps * stages * 8)
    place("turn", 4 if together and any(b.left and not b.cut for b in bodies) else 0)
    n_out, pieces = o.weights[0][1].shape[0], -(-kp // 4 // threads)
    early = all(b.tiling for b in bodies) if o.packed else rows == 1 and pieces <= HELD
    return {
        "T": rows, "nt": nt, "K": o.k, "KP": kp, "N": n_out, "warps": warps, "stages": stages,
        "resident": tuning.get("resident", 1), "bulk": tuning.get("bulk", 0), "ga": ga, "batch": batch,
        "halves": halves, "bodies": bodies, "grids": _static_grids(bodies),
        "blocks": blocks, "at": Places(**offsets, end=at), "riders": riders,
        "late": tuning.get("late", -1), "tickets": sum(b.left for b in bodies), "kept": kept, "holds": holds,
        "nexts": _nexts(o, warps, tuning), "swiglu_ahead": bool(o.ahead and o.ahead.swiglu),
        "ahead_bytes": tuning.get("ahead", 0) << 10, "stamps": tuning.get("stamps", 0),
        "together": together, "square_pieces": -(-(align_up(o.k, ga) // ga) // 32),
        "apart": apart, "x_stride": x_stride,
        "early": min(tuning.get("early", 0), stages) if early else 0, "copied": copied, "tall": tall,
        "pieces": pieces, "packed_pieces": -(-kp // 16 // threads),
        "packed": o.packed, "x": "a0", "x_scale": "a1", "x_codes": align_up(o.k, ga),
        "norm": "" if o.norm is None else f"a{o.norm}", "eps": o.eps, "offset": o.offset,
        "residual": "" if o.residual is None else f"a{o.residual}",
        "swiglu": o.swiglu, "quant": o.quant, **weighing(o), "parameters": parameter_names(o, types),
    }  # fmt: skip


def _most_fills(b: Body, warps: int, tall: int) -> int:
    """Of a warp's ring: more stages would be room that the next kernel could have."""
    return ceil(ceil(b.chunks / warps) / b.span) * ceil(b.most_tiles / tall) if b.tiling else 0


HELD = 6  # vectors of 4 activations that a thread holds before the rest of the rings is asked for
STATIC_GRID = 32 << 10  # a kernel's static shared memory is 48 KiB


def _with_grid(b: Body, bodies: Sequence[Body], nbytes: int) -> Body:
    """Several grids share what the copies of one may take; of these alone, many copies are placed dynamically."""
    several = sum(o.tiling is not None and o.tiling.grid is not None for o in bodies)
    if several > 1:
        nbytes = min(nbytes, STATIC_GRID) // several
    b = evolve(b, grid_bytes=nbytes)
    return evolve(b, dynamic=b.tiling is not None and b.tiling.grid_bytes * b.copies > STATIC_GRID)


def _static_grids(bodies: Sequence[Body]) -> int:
    return sum(b.tiling.grid_bytes * b.copies for b in bodies if b.tiling and not b.dynamic)


def _nexts(o: Operands, warps: int, tuning: Tuning) -> tuple[Body, ...]:
    """The bodies of the next product, as this tuning would deal out its blocks."""
    if o.ahead is None or not tuning.get("ahead", 0):
        return ()
    plain = [i for i, t in o.ahead.weights if t.fmt and t.fmt.dtype]
    bodies = make_bodies(o.ahead, warps, 1, tuning["blocks"], o.ahead.packed or SLICE, tuning.get("split", 1), plain)
    return tuple(b for b in bodies if b.tiling)


def weighing(o: Operands) -> dict[str, Any]:
    """weigh, the next norm's weight, and where codes and scales go."""
    codes, scale = ("y1", "y2") if o.weigh else ("y0", "y1")
    next_norm = "" if o.next_norm is None else f"a{o.next_norm}"
    return {"weigh": o.weigh, "next_norm": next_norm, "y_codes": codes, "y_scale": scale}


def _cuts(op: Op, types: Types, env: Env, tuning: Tuning) -> int:
    """Bytes of the sums of cuts."""
    c = stream(op, types, env, tuning)
    return sum(b.left * b.parts * b.unit_tiles * TILE_ROWS * c["T"] * 4 for b in c["bodies"])


def rows_of(o: Operands, env: Env) -> int:
    first = o.x.shape[0]
    return first if isinstance(first, int) else env[first]


def num_inputs_of(o: Operands) -> int:
    weights = (*o.weights, *(o.ahead.weights if o.ahead else ()))
    return max([i for i, _ in weights] + [o.residual or 0, o.next_norm or 0]) + 1


def parameter_names(o: Operands, types: Types) -> str:
    """C parameters: inputs, then outputs."""
    num_inputs = num_inputs_of(o)
    names = [f"const {'u8' if t.fmt or t.dtype.bits == 8 else 'f32'}* a{i}" for i, t in enumerate(types[:num_inputs])]
    if o.quant:
        return ", ".join([*names, "u8* y0", "f32* y1"])
    if o.weigh:
        return ", ".join([*names, "f32* y0", "u8* y1", "f32* y2", "f32* y3"])
    return ", ".join([*names, *(f"f32* y{i}" for i in range(1 if o.swiglu else len(o.weights)))])


def exact(op: Op, types: Types, env: Env, tuning: Tuning) -> dict[str, Any]:
    o = operands(op, types)
    rows, warps = rows_of(o, env), tuning["warps"]
    bodies, at = [], 0
    for b in make_bodies(o, warps, 1, 1, SLICE):
        n = b.tiles // (2 if o.swiglu else 1)
        bodies.append(evolve(b, first_block=at, blocks=n))
        at += n
    return {
        "TB": min(rows, 8), "T": rows, "K": o.k, "warps": warps, "bodies": tuple(bodies), "blocks": at, "x": "a0",
        "swiglu": o.swiglu, "residual": "" if o.residual is None else f"a{o.residual}",
        "parameters": parameter_names(o, types),
    }  # fmt: skip


def _exact_geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c = exact(op, types, env, tuning)
    return Geometry((c["blocks"], -(-c["T"] // c["TB"]), 1), 32 * tuning["warps"])


def stream_geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c = stream(op, types, env, tuning)
    return Geometry((c["blocks"], 1, 1), 32 * c["warps"], c["at"].end)


def _quantize_threads(k: int) -> int:
    return min(1024, max(32, align_up(-(-k // 4), 32)))


def _quantize_context(op: Op, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    assert isinstance(op, QuantizeRows | RmsNormQuant)
    k = types[0].shape[1]
    assert isinstance(k, int)
    threads, padded = _quantize_threads(k), align_up(k, op.group)
    return {"K": k, "group": op.group, "norm": isinstance(op, RmsNormQuant), "threads": threads, "padded": padded,
            "pieces": -(-padded // 4 // threads)}  # fmt: skip


def _quantize_geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    k = types[0].shape[1]
    assert isinstance(k, int)
    return Geometry((types[0].concrete(env)[0], 1, 1), _quantize_threads(k))


# Prompts: weights as bf16 in the workspace, once per chunk, then a library's product.


@frozen
class GemmPlaces:
    """Byte offsets in the workspace."""

    weights: int
    x: int
    product: int
    end: int


def gemm(op: Op, types: Types, env: Env, tuning: Tuning) -> dict[str, Any]:
    """For the kernels around a product of bf16 matrices, and for a library's product (a, b, c and their offsets).

    tuning of our own product, which needs no unpacked weights: warps (of 32 weight rows), columns (rows of x).
    """
    o = operands(op, types)
    rows, total = rows_of(o, env), sum(height(t) for _, t in o.weights)
    single = o.weights[0][1].fmt
    stored = len(o.weights) == 1 and single is not None and single.name == "bf16"
    direct = len(o.weights) == 1 and o.residual is None and not o.swiglu
    x_at = 0 if stored or "warps" in tuning else align_up(2 * total * o.k, 256)
    product_at = x_at + align_up(2 * rows * o.k, 256)
    end = product_at + (0 if direct else align_up(2 * rows * total, 256))
    bodies = bodies_of(o)
    items = sum(-(-w.n // TILE_ROWS) * (b.chunks if b.tiling else -(-o.k // 256)) for b in bodies for w in b.weights)
    first = o.x.shape[0]
    workspace = num_inputs_of(o) + (4 if o.weigh else 2 if o.quant else 1 if o.swiglu else len(o.weights))
    return {
        "T": rows, "K": o.k, "N": height(o.weights[0][1]), "NS": total, "bodies": bodies, "items": items,
        "at": GemmPlaces(0, x_at, product_at, end), "packed": o.packed, "x": "a0", "x_scale": "a1",
        "x_codes": align_up(o.k, o.packed or 1), "norm": "" if o.norm is None else f"a{o.norm}", "eps": o.eps,
        "offset": o.offset, "swiglu": o.swiglu, "quant": o.quant, **weighing(o),
        "residual": "" if o.residual is None else f"a{o.residual}", "parameters": parameter_names(o, types),
        "m": rows, "n": total, "k": o.k, "a": workspace, "a_offset": x_at,
        "b": o.weights[0][0] if stored else workspace, "b_offset": 0,
        "c": num_inputs_of(o) if direct else workspace, "c_offset": 0 if direct else product_at,
        "out": "f32" if direct else "bf16",
        "rows_field": "logit_rows" if first is L else "seqs" if first is B else "rows",
        "direct": direct, "stored": stored, "int8": False, "KS": -(-o.k // SLICE),
    }  # fmt: skip


def _dequantise_geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((-(-gemm(op, types, env, tuning)["items"] // 8), 1, 1), 256)


def _convert_geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((gemm(op, types, env, tuning)["T"], 1, 1), 256)


def finish_geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c = gemm(op, types, env, tuning)
    return Geometry((-(-(c["N"] if c["swiglu"] else c["NS"]) // 1024), c["T"], 1), 256)


def _mma_geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    o, step = operands(op, types), 32 * tuning["warps"]
    blocks = sum(-(-height(t) // step) for _, t in o.weights)
    slabs = 3 * tuning["columns"] * 160
    return Geometry((blocks, -(-rows_of(o, env) // tuning["columns"]), 1), step, slabs)


def _gemm_workspace(op: Op, types: Types, env: Env, tuning: Tuning) -> int:
    end = gemm(op, types, env, tuning)["at"].end
    assert isinstance(end, int)
    return end


# What routes accept.


def _wide_loads(op: Op, types: Types) -> str | None:
    o = operands(op, types)
    if o.k % 8:
        return f"rows of {o.k} values do not begin at multiples of 16 bytes"
    group = o.quant or o.weigh
    if group and (height(o.weights[0][1]) % group or group not in (32, 64, 128)):
        return f"{height(o.weights[0][1])} outputs are not whole groups of {group}"
    return None


def _least(op: Op, types: Types, rows: int, tuning: Tuning) -> dict[str, Any]:
    """The context with the smallest ring of weights. Asked for several times by the conditions of one route."""
    return _least_of(op, types, rows, tuple(tuning.items()))


@cache
def _least_of(op: Op, types: Types, rows: int, tuning: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    return _stream(op, types, Env(rows=rows, logit_rows=rows, seqs=rows), dict(tuning), 2)


def _needs(op: Op, types: Types, rows: int, tuning: Tuning) -> int:
    """Bytes of shared memory for the activations of `rows` rows and the smallest ring of weights."""
    context = _least(op, types, rows, tuning)
    need = context["at"].end + context["grids"]
    assert isinstance(need, int)
    return need


def _fits(rows: int, limit: int) -> Callable[[Op, Types, Tuning], bool]:
    """Whether shared memory holds what a tuning needs."""

    def fits(op: Op, types: Types, tuning: Tuning) -> bool:
        context = _least(op, types, rows, tuning)
        if (tuning.get("apart") and context["apart"] is None) or context["batch"] % context["tall"]:
            return False
        return bool(context["at"].end + context["grids"] <= limit << 10)

    return fits


def _some_fit(rows: int, limit: int, tunings: tuple[Tuning, ...]) -> Callable[[Op, Types], str | None]:
    def refuse(op: Op, types: Types) -> str | None:
        reason = _wide_loads(op, types)
        if reason is not None:
            return reason
        need = min(_needs(op, types, rows, t) for t in tunings)
        return None if need <= limit << 10 else f"{rows} rows need {need} bytes of shared memory, of {limit << 10}"

    return refuse


def _some_are(
    wanted: Callable[[QuantFormat], bool], rows: int, limit: int, tunings: tuple[Tuning, ...]
) -> Callable[[Op, Types], str | None]:
    fit = _some_fit(rows, limit, tunings)

    def refuse(op: Op, types: Types) -> str | None:
        if not any(t.fmt is not None and wanted(t.fmt) for _, t in operands(op, types).weights):
            return "is for weights in other formats"
        return fit(op, types)

    return refuse


def _even(rows: int, limit: int) -> Callable[[Op, Types, Tuning], bool]:
    """Where instructions are the bound, all warps of a block should have as much to do: those that no number of warps
    divides well are left to the fewest."""
    fits = _fits(rows, limit)

    def accept(op: Op, types: Types, tuning: Tuning) -> bool:
        chunks, warps = _least(op, types, rows, tuning)["bodies"][0].chunks, tuning["warps"]
        return fits(op, types, tuning) and (warps == 8 or chunks / warps > 0.88 * -(-chunks // warps))

    return accept


def _with_finish(direct: bool, stored: bool) -> Callable[[Op, Types], str | None]:
    def refuse(op: Op, types: Types) -> str | None:
        reason = _wide_loads(op, types)
        if reason is not None:
            return reason
        c = gemm(op, types, Env(1, 1, 1), {})
        if not direct and any(height(t) % 4 for _, t in operands(op, types).weights):
            return "needs numbers of outputs that are multiples of 4"
        return None if (c["direct"], c["stored"]) == (direct, stored) else "is for other operands"

    return refuse


RTOL = 0.03  # int8 activations in groups of 64: 0.6 % of a product, twice that through SwiGLU, which multiplies two
RTOL_BF16 = 0.015

OPS: tuple[type[Op], ...] = (Linear, LinearAdd, LinearSwiglu, FusedLinear)
WIDTHS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32))


def _stream_route(
    op: type[Op], low: int, high: int, name: str, need: str, limit: int, tunings: tuple[Tuning, ...]
) -> Route[Any]:
    return Route(
        name=f"{snake(op.__name__)}.{name}.{high}", op=op, device="cuda", template="cuda/linear_stream.cu.j2",
        geometry=stream_geometry, context=stream, widths=(low, high), needs=(need,),
        refuse=_some_fit(high, limit, tunings), tunings=tunings, fits=_fits(high, limit), rtol=RTOL, workspace=_cuts,
    )  # fmt: skip


def _e4m3_rows(fmt: QuantFormat) -> bool:
    layout = layout_of(fmt)
    return layout.code == "e4m3" and layout.group == 0


def _own_routes(op: type[Op], low: int, high: int, units: int) -> tuple[Route[Any], ...]:
    """Of formats whose bytes are not their bound alone. Look-ups want many warps, and a copy of the grid for each lane,
    so that none meet in a bank; rows of e4m3 much in flight."""
    common = {"split": 8, "late": 2, "bulk": 1, **({"apart": 1} if high <= 8 else {})}
    one, two = {"blocks": units, "resident": 1}, {"blocks": 2 * units, "resident": 2, "limit": 112}
    grid: list[Tuning] = [{"warps": w, "stages": 3, "grid": 64, **one, **common} for w in (20, 17, 24, 12, 10, 8)]
    grid += [{"warps": w, "stages": 2, "span": 2, "grid": 64, **one, **common} for w in (17, 12, 10)]
    grid += [{"warps": w, "stages": 2, "span": 2, "grid": 32, **two, "limit": 113, **common} for w in (10, 12)]
    grid += [{"warps": w, "stages": 2, "grid": 64, **two, **common} for w in (10, 8)]
    grid += [{"warps": w, "stages": 3, "grid": 32, **two, **common} for w in (10, 12, 9, 8)]
    floats: list[Tuning] = [{"warps": w, "stages": 2, **one, **common} for w in (20, 17, 12, 10, 8)]
    floats += [{"warps": w, "stages": 3, **two, **common} for w in (10, 12, 9, 8)]
    floats += [{"warps": w, "stages": 4, **one, **common} for w in (10, 12, 8)]
    copied: list[Tuning] = [
        {"warps": w, "stages": 2, "grid": 32, **one, **common, "bulk": 0, "limit": 99} for w in (10, 12, 8)
    ]
    kinds: tuple[tuple[str, str, int, Callable[[QuantFormat], bool], list[Tuning]], ...] = (
        ("grid", "sm90a", 227, lambda f: f.is_grid, grid),
        ("lookup", "sm80", 99, lambda f: f.is_grid, copied),
        ("float8", "sm90a", 227, _e4m3_rows, floats),
    )
    found = []
    for name, need, limit, wanted, tunings in kinds:
        route = _stream_route(op, low, high, name, need, limit, tuple(tunings))
        refuse = _some_are(wanted, high, limit, tuple(tunings))
        found.append(evolve(route, refuse=refuse, fits=_even(high, limit)))
    return tuple(found)


def _gemm_route(op: type[Op], direct: bool, stored: bool) -> Route[Any]:
    product = Stage[Op](library="gemm_bf16")
    convert = Stage[Op](template="cuda/gemm_convert.cu.j2", geometry=_convert_geometry)
    finish = Stage[Op](template="cuda/gemm_finish.cu.j2", geometry=finish_geometry)
    first = (
        ("cuda/gemm_convert.cu.j2", _convert_geometry)
        if stored
        else ("cuda/gemm_dequantise.cu.j2", _dequantise_geometry)
    )
    then = ((), (convert,))[not stored] + (product,) + ((), (finish,))[not direct]
    kind = "".join(("-stored" if stored else "", "-direct" if direct else ""))
    return Route(
        name=f"{snake(op.__name__)}.gemm{kind}", op=op, device="cuda", template=first[0], geometry=first[1], then=then,
        context=gemm, workspace=_gemm_workspace, widths=(33, 1 << 30), refuse=_with_finish(direct, stored),
        rtol=RTOL_BF16 if op is not FusedLinear else RTOL, sim=False,
    )  # fmt: skip


def _mma_route(op: type[Op], direct: bool) -> Route[Any]:
    then = [Stage[Op](template="cuda/gemm_mma.cu.j2", geometry=_mma_geometry)]
    if not direct:
        then.append(Stage[Op](template="cuda/gemm_finish.cu.j2", geometry=finish_geometry))

    def refuse(op: Op, types: Types) -> str | None:
        reasons = [_with_finish(direct, stored)(op, types) for stored in (False, True)]
        return None if None in reasons else reasons[0]

    return Route(
        name=f"{snake(op.__name__)}.mma{'-direct' if direct else ''}", op=op, device="cuda",
        template="cuda/gemm_convert.cu.j2", geometry=_convert_geometry, then=tuple(then), context=gemm,
        workspace=_gemm_workspace, widths=(3, 1 << 30), needs=("sm80",), refuse=refuse,
        tunings=({"warps": 4, "columns": 64}, {"warps": 4, "columns": 128}, {"warps": 4, "columns": 16},
                 {"warps": 4, "columns": 32}),
        rtol=RTOL_BF16 if op is not FusedLinear else RTOL,
    )  # fmt: skip


def _exact_route(op: type[Op]) -> Route[Any]:
    return Route(
        name=f"{snake(op.__name__)}.exact", op=op, device="cuda", template="cuda/linear_exact.cu.j2",
        geometry=_exact_geometry, context=exact, tunings=({"warps": 4}, {"warps": 8}),
        numerics="cuda.linear.f32",
    )  # fmt: skip


def _tunings(rows: int, plain: Sequence[Tuning], some: Sequence[Tuning]) -> tuple[Tuning, ...]:
    """Parts of K apart pay where instructions are the bound: by default from 3 rows on, up to 8. For one row or two the
    accumulator's chain of products can be the bound: `some` are tried."""
    if rows > 8:
        return tuple(plain)
    if rows > 2:
        return (*({**t, "apart": 1} for t in plain), *plain[:3])
    return (*plain, *({**t, "apart": 1} for t in some))


def routes(units: int) -> tuple[Route[Any], ...]:
    """All of them, with grids for a GPU of so many multiprocessors."""
    whole, half, third = {"blocks": units}, {"blocks": 2 * units, "limit": 112}, {"blocks": 3 * units, "limit": 74}
    bulk = [
        {"warps": w, "stages": s, "bulk": 1, "resident": r, **more}
        for w, s, r, more in (
            (10, 4, 2, whole),
            (8, 5, 2, whole),
            (10, 4, 2, {**whole, "late": 2, "split": 8}),
            (10, 4, 2, {**whole, "late": 2}),
            (8, 4, 2, half),
            (8, 4, 2, {**half, "late": 1, "split": 8}),
            (8, 3, 3, {**third, "split": 4}),
        )
    ]
    # found in the whole step of one row: few warps and little memory, so that the next kernel's blocks fit beside them,
    # or two tiles at a time
    wide: Tuning = {"warps": 16, "stages": 2, "blocks": units, "bulk": 1, "limit": 72, "resident": 1}
    beside: tuple[Tuning, ...] = (
        {"warps": 4, "stages": 6, "blocks": 5 * units, "bulk": 1, "limit": 30, "resident": 4},
        {"warps": 6, "stages": 8, "blocks": 2 * units, "bulk": 1, "limit": 60, "late": 0, "span": 2, "resident": 2},
        {"warps": 6, "stages": 8, "blocks": 2 * units, "bulk": 1, "limit": 60, "late": 0, "span": 2, "resident": 2,
         "early": 1},
        {"warps": 8, "stages": 4, "blocks": 2 * units, "bulk": 1, "limit": 54, "resident": 2},
        {"warps": 8, "stages": 4, "blocks": units, "bulk": 1, "limit": 90, "resident": 1},
        wide,
        {"warps": 10, "stages": 4, "blocks": units, "bulk": 1, "resident": 2, "late": 2, "early": 2},
        {"warps": 20, "stages": 3, "blocks": units, "bulk": 1, "limit": 72, "resident": 1},
        {"warps": 14, "stages": 4, "blocks": units, "bulk": 0, "limit": 150, "late": 1, "split": 8, "apart": 1,
         "span": 2, "resident": 1},
        {"warps": 8, "stages": 8, "blocks": 2 * units, "bulk": 1, "limit": 80, "late": 0, "resident": 2, "early": 1,
         "apart": 1, "tall": 2},
    )  # fmt: skip
    # a block for a part of K of each group of outputs
    part: Tuning = {"bulk": 1, "split": 8, "apart": 1}
    cuts: tuple[Tuning, ...] = (
        {"warps": 4, "stages": 4, "blocks": 4 * units, "limit": 56, "late": 0, "resident": 4, **part},
        {"warps": 8, "stages": 4, "blocks": 2 * units, "limit": 112, "late": 0, "resident": 2, **part},
        {"warps": 3, "stages": 5, "blocks": 5 * units, "limit": 44, "resident": 4, **part, "split": 2},
        {"warps": 17, "stages": 3, "blocks": units, "resident": 1, **part, "split": 4, "groups": 5},
        {"warps": 8, "stages": 4, "blocks": 2 * units, "limit": 112, "resident": 2, **part, "split": 3, "groups": 2},
    )
    # of rows so many that no block has room for all of their columns
    parts_of_many: Tuning = {
        "warps": 8, "stages": 4, "blocks": 4 * units, "bulk": 1, "split": 8, "late": 0, "resident": 1
    }  # fmt: skip
    # two tiles at a time; codes copied as they lie; or both
    pairs: tuple[Tuning, ...] = (
        {"warps": 10, "stages": 4, "bulk": 1, "resident": 2, "apart": 1, "tall": 2, **whole},
        {"warps": 8, "stages": 4, "bulk": 1, "resident": 2, "apart": 1, "tall": 2, **half},
        {"warps": 8, "stages": 3, "bulk": 1, "resident": 2, "apart": 1, "copied": 1, **half, "limit": 60},
        {**cuts[0], "copied": 1, "tall": 2},
    )
    small = {"warps": 8, "stages": 3, "blocks": 2 * units, "bulk": 0, "resident": 2, "limit": 48}
    large = {"warps": 8, "stages": 4, "blocks": units, "bulk": 0, "resident": 1, "limit": 99}
    copies = [small, large, {**small, "late": 1, "split": 8}]
    found: list[Route[Any]] = []
    for op in OPS:
        for low, high in WIDTHS:
            found += _own_routes(op, low, high, units)
        for low, high in WIDTHS:
            tunings = _tunings(high, bulk, bulk[2:6])
            if op is FusedLinear and high == 1:
                tunings += beside
            if op is Linear and high == 1:
                tunings += (wide,)
            if op is FusedLinear and 2 <= high <= 8:
                tunings += cuts
                tunings += pairs
            if op is FusedLinear and high == 16:
                tunings += (parts_of_many,)
            found.append(_stream_route(op, low, high, "bulk", "sm90a", 227, tunings))
        for low, high in WIDTHS:
            tunings = _tunings(high, copies, copies[2:])
            found.append(_stream_route(op, low, high, "stream", "sm80", 99, tunings))
        found += [_gemm_route(op, direct, stored) for direct in (False, True) for stored in (False, True)]
        found += [_mma_route(op, direct) for direct in (False, True)]
        if op is not FusedLinear:
            found.append(_exact_route(op))
    found += [
        Route(name=f"{snake(op.__name__)}.cuda", op=op, device="cuda", template="cuda/quantize.cu.j2",
              geometry=_quantize_geometry, context=_quantize_context, numerics="cuda.quantize", rtol=RTOL)
        for op in (QuantizeRows, RmsNormQuant)
    ]  # fmt: skip
    return tuple(found)


ROUTES: tuple[Route[Any], ...] = routes(132)
