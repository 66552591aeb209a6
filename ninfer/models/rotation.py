"""Matrices that are stored in a rotated basis: their inputs are rotated before the product, an embedding's rows after.

A config says so by `hadamard_signs`: for the stored matrices, by name, the signs along their rows, as bf16 words or
numbers; and by `hadamard_block`, the length of the blocks (Ternary Bonsai 2: 1024).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ninfer.errors import ArtifactError
from ninfer.formats.dtypes import bf16_to_f32
from ninfer.ir.graph import Graph, Value
from ninfer.ir.ops.hadamard import hadamard
from ninfer.ir.types import TensorType
from ninfer.models.fields import Fields

EMBEDDING = "model.embed_tokens.weight"
# Products whose inputs the graphs rotate.
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj",
            "gate_proj", "up_proj", "down_proj", "lm_head")  # fmt: skip


@frozen(eq=False)
class Rotation:
    """signs: float32 [K], 1 or -1, by name of the stored matrix."""

    signs: Mapping[str, NDArray[np.float32]] = field(factory=dict)
    block: int = 1024

    def __bool__(self) -> bool:
        return bool(self.signs)

    def turned(self, g: Graph, x: Value, weight: Value) -> Value:
        """x as the product with `weight` wants it; made once for all products that want it alike."""
        name = g.weights[weight].pieces[0].param
        signs = self.signs.get(name, self.signs.get(name.partition("/")[0]))  # a part, as some files divide a matrix
        if signs is None:
            return x
        vector = self._vector(g, signs)
        for node in reversed(g.nodes):
            if node.args == (x, vector):
                return node.outs[0]
        return hadamard(g, x, vector, block=self.block)

    def embedded(self, g: Graph, x: Value) -> Value:
        """Rows of the embedding, back in the plain basis."""
        signs = self.signs.get(EMBEDDING)
        return x if signs is None else hadamard(g, x, self._vector(g, signs), block=self.block, inverse=True)

    def _vector(self, g: Graph, signs: NDArray[np.float32]) -> Value:
        """One constant for equal signs."""
        name = f"hadamard.{next(i for i, s in enumerate(self._kinds) if np.array_equal(s, signs))}"
        for value in g.consts:
            if value.name == name:
                return value
        return g.const(name, TensorType(signs.shape), signs)

    @cached_property
    def _kinds(self) -> list[NDArray[np.float32]]:
        """Those that differ, so that a name means the same signs in every graph of a model."""
        found: list[NDArray[np.float32]] = []
        for signs in self.signs.values():
            if not any(np.array_equal(signs, other) for other in found):
                found.append(signs)
        return found


def parse_rotation(f: Fields) -> Rotation:
    """Raises ArtifactError for signs that are none, and for matrices whose input no graph rotates."""
    given = f.below("hadamard_signs").values
    if not given:
        return Rotation()
    block = f.whole("hadamard_block", 1024, least=2)
    if block & (block - 1):
        f.fail("hadamard_block", "but must be a power of two")
    return Rotation({name: _signs(f, name, words, block) for name, words in given.items()}, block)


def _signs(f: Fields, name: str, words: Any, block: int) -> NDArray[np.float32]:
    signs = np.asarray(words)
    signs = bf16_to_f32(signs) if signs.dtype == np.uint16 else signs.astype(np.float32)
    if signs.ndim != 1 or not signs.size or not (np.abs(signs) == 1).all():
        raise ArtifactError(f"{f.where}: hadamard_signs of {name!r} are not all 1 or -1: the file is damaged")
    if signs.size % block:
        raise ArtifactError(
            f"{f.where}: hadamard_signs of {name!r} are {signs.size}, which blocks of {block} do not divide"
        )
    if name != EMBEDDING and name.removesuffix(".weight").rsplit(".", 1)[-1] not in PRODUCTS:
        raise ArtifactError(
            f"{f.where}: hadamard_signs name {name!r}, whose input is not rotated; supported are {EMBEDDING} and "
            f"{', '.join(PRODUCTS)}"
        )
    return np.ascontiguousarray(signs)
