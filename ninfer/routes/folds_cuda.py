"""The delta layers of a round of drafts on a GPU: verification that keeps its inputs, and the fold of all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.ir.ops.fused_rounds import FoldDeltas, FusedDeltaRecord
from ninfer.ir.types import Env, Types
from ninfer.routes import recurrent_cuda
from ninfer.routes.route import Geometry, Route, Tuning

MOST_PLACES = 16  # rows of a round, which shared memory has room for
MOST_WORDS = 500  # arguments of a kernel: 4 KiB


def _record_refuse(op: FusedDeltaRecord, types: Types) -> str | None:
    places = types[14].shape[1]
    if not isinstance(places, int) or places > MOST_PLACES:
        return f"keeps up to {MOST_PLACES} rows, not {places}"
    if max(op.key_dim, op.value_dim) > 128:
        return f"heads of {op.key_dim} and {op.value_dim} values are longer than 128"
    return recurrent_cuda.fused_refuse(op, types)


def _fold_refuse(op: FoldDeltas, types: Types) -> str | None:
    places = types[0].shape[1]
    if not isinstance(places, int) or places > MOST_PLACES:
        return f"folds up to {MOST_PLACES} rows, not {places}"
    if op.key_dim % 32 or op.key_dim > 128 or op.value_dim % 32:
        return f"heads of {op.key_dim} and {op.value_dim} values are not multiples of 32, the keys' up to 128"
    words = op.EACH * op.layers + 4
    return None if words <= MOST_WORDS else f"{op.layers} layers are {words} arguments, more than {MOST_WORDS}"


def _fold_fits(op: FoldDeltas, types: Types, tuning: Tuning) -> bool:
    return op.value_dim % (8 * tuning["split"]) == 0 and op.value_dim // tuning["split"] <= 128


def _fold_geometry(op: FoldDeltas, types: Types, env: Env, tuning: Tuning) -> Geometry:
    return Geometry((op.value_heads * tuning["split"], op.layers, env.seqs), 4 * op.value_dim // tuning["split"])


def _fold_context(op: FoldDeltas, types: Types, env: Env, tuning: Tuning) -> Mapping[str, Any]:
    return {"split": tuning["split"]}


FUSED_DELTA_RECORD = Route(
    name="fused_delta_record.cuda",
    op=FusedDeltaRecord,
    device="cuda",
    template="cuda/fused_delta_record.cu.j2",
    geometry=recurrent_cuda.fused_geometry,
    context=recurrent_cuda.fused_context,
    refuse=_record_refuse,
    tunings=({"solve": 0}, {"solve": 1}),
    numerics="cuda",
)
FOLD_DELTAS = Route(
    name="fold_deltas.cuda",
    op=FoldDeltas,
    device="cuda",
    template="cuda/fold_deltas.cu.j2",
    geometry=_fold_geometry,
    context=_fold_context,
    refuse=_fold_refuse,
    tunings=({"split": 2}, {"split": 1}, {"split": 4}),
    fits=_fold_fits,
    numerics="cuda",
)

ROUTES: tuple[Route[Any], ...] = (FUSED_DELTA_RECORD, FOLD_DELTAS)
