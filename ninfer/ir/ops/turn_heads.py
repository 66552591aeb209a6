"""Norm and rotation of queries and keys, norm of values, and their place in the cache: what stands before an attention
that does not do it itself. `ir/rewrites.py` puts it in the place of its parts, whose references its own is made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from attrs import frozen

from ninfer.formats.kv import KV_FORMATS, KVFormat
from ninfer.ir import casework as cw
from ninfer.ir.op import Case, Op, require
from ninfer.ir.ops.attention import KvAppend, Rope, _paged_case
from ninfer.ir.ops.norm import RmsNorm
from ninfer.ir.types import Arrays, T, TensorType, Types


@frozen
class TurnHeads(Op):
    """q: [T, Hq*D]; k, v: [T, G*D]; cache, page_table, row_seq, row_start, seq_slot, kv_len as in KvAppend; positions
    [T]; freqs [F]; norms of q, k and v [D] -> q [T, Hq*D], normed and rotated as k is."""

    fmt: KVFormat
    kv_heads: int
    head_dim: int
    mscale: float = 1.0
    eps: float = 1e-6
    offset: float = 0.0
    mutates: ClassVar[tuple[int, ...]] = (3,)

    def infer(self, args: Types) -> Types:
        require(self, len(args) == 14, f"takes 14 arguments, not {len(args)}")
        q, k, v, cache, *paging = args[:9]
        for x, w in zip((q, k, v), args[11:], strict=True):
            require(self, w.shape == (self.head_dim,), f"norm weight is {w}, heads have {self.head_dim} values")
            RmsNorm(self.eps, self.offset).infer((x, w))
        Rope(self.head_dim, self.mscale).infer((k, *args[9:11]))
        KvAppend(self.fmt, self.kv_heads, self.head_dim).infer((k, v, cache, *paging))
        return Rope(self.head_dim, self.mscale).infer((q, *args[9:11]))

    def reference(self, args: Arrays) -> Arrays:
        rms, rope = RmsNorm(self.eps, self.offset), Rope(self.head_dim, self.mscale)
        (q,), (k,), (v,) = (rms.reference((x, w)) for x, w in zip(args[:3], args[11:], strict=True))
        (q,), (k,) = (rope.reference((x, *args[9:11])) for x in (q, k))
        KvAppend(self.fmt, self.kv_heads, self.head_dim).reference((k, v, *args[3:9]))
        return (q,)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for fmt in (f for f in KV_FORMATS if f.is_plain):
            for d, heads, kv_heads, f in ((512, 8, 2, 256), (64, 4, 2, 16)):
                op, case = cls(fmt, kv_heads, d, 1.0, 1e-5, 1.0), _paged_case(fmt, heads=heads, kv_heads=kv_heads, d=d)
                typed = [cw.rows(T, case.rows, w * d, seed=i) for i, w in enumerate((heads, kv_heads, kv_heads))]
                typed += list(zip(case.types, case.arrays, strict=True))
                typed += [cw.ints(T, [130, 62, 63, 64, 65, 66, 0, 1, 2])]
                typed += [(TensorType((f,)), (1e4 ** -(np.arange(f) / f)).astype(np.float32))]
                typed += [cw.vector(d, seed=i) for i in (4, 5, 6)]
                types, arrays = tuple(t for t, _ in typed), tuple(a for _, a in typed)
                # sums of 512 squares in another order, sines of another library
                yield Case(op, f"{fmt.name}-d{d}", types, arrays, case.env, rtol=3e-5, atol=3e-5)
