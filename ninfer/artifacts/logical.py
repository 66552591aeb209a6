"""Logical parameter names of `.ninfer` files, and the checkpoint tensors that they make up.

Both directions are one table: `tensor_map` gives, for a config, each checkpoint name with its logical parts and how
they lie in the checkpoint's tensor. Families outside the table keep their config as it is and store each tensor under
`text/<checkpoint name>` or `mtp/<checkpoint name>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

How = Literal["whole", "rows", "heads", "taps", "experts", "expert"]


@frozen
class Tensor:
    """A checkpoint tensor as logical parameters.

    how: whole: one, as it is; rows: below each other; heads: `rows` of each in turn, head by head; taps: one, of which
    [C, 1, taps] is stored as [taps, C]; experts: below each other, [E, rows, K] in the checkpoint; expert: one, as it
    is. Checkpoints store experts in one of several ways, so a logical name of an expert occurs in several tensors.
    rows: of each part (of a head, for heads; of an expert, for experts).
    """

    parts: tuple[str, ...]
    how: How = "whole"
    rows: tuple[int, ...] = ()


LAYER = {
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_attention_norm",
    "self_attn.q_proj.weight": "attention/query",
    "self_attn.k_proj.weight": "attention/key",
    "self_attn.v_proj.weight": "attention/value",
    "self_attn.q_norm.weight": "attention/query_norm",
    "self_attn.k_norm.weight": "attention/key_norm",
    "self_attn.o_proj.weight": "attention/output",
    "linear_attn.in_proj_z.weight": "gdn/z",
    "linear_attn.in_proj_a.weight": "gdn/a_projection",
    "linear_attn.in_proj_b.weight": "gdn/b_projection",
    "linear_attn.A_log": "gdn/a_log",
    "linear_attn.dt_bias": "gdn/dt_bias",
    "linear_attn.norm.weight": "gdn/norm",
    "linear_attn.out_proj.weight": "gdn/output",
    "mlp.gate_proj.weight": "mlp/gate",
    "mlp.up_proj.weight": "mlp/up",
    "mlp.down_proj.weight": "mlp/down",
    "mlp.gate.weight": "moe/router",
    "mlp.shared_expert_gate.weight": "moe/shared_score",
    "mlp.shared_expert.gate_proj.weight": "moe/shared/gate",
    "mlp.shared_expert.up_proj.weight": "moe/shared/up",
    "mlp.shared_expert.down_proj.weight": "moe/shared/down",
}
GLOBAL = {
    "model.embed_tokens.weight": "text/token_embedding",
    "model.norm.weight": "text/final_norm",
    "lm_head.weight": "text/output_head",
}
MTP = {
    "mtp.fc.weight": "mtp/input_projection",
    "mtp.pre_fc_norm_embedding.weight": "mtp/embedding_norm",
    "mtp.pre_fc_norm_hidden.weight": "mtp/hidden_norm",
    "mtp.norm.weight": "mtp/final_norm",
}
TABLED = ("qwen3_5_text", "qwen3_5_moe_text", "llama")
PLAIN = ("text", "mtp")  # components whose parameters may have checkpoint names
HEAD, PROPOSAL, PROPOSAL_IDS = "text/output_head", "proposal/head", "proposal/token_ids"
EMBEDDING, EMBEDDING_ROWS = "text/token_embedding", "text/token_embedding/rows"  # the second: an input in uses
GATE_UP = "mlp.experts.gate_up_proj"


def part_name(name: str, parts: Sequence[str]) -> str:
    """Under which some logical parts of a checkpoint tensor are offered: `<name>/query`, `<name>/query+key`."""
    return f"{name}/{'+'.join(p.rsplit('/', 1)[1] for p in parts)}"


def is_tabled(config: Mapping[str, Any]) -> bool:
    """Whether the config's family has logical names of its own."""
    return config.get("model_type") in TABLED


def tensor_map(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor that a checkpoint of this (text) config may have. Empty for families outside the table."""
    if not is_tabled(config):
        return {}
    found = {name: Tensor((part,)) for name, part in GLOBAL.items()}
    for i in range(_whole(config, "num_hidden_layers")):
        found.update(_layer(config, f"model.layers.{i}.", f"text/layers/{i}/"))
    if config["model_type"] != "llama":
        found |= {name: Tensor((part,)) for name, part in MTP.items()}
        for i in range(_whole(config, "mtp_num_hidden_layers")):
            found.update(_layer(config, f"mtp.layers.{i}.", f"mtp/layers/{i}/"))
    return found


def _whole(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name, 0)
    return value if type(value) is int and 0 <= value <= 10_000 else 0


def _layer(config: Mapping[str, Any], p: str, to: str) -> Iterator[tuple[str, Tensor]]:
    for name, part in LAYER.items():
        yield p + name, Tensor((to + part,))
    if config["model_type"] == "llama":
        return
    d = _whole(config, "head_dim")
    yield p + "self_attn.q_proj.weight", Tensor((f"{to}attention/query", f"{to}attention/gate"), "heads", (d, d))
    keys = _whole(config, "linear_num_key_heads") * _whole(config, "linear_key_head_dim")
    values = _whole(config, "linear_num_value_heads") * _whole(config, "linear_value_head_dim")
    qkv = tuple(f"{to}gdn/{n}" for n in ("query", "key", "value"))
    yield p + "linear_attn.in_proj_qkv.weight", Tensor(qkv, "rows", (keys, keys, values))
    yield p + "linear_attn.conv1d.weight", Tensor((f"{to}gdn/convolution",), "taps")
    experts, inner, hidden = (_whole(config, n) for n in ("num_experts", "moe_intermediate_size", "hidden_size"))
    names = [f"{to}moe/experts/{e}/" for e in range(experts)]
    if not experts:
        return
    both = tuple(f"{n}{part}" for n in names for part in ("gate", "up"))
    yield f"{p}{GATE_UP}", Tensor(both, "experts", (inner, inner))
    for part, rows in (("gate", inner), ("up", inner), ("down", hidden)):
        yield f"{p}mlp.experts.{part}_proj", Tensor(tuple(f"{n}{part}" for n in names), "experts", (rows,))
        for e, n in enumerate(names):
            yield f"{p}mlp.experts.{e}.{part}_proj.weight", Tensor((f"{n}{part}",), "expert")


_INPUTS = {
    "attention/output": "attention/gated_output",
    "gdn/output": "gdn/gated_output",
    "mlp/down": "mlp/product",
    "moe/shared/down": "moe/shared/product",
}
_FFN = ("mlp/gate", "mlp/up", "moe/router", "moe/shared_score", "moe/shared/gate", "moe/shared/up")


def inputs_of(part: str, components: tuple[str, ...] = ("text",)) -> tuple[str, ...]:
    """Names of the activations that a logical matrix multiplies; none for the embedding and for plain names."""
    if part in (HEAD, PROPOSAL):
        return tuple(f"{c}/final_hidden" for c in components if c in ("text", "mtp", "dflash", "dflash2"))
    if part == "mtp/input_projection":
        return ("mtp/stem_input",)
    if part.startswith(("dflash/", "dflash2/")):
        return (_drafter_input(part),)
    head, _, rest = part.partition("/layers/")
    index, _, rest = rest.partition("/")
    if not rest:
        return ()
    layer = f"{head}/layers/{index}/"
    if rest in _INPUTS:
        return (layer + _INPUTS[rest],)
    if rest.startswith("moe/experts/"):
        return (layer + (rest.rsplit("/", 1)[0] + "/product" if rest.endswith("/down") else "ffn_input"),)
    return (layer + ("ffn_input" if rest in _FFN else "mixer_input"),)


def _drafter_input(part: str) -> str:
    component, _, rest = part.partition("/")
    if rest == "feature_projection":
        return f"{component}/target_features"
    if rest.startswith("candidate_selector/"):
        return f"{component}/final_hidden"
    _, index, block, name = rest.split("/", 3)
    layer = f"{component}/layers/{index}/"
    if name.startswith("context_"):
        return f"{component}/context_input"
    if block == "mlp":
        return layer + ("mlp/product" if name == "down" else "ffn_input")
    if block == "attention":
        return layer + ("attention/product" if name == "output" else "query_projection_input")
    return f"{layer}{block}_input"


# Config


_FIXED_QWEN = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
}
_QWEN_FIELDS = (
    "hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings", "tie_word_embeddings",
    "rms_norm_eps", "layer_types", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters",
    "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim",
    "linear_conv_kernel_dim", "intermediate_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip
_ROPE_FIELDS = ("rope_theta", "partial_rotary_factor", "mrope_section")
_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 32768, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
                             "linear_conv_kernel_dim": 4}  # fmt: skip


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's config, whether or not a multimodal one is around it."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    out = {**{k: config[k] for k in ("architectures", "tie_word_embeddings") if k in config}, **text}
    return out


def stored_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text component's config, from that of a checkpoint (flat)."""
    if not str(config.get("model_type")).startswith("qwen3_5"):
        kept = {k: v for k, v in config.items() if v is not None}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()}
    moe = "num_experts" in config
    values = {**_DEFAULTS, **config}
    if "layer_types" not in config:
        n = config.get("full_attention_interval", 4)
        values["layer_types"] = [
            "full_attention" if (i + 1) % n == 0 else "linear_attention" for i in range(config["num_hidden_layers"])
        ]
    rope = dict(config.get("rope_parameters") or {})
    for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 0.25)):
        rope.setdefault(name, config.get(name, default))
    kind = rope.get("rope_type", "default")
    values["rope_parameters"] = (
        rope if kind != "default" else {k: rope[k] for k in _ROPE_FIELDS if rope.get(k) is not None}
    )
    return {
        "architectures": ["Qwen3_5MoeForCausalLM" if moe else "Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
        **{k: values[k] for k in _QWEN_FIELDS if values.get(k) is not None},
    }


def checkpoint_config(text: Mapping[str, Any], mtp: bool) -> dict[str, Any]:
    """A config like that of a checkpoint, from the text component's."""
    config = dict(text)
    if str(config.get("model_type")).startswith("qwen3_5"):
        config = {**_FIXED_QWEN, **config, "mtp_num_hidden_layers": 1 if mtp else 0}
        rope = config.get("rope_parameters")
        if isinstance(rope, Mapping):
            config["rope_parameters"] = {"rope_type": "default", "mrope_interleaved": True, **rope}
    elif not mtp:
        config |= {k: 0 for k in ("mtp_num_hidden_layers", "num_nextn_predict_layers") if k in config}
    return config
