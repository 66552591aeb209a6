"""Prompt grafts: turns, or a state, that stand before a request's own prompt (phantom-kv containers, version 1).

A graft is a safetensors file and a description beside it with the suffix .json. The description:

    format_version 1, kind, n_slots, n_layers, layer_types, n_attn_layers, n_kv_heads, head_dim, conv_dim, conv_k,
    rec_shape [value heads, key dim, value dim], sha256 (hex, of the tensors' bytes), replay ("ids" for prefill_kv)

The file, with n = n_slots positions, for the A attention and L delta layers in order:

    k, v            BF16 [A, n, kv heads, head dim]          keys as attention sees them, rotated to their positions
    conv            BF16 [L, channels, taps]                 the last inputs of the convolution, oldest first
    rec             F32  [L, value heads, key dim, value dim]
    replay_ids      I64  [n]                                 prefill_kv alone
    replay_embeds   BF16 [n, hidden size]                    softprompt_kv alone

prefill_kv is computed from its ids like any prompt. softprompt_kv and direct_kv have no tokens: their state is put
where prompts find it (kv/given.py), under ids that follow from the checksum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256, shake_256
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ninfer.artifacts.hf_quant import StoredTensor
from ninfer.artifacts.mapped import MappedFile
from ninfer.artifacts.safetensors import read_header, read_json
from ninfer.errors import ArtifactError
from ninfer.models.family import ModelSpec
from ninfer.models.qwen3_5 import FULL, LINEAR, Qwen35Spec

REPLAYED = "prefill_kv"
GIVEN = ("softprompt_kv", "direct_kv")
VERSION = 1
CARRIERS = {"BF16": "<u2", "F32": "<f4", "I64": "<i8"}
NUM_STAND_INS = 100_000  # ids of stand-ins are below: plain text in every vocabulary of that size


@frozen(eq=False)
class GraftState:
    """Arrays of a container, as the file has them. BF16 as its bits."""

    k: NDArray[np.uint16]
    v: NDArray[np.uint16]
    conv: NDArray[np.uint16]
    rec: NDArray[np.float32]


@frozen(kw_only=True)
class Graft:
    """ids: of its positions. state: for grafts that cannot be computed from them."""

    name: str
    ids: tuple[int, ...]
    state: GraftState | None = None


def load_grafts(sources: Iterable[str], spec: ModelSpec) -> dict[str, Graft]:
    """NAME=PATH of each, checked against the model. Raises ArtifactError that names the graft and what is wrong."""
    found: dict[str, Graft] = {}
    for source in sources:
        name, _, path = source.partition("=")
        if name in found:
            raise ArtifactError(f"--graft {name}: two grafts have this name; give each its own")
        found[name] = _Reader(name, Path(path)).read(spec)
    return found


@define
class _Reader:
    name: str
    path: Path
    meta: Mapping[str, Any] = field(factory=dict)

    def fail(self, problem: str) -> NoReturn:
        raise ArtifactError(f"--graft {self.name}: {problem}")

    def read(self, spec: ModelSpec) -> Graft:
        if not isinstance(spec, Qwen35Spec) or not spec.is_recurrent:
            self.fail("grafts are for models of attention and gated delta layers; leave it out")
        try:
            self.meta = read_json(self.path.with_suffix(".json"))
            file = MappedFile(self.path)
            tensors = read_header(file)
        except ArtifactError as error:
            self.fail(str(error))
        kind = self.meta.get("kind")
        if kind != REPLAYED and kind not in GIVEN:
            self.fail(f"its kind is {kind!r}; there are {', '.join((REPLAYED, *GIVEN))}")
        n = self._describe(spec)
        digest = sha256(file.map[8 + int.from_bytes(file.map[:8], "little") :]).hexdigest()
        if digest != self.meta.get("sha256"):
            self.fail(f"the tensors of {self.path} do not have the sha256 of the description; one of them is damaged")
        arrays = {name: self._tensor(tensors, name, *wanted) for name, wanted in _tensors(spec, kind, n).items()}
        more = sorted(set(tensors) - set(arrays))
        if more:
            self.fail(f"{self.path} has a tensor {more[0]!r} that a {kind} graft does not have")
        if kind != REPLAYED:
            state = GraftState(*(arrays[name] for name in ("k", "v", "conv", "rec")))
            return Graft(name=self.name, ids=stand_ins(digest, n, spec.domain), state=state)
        ids = tuple(int(i) for i in arrays["replay_ids"])
        wrong = next((i for i in ids if not 0 <= i < spec.domain), None)
        if wrong is not None:
            self.fail(f"its id {wrong} is none of the model's {spec.domain} tokens")
        return Graft(name=self.name, ids=ids)

    def _describe(self, spec: Qwen35Spec) -> int:
        """Check the description; returns n_slots."""
        kinds, named = tuple(spec.layer_types), self.meta.get("layer_types")
        if self.meta.get("format_version") != VERSION:
            self.fail(f"its format_version is {self.meta.get('format_version')!r}, and {VERSION} is read")
        if not isinstance(named, list) or tuple(named) != kinds:
            self.fail(f"its layer_types are not those of this model ({len(kinds)} layers)")
        if self.meta.get("kind") == REPLAYED and self.meta.get("replay") != "ids":
            self.fail("it carries no ids to compute it from (replay is not 'ids')")
        expected = {
            "n_layers": len(kinds),
            "n_attn_layers": kinds.count(FULL),
            "n_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "conv_dim": spec.channels,
            "conv_k": spec.conv_taps,
            "rec_shape": [spec.value_heads, spec.key_dim, spec.value_dim],
        }
        for name, value in expected.items():
            if self.meta.get(name) != value:
                self.fail(f"its {name} is {self.meta.get(name)!r}, this model's is {value}")
        n = self.meta.get("n_slots")
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            self.fail(f"its n_slots is {n!r}, not a number of positions")
        return n

    def _tensor(self, tensors: Mapping[str, StoredTensor], name: str, dtype: str, shape: tuple[int, ...]) -> Any:
        found = tensors.get(name)
        if found is None:
            self.fail(f"{self.path} has no tensor {name!r}")
        if (found.dtype, found.shape) != (dtype, shape):
            self.fail(f"{name} is {found.dtype} {list(found.shape)}, and this model needs {dtype} {list(shape)}")
        raw = found.file.bytes[found.offset : found.offset + found.nbytes].tobytes()
        return np.frombuffer(raw, CARRIERS[dtype]).reshape(shape)


def _tensors(spec: Qwen35Spec, kind: str, n: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape by name."""
    full, linear = spec.layer_types.count(FULL), spec.layer_types.count(LINEAR)
    kv = (full, n, spec.num_kv_heads, spec.head_dim)
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "k": ("BF16", kv),
        "v": ("BF16", kv),
        "conv": ("BF16", (linear, spec.channels, spec.conv_taps)),
        "rec": ("F32", (linear, spec.value_heads, spec.key_dim, spec.value_dim)),
    }
    if kind == REPLAYED:
        found["replay_ids"] = ("I64", (n,))
    elif kind == "softprompt_kv":
        found["replay_embeds"] = ("BF16", (n, spec.hidden_size))
    return found


def stand_ins(digest: str, count: int, domain: int) -> tuple[int, ...]:
    """Ids for positions without tokens: no two containers share them, and no prompt begins with them by chance."""
    raw = np.frombuffer(shake_256(digest.encode()).digest(4 * count), "<u4")
    return tuple((raw % min(domain, NUM_STAND_INS)).tolist())
