"""Hugging Face folders, dispatch by content, and quantising at load."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ninfer.artifacts import open_artifact
from ninfer.artifacts.quantize import keeps, quantize
from ninfer.artifacts.safetensors import SafetensorsArtifact
from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.quant import by_name
from tests.artifacts import files

DATA = Path(__file__).parent.parent / "data"


def folder(path: Path, weights: dict[str, np.ndarray] | None = None, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    save_file(files.llama_weights() if weights is None else weights, path / "model.safetensors")
    return path


def with_header(path: Path, header: object, data: bytes = bytes(64), length: int | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw = struct.pack("<Q", len(text) if length is None else length) + text + data
    (path / "model.safetensors").write_bytes(raw)
    return path


def test_tensors_are_those_that_were_saved(tmp_path: Path) -> None:
    weights = files.llama_weights()
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.float16)
    artifact = open_artifact(folder(tmp_path / "m", weights))
    assert set(artifact.names()) == set(weights) and artifact.kind == "safetensors"
    for name, x in weights.items():
        p = artifact.get(name)
        assert np.array_equal(p.f32(), x.astype(np.float32)) and p.shape == x.shape
    assert artifact.formats["model.norm.weight"] is by_name("f16")
    assert artifact.num_values() == sum(x.size for x in weights.values())


def test_bf16_checkpoint_reads() -> None:
    artifact = open_artifact(DATA / "qwen3_5_dense")
    assert artifact.formats["model.embed_tokens.weight"] is by_name("bf16")
    assert artifact.get("model.layers.0.linear_attn.conv1d.weight").shape == (128, 1, 4)
    x = artifact.get("model.embed_tokens.weight").f32()
    assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02  # drawn from a normal distribution


def test_multimodal_prefixes_are_dropped(tmp_path: Path) -> None:
    weights = {
        "model.language_model.norm.weight": np.ones(4, np.float32),
        "model.visual.pos_embed.weight": np.ones((2, 2), np.float32),
        "lm_head.weight": np.ones((2, 4), np.float32),
        "mtp.fc.weight": np.ones((2, 4), np.float32),
    }
    assert set(open_artifact(folder(tmp_path / "m", weights)).names()) == {
        "model.norm.weight", "model.visual.pos_embed.weight", "lm_head.weight", "mtp.fc.weight",
    }  # fmt: skip


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    weights, path = files.llama_weights(), tmp_path / "m"
    folder(path, {}).joinpath("model.safetensors").unlink()
    parts = dict(list(weights.items())[:4]), dict(list(weights.items())[4:])
    table: dict[str, str] = {}
    for i, part in enumerate(parts):
        name = f"model-0000{i + 1}-of-00002.safetensors"
        save_file(part, path / name)
        table |= dict.fromkeys(part, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    artifact = open_artifact(path)
    assert set(artifact.names()) == set(weights)
    assert np.array_equal(artifact.get("model.norm.weight").f32(), weights["model.norm.weight"])
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_artifact(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../secret"}}))
    with pytest.raises(ArtifactError, match="not the name of a file in the folder"):
        open_artifact(path)


def test_side_files_are_read(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    artifact = open_artifact(path)
    assert (artifact.tokenizer_source, artifact.chat_template, artifact.generation_config) == (None, None, {})
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 3], "top_k": 20}')
    (path / "tokenizer.json").write_text("{}")
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    artifact = open_artifact(path)
    assert artifact.generation_config == {"eos_token_id": [2, 3], "top_k": 20}
    assert artifact.tokenizer_source == path / "tokenizer.json" and artifact.chat_template == "yes"
    (path / "chat_template.jinja").write_text("of its own")
    assert open_artifact(path).chat_template == "of its own"


def entry(dtype: str = "F32", shape: object = (4,), offsets: object = (0, 16)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS = [
    (b"{", None, "cannot be read as JSON"),
    (b"[" * 100_000, None, "nested too deeply|cannot be read as JSON"),
    (b"[]", None, "not a JSON object"),
    (b'{"a": 1, "a": 2}', None, "occurs twice"),
    ({"a": 1}, None, "tensor 'a' has no description"),
    ({"a": entry(shape=[-1])}, None, "no valid shape"),
    ({"a": entry(shape=[True])}, None, "no valid shape"),
    ({"a": entry(offsets=[0])}, None, "no valid data_offsets"),
    ({"a": entry(offsets=[16, 0])}, None, "has -16 bytes"),
    ({"a": entry(offsets=[0, 12])}, None, r"has 12 bytes, which do not fit F32 \[4\]"),
    ({"a": entry(shape=[1 << 40, 1 << 40], offsets=[0, 16])}, None, "do not fit"),
    ({"a": entry(offsets=[80, 96])}, None, "it is incomplete: download it again"),
    ({"a": entry(), "b": entry(offsets=[8, 24])}, None, "'a' and 'b' overlap"),
    ({"a": entry()}, 1 << 60, "announces a header of 1152921504606846976 bytes"),
]


@pytest.mark.parametrize("header,length,message", HEADERS, ids=[m for *_, m in HEADERS])
def test_damaged_headers_are_refused_with_a_reason(
    tmp_path: Path, header: object, length: int | None, message: str
) -> None:
    path = with_header(tmp_path / "m", header, length=length)
    with pytest.raises(ArtifactError, match=message) as caught:
        open_artifact(path)
    assert str(path) in str(caught.value)


def test_types_that_cannot_be_read_matter_only_when_asked_for(tmp_path: Path) -> None:
    header = {"a": entry("F8_E4M3", [16]), "b": entry(shape=[0], offsets=[16, 16]), "c": entry(offsets=[16, 32])}
    artifact = open_artifact(with_header(tmp_path / "m", header))
    with pytest.raises(ArtifactError, match="'a' is stored as F8_E4M3; supported are F32, F16, BF16"):
        artifact.get("a")
    with pytest.raises(ArtifactError, match=r"'b' has shape \[0\]"):
        artifact.get("b")
    with pytest.raises(ArtifactError, match="no tensor 'd'"):
        artifact.get("d")
    assert list(artifact.formats) == ["c"] and artifact.summary().endswith("f32")


def test_truncated_and_mutated_files_give_artifact_errors(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    file = path / "model.safetensors"
    whole, rng = file.read_bytes(), np.random.default_rng(5)
    header = 8 + int.from_bytes(whole[:8], "little")
    for cut in [*range(0, header, 61), header, len(whole) - 1]:
        file.write_bytes(whole[:cut])
        with pytest.raises(ArtifactError):
            open_artifact(path)
    for _ in range(200):
        raw = bytearray(whole)
        for at in rng.integers(0, header, 2):
            raw[at] = rng.integers(256)
        file.write_bytes(raw)
        try:
            artifact = open_artifact(path)
            for name in artifact.names():
                artifact.get(name).f32()
        except ArtifactError:
            pass


# Dispatch


def test_the_content_decides_what_a_path_is(tmp_path: Path) -> None:
    model = files.tiny_llama(tmp_path / "m.gguf")
    assert open_artifact(model.rename(tmp_path / "model.bin")).kind == "gguf"
    path = folder(tmp_path / "hf")
    assert isinstance(open_artifact(str(path)), SafetensorsArtifact)
    assert open_artifact(path / "model.safetensors").kind == "safetensors"


def test_paths_that_hold_no_model_say_what_would_work(tmp_path: Path) -> None:
    wanted = r"give a \.ninfer or \.gguf file, or a folder with config\.json and \.safetensors files"
    with pytest.raises(ArtifactError, match=f"no such file or folder; {wanted}"):
        open_artifact(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ArtifactError, match=f"begins with b'hell', which is no known model file; {wanted}"):
        open_artifact(tmp_path / "notes.txt")
    with pytest.raises(ArtifactError, match=f"found notes.txt there; {wanted}"):
        open_artifact(tmp_path)
    files.tiny_llama(tmp_path / "a.gguf")
    assert open_artifact(tmp_path).kind == "gguf"
    files.tiny_llama(tmp_path / "b.gguf")
    with pytest.raises(ArtifactError, match=r"2 models in this folder; give one of a\.gguf, b\.gguf"):
        open_artifact(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"no \.safetensors file: download the weights too"):
        open_artifact(tmp_path)


# Quantising at load


@pytest.mark.parametrize("fmt", ["q4_g64", "q8_0", "bf16"])
def test_quantize_packs_matrices_and_keeps_vectors(tmp_path: Path, fmt: str) -> None:
    source = open_artifact(folder(tmp_path / "m"))
    artifact = quantize(source, fmt)
    for name, x in files.llama_weights().items():
        p = artifact.get(name)
        want = by_name(fmt) if x.ndim == 2 else by_name("f32")
        assert p.format is want and artifact.formats[name] is want and p.shape == x.shape
        assert np.array_equal(p.raw, want.pack(x))
    assert artifact.names() == source.names() and artifact.config == source.config
    assert fmt in artifact.summary()


def test_quantize_keeps_the_small_tensors_of_the_delta_rule() -> None:
    artifact = quantize(open_artifact(DATA / "qwen3_5_dense"), "q8_0")
    layer = "model.layers.0.linear_attn."
    kept = {n for n in artifact.names() if artifact.formats[n] is not by_name("q8_0")}
    assert {layer + s for s in ("in_proj_a.weight", "in_proj_b.weight", "conv1d.weight", "A_log")} <= kept
    assert layer + "in_proj_qkv.weight" not in kept and "mtp.fc.weight" not in kept
    assert all(len(artifact.info(n).shape) == 1 or keeps(n) for n in kept)
    assert keeps("model.layers.0.mlp.gate.weight") and not keeps("model.layers.0.mlp.gate_proj.weight")


def test_quantize_leaves_rows_that_blocks_do_not_divide(tmp_path: Path) -> None:
    artifact = quantize(open_artifact(folder(tmp_path / "m")), "q4_k")
    assert all(f is by_name("f32") for f in artifact.formats.values())  # rows of 64 and 96, blocks of 256


def test_quantize_takes_its_own_rule_and_names_formats(tmp_path: Path) -> None:
    source = open_artifact(folder(tmp_path / "m"))
    artifact = quantize(source, "q8_0", keep=lambda name: "embed" in name)
    assert artifact.formats["model.embed_tokens.weight"] is by_name("f32")
    with pytest.raises(UsageError, match="no weight format 'q9'; there are f32"):
        quantize(source, "q9")
    with pytest.raises(UsageError, match="iq2_xs can be read but not made from other weights; choose one of f32"):
        quantize(source, "iq2_xs")
    weights = files.llama_weights()
    weights["model.embed_tokens.weight"][0, 0] = np.nan
    broken = quantize(open_artifact(folder(tmp_path / "m", weights)), "q8_0")
    with pytest.raises(ArtifactError, match=r"'model\.embed_tokens\.weight': q8_0 cannot hold infinities"):
        broken.get("model.embed_tokens.weight")
