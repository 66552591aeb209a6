"""What a model file offers, whatever its container: parameters under Hugging Face names, and a config like theirs.

Names are those of the text model's checkpoint without a multimodal prefix: `model.layers.0.self_attn.q_proj.weight`,
`lm_head.weight`, `mtp.fc.weight`. Bytes stay in the mapped file; a parameter is read when it is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from ninfer.errors import ArtifactError
from ninfer.formats.bits import F32Array, U8Array
from ninfer.formats.quant import Packed, QuantFormat

PROPOSAL_HEAD = "proposal.lm_head.weight"


@frozen
class TokenizerFiles:
    """The contents of a tokenizer.json and of its tokenizer_config.json (b"": none). origin: for messages."""

    tokenizer: bytes = field(repr=False)
    config: bytes = field(repr=False)
    origin: str


# The `tokenizer.ggml.*` metadata of a GGUF file, or the path of a tokenizer.json (with its tokenizer_config.json, if
# any, beside it), or the contents of these files, or nothing.
TokenizerSource: TypeAlias = Mapping[str, Any] | Path | TokenizerFiles | None


@frozen(eq=False)
class Parameter:
    """A tensor as stored. Row-major: the last dimension is the one that blocks run along."""

    name: str
    shape: tuple[int, ...]
    format: QuantFormat
    raw: U8Array = field(repr=False)

    def f32(self) -> F32Array:
        return self.format.unpack(self.raw, self.shape)

    def packed(self) -> Packed:
        return Packed(self.format, self.raw, self.shape)

    def renamed(self, name: str) -> Parameter:
        return evolve(self, name=name)


@frozen
class TensorInfo:
    """What is known of a parameter without reading it.

    parts: names of the parameters of which it is made, where it is stored as several; they may differ in format, and
    `format` is that of the first. least_bits: fewest bits of activations that may meet it; 0: nothing is said.
    """

    shape: tuple[int, ...]
    format: QuantFormat
    parts: tuple[str, ...] = ()
    least_bits: int = 0

    @property
    def nbytes(self) -> int:
        return self.format.nbytes(self.shape)


class Artifact(ABC):
    """An opened model. `config` and `generation_config` have the keys of the Hugging Face files."""

    kind: str  # "gguf", "safetensors", "ninfer"
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_source: TokenizerSource
    chat_template: str | None
    display_name: str

    @property
    def model_id(self) -> str:
        """The name to serve under."""
        return self.path.name.removesuffix(".gguf")

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Of every parameter."""

    @abstractmethod
    def info(self, name: str) -> TensorInfo:
        """Raises ArtifactError as `get` does."""

    @abstractmethod
    def get(self, name: str) -> Parameter:
        """Raises ArtifactError naming the parameter and the file."""

    def drafter(self, name: str) -> Artifact | None:
        """A drafter that the file carries beside its model."""
        return None

    def details(self) -> tuple[str, ...]:
        """Lines about the container, for people."""
        return ()

    def divisors(self, name: str) -> tuple[float, ...]:
        """Of the activations that meet a matrix in products with 4-bit activations, if any are given."""
        return ()

    @property
    def has_proposal(self) -> bool:
        """Whether the parameter PROPOSAL_HEAD holds a head for drafts."""
        return False

    def proposal_ids(self) -> NDArray[np.int32] | None:
        """Tokens of the rows of that head; None: every token, in order."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Gives the mapping up. Arrays already taken stay valid."""

    def __contains__(self, name: object) -> bool:
        return name in self._name_set

    @cached_property
    def _name_set(self) -> frozenset[str]:
        return frozenset(self.names())

    def missing(self, name: str) -> ArtifactError:
        last = name.rsplit(".", 2)[-2:]
        near = [n for n in self.names() if n.split(".")[-2:] == last][:3]
        hint = f"; it has {', '.join(near)}" if near else ""
        return ArtifactError(f"{self.path}: no tensor {name!r} among its {len(self.names())}{hint}")

    @cached_property
    def formats(self) -> Mapping[str, QuantFormat]:
        """Format of each parameter that can be read."""
        return _Formats(self)

    def summary(self) -> str:
        """One line: size and formats, the most bytes first."""
        sizes: dict[str, int] = {}
        for name in self.formats:
            info = self.info(name)
            sizes[info.format.name] = sizes.get(info.format.name, 0) + info.nbytes
        order = sorted(sizes, key=lambda n: -sizes[n])
        return f"{sum(sizes.values()) / 2**30:.2f} GiB of weights  {' '.join(order)}"

    def num_values(self) -> int:
        return sum(prod(self.info(name).shape) for name in self.formats)


class _Formats(Mapping[str, QuantFormat]):
    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._readable = [n for n in artifact.names() if _is_readable(artifact, n)]

    def __getitem__(self, name: str) -> QuantFormat:
        if name not in self._artifact:
            raise KeyError(name)
        return self._artifact.info(name).format

    def __iter__(self) -> Iterator[str]:
        return iter(self._readable)

    def __len__(self) -> int:
        return len(self._readable)

    def __contains__(self, name: object) -> bool:
        return name in self._artifact


def _is_readable(artifact: Artifact, name: str) -> bool:
    try:
        artifact.info(name)
    except ArtifactError:
        return False
    return True


def check_extents(path: Path, size: int, extents: Iterable[tuple[str, int, int]]) -> None:
    """(name, offset, bytes) of tensors: inside `size` bytes of the file, none on another's bytes."""
    end, before = 0, ""
    for name, offset, nbytes in sorted(extents, key=lambda e: e[1]):
        if offset + nbytes > size:
            raise ArtifactError(
                f"{path}: tensor {name!r} needs bytes {offset} to {offset + nbytes}, but the file has {size}; "
                "it is incomplete: download it again"
            )
        if offset < end:
            raise ArtifactError(f"{path}: tensors {before!r} and {name!r} overlap: the file is damaged")
        end, before = offset + nbytes, name
