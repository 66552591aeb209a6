"""Models with experts against arrays that transformers computed in float32 from the same weights.

Their weights are drawn anew (tests/drawn.py), and of wide arrays some columns are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.artifacts import open_artifact
from ninfer.cli.convert import main as convert
from ninfer.config import EngineConfig
from ninfer.devices.cpu import CpuExecutable
from ninfer.formats.quant import by_name
from ninfer.ir.ops.experts import PickExperts
from ninfer.ir.ops.join import JoinNorms
from ninfer.models.family import Rounds
from ninfer.runtime import load as loading
from tests.checkpoints import DATA, oracle, part, runner
from tests.drawn import STATE_STEP, checkpoint, kept
from tests.gguf_writer import matrices_in, write_gemma4_gguf, write_gguf

# float32 sums in another order. Gemma's own reference is 9e-5 from a computation in float64.
ATOL = {"qwen3_5_moe": 1e-4, "qwen3_next": 1e-4, "gemma4_moe": 3e-4, "gemma4_moe_hd512": 3e-4}
NAMES = tuple(ATOL)
FILES = (*NAMES, *(f"{name}.gguf" for name in NAMES), *(f"{name}.ninfer" for name in NAMES))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("drawn")
    found = {}
    for name in NAMES:
        found[name] = checkpoint(DATA / name, folder / name)
        found[f"{name}.gguf"] = folder / f"{name}.gguf"
        converted = found[f"{name}.ninfer"] = folder / f"{name}.ninfer"
        arguments = ["--model", str(found[name]), "--recipe", "bf16", "--name", name, "--out", str(converted)]
        assert convert(arguments) == 0
        write = write_gemma4_gguf if name.startswith("gemma4") else write_gguf
        write(open_artifact(found[name]), found[f"{name}.gguf"], matrices_in(by_name("bf16")))
    return found


def reference(name: str) -> tuple[Mapping[str, Any], float]:
    name = name.removesuffix(".gguf").removesuffix(".ninfer")
    return oracle(name), ATOL[name]


@pytest.mark.parametrize("name", FILES)
def test_layers_experts_and_logits_of_one_forward(name: str, models: Mapping[str, Path]) -> None:
    want, atol = reference(name)
    layers, routes = dict[int, Any](), dict[int, Any]()
    r = runner(models[name])

    def keep(node: Any, results: tuple[Any, ...]) -> None:
        if node.layer is not None and results:
            layers[node.layer] = results[0]
            if isinstance(node.op, PickExperts):
                routes[node.layer] = np.sort(results[0], axis=1)

    r.watch = keep
    logits = r.outputs([part(want["input_ids"])])["logits"]
    assert sorted(layers) == list(range(len(want["layer_out"])))
    for i, values in enumerate(want["layer_out"]):
        np.testing.assert_allclose(kept("layer_out", layers[i]), values, rtol=0, atol=atol, err_msg=f"layer {i}")
        np.testing.assert_array_equal(routes[i], want[f"route_{i}"], err_msg=f"experts of layer {i}")
    np.testing.assert_allclose(kept("logits", logits), want["logits"], rtol=0, atol=atol)


@pytest.mark.parametrize("name", FILES)
def test_prefill_then_single_tokens(name: str, models: Mapping[str, Path]) -> None:
    want, atol = reference(name)
    ids, n = want["input_ids"], int(want["prefill_len"])
    r = runner(models[name])
    r.outputs([part(ids[:n])])
    states(r, want, "prefill")
    tokens = [*ids[n:].tolist(), *want["greedy_ids"].tolist()]
    for i, token in enumerate(tokens):
        logits = r.outputs([part([token], n + i)])["logits"]
        np.testing.assert_allclose(kept("step_logits", logits[0]), want["step_logits"][i], rtol=0, atol=atol)
        if len(ids) - n <= i + 1 < len(tokens):
            assert logits[0].argmax() == tokens[i + 1]
    states(r, want, "end")


def states(r: Any, want: Mapping[str, Any], when: str) -> None:
    """Every so many values of a state: [channels, 4] of the convolution, [value heads, key dim, value dim]."""
    for key in (k for k in want if k.startswith(f"{when}_") and "_state_" in k):
        i = int(key.rsplit("_", 1)[1])
        if "conv" in key:
            past = r.states[f"conv.{i}"][0]
            got = np.concatenate([np.full((len(past), 1), np.nan, np.float32), past], axis=1).reshape(-1)[::STATE_STEP]
            known = ~np.isnan(got)  # the oldest column is of no use to the next step
            np.testing.assert_allclose(got[known], want[key][known], rtol=0, atol=2e-5, err_msg=key)
        else:
            got = r.states[f"delta.{i}"][0].swapaxes(-1, -2).reshape(-1)[::STATE_STEP]
            np.testing.assert_allclose(got, want[key], rtol=0, atol=1e-5, err_msg=key)


def test_weights_of_gemmas_router_are_those_of_its_description(models: Mapping[str, Path]) -> None:
    """A factor common to a row's weights vanishes in the norm that follows, so logits say nothing of it."""
    folder, seen = models["gemma4_moe"], list[Any]()
    r = runner(folder)
    hidden: list[Any] = []

    def keep(node: Any, results: tuple[Any, ...]) -> None:
        if isinstance(node.op, JoinNorms) and node.layer == 0:
            hidden.append(results[0])  # the residual after attention comes first
        if isinstance(node.op, PickExperts) and node.layer == 0:
            seen.extend(results)

    r.watch = keep
    r.outputs([part(oracle("gemma4_moe")["input_ids"])])
    w = {
        n: open_artifact(folder).get(f"model.layers.0.router.{n}").f32()
        for n in ("proj.weight", "scale", "per_expert_scale")
    }
    x = hidden[0].astype(float)
    read = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w["scale"] * 64**-0.5
    scores = np.exp(read @ w["proj.weight"].T)
    p = scores / scores.sum(-1, keepdims=True)
    ids, weights = seen
    picked = np.take_along_axis(p, ids, axis=1)
    want = picked / picked.sum(-1, keepdims=True) * w["per_expert_scale"][ids]
    np.testing.assert_allclose(weights, want, rtol=2e-5)


@pytest.mark.parametrize("cuts", [[], [1], [50, 51, 149]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_any_size_are_one_prefill(name: str, cuts: list[int], models: Mapping[str, Path]) -> None:
    want, atol = reference(name)
    ids, r = want["long_ids"], runner(models[name])
    parts = [r.outputs([part(ids[a:b], a)])["logits"] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    got = kept("long_logits_tail", np.concatenate(parts)[-8:])
    np.testing.assert_allclose(got, want["long_logits_tail"], rtol=0, atol=atol)


@pytest.mark.parametrize("name", FILES)
def test_compiled_prefill_and_steps(name: str, models: Mapping[str, Path]) -> None:
    """Plans of this CPU's kernels."""
    want, atol = reference(name)
    ids, n = want["input_ids"], int(want["prefill_len"])
    config = EngineConfig(model=str(models[name]), max_context=256, kv_dtype="f32", device="cpu", prefill_chunk=256)
    scorer = loading.load_scorer(config, "logits", tokenizer_needed=False)[0]
    assert isinstance(scorer.executable, CpuExecutable)
    scorer.executable.memory.write_state("page_table", (0, slice(None)), np.arange(4, dtype=np.int32))

    def logits(tokens: Any, kv_len: int = 0) -> Any:
        return np.array(scorer([part(tokens, kv_len)])["logits"])

    np.testing.assert_allclose(kept("logits", logits(ids)), want["logits"], rtol=0, atol=atol)
    tail = kept("long_logits_tail", logits(want["long_ids"])[-8:])
    np.testing.assert_allclose(tail, want["long_logits_tail"], rtol=0, atol=atol)
    logits(ids[:n])
    for i, token in enumerate([*ids[n:].tolist(), *want["greedy_ids"].tolist()]):
        got = kept("step_logits", logits([token], n + i)[0])
        np.testing.assert_allclose(got, want["step_logits"][i], rtol=0, atol=atol, err_msg=f"position {n + i}")


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next", "qwen3_5_moe.gguf"])
def test_the_mtp_block_is_its_oracle(name: str, models: Mapping[str, Path]) -> None:
    want, atol = reference(name)
    ids, rounds = want["input_ids"].tolist(), Rounds(hidden_rows=160, journal_rows=8)
    target = runner(models[name], rounds=rounds)
    mtp = runner(models[name], "draft_logits", rounds=rounds, share=target)
    target.outputs([part(ids)])
    got = mtp.outputs([part([*ids[1:], int(want["greedy_ids"][0])])])
    np.testing.assert_allclose(kept("mtp_hidden", got["hidden"][:-1]), want["mtp_hidden"], rtol=0, atol=atol)
    np.testing.assert_allclose(kept("mtp_logits", got["logits"][:-1]), want["mtp_logits"], rtol=0, atol=atol)
    drafts = [got["logits"][-1]]
    for s in range(3):
        drafts.append(mtp.outputs([part([int(drafts[-1].argmax())], 48 + s)])["logits"][0])
    assert [int(d.argmax()) for d in drafts] == want["mtp_draft_ids"].tolist()
    np.testing.assert_allclose(kept("mtp_draft_logits", np.array(drafts)), want["mtp_draft_logits"], rtol=0, atol=atol)
