"""Checkpoints as GGUF files, with what converters do to the tensors: the inverse of ninfer/artifacts/names, written
from the format's description and through the gguf package, so that a mistake there does not cancel out here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ninfer.artifacts import Artifact
from ninfer.formats.quant import QuantFormat, by_name

FormatOf = Callable[[str, tuple[int, ...]], QuantFormat]
F32 = by_name("f32")
_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.in_proj_ba": "ssm_ba", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
_ARCHITECTURES = {"llama": "llama", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
                  "qwen3_next": "qwen3next"}  # fmt: skip
_GEMMA4 = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "router.proj": "ffn_gate_inp",
}  # fmt: skip
_GEMMA4_WHOLE = {
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
_MTP = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}


def matrices_in(fmt: QuantFormat) -> FormatOf:
    """Matrices in `fmt`, vectors and convolutions in float32."""
    return lambda name, shape: fmt if len(shape) > 1 and "conv1d" not in name else F32


def write_gguf(
    artifact: Artifact, path: Path, format_of: FormatOf, *, tokenizer: Path | None = None, template: Path | None = None
) -> None:
    """tokenizer: a tokenizer.json; template: a chat template."""
    c = artifact.config
    arch = _ARCHITECTURES[c["model_type"]]
    llama = arch == "llama"
    out = gguf.GGUFWriter(path, arch)
    out.add_name(artifact.display_name)
    out.add_context_length(c["max_position_embeddings"])
    out.add_embedding_length(c["hidden_size"])
    if "num_experts" in c:
        out.add_expert_count(c["num_experts"])
        out.add_expert_used_count(c["num_experts_per_tok"])
        out.add_expert_feed_forward_length(c["moe_intermediate_size"])
        out.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    if "intermediate_size" in c:
        out.add_feed_forward_length(c["intermediate_size"])
    out.add_head_count(c["num_attention_heads"])
    out.add_head_count_kv(c["num_key_value_heads"])
    out.add_key_length(c["head_dim"])
    out.add_value_length(c["head_dim"])
    out.add_layer_norm_rms_eps(c["rms_norm_eps"])
    out.add_rope_freq_base(c["rope_parameters"]["rope_theta"])
    mtp = 0 if llama else c.get("mtp_num_hidden_layers", 0)
    out.add_block_count(c["num_hidden_layers"] + mtp)
    if llama:
        out.add_rope_dimension_count(c["head_dim"])
    else:
        _qwen35_keys(out, c, mtp)
    if tokenizer is not None:
        _tokenizer(out, json.loads(tokenizer.read_text()), c)
    if template is not None:
        out.add_chat_template(template.read_text())
    tensors = {name: artifact.get(name).f32() for name in artifact.names()}
    if arch == "qwen3next":  # its converter leaves the MTP block away
        tensors = {name: x for name, x in tensors.items() if not name.startswith("mtp.")}
    targets = _experts(tensors, c, mtp)
    for name, values in tensors.items():
        if llama:
            targets[_target(name, c, llama)] = name, _llama_rows(name, values, c)
        elif arch != "qwen3next":
            targets[_target(name, c, llama)] = name, _qwen35_values(name, values, c)
        elif name.endswith("in_proj_qkvz.weight"):
            block = _target(name.replace("in_proj_qkvz", "in_proj_z"), c, llama).removesuffix("attn_gate.weight")
            for part, rows in _split_qkvz(values, c).items():
                targets[block + part] = name, rows
        else:
            targets[_target(name, c, llama)] = name, _qwen3_next_values(name, values)
    for target, (name, values) in targets.items():
        fmt = format_of(name, values.shape)
        raw = fmt.pack(values).reshape(*values.shape[:-1], -1)
        out.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType(fmt.ggml_type))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


Named = dict[str, tuple[str, NDArray[np.float32]]]  # tensor of the file: the checkpoint's name, values


def _experts(tensors: dict[str, NDArray[np.float32]], c: Mapping[str, Any], mtp: int) -> Named:
    """Takes the experts out of `tensors`: stacks of gates, ups and downs of each block."""
    found: Named = {}
    for i in range(c["num_hidden_layers"] + mtp):
        p = f"model.layers.{i}." if i < c["num_hidden_layers"] else f"mtp.layers.{i - c['num_hidden_layers']}."
        p += "mlp.experts."
        if f"{p}gate_up_proj" in tensors:
            both = tensors.pop(f"{p}gate_up_proj")
            half = both.shape[1] // 2
            parts = {"gate": both[:, :half], "up": both[:, half:], "down": tensors.pop(f"{p}down_proj")}
        elif f"{p}0.up_proj.weight" in tensors:
            parts = {
                part: np.stack([tensors.pop(f"{p}{e}.{part}_proj.weight") for e in range(c["num_experts"])])
                for part in ("gate", "up", "down")
            }
        else:
            continue
        for part, x in parts.items():
            found[f"blk.{i}.ffn_{part}_exps.weight"] = f"{p}{part}_proj", np.ascontiguousarray(x)
    return found


def _split_qkvz(x: NDArray[np.float32], c: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Rows of each key head: its q and k, then v and z of its value heads."""
    hk, dk = c["linear_num_key_heads"], c["linear_key_head_dim"]
    wide = c["linear_num_value_heads"] // hk * c["linear_value_head_dim"]
    heads = x.reshape(hk, 2 * dk + 2 * wide, -1)
    q, k, v, z = (part.reshape(-1, x.shape[1]) for part in np.split(heads, [dk, 2 * dk, 2 * dk + wide], axis=1))
    return {"attn_qkv.weight": np.concatenate([q, k, v]), "attn_gate.weight": z}


def _qwen3_next_values(name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Value heads stay where they are."""
    if name.endswith("A_log"):
        return -np.exp(x)
    if name.endswith("conv1d.weight"):
        return x.reshape(len(x), -1)
    if "norm" in name and not name.endswith("linear_attn.norm.weight"):
        return x + np.float32(1)
    return x.reshape(-1) if name.endswith("shared_expert_gate.weight") else x


def write_gemma4_gguf(artifact: Artifact, path: Path, format_of: FormatOf) -> None:
    """A text model; weights are stored as they are."""
    c = artifact.config["text_config"]
    sliding = [kind == "sliding_attention" for kind in c["layer_types"]]
    full, local = (c["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    out = gguf.GGUFWriter(path, "gemma4")
    out.add_context_length(c["max_position_embeddings"])
    out.add_embedding_length(c["hidden_size"])
    out.add_block_count(c["num_hidden_layers"])
    out.add_feed_forward_length(c["intermediate_size"])
    out.add_head_count(c["num_attention_heads"])
    out.add_head_count_kv([c["num_key_value_heads"] if s else c["num_global_key_value_heads"] for s in sliding])
    out.add_key_length(c["global_head_dim"])
    out.add_value_length(c["global_head_dim"])
    for side in ("key", "value"):
        out.add_uint32(f"gemma4.attention.{side}_length_swa", c["head_dim"])
    out.add_layer_norm_rms_eps(c["rms_norm_eps"])
    out.add_sliding_window(c["sliding_window"])
    out.add_array("gemma4.attention.sliding_window_pattern", sliding)
    out.add_rope_freq_base(full["rope_theta"])
    out.add_float32("gemma4.rope.freq_base_swa", local["rope_theta"])
    out.add_float32("gemma4.final_logit_softcapping", c["final_logit_softcapping"])
    out.add_expert_count(c["num_experts"])
    out.add_expert_used_count(c["top_k_experts"])
    out.add_expert_feed_forward_length(c["moe_intermediate_size"])
    pairs = c["global_head_dim"] // 2
    factors = np.full(pairs, 1e30, np.float32)
    factors[: int(pairs * full["partial_rotary_factor"])] = 1
    out.add_tensor("rope_freqs.weight", factors)
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name in artifact.names():
        values = artifact.get(name).f32()
        _, _, index, rest = [*name.split(".", 3), "", ""][:4]
        part = rest.removesuffix(".weight")
        leaf = _GEMMA4_WHOLE.get(rest) or f"{(_GEMMA4 | _OTHERS).get(part)}.weight"
        fmt = format_of(name, values.shape)
        raw = fmt.pack(values).reshape(*values.shape[:-1], -1)
        target = whole.get(name) or f"blk.{index}.{leaf}"
        out.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType(fmt.ggml_type))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


_OTHERS = {name: part for name, part in _PARTS.items() if name not in _GEMMA4}


def _qwen35_keys(out: gguf.GGUFWriter, c: Mapping[str, Any], mtp: int) -> None:
    rope = c["rope_parameters"]
    out.add_rope_dimension_count(int(c["head_dim"] * rope["partial_rotary_factor"]))
    if "mrope_section" in rope:
        out.add_rope_dimension_sections([*rope["mrope_section"], 0])
    out.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    out.add_ssm_state_size(c["linear_key_head_dim"])
    out.add_ssm_group_count(c["linear_num_key_heads"])
    out.add_ssm_time_step_rank(c["linear_num_value_heads"])
    out.add_ssm_inner_size(c["linear_num_value_heads"] * c["linear_value_head_dim"])
    out.add_uint32(f"{out.arch}.full_attention_interval", c["layer_types"].index("full_attention") + 1)
    if mtp:
        out.add_uint32(f"{out.arch}.nextn_predict_layers", mtp)


def _tokenizer(out: gguf.GGUFWriter, t: Mapping[str, Any], c: Mapping[str, Any]) -> None:
    tokens = {i: token for token, i in t["model"]["vocab"].items()}
    added = {a["id"]: a for a in t["added_tokens"]}
    tokens |= {i: a["content"] for i, a in added.items()}
    kinds = [(3 if added[i]["special"] else 4) if i in added else 1 for i in range(len(tokens))]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen35")
    out.add_token_list([tokens[i] for i in range(len(tokens))])
    out.add_token_types(kinds)
    out.add_token_merges([" ".join(pair) for pair in t["model"]["merges"]])
    out.add_eos_token_id(c["eos_token_id"])
    out.add_pad_token_id(c["pad_token_id"])
    out.add_add_bos_token(False)


def _target(name: str, c: Mapping[str, Any], llama: bool) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    if name in whole:
        return whole[name]
    layers = c["num_hidden_layers"]
    head, _, rest = name.partition(".layers.")
    if not rest:
        return f"blk.{layers}.nextn.{_MTP[name.split('.')[1]]}.weight"
    index, _, rest = rest.partition(".")
    block = f"blk.{int(index) + (layers if head == 'mtp' else 0)}."
    if rest in ("linear_attn.A_log", "linear_attn.dt_bias"):
        return block + {"A": "ssm_a", "d": "ssm_dt.bias"}[rest[12]]
    part = rest.removesuffix(".weight")
    if part == "post_attention_layernorm":
        return block + ("ffn_norm.weight" if llama else "post_attention_norm.weight")
    return f"{block}{_PARTS[part]}.weight"


def _llama_rows(name: str, x: NDArray[np.float32], c: Mapping[str, Any]) -> NDArray[np.float32]:
    """Rows of q and k from halves to interleaved pairs: h*D + 2i + s takes h*D + s*D/2 + i."""
    heads = {"q_proj": c["num_attention_heads"], "k_proj": c["num_key_value_heads"]}.get(name.split(".")[-2])
    if heads is None:
        return x
    d = c["head_dim"]
    y = np.empty_like(x)
    for h in range(heads):
        for i in range(d // 2):
            for s in (0, 1):
                y[h * d + 2 * i + s] = x[h * d + s * (d // 2) + i]
    return y


def _qwen35_values(name: str, x: NDArray[np.float32], c: Mapping[str, Any]) -> NDArray[np.float32]:
    hk, hv = c["linear_num_key_heads"], c["linear_num_value_heads"]
    order = np.array([(t % hk) * (hv // hk) + t // hk for t in range(hv)])  # grouped head at tiled place t

    def tiled(values: NDArray[np.float32]) -> NDArray[np.float32]:
        moved: NDArray[np.float32] = values.reshape(hv, -1, *values.shape[1:])[order].reshape(values.shape)
        return moved

    keys = 2 * hk * c["linear_key_head_dim"]
    if name.endswith("A_log"):
        return -np.exp(tiled(x))
    if name.endswith(("dt_bias", "in_proj_a.weight", "in_proj_b.weight", "in_proj_z.weight")):
        return tiled(x)
    if name.endswith("shared_expert_gate.weight"):
        return x.reshape(-1)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        x = x.reshape(len(x), -1)
        return np.concatenate([x[:keys], tiled(x[keys:])])
    if name.endswith("out_proj.weight"):
        return np.ascontiguousarray(tiled(np.ascontiguousarray(x.T)).T)
    if "norm" in name and not name.endswith("linear_attn.norm.weight"):
        return x + np.float32(1)
    return x
