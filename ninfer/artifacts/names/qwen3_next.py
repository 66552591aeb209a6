"""Qwen3-Next."""

from __future__ import annotations

from typing import Any

from ninfer.artifacts.names.delta import conv_shape, delta_config, grouped_a_log, squeezed
from ninfer.artifacts.names.metadata import Metadata
from ninfer.artifacts.names.mixture import MIXTURE, mixture_config
from ninfer.artifacts.names.qwen3_5 import QWEN35_BLOCK
from ninfer.artifacts.names.table import GLOBALS, Architecture, Rule, Tensors


def _qwen3_next_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    """Value heads stay grouped by key head in these files, and there is no MTP block."""
    names = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
    return delta_config(meta, tensors) | mixture_config(meta, tensors) | names


_QWEN3_NEXT_BLOCK = (
    QWEN35_BLOCK
    | MIXTURE
    | {
        "attn_qkv.weight": Rule("linear_attn.in_proj_qkv.weight"),
        "attn_gate.weight": Rule("linear_attn.in_proj_z.weight"),
        "ssm_ba.weight": Rule("linear_attn.in_proj_ba.weight"),
        "ssm_a": Rule("linear_attn.A_log", grouped_a_log),
        "ssm_dt.bias": Rule("linear_attn.dt_bias"),
        "ssm_conv1d.weight": Rule("linear_attn.conv1d.weight", squeezed, conv_shape),
        "ssm_out.weight": Rule("linear_attn.out_proj.weight"),
    }
)


ARCHITECTURE = Architecture("qwen3next", "qwen3_next", _qwen3_next_config, GLOBALS, _QWEN3_NEXT_BLOCK, {})
