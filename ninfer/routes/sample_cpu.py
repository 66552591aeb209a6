"""Token counts, draws and log-probabilities on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.ops.sample import PURPOSE_DRAW, CountTokens, Sample, SampleAhead, TokenLogprob
from ninfer.ir.step import (
    COUNT_GENERATED,
    COUNT_PROMPT,
    FLAG_COUNTS,
    MASK_ROWS,
    NUM_TOP,
    PROMPT_BIT,
    USE_BIAS,
    USE_LOGPROBS,
    USE_MASK,
    USE_PENALTIES,
)
from ninfer.ir.types import Env, Types
from ninfer.routes.route import Geometry, Route, Tuning


def _one(op: CountTokens, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry()


def _count_context(op: CountTokens, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {
        "flag_counts": FLAG_COUNTS,
        "prompt": COUNT_PROMPT,
        "prompt_bit": PROMPT_BIT,
        "generated": COUNT_GENERATED,
    }


COUNT_TOKENS = Route(
    name="count_tokens.cpu",
    op=CountTokens,
    device="cpu",
    template="cpu/count_tokens.cpp.j2",
    geometry=_one,
    context=_count_context,
    numerics="exact",
)


def _per_row(op: Sample | TokenLogprob, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((max(1, env.logit_rows), 1, 1))


def _sample_context(op: Sample, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    ahead = isinstance(op, SampleAhead)
    return {
        "ahead": ahead,
        "out": 10 if ahead else 6,  # the first output's argument
        "num_top": NUM_TOP,
        "mask_rows": MASK_ROWS,
        "prompt_bit": PROMPT_BIT,
        "purpose": PURPOSE_DRAW,
        "use_penalties": USE_PENALTIES,
        "use_bias": USE_BIAS,
        "use_mask": USE_MASK,
        "use_logprobs": USE_LOGPROBS,
    }


def _sample_workspace(op: Sample, types: Types, env: Env, tuning: Tuning) -> int:
    rows, v = types[0].concrete(env)
    return rows * v * 12


SAMPLE = Route(
    name="sample.cpu",
    op=Sample,
    device="cpu",
    template="cpu/sample.cpp.j2",
    geometry=_per_row,
    workspace=_sample_workspace,
    context=_sample_context,
)
SAMPLE_AHEAD = Route(
    name="sample_ahead.cpu",
    op=SampleAhead,
    device="cpu",
    template="cpu/sample.cpp.j2",
    geometry=_per_row,
    workspace=_sample_workspace,
    context=_sample_context,
)
TOKEN_LOGPROB = Route(
    name="token_logprob.cpu",
    op=TokenLogprob,
    device="cpu",
    template="cpu/token_logprob.cpp.j2",
    geometry=_per_row,
    numerics="f32",
)

ROUTES: tuple[Route[Any], ...] = (COUNT_TOKENS, SAMPLE, SAMPLE_AHEAD, TOKEN_LOGPROB)
