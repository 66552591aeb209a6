"""Files as publishers lay them out, before and after conversion: Gemma 3 and 4 in GGUF, PrismML's ternary GGUF."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ninfer.artifacts import Artifact, open_artifact, synthetic
from ninfer.artifacts.synthetic import SyntheticArtifact
from ninfer.config import EngineConfig
from ninfer.errors import ArtifactError, NinferError
from ninfer.formats.dtypes import bf16_to_f32, f32_to_bf16
from ninfer.formats.quant import BF16_FORMAT, F32_FORMAT, QuantFormat, by_name
from ninfer.runtime.load import load_scorer
from tests.checkpoints import DATA, oracle, part, runner
from tests.drawn import checkpoint
from tests.gguf_writer import write_gemma4_gguf, write_gguf
from tests.models.test_compiled import outputs
from tests.models.test_converted import converted
from tests.models.test_gemma3 import CONFIG, weights
from tests.models.test_rotation import grouped_outputs

IDS = [int(t) % 90 for t in oracle("llama")["input_ids"][:24]]


def logits(model: Path | Artifact) -> NDArray[np.float32]:
    """Of a prompt and of a step behind it, by the references."""
    run = runner(model, rows=32, seqs=1, pages_each=1)
    return np.concatenate([run.outputs([part(IDS)])["logits"], run.outputs([part(IDS[:1], 24)])["logits"]])


def compiled(model: Path) -> NDArray[np.float32]:
    config = EngineConfig(model=str(model), max_context=256, kv_dtype="f32", device="cpu", prefill_chunk=32)
    return outputs(load_scorer(config, "logits", tokenizer_needed=False)[0], [part(IDS)])


# Gemma 3


def gemma3(tmp_path: Path) -> tuple[Path, Path]:
    """A folder and a GGUF file of the same values, all of which bf16 holds."""
    c: dict[str, Any] = {**CONFIG, "query_pre_attn_scalar": CONFIG["head_dim"]}
    tensors = {n: bf16_to_f32(f32_to_bf16(x)) for n, x in weights().items()}
    folder, file = tmp_path / "gemma3", tmp_path / "gemma3.gguf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(c))
    save_file(tensors, folder / "model.safetensors")
    out = gguf.GGUFWriter(file, "gemma3")
    out.add_context_length(c["max_position_embeddings"])
    out.add_embedding_length(c["hidden_size"])
    out.add_block_count(c["num_hidden_layers"])
    out.add_feed_forward_length(c["intermediate_size"])
    out.add_head_count(c["num_attention_heads"])
    out.add_head_count_kv(c["num_key_value_heads"])
    out.add_key_length(c["head_dim"])
    out.add_layer_norm_rms_eps(1e-6)
    out.add_sliding_window(c["sliding_window"])
    pattern = [(i + 1) % c["sliding_window_pattern"] != 0 for i in range(c["num_hidden_layers"])]
    out.add_array("gemma3.attention.sliding_window_pattern", pattern)
    out.add_rope_freq_base(c["rope_theta"])
    out.add_float32("gemma3.rope.freq_base_swa", c["rope_local_base_freq"])
    out.add_string("gemma3.rope.scaling.type", "linear")
    out.add_float32("gemma3.rope.scaling.factor", c["rope_scaling"]["factor"])
    out.add_float32("gemma3.final_logit_softcapping", c["final_logit_softcapping"])
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.o_proj": "attn_output",
        **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"},
        **{f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")},
    }  # fmt: skip
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, x in tensors.items():
        _, _, index, rest = [*name.removesuffix(".weight").split(".", 3), "", ""][:4]
        fmt, values = (BF16_FORMAT, x) if x.ndim > 1 else (F32_FORMAT, 1 + x)  # its converter adds the one
        raw = fmt.pack(values).reshape(*x.shape[:-1], -1)
        target = whole.get(name) or f"blk.{index}.{parts[rest]}.weight"
        out.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType(fmt.ggml_type))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return folder, file


def test_gemma_3_is_one_model_in_a_folder_a_gguf_and_a_converted_file(tmp_path: Path) -> None:
    folder, file = gemma3(tmp_path)
    want = logits(folder)
    np.testing.assert_allclose(logits(file), want, rtol=0, atol=1e-5)  # 1 + w rounded once more
    assert np.array_equal(logits(converted(tmp_path, folder, "bf16")), want)
    out = converted(tmp_path, file, "gguf")
    assert np.array_equal(logits(out), logits(file))


# Gemma 4


@pytest.mark.parametrize("name", ["gemma4_moe", "gemma4_moe_hd512"])
def test_a_gemma_4_file_trained_for_q4_0_is_taken_block_by_block(tmp_path: Path, name: str) -> None:
    """Projections and experts in Q4_0, the embedding in another type, as its publisher has it."""
    model, file = checkpoint(DATA / name, tmp_path / name), tmp_path / "qat.gguf"
    q4_0, q8_0 = by_name("q4_0"), by_name("q8_0")

    def format_of(tensor: str, shape: Sequence[int]) -> QuantFormat:
        if len(shape) == 1 or "router" in tensor or shape[-1] % q4_0.block:
            return F32_FORMAT
        return q8_0 if tensor.endswith("embed_tokens.weight") else q4_0

    write_gemma4_gguf(open_artifact(model), file, format_of)
    out = converted(tmp_path, model, "gemma4_gguf", "--source", f"gguf={file}")
    source, result = open_artifact(file), open_artifact(out)
    blocks = [n for n in source.names() if source.info(n).format is q4_0]
    assert any("experts" in n for n in blocks) and any("q_proj" in n for n in blocks) and len(blocks) > 8
    for n in (*blocks, "model.embed_tokens.weight"):
        assert result.info(n) == source.info(n)
        assert np.array_equal(result.get(n).raw, source.get(n).raw), n
    assert np.array_equal(logits(out), logits(file))
    assert name != "gemma4_moe" or np.array_equal(compiled(out), compiled(file))


# Ternary Bonsai 2

PQ2_0 = by_name("pq2_0")


@pytest.fixture
def bonsai(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, Path]]:
    """The folder of the model it was made from, and PrismML's file: blocks of type 142, keys of the rotation."""
    kind: Any = int.__new__(gguf.GGMLQuantizationType, 142)
    kind._name_, kind._value_ = "PQ2_0", 142
    monkeypatch.setitem(gguf.GGMLQuantizationType._value2member_map_, 142, kind)
    monkeypatch.setitem(gguf.GGML_QUANT_SIZES, kind, (128, 34))
    config = synthetic._qwen3_5(1024, 2, 1024, 4, 2, 8, vocab=256, key_heads=4)
    config |= {"full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"]}
    monkeypatch.setitem(synthetic.CONFIGS, "wide", config)
    base = SyntheticArtifact("wide")
    monkeypatch.setitem(synthetic.ROTATED, "wide", 1024)
    source = SyntheticArtifact("wide", "t2_g128")
    signs: Mapping[str, NDArray[np.uint16]] = source.config["hadamard_signs"]

    def write(**changes: Any) -> tuple[Path, Path]:
        folder = tmp_path / "Qwen3.8"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(dict(base.config)))
        own = {n: base.get(n).f32() for n in base.names() if n.startswith("mtp.") and len(base.info(n).shape) == 1}
        save_file({n: np.ascontiguousarray(x) for n, x in own.items()}, folder / "model.safetensors")
        finish = gguf.GGUFWriter.write_header_to_file
        words = next(iter(signs.values()))
        values = {
            "version": 1, "block_size": 1024, "transform": "normalized-sylvester-walsh-hadamard",
            "axis": "input-last-dimension", "sign_mode": "explicit", "gdn_v_grouped": True, "sign_widths": [1024],
            "sign_values": [1 if w == 0x3F80 else -1 for w in words], "inverse_weight_names": ["token_embd.weight"],
        } | changes  # fmt: skip

        def with_keys(self: gguf.GGUFWriter) -> None:
            stored = {n: t for shard in self.tensors for n, t in shard.items()}
            rotated = [n for n, t in stored.items() if t.dtype == kind and n != "token_embd.weight"]
            for key, value in (values | {"weight_names": changes.get("weight_names", rotated)}).items():
                add: Any = {bool: self.add_bool, int: self.add_uint32, str: self.add_string, list: self.add_array}
                add[type(value)](f"prism.hadamard.{key}", value)
            finish(self)

        monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_keys)
        monkeypatch.setattr("tests.gguf_writer._qwen35_values", grouped_outputs)

        def format_of(tensor: str, shape: Sequence[int]) -> QuantFormat:
            return PQ2_0 if tensor in signs else BF16_FORMAT if "in_proj_" in tensor else F32_FORMAT

        write_gguf(source, tmp_path / "ternary.gguf", format_of)
        return folder, tmp_path / "ternary.gguf"

    return write


def test_prisms_ternary_file_and_its_conversion_are_one_model(
    tmp_path: Path, bonsai: Callable[..., tuple[Path, Path]]
) -> None:
    folder, file = bonsai()
    source, want = open_artifact(file), logits(file)
    assert source.info("model.layers.0.mlp.up_proj.weight").format is PQ2_0
    original = SyntheticArtifact("wide", "t2_g128")
    np.testing.assert_allclose(want, logits(original), rtol=0, atol=1e-4 * np.abs(want).max())
    out = converted(tmp_path, folder, "bonsai2_27b_ternary", "--source", f"ternary={file}", "--proposal",
                    "--proposal-rows", "128")  # fmt: skip
    result = open_artifact(out)
    for n in ("model.layers.0.linear_attn.in_proj_qkv.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"):
        assert result.info(n).format.name == "t2_g128"
        assert np.array_equal(result.get(n).f32(), source.get(n).f32()), n
    assert np.array_equal(logits(out), want)


def test_a_code_that_is_not_ternary_is_refused(tmp_path: Path, bonsai: Callable[..., tuple[Path, Path]]) -> None:
    folder, file = bonsai()
    p = open_artifact(file).get("model.embed_tokens.weight")
    raw = bytearray(file.read_bytes())
    at = raw.index(p.raw[:34].tobytes())
    raw[at + 9] |= 0xC0  # the fourth word of two bits
    file.write_bytes(raw)
    with pytest.raises(ArtifactError, match=r"embed_tokens.weight.*codes from -1 to 2.*it is not ternary"):
        converted(tmp_path, folder, "bonsai2_27b_ternary", "--source", f"ternary={file}")
    assert not list(tmp_path.glob("*.ninfer*"))


KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": 2}, "prism.hadamard.version is 2; supported is 1"),
    "transform": ({"transform": "walsh"}, "transform is 'walsh'; supported is 'normalized-sylvester"),
    "axis": ({"axis": "output"}, "axis is 'output'"),
    "signs from a seed": ({"sign_mode": "seeded"}, "sign_mode is 'seeded'; supported is 'explicit'"),
    "too few signs": ({"sign_widths": [2048]}, "are not a sign for each of sign_widths"),
    "no signs": ({"sign_values": [0] * 1024}, "are not a sign for each"),
    "an odd block": ({"block_size": 1000}, "hadamard_block is 1000, but must be a power of two"),
    "a block that does not divide": ({"block_size": 2048}, "which blocks of 2048 do not divide"),
    "another inverse": ({"inverse_weight_names": ["output.weight"]}, "supported is the embedding alone"),
    "a tensor that is not there": ({"weight_names": ["blk.9.ffn_up.weight"]}, "which has no signs or is not there"),
}


@pytest.mark.parametrize("name", KEYS)
def test_rotations_of_another_kind_are_refused(bonsai: Callable[..., tuple[Path, Path]], name: str) -> None:
    changes, message = KEYS[name]
    _, file = bonsai(**changes)
    with pytest.raises(NinferError, match=message) as error:
        runner(file)
    assert "\n" not in str(error.value)
