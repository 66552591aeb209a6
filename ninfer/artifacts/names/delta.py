"""Models with the delta rule: the order of value heads, which converters change, and the config they share.

What is not undone, and told by the config instead:
- `norm_plus_one: true`: weights of the model's offset norms are stored as 1 + w; multiply by them as they are.
- `gdn_tiled_out_columns`: the out_proj weights (names) whose columns keep the file's tiled order of value heads,
  since their blocks are longer than a head. Stored column run t is grouped head (t % Hk) * r + t // Hk, r = Hv / Hk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from ninfer.artifacts.artifact import Parameter
from ninfer.artifacts.names.metadata import Metadata
from ninfer.artifacts.names.table import MAX_BLOCKS, Config, Shape, Tensors, check_rows, common, move_rows, rope
from ninfer.errors import ArtifactError


def _tiled_to_grouped(config: Config) -> NDArray[np.intp]:
    """Where value head j (grouped by key head) stands in the file, which counts key heads fastest."""
    hk, hv = config["linear_num_key_heads"], config["linear_num_value_heads"]
    j = np.arange(hv)
    r = hv // hk
    stored: NDArray[np.intp] = (j % r) * hk + j // r
    return stored


def tiled_columns(config: Config) -> NDArray[np.intp]:
    """Which input element each column of an out_proj weight in tiled order multiplies."""
    hk, hv, width = (config.get(n, 1) for n in ("linear_num_key_heads", "linear_num_value_heads",
                                                "linear_value_head_dim"))  # fmt: skip
    t = np.arange(hv)
    heads = (t % hk) * (hv // hk) + t // hk
    columns: NDArray[np.intp] = (heads[:, None] * width + np.arange(width)).reshape(-1)
    return columns


def _head_rows(config: Config, width: int, start: int = 0) -> NDArray[np.intp]:
    """Row order that undoes the tiling of heads of `width` rows, after `start` rows that stay."""
    heads = _tiled_to_grouped(config)
    moved: NDArray[np.intp] = start + (heads[:, None] * width + np.arange(width)).reshape(-1)
    return np.concatenate([np.arange(start), moved])


def value_heads(p: Parameter, config: Config) -> Parameter:
    """One row per value head."""
    check_rows(p, config["linear_num_value_heads"])
    return move_rows(p, _head_rows(config, 1))


def value_rows(p: Parameter, config: Config) -> Parameter:
    """All rows belong to value heads."""
    width = config["linear_value_head_dim"]
    check_rows(p, config["linear_num_value_heads"] * width)
    return move_rows(p, _head_rows(config, width))


def qkv_rows(p: Parameter, config: Config) -> Parameter:
    """Rows of q and k stay, those of v are value heads."""
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    width = config["linear_value_head_dim"]
    check_rows(p, keys + config["linear_num_value_heads"] * width)
    return move_rows(p, _head_rows(config, width, keys))


def conv(p: Parameter, config: Config) -> Parameter:
    """[C, taps] -> [C, 1, taps], channels as in `qkv_rows`."""
    p = qkv_rows(p, config)
    return evolve(p, shape=conv_shape(p.shape))


def conv_shape(shape: Shape) -> Shape:
    return (shape[0], 1, *shape[1:])


def squeezed(p: Parameter, config: Config) -> Parameter:
    """[C, taps] -> [C, 1, taps]."""
    return evolve(p, shape=conv_shape(p.shape))


def a_log(p: Parameter, config: Config) -> Parameter:
    """As `grouped_a_log`, of value heads in tiled order."""
    return grouped_a_log(value_heads(p, config), config)


def grouped_a_log(p: Parameter, config: Config) -> Parameter:
    """The file has -exp(A_log)."""
    a = p.f32()
    if not (a < 0).all():
        raise ArtifactError("holds numbers that are not negative")
    return evolve(p, raw=p.format.pack(np.log(-a)))


def out_columns(p: Parameter, config: Config) -> Parameter:
    """Columns of value heads; left as they are where blocks are longer than a head, or where they were never moved."""
    if config.get("gdn_v_grouped"):
        return p
    width = config["linear_value_head_dim"]
    if len(p.shape) != 2 or p.shape[1] != config["linear_num_value_heads"] * width:
        raise ArtifactError(f"has shape {list(p.shape)}, which does not fit the metadata")
    if p.name in config["gdn_tiled_out_columns"]:
        return p
    index = _tiled_to_grouped(config)
    return evolve(p, raw=p.format.gather_columns(p.raw, p.shape, width, index))


def delta_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    """What models with the delta rule share; the value heads' order is told by the caller."""
    config = common(meta, tensors)
    blocks, mtp = meta.whole("block_count", most=MAX_BLOCKS), meta.whole("nextn_predict_layers", 0, least=0)
    if mtp > 1 or mtp >= blocks:
        raise ArtifactError(f"{meta.path}: {mtp} MTP blocks of {blocks} in all; none or one is supported")
    layers, head_dim = blocks - mtp, meta.whole("attention.key_length")
    hk, hv = meta.whole("ssm.group_count"), meta.whole("ssm.time_step_rank")
    inner, rotary = meta.whole("ssm.inner_size"), meta.whole("rope.dimension_count", head_dim)
    if hv % hk or inner % hv:
        raise ArtifactError(f"{meta.path}: {hk} key heads, {hv} value heads and {inner} values do not divide evenly")
    if rotary > head_dim:
        raise ArtifactError(f"{meta.path}: rope over {rotary} dimensions of heads of {head_dim}")
    interval = meta.whole("full_attention_interval", 4)
    recurrent = meta.flags("attention.recurrent_layers", layers)
    if recurrent is None:
        recurrent = [(i + 1) % interval != 0 for i in range(layers)]
    return config | {
        "num_hidden_layers": layers,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": interval,
        "layer_types": ["linear_attention" if r else "full_attention" for r in recurrent],
        "linear_num_key_heads": hk,
        "linear_num_value_heads": hv,
        "linear_key_head_dim": meta.whole("ssm.state_size"),
        "linear_value_head_dim": inner // hv,
        "linear_conv_kernel_dim": meta.whole("ssm.conv_kernel"),
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": mtp,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": rope(meta) | {"partial_rotary_factor": rotary / head_dim},
        "norm_plus_one": True,
        "gdn_tiled_out_columns": (),
    }
