"""Every op on every one of its cases: shapes, effects, refusals; and the trickier formulas against slow versions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from numpy.typing import NDArray

from ninfer.errors import ShapeError
from ninfer.formats.kv import KV_FORMATS
from ninfer.formats.quant import Packed
from ninfer.ir import casework as cw
from ninfer.ir.op import Case, snake
from ninfer.ir.ops import OPS
from ninfer.ir.ops.attention import Attention, KvAppend, Rope, page_views
from ninfer.ir.ops.block import BLOCK_OPS
from ninfer.ir.ops.recurrent import CausalConvSilu, GatedDelta
from ninfer.ir.ops.reject import REJECT_OPS
from ninfer.ir.ops.sample import Sample, adjusted, draw, kept
from ninfer.ir.step import PROMPT_BIT, SAMPLE_PARAMS, USE_BIAS, USE_MASK, USE_PENALTIES
from ninfer.ir.types import Array, TensorType, plain

ALL = tuple(dict.fromkeys((*OPS.ops, *BLOCK_OPS, *REJECT_OPS)))
CASES = [pytest.param(case, id=f"{snake(op.__name__)}-{case.name}") for op in ALL for case in op.cases()]


def copied(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(evolve(a, raw=a.raw.copy()) if isinstance(a, Packed) else a.copy() for a in arrays)


def bits(a: Array) -> bytes:
    return (a.raw if isinstance(a, Packed) else a).tobytes()


@pytest.mark.parametrize("case", CASES)
def test_infer_agrees_with_the_reference(case: Case) -> None:
    types = case.op.infer(case.types)
    results = case.op.reference(copied(case.arrays))
    assert [t.concrete(case.env) for t in types] == [r.shape for r in results]
    for type, result in zip(types, results, strict=True):
        assert not isinstance(result, Packed) and result.dtype == type.dtype.numpy
        assert np.isfinite(result).all()


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_arrays_of_its_types(case: Case) -> None:
    assert [t.concrete(case.env) for t in case.types] == [a.shape for a in case.arrays]
    for type, array in zip(case.types, case.arrays, strict=True):
        assert (array.format is type.fmt) if isinstance(array, Packed) else (array.dtype == type.dtype.numpy)


@pytest.mark.parametrize("case", CASES)
def test_only_mutated_arguments_change(case: Case) -> None:
    arrays = copied(case.arrays)
    first = case.op.reference(arrays)
    for i, (before, after) in enumerate(zip(case.arrays, arrays, strict=True)):
        assert (bits(before) != bits(after)) == (i in case.op.mutates), f"argument {i}"
    again = case.op.reference(copied(case.arrays))
    assert [bits(a) for a in first] == [bits(a) for a in again]


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_rank_is_refused_by_name(case: Case) -> None:
    for i, type in enumerate(case.types):
        wrong = list(case.types)
        wrong[i] = evolve(type, shape=(*type.shape, 3))
        with pytest.raises(ShapeError, match=f"^{case.op.key}: "):
            case.op.infer(tuple(wrong))


@pytest.mark.parametrize("op", ALL, ids=lambda op: snake(op.__name__))
def test_work_is_positive(op: Any) -> None:
    for case in op.cases():
        assert case.op.work(case.types, case.env).nbytes > 0


def test_an_unknown_op_is_refused_with_the_list() -> None:
    with pytest.raises(ShapeError, match=r"no op is called 'softmax'; there are embed, "):
        OPS.by_key("softmax")
    assert OPS.by_key("gated_delta") is GatedDelta


# Attention


def one_sequence(fmt: Any, kv_heads: int, d: int, total: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A cache of `total` tokens in shuffled pages, its table, and the keys and values as they were stored."""
    rng = np.random.default_rng(5)
    pages = -(-total // 64)
    table = rng.permutation(pages + 2)[:pages].astype(np.int32)[None]
    cache = np.zeros((pages + 2, fmt.page_bytes(kv_heads, d)), np.uint8)
    x = rng.standard_normal((2, total, kv_heads, d)).astype(np.float32)
    views = page_views(cache, fmt, kv_heads, d)
    for t in range(total):
        for view, y in zip(views, x, strict=True):
            view.store((table[0, t // 64], slice(None), t % 64), y[t])
    k, v = (side.decode(*side.encode(y)) for side, y in zip((fmt.k, fmt.v), x, strict=True))
    if fmt.k.rotate:
        k = (k.astype(float) @ hadamard_matrix(d)).astype(np.float32)
    return cache, table, k, v


def hadamard_matrix(d: int) -> np.ndarray:
    h: NDArray[np.float64] = np.ones((1, 1))
    while len(h) < d:
        h = np.block([[h, h], [h, -h]])
    scaled: NDArray[np.float64] = h / np.sqrt(d)
    return scaled


@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("fmt", KV_FORMATS, ids=str)
def test_attention_is_the_dense_formula(fmt: Any, window: int | None) -> None:
    heads, kv_heads, d, total, n = 6, 2, 64, 150, 90
    cache, table, k, v = one_sequence(fmt, kv_heads, d, total)
    q = np.random.default_rng(6).standard_normal((n, heads * d)).astype(np.float32)
    step = [np.array(x, np.int32) for x in ([0] * n, [0], [0], [total - n])]
    (got,) = map(plain, Attention(fmt, heads, kv_heads, d, 0.3, window).reference((q, cache, table, *step)))
    for t in range(n):
        last = total - n + t
        for h in range(heads):
            keys = range(max(0, last + 1 - (window or 1000)), last + 1)
            scores = [0.3 * float(q[t, h * d : (h + 1) * d].astype(float) @ k[s, h // 3].astype(float)) for s in keys]
            p = np.exp(np.array(scores) - max(scores))
            want = sum(w * v[s, h // 3].astype(float) for w, s in zip(p / p.sum(), keys, strict=True))
            # sums of up to 150 float32 products, queries that are rotated in float32
            np.testing.assert_allclose(got[t, h * d : (h + 1) * d], want, rtol=2e-5, atol=4e-6)


@pytest.mark.parametrize("fmt", KV_FORMATS, ids=str)
def test_what_is_appended_is_found_at_its_position(fmt: Any) -> None:
    g, d = 2, 64
    rng = np.random.default_rng(7)
    k, v = (rng.standard_normal((5, g * d)).astype(np.float32) for _ in range(2))
    cache = np.zeros((6, fmt.page_bytes(g, d)), np.uint8)
    table = np.array([[5, -1], [3, 1]], np.int32)
    # sequence 0: rows 0-2 in slot 1 across the page border; sequence 1: rows 3-4 at the start of slot 0
    step = [np.array(x, np.int32) for x in ([0, 0, 0, 1, 1], [0, 3], [1, 0], [62, 0])]
    KvAppend(fmt, g, d).reference((k, v, cache, table, *step))
    places = [(3, 62), (3, 63), (1, 0), (5, 0), (5, 1)]
    starts = fmt.plane_offsets(g, d)
    for t, (page, at) in enumerate(places):
        for h in range(g):
            part = slice(h * d, (h + 1) * d)
            for start, raw in zip(starts, (*fmt.k.encode(k[t, part]), *fmt.v.encode(v[t, part])), strict=True):
                offset = start + (h * 64 + at) * len(raw)
                np.testing.assert_array_equal(cache[page, offset : offset + len(raw)], raw)
    k_view, v_view = page_views(cache, fmt, g, d)
    assert all(np.count_nonzero(x.codes.any(axis=-1)) == 5 * g for x in (k_view, v_view))


def test_rope_rotates_pairs_as_complex_numbers() -> None:
    d, f = 12, 4
    x = np.random.default_rng(8).standard_normal((3, 2 * d)).astype(np.float32)
    positions, freqs = np.array([0, 3, 50], np.int32), np.array([1.0, 0.3, 0.1, 0.01], np.float32)
    (got,) = map(plain, Rope(d, mscale=1.5).reference((x, positions, freqs)))
    heads, turned = x.reshape(3, 2, d).astype(float), got.reshape(3, 2, d)
    z = heads[..., :f] + 1j * heads[..., f : 2 * f]
    z = 1.5 * z * np.exp(1j * positions[:, None, None] * freqs.astype(float))
    np.testing.assert_allclose(turned[..., :f], z.real, rtol=0, atol=2e-6)  # float32 sine and cosine
    np.testing.assert_allclose(turned[..., f : 2 * f], z.imag, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(turned[..., 2 * f :], x.reshape(3, 2, d)[..., 2 * f :])


# Recurrence


def seq(kv_len: int, n: int, slot: int = 0) -> tuple[np.ndarray, ...]:
    return tuple(np.array([x], np.int32) for x in (0, n, slot, kv_len))


@pytest.mark.parametrize("starts", [True, False])
def test_convolution_is_numpys(starts: bool) -> None:
    rng = np.random.default_rng(9)
    x, w = rng.standard_normal((20, 7)).astype(np.float32), rng.standard_normal((7, 4)).astype(np.float32)
    state = rng.standard_normal((2, 7, 3)).astype(np.float32)
    past = np.zeros((3, 7)) if starts else state[1].T.astype(float)
    (got,) = map(plain, CausalConvSilu().reference((x, w, state, *seq(0 if starts else 9, 20, slot=1))))
    for c in range(7):
        line = np.concatenate([past[:, c], x[:, c]])
        y = np.convolve(line, w[c, ::-1].astype(float), "valid")
        np.testing.assert_allclose(got[:, c], y / (1 + np.exp(-y)), rtol=2e-5, atol=1e-6)  # float32 sums of four
    np.testing.assert_array_equal(state[1], x[-3:].T)


def test_convolution_keeps_old_columns_when_few_come() -> None:
    state = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    x, w = np.array([[10, 20]], np.float32), np.ones((2, 4), np.float32)
    CausalConvSilu().reference((x, w, state, *seq(5, 1)))
    np.testing.assert_array_equal(state[0], [[1, 2, 10], [4, 5, 20]])


def chunked_delta(q: Any, k: Any, v: Any, g: Any, beta: Any, s0: Any, size: int) -> tuple[Any, Any]:
    """The chunked form of one head in float64: S is [k, v] here. Yang et al. 2024."""
    out = []
    for at in range(0, len(q), size):
        qc, kc, vc, gc, bc = (x[at : at + size] for x in (q, k, v, g, beta))
        gamma = np.cumsum(gc)
        n = len(gamma)
        lower = np.tril(np.ones((n, n), bool))
        decay = np.exp(np.where(lower, gamma[:, None] - gamma[None], -np.inf))
        m = np.eye(n) + np.tril((bc[:, None] * kc) @ kc.T * decay, -1)
        new = np.linalg.solve(m, bc[:, None] * vc) - np.linalg.solve(m, bc[:, None] * np.exp(gamma)[:, None] * kc) @ s0
        out.append(np.exp(gamma)[:, None] * qc @ s0 + (qc @ kc.T * decay) @ new)
        s0 = np.exp(gamma[-1]) * s0 + (np.exp(gamma[-1] - gamma)[:, None] * kc).T @ new
    return np.concatenate(out), s0


@pytest.mark.parametrize("starts", [True, False])
def test_delta_rule_is_the_chunked_form(starts: bool) -> None:
    hk, hv, dk, dv, n = 2, 6, 8, 12, 150
    rng = np.random.default_rng(10)
    u = rng.standard_normal((n, 2 * hk * dk + hv * dv)).astype(np.float32)
    a, b = (rng.standard_normal((n, hv)).astype(np.float32) for _ in range(2))
    a_log, dt_bias = (rng.standard_normal(hv).astype(np.float32) - 1 for _ in range(2))
    state = rng.standard_normal((3, hv, dv, dk)).astype(np.float32)
    before = state.copy()
    (got,) = map(
        plain,
        GatedDelta(hk, hv, dk, dv).reference((u, a, b, a_log, dt_bias, state, *seq(0 if starts else 4, n, slot=2))),
    )
    w = u.astype(float)
    q, k = (w[:, i * hk * dk : (i + 1) * hk * dk].reshape(n, hk, dk) for i in (0, 1))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    v = w[:, 2 * hk * dk :].reshape(n, hv, dv)
    g = -np.exp(a_log.astype(float)) * np.log1p(np.exp(a + dt_bias.astype(float)))
    for j in range(hv):
        s0 = np.zeros((dk, dv)) if starts else before[2, j].T.astype(float)
        beta = 1 / (1 + np.exp(-b[:, j].astype(float)))
        out, s1 = chunked_delta(q[:, j // 3] * dk**-0.5, k[:, j // 3], v[:, j], g[:, j], beta, s0, 64)
        # 150 steps of a contracting recurrence in float32
        np.testing.assert_allclose(got.reshape(n, hv, dv)[:, j], out, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(state[2, j], s1.T, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(state[:2], before[:2])


# Sampling


def params(**values: Any) -> Any:
    p = np.zeros((), SAMPLE_PARAMS.numpy)
    p["temperature"], p["top_p"], p["repetition_penalty"] = 1, 1, 1
    for name, value in values.items():
        p[name] = value
    return p


def brute_kept(z: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    order = sorted(range(len(z)), key=lambda t: (-z[t], t))
    if top_k > 0:
        order = order[:top_k]
    weights = {t: float(np.exp(z[t] - z[order[0]])) for t in order}
    mass, total = 0.0, sum(weights.values())
    chosen: list[int] = []
    for t in order:
        if chosen and mass >= top_p * total:
            break
        chosen.append(t)
        mass += weights[t]
    return {t for t in chosen if weights[t] >= min_p}


def test_filters_keep_the_sets_of_the_definition() -> None:
    rng = np.random.default_rng(11)
    for trial in range(300):
        z = (rng.integers(-6, 7, 12) / 2).astype(np.float32)  # ties are common
        top_k, top_p, min_p = int(rng.integers(0, 14)), float(rng.choice([1, 0.97, 0.63, 0.31])), float(
            rng.choice([0, 0.04, 0.3])
        )  # fmt: skip
        got = set(np.flatnonzero(kept(z, params(top_k=top_k, top_p=top_p, min_p=min_p))).tolist())
        assert got == brute_kept(z.tolist(), top_k, top_p, min_p), f"trial {trial}: {z} {top_k} {top_p} {min_p}"


def test_four_tokens_by_hand() -> None:
    z = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    assert np.flatnonzero(kept(z, params(top_k=2))).tolist() == [1, 3]
    assert np.flatnonzero(kept(z, params(top_p=0.6))).tolist() == [1, 3]
    assert np.flatnonzero(kept(z, params(top_p=0.75))).tolist() == [1, 2, 3]
    assert np.flatnonzero(kept(z, params(top_p=0.0))).tolist() == [1]
    assert np.flatnonzero(kept(z, params(min_p=0.6))).tolist() == [1, 3]
    assert np.flatnonzero(kept(z, params(top_k=3, top_p=0.7))).tolist() == [1, 3]  # 0.7 of the 0.9 that top_k left


def test_penalties_bias_and_mask_by_hand() -> None:
    z = np.array([2.0, -1.0, 0.5, 3.0, 1.0, 0.0], np.float32)
    counts = np.array([0, 2, PROMPT_BIT, PROMPT_BIT | 1, 0, 0], np.int32)
    bias, mask = np.array([0, 0, 0, 0, 5, 0], np.float32), np.array([0b011111], np.uint32)
    p = params(flags=USE_PENALTIES, repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.1)
    np.testing.assert_allclose(
        adjusted(z, p, counts, bias, mask), [2, -2 - 0.2 - 0.5, 0.25, 1.5 - 0.6, 1, 0], rtol=1e-6
    )
    p = params(flags=USE_BIAS | USE_MASK)
    np.testing.assert_array_equal(adjusted(z, p, counts, bias, mask), [2, -1, 0.5, 3, 6, -np.inf])
    np.testing.assert_array_equal(adjusted(z, params(), counts, bias, mask), z)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str)
def test_draws_follow_the_distribution(settings: dict[str, float]) -> None:
    z = np.log(np.array([0.05, 0.3, 0.25, 0.02, 0.2, 0.18], np.float32))
    p = params(**settings)
    n, counts = 6000, np.zeros(6)
    for seed in range(n // 60):
        for position in range(60):
            p["seed"], p["position"] = seed * 7919 + 1, position
            counts[draw(z, p)] += 1
    scaled = (z / (settings.get("temperature") or 1)).astype(np.float32)
    weights = np.exp(scaled.astype(float)) * kept(scaled, p)
    expected = n * weights / weights.sum()
    assert not counts[expected == 0].any()
    alive = expected > 0
    chi2 = ((counts - expected)[alive] ** 2 / expected[alive]).sum()
    assert chi2 < 25.7, f"{counts} against {expected}"  # 99.99 % of chi-square with 5 degrees of freedom


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    z = np.zeros(1000, np.float32)
    a = [draw(z, params(seed=1, position=i)) for i in range(50)]
    assert a == [draw(z, params(seed=1, position=i, slot=5, mask_row=3)) for i in range(50)]
    assert a != [draw(z, params(seed=2, position=i)) for i in range(50)] and len(set(a)) > 40


def test_logits_that_are_not_finite_give_no_token() -> None:
    case = next(iter(Sample.cases()))
    logits, packed, *rest = copied(case.arrays)
    assert not isinstance(logits, Packed)
    logits[2, 17], logits[4, 989], logits[5, 995] = np.nan, np.inf, np.nan  # the last is past the domain of 990
    tokens, _, _ = case.op.reference((logits, packed, *rest))
    assert (np.flatnonzero(np.asarray(tokens) < 0) == [2, 4]).all()


def test_log_probabilities_are_of_the_raw_distribution() -> None:
    case = next(iter(Sample.cases()))
    tokens, logprobs, top = map(np.asarray, case.op.reference(copied(case.arrays)))
    logits = np.asarray(case.arrays[0])[:, :990].astype(float)
    for i in (0, 2, 8):  # the rows that ask; 8 has penalties, bias and mask too
        p = np.log(np.exp(logits[i]) / np.exp(logits[i]).sum())
        np.testing.assert_allclose(logprobs[i, 0], p[tokens[i]], rtol=1e-5)
        assert top[i].tolist() == np.argsort(-p, kind="stable")[:20].tolist()
        np.testing.assert_allclose(logprobs[i, 1:], np.sort(p)[::-1][:20], rtol=1e-5)


def test_casework_types_its_arrays() -> None:
    type, array = cw.rows(3, 3, 8)
    assert type == TensorType((3, 8)) and array.shape == (3, 8)
