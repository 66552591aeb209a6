"""Drafters with weights of their own (DFlash, DFlash2) as components of a `.ninfer` file.

Their tensors are offered as `<component>.<checkpoint name>`; `Drafter` shows them as the artifact of the drafter alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ninfer.artifacts.artifact import Artifact, Parameter, TensorInfo
from ninfer.artifacts.logical import LAYER, Tensor
from ninfer.errors import ArtifactError

DRAFTERS = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
_GLOBAL = {
    "fc.weight": "feature_projection",
    "hidden_norm.weight": "context_norm",
    "norm.weight": "final_norm",
    "candidate_selector.hidden_projection.weight": "candidate_selector/hidden_projection",
    "candidate_selector.predecessor_codebook": "candidate_selector/predecessor_codebook",
    "candidate_selector.successor_codebook": "candidate_selector/successor_codebook",
}
_CONVOLUTIONS = {
    f"{name}.{theirs}": f"{name}/{ours}"
    for name in ("attention_conv", "mlp_conv")
    for theirs, ours in (("base_kernel", "base_kernel"), ("kernel_projection.weight", "kernel_projection"))
}
_FIELDS = (
    "architectures", "model_type", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_hidden_layers", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "layer_types", "sliding_window",
    "dflash_config",
)  # fmt: skip


def drafter_map(component: str, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor that such a drafter may have, under `<component>.<checkpoint name>`."""
    found = {f"{component}.{name}": Tensor((f"{component}/{part}",)) for name, part in _GLOBAL.items()}
    layers = config.get("num_hidden_layers")
    for i in range(layers if type(layers) is int and 0 < layers < 1000 else 0):
        for name, part in {**LAYER, **_CONVOLUTIONS}.items():
            found[f"{component}.layers.{i}.{name}"] = Tensor((f"{component}/layers/{i}/{part}",))
    return found


def refuse_unknown(drafter: Artifact, component: str) -> None:
    """Raises ArtifactError for what other families of block drafters have: maps of ids, sinks, mask embeddings."""
    known = drafter_map(component, drafter.config)
    for name in drafter.names():
        if f"{component}.{name}" not in known:
            raise ArtifactError(f"{drafter.path}: tensor {name!r} has no place in a {component} drafter")
    if drafter.path.is_dir() and (drafter.path / "mask_embedding.pt").exists():
        raise ArtifactError(f"{drafter.path}: mask_embedding.pt, a mask with an embedding of its own, is not supported")


def context_aliases(part: str) -> Iterator[str]:
    """Keys and values of the context are made by the same matrices as those of a block."""
    for name in ("key", "value"):
        if part.endswith(f"/attention/{name}"):
            yield part.removesuffix(name) + f"context_{name}"


def stored_drafter_config(component: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ArtifactError where the source is another drafter."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list | tuple) and names else config.get("model_type")
    if first != DRAFTERS[component]:
        raise ArtifactError(f"--source {component}: its config says {str(first)[:80]!r}, not {DRAFTERS[component]!r}")
    kept = {k: config[k] for k in _FIELDS if config.get(k) is not None}
    if config.get("use_sliding_window", True) is False and "layer_types" in kept:
        kept["layer_types"] = ["full_attention"] * len(kept["layer_types"])
    rope = config.get("rope_parameters") or {}
    return {**kept, "rope_parameters": {"rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0))}}


class Drafter(Artifact):
    """The drafter of a file, with the fields that its config leaves to the target.

    causal: `is_causal` where the writer noted it; files of others leave it to their engine, which lets every row of a
    block see all.
    """

    kind, tokenizer_source, chat_template = "ninfer", None, None

    def __init__(self, model: Artifact, component: str, config: Mapping[str, Any], note: Mapping[str, Any]) -> None:
        self._model, self._prefix = model, f"{component}."
        self.path, self.display_name = model.path, component
        text = model.config
        causal = {"is_causal": note.get("is_causal", False)}
        shared = {"hidden_size": text.get("hidden_size"), "vocab_size": text.get("vocab_size"),
                  "num_target_layers": text.get("num_hidden_layers")}  # fmt: skip
        self.config = {k: v for k, v in {**config, **shared, **causal}.items() if v is not None}
        self.generation_config: Mapping[str, Any] = {}

    def names(self) -> tuple[str, ...]:
        return tuple(n.removeprefix(self._prefix) for n in self._model.names() if n.startswith(self._prefix))

    def info(self, name: str) -> TensorInfo:
        return self._model.info(self._prefix + name)

    def get(self, name: str) -> Parameter:
        return self._model.get(self._prefix + name).renamed(name)

    def divisors(self, name: str) -> tuple[float, ...]:
        return self._model.divisors(self._prefix + name)

    def close(self) -> None:
        self._model.close()
