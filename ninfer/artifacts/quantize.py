"""Quantising at load: an artifact whose matrices are packed in another format as they are asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from ninfer.artifacts.artifact import Artifact, Parameter, TensorInfo
from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.quant import FORMATS, QuantFormat, by_name

# Small or sensitive tensors: norms, convolutions, gates of the delta rule, routers, the vision tower.
KEEP = re.compile(
    r"norm|conv1d|A_log|dt_bias|in_proj_[ab]\b|in_proj_ba\b|mlp\.gate\.|router|shared_expert_gate|visual\.|rope_freqs"
)


def keeps(name: str) -> bool:
    """Whether `quantize` leaves a parameter as stored, whatever its shape."""
    return KEEP.search(name) is not None


def quantize(artifact: Artifact, fmt_name: str, *, keep: Callable[[str], bool] = keeps) -> Artifact:
    """Matrices in format `fmt_name`, embedding and head included; what `keep` names stays as it is, and so does a
    matrix whose rows the format's blocks do not divide."""
    try:
        fmt = by_name(fmt_name)
    except ArtifactError as error:
        raise UsageError(str(error)) from None
    if not fmt.can_pack:
        choices = ", ".join(f.name for f in FORMATS if f.can_pack)
        raise UsageError(f"{fmt_name} can be read but not made from other weights; choose one of {choices}")
    return QuantizedArtifact(artifact, fmt, keep)


class QuantizedArtifact(Artifact):
    def __init__(self, source: Artifact, fmt: QuantFormat, keep: Callable[[str], bool]) -> None:
        self._source, self._format, self._keep = source, fmt, keep
        self.kind, self.path, self.config = source.kind, source.path, source.config
        self.generation_config, self.chat_template = source.generation_config, source.chat_template
        self.tokenizer_source, self.display_name = source.tokenizer_source, source.display_name

    @property
    def model_id(self) -> str:
        return self._source.model_id

    def names(self) -> tuple[str, ...]:
        return self._source.names()

    def _is_packed(self, name: str, info: TensorInfo) -> bool:
        if len(info.shape) < 2 or info.format is self._format or self._keep(name):
            return False
        return self._format.padded_k(info.shape[-1]) % self._format.block == 0

    def info(self, name: str) -> TensorInfo:
        info = self._source.info(name)
        return evolve(info, format=self._format) if self._is_packed(name, info) else info

    def get(self, name: str) -> Parameter:
        p = self._source.get(name)
        if not self._is_packed(name, TensorInfo(p.shape, p.format)):
            return p
        try:
            raw = self._format.pack(p.f32().reshape(prod(p.shape[:-1]), p.shape[-1]))
        except ArtifactError as error:
            raise ArtifactError(f"{self.path}: tensor {name!r}: {error}") from None
        return Parameter(name, p.shape, self._format, raw)

    @property
    def has_proposal(self) -> bool:
        return self._source.has_proposal

    def proposal_ids(self) -> NDArray[np.int32] | None:
        return self._source.proposal_ids()

    def close(self) -> None:
        self._source.close()
