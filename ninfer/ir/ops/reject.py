"""Rejection sampling of drafts that were drawn (DFlash2; Leviathan et al. 2023, Chen et al. 2023).

A draft d drawn from q is kept with probability min(1, p(d)/q(d)), p being the target's distribution; else the token is
drawn from what p has more than q. So tokens follow p exactly, and a row's token equals the draft after it exactly if
that is kept: who reads the tokens needs no other rule than with keyed draws.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.formats.dtypes import F32, I32
from ninfer.formats.rng import uniform
from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, require
from ninfer.ir.ops.checks import are_ints, is_rows
from ninfer.ir.ops.sample import Sample, adjusted, draw, kept, sample, settings_case
from ninfer.ir.step import MASK_ROWS, PROPOSAL_COPY, SAMPLE_PARAMS
from ninfer.ir.types import Array, Arrays, B, Env, L, S, T, TensorType, Types, f32_array, ints, plain

PURPOSE_ACCEPT, PURPOSE_CORRECT = 2, 3  # of uniforms; plain draws and proposals have others


@frozen
class KeepProposals(Op):
    """proposals[slot, i] = [candidates | q] of a sequence's i-th draft, as float32: ids are exact below 2^24.

    candidates: i32 [L, C]; q: f32 [L, C]; logit_rows [L], of which a sequence's first is its second row; row_seq [T];
    row_start, seq_slot [B]; proposals: f32 state [S, 16, 2C] -> nothing.
    """

    mutates: ClassVar[tuple[int, ...]] = (6,)

    def infer(self, args: Types) -> Types:
        candidates, q, logit_rows, row_seq, row_start, seq_slot, proposals = args
        count, rows = is_rows(self, "q", q), q.shape[0]
        require(self, candidates == TensorType((rows, count), I32), f"candidates is {candidates}, q is {q}")
        are_ints(self, "logit_rows", (rows,), logit_rows)
        are_ints(self, "row_seq", (T,), row_seq)
        are_ints(self, "row_start seq_slot", (B,), row_start, seq_slot)
        expected = TensorType((S, MASK_ROWS, 2 * count), F32)
        require(self, proposals == expected, f"proposals is {proposals}, not {expected}")
        return ()

    def reference(self, args: Arrays) -> Arrays:
        rows, row_seq, row_start, seq_slot = map(ints, args[2:6])
        b = row_seq[rows]
        both = np.concatenate([ints(args[0]).astype(np.float32), f32_array(args[1])], axis=1)
        plain(args[6])[seq_slot[b], rows - row_start[b] - 1] = both
        return ()

    @classmethod
    def cases(cls) -> Iterable[Case]:
        dice = cw.rng(4)
        typed = (
            (TensorType((L, 4), I32), dice.integers(0, 200, (3, 4)).astype(np.int32)),
            (TensorType((L, 4)), dice.random((3, 4)).astype(np.float32)),
            cw.ints(L, [1, 2, 4]),
            cw.ints(T, [0, 0, 0, 1, 1]),
            cw.ints(B, [0, 3]),
            cw.ints(B, [1, 0]),
            (TensorType((S, MASK_ROWS, 8)), dice.random((2, MASK_ROWS, 8)).astype(np.float32)),
        )
        types, arrays = tuple(t for t, _ in typed), tuple(a for _, a in typed)
        yield Case(cls(), "two", types, arrays, Env(5, 3, 2, slots=2), rtol=0, atol=0)


@frozen
class SampleRejecting(Sample):
    """Sample, where the params of a row with a draft behind it say how that was drafted: PROPOSAL_DRAWN, from the
    slot's proposals, or PROPOSAL_COPY, with certainty. Other rows draw as Sample does.

    Sample's arguments; tokens, row_seq [T]; row_start [B]; logit_rows [L]; proposals: f32 state [S, 16, 2C] -> as
    Sample.
    """

    def infer(self, args: Types) -> Types:
        tokens, row_seq, row_start, logit_rows, proposals = args[5:]
        are_ints(self, "tokens row_seq", (T,), tokens, row_seq)
        are_ints(self, "row_start", (B,), row_start)
        are_ints(self, "logit_rows", args[0].shape[:1], logit_rows)
        fits = len(proposals.shape) == 3 and proposals.shape[:2] == (S, MASK_ROWS)
        require(self, fits, f"proposals is {proposals}, not [S, {MASK_ROWS}, 2C]")
        return super().infer(args[:5])

    def reference(self, args: Arrays) -> Arrays:
        drawn, logprobs, top = super().reference(args[:5])
        token = ints(drawn).copy()
        logits, counts, bias, mask = f32_array(args[0]), ints(args[2]), plain(args[3]), plain(args[4])
        params = np.ascontiguousarray(plain(args[1])).view(SAMPLE_PARAMS.numpy).reshape(len(logits))
        tokens, row_seq, row_start, rows = map(ints, args[5:9])
        proposals = plain(args[9])
        for i, p in enumerate(params):
            if p["proposal"] == 0 or p["temperature"] <= 0 or token[i] < 0:
                continue  # greedy: the draw is the draft, or it is not
            slot, t = p["slot"], rows[i]
            row = logits[i, : self.domain]
            z = adjusted(row, p, counts[slot, : self.domain], bias[slot, : self.domain], mask[slot, p["mask_row"]])
            draft, q = int(tokens[t + 1]), np.zeros(self.domain, np.float32)
            if p["proposal"] == PROPOSAL_COPY:
                q[draft] = 1
            else:
                ids, probabilities = np.split(proposals[slot, t - row_start[row_seq[t]]], 2)
                q[ids.astype(np.int32)] = probabilities
            token[i] = judged(z, p, draft, q)
        return token, self._logprobs(args, token, logprobs), top

    def _logprobs(self, args: Arrays, token: NDArray[np.int32], logprobs: Array) -> NDArray[np.float32]:
        """The drawn token's is the first, and the token may be another than Sample's."""
        out = f32_array(logprobs).copy()
        logits = f32_array(args[0])[:, : self.domain]
        params = np.ascontiguousarray(plain(args[1])).view(SAMPLE_PARAMS.numpy).reshape(len(logits))
        for i in np.flatnonzero((params["proposal"] != 0) & (token >= 0)):
            best = logits[i].max()
            out[i, 0] = logits[i, token[i]] - best - np.log(np.exp(logits[i] - best).sum())
        return out

    @classmethod
    def cases(cls) -> Iterable[Case]:
        case, params, records = settings_case()
        n = len(records)
        records["proposal"] = [i % 3 for i in range(n)]
        dice = cw.rng(8)
        proposals = np.zeros((2, MASK_ROWS, 8), np.float32)
        proposals[..., :4] = np.arange(8).reshape(2, 1, 4) * 100 + np.arange(MASK_ROWS)[:, None]
        proposals[..., 4:] = dice.dirichlet(np.ones(4), (2, MASK_ROWS))
        drafts = [int(proposals[i % 2, 0, i % 4]) for i in range(n)]
        typed = (
            cw.ints(T, [x for d in drafts for x in (1, d)]),
            cw.ints(T, [i for i in range(n) for _ in range(2)]),
            cw.ints(B, [2 * i for i in range(n)]),
            cw.ints(L, [2 * i for i in range(n)]),
            (TensorType((S, MASK_ROWS, 8)), proposals),
        )
        types = (*case.types, *(t for t, _ in typed))
        arrays = (case.arrays[0], params, *case.arrays[2:], *(a for _, a in typed))
        env = Env(2 * n, n, n, slots=2)
        yield Case(cls(990), "kinds", types, arrays, env, case.rtol, case.atol, case.header_flags)


def judged(z: NDArray[np.float32], p: Any, draft: int, q: NDArray[np.float32]) -> int:
    """The draft, or a token of the rest.   z: logits that a draw sees; q: [V], the draft's distribution."""
    scaled = z / p["temperature"]
    keep = kept(scaled, p)
    e = np.where(keep, np.exp(scaled - scaled[keep].max()), 0)
    target = (e / e.sum()).astype(np.float32)
    seed, position = int(p["seed"]), int(p["position"])
    u = uniform(seed, position, PURPOSE_ACCEPT, 0)[0]
    if target[draft] >= q[draft] or u * q[draft] < target[draft]:
        return draft
    rest = np.maximum(target - q, 0)
    if not rest.any():
        return draw(z, p)
    noise = uniform(seed, position, PURPOSE_CORRECT, np.arange(len(z), dtype=np.uint32))
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(rest) - np.log(-np.log(noise))))


def proposal_state(g: Graph, count: int) -> Value:
    return g.state("draft.proposals", TensorType((S, MASK_ROWS, 2 * count)))


def sample_rejecting(g: Graph, logits: Value, *, domain: int, count: int) -> None:
    """As `sample`."""
    step = g.step
    fields = (step["tokens"], step["row_seq"], step["row_start"], step["logit_rows"])
    sample(g, logits, domain=domain, op=SampleRejecting(domain), more=(*fields, proposal_state(g, count)))


def keep_proposals(g: Graph, candidates: Value, q: Value, count: int) -> None:
    step = g.step
    fields = (step["logit_rows"], step["row_seq"], step["row_start"], step["seq_slot"])
    g.add(KeepProposals(), candidates, q, *fields, proposal_state(g, count))


REJECT_OPS: tuple[type[Op], ...] = (KeepProposals, SampleRejecting)
