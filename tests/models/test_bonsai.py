"""Ternary Bonsai 2 with what is published beside it: MTP block, DFlash2 adapter, proposal head, in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from safetensors.numpy import save_file

from ninfer.artifacts import Artifact, open_artifact, open_source, synthetic
from ninfer.artifacts.beside import Beside
from ninfer.artifacts.convert import make_plan
from ninfer.artifacts.convert_objects import to_artifact
from ninfer.artifacts.ninfer_write import check_written, write_artifact
from ninfer.artifacts.recipes import recipe
from ninfer.artifacts.safetensors import read_json
from ninfer.artifacts.synthetic import SyntheticArtifact
from ninfer.errors import ArtifactError
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.formats.quant import F32_FORMAT
from ninfer.models import dflash, identify
from ninfer.models.family import Rounds
from ninfer.models.proposal import parse_proposal
from ninfer.runtime.reference import ReferenceRunner, reference_runner
from ninfer.runtime.steps import fill_step
from ninfer.runtime.weights import bind_weights
from tests.checkpoints import DATA, GREEDY, limits, part
from tests.drawn_drafter import shapes

VOCAB, HIDDEN, LAYERS = 512, 1024, 2
PROMPT = [7 * i % VOCAB for i in range(20)]


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """The sources by name, in the layouts that they are published in, but small."""
    config = synthetic._qwen3_5(HIDDEN, LAYERS, HIDDEN, 4, 2, 8, vocab=VOCAB, key_heads=4)
    monkeypatch.setitem(synthetic.CONFIGS, "wide", config | {"full_attention_interval": 2})
    base = SyntheticArtifact("wide")
    monkeypatch.setitem(synthetic.ROTATED, "wide", 1024)
    ternary = SyntheticArtifact("wide", "t2_g128")
    assert not [n for n in ternary.names() if n.startswith("mtp.")]
    rng = np.random.default_rng(11)

    def drawn(shape: tuple[int, ...]) -> Any:
        return (rng.standard_normal(shape) * 0.05 + (len(shape) == 1)).astype(np.float32)

    block = {n: drawn(base.info(n).shape) for n in base.names() if n.startswith("mtp.")}
    save_file(block, tmp_path / "model_mtp.safetensors")
    (tmp_path / "config.json").write_text("{}")  # a folder's other files are of no interest
    drafter = read_json(DATA / "dflash2" / "config.json")
    drafter |= {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_target_layers": LAYERS, "intermediate_size": 256}
    drafter["dflash_config"] |= {"target_layer_ids": [0, 1], "mask_token_id": VOCAB - 1}
    (tmp_path / "dflash2").mkdir()
    (tmp_path / "dflash2" / "config.json").write_text(json.dumps(drafter))
    save_file({n: drawn(s) for n, s in shapes(drafter)}, tmp_path / "dflash2" / "model.safetensors")
    sources = {"ternary": ternary, "mtp": open_source(tmp_path / "model_mtp.safetensors"),
               "dflash2": open_artifact(tmp_path / "dflash2")}  # fmt: skip
    return {"base": base, "sources": sources, "out": tmp_path / "bonsai.ninfer"}


def written(parts: Mapping[str, Any], **more: Any) -> Artifact:
    plan = make_plan(
        recipe("bonsai2_27b_ternary"), parts["base"], parts["sources"], name="bonsai",
        components=("text", "mtp", "dflash2"), proposal=range(5, 400), **more,
    )  # fmt: skip
    check_written(write_artifact(to_artifact(plan), parts["out"]), parts["out"])
    return open_artifact(parts["out"])


def test_what_lies_beside_the_ternary_weights_keeps_its_formats_and_its_basis(parts: Mapping[str, Any]) -> None:
    model = written(parts)
    adapter, source = model.drafter("dflash2"), parts["sources"]["dflash2"]
    assert adapter is not None and set(adapter.names()) == set(source.names())
    formats = {n: adapter.info(n).format.name for n in adapter.names()}
    four = ["fc.weight", "layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"]
    assert {formats[n] for n in four} == {"q4_g64"}
    assert {formats[f"layers.0.self_attn.{n}_proj.weight"] for n in "qkv"} == {"q8_g32"}
    assert formats["candidate_selector.hidden_projection.weight"] == "bf16"
    assert {model.info(f"mtp.{n}.weight").format.name for n in ("fc", "layers.0.mlp.up_proj")} == {"q8_g32"}
    assert model.info("model.layers.0.mlp.up_proj.weight").format.name == "t2_g128"
    assert not [n for n in model.config["hadamard_signs"] if n.startswith(("mtp.", "dflash"))]
    block = parts["sources"]["mtp"]
    for n in ("mtp.norm.weight", "mtp.fc.weight"):
        assert np.abs(model.get(n).f32() - block.get(n).f32()).max() < 0.01


class Plain(Artifact):
    """The converted model with every matrix in the plain basis, in float32: nothing to rotate."""

    kind, tokenizer_source, chat_template = "test", None, None

    def __init__(self, model: Artifact) -> None:
        self.model, self.path, self.display_name = model, model.path, "plain"
        self.signs = model.config["hadamard_signs"]
        self.config = {k: v for k, v in model.config.items() if not k.startswith("hadamard")}
        self.generation_config: Mapping[str, Any] = {}

    @property
    def has_proposal(self) -> bool:
        return self.model.has_proposal

    def proposal_ids(self) -> Any:
        return self.model.proposal_ids()

    def names(self) -> tuple[str, ...]:
        return self.model.names()

    def info(self, name: str) -> Any:
        found = self.model.info(name)
        return attrs.evolve(found, format=F32_FORMAT) if self._sign(name) is not None else found

    def _sign(self, name: str) -> Any:
        words = self.signs.get(name, self.signs.get(name.partition("/")[0]))
        return None if words is None else np.where(np.asarray(words) == 0x3F80, 1, -1)

    def get(self, name: str) -> Any:
        p, sign = self.model.get(name), self._sign(name)
        if sign is None:
            return p
        h = np.ones((1, 1))
        while len(h) < 1024:
            h = np.block([[h, h], [h, -h]])
        x = p.f32().astype(float)
        turned = (x.reshape(len(x), -1, 1024) @ (h / 32)).reshape(x.shape) * sign
        raw = np.ascontiguousarray(turned, np.float32).reshape(-1).view(np.uint8)
        return attrs.evolve(p, format=F32_FORMAT, raw=raw)

    def close(self) -> None:
        self.model.close()


def drafts(model: Artifact, adapter: Artifact, listed: bool) -> dict[str, Any]:
    """Logits of the target, and what MTP and DFlash2 make of the same prompt."""
    own = dflash.parse(adapter.config)
    both, (family, spec) = Beside(model, adapter, dflash.PREFIX), identify(model.config)
    own.check(spec)
    if listed:
        spec = attrs.evolve(spec, proposal=parse_proposal(model.proposal_ids(), spec.vocab_size))
    rounds = Rounds(hidden_rows=64, journal_rows=8, taps=own.taps, tap_rows=64)
    states, found, sized = dict[str, Any](), dict[str, Any](), limits(spec, rows=64, seqs=1)

    def made(mode: str) -> ReferenceRunner:
        kv = kv_by_name("f32")
        if mode in dflash.MODES:
            graph = dflash.build(own, spec, both.info, kv=kv, mode=mode, rounds=rounds)
        else:
            graph = family.build(spec, both.info, kv=kv, mode=mode, rounds=rounds)
        run = reference_runner(graph, bind_weights(graph, both), sized, decode_weights=True, logit_rows=64)
        run.set_pages(0, 0, [2, 0, 3, 1])
        for name, state in run.states.items():
            states.setdefault(name, state)
        run.states = states
        return run

    found["logits"] = made("logits").outputs([part(PROMPT)])["logits"]
    found["mtp"] = made("draft_logits").outputs([part([*PROMPT[1:], 3])])["logits"]
    made(dflash.CONTEXT).outputs([part(PROMPT)])
    block = made(dflash.BLOCK_LOGITS)
    rows = [attrs.evolve(part([3, *[own.mask_id] * 5], len(PROMPT), draw=GREEDY), num_draws=5)]
    fill_step(rows, block.step_arrays, block.header)
    outputs = block._run()
    return found | {"block": outputs["logits"], "drafts": outputs["draft"]}


@pytest.mark.parametrize("listed", [False, True], ids=["head", "proposal head"])
def test_drafters_read_ternary_matrices_in_their_basis_and_their_own_in_the_plain_one(
    parts: Mapping[str, Any], listed: bool
) -> None:
    model = written(parts)
    adapter = model.drafter("dflash2")
    assert adapter is not None
    got, want = drafts(model, adapter, listed), drafts(Plain(model), adapter, listed)
    for name in ("logits", "mtp", "block"):  # of a proposal head, most scores are no products
        atol = 2e-3 * np.abs(want["logits" if listed else name]).max()
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=atol, err_msg=name)
    assert got["drafts"].tolist() == want["drafts"].tolist()
    assert not listed or ((got["drafts"] >= 5) & (got["drafts"] < 400)).all()


def test_an_mtp_source_is_a_block_alone(parts: Mapping[str, Any], tmp_path: Path) -> None:
    for tensors, message in (
        ({"lm_head.weight": np.zeros((4, 4), np.float32)}, "'lm_head.weight' is no part of an MTP block"),
        ({"mtp.norm.weight": np.zeros(4, np.float32)}, "has no tensor 'mtp.fc.weight'"),
    ):
        save_file(tensors, tmp_path / "other.safetensors")
        other = parts["sources"] | {"mtp": open_source(tmp_path / "other.safetensors")}
        with pytest.raises(ArtifactError, match=message) as error:
            written({**parts, "sources": other})
        assert "\n" not in str(error.value)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "a window of its own": ({"swa_window_size": 512}, "swa_window_size is 512"),
    "sinks": ({"attention_sink_bias": True}, "attention_sink_bias is True"),
    "scaled values": ({"attention_value_scale": 0.5}, "attention_value_scale is 0.5"),
    "a vocabulary of its own": ({"draft_vocab_size": 100}, "draft_vocab_size is 100"),
    "another width": ({"target_hidden_size": 2048}, "target_hidden_size is 2048"),
    "a Markov head": ({"markov_rank": 8}, "markov_rank is 8, but drafters with a Markov head"),
    "partial rotation": ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
    "interleaved rotation": ({"is_neox_style": False}, "is_neox_style is False"),
}


@pytest.mark.parametrize("place", ["top", "inner"])
@pytest.mark.parametrize("name", OTHERS)
def test_drafters_of_other_kinds_are_refused_by_their_keys(name: str, place: str) -> None:
    keys, message = OTHERS[name]
    config = read_json(DATA / "dflash2" / "config.json")
    changed = config | keys if place == "top" else config | {"dflash_config": config["dflash_config"] | keys}
    with pytest.raises(ArtifactError, match=message):
        dflash.parse(changed)
    neutral = {"swa_window_size": None, "draft_vocab_size": config["vocab_size"], "markov_rank": None, "use_swa": False}
    assert dflash.parse(config | {"dflash_config": config["dflash_config"] | neutral}) == dflash.parse(config)


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "architectures": ({"architectures": 7}, "config: 7 is no drafter; known are DFlashDraftModel"),
    "kinds of layers": ({"layer_types": [[], "full_attention", 3]}, "layer_types is .* must name 3 layers"),
    "a million layers": ({"num_hidden_layers": 1 << 30, "layer_types": None}, "num_hidden_layers .* at most 999"),
    "a wide head": ({"head_dim": 1 << 30}, "head_dim is 1073741824, but at most 16384"),
    "no taps": ({"target_layer_ids": []}, "target_layer_ids .* must list layers"),
    "a tap past the end": ({"target_layer_ids": [0, 4]}, "must list layers from 0 to 3"),
    "a mask past the end": ({"mask_token_id": 512}, "mask_token_id is 512, but must be a token below vocab_size 512"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_drafters_of_impossible_configs_are_refused(name: str) -> None:
    keys, message = DAMAGED[name]
    config = read_json(DATA / "dflash2" / "config.json")
    inner = {k: v for k, v in keys.items() if k in config["dflash_config"]}
    outer = {k: v for k, v in keys.items() if k not in inner}
    with pytest.raises(ArtifactError, match=message):
        dflash.parse({**config, **outer, "dflash_config": config["dflash_config"] | inner})
