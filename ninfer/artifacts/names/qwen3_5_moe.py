"""Qwen3.5 with experts."""

from __future__ import annotations

from typing import Any

from ninfer.artifacts.names.metadata import Metadata
from ninfer.artifacts.names.mixture import MIXTURE, mixture_config
from ninfer.artifacts.names.qwen3_5 import QWEN35_BLOCK, QWEN35_MTP, qwen35_config
from ninfer.artifacts.names.table import GLOBALS, Architecture, Tensors


def _qwen35_moe_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    names = {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
    return qwen35_config(meta, tensors) | mixture_config(meta, tensors) | names


ARCHITECTURE = Architecture(
    "qwen35moe", "qwen3_5_moe_text", _qwen35_moe_config, GLOBALS, QWEN35_BLOCK | MIXTURE, QWEN35_MTP
)
