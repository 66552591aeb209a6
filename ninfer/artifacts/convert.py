"""From checkpoints to a `.ninfer` artifact: a recipe becomes a plan, and the plan's bytes are made piece by piece.

A plan knows every shape, format and size before anything is read. Matrices are encoded some rows at a time; those that
keep their format are copied as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from ninfer.artifacts.artifact import Artifact, TensorInfo, TokenizerFiles
from ninfer.artifacts.drafters import DRAFTERS, drafter_map, refuse_unknown, stored_drafter_config
from ninfer.artifacts.imatrix import Importance
from ninfer.artifacts.logical import (
    EMBEDDING,
    HEAD,
    PROPOSAL,
    Tensor,
    flat,
    is_tabled,
    part_name,
    stored_config,
    tensor_map,
)
from ninfer.artifacts.names.delta import tiled_columns
from ninfer.artifacts.ninfer_formats import names_of
from ninfer.artifacts.quantize import keeps
from ninfer.artifacts.recipes import KEEP, Recipe
from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.dtypes import bf16_to_f32, f32_to_bf16
from ninfer.formats.quant import BF16_FORMAT, F32_FORMAT, QuantFormat, by_name
from ninfer.formats.search import can_search

F32_PARTS = re.compile(r".*/gdn/(a_log|dt_bias)|.*(A_log|dt_bias)")
RESOURCES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
COMPONENTS = ("text", "mtp", *DRAFTERS)
EMBEDDING_TENSOR = "model.embed_tokens.weight"
MTP_SOURCE = "mtp"  # of --source: an MTP block beside a model
_SKIPPED = re.compile(r"model\.visual\.|visual\.|vision_tower\.|multi_modal_projector\.")
Index = NDArray[np.intp] | slice  # rows of the source tensor


@frozen(eq=False)
class Matrix:
    """An object to be: rows of one source tensor in one format.   parts: logical name and rows, in order.

    search: scales are searched for. importance: [1 or matrices of the source tensor, K], by which they are.
    """

    id: str
    tensor: str
    source: Artifact
    parts: tuple[tuple[str, int], ...]
    index: Index = field(repr=False)
    shape: tuple[int, ...]
    format: QuantFormat
    policy: str
    search: bool = False
    importance: NDArray[np.float32] | None = field(default=None, repr=False)

    @property
    def is_copied(self) -> bool:
        return self.source.info(self.tensor).format is self.format

    @property
    def divisor(self) -> float | None:
        """Of activations, where an NVFP4 matrix has one."""
        found = self.source.divisors(self.tensor) if self.policy == "AllowA4" and self.is_copied else ()
        return found[0] if found else None


@frozen(eq=False)
class Plan:
    """Everything that will be written."""

    recipe: Recipe
    config: Mapping[str, Any]  # of the text component
    components: tuple[str, ...]
    matrices: tuple[Matrix, ...]
    vectors: tuple[Matrix, ...]
    tensors: Mapping[str, Tensor]
    resources: Mapping[str, bytes]
    drafters: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]  # config, and what metadata notes
    name: str
    sources: Mapping[str, str]
    proposal: Matrix | None = None  # rows of the head, for drafts; `index` has their tokens

    @property
    def objects(self) -> tuple[Matrix, ...]:
        return (*self.matrices, *self.vectors, *(() if self.proposal is None else (self.proposal,)))

    @cached_property
    def _by_tensor(self) -> dict[str, list[Matrix]]:
        found: dict[str, list[Matrix]] = {}
        for m in (*self.matrices, *self.vectors):
            found.setdefault(m.tensor, []).append(m)
        return found

    def info(self, name: str) -> TensorInfo:
        """As the written artifact will say it: a graph can be built before anything is copied."""
        whole, _, part = name.partition("/")
        if whole not in self._by_tensor:
            raise ArtifactError(f"the sources have no tensor {name!r}, which the model needs")
        ms = self._by_tensor[whole]
        parts = {part_name(whole, [p for p, _ in m.parts]): m for m in ms}
        if part:
            if name not in parts:
                raise ArtifactError(f"tensor {whole!r} has no part {part!r}")
            return TensorInfo(parts[name].shape, parts[name].format)
        return TensorInfo(ms[0].source.info(whole).shape, ms[0].format, tuple(parts) if len(ms) > 1 else ())

    def plain_shapes(self) -> dict[str, list[int]]:
        """Of tensors under their own names that an object's rows do not tell."""
        infos = {m.tensor: m.source.info(m.tensor).shape for m in self.matrices if m.tensor not in self.tensors}
        return {name: list(shape) for name, shape in infos.items() if len(shape) > 2}

    @property
    def payload_bytes(self) -> int:
        return sum(m.format.nbytes(m.shape) for m in self.objects)


def make_plan(
    recipe: Recipe,
    base: Artifact,
    sources: Mapping[str, Artifact],
    *,
    name: str,
    components: Sequence[str] = ("text",),
    resources: Mapping[str, Path] | None = None,
    proposal: Sequence[int] | None = None,
    search: bool = False,
    importance: Importance | None = None,
) -> Plan:
    """proposal: tokens of a head for drafts. search, importance: of scales of groupwise integers (formats/search.py).

    Raises UsageError or ArtifactError before anything is read: what does not fit, and what would.
    """
    _check_sources(recipe, {*sources, *(() if importance is None else ("imatrix",))})
    holders = [s for s in sources.values() if EMBEDDING_TENSOR in s]  # whole models; else the text is that of base
    config = flat(base.config)
    if holders and not is_tabled(stored_config(config)):
        config = flat(holders[0].config)  # it tells how the weights are stored
    kind = stored_config(config).get("model_type")
    if recipe.models and kind not in recipe.models:
        raise UsageError(f"--recipe: {recipe.name} is for {' or '.join(recipe.models)} models; this one is {kind!r}")
    if MTP_SOURCE in sources:
        config = {**config, "mtp_num_hidden_layers": _mtp_layers(sources[MTP_SOURCE])}
    map_config = {**config, **stored_config(config), "mtp_num_hidden_layers": config.get("mtp_num_hidden_layers", 0)}
    table = tensor_map(map_config)
    first = [sources[MTP_SOURCE]] if MTP_SOURCE in sources else []
    order = [*first, *(s for n, s in sources.items() if n not in (MTP_SOURCE, *DRAFTERS)), base]
    matrices, vectors, extra = list[Matrix](), list[Matrix](), list[str]()
    for tensor_name in _all_names(order):
        component = "mtp" if tensor_name.startswith("mtp.") else "text"
        if _SKIPPED.match(tensor_name) or component not in components:
            continue
        source = next(s for s in order if tensor_name in s)
        if holders and source is base and component == "text":
            continue
        tensor = table.get(tensor_name)
        if tensor is None and is_tabled(map_config) and tensor_name != "rope_freqs.weight":
            extra.append(tensor_name)
            continue
        tensor = tensor or Tensor((f"{component}/{tensor_name}",))
        made = list(_objects(recipe, source, tensor_name, tensor))
        (matrices if made[0].policy else vectors).extend(made)
    if extra:
        raise ArtifactError(
            f"{base.path}: {len(extra)} tensors have no place in a {kind} model: {', '.join(extra[:5])}"
        )
    drafters = {}
    for component in [c for c in components if c in DRAFTERS]:
        if component not in sources:
            raise UsageError(f"--components: {component} requires its drafter; provide --source {component}=PATH")
        source = sources[component]
        drafters[component] = (stored_drafter_config(component, source.config), {"is_causal": _causal(source.config)})
        own = drafter_map(component, source.config)
        table |= own
        refuse_unknown(source, component)
        for name_ in source.names():
            made = list(_objects(recipe, source, name_, own[f"{component}.{name_}"]))
            (matrices if made[0].policy else vectors).extend(made)
    if "mtp" in components and not any(m.tensor.startswith("mtp.") for m in matrices):
        raise UsageError("--components: the sources have no MTP block (tensors mtp.*)")
    if search or importance is not None:
        matrices = [_searched(m, importance) for m in matrices]
        if not any(m.search for m in matrices):
            given = "--search" if importance is None else "--source imatrix"
            raise UsageError(f"{given}: {recipe.name} makes no groupwise integers (q4_g64 ... q8_g32) here; try q4q5")
    return Plan(
        recipe,
        stored_config(config),
        tuple(components),
        tuple(matrices),
        tuple(vectors),
        table,
        _resources(base, resources or {}),
        drafters,
        name,
        {
            "base": str(base.path.name),
            **{n: str(s.path.name) for n, s in sources.items()},
            **({} if importance is None else {"imatrix": importance.path.name}),
        },
        None if proposal is None else proposal_head(matrices, proposal),
    )


def _searched(m: Matrix, importance: Importance | None) -> Matrix:
    if m.is_copied or not can_search(m.format):
        return m
    found = None
    if importance is not None:
        stored = m.source.info(m.tensor).shape
        found = importance.of(m.tensor, stored[0] if len(stored) > 2 else 1, m.shape[-1])
        if found is not None and m.tensor in m.source.config.get("gdn_tiled_out_columns", ()):
            found = found[:, tiled_columns(flat(m.source.config))]
    return evolve(m, search=True, importance=found)


def proposal_head(matrices: Sequence[Matrix], tokens: Sequence[int]) -> Matrix:
    """Rows of the head as it is written, so that a draft scores as it does with the whole.   Raises UsageError."""
    head = next((m for name in (HEAD, EMBEDDING) for m in matrices if m.parts[0][0] == name), None)
    if head is None:
        raise UsageError("--proposal: only models of the Qwen3.5 and Llama families can have a proposal head")
    index = np.asarray(tokens, np.intp)
    try:
        head.format.nbytes((len(index), head.shape[1]))
    except ArtifactError as error:
        raise UsageError(f"--proposal-rows {len(index)}: {error}") from None
    return evolve(head, id=f"w.{PROPOSAL}", parts=((PROPOSAL, len(index)),), index=index,
                  shape=(len(index), head.shape[1]))  # fmt: skip


def _mtp_layers(source: Artifact) -> int:
    """Of a source that is an MTP block alone.   Raises ArtifactError for anything else in it."""
    other = [n for n in source.names() if not n.startswith("mtp.")]
    if other or "mtp.fc.weight" not in source:
        raise ArtifactError(f"--source {MTP_SOURCE}: {source.path}: " + (
            f"tensor {other[0]!r} is no part of an MTP block (mtp.*)" if other else "has no tensor 'mtp.fc.weight'"
        ))  # fmt: skip
    return 1


def _causal(config: Mapping[str, Any]) -> bool | None:
    value = config.get("is_causal", (config.get("dflash_config") or {}).get("causal"))
    return value if isinstance(value, bool) else None


def _check_sources(recipe: Recipe, sources: set[str]) -> None:
    for needed in recipe.sources:
        if needed not in sources:
            raise UsageError(f"--recipe: {recipe.name} requires source {needed!r}; provide --source {needed}=PATH")


def _all_names(order: Sequence[Artifact]) -> Iterator[str]:
    yield from dict.fromkeys(name for source in reversed(order) for name in source.names())


def _is_kept(name: str, tensor: Tensor) -> bool:
    """What `quantize` keeps, where names are those of the checkpoint."""
    return tensor.parts[0].endswith(f"/{name}") and keeps(name)


def _is_vector(name: str, info: TensorInfo, tensor: Tensor) -> bool:
    """Whether the values are kept: vectors, convolutions, small matrices of the checkpoint's own names."""
    rank, own = len(info.shape), tensor.parts[0].endswith(f"/{name}")
    whole = rank < 2 or (rank > 2 and tensor.how == "whole" and not own)
    return tensor.how == "taps" or whole or (info.format.is_plain and _is_kept(name, tensor))


def _objects(recipe: Recipe, source: Artifact, name: str, tensor: Tensor) -> Iterator[Matrix]:
    """One object for each run of parts in one format."""
    info = source.info(name)
    if _is_vector(name, info, tensor):
        fmt = F32_FORMAT if F32_PARTS.fullmatch(tensor.parts[0]) else BF16_FORMAT
        if fmt is BF16_FORMAT and not _fits_bf16(vector_values(source, name, tensor)):
            fmt = F32_FORMAT
        shape = (info.shape[2], info.shape[0]) if tensor.how == "taps" else info.shape
        yield Matrix(f"w.{tensor.parts[0]}", name, source, ((tensor.parts[0], shape[0]),), slice(None), shape, fmt, "")
        return
    k, total = info.shape[-1], prod(info.shape[:-1])
    runs = list(_part_rows(tensor, total, name))
    group: list[tuple[str, NDArray[np.intp] | slice, int]] = []
    chosen: tuple[QuantFormat, str] | None = None
    for part, index, rows in runs:
        rule = recipe.rule(part)
        chosen_name = rule.plain if rule.format == KEEP and info.format.is_plain else rule.format
        keep = chosen_name == KEEP or _is_kept(name, tensor)
        fmt = _stored_format(info.format if keep else by_name(chosen_name), name, rows, k)
        if group and (chosen != (fmt, rule.policy) or tensor.how == "heads"):
            yield _matrix(source, name, group, k, chosen)
            group = []
        group.append((part, index, rows))
        chosen = fmt, rule.policy
    yield _matrix(source, name, group, k, chosen)


def _stored_format(fmt: QuantFormat, name: str, rows: int, k: int) -> QuantFormat:
    if names_of(fmt) is None:  # half precision and MXFP8 have no name in the container
        fmt = by_name("t2_g128") if fmt.name == "pq2_0" else F32_FORMAT
    try:
        fmt.nbytes((rows, k))
    except ArtifactError as error:
        raise ArtifactError(f"tensor {name!r}: {error}; use another recipe") from None
    return fmt


def _matrix(
    source: Artifact, name: str, group: list[tuple[str, Index, int]], k: int, chosen: tuple[QuantFormat, str] | None
) -> Matrix:
    assert chosen is not None
    rows = sum(n for _, _, n in group)
    first, last = group[0][1], group[-1][1]
    index: Index = first
    if isinstance(first, slice) and isinstance(last, slice):
        index = slice(first.start, last.stop)
    parts = tuple((part, n) for part, _, n in group)
    label = parts[0][0] if len(parts) == 1 else f"{parts[0][0]}+{parts[-1][0].rsplit('/', 1)[1]}"
    return Matrix(f"w.{label}", name, source, parts, index, (rows, k), *chosen)


def _part_rows(tensor: Tensor, total: int, name: str) -> Iterator[tuple[str, Index, int]]:
    """(logical name, its rows in the checkpoint's tensor, their number)."""
    if tensor.how in ("whole", "expert"):
        yield tensor.parts[0], slice(0, total), total
        return
    each = sum(tensor.rows)
    repeats = {"rows": 1, "heads": total // each if each else 0, "experts": len(tensor.parts) // len(tensor.rows)}
    if not each or total != each * repeats[tensor.how]:
        raise ArtifactError(f"tensor {name!r} has {total} rows, but the config implies {tensor.how} of {tensor.rows}: "
                            "weights and config are of different models")  # fmt: skip
    if tensor.how == "heads":
        start = 0
        for part, rows in zip(tensor.parts, tensor.rows, strict=True):
            heads = np.arange(repeats["heads"])[:, None] * each + np.arange(start, start + rows)
            yield part, heads.reshape(-1), heads.size
            start += rows
        return
    at = 0
    for i, part in enumerate(tensor.parts):
        rows = tensor.rows[i % len(tensor.rows)]
        yield part, slice(at, at + rows), rows
        at += rows


# values of vectors


def _is_offset_norm(name: str) -> bool:
    return (name.endswith("norm.weight") and "linear_attn." not in name) or ".pre_fc_norm_" in name


def vector_values(source: Artifact, name: str, tensor: Tensor) -> NDArray[np.float32]:
    """In the container's convention: offset norms without the 1, taps [taps, C]."""
    values = source.get(name).f32()
    if source.config.get("norm_plus_one") and is_tabled(flat(source.config)) and _is_offset_norm(name):
        values = values - np.float32(1)
    if tensor.how == "taps":
        values = values.reshape(values.shape[0], -1).T
    if not np.isfinite(values).all():
        raise ArtifactError(f"{source.path}: tensor {name!r} has values that are not finite")
    return np.ascontiguousarray(values, np.float32)


def _fits_bf16(values: NDArray[np.float32]) -> bool:
    """Whether bf16 holds the values: exactly, or but for what adding 1 in float32 has lost."""
    half = bf16_to_f32(f32_to_bf16(values))
    return bool(np.array_equal(half, values) or np.array_equal(np.float32(1) + half, np.float32(1) + values))


# resources


def _resources(base: Artifact, given: Mapping[str, Path]) -> dict[str, bytes]:
    unknown = [role for role in given if role not in RESOURCES]
    if unknown:
        raise UsageError(f"--resource: no role {unknown[0]!r}; there are {', '.join(RESOURCES)}")
    found: dict[str, bytes] = {}
    for role in RESOURCES:
        path = given.get(role, base.path / role)
        try:
            if path.is_file():
                found[role] = path.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None
    source = base.tokenizer_source
    if isinstance(source, TokenizerFiles):
        found.setdefault("tokenizer.json", source.tokenizer)
        if source.config:
            found.setdefault("tokenizer_config.json", source.config)
    elif isinstance(source, Mapping) and "tokenizer.json" not in found:
        found["tokenizer.gguf.json"] = json.dumps(dict(source), ensure_ascii=False).encode()
    if base.chat_template is not None:
        found.setdefault("chat_template.jinja", base.chat_template.encode())
    if base.generation_config:
        found.setdefault("generation_config.json", json.dumps(dict(base.generation_config)).encode())
    return {role: raw for role, raw in found.items() if raw}
