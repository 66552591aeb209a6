"""What rounds of drafts need: rings of row values by cache position, and recurrences that leave their state alone.

A round runs the target over the last token and the drafts. Attention needs nothing for it: keys of rejected rows are
out of reach and overwritten. A recurrence must not move before it is known how many rows are kept, so a round peeks,
storing the inputs of its rows in rings; afterwards the kept rows are loaded from the rings and run again, through the
ops that move the state. Those do the same arithmetic on the same numbers, so the state is the one that the round saw.

The same rings carry the target's hidden values to a drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from ninfer.formats.dtypes import F32, I32
from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, require
from ninfer.ir.ops.checks import are_ints, is_rows
from ninfer.ir.ops.recurrent import SEQ_FIELDS, CausalConvSilu, GatedDelta
from ninfer.ir.types import Array, Arrays, B, Env, L, S, T, TensorType, Types, f32_array, ints, plain

ROW_FIELDS = "row_seq row_start seq_slot kv_len"
NEVER = -1.0e15  # a score that no other is below; squares of it are finite


def _places(ring: Array, fields: Sequence[Array], ahead: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Slot and place in the ring of each row."""
    row_seq, row_start, seq_slot, kv_len = map(ints, fields)
    rows = np.arange(len(row_seq), dtype=np.int32)
    positions = kv_len[row_seq] + rows - row_start[row_seq] + np.int32(ahead)
    return seq_slot[row_seq], positions % np.int32(ring.shape[1])


def _check_fields(op: Op, rows: Types, fields: Sequence[TensorType]) -> None:
    row_seq, *seqs = fields
    are_ints(op, "row_seq", rows[0].shape[:1], row_seq)
    are_ints(op, "row_start seq_slot kv_len", (B,), *seqs)


@frozen
class RingStore(Op):
    """ring[slot, (p + ahead) % W] = x_t, p being the cache position of row t.

    x: [T, N]; ring: f32 state [S, W, N]; row_seq [T]; row_start, seq_slot, kv_len [B] -> nothing. No sequence has
    more than W rows in a step.
    """

    ahead: int = 0
    mutates: ClassVar[tuple[int, ...]] = (1,)

    def infer(self, args: Types) -> Types:
        x, ring, *fields = args
        n = is_rows(self, "x", x)
        fits = len(ring.shape) == 3 and ring.shape[0] is S and ring.shape[2] == n and ring.dtype is F32
        require(self, fits, f"ring is {ring} for rows {x}")
        _check_fields(self, (x,), fields)
        return ()

    def reference(self, args: Arrays) -> Arrays:
        x, ring = f32_array(args[0]), plain(args[1])
        slots, places = _places(ring, args[2:], self.ahead)
        ring[slots, places] = x
        return ()

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for ahead in (0, 1):
            case = _ring_case()
            xt, x = cw.rows(T, 9, 24)
            yield Case(cls(ahead), f"ahead{ahead}", (xt, *case.types), (x, *case.arrays), case.env, rtol=0, atol=0)


@frozen
class RingLoad(Op):
    """y_t = ring[slot, p % W], p being the cache position of row t.

    ring: f32 state [S, W, N]; row_seq [T]; row_start, seq_slot, kv_len [B] -> [T, N].
    """

    def infer(self, args: Types) -> Types:
        ring, *fields = args
        require(self, len(ring.shape) == 3 and ring.shape[0] is S, f"ring is {ring}, not [S, W, N]")
        require(self, len(fields[0].shape) == 1, f"row_seq is {fields[0]}, not [T]")
        y = TensorType((fields[0].shape[0], ring.shape[2]))
        _check_fields(self, (y,), fields)
        return (y,)

    def reference(self, args: Arrays) -> Arrays:
        ring = plain(args[0])
        slots, places = _places(ring, args[1:], 0)
        return (ring[slots, places],)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        case = _ring_case()
        yield evolve(case, op=cls(), name="r9", rtol=0, atol=0)


@frozen
class ConvPeek(CausalConvSilu):
    """CausalConvSilu that leaves the state as it was."""

    mutates: ClassVar[tuple[int, ...]] = ()

    def reference(self, args: Arrays) -> Arrays:
        x, w, state, *fields = args
        return CausalConvSilu().reference((x, w, plain(state).copy(), *fields))


@frozen
class DeltaPeek(GatedDelta):
    """GatedDelta that leaves the state as it was."""

    mutates: ClassVar[tuple[int, ...]] = ()

    def reference(self, args: Arrays) -> Arrays:
        moving = GatedDelta(self.key_heads, self.value_heads, self.key_dim, self.value_dim)
        return moving.reference((*args[:5], plain(args[5]).copy(), *args[6:]))


@frozen
class Concat(Op):
    """y = [a | b].   a: [R, N]; b: [R, M] -> [R, N + M]."""

    def infer(self, args: Types) -> Types:
        a, b = args
        n, m = is_rows(self, "a", a), is_rows(self, "b", b)
        require(self, a.shape[0] == b.shape[0], f"{a} and {b} have other rows")
        return (TensorType((a.shape[0], n + m)),)

    def reference(self, args: Arrays) -> Arrays:
        return (np.concatenate([f32_array(a) for a in args], axis=1),)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n_rows in (1, 5):
            (at, a), (bt, b) = cw.rows(T, n_rows, 96), cw.rows(T, n_rows, 40, seed=1)
            yield Case(cls(), f"r{n_rows}", (at, bt), (a, b), Env(n_rows, 1, 1), rtol=0, atol=0)


@frozen
class Argmax(Op):
    """The largest of the first `domain` values of each row, the lowest id among equals.   x: [L, V] -> i32 [L]."""

    domain: int

    def infer(self, args: Types) -> Types:
        (x,) = args
        require(self, self.domain <= is_rows(self, "x", x), f"domain {self.domain} exceeds {x}")
        return (TensorType(x.shape[:1], I32),)

    def reference(self, args: Arrays) -> Arrays:
        return (f32_array(args[0])[:, : self.domain].argmax(axis=1).astype(np.int32),)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        xt, x = cw.rows(L, 4, 1000)
        values = plain(x)
        values[1, [3, 900]], values[2, 995] = 9, 9  # a tie, and a value past the domain
        yield Case(cls(990), "l4", (xt,), (x,), Env(4, 4, 1), rtol=0, atol=0)


@frozen
class PickColumns(Op):
    """y[r, j] = x[r, index[j]], or NEVER where index[j] < 0.   x: [R, N]; index: i32 [V] -> [R, V].

    Scores of some tokens become scores of all, of which those that have none are never the largest.
    """

    def infer(self, args: Types) -> Types:
        x, index = args
        is_rows(self, "x", x)
        require(self, len(index.shape) == 1 and index.dtype is I32, f"index must be i32 [V], not {index}")
        return (TensorType((x.shape[0], *index.shape)),)

    def reference(self, args: Arrays) -> Arrays:
        x, index = f32_array(args[0]), ints(args[1])
        return (np.where(index < 0, np.float32(NEVER), x[:, np.maximum(index, 0)]),)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for n_rows in (1, 5):
            (xt, x), index = cw.rows(L, n_rows, 96), cw.rng(7).permutation(300).astype(np.int32)
            index[index >= 96] = -1
            types = (xt, TensorType((300,), I32))
            yield Case(cls(), f"l{n_rows}", types, (x, index), Env(n_rows, n_rows, 1), rtol=0, atol=0)


def _ring_case(width: int = 24) -> Case:
    """A ring of 6 places; sequences of 1, 5 and 3 rows, one of which crosses the ring's end."""
    ring = cw.rng(3).standard_normal((4, 6, width)).astype(np.float32)
    typed = (
        (TensorType((S, 6, width), F32), ring),
        cw.ints(T, [0, 1, 1, 1, 1, 1, 2, 2, 2]),
        cw.ints(B, [0, 1, 6]),
        cw.ints(B, [2, 0, 3]),
        cw.ints(B, [130, 62, 0]),
    )
    types, arrays = tuple(t for t, _ in typed), tuple(a for _, a in typed)
    return Case(RingLoad(), "", types, arrays, Env(9, 1, 3, slots=4))


def _fields(g: Graph, names: str) -> tuple[Value, ...]:
    return tuple(g.step[name] for name in names.split())


def ring_state(g: Graph, name: str, places: int, width: int) -> Value:
    return g.state(name, TensorType((S, places, width), F32))


def ring_store(g: Graph, x: Value, ring: Value, *, ahead: int = 0) -> None:
    g.add(RingStore(ahead), x, ring, *_fields(g, ROW_FIELDS))


def ring_load(g: Graph, ring: Value) -> Value:
    return g.one(RingLoad(), ring, *_fields(g, ROW_FIELDS))


def conv_peek(g: Graph, x: Value, w: Value, state: Value) -> Value:
    return g.one(ConvPeek(), x, w, state, *_fields(g, SEQ_FIELDS))


def delta_peek(
    g: Graph, op: GatedDelta, u: Value, a: Value, b: Value, a_log: Value, dt_bias: Value, state: Value
) -> Value:
    peek = DeltaPeek(op.key_heads, op.value_heads, op.key_dim, op.value_dim)
    return g.one(peek, u, a, b, a_log, dt_bias, state, *_fields(g, SEQ_FIELDS))


def concat(g: Graph, a: Value, b: Value) -> Value:
    return g.one(Concat(), a, b)


def argmax(g: Graph, x: Value, *, domain: int) -> Value:
    return g.one(Argmax(domain), x)


def pick_columns(g: Graph, x: Value, index: Value) -> Value:
    return g.one(PickColumns(), x, index)


JOURNAL_OPS: tuple[type[Op], ...] = (RingStore, RingLoad, ConvPeek, DeltaPeek, Concat, Argmax, PickColumns)
