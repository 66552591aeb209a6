"""The proposal head: rows of a model's head, or all of them in another format, by which drafts alone are chosen.

It is read in place of the head where a drafter proposes; verification never reads it, so it changes how many drafts are
kept and no token. Its rows stand for the tokens that occur most; the others are never proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.artifacts.artifact import PROPOSAL_HEAD
from ninfer.errors import ArtifactError
from ninfer.formats.dtypes import I32
from ninfer.ir.graph import Value
from ninfer.ir.ops.journal import pick_columns
from ninfer.ir.types import TensorType

if TYPE_CHECKING:
    from ninfer.models.family import ModelSpec, Stored


@frozen(eq=False)
class Proposal:
    """num_rows: of the head. columns: of each token, its row or -1, i32 [V]; None: row i is token i."""

    num_rows: int
    columns: NDArray[np.int32] | None

    def has(self, domain: int) -> int:
        """How many token ids below the domain it can propose."""
        return min(self.num_rows, domain) if self.columns is None else int((self.columns[:domain] >= 0).sum())


def parse_proposal(ids: Sequence[int] | NDArray[np.integer] | None, vocab_size: int) -> Proposal:
    """ids: of the head's rows; None: every token, in order.   Raises ArtifactError."""
    if ids is None:
        return Proposal(vocab_size, None)
    tokens = np.asarray(ids, np.int64)
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if wrong.size:
        raise ArtifactError(f"proposal/token_ids has {wrong[0]}, but the vocabulary has {vocab_size} tokens")
    columns = np.full(vocab_size, -1, np.int32)
    columns[tokens] = np.arange(len(tokens), dtype=np.int32)
    if int((columns >= 0).sum()) != len(tokens):
        raise ArtifactError("proposal/token_ids has a token twice: the file is damaged")
    return Proposal(len(tokens), columns)


def draft_scores(w: Stored, target: ModelSpec, hidden: Value) -> Value:
    """Of every token, for choosing drafts.   hidden: [L, H], after the drafter's last norm -> [L, V]."""
    if target.proposal is None:
        name = "model.embed_tokens.weight" if target.tied else "lm_head.weight"
        (scores,) = w.products(hidden, w.matrix(name, target.vocab_size, target.hidden_size))
        return scores
    p = target.proposal
    (scores,) = w.products(hidden, w.matrix(PROPOSAL_HEAD, p.num_rows, target.hidden_size))
    if p.columns is None:
        return scores
    g = w.graph
    return pick_columns(g, scores, g.const("proposal.columns", TensorType(p.columns.shape, I32), p.columns))
