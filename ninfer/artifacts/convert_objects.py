"""A conversion plan as objects, bindings and uses of a `.ninfer` file, and the bytes of the objects, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ninfer.artifacts.artifact import Parameter
from ninfer.artifacts.convert import Matrix, Plan, vector_values
from ninfer.artifacts.drafters import context_aliases
from ninfer.artifacts.logical import EMBEDDING, EMBEDDING_ROWS, PROPOSAL_IDS, Tensor, inputs_of, is_tabled
from ninfer.artifacts.names.delta import tiled_columns
from ninfer.artifacts.ninfer_formats import CONTIGUOUS, names_of
from ninfer.artifacts.ninfer_write import NewArtifact, NewObject, Sink, pieces_of, raw_object
from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.bits import F32Array, U8Array
from ninfer.formats.codes import recode
from ninfer.formats.dtypes import f32_to_bf16
from ninfer.formats.search import grouped_search

CHUNK_VALUES = 1 << 23  # encoded at a time
CHUNK_BYTES = 1 << 20  # copied at a time: what stays in the cache between map and file
HADAMARD_BLOCK = 1024


def to_artifact(plan: Plan) -> NewArtifact:
    """Objects whose bytes are made when the writer asks."""
    bindings, uses = dict[str, Any](), list[dict[str, Any]]()
    objects, more = list[NewObject](), _Auxiliaries(plan)
    for m in plan.objects:
        objects.append(_object(m, plan.tensors.get(m.tensor)))
        at = 0
        for part, rows in m.parts:
            k = prod(m.shape[1:])
            whole = len(m.parts) == 1
            span = {"object": m.id, "range": [at * k, (at + rows) * k]}
            bindings[part] = {"object": m.id} if whole else {"parts": [span]}
            at += rows
            aliases = list(context_aliases(part)) if part.startswith(tuple(plan.drafters)) and plan.drafters else []
            bindings |= dict.fromkeys(aliases, bindings[part])
            if m.policy:
                auxiliaries = more.of(m)
                inputs = inputs_of(part, plan.components)
                if part == EMBEDDING and "hadamard_signs" in auxiliaries:
                    inputs = (EMBEDDING_ROWS,)  # its rows are rotated back
                uses += [_use(part, i, m.policy, auxiliaries) for i in inputs]
                uses += [_use(a, i, m.policy, auxiliaries) for a in aliases for i in inputs_of(a)]
    objects += more.objects
    if plan.proposal is not None:
        ids = np.asarray(plan.proposal.index, "<i4")
        objects.append(raw_object(f"w.{PROPOSAL_IDS}", ids.tobytes(), shape=ids.shape, format="int32",
                                  layout=CONTIGUOUS))  # fmt: skip
        bindings[PROPOSAL_IDS] = {"object": f"w.{PROPOSAL_IDS}"}
    if "text/output_head" not in bindings and "text/token_embedding" in bindings:
        bindings["text/output_head"] = bindings["text/token_embedding"]
    objects += [raw_object(f"r.{role}", raw) for role, raw in plan.resources.items()]
    components: dict[str, Any] = {
        "text": {"config": plan.config, "resources": {role: f"r.{role}" for role in plan.resources}}
    }
    if plan.proposal is not None:
        components["text"]["proposal"] = {"domain": "indexed", "rows": plan.proposal.shape[0]}
    if "mtp" in plan.components:
        arch = "Qwen3_5MoeMTP" if "num_experts" in plan.config else "Qwen3_5MTP"
        components["mtp"] = {"config": {"architectures": [arch]}, "target": "text"}
    for component, (config, _) in plan.drafters.items():
        components[component] = {"config": config, "target": "text"}
    notes = {component: note for component, (_, note) in plan.drafters.items()}
    metadata = {"name": plan.name, "drafters": notes, "shapes": plan.plain_shapes()}
    provenance: dict[str, Any] = {"converter": "ninfer-v3", "recipe": plan.recipe.name, "sources": dict(plan.sources)}
    if any(m.search for m in plan.matrices):
        provenance["encoder"] = "grouped_search"
    return NewArtifact(components, objects, bindings, uses, metadata, provenance)


class _Auxiliaries:
    """What uses say of their inputs, and the objects that hold it, one for equal ones."""

    def __init__(self, plan: Plan) -> None:
        self.objects: list[NewObject] = []
        self._ids: dict[bytes, str] = {}
        self._config = plan.config
        sources = {m.source for m in plan.matrices}
        self._tiled: set[str] = set()
        if is_tabled(plan.config):  # the config of others tells it
            self._tiled = {n for s in sources for n in s.config.get("gdn_tiled_out_columns", ())}

    def of(self, m: Matrix) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if m.tensor in self._tiled:
            columns = tiled_columns(self._config).astype("<i4")
            found["input_columns"] = self._object(columns.tobytes(), columns.shape, "int32")
        if m.divisor is not None:
            found["activation_input_divisor"] = self._object(np.array(m.divisor, "<f4").tobytes(), (), "fp32")
        signs = m.source.config.get("hadamard_signs", {}).get(m.tensor)
        if signs is not None:
            if m.source.config.get("hadamard_block", HADAMARD_BLOCK) != HADAMARD_BLOCK:
                raise UsageError(
                    f"{m.source.path}: inputs are rotated in blocks of {m.source.config['hadamard_block']}, but a "
                    f".ninfer file can only say {HADAMARD_BLOCK}; serve the source itself"
                )
            words = np.asarray(signs)
            words = words if words.dtype == np.uint16 else f32_to_bf16(words.astype(np.float32))
            found["hadamard_signs"] = self._object(words.astype("<u2").tobytes(), words.shape, "bf16")
        return found

    def _object(self, raw: bytes, shape: tuple[int, ...], format: str) -> dict[str, str]:
        id = self._ids.get(raw)
        if id is None:
            id = self._ids[raw] = f"a.{len(self._ids)}"
            self.objects.append(raw_object(id, raw, shape=shape, format=format, layout=CONTIGUOUS))
        return {"object": id}


def _use(part: str, input: str, policy: str, auxiliaries: Mapping[str, Any]) -> dict[str, Any]:
    use: dict[str, Any] = {"parameter": part, "input": input, "activation_policy": policy}
    return {**use, "auxiliaries": dict(auxiliaries)} if auxiliaries else use


def _object(m: Matrix, tensor: Tensor | None) -> NewObject:
    names = names_of(m.format)
    assert names is not None
    produce = partial(_put_matrix, m) if m.policy else partial(_put_vector, m, tensor or Tensor((m.parts[0][0],)))
    return NewObject(m.id, m.format.nbytes(m.shape), produce, m.shape, *names)


def _put_vector(m: Matrix, tensor: Tensor, sink: Sink) -> None:
    sink.put(0, m.format.pack(vector_values(m.source, m.tensor, tensor)))


def _put_matrix(m: Matrix, sink: Sink) -> None:
    p = m.source.get(m.tensor)
    n, k = m.shape
    values = CHUNK_BYTES * n // max(p.raw.size, 1) * k if p.format is m.format else CHUNK_VALUES
    each = n if m.format.row_step > 1 else max(128, values // k // 128 * 128)
    for start, count in pieces_of(n, each):
        raw = _rows(m, p, start, count)
        if p.format is not m.format:
            raw = _encode(m, p, raw, (count, k), start)
        spans = m.format.row_spans(m.shape, start, count)
        for (offset, nbytes), (at, _) in zip(spans, m.format.row_spans((count, k), 0, count), strict=True):
            sink.put(offset, raw[at : at + nbytes])


def _rows(m: Matrix, p: Parameter, start: int, count: int) -> U8Array:
    """Rows of the object as the source has them."""
    stored = (prod(p.shape[:-1]), p.shape[-1])
    if isinstance(m.index, slice):
        return p.format.slice_rows(p.raw, stored, m.index.start + start, count)
    return p.format.gather_rows(p.raw, stored, m.index[start : start + count])


def _importance(m: Matrix, p: Parameter, start: int, count: int) -> F32Array | None:
    """[K], or [count, K] where matrices of a bank differ."""
    if m.importance is None or len(m.importance) == 1:
        return None if m.importance is None else m.importance[0]
    rows = np.arange(start, start + count)
    rows = rows + m.index.start if isinstance(m.index, slice) else m.index[rows]
    each = prod(p.shape[:-1]) // len(m.importance)
    found: F32Array = m.importance[rows // each]
    return found


def _encode(m: Matrix, p: Parameter, raw: U8Array, shape: tuple[int, int], start: int) -> U8Array:
    try:
        if p.format.code is not None and p.format.name == "pq2_0" and m.format.group == p.format.group:
            return recode(p.format, m.format, raw, shape)
        values = p.format.unpack(raw, shape)
        if not np.isfinite(values).all():
            raise ArtifactError("has values that are not finite")
        if m.search:
            return grouped_search(m.format, values, _importance(m, p, start, shape[0]))
        return m.format.pack(values)
    except ArtifactError as error:
        raise ArtifactError(f"{m.source.path}: tensor {m.tensor!r}: {error}") from None
