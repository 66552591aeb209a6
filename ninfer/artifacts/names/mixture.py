"""Experts of the Qwen families."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from ninfer.artifacts.artifact import Parameter
from ninfer.artifacts.names.metadata import Metadata
from ninfer.artifacts.names.table import Config, Rule, Shape, Tensors


def one_row(p: Parameter, config: Config) -> Parameter:
    """A matrix of one row that was stored as a vector."""
    return evolve(p, shape=one_row_shape(p.shape))


def one_row_shape(shape: Shape) -> Shape:
    return (1, *shape) if len(shape) == 1 else shape


def mixture_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    shared = tensors.get("blk.0.ffn_gate_shexp.weight")
    inner = 0 if shared is None else shared.shape[0]
    return {
        "num_experts": meta.whole("expert_count"),
        "num_experts_per_tok": meta.whole("expert_used_count"),
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"),
        "shared_expert_intermediate_size": meta.whole("expert_shared_feed_forward_length", inner, least=0),
        "norm_topk_prob": True,
    }


MIXTURE = {
    "ffn_gate_inp.weight": Rule("mlp.gate.weight"),
    "ffn_gate_exps.weight": Rule("mlp.experts.gate_proj"),
    "ffn_up_exps.weight": Rule("mlp.experts.up_proj"),
    "ffn_gate_up_exps.weight": Rule("mlp.experts.gate_up_proj"),
    "ffn_down_exps.weight": Rule("mlp.experts.down_proj"),
    "ffn_gate_inp_shexp.weight": Rule("mlp.shared_expert_gate.weight", one_row, one_row_shape),
    "ffn_gate_shexp.weight": Rule("mlp.shared_expert.gate_proj.weight"),
    "ffn_up_shexp.weight": Rule("mlp.shared_expert.up_proj.weight"),
    "ffn_down_shexp.weight": Rule("mlp.shared_expert.down_proj.weight"),
}
