"""Draws on a GPU: the whole vocabulary in parallel, exact filters by integer counts."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from ninfer.ir import step
from ninfer.ir.op import Op
from ninfer.ir.ops.sample import PURPOSE_DRAW, CountTokens, Sample, SampleAhead, TokenLogprob
from ninfer.ir.types import Env, Types
from ninfer.routes.route import Geometry, Route, Stage, Tuning

SLICE = 2048  # ids that a block of 256 threads looks at
BINS = 2048  # of 1/32 nat
_SLICE_BYTES, _BEST_BYTES = 24, 8


def _vocabulary(types: Types) -> int:
    v = types[0].shape[1]
    assert isinstance(v, int)
    return v


def slices(op: Sample) -> int:
    return ceil(op.domain / SLICE)


def _row_bytes(op: Sample, types: Types) -> int:
    blocks = slices(op)
    nbytes = 12 * BINS + blocks * (_SLICE_BYTES + _BEST_BYTES * (1 + step.NUM_TOP)) + 8 * _vocabulary(types) + 4
    return ceil(nbytes / 16) * 16


def workspace(op: Sample, types: Types, env: Env, tuning: Tuning) -> int:
    return env.logit_rows * _row_bytes(op, types)


def geometry(op: Sample, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((slices(op), env.logit_rows, 1), 256)


def context(op: Sample, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    ahead = isinstance(op, SampleAhead)
    return {
        "ahead": ahead,
        "rejects": None,
        "more": " const i32* tokens, const i32* row_seq, const i32* row_start, const i32* logit_rows," if ahead else "",
        "draw": {
            "V": _vocabulary(types),
            "domain": op.domain,
            "blocks": slices(op),
            "bins": BINS,
            "num_top": step.NUM_TOP,
            "row_bytes": _row_bytes(op, types),
            "purpose": PURPOSE_DRAW,
            "use_logprobs": step.USE_LOGPROBS,
        },
        "use_penalties": step.USE_PENALTIES,
        "use_bias": step.USE_BIAS,
        "use_mask": step.USE_MASK,
        "use_logprobs": step.USE_LOGPROBS,
        "prompt_bit": step.PROMPT_BIT,
        "mask_rows": step.MASK_ROWS,
    }


def _count_geometry(op: CountTokens, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((env.seqs, 1, 1), 1024)


def _count_context(op: CountTokens, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {
        "flag": step.FLAG_COUNTS,
        "prompt": step.COUNT_PROMPT,
        "generated": step.COUNT_GENERATED,
        "prompt_bit": step.PROMPT_BIT,
    }


def _row_geometry(op: Op, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((types[0].concrete(env)[0], 1, 1), 1024)


SAMPLE = Route(
    name="sample.cuda",
    op=Sample,
    device="cuda",
    template="cuda/sample_scan.cu.j2",
    geometry=geometry,
    context=context,
    workspace=workspace,
    then=(
        Stage(template="cuda/sample_count.cu.j2", geometry=geometry),
        Stage(template="cuda/sample_pick.cu.j2", geometry=geometry),
    ),
    numerics="cuda",
)
SAMPLE_AHEAD = Route(
    name="sample_ahead.cuda",
    op=SampleAhead,
    device="cuda",
    template="cuda/sample_scan.cu.j2",
    geometry=geometry,
    context=context,
    workspace=workspace,
    then=SAMPLE.then,
    numerics="cuda",
)
COUNT_TOKENS = Route(
    name="count_tokens.cuda",
    op=CountTokens,
    device="cuda",
    template="cuda/count_tokens.cu.j2",
    geometry=_count_geometry,
    context=_count_context,
    numerics="exact",
)
TOKEN_LOGPROB = Route(
    name="token_logprob.cuda",
    op=TokenLogprob,
    device="cuda",
    template="cuda/token_logprob.cu.j2",
    geometry=_row_geometry,
    numerics="cuda",
)

ROUTES: tuple[Route[Any], ...] = (SAMPLE, SAMPLE_AHEAD, COUNT_TOKENS, TOKEN_LOGPROB)
