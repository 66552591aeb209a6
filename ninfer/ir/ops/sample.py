"""From logits to tokens: penalties, bias, masks, filters and the keyed draw, over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.formats.dtypes import F32, I32, U32
from ninfer.formats.rng import uniform
from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, require
from ninfer.ir.ops.checks import are_ints, is_rows
from ninfer.ir.step import (
    COUNT_GENERATED,
    COUNT_NONE,
    COUNT_PROMPT,
    FLAG_COUNTS,
    FLAG_LOGPROBS,
    MASK_ROWS,
    NUM_TOP,
    PROMPT_BIT,
    SAMPLE_PARAMS,
    USE_BIAS,
    USE_LOGPROBS,
    USE_MASK,
    USE_PENALTIES,
)
from ninfer.ir.types import Arrays, B, Env, L, S, T, TensorType, Types, f32_array, ints, plain

PURPOSE_DRAW = 1  # the stream of uniforms that a plain draw uses; drafters use others
PARAM_WORDS = SAMPLE_PARAMS.numpy.itemsize // 4


@frozen
class CountTokens(Op):
    """counts[slot, token] takes note of each row's token; a sequence that starts (kv_len 0) clears its slot first.

    tokens, row_seq, count_mode: [T]; seq_slot, kv_len: [B]; counts: i32 state [S, V] -> nothing. Mode COUNT_PROMPT
    sets PROMPT_BIT, COUNT_GENERATED adds one. Kernels do nothing unless the step has FLAG_COUNTS.
    """

    mutates: ClassVar[tuple[int, ...]] = (5,)

    def infer(self, args: Types) -> Types:
        tokens, row_seq, count_mode, seq_slot, kv_len, counts = args
        are_ints(self, "tokens row_seq count_mode", (T,), tokens, row_seq, count_mode)
        are_ints(self, "seq_slot kv_len", (B,), seq_slot, kv_len)
        is_counts = len(counts.shape) == 2 and counts.shape[0] is S and counts.dtype is I32
        require(self, is_counts, f"counts must be i32 [S, V], not {counts}")
        return ()

    def reference(self, args: Arrays) -> Arrays:
        tokens, row_seq, mode, seq_slot, kv_len = map(ints, args[:5])
        counts = plain(args[5])
        counts[seq_slot[kv_len == 0]] = 0
        for token, b, m in zip(tokens, row_seq, mode, strict=True):
            if m == COUNT_PROMPT:
                counts[seq_slot[b], token] |= PROMPT_BIT
            elif m == COUNT_GENERATED:
                counts[seq_slot[b], token] += 1
        return ()

    @classmethod
    def cases(cls) -> Iterable[Case]:
        counts = cw.rng(1).integers(0, 3, (3, 50)).astype(np.int32)
        typed = (
            cw.ints(T, [3, 3, 4, 49, 7]),
            cw.ints(T, [0, 0, 0, 1, 1]),
            cw.ints(T, [COUNT_PROMPT, COUNT_GENERATED, COUNT_GENERATED, COUNT_GENERATED, COUNT_NONE]),
            cw.ints(B, [2, 0]),
            cw.ints(B, [5, 0]),
            (TensorType((S, 50), I32), counts),
        )
        types, arrays = tuple(t for t, _ in typed), tuple(a for _, a in typed)
        yield Case(cls(), "mixed", types, arrays, Env(5, 1, 2, slots=3), 0, 0, header_flags=FLAG_COUNTS)


def adjusted(
    logits: NDArray[np.float32],
    p: Any,
    counts: NDArray[np.int32],
    bias: NDArray[np.float32],
    mask: NDArray[np.uint32],
) -> NDArray[np.float32]:
    """The logits a draw sees: penalties (Keskar et al. 2019; OpenAI's presence and frequency), bias, mask.   [V]"""
    z = logits.astype(np.float32).copy()
    if p["flags"] & USE_PENALTIES:
        generated = counts & (PROMPT_BIT - 1)
        z = np.where(counts != 0, np.where(z > 0, z / p["repetition_penalty"], z * p["repetition_penalty"]), z)
        z = z - p["frequency_penalty"] * generated.astype(np.float32) - p["presence_penalty"] * (generated > 0)
    if p["flags"] & USE_BIAS:
        z = z + bias
    if p["flags"] & USE_MASK:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(z)]
        z = np.where(allowed == 1, z, -np.inf)
    return z.astype(np.float32)


def kept(z: NDArray[np.float32], p: Any) -> NDArray[np.bool_]:
    """Which tokens survive top_k, then top_p, then min_p, of logits already divided by the temperature.   [V]

    Order is by logit descending, then id ascending; a token is in the top_p set while the mass before it is below
    top_p, so at least one is kept.
    """
    order = np.argsort(-z, kind="stable")
    if 0 < p["top_k"] < len(z):
        order = order[: p["top_k"]]
    weights = np.exp(z[order] - z[order[0]])
    if p["top_p"] < 1:
        before = np.cumsum(weights) - weights
        n = max(1, int(np.count_nonzero(before < p["top_p"] * weights.sum())))
        order, weights = order[:n], weights[:n]
    keep = np.zeros(len(z), bool)
    keep[order[weights >= p["min_p"]]] = True  # weights are relative to the best
    return keep & (z > -np.inf)


def draw(z: NDArray[np.float32], p: Any) -> int:
    """argmax of z / temperature + Gumbel noise keyed by (seed, position, token), over the kept tokens."""
    if p["temperature"] <= 0:
        return int(np.argmax(z))
    z = z / p["temperature"]
    u = uniform(int(p["seed"]), int(p["position"]), PURPOSE_DRAW, np.arange(len(z), dtype=np.uint32))
    noisy = z - np.log(-np.log(u))
    return int(np.argmax(np.where(kept(z, p), noisy, -np.inf)))


@frozen
class Sample(Op):
    """Draw one token per logit row; report log-probabilities of the raw distribution where they are asked.

    logits: [L, V]; params: u32 [L, words of SampleParams]; counts: i32 [S, V]; bias: f32 [S, V]; mask: u32
    [S, MASK_ROWS, ceil(V/32)], bit t & 31 of word t >> 5 -> token i32 [L] (-1: the logits are not finite),
    logprob f32 [L, 1 + NUM_TOP] (the drawn token's, then the best), top ids i32 [L, NUM_TOP].
    Only ids below `domain` exist. Without USE_LOGPROBS the last two are unspecified.
    """

    domain: int

    def infer(self, args: Types) -> Types:
        logits, params, counts, bias, mask = args
        v, rows = is_rows(self, "logits", logits), logits.shape[0]
        require(self, self.domain <= v, f"domain {self.domain} exceeds {logits}")
        for name, type, expected in (
            ("params", params, TensorType((rows, PARAM_WORDS), U32)),
            ("counts", counts, TensorType((S, v), I32)),
            ("bias", bias, TensorType((S, v), F32)),
            ("mask", mask, TensorType((S, MASK_ROWS, (v + 31) // 32), U32)),
        ):
            require(self, type == expected, f"{name} must be {expected}, not {type}")
        return TensorType((rows,), I32), TensorType((rows, 1 + NUM_TOP)), TensorType((rows, NUM_TOP), I32)

    def reference(self, args: Arrays) -> Arrays:
        logits, counts, bias, mask = f32_array(args[0]), ints(args[2]), plain(args[3]), plain(args[4])
        n = len(logits)
        params = np.ascontiguousarray(plain(args[1])).view(SAMPLE_PARAMS.numpy).reshape(n)
        tokens = np.full(n, -1, np.int32)
        logprobs, top = np.zeros((n, 1 + NUM_TOP), np.float32), np.zeros((n, NUM_TOP), np.int32)
        for i, p in enumerate(params):
            row = logits[i, : self.domain]
            if not np.isfinite(row).all():
                continue
            slot = p["slot"]
            z = adjusted(row, p, counts[slot, : self.domain], bias[slot, : self.domain], mask[slot, p["mask_row"]])
            tokens[i] = draw(z, p)
            if p["flags"] & USE_LOGPROBS:
                lse = row.max() + np.log(np.exp(row - row.max()).sum())
                best = np.argsort(-row, kind="stable")[:NUM_TOP]
                top[i, : len(best)] = best
                logprobs[i, 0] = row[tokens[i]] - lse
                logprobs[i, 1 : 1 + len(best)] = row[best] - lse
        return tokens, logprobs, top

    @classmethod
    def cases(cls) -> Iterable[Case]:
        v = 1000
        logits = (cw.rng(1).standard_normal((12, v)) * 3).astype(np.float32)
        logits[1, [3, 900]] = logits[1].max() + 1  # a tie: the lower id wins
        p = np.zeros(12, SAMPLE_PARAMS.numpy)
        p["top_p"], p["repetition_penalty"] = 1, 1
        p["seed"], p["position"] = 0x123456789ABCDEF, np.arange(12) + 5
        p["slot"] = np.arange(12) % 2
        p["temperature"] = [0, 0, 1, 1, 0.7, 1, 1.5, 1, 1, 0, 2, 1]
        p["top_k"] = [0, 0, 0, 5, 20, 0, 0, 0, 0, 0, 1, 0]
        p["top_p"] = [1, 1, 1, 1, 0.9, 0.5, 0.01, 1, 1, 1, 1, 0.95]
        p["min_p"] = [0, 0, 0, 0, 0, 0, 0, 0.05, 0, 0, 0, 0.01]
        p["flags"] = [
            USE_LOGPROBS,
            0,
            USE_LOGPROBS,
            0,
            USE_PENALTIES,
            USE_BIAS,
            0,
            USE_MASK,
            15,
            USE_MASK,
            0,
            0,
        ]
        p["mask_row"] = [0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0]
        p["repetition_penalty"][[4, 8]], p["presence_penalty"][[4, 8]], p["frequency_penalty"][8] = (
            1.3,
            0.5,
            0.2,
        )
        counts = (cw.rng(2).integers(0, 40, (2, v)) // 37).astype(np.int32)
        counts[:, ::9] |= PROMPT_BIT
        bias = np.zeros((2, v), np.float32)
        bias[:, 17], bias[:, 5] = 100, -100
        mask = cw.rng(4).integers(0, 2**32, (2, MASK_ROWS, (v + 31) // 32), dtype=np.uint32)
        types = (
            TensorType((L, v)),
            TensorType((L, PARAM_WORDS), U32),
            TensorType((S, v), I32),
            TensorType((S, v), F32),
            TensorType((S, MASK_ROWS, (v + 31) // 32), U32),
        )
        arrays = (logits, p.view(np.uint32).reshape(12, -1), counts, bias, mask)
        # tokens must be equal; log-probabilities pass through a sum of 1000 float32 exponentials
        yield Case(cls(990), "settings", types, arrays, Env(12, 12, 2, slots=2), 2e-5, 2e-5, FLAG_LOGPROBS)


def settings_case() -> tuple[Case, NDArray[Any], NDArray[Any]]:
    """Sample's own case, and a copy of its settings to change: as the operand and as records, one memory."""
    (case,) = Sample.cases()
    params = plain(case.arrays[1]).copy()
    return case, params, params.view(SAMPLE_PARAMS.numpy).reshape(-1)


@frozen
class SampleAhead(Sample):
    """Sample over rows of drafts: penalties count the tokens of a sequence's rows up to the one drawn after; the first
    of them `counts` has.

    Sample's arguments; tokens, row_seq [T]; row_start [B]; logit_rows [L] -> as Sample.
    """

    def infer(self, args: Types) -> Types:
        tokens, row_seq, row_start, logit_rows = args[5:]
        are_ints(self, "tokens row_seq", (T,), tokens, row_seq)
        are_ints(self, "row_start", (B,), row_start)
        are_ints(self, "logit_rows", args[0].shape[:1], logit_rows)
        return super().infer(args[:5])

    def reference(self, args: Arrays) -> Arrays:
        logits, words = f32_array(args[0]), np.ascontiguousarray(plain(args[1]))
        params = words.view(SAMPLE_PARAMS.numpy).reshape(-1)
        tokens, row_seq, row_start, rows = map(ints, args[5:])
        found = []
        for i, t in enumerate(rows):  # each by itself, with counts of its own
            counts = ints(args[2]).copy()
            for draft in tokens[row_start[row_seq[t]] + 1 : t + 1]:
                counts[params[i]["slot"], draft] += 1
            found.append(super().reference((logits[i : i + 1], words[i : i + 1], counts, *args[3:5])))
        token, logprobs, top = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return token, logprobs, top

    @classmethod
    def cases(cls) -> Iterable[Case]:
        case, params, records = settings_case()
        n = len(records)
        records["flags"] |= USE_PENALTIES
        records["slot"] = [i // 6 for i in range(n)]
        records["repetition_penalty"], records["presence_penalty"] = 1.4, 3.0
        records["frequency_penalty"] = [0.7 * (i % 3) for i in range(n)]
        drafts = [int(row[:990].argmax()) for row in plain(case.arrays[0])]  # what a draw without penalties would say
        drafts[9] = drafts[8]
        typed = (
            cw.ints(T, [1, *drafts[1:6], 2, *drafts[7:]]),
            cw.ints(T, [0] * 6 + [1] * 6),
            cw.ints(B, [0, 6]),
            cw.ints(L, list(range(n))),
        )
        types = (*case.types, *(t for t, _ in typed))
        arrays = (case.arrays[0], params, *case.arrays[2:], *(a for _, a in typed))
        yield Case(cls(990), "rows", types, arrays, Env(n, n, 2, slots=2), case.rtol, case.atol, case.header_flags)


@frozen
class TokenLogprob(Op):
    """log softmax of each row at its target.   logits: [L, V]; targets: i32 [L] -> [L]. For scoring texts."""

    domain: int

    def infer(self, args: Types) -> Types:
        logits, targets = args
        v = is_rows(self, "logits", logits)
        require(self, self.domain <= v, f"domain {self.domain} exceeds {logits}")
        are_ints(self, "targets", logits.shape[:1], targets)
        return (TensorType(targets.shape),)

    def reference(self, args: Arrays) -> Arrays:
        logits, targets = f32_array(args[0])[:, : self.domain], ints(args[1])
        best = logits.max(axis=1)
        lse = best + np.log(np.exp(logits - best[:, None]).sum(axis=1))
        return (logits[np.arange(len(logits)), targets] - lse,)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        (xt, x), (tt, t) = cw.rows(L, 3, 1000, scale=4), cw.ints(L, [0, 989, 5])
        yield Case(cls(990), "l3", (xt, tt), (x, t), Env(3, 3, 1), rtol=1e-5, atol=1e-5)


def sample(g: Graph, logits: Value, *, domain: int, op: Sample | None = None, more: tuple[Value, ...] = ()) -> None:
    """Add the draw to the graph, with its states; the outputs are `token`, `logprob` and `top`.   op: another way to
    draw, with its further arguments."""
    v = logits.type.shape[1]
    assert isinstance(v, int)
    counts = g.state("counts", TensorType((S, v), I32))
    bias = g.state("bias", TensorType((S, v), F32))
    mask = g.state("mask", TensorType((S, MASK_ROWS, (v + 31) // 32), U32))
    step = g.step
    g.add(
        CountTokens(),
        step["tokens"],
        step["row_seq"],
        step["count_mode"],
        step["seq_slot"],
        step["kv_len"],
        counts,
    )
    token, logprob, top = g.add(op or Sample(domain), logits, step["params"], counts, bias, mask, *more)
    g.outputs.update(token=token, logprob=logprob, top=top)


def sample_ahead(g: Graph, logits: Value, *, domain: int) -> None:
    """As `sample`, for rows of drafts, of which counts take note where they are kept (`count_kept`)."""
    fields = tuple(g.step[name] for name in ["tokens", "row_seq", "row_start", "logit_rows"])
    sample(g, logits, domain=domain, op=SampleAhead(domain), more=fields)


def count_kept(g: Graph, counts: TensorType) -> None:
    """Add to a graph over kept rows that `counts` take note of them."""
    step = g.step
    fields = (step["tokens"], step["row_seq"], step["count_mode"], step["seq_slot"], step["kv_len"])
    g.add(CountTokens(), *fields, g.state("counts", counts))


def score(g: Graph, logits: Value, *, domain: int) -> None:
    g.outputs["nll"] = g.one(TokenLogprob(domain), logits, g.step["targets"])
