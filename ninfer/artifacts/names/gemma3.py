"""Gemma 3, text."""

from __future__ import annotations

from typing import Any

from ninfer.artifacts.names.metadata import Metadata
from ninfer.artifacts.names.table import GLOBALS, MAX_BLOCKS, MLP, Architecture, Rule, Tensors, common, rope


def layer_kinds(meta: Metadata, layers: int) -> list[str]:
    sliding = meta.flags("attention.sliding_window_pattern", layers) or [(i + 1) % 6 != 0 for i in range(layers)]
    return ["sliding_attention" if s else "full_attention" for s in sliding]


def _gemma3_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    """The largest of the family divides by the model's width over its heads instead of the heads' size."""
    config = common(meta, tensors)
    layers, head_dim = meta.whole("block_count", most=MAX_BLOCKS), meta.whole("attention.key_length", 256)
    scalar = config["hidden_size"] / config["num_attention_heads"] if layers == 62 else head_dim
    cap = meta.get("final_logit_softcapping")
    return config | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": layers,
        "intermediate_size": meta.whole("feed_forward_length"),
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": meta.whole("attention.sliding_window"),
        "layer_types": layer_kinds(meta, layers),
        "rope_parameters": {
            "full_attention": rope(meta),
            "sliding_attention": {"rope_type": "default", "rope_theta": meta.real("rope.freq_base_swa", 10000.0)},
        },
        "final_logit_softcapping": meta.real("final_logit_softcapping") if cap else None,
        "norm_plus_one": True,
    }


GEMMA3_BLOCK = {k: r for k, r in MLP.items() if k.endswith(".weight")} | {
    "attn_norm.weight": Rule("input_layernorm.weight"),
    "attn_q.weight": Rule("self_attn.q_proj.weight"),
    "attn_k.weight": Rule("self_attn.k_proj.weight"),
    "attn_q_norm.weight": Rule("self_attn.q_norm.weight"),
    "attn_k_norm.weight": Rule("self_attn.k_norm.weight"),
    "post_attention_norm.weight": Rule("post_attention_layernorm.weight"),
    "ffn_norm.weight": Rule("pre_feedforward_layernorm.weight"),
    "post_ffw_norm.weight": Rule("post_feedforward_layernorm.weight"),
}


ARCHITECTURE = Architecture("gemma3", "gemma3_text", _gemma3_config, GLOBALS, GEMMA3_BLOCK, {})
