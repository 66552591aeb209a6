"""Matrix products on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.devices.base import Geometry
from ninfer.formats.bits import Bits, Plane, Signed, Table
from ninfer.formats.bits import Offset as OffsetCode
from ninfer.formats.quant import QuantFormat
from ninfer.ir.op import Op
from ninfer.ir.ops.linear import Linear, LinearAdd, LinearSwiglu
from ninfer.ir.types import Env, TensorType, Types
from ninfer.routes.route import Route, Tuning

LANES = 16  # rows of scratch are padded to the widest vector


def extent(type: TensorType, axis: int) -> int:
    n = type.shape[axis]
    assert isinstance(n, int)
    return n


# What decode.h.j2 needs of a format.


def planes(fmt: QuantFormat) -> tuple[Plane, ...]:
    """The bit planes of its codes, where they are regular; the declaration's scalar decoder serves the others."""
    return fmt.code.planes if isinstance(fmt.code, Bits) else ()


def map_c(fmt: QuantFormat) -> str:
    """A C statement that turns the word u[i] into the code c[i], in place."""
    if not isinstance(fmt.code, Bits):
        return ""
    match fmt.code.map:
        case Signed(bits=8):
            return ""
        case Signed(bits=bits):
            sign = 1 << (bits - 1)
            return f"c[i] = (i8)((u[i] ^ {sign}) - {sign});"
        case OffsetCode(zero=0):
            return ""
        case OffsetCode(zero=zero):
            return f"c[i] = (i8)(u[i] - {zero});"
        case Table() as table:
            return f"c[i] = (i8)({table.c_expr('(u32)u[i]')});"


def first_plane(fmt: QuantFormat) -> Any:
    """Whether a plane is the one that writes a word first."""
    return lambda plane: plane is planes(fmt)[0]


def prefix(type: TensorType) -> str:
    assert type.fmt is not None
    return f"{type.fmt.name}_{type.shape[0]}x{type.shape[1]}"


DECODE: Mapping[str, Any] = {"planes": planes, "map_c": map_c, "first_plane": first_plane, "prefix": prefix}


def undecodable(*weights: TensorType) -> str | None:
    for w in weights:
        assert w.fmt is not None
        if w.fmt.is_grid:
            return f"{w.fmt.name} is a grid: no host decoder yet"
    return None


def _weights(op: Op, types: Types) -> Types:
    if isinstance(op, Linear):
        return tuple(t for t in types[1:] if t.fmt is not None)
    return types[1:3] if isinstance(op, LinearSwiglu) else types[1:2]


def block_rows(op: Op, types: Types) -> int:
    """Weight rows that a chunk decodes: they should stay in the second-level cache, in a multiple of 24 (the tiles)."""
    k = extent(types[0], 1)
    rows = 24 if k <= 4096 else 8
    return rows // 2 if isinstance(op, LinearSwiglu) and k <= 4096 else rows


def _starts(op: Op, types: Types) -> list[int]:
    """The first item of each weight, and the end."""
    nb, starts = block_rows(op, types), [0]
    weights = _weights(op, types)
    for w in weights[:1] if isinstance(op, LinearSwiglu) else weights:
        starts.append(starts[-1] + -(-extent(w, 0) // nb))
    return starts


def _context(op: Op, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    kind = "add" if isinstance(op, LinearAdd) else "swiglu" if isinstance(op, LinearSwiglu) else "plain"
    weights, k = _weights(op, types), extent(types[0], 1)
    padded = max((w.fmt.padded_k(k) for w in weights if w.fmt is not None), default=k)
    starts = _starts(op, types)
    return {
        **DECODE,
        "kind": kind,
        "weights": weights,
        "inputs": {"add": 3, "swiglu": 3}.get(kind, 1 + len(weights)),
        "ld": -(-padded // LANES) * LANES,
        "block_rows": block_rows(op, types),
        "starts": starts,
        "items": starts[-1],
    }


def _geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((_starts(op, types)[-1], 1, 1))


def _refuse(op: Op, types: Types) -> str | None:
    return undecodable(*_weights(op, types))


def _f32(name: str, op: type[Any]) -> Route[Any]:
    return Route(
        name=name,
        op=op,
        device="cpu",
        template="host/linear.cpp.j2",
        geometry=_geometry,
        context=_context,
        refuse=_refuse,
        numerics="f32.vector",
    )


LINEAR = _f32("linear.cpu.f32", Linear)
LINEAR_ADD = _f32("linear_add.cpu.f32", LinearAdd)
LINEAR_SWIGLU = _f32("linear_swiglu.cpu.f32", LinearSwiglu)

ROUTES: tuple[Route[Any], ...] = (LINEAR, LINEAR_ADD, LINEAR_SWIGLU)
