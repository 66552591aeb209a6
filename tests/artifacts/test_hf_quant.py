"""Quantised Hugging Face folders: read in place, converted, refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.artifacts import open_artifact
from ninfer.artifacts.convert import make_plan
from ninfer.artifacts.convert_objects import to_artifact
from ninfer.artifacts.ninfer_artifact import NinferArtifact
from ninfer.artifacts.ninfer_write import check_written, write_artifact
from ninfer.artifacts.recipes import recipe
from ninfer.errors import ArtifactError
from ninfer.formats.dtypes import bf16_to_f32, e4m3_to_f32, f32_to_bf16, f32_to_e4m3
from ninfer.formats.quant import by_name

N, K, VOCAB = 256, 320, 384
NAME = "model.layers.0.mlp.up_proj"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": K, "intermediate_size": N,
          "num_hidden_layers": 1, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 64,
          "vocab_size": VOCAB, "max_position_embeddings": 128, "tie_word_embeddings": True}  # fmt: skip
Tensor = tuple[str, np.ndarray]  # dtype as the file spells it, words
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def folder(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] = CONFIG) -> Path:
    """A Hugging Face folder; tensors in any type, which the library's writer does not know all of."""
    path.mkdir()
    header, at, data = dict[str, Any](), 0, b""
    for name, (dtype, x) in tensors.items():
        raw = np.ascontiguousarray(x).tobytes()
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [at, at + len(raw)]}
        at, data = at + len(raw), data + raw
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (path / "config.json").write_text(json.dumps(config))
    return path


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bf16(x: np.ndarray) -> Tensor:
    return "BF16", f32_to_bf16(x)


def words(*shape: int) -> np.ndarray:
    return f32_to_e4m3(random(*shape, seed=1))


def nvfp4_parts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed codes, scales, and the values times the divisor."""
    codes = np.random.default_rng(2).integers(0, 16, (N, K)).astype(np.uint8)
    scale = f32_to_e4m3(np.abs(random(N, K // 16, seed=3)))
    values = E2M1[codes] * e4m3_to_f32(scale).repeat(16, axis=1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale, values


def ct_nvfp4() -> tuple[dict[str, Tensor], np.ndarray, str]:
    packed, scale, values = nvfp4_parts()
    parts = {"weight_packed": ("U8", packed), "weight_scale": ("F8_E4M3", scale),
             "weight_global_scale": ("F32", np.array([1792.0], "<f4")),
             "input_global_scale": ("F32", np.array([12.5], "<f4"))}  # fmt: skip
    return parts, values / np.float32(1792), "nvfp4"


def modelopt_nvfp4() -> tuple[dict[str, Tensor], np.ndarray, str]:
    packed, scale, values = nvfp4_parts()
    parts = {"weight": ("U8", packed), "weight_scale": ("F8_E4M3", scale),
             "weight_scale_2": ("F32", np.array(2.0**-9, "<f4")),
             "input_scale": ("F32", np.array(0.08, "<f4"))}  # fmt: skip
    return parts, values * np.float32(2.0**-9), "nvfp4"


def channel_fp8() -> tuple[dict[str, Tensor], np.ndarray, str]:
    scale, w = f32_to_bf16(np.abs(random(N, 1, seed=4)) * np.float32(0.01)), words(N, K)
    return {"weight": ("F8_E4M3", w), "weight_scale": ("BF16", scale)}, e4m3_to_f32(w) * bf16_to_f32(scale), \
        "fp8_e4m3fn_row_bf16"  # fmt: skip


def tensor_fp8() -> tuple[dict[str, Tensor], np.ndarray, str]:
    w = words(N, K)
    parts = {"weight": ("F8_E4M3", w), "weight_scale": ("F32", np.array([0.0625], "<f4")),
             "input_scale": ("F32", np.array([1.0], "<f4"))}  # fmt: skip
    return parts, e4m3_to_f32(w) * np.float32(0.0625), "fp8_e4m3fn_row_bf16"


def block_fp8() -> tuple[dict[str, Tensor], np.ndarray, str]:
    scale, w = np.abs(random(2, 3, seed=5)), words(N, K)
    values = e4m3_to_f32(w) * scale.repeat(128, axis=0).repeat(128, axis=1)[:N, :K]
    return {"weight": ("F8_E4M3", w), "weight_scale_inv": ("F32", scale.astype("<f4"))}, values, "f32"


def mxfp8() -> tuple[dict[str, Tensor], np.ndarray, str]:
    e, w = np.random.default_rng(6).integers(110, 130, (N, K // 32)).astype(np.uint8), words(N, K)
    values = e4m3_to_f32(w) * np.exp2(e.astype(np.float32) - 127).repeat(32, axis=1)
    return {"weight": ("F8_E4M3", w), "weight_scale": ("U8", e)}, values, "mxfp8"


def mxfp4() -> tuple[dict[str, Tensor], np.ndarray, str]:
    packed, _, _ = nvfp4_parts()
    e = np.random.default_rng(7).integers(110, 130, (N, K // 32)).astype(np.uint8)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(N, K)
    values = E2M1[codes] * np.exp2(e.astype(np.float32) - 127).repeat(32, axis=1)
    return {"weight_packed": ("U8", packed), "weight_scale": ("U8", e)}, values, "mxfp4"


KINDS: Mapping[str, Callable[[], tuple[dict[str, Tensor], np.ndarray, str]]] = {
    f.__name__: f for f in (ct_nvfp4, modelopt_nvfp4, channel_fp8, tensor_fp8, block_fp8, mxfp8, mxfp4)
}


def checkpoint(path: Path, parts: Mapping[str, Tensor]) -> Path:
    layer = "model.layers.0."
    rest = {
        "model.embed_tokens.weight": bf16(random(VOCAB, K)),
        "model.norm.weight": bf16(random(K)),
        f"{layer}input_layernorm.weight": bf16(random(K)),
        f"{layer}post_attention_layernorm.weight": bf16(random(K)),
        **{f"{layer}self_attn.{n}_proj.weight": bf16(random(K, K) / 18) for n in "qkvo"},
        f"{layer}mlp.gate_proj.weight": bf16(random(N, K)),
        f"{layer}mlp.down_proj.weight": bf16(random(K, N)),
        f"{layer}self_attn.k_scale": ("F32", np.ones(1, "<f4")),
    }
    return folder(path, {**rest, **{f"{NAME}.{word}": t for word, t in parts.items()}})


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_stored_words(tmp_path: Path, kind: str) -> None:
    parts, values, fmt = KINDS[kind]()
    artifact = open_artifact(checkpoint(tmp_path / "m", parts))
    p = artifact.get(f"{NAME}.weight")
    assert (p.format.name, p.shape) == (fmt, (N, K)) and artifact.info(p.name).format is p.format
    assert np.array_equal(p.f32(), values)
    p.format.check(p.raw, p.shape)
    assert not [n for n in artifact.names() if "scale" in n or "packed" in n]


@pytest.mark.parametrize("kind", KINDS)
def test_converted_as_they_are(tmp_path: Path, kind: str) -> None:
    parts, values, fmt = KINDS[kind]()
    source, out = open_artifact(checkpoint(tmp_path / "m", parts)), tmp_path / "m.ninfer"
    new = write_artifact(to_artifact(make_plan(recipe("quantized"), source, {}, name="m")), out)
    check_written(new, out)
    result = open_artifact(out)
    assert isinstance(result, NinferArtifact)
    p = result.get(f"{NAME}.weight")
    if kind == "block_fp8":  # plain numbers once decoded
        assert p.format.name == "bf16" and np.array_equal(p.raw.view("<u2"), f32_to_bf16(values).reshape(-1))
        return
    assert p.format.name == ("f32" if fmt == "mxfp8" else fmt)
    assert np.array_equal(p.f32(), values)
    if fmt == "nvfp4":
        assert result.policy(p.name) == "AllowA4"
        assert result.divisors(p.name) == source.divisors(p.name) and len(result.divisors(p.name)) == 1


def test_parts_of_a_bank_of_sources_have_their_divisors(tmp_path: Path) -> None:
    """Three matrices below each other in one object; bindings take one, two, or half of one."""
    from ninfer.artifacts.ninfer_write import NewArtifact, raw_object
    from ninfer.formats.quant import nvfp4

    fmt, x = nvfp4(3), random(768, 128) * np.arange(1, 4, dtype=np.float32).repeat(256)[:, None]
    raw = fmt.pack(x)
    bank = raw_object("bank", raw.tobytes(), shape=x.shape, format="nvfp4", layout="block_scale_k16_m128x4_v1",
                      divisors=3)  # fmt: skip
    ranges = {"mlp/gate": (0, 256), "mlp/up": (256, 768), "mlp/down": (512 + 128, 768), "attention/key": (0, 768),
              "attention/value": (128, 512)}  # fmt: skip
    bindings = {
        f"text/layers/0/{n}": {"parts": [{"object": "bank", "range": [a * 128, b * 128]}]}
        for n, (a, b) in ranges.items()
    }
    components = {"text": {"config": {**CONFIG, "hidden_size": 128}}}
    write_artifact(NewArtifact(components, [bank], bindings, [], {}, {}), tmp_path / "m.ninfer")
    artifact, values, layer = open_artifact(tmp_path / "m.ninfer"), fmt.unpack(raw, x.shape), "model.layers.0."
    for name, (a, b) in (("mlp.gate", (0, 256)), ("mlp.up", (256, 768)), ("mlp.down", (640, 768)),
                         ("self_attn.k", (0, 768))):  # fmt: skip
        assert np.array_equal(artifact.get(f"{layer}{name}_proj.weight").f32(), values[a:b]), name
    with pytest.raises(ArtifactError, match="parts of several matrices with divisors of their own"):
        artifact.get(f"{layer}self_attn.v_proj.weight")


BAD: Mapping[str, tuple[Mapping[str, Tensor], str]] = {
    "no scale": ({"weight": ("F8_E4M3", words(N, K))}, "without a scale beside it"),
    "no divisor": ({k: v for k, v in ct_nvfp4()[0].items() if "global" not in k}, "without weight_global_scale"),
    "shape": ({**ct_nvfp4()[0], "weight_scale": ("F8_E4M3", words(N, 4))}, r"has shape \[256, 4\], but \[256, 20\]"),
    "divisor": ({**ct_nvfp4()[0], "weight_global_scale": ("F32", np.zeros(1, "<f4"))}, "not one positive number"),
    "ints": ({**ct_nvfp4()[0], "weight_packed": ("I32", np.zeros((N, K // 8), "<i4"))}, "is packed as I32"),
    "gptq": ({"qweight": ("I32", np.zeros((4, 4), "<i4"))}, "GPTQ or AWQ integers"),
    "rows": ({"weight_packed": ("U8", np.zeros((64, 160), np.uint8)), "weight_scale": ("F8_E4M3", words(64, 20)),
              "weight_global_scale": ("F32", np.ones(1, "<f4"))}, "64 rows do not divide"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    parts, message = BAD[name]
    with pytest.raises(ArtifactError, match=message) as error:
        open_artifact(checkpoint(tmp_path / "m", parts))
    assert str(error.value).count("\n") == 0 and NAME in str(error.value)


def test_ternary_blocks_keep_codes_and_scale_words() -> None:
    from ninfer.formats.codes import recode

    source, target = by_name("pq2_0"), by_name("t2_g128")
    x = np.random.default_rng(1).integers(-1, 2, (5, 384)).astype(np.float32) * np.float32(0.37)
    raw = source.pack(x)
    raw.reshape(-1, 34)[3, :2] = np.array([-0.25], "<f2").view(np.uint8)  # scales of either sign
    out = recode(source, target, raw, x.shape)
    assert np.array_equal(target.unpack(out, x.shape), source.unpack(raw, x.shape))
    assert np.array_equal(target.fields(out, x.shape)["scale"], source.fields(raw, x.shape)["d"])
    words = (source.fields(raw, x.shape)["qs"][..., None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    base = target.fields(out, x.shape)["base"]
    assert np.array_equal((base[..., None] >> np.array([0, 2, 4, 6], np.uint8)) & 3, (words + 3) & 3)
    raw.reshape(-1, 34)[0, 2] |= 3
    with pytest.raises(ArtifactError, match="it is not ternary"):
        recode(source, target, raw, x.shape)
