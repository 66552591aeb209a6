"""Mixers with what stands before and after them, as one launch each: what a decode step is made of on a GPU.

The reference of a fused op is the composition of its parts' references, so it tests itself. `ir/rewrites.py` puts
these ops in the place of their parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from attrs import frozen

from ninfer.formats.dtypes import F32
from ninfer.formats.kv import KV_FORMATS, KVFormat
from ninfer.ir import casework as cw
from ninfer.ir.op import Case, Op, Work, require
from ninfer.ir.ops.attention import Attention, KvAppend, Rope, _paged_case
from ninfer.ir.ops.elementwise import SigmoidMul
from ninfer.ir.ops.norm import GatedRmsNorm, RmsNorm
from ninfer.ir.ops.packed_act import QuantizeRows, packed_types
from ninfer.ir.ops.recurrent import CausalConvSilu, GatedDelta, _seq_arrays, _seq_types
from ninfer.ir.types import Array, Arrays, Env, S, T, TensorType, Types, f32_array, plain


def _quantised(type: TensorType, group: int) -> Types:
    if not group:
        return (type,)
    n = type.shape[1]
    assert isinstance(n, int)
    return packed_types(type.shape[0], n, group)


@frozen
class FusedAttention(Op):
    """Norm and rotation of q and k, k and v appended to the cache, attention, times sigmoid(gate), quantised.

    q: [T, Hq*D]; k, v: [T, G*D]; cache, page_table, row_seq, row_start, seq_slot, kv_len as in KvAppend; positions
    [T]; freqs [F]; if `norm`: q_norm, k_norm [D], and v_norm [D] if norm_v: v is normed, too; if `gate`:
    [T, Hq*D] -> [T, Hq*D], or if quant > 0 its codes and d in groups of `quant` values.
    """

    fmt: KVFormat
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    mscale: float = 1.0
    norm: bool = False
    eps: float = 1e-6
    offset: float = 0.0
    gate: bool = False
    quant: int = 0
    norm_v: bool = False
    mutates: ClassVar[tuple[int, ...]] = (3,)

    @property
    def parts(self) -> tuple[RmsNorm, Rope, KvAppend, Attention]:
        return (
            RmsNorm(self.eps, self.offset),
            Rope(self.head_dim, self.mscale),
            KvAppend(self.fmt, self.kv_heads, self.head_dim),
            Attention(self.fmt, self.heads, self.kv_heads, self.head_dim, self.scale, self.window),
        )

    def infer(self, args: Types) -> Types:
        rms, rope, append, attention = self.parts
        require(self, self.norm or not self.norm_v, "values are normed where keys are")
        norms = (2 + self.norm_v) * self.norm
        count = 11 + norms + self.gate
        require(self, len(args) == count, f"takes {count} arguments, not {len(args)}")
        q, k, v, cache, *paging = args[:9]
        positions, freqs = args[9:11]
        require(self, self.quant == 0 or self.head_dim % self.quant == 0, f"groups of {self.quant} cut heads")
        if self.norm:
            for x, w in zip((q, k, v)[:norms], args[11 : 11 + norms], strict=True):
                require(self, w.shape == (self.head_dim,), f"norm weight is {w}, heads have {self.head_dim} values")
                rms.infer((x, w))
        for x in (q, k):
            rope.infer((x, positions, freqs))
        append.infer((k, v, cache, *paging))
        (out,) = attention.infer((q, cache, *paging))
        if self.gate:
            SigmoidMul().infer((out, args[-1]))
        return _quantised(out, self.quant)

    def reference(self, args: Arrays) -> Arrays:
        k, v, cache, *paging = args[1:9]
        if self.norm_v:
            (v,) = self.parts[0].reference((v, args[13]))
        self.parts[2].reference((self._turned(k, args, 1), v, cache, *paging))
        return self.attended(args)

    def _turned(self, x: Array, args: Arrays, side: int) -> Array:
        """Queries (side 0) or keys, normed and rotated."""
        rms, rope, _, _ = self.parts
        if self.norm:
            (x,) = rms.reference((x, args[11 + side]))
        return rope.reference((x, *args[9:11]))[0]

    def attended(self, args: Arrays) -> Arrays:
        """The outputs, of a cache that has the step's keys and values already."""
        cache, *paging = args[3:9]
        (y,) = self.parts[3].reference((self._turned(args[0], args, 0), cache, *paging))
        if self.gate:
            (y,) = SigmoidMul().reference((y, args[-1]))
        return QuantizeRows(self.quant).reference((y,)) if self.quant else (y,)

    def work(self, args: Types, env: Env) -> Work:
        attention = self.parts[3]
        return attention.work((args[0], *args[3:9]), env)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for fmt in KV_FORMATS:
            for d, heads, kv_heads, norm, gate, quant, window in (
                (256, 6, 1, True, True, 0, None),
                (256, 8, 2, True, True, 32, None),
                (64, 9, 3, False, False, 64, None),
                (128, 4, 2, True, False, 0, 40),
                (64, 4, 2, True, False, 0, -1),  # no window, values normed
            ):
                if not fmt.is_plain and gate and not quant:
                    continue
                norm_v, window = window == -1, None if window == -1 else window
                op = cls(fmt, heads, kv_heads, d, d**-0.5, window, 1.0, norm, 1e-5, 1.0, gate, quant, norm_v)
                case = _paged_case(fmt, heads=heads, kv_heads=kv_heads, d=d)
                n, f = case.rows, d // 4
                typed = [cw.rows(T, n, w * d, seed=i) for i, w in enumerate((heads, kv_heads, kv_heads))]
                typed += list(zip(case.types, case.arrays, strict=True))
                typed += [cw.ints(T, [130, 62, 63, 64, 65, 66, 0, 1, 2])]
                typed += [(TensorType((f,)), (1e4 ** -(np.arange(f) / f)).astype(np.float32))]
                typed += [cw.vector(d, seed=i) for i in (4, 5, 7)[: 2 + norm_v]] if norm else []
                typed += [cw.rows(T, n, heads * d, seed=6)] if gate else []
                types, arrays = tuple(t for t, _ in typed), tuple(a for _, a in typed)
                name = f"{fmt.name}-d{d}-h{heads}{'-norm' * norm}{'-values' * norm_v}{'-gate' * gate}"
                name += f"-q{quant}" if quant else ""
                # as attention; keys that are rounded to the cache's type may fall to the neighbour
                yield Case(op, name, types, arrays, case.env, rtol=3e-3, atol=3e-3)


@frozen
class FusedDelta(Op):
    """Convolution, delta rule, and its norm with the gate, quantised.

    x: [T, C]; taps: [C, taps]; conv: f32 state [S, C, taps-1]; a, b: [T, Hv]; a_log, dt_bias: [Hv]; state: f32
    [S, Hv, dv, dk]; norm: [dv]; z: [T, Hv*dv]; row_start, row_count, seq_slot, kv_len: [B] -> [T, Hv*dv], or if quant
    > 0 its codes and d in groups of `quant` values.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float = 1e-6
    quant: int = 0
    mutates: ClassVar[tuple[int, ...]] = (2, 7)

    @property
    def profile_key(self) -> str:
        """Plain outputs and codes do not show in operands, but the kernels beside are others."""
        return self.key if self.quant else f"{self.key}_plain"

    @property
    def delta(self) -> GatedDelta:
        return GatedDelta(self.key_heads, self.value_heads, self.key_dim, self.value_dim)

    def infer(self, args: Types) -> Types:
        x, taps, conv, a, b, a_log, dt_bias, state, norm, z, *seqs = args
        (u,) = CausalConvSilu().infer((x, taps, conv, *seqs))
        (y,) = self.delta.infer((u, a, b, a_log, dt_bias, state, *seqs))
        require(self, norm.shape == (self.value_dim,), f"norm weight is {norm}, heads have {self.value_dim} values")
        require(self, self.quant == 0 or self.value_dim % self.quant == 0, f"groups of {self.quant} cut heads")
        (out,) = GatedRmsNorm(self.eps).infer((y, norm, z))
        return _quantised(out, self.quant)

    def reference(self, args: Arrays) -> Arrays:
        x, taps, conv, a, b, a_log, dt_bias, state, norm, z, *seqs = args
        (u,) = CausalConvSilu().reference((x, taps, conv, *seqs))
        (y,) = self.delta.reference((u, a, b, a_log, dt_bias, state, *seqs))
        (out,) = GatedRmsNorm(self.eps).reference((y, norm, z))
        return QuantizeRows(self.quant).reference((f32_array(out),)) if self.quant else (out,)

    def work(self, args: Types, env: Env) -> Work:
        return self.delta.work((args[0], *args[3:8], *args[10:]), env)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for hk, hv, dk, dv, quant in ((2, 6, 32, 32, 0), (1, 3, 128, 128, 32), (2, 2, 64, 64, 64)):
            c = 2 * hk * dk + hv * dv
            conv = cw.rng(3).standard_normal((4, c, 3)).astype(np.float32)
            state = (cw.rng(4).standard_normal((4, hv, dv, dk)) * 0.3).astype(np.float32)
            typed = [
                cw.rows(T, 9, c),
                cw.rows(c, c, 4, seed=2),
                (TensorType((S, c, 3), F32), conv),
                cw.rows(T, 9, hv, seed=5),
                cw.rows(T, 9, hv, seed=6),
                cw.vector(hv, seed=7, mean=0.3),
                cw.vector(hv, seed=8, mean=-1),
                (TensorType((S, hv, dv, dk), F32), state),
                cw.vector(dv, seed=9),
                cw.rows(T, 9, hv * dv, seed=10),
            ]
            types = (*(t for t, _ in typed), *_seq_types())
            arrays = (*(a for _, a in typed), *_seq_arrays())
            op = cls(hk, hv, dk, dv, 1e-5, quant)
            # 5 steps of a recurrence over float32 sums
            name = f"h{hk}-{hv}-d{dk}{f'-q{quant}' if quant else ''}"
            yield Case(op, name, types, arrays, Env(9, 1, 3, slots=4), rtol=2e-4, atol=2e-5)


@frozen
class FusedDeltaPeek(FusedDelta):
    """FusedDelta that leaves both states as they were."""

    mutates: ClassVar[tuple[int, ...]] = ()

    def reference(self, args: Arrays) -> Arrays:
        moving = FusedDelta(self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.eps, self.quant)
        copied = [plain(a).copy() if i in FusedDelta.mutates else a for i, a in enumerate(args)]
        return moving.reference(tuple(copied))


FUSED: tuple[type[Op], ...] = (FusedAttention, FusedDelta, FusedDeltaPeek)
