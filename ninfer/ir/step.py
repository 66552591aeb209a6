"""The record that tells a plan what this step is, written by the host before each launch.

A step has `seqs` sequences; sequence b owns row_count[b] rows from row_start[b] on, which extend its cached
kv_len[b] tokens. Row t of sequence b therefore fills cache position kv_len[b] + t - row_start[b]. Rows of one
sequence are contiguous and in order. A sequence with kv_len 0 starts: its recurrent state counts as zero,
whatever the slot held before.

A plan of several steps has a record for each. The host writes the first, launches of the plan itself the others.
"""

from __future__ import annotations

from attrs import frozen

from ninfer.formats.dtypes import F32, I32, U32, U64, DType
from ninfer.formats.kv import PAGE as PAGE
from ninfer.formats.record import Field, Record
from ninfer.ir.types import B, Dim, L, M, S, T, TensorType

FLAG_COUNTS = 1  # some sequence has penalties: token counts are kept
FLAG_LOGPROBS = 2  # some row wants log-probabilities

# The first argument of every kernel. Counts are of this step and at most those of the plan's Env.
HEADER = Record(
    "StepHeader",
    (
        Field("rows", I32),
        Field("seqs", I32),
        Field("logit_rows", I32),
        Field("flags", U32),
        Field("step", U32),
        Field("reserved", U32, 3),
    ),
)

HEADER_WORDS = HEADER.numpy.itemsize // 4

USE_PENALTIES = 1
USE_BIAS = 2
USE_MASK = 4
USE_LOGPROBS = 8

# How the draft after a row came about, where that matters to its verification.
PROPOSAL_DRAWN = 1  # from the distribution that its drafter left in the slot
PROPOSAL_COPY = 2  # with certainty

# One per logit row. proposal: 0, or PROPOSAL_*. position: the one that the drawn token will fill (it keys the draw
# together with seed).
SAMPLE_PARAMS = Record(
    "SampleParams",
    (
        Field("temperature", F32),
        Field("top_p", F32),
        Field("min_p", F32),
        Field("repetition_penalty", F32),
        Field("presence_penalty", F32),
        Field("frequency_penalty", F32),
        Field("top_k", I32),
        Field("flags", U32),
        Field("seed", U64),
        Field("position", U32),
        Field("slot", I32),
        Field("mask_row", I32),
        Field("proposal", U32),
    ),
)

MASK_ROWS = 16  # grammar masks a slot may have in one step: one per verified draft position
NUM_TOP = 20
COUNT_NONE, COUNT_PROMPT, COUNT_GENERATED = 0, 1, 2
PROMPT_BIT = 1 << 30  # set in a token count once the token stood in the prompt; low bits count generated ones


@frozen
class StepField:
    """A step input: a name, its type over the step's symbols."""

    name: str
    type: TensorType


def _field(name: str, *shape: Dim, dtype: DType = I32) -> StepField:
    return StepField(name, TensorType(shape, dtype))


# Page table rows live on the device across steps ([S, M], a State); everything below is written each step.
STEP_FIELDS: tuple[StepField, ...] = (
    _field("tokens", T),
    _field("positions", T),  # for rope; equal to the cache position for plain text
    _field("row_seq", T),  # b of each row
    _field("count_mode", T),  # COUNT_*
    _field("row_start", B),
    _field("row_count", B),
    _field("seq_slot", B),
    _field("kv_len", B),
    _field("room", B),  # of a round: drafts that may come after it if none of its own is kept
    _field("most_drafts", B),  # of a round: drafts that are wanted after it, at most
    _field("logit_rows", L),  # the row that each logit row reads
    _field("targets", L),  # for scoring: the token whose log-probability is asked
    StepField("params", TensorType((L, SAMPLE_PARAMS.numpy.itemsize // 4), U32)),
)
HEADER_FIELD = StepField("header", TensorType((HEADER_WORDS,), U32))  # of a record that the device writes
STATE_PAGE_TABLE = ("page_table", TensorType((S, M), I32))
