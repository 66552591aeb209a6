"""Models without files: published shapes, weights from a seed. For measuring speed; their text means nothing.

`synthetic:qwen3.5-27b` is a name; a format is one name, or two as in `q4_g64/q5_g64`: queries, keys, delta inputs, gate
and up in the first, other projections in the second. Embedding and head take q8_g32 beside formats of fewer bits. In
Qwen models with experts these formats are those of the experts, and all else has q8_g32, as published recipes do.
Models with an MTP block and a large vocabulary have a proposal head in q4_g64, or the first format if it is plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.artifacts.artifact import PROPOSAL_HEAD, Artifact, Parameter, TensorInfo
from ninfer.artifacts.synthetic_text import CHAT_TEMPLATE, byte_tokenizer
from ninfer.errors import UsageError
from ninfer.formats.quant import BF16_FORMAT, F32_FORMAT, QuantFormat, by_name
from ninfer.formats.tile import TILE, make_tile

PREFIX = "synthetic:"


def _qwen3_5(
    hidden: int,
    layers: int,
    inner: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
    *,
    tied: bool = False,
    vocab: int = 248320,
    head_dim: int = 256,
    key_heads: int = 16,
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    }


def _moe(config: dict[str, Any], experts: int, top_k: int, inner: int) -> dict[str, Any]:
    return config | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
    }


def _gemma4(
    hidden: int, layers: int, inner: int, heads: int, kv: tuple[int, int], dims: tuple[int, int],
    experts: tuple[int, int, int], *, vocab: int = 262144, window: int = 1024,
) -> dict[str, Any]:  # fmt: skip
    """kv, dims: of sliding and of full layers. experts: how many, picked, width of one."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv[0],
        "num_global_key_value_heads": kv[1],
        "head_dim": dims[0],
        "global_head_dim": dims[1],
        "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": vocab,
        "max_position_embeddings": 262144,
        "sliding_window": window,
        "layer_types": ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers)],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
        "final_logit_softcapping": 30.0,
        "enable_moe_block": True,
        "num_experts": experts[0],
        "top_k_experts": experts[1],
        "moe_intermediate_size": experts[2],
        "tie_word_embeddings": True,
    }


def _llama(
    hidden: int, layers: int, inner: int, heads: int, kv_heads: int, vocab: int, *, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
    }


CONFIGS: Mapping[str, dict[str, Any]] = {
    "qwen3.5-27b": _qwen3_5(5120, 64, 17408, 24, 4, 48),
    "qwen3.5-9b": _qwen3_5(4096, 32, 12288, 16, 4, 32),
    "bonsai2-27b": _qwen3_5(5120, 64, 17408, 24, 4, 48),
    "bonsai-tiny": _qwen3_5(512, 4, 1024, 4, 2, 8, vocab=4096, key_heads=4),
    "qwen3.5-tiny": _qwen3_5(512, 4, 1024, 4, 2, 8, vocab=4096, key_heads=4),
    "qwen3.5-35b-a3b": _moe(_qwen3_5(2048, 40, 512, 16, 2, 32), 256, 8, 512),
    "gemma4-26b-a4b": _gemma4(2816, 30, 2112, 16, (8, 2), (256, 512), (128, 8, 704)),
    "qwen3.5-moe-tiny": _moe(_qwen3_5(256, 4, 128, 4, 2, 8, vocab=4096, key_heads=4), 16, 4, 128),
    "gemma4-tiny": _gemma4(256, 6, 192, 4, (2, 1), (64, 128), (8, 2, 64), vocab=4096, window=128),
    "llama-8b": _llama(4096, 32, 14336, 32, 8, 128256, tied=False),
    "llama-tiny": _llama(256, 2, 512, 4, 2, 4096, tied=True),
}
ROTATED = {"bonsai2-27b": 1024, "bonsai-tiny": 128}  # matrices in a rotated basis, embedding and head like the others
DEFAULT_FORMAT = {"bonsai2-27b": "t2_g128", "bonsai-tiny": "t2_g128", "gemma4-26b-a4b": "q4_0"}
EMBEDDING = {"gemma4_text": "q6_k"}
PROPOSAL_ROWS = 131072
_FIRST = ("q_proj", "k_proj", "in_proj_qkv", "gate_proj", "up_proj", "gate_up_proj")
_SMALL = ("in_proj_a", "in_proj_b", "gate", "shared_expert_gate", "proj")  # gates, and routers by both their names


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every parameter of a checkpoint of this config."""
    if config["model_type"] == "gemma4_text":
        return _gemma4_shapes(config)
    h = config["hidden_size"]
    qwen = config["model_type"].startswith("qwen3_5")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], h),
        "model.norm.weight": (h,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], h)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= _block_shapes(config, p)
        if qwen and (i + 1) % config["full_attention_interval"]:
            hv, dv = config["linear_num_value_heads"], config["linear_value_head_dim"]
            channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + hv * dv
            a = f"{p}linear_attn."
            shapes |= {
                f"{a}in_proj_qkv.weight": (channels, h),
                f"{a}in_proj_z.weight": (hv * dv, h),
                f"{a}in_proj_a.weight": (hv, h),
                f"{a}in_proj_b.weight": (hv, h),
                f"{a}conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
                f"{a}A_log": (hv,),
                f"{a}dt_bias": (hv,),
                f"{a}norm.weight": (dv,),
                f"{a}out_proj.weight": (h, hv * dv),
            }
            continue
        shapes |= _attention_shapes(config, f"{p}self_attn.")
    if config.get("mtp_num_hidden_layers"):
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        shapes |= {"mtp.fc.weight": (h, 2 * h), **{f"mtp.{n}.weight": (h,) for n in norms}}
        shapes |= _block_shapes(config, "mtp.layers.0.") | _attention_shapes(config, "mtp.layers.0.self_attn.")
        if config["vocab_size"] > PROPOSAL_ROWS:
            shapes[PROPOSAL_HEAD] = (PROPOSAL_ROWS, h)
    return shapes


def _block_shapes(config: Mapping[str, Any], p: str) -> dict[str, tuple[int, ...]]:
    """A layer without its mixer."""
    h = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{p}input_layernorm.weight": (h,),
        f"{p}post_attention_layernorm.weight": (h,),
    }
    if "num_experts" not in config:
        return shapes | _mlp_shapes(f"{p}mlp.", config["intermediate_size"], h)
    shapes |= _expert_shapes(f"{p}mlp.experts.", config["num_experts"], config["moe_intermediate_size"], h)
    shapes |= _mlp_shapes(f"{p}mlp.shared_expert.", config["shared_expert_intermediate_size"], h)
    return shapes | {f"{p}mlp.gate.weight": (config["num_experts"], h), f"{p}mlp.shared_expert_gate.weight": (1, h)}


def _attention_shapes(config: Mapping[str, Any], a: str) -> dict[str, tuple[int, ...]]:
    h, heads = config["hidden_size"], config["num_attention_heads"]
    qwen = config["model_type"].startswith("qwen3_5")
    d = config.get("head_dim", h // heads)
    q, kv = heads * d, config["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {f"{a}q_proj.weight": (2 * q if qwen else q, h), f"{a}k_proj.weight": (kv, h)}
    shapes |= {f"{a}v_proj.weight": (kv, h), f"{a}o_proj.weight": (h, q)}
    if qwen:
        shapes |= {f"{a}q_norm.weight": (d,), f"{a}k_norm.weight": (d,)}
    return shapes


def _mlp_shapes(p: str, inner: int, hidden: int) -> dict[str, tuple[int, ...]]:
    both: dict[str, tuple[int, ...]] = {f"{p}{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
    return both | {f"{p}down_proj.weight": (hidden, inner)}


def _expert_shapes(p: str, num: int, inner: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {f"{p}gate_up_proj": (num, 2 * inner, hidden), f"{p}down_proj": (num, hidden, inner)}


def _gemma4_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    h, heads, num = config["hidden_size"], config["num_attention_heads"], config["num_experts"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], h),
        "model.norm.weight": (h,),
    }
    for i, kind in enumerate(config["layer_types"]):
        p, full = f"model.layers.{i}.", kind == "full_attention"
        d = config["global_head_dim" if full else "head_dim"]
        kv = d * config["num_global_key_value_heads" if full else "num_key_value_heads"]
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        shapes |= {f"{p}{name}_layernorm.weight": (h,) for name in norms}
        extra = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
        shapes |= {f"{p}{name}.weight": (h,) for name in extra}
        shapes |= {f"{p}self_attn.q_proj.weight": (heads * d, h), f"{p}self_attn.k_proj.weight": (kv, h)}
        if not full:
            shapes[f"{p}self_attn.v_proj.weight"] = (kv, h)
        shapes |= {f"{p}self_attn.o_proj.weight": (h, heads * d)}
        shapes |= {f"{p}self_attn.{n}_norm.weight": (d,) for n in "qk"} | {f"{p}layer_scalar": (1,)}
        shapes |= _mlp_shapes(f"{p}mlp.", config["intermediate_size"], h)
        shapes |= _expert_shapes(f"{p}experts.", num, config["moe_intermediate_size"], h)
        shapes |= {f"{p}router.proj.weight": (num, h), f"{p}router.scale": (h,), f"{p}router.per_expert_scale": (num,)}
    return shapes


def rotation_of(config: Mapping[str, Any], block: int) -> dict[str, Any]:
    """Signs along the rows of every matrix but the small ones of the delta rule, equal for equal widths."""
    names = {
        name: shape[1]
        for name, shape in shapes_of(config).items()
        if len(shape) == 2 and name.removesuffix(".weight").split(".")[-1] not in _SMALL
    }
    words = {
        k: np.where(np.random.default_rng(k).random(k) < 0.5, 0xBF80, 0x3F80).astype(np.uint16)
        for k in set(names.values())
    }
    return {"hadamard_signs": {name: words[k] for name, k in names.items()}, "hadamard_block": block}


class SyntheticArtifact(Artifact):
    """Rows of `get` repeat every TILE rows, so that a large matrix is made fast."""

    kind = "synthetic"
    chat_template = CHAT_TEMPLATE

    def __init__(self, name: str, format: str | None = None, *, seed: int = 0) -> None:
        """name: with or without the prefix.   Raises UsageError listing what there is."""
        name = name.removeprefix(PREFIX)
        if name not in CONFIGS:
            raise UsageError(f"no synthetic model {name!r}; there are {', '.join(CONFIGS)}")
        self.path, self.display_name = Path(PREFIX + name), name
        self.config: Mapping[str, Any] = CONFIGS[name]
        if name in ROTATED:
            plain = {**self.config, "mtp_num_hidden_layers": 0}  # the signs are those of the layers
            self.config = {**plain, **rotation_of(plain, ROTATED[name])}
        self.generation_config = {"eos_token_id": self.config["vocab_size"] - 1}
        self.tokenizer_source = byte_tokenizer(self.config["vocab_size"])
        self._seed = seed
        first, _, second = (format or DEFAULT_FORMAT.get(name, "q4_g64/q5_g64")).partition("/")
        self._formats = by_name(first), by_name(second or first)
        self._shapes = shapes_of(self.config)

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    @property
    def has_proposal(self) -> bool:
        return PROPOSAL_HEAD in self._shapes

    def proposal_ids(self) -> NDArray[np.int32] | None:
        """Spread over the vocabulary, in an order that is not theirs, as a ranking gives."""
        ids = np.random.default_rng(self._seed).permutation(self.config["vocab_size"])[:PROPOSAL_ROWS]
        return ids.astype(np.int32)

    def info(self, name: str) -> TensorInfo:
        if name not in self._shapes:
            raise self.missing(name)
        return TensorInfo(self._shapes[name], self._format(name))

    def _format(self, name: str) -> QuantFormat:
        part = name.removesuffix(".weight").split(".")[-1]
        first, second = self._formats
        if len(self._shapes[name]) == 1 or part in ("norm", "conv1d"):
            return F32_FORMAT
        if part in _SMALL:
            return BF16_FORMAT
        wide = first if first.is_plain else by_name("q8_g32")
        if name == PROPOSAL_HEAD:
            return first if first.is_plain else by_name("q4_g64")
        if part in ("embed_tokens", "lm_head") and self.display_name not in ROTATED:
            special = EMBEDDING.get(self.config["model_type"])
            return wide if special is None or first.is_plain else by_name(special)
        if self.config["model_type"] == "qwen3_5_moe_text" and ".experts." not in name:
            return wide
        return first if part in _FIRST else second

    def get(self, name: str) -> Parameter:
        info = self.info(name)
        if info.format is F32_FORMAT:
            values = self._vector(name, info.shape)
            return Parameter(name, info.shape, F32_FORMAT, values.reshape(-1).view(np.uint8))
        n, k = prod(info.shape[:-1]), info.shape[-1]
        tile = make_tile(info.format, min(n, TILE), k)
        index = (np.arange(n) + 16 * self.seed_of(name)) % tile.shape[0]
        raw = info.format.gather_rows(tile.raw, tile.shape, index)
        return Parameter(name, info.shape, info.format, raw)

    def seed_of(self, name: str) -> int:
        """Of a matrix: by how many runs of 16 rows the tile is turned."""
        return self._seed + list(self._shapes).index(name)

    def _vector(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Norm weights that keep values in range, decays near those of trained models."""
        rng = np.random.default_rng([self._seed, list(self._shapes).index(name)])
        noise = rng.standard_normal(prod(shape)).astype(np.float32).reshape(shape)
        part = name.removesuffix(".weight").split(".")[-1]
        if part == "A_log":
            return np.float32(0.5) + np.float32(0.5) * noise
        if part == "dt_bias":
            return np.float32(-3) + noise
        if part == "conv1d":
            return np.float32(0.5) * noise
        if part == "layer_scalar":
            return np.float32(0.9) + np.float32(0.05) * noise
        offset = 0 if self.config["model_type"].startswith("qwen3_5") and "linear_attn" not in name else 1
        return np.float32(offset) + np.float32(0.05) * noise

    def close(self) -> None:
        pass
