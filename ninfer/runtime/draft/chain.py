"""A round in one plan: verification, acceptance, fold and the drafts for the next round, without the host.

    record 0, from the host: the rows to verify     verify, accept
    record 1, from accept: the rows that were kept   fold, draft (they run again and give the first draft), follow
    record 2 and on: a row with the draft before    draft, follow

A drafter that fills blocks (models/dflash.py) has two records after the first:

    record 1, from accept: the rows that were kept   fold, context
    record 2: the last token and masks               block

The host reads what was drawn, how many rows of each sequence were kept, and the drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from attrs import define, frozen
from numpy.typing import NDArray

from ninfer.devices.base import Executable
from ninfer.devices.plan import Plan
from ninfer.ir.graph import Graph
from ninfer.ir.ops.rounds import accept_drafts, follow_block, follow_drafts
from ninfer.ir.types import Env
from ninfer.models import dflash
from ninfer.routes.lower import Lowering, Part
from ninfer.runtime.batch import Drawn, Limits, SeqRows
from ninfer.runtime.runner import env_of, row_buckets
from ninfer.runtime.steps import fill_step, read_draws

Shape = tuple[int, int]  # sequences at most, drafts for the next round


@frozen
class RoundResult:
    """Of each sequence: what was drawn, as far as its drafts agreed; and its drafts for the next round."""

    drawn: list[tuple[Drawn, ...]]
    drafts: list[tuple[int, ...]]


def chain_shapes(num_drafts: int, adaptive: bool, max_seqs: int) -> list[Shape]:
    """Ascending. An adaptive width takes the next of 1, 3 and 7."""
    drafts = [k for k in (1, 3, 7) if adaptive and k < num_drafts]
    return [(seqs, k) for seqs in row_buckets(max_seqs) for k in (*drafts, num_drafts)]


def lower_chain(
    graphs: Mapping[str, Graph],
    shape: Shape,
    lowering: Lowering,
    graph_at: Callable[[Graph, Env], Graph],
    limits: Limits,
    most_rows: int,
    mask: int | None = None,
) -> Plan:
    """graphs: "verify", "fold" and "draft", or "context" and "block" in its place, whose mask is given. most_rows: of a
    sequence in any round, so that plans of single graphs have the same widths."""
    seqs, num_drafts = shape
    rows = next(w for w in row_buckets(limits.max_seqs * most_rows) if w >= seqs * (1 + num_drafts))
    verified = env_of(limits, rows, rows)
    kept, one = env_of(limits, rows, min(rows, limits.max_seqs)), env_of(limits, seqs)
    verify, fold = graphs["verify"], graphs["fold"]
    token = verify.outputs["token"].type
    parts = [Part(graph_at(verify, verified), verified), Part(accept_drafts(token), verified)]
    if fold.nodes:
        parts.append(Part(graph_at(fold, kept), kept, 1))
    if mask is not None:
        context, block = graphs[dflash.CONTEXT], graphs[dflash.BLOCK]
        parts += [Part(graph_at(context, kept), kept, 1), Part(follow_block(mask), kept, 1)]
        return lowering.join([*parts, Part(graph_at(block, verified), verified, 2)])
    draft = graphs["draft"]
    drafts = draft.outputs["draft"].type
    for i in range(1, num_drafts + 1):
        env = kept if i == 1 else one
        if i > 1:
            parts.append(Part(follow_drafts(f"draft.{i - 1}", drafts), kept if i == 2 else one, i - 1))
        parts.append(Part(graph_at(draft, env), env, i, f".{i}"))
    return lowering.join(parts)


def is_host_free(plan: Plan) -> bool:
    """Library calls take their row counts from the host, which knows those of the first record only."""
    return not any(x.library for x in plan.launches)


@define
class Chain:
    """Rounds of up to so many sequences and drafts; the cheapest plan that a round fits into runs it."""

    executables: Mapping[Shape, Executable]

    def __call__(self, seqs: Sequence[SeqRows]) -> RoundResult:
        """Every row of `seqs` is drawn after; their room and most_drafts say how many drafts follow."""
        rows, most = sum(len(s.tokens) for s in seqs), max(s.most_drafts for s in seqs)
        fits = [
            (e.env.rows, k, e)
            for (n, k), e in self.executables.items()
            if n >= len(seqs) and k >= most and e.env.rows >= rows
        ]
        if not fits:
            raise ValueError(f"a round of {len(seqs)} sequences, {rows} rows and {most} drafts has no plan")
        executable = min(fits, key=lambda fit: fit[:2])[2]
        fill_step(seqs, executable.step, executable.header)
        outputs = executable.launch()
        kept = outputs["kept"].tolist()
        drawn = [found[:n] for found, n in zip(read_draws(seqs, outputs), kept, strict=True)]
        return RoundResult(drawn, _drafts(seqs, kept, outputs))


def _drafts(seqs: Sequence[SeqRows], kept: Sequence[int], outputs: Mapping[str, NDArray[Any]]) -> list[tuple[int, ...]]:
    """A step of drafting has the sequences that still want one, in order; a block has all drafts of each."""
    wanted = [min(max(0, s.room - n + 1), s.most_drafts) for s, n in zip(seqs, kept, strict=True)]
    if "draft" in outputs:
        found = iter(outputs["draft"].tolist())
        return [tuple(islice(found, n)) for n in wanted]
    drafts: list[list[int]] = [[] for _ in seqs]
    for i in range(1, max(wanted, default=0) + 1):
        live = [b for b, n in enumerate(wanted) if n >= i]
        for b, token in zip(live, outputs[f"draft.{i}"], strict=False):
            drafts[b].append(int(token))
    return [tuple(d) for d in drafts]
