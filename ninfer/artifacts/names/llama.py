"""Llama and models of its shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from ninfer.artifacts.artifact import Parameter
from ninfer.artifacts.names.metadata import Metadata
from ninfer.artifacts.names.table import (
    FREQS,
    GLOBALS,
    MAX_BLOCKS,
    MLP,
    Architecture,
    Config,
    Fix,
    Rule,
    Tensors,
    check_rows,
    common,
    move_rows,
    rope,
)
from ninfer.errors import ArtifactError


def unpermute_heads(heads_key: str) -> Fix:
    """Rotary pairs (2i, 2i + 1) of each head back to (i, i + D / 2)."""

    def fix(p: Parameter, config: Config) -> Parameter:
        heads, d = config[heads_key], config["head_dim"]
        check_rows(p, heads * d)
        if d % 2:
            raise ArtifactError(f"heads have the odd size {d}")
        within = np.arange(d).reshape(d // 2, 2).T.reshape(-1)
        return move_rows(p, (np.arange(heads)[:, None] * d + within).reshape(-1))

    return fix


def _llama_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    config = common(meta, tensors)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = meta.whole("attention.key_length", meta.whole("rope.dimension_count", max(hidden // heads, 1)))
    if meta.get("expert_count"):
        raise ArtifactError(f"{meta.path}: a llama model with experts (Mixtral) is not supported")
    rotary = meta.whole("rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise ArtifactError(f"{meta.path}: rope over {rotary} of {head_dim} dimensions is not supported for llama")
    return config | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": meta.whole("block_count", most=MAX_BLOCKS),
        "intermediate_size": meta.whole("feed_forward_length"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rope_parameters": rope(meta),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


_UNPERMUTE_Q, _UNPERMUTE_K = unpermute_heads("num_attention_heads"), unpermute_heads("num_key_value_heads")


_LLAMA_BLOCK = MLP | {
    "attn_norm.weight": Rule("input_layernorm.weight"),
    "ffn_norm.weight": Rule("post_attention_layernorm.weight"),
    "attn_q.weight": Rule("self_attn.q_proj.weight", _UNPERMUTE_Q),
    "attn_q.bias": Rule("self_attn.q_proj.bias", _UNPERMUTE_Q),
    "attn_k.weight": Rule("self_attn.k_proj.weight", _UNPERMUTE_K),
    "attn_k.bias": Rule("self_attn.k_proj.bias", _UNPERMUTE_K),
}


ARCHITECTURE = Architecture("llama", "llama", _llama_config, GLOBALS | FREQS, _LLAMA_BLOCK, {})
