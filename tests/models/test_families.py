"""Configs and stored shapes: what is recognised, and how what is not is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ninfer.artifacts import TensorInfo, open_artifact
from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.formats.quant import by_name
from ninfer.models import FAMILIES, identify, llama, qwen3_5
from ninfer.runtime.runner import state_types
from ninfer.runtime.weights import bind_weights
from tests.checkpoints import DATA

KV = kv_by_name("bf16")


def config(name: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((DATA / name / "config.json").read_text())
    return {k: v for k, v in (values | changes).items() if v != "absent"}


def test_families_are_told_apart() -> None:
    assert identify(config("llama"))[0] is llama.FAMILY
    assert identify(config("qwen3_5_dense"))[0] is qwen3_5.FAMILY
    assert identify(config("llama", architectures="absent"))[0] is llama.FAMILY


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
        {"architectures": "absent", "model_type": "bert"},
    ],
    ids=str,
)
def test_another_architecture_is_refused_with_the_supported_ones(changes: Mapping[str, Any]) -> None:
    with pytest.raises(
        ArtifactError, match=r"is not supported; supported are gemma3 \(.*; llama \(LlamaForCausalLM\); qwen3_5 \("
    ):
        identify(config("llama", **changes))


@pytest.mark.parametrize(
    ("name", "family"),
    [("qwen3_5_moe", "qwen3_5_moe"), ("qwen3_next", "qwen3_next"), ("gemma4_moe", "gemma4")],
)
def test_families_with_experts_are_told_by_their_configs(name: str, family: str) -> None:
    found, spec = identify(config(name))
    assert found.name == family and "of 8 experts" in spec.summary


def gemma4(**changes: Any) -> dict[str, Any]:
    values = config("gemma4_moe")
    return {**values, "text_config": values["text_config"] | changes}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (config("qwen3_5_moe", num_experts_per_tok=9), "num_experts_per_tok is 9, but there are 8 experts"),
        (config("qwen3_5_moe", mlp_only_layers=[0]), "mlp_only_layers is .0., but only .. is supported: every layer"),
        (config("qwen3_next", num_experts="absent"), "num_experts is missing"),
        (gemma4(top_k_experts=9), "top_k_experts is 9, but there are 8 experts"),
        (gemma4(hidden_size_per_layer_input=256), "hidden_size_per_layer_input is 256, .* embeddings per layer .E2B"),
        (gemma4(num_kv_shared_layers=2), "num_kv_shared_layers is 2, but only 0 is supported: layers that share"),
        (gemma4(num_global_key_value_heads=3), "num_global_key_value_heads is 3, but must divide .* 4"),
        (gemma4(layer_types=["full_attention"]), "layer_types is .* but must be a list of 6"),
        (gemma4(hidden_activation="relu"), "hidden_activation is 'relu', but only 'gelu_pytorch_tanh'"),
    ],
)
def test_a_field_of_models_with_experts_that_cannot_work_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=rf"^config[.\w]*: {message}"):
        identify(values)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama",
            {"attention_bias": True},
            "attention_bias is True, but only False is supported: projections with a bias",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu' is supported"),
        ("llama", {"hidden_size": "absent"}, "hidden_size is missing"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0, but must be a whole number from 1"),
        ("llama", {"num_key_value_heads": 2}, "num_key_value_heads is 2, but must divide num_attention_heads 9"),
        ("llama", {"head_dim": None, "hidden_size": 70}, "hidden_size 70 does not divide into 9 heads"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small', but must be a number above 0"),
        ("qwen3_5_dense", {"num_experts": 8}, "num_experts is 8, but the architecture is the dense one"),
        ("qwen3_5_dense", {"attn_output_gate": False}, "attn_output_gate is False, but only True"),
        ("qwen3_5_dense", {"layer_types": ["full_attention"]}, "layer_types is .* but must be a list of 4"),
        ("qwen3_5_dense", {"layer_types": ["sliding_attention"] * 4}, "layer_types has 'sliding_attention'; supported"),
        ("qwen3_5_dense", {"linear_num_key_heads": 3}, "linear_num_key_heads is 3, but must divide .* 4"),
    ],
)
def test_a_field_that_cannot_work_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=f"^config: {message}"):
        identify(config(name, **changes))


def test_a_multimodal_config_has_the_text_model_inside() -> None:
    text = config("qwen3_5_dense")
    outer = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": text,
    }
    _, spec = identify(outer)
    _, plain = identify(text)
    assert spec.tied and not plain.tied and spec.num_layers == plain.num_layers
    with pytest.raises(ArtifactError, match=r"^config\.text_config: hidden_size is 'x'"):
        identify(outer | {"text_config": text | {"hidden_size": "x"}})


def test_layers_follow_the_interval_where_they_are_not_listed() -> None:
    _, spec = identify(config("qwen3_5_dense", layer_types="absent", num_hidden_layers=8))
    assert spec.summary == "8 layers (6 delta, 2 attention) of 64, vocabulary 512"


def test_the_domain_ends_with_the_tokenizer() -> None:
    _, spec = identify(config("llama"))
    assert spec.domain == 512 and spec.with_domain(500).domain == 500 and spec.with_domain(600).domain == 512


def test_a_stretched_window() -> None:
    _, spec = identify(config("llama"))
    stretched = spec.with_yarn(2)
    assert stretched.context_len == 8192 and stretched.rope.kind == "yarn" and stretched.rope.original_len == 4096


@pytest.mark.parametrize("name", ["llama", "qwen3_5_dense"])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(name: str) -> None:
    artifact = open_artifact(DATA / name)
    family, spec = identify(artifact.config)
    graph = family.build(spec, artifact.info, kv=KV, mode="logits")
    stored = {piece.param for weight in graph.weights.values() for piece in weight.pieces}
    for param in sorted(stored):

        def info(asked: str, param: str = param) -> TensorInfo:
            found = artifact.info(asked)
            return TensorInfo((*found.shape[:-1], found.shape[-1] + 1), found.format) if asked == param else found

        shape = artifact.info(param).shape
        want = rf"tensor '{param}' has shape \[.*{shape[-1] + 1}\], but the config implies \[.*{shape[-1]}\]"
        with pytest.raises(ArtifactError, match=want):
            family.build(spec, info, kv=KV, mode="logits")


def test_a_missing_tensor_is_named() -> None:
    artifact = open_artifact(DATA / "llama")
    family, spec = identify(config("llama", num_hidden_layers=4))
    with pytest.raises(ArtifactError, match=r"no tensor 'model\.layers\.3\.input_layernorm\.weight' among its"):
        family.build(spec, artifact.info, kv=KV, mode="logits")


def test_an_unknown_mode_is_refused() -> None:
    artifact = open_artifact(DATA / "llama")
    family, spec = identify(artifact.config)
    with pytest.raises(UsageError, match="no graph mode 'dance'; there are sample, score, logits"):
        family.build(spec, artifact.info, kv=KV, mode="dance")


@pytest.mark.parametrize("name", ["llama", "qwen3_5_dense"])
def test_modes_share_weights_and_states(name: str) -> None:
    artifact = open_artifact(DATA / name)
    family, spec = identify(artifact.config)
    graphs = [family.build(spec, artifact.info, kv=KV, mode=mode) for mode in ("sample", "score", "logits")]
    types = [{v.name: v.type for v in g.weights} for g in graphs]
    assert types[0] == types[1] == types[2]
    assert len(types[0]) == len(graphs[0].weights), "weight names are unique"
    assert set(state_types(*graphs)) == set(graphs[0].states)
    assert [set(g.outputs) for g in graphs] == [{"token", "logprob", "top"}, {"nll"}, {"logits"}]


def test_gate_and_up_may_have_two_formats() -> None:
    artifact = open_artifact(DATA / "llama")
    family, spec = identify(artifact.config)

    def info(name: str) -> TensorInfo:
        found = artifact.info(name)
        return TensorInfo(found.shape, by_name("f16")) if "layers.1.mlp.up" in name else found

    graph = family.build(spec, info, kv=KV, mode="logits")
    ops = [node.op.key for node in graph.nodes]
    assert ops.count("linear_swiglu") == 2 and ops.count("silu_mul") == 1


def test_every_family_has_its_own_names() -> None:
    names = [n for f in FAMILIES for n in (f.name, *f.architectures)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("extra", ["self_attn.q_proj.bias", "self_attn.q_norm.weight"])
def test_a_tensor_that_the_config_says_nothing_of_is_named(extra: str, tmp_path: Path) -> None:
    shutil.copy(DATA / "llama" / "config.json", tmp_path)
    stored = open_artifact(DATA / "llama")
    tensors = {name: stored.get(name).f32() for name in stored.names()}
    tensors[f"model.layers.1.{extra}"] = np.ones(72, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    artifact = open_artifact(tmp_path)
    family, spec = identify(artifact.config)
    graph = family.build(spec, artifact.info, kv=KV, mode="logits")
    with pytest.raises(ArtifactError, match=rf"'model\.layers\.1\.{extra}' is not part of the model that the config"):
        bind_weights(graph, artifact)
