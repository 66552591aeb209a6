"""Formats and layouts under the names that `.ninfer` files use."""

from __future__ import annotations

from math import prod

from ninfer.artifacts.ninfer_directory import Object
from ninfer.errors import ArtifactError
from ninfer.formats.quant import FLOATS, FORMATS, FloatFormat, QuantFormat, nvfp4

OBJECT_ALIGN = 256
CONTIGUOUS = "contiguous_le_v1"
WORDS = {"bf16": 2, "fp32": 4, "int32": 4}  # bytes of one element

_ROW_SPLIT = "row_split_k128_v1"
_BLOCKS = "gguf_blocks_v1"
_FLOAT_LAYOUTS = {"rows": "row_scale_v1", "interleaved": "row_interleaved_v1", "tiles": "block_scale_k16_m128x4_v1"}


def names_of(fmt: QuantFormat) -> tuple[str, str] | None:
    """Format and layout; None for a format that the container has not."""
    if fmt.is_plain:
        return {"bf16": ("bf16", CONTIGUOUS), "f32": ("fp32", CONTIGUOUS)}.get(fmt.name)
    if isinstance(fmt, FloatFormat):
        return None if fmt.layout == "groups" else (fmt.name.split("_d")[0], _FLOAT_LAYOUTS[fmt.layout])
    if fmt.name == "pq2_0":
        return None
    if fmt.split:
        return f"{fmt.name}_fp16", _ROW_SPLIT
    return f"gguf_{fmt.name}", _BLOCKS


_BY_NAMES = {names: fmt for fmt in (*FORMATS, *FLOATS) if (names := names_of(fmt)) is not None}


def format_of(o: Object, where: str) -> QuantFormat:
    """The format of a stored tensor, its encoded size and place compared.   Raises ArtifactError naming it."""
    fmt = _BY_NAMES.get((o.format, o.layout))
    if fmt is None:
        known = ", ".join(sorted({n for n, layout in _BY_NAMES if layout == o.layout} or {n for n, _ in _BY_NAMES}))
        what = f"format {o.format!r} in layout {o.layout!r}"
        raise ArtifactError(f"{where}: {o.where} has {what}, which is not supported; supported are {known}")
    if fmt.name == "nvfp4":
        fmt = nvfp4(o.divisors)
    check_place(o, where)
    if not o.shape or (not fmt.is_plain and len(o.shape) != 2):
        raise ArtifactError(f"{where}: {o.where} has shape {list(o.shape)}, but {o.format} stores matrices")
    try:
        nbytes = fmt.nbytes(o.shape)
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {o.where}: {error}") from None
    if nbytes != o.nbytes:
        raise ArtifactError(f"{where}: {o.where} has {o.nbytes} bytes, but {o.format} {list(o.shape)} takes {nbytes}")
    return fmt


def check_place(o: Object, where: str) -> None:
    if o.offset % OBJECT_ALIGN:
        raise ArtifactError(f"{where}: {o.where} does not begin at a multiple of {OBJECT_ALIGN}: the file is damaged")


def check_words(o: Object, format: str, where: str) -> None:
    """A tensor of plain words that is read as such: scalars, permutations."""
    if o.format != format or o.layout != CONTIGUOUS:
        raise ArtifactError(f"{where}: {o.where} is {o.format} in layout {o.layout}; {format} is expected")
    check_place(o, where)
    if o.nbytes != prod(o.shape) * WORDS[format]:
        raise ArtifactError(f"{where}: {o.where} has {o.nbytes} bytes, but its shape is {list(o.shape)} of {format}")
