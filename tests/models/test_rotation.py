"""Models in a rotated basis give the logits of the plain ones; what cannot be rotated is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.artifacts import Artifact, Parameter, TensorInfo, open_artifact, synthetic
from ninfer.artifacts.convert import make_plan
from ninfer.artifacts.convert_objects import to_artifact
from ninfer.artifacts.ninfer_write import write_artifact
from ninfer.artifacts.recipes import recipe
from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.quant import F32_FORMAT, by_name
from ninfer.models import identify
from ninfer.models.family import Rounds
from ninfer.models.rotation import EMBEDDING, PRODUCTS
from tests import gguf_writer
from tests.checkpoints import DATA, oracle, part, runner
from tests.gguf_writer import matrices_in, write_gguf

BLOCK = 16
PLAIN = ("in_proj_a", "in_proj_b")


def matrix(n: int) -> NDArray[np.float64]:
    """Sylvester's construction."""
    h: NDArray[np.float64] = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    scaled: NDArray[np.float64] = h / np.sqrt(n)
    return scaled


def signs(k: int) -> NDArray[np.float32]:
    return np.sign(np.random.default_rng(k).standard_normal(k)).astype(np.float32)


def is_rotated(name: str) -> bool:
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return not name.startswith("mtp.") and (name == EMBEDDING or (leaf in PRODUCTS and leaf not in PLAIN))


class Rotated(Artifact):
    """Another artifact with its matrices in a rotated basis, in float32."""

    kind, tokenizer_source, chat_template = "test", None, None

    def __init__(self, source: Artifact) -> None:
        self.source, self.path, self.display_name = source, source.path, source.display_name
        names = [n for n in source.names() if is_rotated(n)]
        words = {n: np.where(signs(source.info(n).shape[-1]) > 0, 0x3F80, 0xBF80).astype(np.uint16) for n in names}
        self.config = {**source.config, "hadamard_signs": words, "hadamard_block": BLOCK}
        self.generation_config: Mapping[str, Any] = {}

    def names(self) -> tuple[str, ...]:
        return self.source.names()

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self.source.info(name).shape, F32_FORMAT)

    def get(self, name: str) -> Parameter:
        x = self.source.get(name).f32()
        if is_rotated(name):  # W diag(s) H: what meets H (s * x) is W x
            runs = (x.astype(float) * signs(x.shape[-1])).reshape(len(x), -1, BLOCK) @ matrix(BLOCK)
            x = runs.reshape(x.shape).astype(np.float32)
        return Parameter(name, x.shape, F32_FORMAT, np.ascontiguousarray(x).reshape(-1).view(np.uint8))

    def close(self) -> None:
        self.source.close()


def test_a_rotated_model_has_the_plain_ones_logits() -> None:
    want, rotated = oracle("qwen3_5_dense"), Rotated(open_artifact(DATA / "qwen3_5_dense"))
    rounds = Rounds(hidden_rows=160, journal_rows=8)
    r = runner(rotated, rounds=rounds)
    keys = [n.op.key for n in r.graph.nodes]
    assert keys.count("hadamard") == 1 + 4 * 4 + 1  # embedding, four inputs of each layer, head
    ids = want["input_ids"]
    np.testing.assert_allclose(r.outputs([part(ids)])["logits"], want["logits"], rtol=0, atol=2e-4)
    mtp = runner(rotated, "draft_logits", rounds=rounds, share=r)
    got = mtp.outputs([part([*ids[1:].tolist(), int(want["greedy_ids"][0])])])["logits"]
    np.testing.assert_allclose(got[:-1], want["mtp_logits"], rtol=0, atol=2e-4)


def test_a_gguf_file_in_prisms_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want, rotated = oracle("qwen3_5_dense"), Rotated(open_artifact(DATA / "qwen3_5_dense"))
    widths = sorted({rotated.info(n).shape[-1] for n in rotated.names() if is_rotated(n)})
    finish = gguf.GGUFWriter.write_header_to_file

    def with_keys(self: gguf.GGUFWriter) -> None:
        p = "prism.hadamard."
        self.add_uint32(f"{p}version", 1)
        self.add_uint32(f"{p}block_size", BLOCK)
        self.add_string(f"{p}transform", "normalized-sylvester-walsh-hadamard")
        self.add_string(f"{p}axis", "input-last-dimension")
        self.add_string(f"{p}sign_mode", "explicit")
        self.add_bool(f"{p}gdn_v_grouped", True)
        self.add_array(f"{p}sign_widths", widths)
        self.add_array(f"{p}sign_values", [int(s) for k in widths for s in signs(k)])
        stored = [n for shard in self.tensors for n in shard]
        names = [n for n in stored if any(p in n for p in ROTATED) and not n.startswith("blk.4.")]
        self.add_array(f"{p}weight_names", names)
        self.add_array(f"{p}inverse_weight_names", ["token_embd.weight"])
        finish(self)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_keys)
    monkeypatch.setattr("tests.gguf_writer._qwen35_values", grouped_outputs)
    write_gguf(rotated, tmp_path / "prism.gguf", matrices_in(by_name("f32")))
    r = runner(tmp_path / "prism.gguf")
    logits = r.outputs([part(want["input_ids"])])["logits"]
    np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=2e-4)


ROTATED = ("attn_q.", "attn_k.", "attn_v.", "attn_output.", "attn_qkv.", "attn_gate.", "ssm_out.", "ffn_", "output.w")
_values = gguf_writer._qwen35_values


def grouped_outputs(name: str, x: NDArray[np.float32], c: Mapping[str, Any]) -> NDArray[np.float32]:
    """Prism's converter leaves the columns of ssm_out where they are."""
    values: NDArray[np.float32] = x if name.endswith("out_proj.weight") else _values(name, x, c)
    return values


def test_conversion_keeps_the_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = synthetic._qwen3_5(1024, 2, 1024, 4, 2, 8, vocab=512, key_heads=4) | {"full_attention_interval": 2}
    monkeypatch.setitem(synthetic.CONFIGS, "wide", config)
    for block in (1024, 256):
        monkeypatch.setitem(synthetic.ROTATED, "wide", block)
        source = synthetic.SyntheticArtifact("wide", "t2_g128")
        base = synthetic.SyntheticArtifact("wide")
        plan = make_plan(recipe("bonsai2_27b_ternary"), base, {"ternary": source}, name="wide")
        if block != 1024:
            with pytest.raises(UsageError, match="rotated in blocks of 256, but"):
                to_artifact(plan)
            return
        write_artifact(to_artifact(plan), tmp_path / "wide.ninfer")
        want = runner(source, rows=16, pages_each=1).outputs([part(range(12))])["logits"]
        converted = runner(tmp_path / "wide.ninfer", rows=16, pages_each=1)
        assert [n.op.key for n in converted.graph.nodes].count("hadamard") == 1 + 4 * 2 + 1
        np.testing.assert_array_equal(converted.outputs([part(range(12))])["logits"], want)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hadamard_signs": {"lm_head.weight": [1.0, 0.5] * 32}}, "of 'lm_head.weight' are not all 1 or -1"),
        ({"hadamard_signs": {"lm_head.weight": [1.0] * 60}}, "are 60, which blocks of 16 do not divide"),
        ({"hadamard_signs": {"mtp.fc.weight": [1.0] * 64}}, "name 'mtp.fc.weight', whose input is not rotated"),
        ({"hadamard_block": 24}, "hadamard_block is 24, but must be a power of two"),
    ],
)
def test_signs_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    config = Rotated(open_artifact(DATA / "qwen3_5_dense")).config
    with pytest.raises(ArtifactError, match=message):
        identify(dict(config) | changes)


def test_a_family_that_rotates_nothing_says_so() -> None:
    config = dict(open_artifact(DATA / "llama").config)
    with pytest.raises(ArtifactError, match="which llama does not make"):
        identify(config | {"hadamard_signs": {"lm_head.weight": [1.0] * 64}})
