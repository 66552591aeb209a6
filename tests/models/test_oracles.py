"""The small checkpoints against arrays that transformers computed in float32 from the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.artifacts import open_artifact
from ninfer.formats.quant import by_name
from ninfer.runtime.reference import ReferenceRunner
from tests.checkpoints import DATA, oracle, part, runner
from tests.gguf_writer import matrices_in, write_gguf

# Both sides are float32 over other orders of summation; hidden values reach 10, logits 40.
ATOL = 1e-4
SOURCES = {
    "llama": DATA / "llama",
    "qwen3_5_dense": DATA / "qwen3_5_dense",
    "qwen3_5_dense_hd256": DATA / "qwen3_5_dense_hd256",
    "qwen3_5_dense.gguf": DATA / "qwen3_5_dense.gguf",  # llama.cpp's converter made it
}
GGUFS = ("llama", "qwen3_5_dense_hd256")  # converted by tests/gguf_writer.py
NAMES = (*SOURCES, *(f"{name}-bf16.gguf" for name in GGUFS))


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    paths = dict(SOURCES)
    for name in GGUFS:
        path = paths[f"{name}-bf16.gguf"] = folder / f"{name}.gguf"
        write_gguf(open_artifact(DATA / name), path, matrices_in(by_name("bf16")))
    return paths


def expected(name: str) -> Mapping[str, Any]:
    return oracle(name.removesuffix(".gguf").removesuffix("-bf16"))


@pytest.mark.parametrize("name", NAMES)
def test_layers_and_logits_of_one_forward(name: str, converted: Mapping[str, Path]) -> None:
    want, got = expected(name), dict[int, Any]()
    r = runner(converted[name])

    def keep(node: Any, results: tuple[Any, ...]) -> None:
        if node.layer is not None and results:
            got[node.layer] = results[0]  # the last node of a layer is its output

    r.watch = keep
    logits = r.outputs([part(want["input_ids"])])["logits"]
    assert sorted(got) == list(range(len(want["layer_out"])))
    for i, values in enumerate(want["layer_out"]):
        np.testing.assert_allclose(got[i], values, rtol=0, atol=ATOL, err_msg=f"layer {i}")
    np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_over_two_pages(name: str, converted: Mapping[str, Path]) -> None:
    want = expected(name)
    logits = runner(converted[name]).outputs([part(want["long_ids"])])["logits"]
    np.testing.assert_allclose(logits[-8:], want["long_logits_tail"], rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", NAMES)
def test_prefill_then_single_tokens(name: str, converted: Mapping[str, Path]) -> None:
    want = expected(name)
    ids, n = want["input_ids"], int(want["prefill_len"])
    r = runner(converted[name])
    r.outputs([part(ids[:n])])
    states(r, want, "prefill")
    tokens = [*ids[n:].tolist(), *want["greedy_ids"].tolist()]
    for i, token in enumerate(tokens):
        logits = r.outputs([part([token], n + i)])["logits"]
        np.testing.assert_allclose(logits[0], want["step_logits"][i], rtol=0, atol=ATOL, err_msg=f"position {n + i}")
        if len(ids) - n <= i + 1 < len(tokens):
            assert logits[0].argmax() == tokens[i + 1]
    states(r, want, "end")


def states(r: ReferenceRunner, want: Mapping[str, Any], when: str) -> None:
    """The oracle's states are of layer i: [channels, 4] and [value heads, key dim, value dim]."""
    layers = [int(k.rsplit("_", 1)[1]) for k in want if k.startswith(f"{when}_conv_state")]
    assert layers == [int(k.split(".")[1]) for k in r.states if k.startswith("conv.")]
    for i in layers:
        conv, delta = want[f"{when}_conv_state_{i}"], want[f"{when}_recurrent_state_{i}"]
        np.testing.assert_allclose(r.states[f"conv.{i}"][0], conv[:, 1:].reshape(len(conv), 3), rtol=0, atol=2e-5)
        np.testing.assert_allclose(r.states[f"delta.{i}"][0], delta.swapaxes(-1, -2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_dense", "qwen3_5_dense_hd256"])
@pytest.mark.parametrize("cuts", [[1], [63, 64], [50, 51, 149], [149]], ids=str)
def test_chunks_of_any_size_are_one_prefill(name: str, cuts: list[int]) -> None:
    want = oracle(name)
    ids = want["long_ids"]
    r, logits = runner(SOURCES[name]), []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        logits.append(r.outputs([part(ids[start:end], start)])["logits"])
    np.testing.assert_allclose(np.concatenate(logits)[-8:], want["long_logits_tail"], rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_dense"])
def test_sequences_of_one_step_do_not_meet(name: str) -> None:
    want = oracle(name)
    long, short = want["long_ids"], want["input_ids"]
    r = runner(SOURCES[name])
    r.outputs([part(long[:100], slot=2), part(short[:20], slot=0)])
    both = r.outputs([part(short[20:], 20, slot=0), part(long[100:], 100, slot=2), part(short[:30], slot=3)])["logits"]
    np.testing.assert_allclose(both[:28], want["logits"][20:], rtol=0, atol=ATOL)
    np.testing.assert_allclose(both[28:78][-8:], want["long_logits_tail"], rtol=0, atol=ATOL)
    np.testing.assert_allclose(both[78:], want["logits"][:30], rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_dense"])
def test_a_slot_is_clean_for_the_next_sequence(name: str) -> None:
    want = oracle(name)
    r = runner(SOURCES[name])
    r.outputs([part(want["long_ids"])])
    np.testing.assert_allclose(r.outputs([part(want["input_ids"])])["logits"], want["logits"], rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_dense"])
def test_scores_are_log_probabilities_of_the_targets(name: str) -> None:
    want = oracle(name)
    ids, logits = want["input_ids"], want["logits"].astype(float)
    got = runner(SOURCES[name], "score").outputs([part(ids[:-1])], ids[1:].tolist())["nll"]
    lse = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    np.testing.assert_allclose(got, (logits[np.arange(47), ids[1:]] - lse[:-1]), rtol=0, atol=ATOL)
