"""Gemma 4, text."""

from __future__ import annotations

from typing import Any

from ninfer.artifacts.names.gemma3 import GEMMA3_BLOCK, layer_kinds
from ninfer.artifacts.names.metadata import Metadata
from ninfer.artifacts.names.table import FREQS, GLOBALS, MAX_BLOCKS, Architecture, Rule, Tensors, common
from ninfer.errors import ArtifactError


def _gemma4_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    layers = meta.whole("block_count", most=MAX_BLOCKS)
    kinds = layer_kinds(meta, layers)
    counts = meta.get("attention.head_count_kv")
    if isinstance(counts, list):
        counts = meta.wholes("attention.head_count_kv", layers)
        of = {kind: {n for n, k in zip(counts, kinds, strict=True) if k == kind} for kind in dict.fromkeys(kinds)}
        if any(len(found) != 1 for found in of.values()):
            raise ArtifactError(f"{meta.path}: {meta.arch}.attention.head_count_kv differs among layers of one kind")
        sliding, full = (of.get(kind, {counts[0]}).pop() for kind in ("sliding_attention", "full_attention"))
    else:
        sliding = full = meta.whole("attention.head_count_kv")
    head_dim = meta.whole("attention.key_length")
    first_full = kinds.index("full_attention") if "full_attention" in kinds else 0
    experts = meta.get("expert_count")
    mixture = {
        "num_experts": meta.whole("expert_count"),
        "top_k_experts": meta.whole("expert_used_count"),
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"),
    } if experts else {}  # fmt: skip
    return common(meta, tensors, sliding) | mixture | {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": layers,
        "intermediate_size": meta.whole("feed_forward_length"),
        "num_global_key_value_heads": full,
        "head_dim": meta.whole("attention.key_length_swa", head_dim),
        "global_head_dim": head_dim,
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in tensors,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": meta.whole("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {
            # which pairs turn is told by rope_freqs.weight
            "full_attention": {"rope_type": "divided", "rope_theta": meta.real("rope.freq_base", 1e6)},
            "sliding_attention": {"rope_type": "default", "rope_theta": meta.real("rope.freq_base_swa", 10000.0)},
        },
        "final_logit_softcapping": meta.real("final_logit_softcapping", 30.0),
        "hidden_size_per_layer_input": meta.whole("embedding_length_per_layer_input", 0, least=0),
        "num_kv_shared_layers": meta.whole("attention.shared_kv_layers", 0, least=0),
        "enable_moe_block": bool(experts),
    }  # fmt: skip


_GEMMA4_BLOCK = GEMMA3_BLOCK | {
    "post_ffw_norm_1.weight": Rule("post_feedforward_layernorm_1.weight"),
    "pre_ffw_norm_2.weight": Rule("pre_feedforward_layernorm_2.weight"),
    "post_ffw_norm_2.weight": Rule("post_feedforward_layernorm_2.weight"),
    "ffn_gate_inp.weight": Rule("router.proj.weight"),
    "ffn_gate_inp.scale": Rule("router.scale"),
    "ffn_gate_up_exps.weight": Rule("experts.gate_up_proj"),
    "ffn_gate_exps.weight": Rule("experts.gate_proj"),
    "ffn_up_exps.weight": Rule("experts.up_proj"),
    "ffn_down_exps.weight": Rule("experts.down_proj"),
    "ffn_down_exps.scale": Rule("router.per_expert_scale"),
    "layer_output_scale.weight": Rule("layer_scalar"),
}


ARCHITECTURE = Architecture("gemma4", "gemma4_text", _gemma4_config, GLOBALS | FREQS, _GEMMA4_BLOCK, {})
