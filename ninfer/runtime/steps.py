"""A batch as the arrays of a step: the one place that knows what every step field means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.ir.step import (
    COUNT_GENERATED,
    COUNT_NONE,
    COUNT_PROMPT,
    FLAG_COUNTS,
    FLAG_LOGPROBS,
    HEADER,
    SAMPLE_PARAMS,
    STEP_FIELDS,
    USE_BIAS,
    USE_LOGPROBS,
    USE_MASK,
    USE_PENALTIES,
)
from ninfer.ir.types import Env
from ninfer.runtime.batch import Draw, Drawn, SeqRows


def step_arrays(env: Env) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
    """Zeroed step fields with the full extents of `env`, and a header."""
    step = {f.name: np.zeros(f.type.concrete(env), f.type.dtype.numpy) for f in STEP_FIELDS}
    return step, np.zeros((), HEADER.numpy)


def fill_step(seqs: Sequence[SeqRows], step: Mapping[str, NDArray[Any]], header: NDArray[Any]) -> int:
    """Write a batch into step arrays and header; what lies beyond the counts is left as it was. Returns the rows.

    A sequence that draws has logit rows for its last num_draws rows. Token counts are kept while any sequence has
    penalties, and in chunks that draw nothing, whose sequence may have them later.
    """
    params = step["params"].view(SAMPLE_PARAMS.numpy).reshape(-1)
    at, num_logits, flags = 0, 0, 0
    for b, seq in enumerate(seqs):
        n = len(seq.tokens)
        rows = slice(at, at + n)
        step["tokens"][rows] = seq.tokens
        step["positions"][rows] = np.arange(seq.kv_len, seq.kv_len + n)
        step["row_seq"][rows] = b
        step["count_mode"][rows] = COUNT_GENERATED if seq.generated else COUNT_PROMPT
        if seq.num_draws > 1:
            step["count_mode"][at + 1 : at + n] = COUNT_NONE  # drafts, which count when they are kept
        elif seq.draw is None and seq.generated:
            step["count_mode"][at] = COUNT_NONE  # the first of the rows kept, which was counted when it was verified
        step["row_start"][b], step["row_count"][b] = at, n
        step["seq_slot"][b], step["kv_len"][b] = seq.slot, seq.kv_len
        step["room"][b], step["most_drafts"][b] = seq.room, seq.most_drafts
        at += n
        if seq.draw is None:
            flags |= FLAG_COUNTS
            continue
        for i in range(seq.num_draws):
            row = at - seq.num_draws + i
            step["logit_rows"][num_logits] = row
            position = seq.kv_len + n - seq.num_draws + i + 1
            draw = seq.draw_at(i)
            uses = _write_params(params[num_logits], draw, seq.slot, position, i)
            params[num_logits]["proposal"] = seq.proposal if i + 1 < seq.num_draws else 0  # no draft behind the last
            counted = draw.counted or uses & USE_PENALTIES
            flags |= (FLAG_COUNTS if counted else 0) | (FLAG_LOGPROBS if uses & USE_LOGPROBS else 0)
            num_logits += 1
    header["rows"], header["seqs"], header["logit_rows"], header["flags"] = at, len(seqs), num_logits, flags
    header["step"] += 1
    return at


def _write_params(p: Any, draw: Draw, slot: int, position: int, mask_row: int) -> int:
    """Fill a SampleParams record; returns its flags."""
    s = draw.sampling
    flags = 0
    if s.has_penalties:
        flags |= USE_PENALTIES
    if s.logit_bias:
        flags |= USE_BIAS
    if draw.masked:
        flags |= USE_MASK
    if draw.logprobs is not None:
        flags |= USE_LOGPROBS
    p["temperature"], p["top_p"], p["min_p"], p["top_k"] = s.temperature, s.top_p, s.min_p, s.top_k
    p["repetition_penalty"], p["presence_penalty"] = s.repetition_penalty, s.presence_penalty
    p["frequency_penalty"] = s.frequency_penalty
    p["flags"], p["seed"], p["position"] = flags, draw.seed & 0xFFFFFFFFFFFFFFFF, position
    p["slot"], p["mask_row"] = slot, mask_row
    return flags


def read_drawn(seqs: Sequence[SeqRows], outputs: Mapping[str, NDArray[Any]]) -> list[Drawn | None]:
    """What a sample graph gave each sequence, where each draws once at most."""
    return [drawn[-1] if drawn else None for drawn in read_draws(seqs, outputs)]


def read_draws(seqs: Sequence[SeqRows], outputs: Mapping[str, NDArray[Any]]) -> list[tuple[Drawn, ...]]:
    """All draws of each sequence."""
    drawn: list[tuple[Drawn, ...]] = []
    row = 0
    for seq in seqs:
        n = 0 if seq.draw is None else seq.num_draws
        logprobs = None if seq.draw is None else seq.draw.logprobs
        drawn.append(tuple(_drawn(outputs, i, logprobs) for i in range(row, row + n)))
        row += n
    return drawn


def _drawn(outputs: Mapping[str, NDArray[Any]], row: int, num_best: int | None) -> Drawn:
    token = int(outputs["token"][row])
    if num_best is None or token < 0:
        return Drawn(token)
    logprobs = outputs["logprob"][row]
    best = [float(x) for x in logprobs[1 : 1 + num_best]]
    ids = [int(x) for x in outputs["top"][row][:num_best]]
    return Drawn(token, float(logprobs[0]), tuple(zip(ids, best, strict=True)))
