"""All ops, in one visible tuple. A new op is a file beside this one and a line here."""

from __future__ import annotations

from ninfer.ir.op import OpTable
from ninfer.ir.ops.attention import Attention, KvAppend, Rope
from ninfer.ir.ops.elementwise import Add, GeluMul, GluRows, SigmoidMul, SiluMul, SoftCap, TakeHeads
from ninfer.ir.ops.embed import Embed, TakeRows
from ninfer.ir.ops.experts import ExpertGlu, ExpertSum, PickExperts
from ninfer.ir.ops.hadamard import Hadamard
from ninfer.ir.ops.join import JoinNorms
from ninfer.ir.ops.journal import JOURNAL_OPS
from ninfer.ir.ops.linear import Linear, LinearAdd, LinearSwiglu
from ninfer.ir.ops.norm import GatedRmsNorm, RmsNorm
from ninfer.ir.ops.recurrent import CausalConvSilu, GatedDelta
from ninfer.ir.ops.rotated import Rotated
from ninfer.ir.ops.rounds import ROUND_OPS
from ninfer.ir.ops.sample import CountTokens, Sample, SampleAhead, TokenLogprob

OPS = OpTable(
    (
        Embed,
        TakeRows,
        RmsNorm,
        GatedRmsNorm,
        Linear,
        LinearAdd,
        LinearSwiglu,
        Rope,
        KvAppend,
        Attention,
        SigmoidMul,
        SiluMul,
        GeluMul,
        GluRows,
        Add,
        SoftCap,
        PickExperts,
        ExpertGlu,
        ExpertSum,
        Hadamard,
        Rotated,
        JoinNorms,
        TakeHeads,
        CausalConvSilu,
        GatedDelta,
        CountTokens,
        Sample,
        SampleAhead,
        TokenLogprob,
        *JOURNAL_OPS,
        *ROUND_OPS,
    )
)
