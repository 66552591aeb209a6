"""Runs one op by one candidate route on buffers with canaries around them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from ninfer.devices.cpu import _LAUNCH, CpuDevice
from ninfer.devices.plan import BufferRef, Launch, Place
from ninfer.formats.quant import Packed
from ninfer.ir.graph import Kind, Node, Value
from ninfer.ir.op import Case
from ninfer.ir.step import HEADER
from ninfer.ir.types import Array, Env, Sym, TensorType
from ninfer.routes.lower import Arena, Lowering
from ninfer.routes.route import Candidate

CANARY = 0xA5
MARGIN = 256
PAD_ROWS = 3  # rows that a buffer has beyond the step's


@frozen
class Buffer:
    """Bytes with a margin of canaries on both sides."""

    whole: NDArray[np.uint8]
    nbytes: int

    @property
    def start(self) -> int:
        return -self.whole.ctypes.data % 64 + MARGIN

    @property
    def inner(self) -> NDArray[np.uint8]:
        return self.whole[self.start : self.start + self.nbytes]

    @property
    def outer(self) -> NDArray[np.uint8]:
        return np.concatenate([self.whole[: self.start], self.whole[self.start + self.nbytes :]])


def buffer(nbytes: int) -> Buffer:
    return Buffer(np.full(nbytes + 2 * MARGIN + 64, CANARY, np.uint8), nbytes)


@frozen
class Result:
    outputs: tuple[NDArray[Any], ...]
    arguments: tuple[Array, ...]  # after the run


def wider(env: Env) -> Env:
    """Room for more rows than the step has."""
    return evolve(env, rows=env.rows + PAD_ROWS, logit_rows=env.logit_rows + PAD_ROWS, seqs=env.seqs + PAD_ROWS)


def lower_case(lowering: Lowering, case: Case, candidate: Candidate | None, env: Env) -> tuple[list[Launch], int]:
    """Launches with arguments named by number, and the size of the arena (their workspace)."""
    outs = case.op.infer(case.types)
    values = tuple(Value(str(i), t, Kind.CONST) for i, t in enumerate((*case.types, *outs)))
    node = Node(case.op, values[: len(case.types)], values[len(case.types) :], None)
    refs = [BufferRef(Place.CONST, v.name) for v in values]
    arena = Arena()
    launches = lowering.launches(node, (*case.types, *outs), env, candidate, refs, arena)
    return launches, arena.end


def run_case(
    device: CpuDevice, lowering: Lowering, case: Case, candidate: Candidate, chunks: Sequence[int] | None = None
) -> Result:
    """Run a case with padded buffers; asserts that canaries and padded rows survive.   chunks: another cut of work."""
    env = wider(case.env)
    launches, arena_bytes = lower_case(lowering, case, candidate, env)
    types = (*case.types, *case.op.infer(case.types))
    buffers = [buffer(t.nbytes(env)) for t in types]
    for b, array in zip(buffers, case.arrays, strict=False):
        raw = (array.raw if isinstance(array, Packed) else np.ascontiguousarray(array)).reshape(-1).view(np.uint8)
        b.inner[: len(raw)] = raw
    arena = buffer(arena_bytes)
    header = np.zeros((), HEADER.numpy)
    header["rows"], header["logit_rows"], header["seqs"] = case.env.rows, case.env.logit_rows, case.env.seqs
    header["flags"] = case.header_flags
    assert device.programs is not None
    entries = device.programs.addresses(list(dict.fromkeys(x.source for x in launches if x.source is not None)))
    rows, keep = [], []
    for i, launch in enumerate(launches):
        assert launch.source is not None
        pointers = [header.ctypes.data]
        for ref in launch.args:
            inner = arena.inner[ref.offset :] if ref.place is Place.ARENA else buffers[int(ref.name)].inner
            pointers.append(inner.ctypes.data)
        block = (ctypes.c_void_p * len(pointers))(*pointers)
        keep.append(block)
        x, y, z = launch.geometry.grid
        count = x * y * z if chunks is None else chunks[i % len(chunks)]
        rows.append((entries[launch.source.entry], ctypes.addressof(block), count))
    device.run(np.array(rows, _LAUNCH))
    for b in (*buffers, arena):
        assert (b.outer == CANARY).all(), f"{candidate.id} wrote outside a buffer"
    arrays = []
    for t, b in zip(types, buffers, strict=True):
        used = t.nbytes(case.env)
        if isinstance(t.shape[0], Sym):
            assert (b.inner[used:] == CANARY).all(), f"{candidate.id} wrote rows beyond the step's"
        arrays.append(_array(t, b.inner[:used], case.env))
    for i, (before, after) in enumerate(zip(case.arrays, arrays, strict=False)):
        if i not in case.op.mutates:
            assert _same(before, after), f"{candidate.id} changed argument {i}, which is not in mutates"
    outputs = arrays[len(case.types) :]
    return Result(tuple(o for o in outputs if not isinstance(o, Packed)), tuple(arrays[: len(case.types)]))


def _array(t: TensorType, raw: NDArray[np.uint8], env: Env) -> Array:
    if t.fmt is not None:
        n, k = (int(d) for d in t.shape)
        return Packed(t.fmt, raw.copy(), (n, k))
    return raw.copy().view(t.dtype.numpy).reshape(t.concrete(env))


def _same(a: Array, b: Array) -> bool:
    one, other = (x.raw if isinstance(x, Packed) else np.ascontiguousarray(x) for x in (a, b))
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
