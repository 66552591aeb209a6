"""Matrix products on a CPU.

Formats with codes meet activations of 16 bits per value (one scale for every 32): group sums are exact integers, so
that the kernel for few rows and the one for many give equal bits. Everything else is decoded to float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from ninfer.formats.bits import Bits, Offset, Plane, Signed, Table
from ninfer.formats.quant import FloatFormat, QuantFormat
from ninfer.ir.ops.linear import Linear, LinearAdd, LinearSwiglu
from ninfer.ir.types import Dim, Env, Sym, Types
from ninfer.routes.grids_cpu import GRIDS, grid_source
from ninfer.routes.route import Geometry, Route, Stage, Tuning
from ninfer.routes.work_cpu import by_elements

Product: TypeAlias = Linear | LinearAdd | LinearSwiglu

PANEL = 16  # weight rows whose codes are laid out together
GROUP_BYTES = 32  # act_group
CHUNK_BYTES = 64 << 10  # of weights, about, in a chunk of a memory-bound launch
CHUNK_MACS = 1 << 21  # in a chunk of a compute-bound one


def _weights(op: Product, types: Types) -> list[tuple[int, int]]:
    """(index of the weight among the arguments, index of its output), both as kernel arguments."""
    match op:
        case Linear():
            count = sum(t.fmt is not None for t in types)
            return [(1 + i, 1 + count + i) for i in range(1, count + 1)]
        case LinearAdd():
            return [(2, 4)]
        case LinearSwiglu():
            return [(2, 4), (3, 4)]


def _int(d: Dim) -> int:
    assert isinstance(d, int)
    return d


def _fast_plane(p: Plane) -> bool:
    """Whether codes.h.j2 has a vector form for runs of 32 of it."""
    if p.hop or (p.step is not None and p.step != p.bits):
        return False
    if p.bits == 8:
        return p.span == 1
    return (p.span >= 32 and p.span % 32 == 0) or (p.bits, p.span) in ((4, 16), (4, 8), (4, 1), (2, 1), (1, 1))


def codes(fmt: QuantFormat, n: int, k: int) -> dict[str, Any]:
    """The variables of codes.h.j2 and decode.h.j2. The prefix p is unique in a translation unit."""
    common: dict[str, Any] = {"fmt": fmt, "n": n, "k": k, "p": f"{fmt.name}_{n}x{k}"}
    if fmt.is_plain:
        return {**common, "kind": "dense"}
    if isinstance(fmt, FloatFormat):
        return {**common, "kind": "float"}
    if fmt.is_grid:
        return {**common, "kind": "grid", "grid_source": grid_source(fmt)}
    assert fmt.code is not None and fmt.d is not None
    kind, zero, signed, table = "scalar", 0, True, [0] * 16
    map = fmt.code.map
    if isinstance(map, Offset):
        zero, signed = map.zero, False
    if isinstance(fmt.code, Bits) and all(_fast_plane(p) for p in fmt.code.planes):
        match map:
            case Offset():
                kind = "plain"
            case Signed(bits=8):
                kind = "bytes"
            case Signed():
                kind, zero, signed = "flip", 1 << (map.bits - 1), False
            case Table():
                kind, table = "table", [v & 0xFF for v in (*map.values, *[0] * (16 - len(map.values)))]
    pair = ""
    if kind in ("plain", "flip") and isinstance(fmt.code, Bits) and len(fmt.code.planes) == 1 and fmt.group >= 32:
        plane = fmt.code.planes[0]
        pair = {(4, 16): "halves", (4, 1): "parity"}.get((plane.bits, plane.span), "")
    fast = ""  # scales that are f16 of their own, read four bytes at a time
    fields = [f.name for f in fmt.record.fields]
    at = fmt.record.offset(fmt.d.field)
    if (
        fmt.d.kind == "f16"
        and fmt.d.sub is None
        and fmt.block == fmt.group
        and not fmt.split
        and at + 4 <= fmt.block_bytes
    ):
        if fmt.m is None:
            fast = "single"
        elif fmt.m.sub is None and not fmt.m.negate and fields.index(fmt.m.field) == fields.index(fmt.d.field) + 1:
            fast = "pair"
    return {**common, "kind": kind, "zero": zero, "signed": signed, "table": table, "fast_scale": fast, "pair": pair}


def groups_offset(k: int) -> Any:
    """C expression of where the groups begin behind q in the workspace, for a row dimension."""
    row_bytes = -(-k // 32) * 64
    names = {Sym.T: "hdr->rows", Sym.L: "hdr->logit_rows", Sym.B: "hdr->seqs"}
    return lambda d: f"(u64)({names[d] if isinstance(d, Sym) else d}) * {row_bytes}"


def _context(op: Product, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    k = _int(types[0].shape[1])
    swiglu = isinstance(op, LinearSwiglu)
    panel_rows = PANEL // 2 if swiglu else PANEL
    weights: list[dict[str, Any]] = []
    units = panels = 0
    for arg, out in _weights(op, types):
        fmt, n = types[arg - 1].fmt, _int(types[arg - 1].shape[0])
        assert fmt is not None
        view = codes(fmt, n, k)
        flags = f"{_c(fmt.group == 16)}, {_c(view.get('zero', 0))}, {_c(fmt.m is not None)}"
        field = next((f for f in fmt.record.fields), None)
        row = fmt.blocks_per_row(k) * (field.nbytes if field is not None and fmt.split else fmt.block_bytes)
        weights.append(
            {"fmt": fmt, "n": n, "arg": arg, "out": out, "codes": view, "first_unit": units, "first_panel": panels,
             "panels": -(-n // panel_rows), "flags": flags, "next_panel": row * panel_rows, "next_row": row,
             "lines": -(-8 * row // (64 * -(-k // 32)))}
        )  # fmt: skip
        if not (swiglu and len(weights) == 2):
            units += -(-n // 8)
            panels += -(-n // panel_rows)
    return {
        "k": k,
        "weights": weights,
        "outputs": weights[:1] if swiglu else weights,
        "epilogue": "swiglu" if swiglu else "add" if isinstance(op, LinearAdd) else "store",
        "residual": 3,
        "pairs": sorted({w["codes"].get("pair", "") for w in weights} - {""}),
        "units": units,
        "panels": panels,
        "panel_rows": panel_rows,
        "fine": 2 if any(w["fmt"].group == 16 for w in weights) else 1,
        "groups_offset": groups_offset(k),
    }


def _c(x: object) -> str:
    return "true" if x else "false"


def _weight_bytes(op: Product, types: Types, env: Env) -> int:
    return sum(types[arg - 1].nbytes(env) for arg, _ in _weights(op, types))


def _macs(op: Product, types: Types, env: Env) -> int:
    rows, k = types[0].concrete(env)
    return rows * k * sum(_int(types[arg - 1].shape[0]) for arg, _ in _weights(op, types))


def _even(n: int, most: int) -> int:
    """An even count of chunks, at least two, so that two threads end together."""
    return min(most, max(2, n + n % 2))


def _by_bytes(op: Product, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c = _context(op, types, env, tuning)
    return Geometry((_even(_weight_bytes(op, types, env) // CHUNK_BYTES, c["units"]), 1, 1))


def _by_macs(op: Product, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c = _context(op, types, env, tuning)
    return Geometry((_even(_macs(op, types, env) // CHUNK_MACS, c["panels"]), 1, 1))


def _by_rows(op: Product, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return by_elements(types[0], env)


def _workspace(op: Product, types: Types, env: Env, tuning: Tuning) -> int:
    rows, k = types[0].concrete(env)
    return rows * -(-k // 32) * (64 + GROUP_BYTES)


def _not_codes(op: Product, types: Types) -> str | None:
    for arg, _ in _weights(op, types):
        fmt = types[arg - 1].fmt
        if fmt is None or fmt.code is None or fmt.block % 32:
            return f"multiplies integer codes; {fmt} has none"
    return None


def _no_grid(op: Product, types: Types) -> str | None:
    for arg, _ in _weights(op, types):
        fmt = types[arg - 1].fmt
        if fmt is None or (fmt.is_grid and fmt.name not in GRIDS):
            return f"has no decoder of {fmt}"
    return None


def _by_either(op: Product, types: Types, env: Env, tuning: Tuning) -> Geometry:
    c = _context(op, types, env, tuning)
    n = max(_weight_bytes(op, types, env) // CHUNK_BYTES, _macs(op, types, env) // CHUNK_MACS)
    return Geometry((_even(n, c["panels"]), 1, 1))


F32_TUNINGS = ({"gb": 8, "nt": 4, "tb": 256},)
ROW_TUNINGS = ({"nt": 4},)
TILE_TUNINGS = ({"gb": 32, "nt": 4, "tb": 256, "few": 32, "few_gb": 4},)
FEW = 4  # rows up to which the kernel that reads weights once for four rows is faster


def _rows_route(op: type[Any]) -> Route[Any]:
    return Route(
        name="linear.cpu.i16.rows",
        op=op,
        device="cpu",
        template="cpu/linear_rows.cpp.j2",
        widths=(1, FEW),
        refuse=_not_codes,
        tunings=ROW_TUNINGS,
        geometry=_by_bytes,
        context=_context,
        numerics="i16",
        rtol=1e-4,
    )


def _tiles_route(op: type[Any]) -> Route[Any]:
    return Route(
        name="linear.cpu.i16.tiles",
        op=op,
        device="cpu",
        template="cpu/act16.cpp.j2",
        widths=(FEW + 1, 1 << 30),
        refuse=_not_codes,
        tunings=TILE_TUNINGS,
        geometry=_by_rows,
        then=(Stage(template="cpu/linear_tiles.cpp.j2", geometry=_by_macs),),
        workspace=_workspace,
        context=_context,
        numerics="i16",
        rtol=1e-4,
    )


def _f32_route(op: type[Any]) -> Route[Any]:
    return Route(
        name="linear.cpu.f32",
        op=op,
        device="cpu",
        template="cpu/linear_f32.cpp.j2",
        refuse=_no_grid,
        tunings=F32_TUNINGS,
        geometry=_by_either,
        context=_context,
        numerics="f32",
    )


ROUTES: tuple[Route[Any], ...] = tuple(
    make(op) for op in (Linear, LinearAdd, LinearSwiglu) for make in (_rows_route, _tiles_route, _f32_route)
)
