"""Checkpoints before and after conversion: the same logits through the compiled plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.artifacts import Artifact, open_artifact
from ninfer.artifacts.convert import make_plan
from ninfer.artifacts.convert_objects import to_artifact
from ninfer.artifacts.ninfer_artifact import NinferArtifact
from ninfer.artifacts.ninfer_write import check_written, write_artifact
from ninfer.artifacts.quantize import quantize
from ninfer.artifacts.recipes import DENSE, RECIPES, Recipe, recipe
from ninfer.artifacts.synthetic import SyntheticArtifact, shapes_of
from ninfer.cli.convert import body
from ninfer.config import EngineConfig
from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.quant import BF16_FORMAT, F32_FORMAT, QuantFormat, by_name
from ninfer.models import dflash
from ninfer.runtime import load as loading
from tests.artifacts.test_hf_quant import folder
from tests.checkpoints import DATA, oracle, part, runner, tiny_qwen35_folder
from tests.drawn import checkpoint
from tests.drawn_drafter import drafter_checkpoint
from tests.gguf_writer import matrices_in, write_gemma4_gguf, write_gguf
from tests.models.test_compiled import outputs

MODELS = ("llama", "qwen3_5_dense", "qwen3_5_dense_hd256")
EXPERTS = ("qwen3_5_moe", "qwen3_next", "gemma4_moe")


def logits(model: Path, **changes: Any) -> NDArray[np.float32]:
    config = EngineConfig(model=str(model), max_context=256, kv_dtype="f32", device="cpu", prefill_chunk=256, **changes)
    scorer = loading.load_scorer(config, "logits", tokenizer_needed=False)[0]
    ids = oracle("llama")["input_ids"][:24]
    return np.concatenate([outputs(scorer, [part(ids)]), outputs(scorer, [part(ids[:1], 24)])])


def converted(tmp_path: Path, model: Path, recipe: str, *more: str) -> Path:
    out = tmp_path / f"{model.name}-{recipe}.ninfer"
    assert body(["--model", str(model), "--recipe", recipe, "--out", str(out), "--verify", *more]) == 0
    return out


@pytest.mark.parametrize("name", MODELS)
def test_bf16_conversion_changes_no_logit(tmp_path: Path, name: str) -> None:
    out = converted(tmp_path, DATA / name, "bf16")
    assert np.array_equal(logits(out), logits(DATA / name))
    source, result = open_artifact(DATA / name), open_artifact(out)
    assert result.num_values() == sum(prod(source.info(n).shape) for n in source.names() if not n.startswith("mtp."))


@pytest.mark.parametrize(
    "recipe,fmt",
    [("q4", "q4_g64"), ("q5", "q5_g64"), ("q6", "q6_g64"), ("q8", "q8_g32"), ("fp8", "fp8_e4m3fn_row_bf16")],
)
@pytest.mark.parametrize("name", ["llama", "qwen3_5_dense_hd256"])
def test_groupwise_conversion_equals_quantising_at_load(tmp_path: Path, name: str, recipe: str, fmt: str) -> None:
    out = converted(tmp_path, DATA / name, recipe)
    assert np.array_equal(logits(out), logits(DATA / name, quantize=fmt))


@pytest.mark.parametrize("name", MODELS)
def test_several_formats_in_one_tensor(tmp_path: Path, name: str) -> None:
    """q4 beside q5 in the rows of in_proj_qkv: near the logits of q8, since the formats round weights a little."""
    out = converted(tmp_path, DATA / name, "q4q5")
    want, got = oracle(name)["logits"][:24], logits(out)[:24]
    ids = oracle(name)["input_ids"][:24]
    if np.array_equal(ids, oracle("llama")["input_ids"][:24]):
        assert np.corrcoef(want.ravel(), got.ravel())[0, 1] > 0.97
    artifact, source = open_artifact(out), open_artifact(DATA / name)
    if "qwen" in name:
        p = "model.layers.0.linear_attn.in_proj_qkv.weight"
        assert artifact.info(p).parts == (f"{p}/query+key", f"{p}/value")
        whole = np.concatenate([artifact.get(n).f32() for n in artifact.info(p).parts])
        assert np.abs(whole - source.get(p).f32()).max() < 0.08 * np.abs(whole).max()
        with pytest.raises(ArtifactError, match=r"several formats \(q4_g64, q5_g64\)"):
            artifact.get(p)


@pytest.mark.parametrize("source", ["folder", "gguf"])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_in_every_division(tmp_path: Path, name: str, source: str) -> None:
    """Fused stacks and single matrices of safetensors, banks of gate and up of GGUF."""
    model = checkpoint(DATA / name, tmp_path / name)
    if source == "gguf":
        write = write_gemma4_gguf if name == "gemma4_moe" else write_gguf
        write(open_artifact(model), tmp_path / "model.gguf", matrices_in(by_name("q8_0")))
        model = tmp_path / "model.gguf"
        assert np.array_equal(logits(converted(tmp_path, model, "gguf")), logits(model))
        return
    assert np.array_equal(logits(converted(tmp_path, model, "bf16")), logits(model))
    assert np.array_equal(logits(converted(tmp_path, model, "q8")), logits(model, quantize="q8_g32"))


def test_banks_of_a_gguf_take_the_place_of_the_folders_stacks(tmp_path: Path) -> None:
    for name, chosen in (("qwen3_5_moe", "gguf"), ("gemma4_moe", "gemma4_gguf")):
        model, gguf = checkpoint(DATA / name, tmp_path / name), tmp_path / f"{name}.gguf"
        write = write_gemma4_gguf if name == "gemma4_moe" else write_gguf
        write(open_artifact(model), gguf, matrices_in(by_name("q8_0")))
        out = converted(tmp_path, model, chosen, "--source", f"gguf={gguf}")
        assert np.array_equal(logits(out), logits(gguf))
        assert out.stat().st_size < 1.1 * gguf.stat().st_size


class Ternary(SyntheticArtifact):
    """Every matrix in PrismML's ternary blocks and a basis rotated by 1024."""

    def __init__(self) -> None:
        super().__init__("qwen3.5-tiny", "pq2_0")
        self.config = {
            **self.config, "hidden_size": 1024, "num_attention_heads": 4, "linear_num_value_heads": 8,
            "vocab_size": 256, "num_hidden_layers": 2, "full_attention_interval": 2, "mtp_num_hidden_layers": 0,
        }  # fmt: skip
        self._shapes = shapes_of(self.config)
        names = [
            n for n, s in self._shapes.items() if len(s) == 2 and not n.endswith(("in_proj_a.weight", "_b.weight"))
        ]
        rng = np.random.default_rng(0)
        words = {1024: np.where(rng.integers(0, 2, 1024) > 0, 0x3F80, 0xBF80).astype(np.uint16)}
        self.config |= {"hadamard_signs": {n: words[self._shapes[n][1]] for n in names}, "hadamard_block": 1024}

    def _format(self, name: str) -> QuantFormat:
        return by_name("pq2_0") if name.endswith(("embed_tokens.weight", "head.weight")) else super()._format(name)


def test_ternary_weights_and_their_rotation_pass_through(tmp_path: Path) -> None:
    source, out = Ternary(), tmp_path / "ternary.ninfer"
    folder = SyntheticArtifact("qwen3.5-tiny")
    folder.config = {k: v for k, v in source.config.items() if not k.startswith("hadamard")}
    folder._shapes = source._shapes
    plan = make_plan(recipe("bonsai2_27b_ternary"), folder, {"ternary": source}, name="ternary")
    new = write_artifact(to_artifact(plan), out)
    check_written(new, out)
    result = open_artifact(out)
    assert result.info("model.layers.0.mlp.up_proj.weight").format is by_name("t2_g128")
    assert result.config["hadamard_signs"].keys() == source.config["hadamard_signs"].keys()
    assert sum(o.id.startswith("a.") for o in new.objects) == 1  # one vector of signs for all
    ids = oracle("llama")["input_ids"][:24] % 256
    want = runner(source).outputs([part(ids)])["logits"]
    assert np.array_equal(runner(result).outputs([part(ids)])["logits"], want)
    config = EngineConfig(model=str(out), max_context=256, kv_dtype="f32", device="cpu", prefill_chunk=256)
    scorer = loading.load_scorer(config, "logits", tokenizer_needed=False)[0]
    np.testing.assert_allclose(outputs(scorer, [part(ids)]), want, rtol=0, atol=2e-2 * np.abs(want).max())


def test_nvfp4_matrices_of_a_folder_run_and_pass_through(tmp_path: Path) -> None:
    """gate and up in NVFP4, as compressed-tensors writes them; the other matrices stay in bf16."""
    source = open_artifact(DATA / "qwen3_5_dense_hd256")
    fmt, tensors = by_name("nvfp4"), dict[str, tuple[str, NDArray[Any]]]()
    for name in source.names():
        p = source.get(name)
        if not name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight")) or name.startswith("mtp."):
            kinds = {"bf16": ("BF16", "<u2"), "f32": ("F32", "<f4")}
            dtype, words = kinds[p.format.name]
            tensors[name] = dtype, p.raw.view(words).reshape(p.shape)
            continue
        fields = fmt.fields(fmt.pack(p.f32()), p.shape)
        tensors[f"{name}_packed"] = "U8", fields["words"]
        tensors[f"{name}_scale"] = "F8_E4M3", fields["scale"]
        tensors[f"{name}_global_scale"] = "F32", np.ascontiguousarray(fields["divisor"][:1]).view("<f4").reshape(1)
    quantised = folder(tmp_path / "nvfp4", tensors, source.config)
    ids = oracle("llama")["input_ids"][:24]
    want = runner(quantised).outputs([part(ids)])["logits"]
    np.testing.assert_allclose(logits(quantised)[:24], want, rtol=0, atol=1e-4)
    assert np.array_equal(logits(converted(tmp_path, quantised, "quantized")), logits(quantised))
    out = converted(tmp_path, DATA / "qwen3_5_dense_hd256", "qwen3_6_27b_nvfp4", "--source", f"quantized={quantised}")
    result = open_artifact(out)
    for n in ("model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        assert np.array_equal(result.get(n).raw, open_artifact(quantised).get(n).raw)
    assert result.info("lm_head.weight").format is by_name("q8_g32")


@pytest.mark.parametrize("chosen", [r for r in RECIPES if DENSE in r.models and not r.sources], ids=lambda r: r.name)
def test_dense_recipes_of_the_table(tmp_path: Path, chosen: Recipe) -> None:
    """On a checkpoint of the family: the formats that each module gets, and logits near those of the checkpoint."""
    model = DATA / "qwen3_5_dense_hd256"
    out = converted(tmp_path, model, chosen.name, "--components", "text,mtp")
    artifact = open_artifact(out)
    found = {
        n: artifact.info(f"model.layers.0.{n}").format.name for n in ("mlp.gate_proj.weight", "mlp.down_proj.weight")
    }
    gate = "q6_g64" if chosen.name == "qwen3_8_27b_q6" else "q4_g64"
    assert found == {"mlp.gate_proj.weight": gate, "mlp.down_proj.weight": "q5_g64"}
    head = "q6_g64" if chosen.name == "qwen3_6_27b" else "q8_g32"
    assert artifact.info("lm_head.weight").format.name == artifact.info("model.embed_tokens.weight").format.name == head
    assert artifact.info("mtp.fc.weight").format.name == "q8_g32"
    assert np.corrcoef(logits(out).ravel(), logits(model).ravel())[0, 1] > 0.95


@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_a_drafter_is_a_component_of_its_models_file(tmp_path: Path, name: str) -> None:
    target = checkpoint(DATA / "qwen3_5_moe", tmp_path / "moe") if name == "dflash" else DATA / "qwen3_5_dense"
    drafter = drafter_checkpoint(DATA / name, tmp_path / name)
    more = ("--source", f"{name}={drafter}", "--components", f"text,{name}")
    direct, result = open_artifact(drafter), open_artifact(converted(tmp_path, target, "bf16", *more))
    own = result.drafter(name)
    assert own is not None and result.drafter("mtp") is None and open_artifact(target).drafter(name) is None
    assert dflash.parse(own.config) == dflash.parse(direct.config)
    assert set(own.names()) == set(direct.names())
    for n in direct.names():
        assert own.info(n).shape == direct.info(n).shape
        assert np.array_equal(own.get(n).f32(), direct.get(n).f32()), n
    assert isinstance(result, NinferArtifact)
    key = f"{name}/layers/0/attention/"
    bindings = result.file.directory.bindings
    assert bindings[f"{key}context_key"] == bindings[f"{key}key"]
    packed = open_artifact(converted(tmp_path, target, "q8", *more)).drafter(name)
    assert packed is not None and packed.info("layers.0.mlp.up_proj.weight").format is by_name("q8_g32")
    plain = open_artifact(converted(tmp_path, target, "q5")).drafter(name)
    assert plain is None
    other = "dflash2" if name == "dflash" else "dflash"
    with pytest.raises(ArtifactError, match=f"--source {other}: its config says"):
        converted(tmp_path, target, "q6", "--source", f"{other}={drafter}", "--components", f"text,{other}")
    with pytest.raises(UsageError, match=f"{name} requires its drafter; provide --source {name}=PATH"):
        converted(tmp_path, target, "q6", "--components", f"text,{name}")


def test_the_moe_recipe_packs_experts_and_its_mtp_block(tmp_path: Path) -> None:
    model = checkpoint(DATA / "qwen3_5_moe", tmp_path / "moe")
    artifact = open_artifact(converted(tmp_path, model, "qwen3_6_35b_a3b", "--components", "text,mtp"))
    formats = {n: artifact.info(f"model.layers.0.mlp.experts.{n}").format.name for n in ("gate_up_proj", "down_proj")}
    assert formats == {"gate_up_proj": "q4_g64", "down_proj": "q5_g64"}
    assert artifact.info("mtp.layers.0.mlp.experts.gate_up_proj").format.name == "q8_g32"
    assert artifact.info("model.layers.0.mlp.gate.weight").format.name == "bf16"
    shape = open_artifact(model).info("model.layers.0.mlp.experts.gate_up_proj").shape
    assert artifact.get("model.layers.0.mlp.experts.gate_up_proj").shape == shape


@pytest.fixture
def kept(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, fmt: str) -> Path:
        """In `fmt` where blocks divide the rows, gates of the delta rule in bf16."""
        path, given = tmp_path / f"{name}-{fmt}.gguf", by_name(fmt)

        def format_of(tensor: str, shape: Sequence[int]) -> QuantFormat:
            if len(shape) == 1 or "conv1d" in tensor:
                return F32_FORMAT
            return BF16_FORMAT if "in_proj_a" in tensor or "in_proj_b" in tensor or shape[-1] % given.block else given

        write_gguf(open_artifact(DATA / name), path, format_of)
        return path

    return write


@pytest.mark.parametrize("fmt", ["q8_0", "q4_k", "iq4_nl", "q4_1"])
@pytest.mark.parametrize("name", ["qwen3_5_dense_hd256"])
def test_gguf_blocks_pass_through(tmp_path: Path, kept: Callable[[str, str], Path], name: str, fmt: str) -> None:
    gguf = kept(name, fmt)
    out = converted(tmp_path, gguf, "gguf")
    source, result = open_artifact(gguf), open_artifact(out)
    copied = [n for n in source.names() if n in result and not source.info(n).format.is_plain]
    assert copied
    for n in copied:
        assert result.info(n).format is source.info(n).format
        assert np.array_equal(result.get(n).raw, source.get(n).raw)
    assert np.array_equal(logits(out), logits(gguf))


def test_weights_of_a_gguf_with_the_folder_of_the_model(tmp_path: Path, kept: Callable[[str, str], Path]) -> None:
    gguf = kept("qwen3_5_dense_hd256", "q8_0")
    folder = DATA / "qwen3_5_dense_hd256"
    out = converted(tmp_path, folder, "qwen3_8_27b_gguf", "--source", f"gguf={gguf}", "--components", "text,mtp")
    assert np.array_equal(logits(out), logits(gguf))
    assert open_artifact(out).config["mtp_num_hidden_layers"] == 1
    assert "mtp.fc.weight" in open_artifact(out)


def test_a_model_with_its_tokenizer_is_served_under_its_name(tmp_path: Path) -> None:
    folder = tiny_qwen35_folder(tmp_path)
    out = converted(tmp_path, folder, "q8", "--name", "tiny-model")
    loaded = loading.load(EngineConfig(model=str(out), max_context=256, device="cpu"))
    direct = loading.load(EngineConfig(model=str(folder), max_context=256, device="cpu"))
    assert loaded.model_id == "tiny-model"
    assert loaded.eos_ids == direct.eos_ids and loaded.chat_template is not None
    text = "def f(x): return x"
    assert loaded.tokenizer.encode(text) == direct.tokenizer.encode(text)


def test_what_does_not_fit_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    def refused(error: type[Exception], match: str, *argv: str) -> None:
        out = tmp_path / "x.ninfer"
        with pytest.raises(error, match=match):
            body([*argv, "--out", str(out)])
        assert not list(tmp_path.glob("*x.ninfer*"))

    dense, llama = str(DATA / "qwen3_5_dense"), str(DATA / "llama")
    refused(UsageError, "no recipe 'q3'; there are bf16, q4", "--model", dense, "--recipe", "q3")
    refused(UsageError, "is for qwen3_5_moe_text models; this one is 'qwen3_5_text'",
            "--model", dense, "--recipe", "qwen3_6_35b_a3b")  # fmt: skip
    refused(UsageError, "this one is 'llama'", "--model", llama, "--recipe", "qwen3_8_27b")
    refused(UsageError, "requires source 'gguf'; provide --source gguf=PATH",
            "--model", dense, "--recipe", "qwen3_8_27b_gguf")  # fmt: skip
    refused(UsageError, "have no MTP block", "--model", llama, "--recipe", "q8", "--components", "text,mtp")
    refused(UsageError, "'vision' cannot be converted", "--model", dense, "--recipe", "q8", "--components", "vision")
    refused(UsageError, "is not NAME=PATH", "--model", dense, "--recipe", "q8", "--source", "gguf")
    refused(UsageError, "base stands for --model", "--model", dense, "--recipe", "q8", "--source", f"base={llama}")
    refused(ArtifactError, "weights and config are of different models|has no place|config implies",
            "--model", dense, "--recipe", "gguf", "--source", f"gguf={DATA / 'qwen3_5_dense_hd256'}")  # fmt: skip


def test_quantise_at_load_still_reads_ninfer_files(tmp_path: Path) -> None:
    artifact: Artifact = open_artifact(converted(tmp_path, DATA / "llama", "bf16"))
    packed = quantize(artifact, "q8_g32").get("model.layers.0.mlp.up_proj.weight")
    assert packed.format is by_name("q8_g32")
    mixed = converted(tmp_path, DATA / "qwen3_5_dense_hd256", "q4q5")  # tensors in parts of several formats
    got, want = logits(mixed, quantize="q8_g32"), logits(mixed)
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()
    config = EngineConfig(model=str(mixed), quantize="q8_g32")
    assert loading.open_model(config, tokenizer_needed=False).artifact.model_id == "qwen3_5_dense_hd256"
