"""What a round of drafts decides on the device: which drafts are kept, and the record of the step that comes next.

A plan of several steps has a record for each (`Graph.following`). The host writes the first; these ops write those that
follow, so that verification, fold and drafts run without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.formats.dtypes import I32, U32
from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, require
from ninfer.ir.ops.checks import are_ints
from ninfer.ir.step import COUNT_GENERATED, COUNT_NONE, FLAG_COUNTS, HEADER_WORDS
from ninfer.ir.types import Arrays, B, Env, L, T, TensorType, Types, ints, plain

_PAST_FIELDS = "row_count seq_slot kv_len room most_drafts"
SEQ_FIELDS = f"row_start {_PAST_FIELDS}"
NEXT_FIELDS = f"header tokens positions row_seq count_mode {SEQ_FIELDS} logit_rows"
NUM_NEXT = len(NEXT_FIELDS.split())
COUNTING = {"flag_counts": FLAG_COUNTS, "generated": COUNT_GENERATED, "uncounted": COUNT_NONE}  # as templates need it


def _check_next(op: Op, fields: Types) -> None:
    header, tokens, positions, row_seq, count_mode, *seqs, logit_rows = fields
    require(op, header == TensorType((HEADER_WORDS,), U32), f"header must be u32[{HEADER_WORDS}], not {header}")
    are_ints(op, "tokens positions row_seq count_mode", (T,), tokens, positions, row_seq, count_mode)
    are_ints(op, SEQ_FIELDS, (B,), *seqs)
    are_ints(op, "logit_rows", (L,), logit_rows)


def _write_next(fields: Arrays, parts: list[tuple[int, int, list[int], int, int]], *, block: bool = False) -> None:
    """parts: slot, kv_len, tokens, room and most_drafts of each sequence. One with room drafts at its last row, in a
    block at its last `room` rows."""
    header, tokens, positions, row_seq, mode, start, count, slot, kv_len, room, most, logit_rows = map(plain, fields)
    at, num_logits = 0, 0
    for b, (its_slot, past, following, left, its_most) in enumerate(parts):
        n = len(following)
        rows = slice(at, at + n)
        tokens[rows], positions[rows], row_seq[rows] = following, np.arange(past, past + n), b
        mode[rows], mode[at + n - 1] = COUNT_NONE if block else COUNT_GENERATED, COUNT_NONE
        start[b], count[b], slot[b], kv_len[b], room[b], most[b] = at, n, its_slot, past, left, its_most
        at += n
        drafting = left if block else min(left, 1)
        logit_rows[num_logits : num_logits + drafting] = np.arange(at - drafting, at)
        num_logits += drafting
    header[:4] = at, len(parts), num_logits, FLAG_COUNTS


@frozen
class AcceptDrafts(Op):
    """Of each sequence of a verification, the rows to keep: the first, and those whose draft is what was drawn before.

    token: i32 [L], the draw after each row (every row has one; -1: it failed); tokens: [T]; row_start, row_count,
    seq_slot, kv_len, room, most_drafts: [B]; then the record of the following step, which is written: the kept rows,
    each with the token after it in place of its own, which counts if it was a draft, and a logit row at the last of
    those whose sequence goes on drafting -> rows kept i32 [B]. room becomes the drafts wanted: of room less the drafts
    that were kept, at most most_drafts.
    """

    mutates: ClassVar[tuple[int, ...]] = tuple(range(8, 8 + NUM_NEXT))

    def infer(self, args: Types) -> Types:
        token, tokens, *seqs = args[:8]
        are_ints(self, "token", (L,), token)
        are_ints(self, "tokens", (T,), tokens)
        are_ints(self, SEQ_FIELDS, (B,), *seqs)
        _check_next(self, args[8:])
        return (TensorType((B,), I32),)

    def reference(self, args: Arrays) -> Arrays:
        token, tokens, start, count, slot, kv_len, room, most = map(ints, args[:8])
        kept = np.zeros(len(start), np.int32)
        parts = []
        for b, (first, n) in enumerate(zip(start, count, strict=True)):
            agrees = tokens[first + 1 : first + n] == token[first : first + n - 1]
            kept[b] = n if agrees.all() else 1 + int(np.argmin(agrees))
            following = [max(0, int(t)) for t in token[first : first + kept[b]]]
            left = min(max(0, int(room[b] - kept[b] + 1)), int(most[b]))
            parts.append((int(slot[b]), int(kv_len[b]), following, left, int(most[b])))
        _write_next(args[8:], parts)
        return (kept,)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        typed = (
            # all kept, none kept, two of four kept, one row alone, a draw that failed after a kept draft
            cw.ints(L, [5, 6, 7, 8, 1, 2, 3, 11, 12, 99, 14, 15, 7, 21, -1, 23]),
            cw.ints(T, [4, 5, 6, 7, 9, 8, 7, 10, 11, 12, 13, 14, 70, 20, 21, 22]),
            cw.ints(B, [0, 4, 7, 12, 13]),
            cw.ints(B, [4, 3, 5, 1, 3]),
            cw.ints(B, [3, 0, 5, 1, 2]),
            cw.ints(B, [63, 100, 7, 1, 640]),
            cw.ints(B, [3, 50, 4, 0, 9]),
            cw.ints(B, [3, 3, 3, 3, 1]),
            *_next_fields(16, 5),
        )
        types, arrays = tuple(t for t, _ in typed), tuple(a for _, a in typed)
        yield Case(cls(), "s5", types, arrays, Env(16, 16, 5, slots=6), rtol=0, atol=0)


@frozen
class FollowDrafts(Op):
    """The record of the next step of drafting: a row with the new draft for each sequence that wants another.

    draft: i32 [L], of sequences with room, in order; row_count, seq_slot, kv_len, room, most_drafts: [B]; then the
    record of the following step, which is written -> nothing. A sequence whose room is 1 has all that it wants.
    """

    mutates: ClassVar[tuple[int, ...]] = tuple(range(6, 6 + NUM_NEXT))

    def infer(self, args: Types) -> Types:
        draft, *seqs = args[:6]
        are_ints(self, "draft", (L,), draft)
        are_ints(self, _PAST_FIELDS, (B,), *seqs)
        _check_next(self, args[6:])
        return ()

    def reference(self, args: Arrays) -> Arrays:
        draft, count, slot, kv_len, room, most = map(ints, args[:6])
        parts, j = [], 0
        for b in range(len(room)):
            if room[b] > 1:
                parts.append((int(slot[b]), int(kv_len[b] + count[b]), [int(draft[j])], int(room[b] - 1), int(most[b])))
            j += int(room[b] > 0)
        _write_next(args[6:], parts)
        return ()

    @classmethod
    def cases(cls) -> Iterable[Case]:
        typed = (
            cw.ints(L, [11, 12, 13]),
            cw.ints(B, [2, 1, 1, 3]),
            cw.ints(B, [5, 0, 2, 1]),
            cw.ints(B, [62, 7, 100, 9]),
            cw.ints(B, [2, 0, 1, 3]),
            cw.ints(B, [3, 3, 3, 3]),
            *_next_fields(7, 4, num_logits=3),
        )
        types, arrays = tuple(t for t, _ in typed), tuple(a for _, a in typed)
        yield Case(cls(), "s4", types, arrays, Env(7, 3, 4, slots=6), rtol=0, atol=0)


@frozen
class FollowBlock(Op):
    """The record of a block: for each sequence that wants drafts, the token of its last row and a mask for each draft.

    tokens: [T]; row_start, row_count, seq_slot, kv_len, room, most_drafts: [B]; then the record of the following step,
    which is written, with a logit row at every mask -> nothing.
    """

    mask: int
    mutates: ClassVar[tuple[int, ...]] = tuple(range(7, 7 + NUM_NEXT))

    def infer(self, args: Types) -> Types:
        tokens, *seqs = args[:7]
        are_ints(self, "tokens", (T,), tokens)
        are_ints(self, SEQ_FIELDS, (B,), *seqs)
        _check_next(self, args[7:])
        return ()

    def reference(self, args: Arrays) -> Arrays:
        tokens, start, count, slot, kv_len, room, most = map(ints, args[:7])
        parts = [
            (
                int(slot[b]),
                int(kv_len[b] + count[b]),
                [int(tokens[start[b] + count[b] - 1]), *[self.mask] * int(room[b])],
                int(room[b]),
                int(most[b]),
            )
            for b in range(len(room))
            if room[b] > 0
        ]
        _write_next(args[7:], parts, block=True)
        return ()

    @classmethod
    def cases(cls) -> Iterable[Case]:
        typed = (
            cw.ints(T, [11, 12, 13, 14, 15, 16, 17, *[0] * 6]),
            cw.ints(B, [0, 2, 3, 4]),
            cw.ints(B, [2, 1, 1, 3]),
            cw.ints(B, [5, 0, 2, 1]),
            cw.ints(B, [62, 7, 100, 9]),
            cw.ints(B, [2, 0, 1, 5]),
            cw.ints(B, [2, 3, 3, 7]),
            *_next_fields(13, 4),
        )
        types, arrays = tuple(t for t, _ in typed), tuple(a for _, a in typed)
        yield Case(cls(77), "s4", types, arrays, Env(13, 13, 4, slots=6), rtol=0, atol=0)


def _next_fields(rows: int, seqs: int, num_logits: int | None = None) -> list[cw.Typed]:
    """A record that holds something else."""
    header: NDArray[np.uint32] = np.full(HEADER_WORDS, 77, np.uint32)
    row_fields = [cw.ints(T, [-7] * rows) for _ in range(4)]
    seq_fields = [cw.ints(B, [-7] * seqs) for _ in SEQ_FIELDS.split()]
    logit_rows = cw.ints(L, [-7] * (rows if num_logits is None else num_logits))
    return [(TensorType((HEADER_WORDS,), U32), header), *row_fields, *seq_fields, logit_rows]


def accept_drafts(token: TensorType) -> Graph:
    """The graph after a verification, whose result `token` it reads. Output `kept`."""
    g = Graph()
    step = [g.step[name] for name in f"tokens {SEQ_FIELDS}".split()]
    g.outputs["kept"] = g.one(AcceptDrafts(), g.result("token", token), *step, *_following(g))
    return g


def follow_drafts(name: str, draft: TensorType) -> Graph:
    """The graph between two steps of drafting; name: of the result that has the drafts of the first."""
    g = Graph()
    g.add(FollowDrafts(), g.result(name, draft), *(g.step[n] for n in _PAST_FIELDS.split()), *_following(g))
    return g


def follow_block(mask: int) -> Graph:
    """The graph between the rows that were kept and the block behind them."""
    g = Graph()
    fields = [g.step[n] for n in f"tokens {SEQ_FIELDS}".split()]
    g.add(FollowBlock(mask), *fields, *_following(g))
    return g


def _following(g: Graph) -> list[Value]:
    return [g.following[name] for name in NEXT_FIELDS.split()]


ROUND_OPS: tuple[type[Op], ...] = (AcceptDrafts, FollowDrafts, FollowBlock)
