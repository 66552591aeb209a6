"""Norms with their products in decode steps of a GPU, all weights of a block asked for at once: of a join of branches,
and of a row where there are few weights, as before a choice of experts."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen

from ninfer.formats.quant import QuantFormat, align_up
from ninfer.ir.op import snake
from ninfer.ir.ops.join import JoinNorms
from ninfer.ir.ops.join_linear import JoinLinear
from ninfer.ir.ops.packed_act import FusedLinear
from ninfer.ir.types import Env, TensorType, Types
from ninfer.routes.cuda_layout import TILE_ROWS, layout_of
from ninfer.routes.expert_launches import GA, even
from ninfer.routes.experts_cuda import Body, stack_body
from ninfer.routes.linear_cuda import RTOL, SHARED_80, SHARED_90, operands
from ninfer.routes.render import c_float
from ninfer.routes.route import Geometry, Route, Tuning

MOST_ROWS = 8  # of an accumulator
MOST_ITEMS = 8  # tiles of a block
FEW_ITEMS = 2  # where streams of weights would be short
MOST_COLUMNS = 8192


@frozen
class Matrix:
    """arg, out: C names; norm: index of the one it reads. first: of all tiles; most: rows of a block, of plain ones;
    vectors: loads of `each` values, of a thread."""

    arg: str
    out: str
    n: int
    norm: int
    fmt: QuantFormat
    body: Body
    first: int = 0
    codes: int = 0
    scales: int = 0
    most: int = 0
    each: int = 0
    vectors: int = 0
    nbytes: int = 0
    values: int = 0
    parts: int = 0

    @property
    def tiles(self) -> int:
        return -(-self.n // TILE_ROWS)

    @property
    def dtype(self) -> str:
        return self.body.dtype


@frozen
class Norm:
    """out: C name where it is a result; offsets of its codes, their scales, and its values in shared memory."""

    out: str
    codes: int | None
    scales: int | None
    values: int | None


@frozen
class Places:
    """Byte offsets in shared memory, which begins with the rings."""

    parts: int
    bars: int
    end: int


def _size(t: TensorType, axis: int) -> int:
    n = t.shape[axis]
    assert isinstance(n, int)
    return n


@frozen
class Shape:
    """What stands before the products. join None: nothing but a norm of x. matrices: index of the first."""

    join: JoinNorms | None
    eps: float
    offset: float
    counts: tuple[int, ...]
    matrices: int

    @property
    def inputs(self) -> list[str]:
        """C names, but for the matrices."""
        names = ["x"]
        if self.join is not None:
            two, scaled = self.join.two, self.join.scaled
            names += ["a", "w", *(("b", "v", "outer") if two else ()), *(("factor",) if scaled else ())]
        return names + [f"u{i}" for i in range(len(self.counts))]


def _shape(op: JoinLinear | FusedLinear, types: Types) -> Shape:
    if isinstance(op, JoinLinear):
        return Shape(op.join, op.join.eps, op.join.offset, op.counts, op.num_join)
    return Shape(None, op.eps, op.offset, (len(operands(op, types).weights),), 2)


def _matrices(shape: Shape, types: Types) -> list[Matrix]:
    found, at, out = list[Matrix](), shape.matrices, 1
    for norm, count in enumerate(shape.counts):
        for i in range(count):
            t = types[at + i]
            assert t.fmt is not None
            found.append(Matrix(f"m{at + i}", f"y{out + i}", _size(t, 0), norm, t.fmt, stack_body(t)))
        at, out = at + count, out + max(count, 1)
    return found


def _context(op: JoinLinear | FusedLinear, types: Types, env: Env, tuning: Tuning) -> dict[str, Any]:
    shape = _shape(op, types)
    rows, k, blocks = env.rows, _size(types[0], 1), tuning["blocks"]
    matrices = _matrices(shape, types)
    tiled, plain = ([m for m in matrices if (m.body.tiling is not None) == kind] for kind in (True, False))
    bodies = list({m.body.prefix: m.body for m in tiled}.values())
    warps = even(max((b.chunks for b in bodies), default=-(-k // 512)), tuning["warps"])
    threads, kp = 32 * warps, max((_columns(b) for b in bodies), default=k)
    items = -(-sum(m.tiles for m in tiled) // blocks)
    stage_bytes = max((-(-b.chunks // warps) * _tile_bytes(b) for b in bodies), default=0)
    x_stride, at = align_up(kp, 128) + 64, warps * items * stage_bytes

    def place(nbytes: int) -> int:
        nonlocal at
        start = align_up(at, 128)
        at = start + nbytes
        return start

    norms, out = list[Norm](), 1
    for i, count in enumerate(shape.counts):
        coded, read = any(m.norm == i for m in tiled), any(m.norm == i for m in plain)
        codes, scales = (place(rows * x_stride), place(kp // GA * 32)) if coded else (None, None)
        norms.append(Norm("" if count else f"y{out}", codes, scales, place(4 * rows * k) if read else None))
        out += max(count, 1)
    first, laid = 0, list[Matrix]()
    for m in tiled:
        laid.append(evolve(m, first=first, codes=norms[m.norm].codes or 0, scales=norms[m.norm].scales or 0))
        first += m.tiles
    rowed = []
    for m in plain:
        nbytes = m.fmt.dtype.nbytes if m.fmt.dtype else 0
        each, most = 16 // nbytes, -(-m.n // blocks)
        m = evolve(m, each=each, most=most, nbytes=nbytes, vectors=-(-k // (each * threads)))
        rowed.append(evolve(m, values=norms[m.norm].values or 0, parts=place(4 * most * rows * warps)))
    parts = place(4 * items * warps * rows * TILE_ROWS)
    bars = place(8 * warps * items)
    inputs = shape.inputs
    names = [f"const f32* {n}" for n in inputs] + [f"const u8* {m.arg}" for m in matrices]
    return {
        "T": rows, "K": k, "KP": kp, "warps": warps, "threads": threads, "pieces": -(-kp // (4 * threads)), "ga": GA,
        "blocks": blocks, "items": items, "stage_bytes": stage_bytes, "x_stride": x_stride, "bulk": tuning["bulk"],
        "early": min(items, tuning.get("early", items)),
        "bodies": bodies, "tiled": laid, "plain": rowed, "norms": norms, "join": shape.join, "eps": shape.eps,
        "vectors": [n for n in inputs if n not in ("x", "a", "b", "factor")],
        "plus": f" + {c_float(shape.offset)}" if shape.offset else "", "at": Places(parts, bars, at),
        "parameters": ", ".join([*names, *(["f32* y"] if shape.join else []), *(f"f32* y{i}" for i in range(1, out))]),
    }  # fmt: skip


def _columns(b: Body) -> int:
    assert b.tiling is not None
    return b.chunks * b.tiling.columns


def _tile_bytes(b: Body) -> int:
    assert b.tiling is not None
    return b.tiling.tile_bytes


def _refuse(op: JoinLinear | FusedLinear, types: Types) -> str | None:
    k, matrices = _size(types[0], 1), _matrices(_shape(op, types), types)
    if k % 8 or k > MOST_COLUMNS:
        return f"takes rows of up to {MOST_COLUMNS} values, whole vectors of 8, not of {k}"
    for m in matrices:
        if layout_of(m.fmt).m_kind:
            return f"takes formats without minima, not {m.fmt.name}"
    return None


def _fits(op: JoinLinear | FusedLinear, types: Types, tuning: Tuning) -> bool:
    """Whether a block's tiles of all its turns fit shared memory, at a few rows as at one."""
    c = _context(op, types, Env(MOST_ROWS, 1, 1), tuning)
    few = all(m.most * m.vectors <= 6 for m in c["plain"]) and c["items"] <= MOST_ITEMS
    end: int = c["at"].end
    return few and end <= (SHARED_90 if tuning["bulk"] else SHARED_80) - 1024


def _refuse_norm(op: FusedLinear, types: Types) -> str | None:
    if not op.norm or op.packed or op.epilogue != "none" or op.ahead_weights:
        return "takes a norm and its products"
    kinds = {t.fmt.is_plain for t in types if t.fmt is not None}
    return _refuse(op, types) if True in kinds else "takes plain matrices, and tiled ones beside them"


def _fits_norm(op: FusedLinear, types: Types, tuning: Tuning) -> bool:
    c = _context(op, types, Env(MOST_ROWS, 1, 1), tuning)
    return c["items"] <= FEW_ITEMS and _fits(op, types, tuning)


def _geometry(op: JoinLinear | FusedLinear, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c = _context(op, types, env, tuning)
    return Geometry((tuning["blocks"], 1, 1), c["threads"], c["at"].end)


def routes(units: int) -> tuple[Route[Any], ...]:
    """tuning: blocks; warps of a block at most; bulk: 1: sm_90's copy engine; early: tiles that are asked for before
    the wait, the others once a block has asked for the rows, which else come behind them; absent: all."""
    return tuple(
        Route(
            name=f"{snake(op.__name__)}.held_{'bulk' if bulk else 'copy'}",
            op=op,
            device="cuda",
            template="cuda/join_linear.cu.j2",
            geometry=_geometry,
            context=_context,
            widths=(1, MOST_ROWS),
            needs=("sm90a",) if bulk else ("sm80",),
            refuse=refuse,
            tunings=(
                *({"bulk": bulk, "blocks": n * units, "warps": w} for n, w in ((1, 12), (2, 8), (1, 8), (2, 12))),
                *({"bulk": bulk, "blocks": units, "warps": 12, "early": n} for n in (1, 2)),
            ),
            fits=fits,
            rtol=RTOL,
        )
        for op, refuse, fits in ((JoinLinear, _refuse, _fits), (FusedLinear, _refuse_norm, _fits_norm))
        for bulk in (1, 0)
    )
