"""What a drafter's rows pass through before and after its block, as one launch each. See `fused.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from attrs import evolve, frozen

from ninfer.formats.dtypes import I32
from ninfer.ir import casework as cw
from ninfer.ir.op import Case, Op, require
from ninfer.ir.ops.embed import TakeRows
from ninfer.ir.ops.journal import Argmax, Concat, PickColumns, RingLoad, RingStore, _ring_case
from ninfer.ir.ops.norm import RmsNorm
from ninfer.ir.ops.packed_act import QuantizeRows, packed_types
from ninfer.ir.types import Arrays, Env, L, T, TensorType, Types, f32_array


def _quantised(type: TensorType, group: int) -> Types:
    n = type.shape[1]
    assert isinstance(n, int)
    return packed_types(type.shape[0], n, group) if group else (type,)


@frozen
class DraftInput(Op):
    """y = [RmsNorm(x, w) | RmsNorm(rows of the ring, v)], quantised in groups of `quant` values if that is given.

    x: [T, H]; w, v: [H]; ring: f32 state [S, W, H]; row_seq [T]; row_start, seq_slot, kv_len [B] -> [T, 2H], or codes
    and d.
    """

    eps: float = 1e-6
    offset: float = 0.0
    quant: int = 0

    def infer(self, args: Types) -> Types:
        x, w, v, ring, *fields = args
        norm = RmsNorm(self.eps, self.offset)
        (past,) = RingLoad().infer((ring, *fields))
        require(self, w.shape == v.shape == x.shape[1:], f"{w} and {v} do not weigh rows of {x}")
        require(self, not self.quant or x.shape[1] % self.quant == 0, f"groups of {self.quant} cut rows of {x}")
        (y,) = Concat().infer((*norm.infer((x, w)), *norm.infer((past, v))))
        return _quantised(y, self.quant)

    def reference(self, args: Arrays) -> Arrays:
        x, w, v, *ring = args
        norm = RmsNorm(self.eps, self.offset)
        past = RingLoad().reference(tuple(ring))
        y = Concat().reference((*norm.reference((x, w)), *norm.reference((*past, v))))
        return QuantizeRows(self.quant).reference(y) if self.quant else y

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for h, quant in ((64, 0), (320, 32), (1536, 32)):
            case = _ring_case(h)
            (xt, x), (wt, w), (vt, v) = cw.rows(T, 9, h), cw.vector(h), cw.vector(h, seed=2)
            types, arrays = (xt, wt, vt, *case.types), (x, w, v, *case.arrays)
            yield evolve(case, op=cls(1e-5, 1.0, quant), name=f"h{h}-q{quant}", types=types, arrays=arrays,
                         rtol=5e-6, atol=1e-6)  # fmt: skip


@frozen
class KeepNormed(Op):
    """h = RmsNorm(x, w), all of which go to a ring as by RingStore; y_l = h[index_l], quantised if `quant` is given.

    x: [T, H]; w: [H]; ring: f32 state [S, W, H]; row_seq [T]; row_start, seq_slot, kv_len [B]; index: i32 [L]
    -> [L, H], or codes and d.
    """

    eps: float = 1e-6
    offset: float = 0.0
    ahead: int = 0
    quant: int = 0
    mutates: ClassVar[tuple[int, ...]] = (2,)

    def infer(self, args: Types) -> Types:
        x, w, ring, *fields, index = args
        require(self, w.shape == x.shape[1:], f"{w} does not weigh rows of {x}")
        require(self, not self.quant or x.shape[1] % self.quant == 0, f"groups of {self.quant} cut rows of {x}")
        h = RmsNorm(self.eps, self.offset).infer((x, w))
        RingStore(self.ahead).infer((*h, ring, *fields))
        return _quantised(TakeRows().infer((*h, index))[0], self.quant)

    def reference(self, args: Arrays) -> Arrays:
        x, w, ring, *fields, index = args
        h = RmsNorm(self.eps, self.offset).reference((x, w))
        RingStore(self.ahead).reference((*h, ring, *fields))
        y = TakeRows().reference((*h, index))
        return QuantizeRows(self.quant).reference(y) if self.quant else y

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for h, quant, ahead in ((64, 0, 1), (320, 32, 0), (1536, 32, 1)):
            case = _ring_case(h)
            (xt, x), (wt, w), (it, index) = cw.rows(T, 9, h), cw.vector(h), cw.ints(L, [0, 5, 7, 8])
            types, arrays = (xt, wt, *case.types, it), (x, w, *case.arrays, index)
            yield evolve(case, op=cls(1e-5, 1.0, ahead, quant), name=f"h{h}-q{quant}-a{ahead}", types=types,
                         arrays=arrays, env=Env(9, 4, 3, slots=4), rtol=5e-6, atol=1e-6)  # fmt: skip


@frozen
class ArgmaxPicked(Op):
    """Argmax of PickColumns.   x: [L, N]; index: i32 [V] -> i32 [L]."""

    domain: int

    def infer(self, args: Types) -> Types:
        return Argmax(self.domain).infer(PickColumns().infer(args))

    def reference(self, args: Arrays) -> Arrays:
        return Argmax(self.domain).reference(PickColumns().reference(args))

    @classmethod
    def cases(cls) -> Iterable[Case]:
        xt, x = cw.rows(L, 4, 700)
        values, index = f32_array(x), cw.rng(7).permutation(5000).astype(np.int32)
        index[index >= 700] = -1
        index[[17, 4995]], index[4000] = index[index >= 0][0], 3
        values[1, [3, index[17]]] = 9  # a tie of tokens 17 and 4000, and of another past the domain
        env = Env(4, 4, 1)
        yield Case(cls(4990), "l4", (xt, TensorType((5000,), I32)), (values, index), env, rtol=0, atol=0)


FUSED_DRAFT: tuple[type[Op], ...] = (DraftInput, KeepNormed, ArgmaxPicked)
