"""Qwen3.5 (also 3.6 and 3.8), dense, and what its model with experts shares."""

from __future__ import annotations

from typing import Any

from ninfer.artifacts.names.delta import (
    a_log,
    conv,
    conv_shape,
    delta_config,
    out_columns,
    qkv_rows,
    value_heads,
    value_rows,
)
from ninfer.artifacts.names.metadata import Metadata
from ninfer.artifacts.names.rotation import rotation
from ninfer.artifacts.names.table import GLOBALS, MLP, Architecture, Rule, Tensors


def qwen35_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    config = delta_config(meta, tensors)
    layers, width = config["num_hidden_layers"], config["linear_value_head_dim"]
    outs = {f"model.layers.{i}.linear_attn.out_proj.weight": tensors.get(f"blk.{i}.ssm_out.weight")
            for i in range(layers)}  # fmt: skip
    tiled = [n for n, t in outs.items() if t is not None and not t.format.can_move_columns(width)]
    sections = {"mrope_interleaved": True, "mrope_section": meta.wholes("rope.dimension_sections", 3)}
    hk, hv = config["linear_num_key_heads"], config["linear_num_value_heads"]
    turned = rotation(meta, tensors, layers, QWEN35_BLOCK)
    grouped = hv == hk or turned.get("gdn_v_grouped")
    return config | turned | {
        "rope_parameters": config["rope_parameters"] | sections,
        "gdn_tiled_out_columns": () if grouped else tuple(tiled),
    }  # fmt: skip


def _qwen35_dense_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    return qwen35_config(meta, tensors) | {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "intermediate_size": meta.whole("feed_forward_length"),
    }


QWEN35_BLOCK = {k: r for k, r in MLP.items() if k.endswith(".weight")} | {
    "attn_norm.weight": Rule("input_layernorm.weight"),
    "post_attention_norm.weight": Rule("post_attention_layernorm.weight"),
    "attn_q.weight": Rule("self_attn.q_proj.weight"),  # query and gate of each head together, as in the checkpoint
    "attn_k.weight": Rule("self_attn.k_proj.weight"),
    "attn_q_norm.weight": Rule("self_attn.q_norm.weight"),
    "attn_k_norm.weight": Rule("self_attn.k_norm.weight"),
    "attn_qkv.weight": Rule("linear_attn.in_proj_qkv.weight", qkv_rows),
    "attn_gate.weight": Rule("linear_attn.in_proj_z.weight", value_rows),
    "ssm_alpha.weight": Rule("linear_attn.in_proj_a.weight", value_heads),
    "ssm_beta.weight": Rule("linear_attn.in_proj_b.weight", value_heads),
    "ssm_a": Rule("linear_attn.A_log", a_log),
    "ssm_dt.bias": Rule("linear_attn.dt_bias", value_heads),
    "ssm_conv1d.weight": Rule("linear_attn.conv1d.weight", conv, conv_shape),
    "ssm_norm.weight": Rule("linear_attn.norm.weight"),
    "ssm_out.weight": Rule("linear_attn.out_proj.weight", out_columns),
}
QWEN35_MTP = {
    "nextn.eh_proj.weight": Rule("mtp.fc.weight"),
    "nextn.enorm.weight": Rule("mtp.pre_fc_norm_embedding.weight"),
    "nextn.hnorm.weight": Rule("mtp.pre_fc_norm_hidden.weight"),
    "nextn.shared_head_norm.weight": Rule("mtp.norm.weight"),
    "nextn.embed_tokens.weight": Rule("mtp.embed_tokens.weight"),
    "nextn.shared_head_head.weight": Rule("mtp.lm_head.weight"),
}


ARCHITECTURE = Architecture("qwen35", "qwen3_5_text", _qwen35_dense_config, GLOBALS, QWEN35_BLOCK, QWEN35_MTP)
