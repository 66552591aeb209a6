"""What rounds of drafts do to the delta layers, as launches that a GPU makes few of.

Verification notes the inputs of its rows where it reads them, and folding moves the states of all layers at once. As
with `fused.py`, references are compositions of the parts', and `ir/rewrites.py` puts these ops in their place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from attrs import frozen

from ninfer.formats.dtypes import F32, I32
from ninfer.ir import casework as cw
from ninfer.ir.op import Case, Op, Work, require
from ninfer.ir.ops.checks import are_ints
from ninfer.ir.ops.fused import FusedDelta, FusedDeltaPeek
from ninfer.ir.ops.journal import RingLoad, RingStore
from ninfer.ir.ops.recurrent import SEQ_FIELDS, CausalConvSilu, GatedDelta, _seq_arrays, _seq_types
from ninfer.ir.types import Array, Arrays, B, Env, S, T, TensorType, Types, ints, plain

PLACES = 6  # of the cases' rings


def _row_seq(row_start: Array, row_count: Array) -> Array:
    """Sequence of each row, from the rows of each sequence."""
    starts, counts = ints(row_start), ints(row_count)
    found = np.zeros(int((starts + counts).max(initial=0)), np.int32)
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        found[start : start + count] = b
    return found


@frozen
class FusedDeltaRecord(FusedDelta):
    """FusedDeltaPeek, whose x, a and b also go to rings, as by RingStore.

    Arguments of FusedDelta, then rings: f32 state [S, W, C], [S, W, Hv], [S, W, Hv].
    """

    mutates: ClassVar[tuple[int, ...]] = (14, 15, 16)

    @property
    def peek(self) -> FusedDeltaPeek:
        return FusedDeltaPeek(self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.eps, self.quant)

    def infer(self, args: Types) -> Types:
        require(self, len(args) == 17, f"takes 17 arguments, not {len(args)}")
        rings = args[14:]
        for i, ring in zip((0, 3, 4), rings, strict=True):
            fits = len(ring.shape) == 3 and ring.shape[0] is S and ring.shape[2:] == args[i].shape[1:]
            same = ring.shape[:2] == rings[0].shape[:2] and ring.dtype is F32
            require(self, fits and same, f"ring is {ring} for rows {args[i]}")
        return self.peek.infer(args[:14])

    def reference(self, args: Arrays) -> Arrays:
        row_start, row_count, seq_slot, kv_len = args[10:14]
        fields = (_row_seq(row_start, row_count), row_start, seq_slot, kv_len)
        for i, ring in zip((0, 3, 4), args[14:], strict=True):
            RingStore().reference((args[i], ring, *fields))
        return self.peek.reference(args[:14])

    def work(self, args: Types, env: Env) -> Work:
        return self.peek.work(args[:14], env)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for case in FusedDeltaPeek.cases():
            peek = case.op
            assert isinstance(peek, FusedDeltaPeek)
            op = cls(peek.key_heads, peek.value_heads, peek.key_dim, peek.value_dim, peek.eps, peek.quant)
            widths = [case.types[i].shape[1] for i in (0, 3, 4)]
            types = tuple(TensorType((S, PLACES, w), F32) for w in widths)
            arrays = tuple(np.zeros(t.concrete(case.env), np.float32) for t in types)
            yield Case(op, case.name, (*case.types, *types), (*case.arrays, *arrays), case.env, case.rtol, case.atol)


@frozen
class FoldDeltas(Op):
    """Convolution and delta rule of several layers over rows from their rings; only the states move.

    Of each layer: rings [S, W, C], [S, W, Hv], [S, W, Hv] of x, a and b; taps [C, taps]; conv: f32 state
    [S, C, taps-1]; a_log, dt_bias: [Hv]; state: f32 state [S, Hv, dv, dk]. Then row_start, row_count, seq_slot,
    kv_len: [B].
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    layers: int = 1
    EACH: ClassVar[int] = 8  # arguments of a layer

    @property
    def mutates(self) -> tuple[int, ...]:  # type: ignore[override]  # by how many layers there are
        return tuple(i * self.EACH + at for i in range(self.layers) for at in (4, 7))

    @property
    def delta(self) -> GatedDelta:
        return GatedDelta(self.key_heads, self.value_heads, self.key_dim, self.value_dim)

    def infer(self, args: Types) -> Types:
        count = self.EACH * self.layers + 4
        require(self, len(args) == count, f"{self.layers} layers take {count} arguments, not {len(args)}")
        seqs = args[-4:]
        are_ints(self, SEQ_FIELDS, (B,), *seqs)
        row = TensorType((T,), I32)
        for i in range(self.layers):
            *rings, taps, conv, a_log, dt_bias, state = args[i * self.EACH : (i + 1) * self.EACH]
            for ring in rings:
                fits = len(ring.shape) == 3 and ring.shape[:2] == rings[0].shape[:2] and ring.dtype is F32
                require(self, fits, f"ring is {ring} beside {rings[0]}")
            x, a, b = (RingLoad().infer((ring, row, seqs[0], *seqs[2:]))[0] for ring in rings)
            (u,) = CausalConvSilu().infer((x, taps, conv, *seqs))
            self.delta.infer((u, a, b, a_log, dt_bias, state, *seqs))
            same = all(t == u for t, u in zip(args[i * self.EACH : (i + 1) * self.EACH], args, strict=False))
            require(self, same, f"layer {i} has other shapes than the first")
        return ()

    def reference(self, args: Arrays) -> Arrays:
        seqs = args[-4:]
        row_seq = _row_seq(seqs[0], seqs[1])
        for i in range(self.layers):
            *rings, taps, conv, a_log, dt_bias, state = args[i * self.EACH : (i + 1) * self.EACH]
            x, a, b = (RingLoad().reference((ring, row_seq, seqs[0], *seqs[2:]))[0] for ring in rings)
            (u,) = CausalConvSilu().reference((x, taps, conv, *seqs))
            self.delta.reference((u, a, b, a_log, dt_bias, state, *seqs))
        return ()

    def work(self, args: Types, env: Env) -> Work:
        """The states of the step's sequences, read and written."""
        per_seq = 4 * self.value_heads * self.value_dim * self.key_dim * self.layers
        return Work(2 * env.seqs * per_seq, 8 * env.rows * per_seq // 4)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for hk, hv, dk, dv, layers in ((2, 6, 32, 32, 3), (1, 3, 128, 128, 1), (2, 2, 64, 128, 2)):
            c, env = 2 * hk * dk + hv * dv, Env(9, 1, 3, slots=4)
            typed: list[cw.Typed] = []
            for i in range(layers):
                dice = cw.rng(11 + i)
                for width in (c, hv, hv):
                    type = TensorType((S, PLACES, width), F32)
                    typed.append((type, dice.standard_normal(type.concrete(env)).astype(np.float32)))
                conv, state = TensorType((S, c, 3), F32), TensorType((S, hv, dv, dk), F32)
                typed += [
                    cw.rows(c, c, 4, seed=2 + i),
                    (conv, dice.standard_normal(conv.concrete(env)).astype(np.float32)),
                    cw.vector(hv, seed=7 + i, mean=0.3),
                    cw.vector(hv, seed=8 + i, mean=-1),
                    (state, (dice.standard_normal(state.concrete(env)) * 0.3).astype(np.float32)),
                ]
            types, arrays = (*(t for t, _ in typed), *_seq_types()), (*(plain(a) for _, a in typed), *_seq_arrays())
            # 5 steps of a recurrence over float32 sums
            name = f"h{hk}-{hv}-d{dk}-l{layers}"
            yield Case(cls(hk, hv, dk, dv, layers), name, types, arrays, env, rtol=2e-4, atol=2e-5)


FUSED_ROUNDS: tuple[type[Op], ...] = (FusedDeltaRecord, FoldDeltas)
