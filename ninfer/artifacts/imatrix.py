"""Importance of input channels, from a GGUF file as llama-imatrix writes it.

For each matrix the file has `NAME.in_sum2` [matrices, K], sums of squares of the activations that it met, and
`NAME.counts` [matrices, 1], their number; a bank of experts has a row for each. Names are those of GGUF architectures,
and columns of a delta rule's output are in their order of value heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from ninfer.artifacts.gguf import GgufFile
from ninfer.artifacts.logical import flat
from ninfer.artifacts.names import architectures
from ninfer.artifacts.names.delta import tiled_columns
from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.bits import F32Array

SUMS, COUNTS = ".in_sum2", ".counts"
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@frozen(eq=False)
class Importance:
    """by_name: [matrices, K] under the checkpoint's names and in its order of columns."""

    path: Path
    by_name: Mapping[str, F32Array]

    def of(self, tensor: str, matrices: int, k: int) -> F32Array | None:
        """[1 or `matrices`, K], or None for a matrix that the file does not have.   Raises UsageError."""
        found = self.by_name.get(tensor)
        if found is None and tensor.endswith("mlp.experts.gate_up_proj"):  # both read the same input
            found = self.by_name.get(tensor.replace("gate_up_proj", "gate_proj"))
        expert = _EXPERT.fullmatch(tensor)
        if found is None and expert is not None:
            bank = self.by_name.get(f"{expert[1]}.{expert[3]}_proj")
            bank = self.by_name.get(f"{expert[1]}.gate_up_proj") if bank is None and expert[3] != "down" else bank
            index = int(expert[2])
            if bank is not None and index < len(bank):
                found = bank[index : index + 1]
        if found is None:
            return None
        if found.shape[1] != k or len(found) not in (1, matrices):
            raise UsageError(
                f"--source imatrix: {self.path} has {tensor!r} for {len(found)} matrices of {found.shape[1]} columns; "
                f"the model's are {matrices} of {k}: it was made from another model"
            )
        return found


def read_importance(path: Path, config: Mapping[str, Any]) -> Importance:
    """config: of the model that it is for.   Raises ArtifactError or UsageError, naming what is wrong."""
    file = GgufFile(path)
    try:
        kind = file.metadata.get("general.type")
        stored = {n.removesuffix(SUMS) for n in file.tensors if n.endswith(SUMS)}
        if kind != "imatrix" or not stored:
            raise UsageError(f"--source imatrix: {path} is not an importance matrix (general.type is {kind!r}); "
                             "make one with llama-imatrix, in its GGUF format")  # fmt: skip
        values = {name: _mean(file, name) for name in sorted(stored)}
    finally:
        file.close()
    config = flat(config)
    arch = next((a for a in architectures() if a.model_type == config.get("model_type")), None)
    if arch is None:
        raise UsageError(
            f"--source imatrix: no names of GGUF matrices are known for {config.get('model_type')!r} models"
        )
    try:
        by_name = {arch.target(path, name, config)[0]: v for name, v in values.items()}
    except ArtifactError as error:
        raise UsageError(f"--source imatrix: it was made from another model: {error}") from None
    if config.get("linear_num_value_heads") != config.get("linear_num_key_heads"):
        columns = tiled_columns(config)
        for name in [n for n in by_name if n.endswith("linear_attn.out_proj.weight")]:
            if by_name[name].shape[1] == len(columns):
                grouped = np.empty_like(by_name[name])
                grouped[:, columns] = by_name[name]
                by_name[name] = grouped
    return Importance(path, by_name)


def _mean(file: GgufFile, name: str) -> F32Array:
    """Mean squares [matrices, K]; 1 for an expert that met no token."""
    sums, counts = (file.tensors.get(name + end) for end in (SUMS, COUNTS))
    if sums is None or counts is None:
        raise ArtifactError(f"{file.path}: tensor {name + COUNTS!r} is missing")
    x, n = (
        np.frombuffer(file.file.bytes[t.offset : t.offset + t.info.nbytes].tobytes(), np.uint8) for t in (sums, counts)
    )
    for t in (sums, counts):
        if t.info.format.name != "f32":
            raise ArtifactError(f"{file.path}: {name!r} is stored as {t.info.format.name}, not f32")
    k = sums.info.shape[-1]
    total, count = x.view("<f4").reshape(-1, k), n.view("<f4").reshape(-1, 1)
    if len(total) != len(count):
        raise ArtifactError(f"{file.path}: {name!r} has {len(total)} sums but {len(count)} counts")
    if not (np.isfinite(total).all() and np.isfinite(count).all()) or (total < 0).any() or (count < 0).any():
        raise ArtifactError(f"{file.path}: {name!r} has sums or counts that are negative or not finite")
    mean: F32Array = np.divide(total, count, out=np.ones_like(total), where=count > 0)
    return mean
