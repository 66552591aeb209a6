"""A model's artifact with a second one beside it: a drafter that lies in a folder of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ninfer.artifacts.artifact import Artifact, Parameter, TensorInfo


class Beside(Artifact):
    """Everything is the model's, but for tensors whose names begin with the prefix: those are the other's."""

    def __init__(self, model: Artifact, other: Artifact, prefix: str) -> None:
        self._model, self._other, self._prefix = model, other, prefix
        self.kind, self.path, self.config = model.kind, model.path, model.config
        self.generation_config = model.generation_config
        self.tokenizer_source = model.tokenizer_source
        self.chat_template = model.chat_template
        self.display_name = model.display_name

    @property
    def model_id(self) -> str:
        return self._model.model_id

    def names(self) -> tuple[str, ...]:
        return (*self._model.names(), *(self._prefix + name for name in self._other.names()))

    def _of(self, name: str) -> tuple[Artifact, str]:
        own = not name.startswith(self._prefix)
        return (self._model, name) if own else (self._other, name[len(self._prefix) :])

    def info(self, name: str) -> TensorInfo:
        artifact, inner = self._of(name)
        return artifact.info(inner)

    def get(self, name: str) -> Parameter:
        artifact, inner = self._of(name)
        found = artifact.get(inner)
        return Parameter(name, found.shape, found.format, found.raw)

    def divisors(self, name: str) -> tuple[float, ...]:
        artifact, inner = self._of(name)
        return artifact.divisors(inner)

    @property
    def has_proposal(self) -> bool:
        return self._model.has_proposal

    def proposal_ids(self) -> NDArray[np.int32] | None:
        return self._model.proposal_ids()

    def close(self) -> None:
        self._model.close()
        self._other.close()
