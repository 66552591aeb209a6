"""What an architecture of GGUF files is: a config function, and tables of rules for names.

A rule's fix turns the stored tensor back into that of the checkpoint by moving whole rows or whole blocks, so that no
value is decoded. Here is also what most architectures share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from ninfer.artifacts.artifact import Parameter, TensorInfo
from ninfer.artifacts.names.metadata import Metadata, is_count, short
from ninfer.errors import ArtifactError

Config: TypeAlias = Mapping[str, Any]
Tensors: TypeAlias = Mapping[str, TensorInfo]
Fix: TypeAlias = Callable[[Parameter, Config], Parameter]
Shape: TypeAlias = tuple[int, ...]


def same(p: Parameter, config: Config) -> Parameter:
    return p


def move_rows(p: Parameter, index: NDArray[np.intp]) -> Parameter:
    """Row i becomes row index[i]; the numbers of a vector are its rows."""
    shape = p.shape if len(p.shape) > 1 else (*p.shape, 1)
    rows = int(np.prod(shape[:-1]))
    if rows != len(index):
        raise ArtifactError(f"has {rows} rows, but the metadata implies {len(index)}")
    return evolve(p, raw=p.format.gather_rows(p.raw, shape, index))


def check_rows(p: Parameter, rows: int) -> None:
    if p.shape[0] != rows:
        raise ArtifactError(f"has {p.shape[0]} rows, but the metadata implies {rows}")


def same_shape(shape: Shape) -> Shape:
    return shape


@frozen
class Rule:
    """target: the checkpoint's name; shape: of the fixed tensor, from that of the stored one."""

    target: str
    fix: Fix = same
    shape: Callable[[Shape], Shape] = same_shape


Rules: TypeAlias = Mapping[str, Rule]
MAX_BLOCKS = 10_000
BLOCK = re.compile(r"^blk\.(\d{1,5})\.(.+)$")


@frozen
class Architecture:
    """name: of `general.architecture`; model_type: of the configs that it makes.

    Block indices from num_hidden_layers on are those of the MTP.
    """

    name: str
    model_type: str
    config: Callable[[Metadata, Tensors], dict[str, Any]]
    whole: Rules
    block: Rules
    mtp: Rules

    def target(self, path: Path, name: str, config: Config) -> tuple[str, Rule]:
        """The checkpoint's name of a stored tensor, and how to restore it."""
        layers, rule = config["num_hidden_layers"], self.whole.get(name)
        if rule is not None:
            return rule.target, rule
        match = BLOCK.match(name)
        if match is not None:
            index = int(match[1])
            extra = config.get("mtp_num_hidden_layers", 0)
            if index >= layers + extra:
                raise ArtifactError(f"{path}: tensor {name!r} is of a block beyond the {layers + extra} announced")
            if index >= layers and match[2] in self.mtp:
                rule = self.mtp[match[2]]
                return rule.target, rule
            if match[2] in self.block:
                rule = self.block[match[2]]
                prefix = f"model.layers.{index}." if index < layers else f"mtp.layers.{index - layers}."
                return prefix + rule.target, rule
        raise ArtifactError(
            f"{path}: tensor {name!r} is not known in architecture {self.name!r}: running the model without it would "
            "give wrong results"
        )


def _vocab(meta: Metadata, tensors: Tensors) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ArtifactError(f"{meta.path}: no tensor 'token_embd.weight': the file is not a complete model")
    return embedding.shape[0]


def common(meta: Metadata, tensors: Tensors, kv_heads: int | None = None) -> dict[str, Any]:
    """kv_heads: where the file has a number for each layer."""
    values, heads = meta.values, meta.whole("attention.head_count")
    config: dict[str, Any] = {
        "vocab_size": _vocab(meta, tensors),
        "hidden_size": meta.whole("embedding_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or meta.whole("attention.head_count_kv", heads),
        "rms_norm_eps": meta.real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": meta.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = values.get(f"tokenizer.ggml.{theirs}_token_id")
        config[f"{ours}_token_id"] = token if is_count(token) else None
    return config


def rope(meta: Metadata) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": meta.real("rope.freq_base", 10000.0)}
    scaling = meta.get("rope.scaling.type")
    if scaling in (None, "none"):
        return rope
    if scaling not in ("linear", "yarn"):
        raise ArtifactError(f"{meta.path}: rope scaling {short(scaling)} is not supported; linear and yarn are")
    rope |= {"rope_type": scaling, "factor": meta.real("rope.scaling.factor")}
    if meta.get("rope.scaling.original_context_length") is not None:
        rope["original_max_position_embeddings"] = meta.whole("rope.scaling.original_context_length")
    return rope


GLOBALS: dict[str, Rule] = {
    "token_embd.weight": Rule("model.embed_tokens.weight"),
    "output_norm.weight": Rule("model.norm.weight"),
    "output.weight": Rule("lm_head.weight"),
}
FREQS = {"rope_freqs.weight": Rule("rope_freqs.weight")}
MLP = {
    f"{theirs}.{part}": Rule(f"{ours}.{part}")
    for theirs, ours in (
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
    )
    for part in ("weight", "bias")
}
