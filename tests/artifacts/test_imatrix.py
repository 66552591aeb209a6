"""Conversion with searched scales: importances of a GGUF file reach the columns they are of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.artifacts import Artifact, open_artifact
from ninfer.artifacts.imatrix import read_importance
from ninfer.cli.convert import body
from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.quant import by_name
from ninfer.formats.search import grouped_search
from tests.checkpoints import DATA
from tests.drawn import checkpoint

Arrays = Mapping[str, NDArray[np.float32]]


def write_imatrix(path: Path, sums: Arrays, counts: Arrays, kind: str = "imatrix") -> Path:
    """As llama-imatrix does."""
    out = gguf.GGUFWriter(path, "")
    out.add_string("general.type", kind)
    out.add_array("imatrix.datasets", ["text"])
    out.add_uint32("imatrix.chunk_count", 3)
    out.add_uint32("imatrix.chunk_size", 512)
    for name, x in sums.items():
        out.add_tensor(f"{name}.in_sum2", x)
        out.add_tensor(f"{name}.counts", counts[name])
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def dense_imatrix(path: Path) -> tuple[Path, Arrays]:
    """For qwen3_5_dense: the file, and importances under the checkpoint's names."""
    rng, n = np.random.default_rng(4), np.float32(64)
    names = {"blk.0.attn_qkv.weight": "layers.0.linear_attn.in_proj_qkv",
             "blk.2.ffn_down.weight": "layers.2.mlp.down_proj",
             "blk.1.ssm_out.weight": "layers.1.linear_attn.out_proj",
             "blk.3.attn_q.weight": "layers.3.self_attn.q_proj"}  # fmt: skip
    width = {"blk.2.ffn_down.weight": 128}
    mean = {name: rng.gamma(0.3, 1.0, (1, width.get(name, 64))).astype(np.float32) for name in names}
    want = {f"model.{ours}.weight": mean[name][0] for name, ours in names.items()}
    # value heads 0 1 2 3 of two key heads are stored in the order 0 2 1 3
    heads = want["model.layers.1.linear_attn.out_proj.weight"].reshape(4, 16)
    stored = {**mean, "blk.1.ssm_out.weight": heads[[0, 2, 1, 3]].reshape(1, 64)}
    counts = {name: np.full((1, 1), n, np.float32) for name in names}
    return write_imatrix(path, {name: x * n for name, x in stored.items()}, counts), want


def convert(model: Path, out: Path, *more: str) -> Artifact:
    assert body(["--model", str(model), "--out", str(out), "--verify", *more]) == 0
    return open_artifact(out)


def test_importances_weigh_the_columns_they_were_measured_at(tmp_path: Path) -> None:
    path, importance = dense_imatrix(tmp_path / "imatrix.gguf")
    model, fmt = DATA / "qwen3_5_dense", by_name("q4_g64")
    source = open_artifact(model)
    result = convert(model, tmp_path / "a.ninfer", "--recipe", "q4", "--source", f"imatrix={path}")
    plain = convert(model, tmp_path / "b.ninfer", "--recipe", "q4")
    changed = 0
    for name in source.names():
        if name.startswith("mtp.") or result.info(name).format is not fmt:
            continue
        x, w = source.get(name).f32(), importance.get(name)
        assert np.array_equal(result.get(name).raw, grouped_search(fmt, x, w)), name
        if w is not None:
            loss, before = (float((w * (a.get(name).f32() - x) ** 2).sum()) for a in (result, plain))
            assert loss < before
            changed += 1
    assert changed == len(importance)


def test_each_expert_has_its_own(tmp_path: Path) -> None:
    model, fmt = checkpoint(DATA / "qwen3_5_moe", tmp_path / "moe"), by_name("q4_g64")
    source = open_artifact(model)
    gate_up, down = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
    x = source.get(gate_up).f32()
    experts, rows, k = x.shape
    rng = np.random.default_rng(6)
    mean = rng.gamma(0.3, 1.0, (experts, k)).astype(np.float32)
    counts = np.exp2(rng.integers(0, 4, (experts, 1))).astype(np.float32)  # quotients are exact
    counts[2] = 0  # met no token: every column counts alike
    sums = mean * counts
    mean[2] = 1
    names = ("blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight")
    path = write_imatrix(tmp_path / "i.gguf", dict.fromkeys(names, sums), dict.fromkeys(names, counts))
    result = convert(model, tmp_path / "a.ninfer", "--recipe", "q4", "--source", f"imatrix={path}")
    want = np.stack([fmt.unpack(grouped_search(fmt, x[e], mean[e]), (rows, k)) for e in range(experts)])
    assert np.array_equal(result.get(gate_up).f32(), want)
    y = source.get(down).f32()
    unweighted = fmt.unpack(grouped_search(fmt, y.reshape(-1, y.shape[-1])), (y.shape[0] * y.shape[1], y.shape[2]))
    assert np.array_equal(result.get(down).f32().reshape(unweighted.shape), unweighted)


def test_search_needs_no_importances(tmp_path: Path) -> None:
    model = DATA / "llama"
    result = convert(model, tmp_path / "a.ninfer", "--recipe", "q4q5", "--search")
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        p = result.get(name)
        assert np.array_equal(p.raw, grouped_search(p.format, open_artifact(model).get(name).f32())), name


def test_what_is_not_of_this_model_is_refused(tmp_path: Path) -> None:
    model = DATA / "qwen3_5_dense"
    config = open_artifact(model).config
    ones = {"blk.0.ffn_down.weight": np.ones((1, 128), np.float32)}
    count = {"blk.0.ffn_down.weight": np.ones((1, 1), np.float32)}

    def refused(match: str, path: Path, *more: str) -> None:
        with pytest.raises(UsageError, match=match):
            body(["--model", str(model), "--out", str(tmp_path / "x.ninfer"), "--source", f"imatrix={path}", *more])
        assert not (tmp_path / "x.ninfer").exists()

    other = write_imatrix(tmp_path / "kind.gguf", ones, count, "model")
    refused(
        r"not an importance matrix \(general.type is 'model'\); make one with llama-imatrix", other, "--recipe", "q4"
    )
    wide = write_imatrix(tmp_path / "wide.gguf", {"blk.0.ffn_down.weight": np.ones((1, 256), np.float32)}, count)
    refused("for 1 matrices of 256 columns; the model's are 1 of 128", wide, "--recipe", "q4")
    deep = write_imatrix(tmp_path / "deep.gguf", {"blk.9.ffn_down.weight": np.ones((1, 128), np.float32)},
                         {"blk.9.ffn_down.weight": np.ones((1, 1), np.float32)})  # fmt: skip
    refused("made from another model: .*'blk.9.ffn_down.weight' is of a block beyond the 5", deep, "--recipe", "q4")
    good = write_imatrix(tmp_path / "good.gguf", ones, count)
    refused("bf16 makes no groupwise integers", good, "--recipe", "bf16")
    with pytest.raises(UsageError, match="requires source 'imatrix'; provide --source imatrix=PATH"):
        body(["--model", str(model), "--out", str(tmp_path / "x.ninfer"), "--recipe", "qwen3_8_27b_imatrix"])
    for bad in (np.full((1, 128), np.nan, np.float32), np.full((1, 128), -1, np.float32)):
        path = write_imatrix(tmp_path / "bad.gguf", {"blk.0.ffn_down.weight": bad}, count)
        with pytest.raises(ArtifactError, match="negative or not finite"):
            read_importance(path, config)
