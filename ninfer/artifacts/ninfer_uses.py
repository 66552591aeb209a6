"""What a `.ninfer` file says of the inputs of its matrices: permissions, divisors, rotations, orders of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.artifacts.logical import EMBEDDING_ROWS, Tensor, inputs_of
from ninfer.artifacts.names.delta import tiled_columns
from ninfer.artifacts.ninfer_directory import POLICIES, Piece, Use
from ninfer.artifacts.ninfer_formats import check_words
from ninfer.artifacts.ninfer_v3 import NinferFile
from ninfer.errors import ArtifactError

LEAST_BITS = dict(zip(POLICIES, (16, 8, 4), strict=True))  # of activations
_WORDS = {"fp32": "<f4", "int32": "<i4", "bf16": "<u2"}


def words_of(file: NinferFile, pieces: Sequence[Piece], format: str) -> NDArray[Any]:
    """Plain words of fp32, int32 or bf16 (as they are), one after another."""
    found = []
    for piece in pieces:
        o = file.directory.objects[piece.object]
        check_words(o, format, str(file.path))
        found.append(file.read(o.offset, o.nbytes, o.where).view(_WORDS[format])[piece.begin : piece.end])
    return np.concatenate(found)


class Uses:
    """components: those whose parameters are offered; uses of others are not looked at."""

    def __init__(self, file: NinferFile, components: tuple[str, ...]) -> None:
        self._file, self._components = file, components
        self._by_part: dict[str, list[Use]] = {}
        for use in file.directory.uses:
            if use.parameter.split("/", 1)[0] in components:
                self._by_part.setdefault(use.parameter, []).append(use)

    def _error(self, use: Use, problem: str) -> ArtifactError:
        return ArtifactError(f"{self._file.path}: use of {use.parameter!r} with input {use.input!r} {problem}")

    def _of(self, tensor: Tensor) -> list[Use]:
        return [use for part in tensor.parts for use in self._by_part.get(part, ())]

    def _with(self, role: str) -> list[Use]:
        return [use for uses in self._by_part.values() for use in uses if role in use.auxiliaries]

    def policy(self, tensor: Tensor) -> str | None:
        uses = self._of(tensor)
        for use in uses:
            if use.policy is None:
                raise self._error(use, "states no activation_policy")
        return min((u.policy or "" for u in uses), key=POLICIES.index, default=None)

    def divisors(self, tensor: Tensor) -> tuple[float, ...]:
        found = [self._divisor(u) for u in self._of(tensor) if "activation_input_divisor" in u.auxiliaries]
        return tuple(dict.fromkeys(found))

    def _divisor(self, use: Use) -> float:
        values = self._words(use, "activation_input_divisor", "fp32")
        if values.size != 1 or not 0 < values[0] < np.inf:
            raise self._error(use, "has an activation_input_divisor that is not one positive number")
        return float(values[0])

    def _words(self, use: Use, role: str, format: str) -> NDArray[Any]:
        return words_of(self._file, use.auxiliaries[role], format)

    def rotated(self, names: Mapping[str, str]) -> dict[str, NDArray[Any]]:
        """Signs, as bf16 words, by checkpoint name.   names: checkpoint name of each logical one."""
        found: dict[str, NDArray[Any]] = {}
        for use in self._with("hadamard_signs"):
            if use.parameter not in names:
                continue  # of a part that is not run
            known = (*inputs_of(use.parameter, self._components), EMBEDDING_ROWS)
            if use.input not in known:
                raise self._error(use, f"rotates it, which is not supported there; supported are {', '.join(known)}")
            name, signs = names[use.parameter], self._words(use, "hadamard_signs", "bf16")
            if name in found and not np.array_equal(found[name], signs):
                raise self._error(use, "rotates it by other signs than another use, which is not supported")
            found[name] = signs
        return found

    def tiled(self, names: Mapping[str, str], config: Mapping[str, Any]) -> tuple[str, ...]:
        """Checkpoint names of matrices whose columns are in the tiled order of value heads."""
        found = []
        for use in self._with("input_columns"):
            index = self._words(use, "input_columns", "int32")
            known = use.parameter.endswith("/gdn/output") and use.input in inputs_of(use.parameter)
            if not known or use.parameter not in names or not _is_tiled(index, config):
                raise self._error(use, "permutes its input columns in a way that is not supported; supported is the "
                                  "tiled order of value heads, of gdn/output")  # fmt: skip
            found.append(names[use.parameter])
        return tuple(found)


def _is_tiled(index: NDArray[Any], config: Mapping[str, Any]) -> bool:
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim")
    values = [v for v in (config.get(n) for n in names) if type(v) is int and v > 0]
    if len(values) != len(names) or values[1] % values[0] or values[1] * values[2] != index.size:
        return False
    return np.array_equal(index, tiled_columns(config))
