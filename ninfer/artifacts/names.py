"""GGUF architectures: their metadata as a Hugging Face config, their tensor names, and what converters did to them.

An architecture is a row of ARCHITECTURES: a config function and two tables of rules, one for tensors of the whole
model, one for tensors of a block. A rule's fix turns the stored tensor back into that of the checkpoint by moving
whole rows or whole blocks, so that no value is decoded.

What is not undone, and told by the config instead:
- `norm_plus_one: true`: weights of the model's offset norms are stored as 1 + w; multiply by them as they are.
- `gdn_tiled_out_columns`: the out_proj weights (names) whose columns keep the file's tiled order of value heads,
  since their blocks are longer than a head. Stored column run t is grouped head (t % Hk) * r + t // Hk, r = Hv / Hk.
- `rope_freq_factors`: list of divisors of the rope frequencies (Llama 3.1), from the tensor `rope_freqs.weight`.
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
from ninfer.errors import ArtifactError

Config: TypeAlias = Mapping[str, Any]
Tensors: TypeAlias = Mapping[str, TensorInfo]
Fix: TypeAlias = Callable[[Parameter, Config], Parameter]
Shape: TypeAlias = tuple[int, ...]


@frozen
class Metadata:
    """Keys below the architecture's name, checked."""

    path: Path
    values: Mapping[str, Any]
    arch: str

    def _error(self, key: str, problem: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: metadata key {self.arch}.{key} {problem}")

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = (1 << 31) - 1) -> int:
        value = self.values.get(f"{self.arch}.{key}", default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # one number per layer, all the same
        if value is None:
            raise self._error(key, "is missing: the file is not a complete model")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._error(key, f"is {_short(value)}, not a whole number from {least} to {most}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.values.get(f"{self.arch}.{key}", default)
        if value is None:
            raise self._error(key, "is missing: the file is not a complete model")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self._error(key, f"is {_short(value)}, not a positive number")
        return float(str(np.float32(value)))  # 1e-06 rather than the digits of its float32

    def wholes(self, key: str, count: int) -> list[int]:
        """The first `count` items of an array."""
        value = self.values.get(f"{self.arch}.{key}")
        if not isinstance(value, list) or len(value) < count or not all(_is_count(v) for v in value[:count]):
            raise self._error(key, f"is {_short(value)}, not a list of {count} whole numbers")
        return value[:count]

    def flags(self, key: str, count: int) -> list[bool] | None:
        """An array of as many booleans; None: there is none."""
        value = self.values.get(f"{self.arch}.{key}")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or not all(isinstance(v, bool) for v in value):
            raise self._error(key, f"is {_short(value)}, not a list of {count} booleans")
        return value[:count]

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.arch}.{key}")


def _is_count(v: object) -> bool:
    return isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 31


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# Fixes


def same(p: Parameter, config: Config) -> Parameter:
    return p


def _move_rows(p: Parameter, index: NDArray[np.intp]) -> Parameter:
    """Row i becomes row index[i]; the numbers of a vector are its rows."""
    shape = p.shape if len(p.shape) > 1 else (*p.shape, 1)
    rows = int(np.prod(shape[:-1]))
    if rows != len(index):
        raise ArtifactError(f"has {rows} rows, but the metadata implies {len(index)}")
    return evolve(p, raw=p.format.gather_rows(p.raw, shape, index))


def _check_rows(p: Parameter, rows: int) -> None:
    if p.shape[0] != rows:
        raise ArtifactError(f"has {p.shape[0]} rows, but the metadata implies {rows}")


def unpermute_heads(heads_key: str) -> Fix:
    """Rotary pairs (2i, 2i + 1) of each head back to (i, i + D / 2)."""

    def fix(p: Parameter, config: Config) -> Parameter:
        heads, d = config[heads_key], config["head_dim"]
        _check_rows(p, heads * d)
        if d % 2:
            raise ArtifactError(f"heads have the odd size {d}")
        within = np.arange(d).reshape(d // 2, 2).T.reshape(-1)
        return _move_rows(p, (np.arange(heads)[:, None] * d + within).reshape(-1))

    return fix


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
    _check_rows(p, config["linear_num_value_heads"])
    return _move_rows(p, _head_rows(config, 1))


def value_rows(p: Parameter, config: Config) -> Parameter:
    """All rows belong to value heads."""
    width = config["linear_value_head_dim"]
    _check_rows(p, config["linear_num_value_heads"] * width)
    return _move_rows(p, _head_rows(config, width))


def qkv_rows(p: Parameter, config: Config) -> Parameter:
    """Rows of q and k stay, those of v are value heads."""
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    width = config["linear_value_head_dim"]
    _check_rows(p, keys + config["linear_num_value_heads"] * width)
    return _move_rows(p, _head_rows(config, width, keys))


def conv(p: Parameter, config: Config) -> Parameter:
    """[C, taps] -> [C, 1, taps], channels as in `qkv_rows`."""
    p = qkv_rows(p, config)
    return evolve(p, shape=_conv_shape(p.shape))


def _conv_shape(shape: Shape) -> Shape:
    return (shape[0], 1, *shape[1:])


def squeezed(p: Parameter, config: Config) -> Parameter:
    """[C, taps] -> [C, 1, taps]."""
    return evolve(p, shape=_conv_shape(p.shape))


def a_log(p: Parameter, config: Config) -> Parameter:
    """As `grouped_a_log`, of value heads in tiled order."""
    return grouped_a_log(value_heads(p, config), config)


def grouped_a_log(p: Parameter, config: Config) -> Parameter:
    """The file has -exp(A_log)."""
    a = p.f32()
    if not (a < 0).all():
        raise ArtifactError("holds numbers that are not negative")
    return evolve(p, raw=p.format.pack(np.log(-a)))


def one_row(p: Parameter, config: Config) -> Parameter:
    """A matrix of one row that was stored as a vector."""
    return evolve(p, shape=_one_row_shape(p.shape))


def _one_row_shape(shape: Shape) -> Shape:
    return (1, *shape) if len(shape) == 1 else shape


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


# Architectures


def _same_shape(shape: Shape) -> Shape:
    return shape


@frozen
class Rule:
    """target: the checkpoint's name; shape: of the fixed tensor, from that of the stored one."""

    target: str
    fix: Fix = same
    shape: Callable[[Shape], Shape] = _same_shape


Rules: TypeAlias = Mapping[str, Rule]
MAX_BLOCKS = 10_000
_BLOCK = re.compile(r"^blk\.(\d{1,5})\.(.+)$")


@frozen
class Architecture:
    """name: of `general.architecture`. Block indices from num_hidden_layers on are those of the MTP."""

    name: str
    config: Callable[[Metadata, Tensors], dict[str, Any]]
    whole: Rules
    block: Rules
    mtp: Rules

    def target(self, path: Path, name: str, config: Config) -> tuple[str, Rule]:
        """The checkpoint's name of a stored tensor, and how to restore it."""
        layers, rule = config["num_hidden_layers"], self.whole.get(name)
        if rule is not None:
            return rule.target, rule
        match = _BLOCK.match(name)
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


def _common(meta: Metadata, tensors: Tensors, kv_heads: int | None = None) -> dict[str, Any]:
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
        config[f"{ours}_token_id"] = token if _is_count(token) else None
    return config


def _rope(meta: Metadata) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": meta.real("rope.freq_base", 10000.0)}
    scaling = meta.get("rope.scaling.type")
    if scaling in (None, "none"):
        return rope
    if scaling not in ("linear", "yarn"):
        raise ArtifactError(f"{meta.path}: rope scaling {_short(scaling)} is not supported; linear and yarn are")
    rope |= {"rope_type": scaling, "factor": meta.real("rope.scaling.factor")}
    if meta.get("rope.scaling.original_context_length") is not None:
        rope["original_max_position_embeddings"] = meta.whole("rope.scaling.original_context_length")
    return rope


def _llama_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    config = _common(meta, tensors)
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
        "rope_parameters": _rope(meta),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


_UNPERMUTE_Q, _UNPERMUTE_K = unpermute_heads("num_attention_heads"), unpermute_heads("num_key_value_heads")

_GLOBALS: dict[str, Rule] = {
    "token_embd.weight": Rule("model.embed_tokens.weight"),
    "output_norm.weight": Rule("model.norm.weight"),
    "output.weight": Rule("lm_head.weight"),
}
_FREQS = {"rope_freqs.weight": Rule("rope_freqs.weight")}
_MLP = {
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
_LLAMA_BLOCK = _MLP | {
    "attn_norm.weight": Rule("input_layernorm.weight"),
    "ffn_norm.weight": Rule("post_attention_layernorm.weight"),
    "attn_q.weight": Rule("self_attn.q_proj.weight", _UNPERMUTE_Q),
    "attn_q.bias": Rule("self_attn.q_proj.bias", _UNPERMUTE_Q),
    "attn_k.weight": Rule("self_attn.k_proj.weight", _UNPERMUTE_K),
    "attn_k.bias": Rule("self_attn.k_proj.bias", _UNPERMUTE_K),
}


def _delta_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    """What models with the delta rule share; the value heads' order is told by the caller."""
    config = _common(meta, tensors)
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
        "rope_parameters": _rope(meta) | {"partial_rotary_factor": rotary / head_dim},
        "norm_plus_one": True,
        "gdn_tiled_out_columns": (),
    }


def _mixture_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    shared = tensors.get("blk.0.ffn_gate_shexp.weight")
    inner = 0 if shared is None else shared.shape[0]
    return {
        "num_experts": meta.whole("expert_count"),
        "num_experts_per_tok": meta.whole("expert_used_count"),
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"),
        "shared_expert_intermediate_size": meta.whole("expert_shared_feed_forward_length", inner, least=0),
        "norm_topk_prob": True,
    }


def _qwen35_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    config = _delta_config(meta, tensors)
    layers, width = config["num_hidden_layers"], config["linear_value_head_dim"]
    outs = {f"model.layers.{i}.linear_attn.out_proj.weight": tensors.get(f"blk.{i}.ssm_out.weight")
            for i in range(layers)}  # fmt: skip
    tiled = [n for n, t in outs.items() if t is not None and not t.format.can_move_columns(width)]
    sections = {"mrope_interleaved": True, "mrope_section": meta.wholes("rope.dimension_sections", 3)}
    hk, hv = config["linear_num_key_heads"], config["linear_num_value_heads"]
    rotation = _rotation(meta, tensors, layers)
    grouped = hv == hk or rotation.get("gdn_v_grouped")
    return config | rotation | {
        "rope_parameters": config["rope_parameters"] | sections,
        "gdn_tiled_out_columns": () if grouped else tuple(tiled),
    }  # fmt: skip


_PRISM = {
    "version": 1,
    "transform": "normalized-sylvester-walsh-hadamard",
    "axis": "input-last-dimension",
    "sign_mode": "explicit",
}


def _rotation(meta: Metadata, tensors: Tensors, layers: int) -> dict[str, Any]:
    """Signs of the rotated matrices (PrismML's `prism.hadamard.*`), as bf16 words by the checkpoint's names."""

    def get(key: str) -> Any:
        return meta.values.get(f"prism.hadamard.{key}")

    if get("version") is None:
        return {}
    for key, only in _PRISM.items():
        if get(key) != only:
            raise ArtifactError(f"{meta.path}: prism.hadamard.{key} is {_short(get(key))}; supported is {only!r}")
    widths, values = get("sign_widths"), get("sign_values")
    fits = isinstance(widths, list) and all(map(_is_count, widths)) and isinstance(values, list)
    if not fits or sum(widths) != len(values) or any(v not in (1, -1) for v in values):
        raise ArtifactError(f"{meta.path}: prism.hadamard.sign_values are not a sign for each of sign_widths")
    words, at, signs = np.where(np.array(values) > 0, 0x3F80, 0xBF80).astype(np.uint16), 0, dict[int, Any]()
    for width in widths:
        signs[width], at = words[at : at + width], at + width
    names, inverse = get("weight_names") or [], get("inverse_weight_names") or []
    if inverse not in ([], ["token_embd.weight"]):
        raise ArtifactError(f"{meta.path}: prism.hadamard.inverse_weight_names is {_short(inverse)}; supported is the "
                            "embedding alone")  # fmt: skip
    found = {}
    for name in [*names, *inverse]:
        tensor = tensors.get(name)
        if tensor is None or tensor.shape[-1] not in signs:
            raise ArtifactError(f"{meta.path}: prism.hadamard names {name!r}, which has no signs or is not there")
        match = _BLOCK.match(name)
        if match is None:
            target = _GLOBALS[name].target if name in _GLOBALS else name
        else:
            prefix = f"model.layers.{match[1]}." if int(match[1]) < layers else "mtp.layers.0."
            target = prefix + (_QWEN35_BLOCK[match[2]].target if match[2] in _QWEN35_BLOCK else match[2])
        found[target] = signs[tensor.shape[-1]]
    return {
        "hadamard_signs": found,
        "hadamard_block": get("block_size"),
        "gdn_v_grouped": get("gdn_v_grouped") is True,
    }


def _qwen35_dense_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    return _qwen35_config(meta, tensors) | {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "intermediate_size": meta.whole("feed_forward_length"),
    }


def _qwen35_moe_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    names = {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
    return _qwen35_config(meta, tensors) | _mixture_config(meta, tensors) | names


def _qwen3_next_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    """Value heads stay grouped by key head in these files, and there is no MTP block."""
    names = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
    return _delta_config(meta, tensors) | _mixture_config(meta, tensors) | names


_QWEN35_BLOCK = {k: r for k, r in _MLP.items() if k.endswith(".weight")} | {
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
    "ssm_conv1d.weight": Rule("linear_attn.conv1d.weight", conv, _conv_shape),
    "ssm_norm.weight": Rule("linear_attn.norm.weight"),
    "ssm_out.weight": Rule("linear_attn.out_proj.weight", out_columns),
}
_QWEN35_MTP = {
    "nextn.eh_proj.weight": Rule("mtp.fc.weight"),
    "nextn.enorm.weight": Rule("mtp.pre_fc_norm_embedding.weight"),
    "nextn.hnorm.weight": Rule("mtp.pre_fc_norm_hidden.weight"),
    "nextn.shared_head_norm.weight": Rule("mtp.norm.weight"),
    "nextn.embed_tokens.weight": Rule("mtp.embed_tokens.weight"),
    "nextn.shared_head_head.weight": Rule("mtp.lm_head.weight"),
}


def _sliding(meta: Metadata, layers: int) -> list[str]:
    sliding = meta.flags("attention.sliding_window_pattern", layers) or [(i + 1) % 6 != 0 for i in range(layers)]
    return ["sliding_attention" if s else "full_attention" for s in sliding]


def _gemma3_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    """The largest of the family divides by the model's width over its heads instead of the heads' size."""
    config = _common(meta, tensors)
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
        "layer_types": _sliding(meta, layers),
        "rope_parameters": {
            "full_attention": _rope(meta),
            "sliding_attention": {"rope_type": "default", "rope_theta": meta.real("rope.freq_base_swa", 10000.0)},
        },
        "final_logit_softcapping": meta.real("final_logit_softcapping") if cap else None,
        "norm_plus_one": True,
    }


def _gemma4_config(meta: Metadata, tensors: Tensors) -> dict[str, Any]:
    layers = meta.whole("block_count", most=MAX_BLOCKS)
    kinds = _sliding(meta, layers)
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
    return _common(meta, tensors, sliding) | mixture | {
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


_GEMMA3_BLOCK = {k: r for k, r in _MLP.items() if k.endswith(".weight")} | {
    "attn_norm.weight": Rule("input_layernorm.weight"),
    "attn_q.weight": Rule("self_attn.q_proj.weight"),
    "attn_k.weight": Rule("self_attn.k_proj.weight"),
    "attn_q_norm.weight": Rule("self_attn.q_norm.weight"),
    "attn_k_norm.weight": Rule("self_attn.k_norm.weight"),
    "post_attention_norm.weight": Rule("post_attention_layernorm.weight"),
    "ffn_norm.weight": Rule("pre_feedforward_layernorm.weight"),
    "post_ffw_norm.weight": Rule("post_feedforward_layernorm.weight"),
}
_GEMMA4_BLOCK = _GEMMA3_BLOCK | {
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
_MIXTURE = {
    "ffn_gate_inp.weight": Rule("mlp.gate.weight"),
    "ffn_gate_exps.weight": Rule("mlp.experts.gate_proj"),
    "ffn_up_exps.weight": Rule("mlp.experts.up_proj"),
    "ffn_gate_up_exps.weight": Rule("mlp.experts.gate_up_proj"),
    "ffn_down_exps.weight": Rule("mlp.experts.down_proj"),
    "ffn_gate_inp_shexp.weight": Rule("mlp.shared_expert_gate.weight", one_row, _one_row_shape),
    "ffn_gate_shexp.weight": Rule("mlp.shared_expert.gate_proj.weight"),
    "ffn_up_shexp.weight": Rule("mlp.shared_expert.up_proj.weight"),
    "ffn_down_shexp.weight": Rule("mlp.shared_expert.down_proj.weight"),
}
_QWEN3_NEXT_BLOCK = (
    _QWEN35_BLOCK
    | _MIXTURE
    | {
        "attn_qkv.weight": Rule("linear_attn.in_proj_qkv.weight"),
        "attn_gate.weight": Rule("linear_attn.in_proj_z.weight"),
        "ssm_ba.weight": Rule("linear_attn.in_proj_ba.weight"),
        "ssm_a": Rule("linear_attn.A_log", grouped_a_log),
        "ssm_dt.bias": Rule("linear_attn.dt_bias"),
        "ssm_conv1d.weight": Rule("linear_attn.conv1d.weight", squeezed, _conv_shape),
        "ssm_out.weight": Rule("linear_attn.out_proj.weight"),
    }
)

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", _llama_config, _GLOBALS | _FREQS, _LLAMA_BLOCK, {}),
    Architecture("qwen35", _qwen35_dense_config, _GLOBALS, _QWEN35_BLOCK, _QWEN35_MTP),
    Architecture("qwen35moe", _qwen35_moe_config, _GLOBALS, _QWEN35_BLOCK | _MIXTURE, _QWEN35_MTP),
    Architecture("qwen3next", _qwen3_next_config, _GLOBALS, _QWEN3_NEXT_BLOCK, {}),
    Architecture("gemma3", _gemma3_config, _GLOBALS, _GEMMA3_BLOCK, {}),
    Architecture("gemma4", _gemma4_config, _GLOBALS | _FREQS, _GEMMA4_BLOCK, {}),
)


def architecture(path: Path, values: Mapping[str, Any]) -> Architecture:
    name = values.get("general.architecture")
    for arch in ARCHITECTURES:
        if arch.name == name:
            return arch
    known = ", ".join(a.name for a in ARCHITECTURES)
    if name is None:
        raise ArtifactError(f"{path}: no metadata key general.architecture; supported architectures are {known}")
    raise ArtifactError(f"{path}: architecture {_short(name)} is not supported; supported are {known}")
