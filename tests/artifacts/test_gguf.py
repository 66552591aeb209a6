"""GGUF reading: against the gguf package's writer, a converted checkpoint, and damaged files."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from ninfer.artifacts import open_artifact
from ninfer.artifacts.artifact import Parameter
from ninfer.artifacts.gguf import GgufArtifact, GgufFile
from ninfer.artifacts.names.delta import out_columns
from ninfer.errors import ArtifactError
from ninfer.formats.bits import F32Array
from ninfer.formats.quant import QuantFormat, by_name
from tests.artifacts import files

DATA = Path(__file__).parent.parent / "data"
Tensors = dict[str, tuple[F32Array, QuantFormat]]
Keys = dict[str, Any]
Change = Callable[[Tensors, Keys], None]


def opened_fully(path: Path) -> None:
    artifact = GgufArtifact(path)
    try:
        for name in artifact.names():
            artifact.get(name).f32()
    finally:
        artifact.close()


@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16", "q8_0", "q4_1", "q5_0", "iq4_nl"])
def test_llama_tensors_come_out_as_the_checkpoint_packed(tmp_path: Path, fmt: str) -> None:
    artifact = open_artifact(files.tiny_llama(tmp_path / "m.gguf", fmt))
    weights = files.llama_weights()
    assert set(artifact.names()) == set(weights)
    for name, x in weights.items():
        p = artifact.get(name)
        want = by_name(fmt if x.ndim == 2 else "f32")
        assert (p.name, p.shape, p.format) == (name, x.shape, want)
        assert np.array_equal(p.raw, want.pack(x)), name  # rows of q and k are back in order, byte for byte
        assert artifact.formats[name] is want and artifact.info(name).shape == x.shape


def test_llama_metadata_reads_as_a_config(tmp_path: Path) -> None:
    artifact = open_artifact(files.tiny_llama(tmp_path / "m.gguf"))
    assert {**artifact.config} | {
        "model_type": "llama", "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    } == artifact.config  # fmt: skip
    assert artifact.generation_config == {"eos_token_id": [2]}
    source = artifact.tokenizer_source
    assert isinstance(source, Mapping)
    assert source["tokenizer.ggml.tokens"] == ["a", "b", "ab"]
    assert source["tokenizer.ggml.scores"] == [0.0, -1.0, -2.0]
    assert source["tokenizer.ggml.add_bos_token"] is False
    assert artifact.chat_template == "{{ messages }}"
    assert (artifact.kind, artifact.display_name) == ("gguf", "tiny")
    assert artifact.summary() == "0.00 GiB of weights  q8_0 f32"


def test_untied_head_bias_and_rope_scaling_are_told(tmp_path: Path) -> None:
    tensors = files.llama_tensors(by_name("f32"))
    tensors["output.weight"] = tensors["token_embd.weight"]
    bias = np.arange(64, dtype=np.float32)
    tensors["blk.0.attn_q.bias"] = (files.permuted(bias, files.HEADS), by_name("f32"))
    tensors["rope_freqs.weight"] = (np.array([1, 2, 4, 8, 1, 1, 1, 1], np.float32), by_name("f32"))
    keys = files.LLAMA_KEYS | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    artifact = open_artifact(files.write_gguf(tmp_path / "m.gguf", keys, tensors))
    assert artifact.config["tie_word_embeddings"] is False and artifact.config["attention_bias"] is True
    assert artifact.config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    assert artifact.config["rope_freq_factors"] == [1, 2, 4, 8, 1, 1, 1, 1]
    assert "lm_head.weight" in artifact
    assert np.array_equal(artifact.get("model.layers.0.self_attn.q_proj.bias").f32(), bias)


def test_qwen35_file_equals_the_checkpoint_it_was_converted_from() -> None:
    ours, theirs = open_artifact(DATA / "qwen3_5_dense.gguf"), open_artifact(DATA / "qwen3_5_dense")
    assert set(ours.names()) == set(theirs.names())
    assert ours.config["norm_plus_one"] is True and "norm_plus_one" not in theirs.config
    assert ours.config["gdn_tiled_out_columns"] == ()
    for name in theirs.names():
        a, b = ours.get(name), theirs.get(name)
        assert a.shape == b.shape == ours.info(name).shape, name
        want = b.f32()
        if "norm" in name and "linear_attn.norm" not in name:
            want = want + np.float32(1)
        if name.endswith("A_log"):
            assert np.allclose(a.f32(), want, rtol=0, atol=1e-6)  # through exp and ln in float32
        else:
            assert np.array_equal(a.f32(), want), name


def test_qwen35_metadata_reads_as_the_checkpoints_config() -> None:
    ours, theirs = open_artifact(DATA / "qwen3_5_dense.gguf").config, open_artifact(DATA / "qwen3_5_dense").config
    assert {k: ours.get(k) for k in theirs if k not in ("dtype", "eos_token_id")} == {
        k: v for k, v in theirs.items() if k not in ("dtype", "eos_token_id")
    }


def rewritten(path: Path, change: Change) -> Path:
    """The converted model with tensors and keys replaced by change(tensors, keys)."""
    source = GgufFile(DATA / "qwen3_5_dense.gguf")
    tensors: Tensors = {}
    for name, t in source.tensors.items():
        raw = t.file.bytes[t.offset : t.offset + t.info.nbytes]
        tensors[name] = (t.info.format.unpack(raw, t.info.shape), t.info.format)
    keys = dict(source.metadata)
    change(tensors, keys)
    return files.write_gguf(path, keys, tensors)


def test_out_columns_whose_blocks_exceed_a_head_stay_tiled_and_are_told(tmp_path: Path) -> None:
    def change(tensors: Tensors, keys: Keys) -> None:
        x, _ = tensors["blk.0.ssm_out.weight"]
        tensors["blk.0.ssm_out.weight"] = (x, by_name("q8_0"))  # blocks of 32, heads of 16

    artifact = open_artifact(rewritten(tmp_path / "m.gguf", change))
    name = "model.layers.0.linear_attn.out_proj.weight"
    assert artifact.config["gdn_tiled_out_columns"] == (name,)
    tiled = artifact.get(name).f32()
    plain = open_artifact(DATA / "qwen3_5_dense").get(name).f32()
    hk, hv, width = 2, 4, 16
    grouped = [(t % hk) * (hv // hk) + t // hk for t in range(hv)]  # head of each stored run of columns
    want = plain.reshape(64, hv, width)[:, grouped].reshape(64, 64)
    assert np.array_equal(tiled, by_name("q8_0").unpack(by_name("q8_0").pack(want), (64, 64)))


def test_out_columns_of_whole_blocks_are_moved() -> None:
    config = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 64,
        "gdn_tiled_out_columns": (),
    }  # fmt: skip
    x = np.random.default_rng(0).standard_normal((3, 6 * 64)).astype(np.float32)
    tiled = x.reshape(3, 2, 3, 64).swapaxes(1, 2).reshape(3, -1)  # grouped -> tiled, as the converter does
    fmt = by_name("q4_0")
    p = out_columns(Parameter("w", tiled.shape, fmt, fmt.pack(tiled)), config)
    assert np.array_equal(p.raw, fmt.pack(x))


def test_demo_like_file_of_version_2_reads_alike(tmp_path: Path) -> None:
    path = files.tiny_llama(tmp_path / "m.gguf")
    raw = bytearray(path.read_bytes())
    raw[4] = 2
    path.write_bytes(raw)
    opened_fully(path)


# Split models


def split_llama(folder: Path) -> list[Path]:
    tensors = files.llama_tensors(by_name("q8_0"))
    half = dict(list(tensors.items())[:5]), dict(list(tensors.items())[5:])
    paths = []
    for i, part in enumerate(half):
        shared: dict[str, object] = files.LLAMA_KEYS if i == 0 else {"general.architecture": "llama"}
        keys = shared | {
            "split.no": i, "split.count": 2, "split.tensors.count": len(tensors),
        }  # fmt: skip
        paths.append(files.write_gguf(folder / f"m-0000{i + 1}-of-00002.gguf", keys, part))
    return paths


def test_split_models_open_from_any_part_and_from_their_folder(tmp_path: Path) -> None:
    first, second = split_llama(tmp_path)
    for path in (first, second, tmp_path):
        artifact = open_artifact(path)
        assert len(artifact.names()) == 11
        for name, x in files.llama_weights().items():
            assert np.array_equal(artifact.get(name).raw, artifact.formats[name].pack(x))


def test_a_missing_or_misnamed_part_is_named(tmp_path: Path) -> None:
    first, second = split_llama(tmp_path)
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(ArtifactError, match=r"1 of the model's 2 files are missing: m-00002-of-00002\.gguf"):
        open_artifact(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ArtifactError, match=r"split.no is 0, not 1"):
        open_artifact(first)
    second.write_bytes(kept)
    with pytest.raises(ArtifactError, match=r"names must end with -00001-of-00002\.gguf"):
        open_artifact(first.rename(tmp_path / "other.gguf"))


# Errors


def test_get_names_the_missing_tensor_and_the_file(tmp_path: Path) -> None:
    artifact = open_artifact(files.tiny_llama(tmp_path / "m.gguf"))
    with pytest.raises(
        ArtifactError, match=r"m\.gguf: no tensor 'model.layers.3.self_attn.q_proj.weight'.*it has model"
    ):
        artifact.get("model.layers.3.self_attn.q_proj.weight")
    with pytest.raises(KeyError):
        artifact.formats["nothing"]
    assert "nothing" not in artifact and "nothing" not in artifact.formats


def test_parameters_stay_valid_after_close_and_new_ones_are_refused(tmp_path: Path) -> None:
    artifact = open_artifact(files.tiny_llama(tmp_path / "m.gguf"))
    p = artifact.get("model.norm.weight")
    artifact.close()
    assert np.array_equal(p.f32(), files.llama_weights()["model.norm.weight"])
    with pytest.raises(ArtifactError, match="already closed"):
        artifact.get("model.embed_tokens.weight")


MAGIC_CASES = [
    (b"", "the file is empty"),
    (b"GG", "truncated or damaged"),
    (b"PK\3\4" + bytes(60), "not a GGUF file: it begins with b'PK"),
    (b"ggjt" + bytes(60), "older than GGUF"),
    (b"FUGG" + bytes(60), "big-endian"),
    (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian"),
    (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1 is not supported; versions 2 and 3 are"),
    (b"GGUF" + struct.pack("<I", 9) + bytes(60), "version 9 is not supported"),
    (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(60), "announces 1152921504606846976 tensors"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + bytes(60), "announces 1152921504606846976 metadata keys"),
]
ARCH = files.key("general.architecture", 8, files.string("llama"))
U32 = struct.pack("<I", 7)
HEADER_CASES = [
    ([ARCH, ARCH], [], "key 'general.architecture' occurs twice"),
    ([files.key("k", 13, U32)], [], "key 'k' has value type 13"),
    ([files.key("k", 9, struct.pack("<IQ", 13, 1))], [], "array of value type 13"),
    ([files.key("k", 9, struct.pack("<IQ", 4, 1 << 61))], [], "2305843009213693952 items of key 'k'"),
    ([files.key("k", 9, struct.pack("<IQ", 9, 1) * 8)], [], "nests arrays more than 4 deep"),
    ([files.key("k", 8, struct.pack("<Q", 1 << 63))], [], "9223372036854775808 bytes for key 'k'"),
    ([files.string(b"\xff\xfe") + U32 * 2], [], "a metadata key is not UTF-8"),
    ([files.key("general.alignment", 4, U32)], [], "general.alignment is 7, not a power of two"),
    ([files.key("general.alignment", 8, files.string("x"))], [], "general.alignment is 'x'"),
    ([ARCH], [files.tensor("t", [4], 0, 0)] * 2, "tensor 't' occurs twice"),
    ([ARCH], [files.tensor("t", [], 0, 0) + bytes(40)], "0 dimensions"),
    ([ARCH], [files.tensor("t", [1] * 5, 0, 0)], "5 dimensions"),
    ([ARCH], [files.tensor("t", [0, 4], 0, 0)], "has no values"),
    ([ARCH], [files.tensor("t", [4], 141, 0)], r"'t': GGUF tensor type 141 is not supported; supported are f32 \(0\)"),
    ([ARCH], [files.tensor("t", [128], 143, 0)], "'t': GGUF tensor type 143 is PTQ1_0.*; use the model's PQ2_0 file"),
    ([ARCH], [files.tensor("t", [4096], 42, 0), files.tensor("u", [4], 0, 1088)],
     "'t' is of type 42, but lies 34 bytes per 128 values"),
    ([ARCH], [files.tensor("t", [256], 42, 0), files.tensor("u", [4], 0, 64)],
     "'t' is of type 42, but has 64 bytes, which are not 18 per 64 values"),
    ([ARCH], [files.tensor("t", [33], 2, 0)], "rows of 33 do not divide"),
    ([ARCH], [files.tensor("t", [4], 0, 8)], "begins at 8, not a multiple of 32"),
    ([ARCH], [files.tensor("t", [1 << 40, 1 << 40, 1 << 40], 0, 0)], "it is incomplete: download it again"),
    ([ARCH], [files.tensor("t", [4], 0, 1 << 62)], "it is incomplete: download it again"),
    ([ARCH], [files.tensor("s", [16], 0, 0), files.tensor("t", [4], 0, 32)], "tensors 's' and 't' overlap"),
    ([], [], "no metadata key general.architecture; supported architectures are gemma3, gemma4, llama"),
    ([files.key("general.architecture", 8, files.string("rwkv"))], [], "'rwkv' is not supported; supported are gemma3"),
    ([ARCH], [files.tensor("t", [4], 0, 0)], "llama.attention.head_count is missing: the file is not a complete model"),
]  # fmt: skip


@pytest.mark.parametrize("raw,message", MAGIC_CASES, ids=[m for _, m in MAGIC_CASES])
def test_files_that_are_no_gguf_are_refused_with_a_reason(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(ArtifactError, match=message) as caught:
        open_artifact(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("keys,tensors,message", HEADER_CASES, ids=[m for *_, m in HEADER_CASES])
def test_damaged_headers_are_refused_with_a_reason(
    tmp_path: Path, keys: list[bytes], tensors: list[bytes], message: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(files.raw_gguf(keys, tensors, bytes(128)))
    with pytest.raises(ArtifactError, match=message) as caught:
        open_artifact(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


KEY_CASES = [
    ({"llama__block_count": None}, "llama.block_count is missing"),
    ({"llama__attention__head_count": 0}, "head_count is 0, not a whole number from 1"),
    ({"llama__attention__layer_norm_rms_epsilon": "x"}, "epsilon is 'x', not a positive number"),
    ({"llama__rope__scaling__type": "longrope"}, "rope scaling 'longrope' is not supported; linear and yarn are"),
    ({"llama__rope__dimension_count": 8, "llama__attention__key_length": 16}, "rope over 8 of 16 dimensions"),
    ({"llama__expert_count": 8}, "Mixtral"),
]


@pytest.mark.parametrize("extra,message", KEY_CASES, ids=[m for _, m in KEY_CASES])
def test_metadata_that_cannot_be_used_is_named(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        open_artifact(files.tiny_llama(tmp_path / "m.gguf", **extra))


def test_head_counts_that_do_not_fit_the_tensor_are_found_when_it_is_read(tmp_path: Path) -> None:
    artifact = open_artifact(files.tiny_llama(tmp_path / "m.gguf", llama__attention__head_count=8))
    with pytest.raises(ArtifactError, match=r"q_proj.weight': has 64 rows, but the metadata implies 128"):
        artifact.get("model.layers.0.self_attn.q_proj.weight")


def test_tensors_that_the_architecture_does_not_know_are_refused(tmp_path: Path) -> None:
    for name, message in (
        ("blk.0.attn_sinks.weight", "'blk.0.attn_sinks.weight' is not known in architecture 'llama'"),
        ("blk.1.attn_v.weight", "a block beyond the 1 announced"),
    ):
        tensors = files.llama_tensors(by_name("f32")) | {name: (np.ones((4, 4), np.float32), by_name("f32"))}
        with pytest.raises(ArtifactError, match=message):
            open_artifact(files.write_gguf(tmp_path / "m.gguf", files.LLAMA_KEYS, tensors))


def test_a_log_that_is_not_negative_is_refused(tmp_path: Path) -> None:
    def change(tensors: Tensors, keys: Keys) -> None:
        x, fmt = tensors["blk.0.ssm_a"]
        tensors["blk.0.ssm_a"] = (-x, fmt)

    with pytest.raises(ArtifactError, match="not negative"):
        open_artifact(rewritten(tmp_path / "m.gguf", change)).get("model.layers.0.linear_attn.A_log")


# Damage at random


def data_start(path: Path) -> int:
    file = GgufFile(path)
    start = min(t.offset for t in file.tensors.values())
    file.close()
    return start


def attempt(path: Path) -> bool:
    """Whether the file opens and reads; anything but an ArtifactError fails the test."""
    try:
        opened_fully(path)
    except ArtifactError as error:
        assert str(path) in str(error)
        return False
    return True


def test_truncation_anywhere_is_an_error(tmp_path: Path) -> None:
    path = files.tiny_llama(tmp_path / "m.gguf")
    whole, cut = path.read_bytes(), tmp_path / "cut.gguf"
    header = data_start(path)
    for length in [*range(0, header, 17), *range(header, len(whole) - 32, 4099)]:
        cut.write_bytes(whole[:length])
        assert not attempt(cut), length


def test_mutated_headers_give_an_artifact_error_or_a_model(tmp_path: Path) -> None:
    sources = [files.tiny_llama(tmp_path / "m.gguf"), DATA / "qwen3_5_dense.gguf"]
    rng, bad = np.random.default_rng(20), tmp_path / "bad.gguf"
    words = [0, 1, 0xFF, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1]
    survived, began = 0, time.monotonic()
    tracemalloc.start()
    for source in sources:
        whole, header = source.read_bytes(), data_start(source)
        for _ in range(200):
            raw = bytearray(whole)
            for _ in range(rng.integers(1, 4)):
                at = int(rng.integers(4, header - 8))
                if rng.random() < 0.5:
                    raw[at] = int(rng.integers(256))
                else:
                    size = int(rng.choice([4, 8]))
                    word = int(words[rng.integers(len(words))]) & ((1 << 8 * size) - 1)
                    raw[at : at + size] = word.to_bytes(size, "little")
            bad.write_bytes(raw)
            survived += attempt(bad)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < survived < 400
    assert peak < 64 << 20
    assert time.monotonic() - began < 120


def test_renaming_a_parameter_keeps_its_bytes(tmp_path: Path) -> None:
    p = open_artifact(files.tiny_llama(tmp_path / "m.gguf")).get("model.norm.weight")
    assert p.renamed("x").raw is p.raw and p.renamed("x").name == "x"
    assert p.packed().shape == p.shape and np.array_equal(p.packed().f32(), p.f32())
    assert evolve(p, shape=(8, 8)).f32().shape == (8, 8)
