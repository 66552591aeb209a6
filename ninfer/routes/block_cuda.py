"""What DFlash2 adds to rounds, on a GPU: its convolution, the selector, and draws that weigh drafts."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from ninfer.ir.op import Op
from ninfer.ir.ops.block import PURPOSE_PROPOSE, BlockConv, SelectDrafts
from ninfer.ir.ops.reject import PURPOSE_ACCEPT, PURPOSE_CORRECT, KeepProposals, SampleRejecting
from ninfer.ir.ops.sample import Sample
from ninfer.ir.step import MASK_ROWS, PROPOSAL_COPY
from ninfer.ir.types import Env, Types
from ninfer.routes import sample_cuda
from ninfer.routes.route import Geometry, Route, Stage, Tuning
from ninfer.routes.sample_cuda import SLICE, slices


def _conv_geometry(op: BlockConv, types: Types, env: Env, tuning: Tuning) -> Geometry:
    rows, n = types[0].concrete(env)
    return Geometry((ceil(n / 256), rows, 1), 256)


# The selector: the best of each row by itself, then a walk over the rows of a sequence.

_SELECT_ARGUMENTS = (
    *(f"const f32* {name}" for name in ("gate", "pred", "succ")),
    "const u32* params",
    *(f"const i32* {name}" for name in ("tokens", "row_seq", "row_start", "logit_rows")),
    *("i32* draft", "i32* candidates", "f32* q"),
)


def _select_refuse(op: SelectDrafts, types: Types) -> str | None:
    return None if op.count <= 32 else f"a block has a warp for each of up to 32 candidates, not {op.count}"


def _select_geometry(op: SelectDrafts, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((ceil(op.domain / SLICE), env.logit_rows, 1), 256)


def _walk_geometry(op: SelectDrafts, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((env.seqs, 1, 1), 32 * op.count)


def _select_context(op: SelectDrafts, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {
        "blocks": ceil(op.domain / SLICE),
        "purpose": PURPOSE_PROPOSE,
        "arguments": "".join(f", {argument}" for argument in _SELECT_ARGUMENTS),
    }


def _select_workspace(op: SelectDrafts, types: Types, env: Env, tuning: Tuning) -> int:
    """A value with its id for each candidate: of every slice of a row, and of the row."""
    return 8 * op.count * (ceil(op.domain / SLICE) + 1) * env.logit_rows


# Proposals and their weighing.


def _count(op: Op, types: Types) -> int:
    """Candidates of a draft."""
    pairs = types[6 if isinstance(op, KeepProposals) else 9].shape[2]
    assert isinstance(pairs, int)
    return pairs // 2


def _keep_block(op: KeepProposals, types: Types) -> int:
    return 32 * ceil(2 * _count(op, types) / 32)


def _keep_geometry(op: KeepProposals, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((env.logit_rows, 1, 1), _keep_block(op, types))


def _keep_context(op: KeepProposals, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"count": _count(op, types), "block": _keep_block(op, types), "places": MASK_ROWS}


def _reject_row_bytes(op: Sample) -> int:
    """Which ids are kept, then a value with its id and a sum for each slice."""
    return ceil((16 + 12 * slices(op)) / 16) * 16


def _reject_workspace(op: Sample, types: Types, env: Env, tuning: Tuning) -> int:
    return sample_cuda.workspace(op, types, env, tuning) + env.logit_rows * _reject_row_bytes(op)


def _reject_context(op: Sample, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    names = ("tokens", "row_seq", "row_start", "logit_rows")
    rejects = {
        "at": sample_cuda.workspace(op, types, env, tuning),
        "row_bytes": _reject_row_bytes(op),
        "count": _count(op, types),
        "copied": PROPOSAL_COPY,
        "accept": PURPOSE_ACCEPT,
        "correct": PURPOSE_CORRECT,
    }
    more = "".join(f" const i32* {name}," for name in names) + " const f32* proposals,"
    return {**sample_cuda.context(op, types, env, tuning), "more": more, "rejects": rejects}


BLOCK_CONV = Route(
    name="block_conv.cuda",
    op=BlockConv,
    device="cuda",
    template="cuda/block_conv.cu.j2",
    geometry=_conv_geometry,
    numerics="cuda",
)
SELECT_DRAFTS = Route(
    name="select_drafts.cuda",
    op=SelectDrafts,
    device="cuda",
    template="cuda/draft_candidates.cu.j2",
    geometry=_select_geometry,
    refuse=_select_refuse,
    context=_select_context,
    workspace=_select_workspace,
    then=(Stage(template="cuda/draft_walk.cu.j2", geometry=_walk_geometry),),
    numerics="cuda",
)
KEEP_PROPOSALS = Route(
    name="keep_proposals.cuda",
    op=KeepProposals,
    device="cuda",
    template="cuda/keep_proposals.cu.j2",
    geometry=_keep_geometry,
    context=_keep_context,
    numerics="exact",
)
SAMPLE_REJECTING = Route(
    name="sample_rejecting.cuda",
    op=SampleRejecting,
    device="cuda",
    template=sample_cuda.SAMPLE.template,
    geometry=sample_cuda.geometry,
    context=_reject_context,
    workspace=_reject_workspace,
    then=(
        *sample_cuda.SAMPLE.then,
        Stage(template="cuda/reject_sum.cu.j2", geometry=sample_cuda.geometry),
        Stage(template="cuda/reject_pick.cu.j2", geometry=sample_cuda.geometry),
    ),
    numerics="cuda",
)

ROUTES: tuple[Route[Any], ...] = (BLOCK_CONV, SELECT_DRAFTS, KEEP_PROPOSALS, SAMPLE_REJECTING)
