"""Searched scales against the method stated again, a group at a time, and on trained weights."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from ninfer.artifacts import open_artifact
from ninfer.errors import ArtifactError
from ninfer.formats.quant import QuantFormat, by_name
from ninfer.formats.search import grouped_search
from tests.checkpoints import DATA

FORMATS = ("q4_g64", "q5_g64", "q6_g64", "q8_g32")
f32, f16 = np.float32, np.float16


def decoded(fmt: QuantFormat, raw: NDArray[np.uint8], x: NDArray[np.float32]) -> NDArray[np.float64]:
    fmt.check(raw, x.shape)  # no illegal word, no scale of 0 with codes
    return fmt.unpack(raw, x.shape).astype(np.float64)


def losses(
    fmt: QuantFormat, x: NDArray[np.float32], got: NDArray[np.float64], w: ArrayLike = 1.0
) -> NDArray[np.float64]:
    off = (x - got) ** 2 * np.asarray(w)
    pad = fmt.padded_k(x.shape[1]) - x.shape[1]
    loss: NDArray[np.float64] = np.pad(off, ((0, 0), (0, pad))).reshape(-1, fmt.block).sum(axis=1)
    return loss


def best_loss(x: NDArray[np.float32], w: NDArray[np.float32], low: int, high: int, negative: bool) -> float:
    """Over the candidates of one group, in the order of the method."""
    top = np.abs(x).max()
    if top == 0:
        return 0.0
    reference = f16(f32(top / f32(high))) or f16(2.0**-24)

    def codes(s: np.float16) -> NDArray[np.float64]:
        inverse = f32(1) / f32(s)
        return np.array([min(max(int(np.rint(f32(v * inverse))), low), high) for v in x], np.float64)

    def loss(s: np.float16) -> float:
        return float((w.astype(np.float64) * (x.astype(np.float64) - float(s) * codes(s)) ** 2).sum())

    def fit(s: np.float16) -> np.float16:
        q = codes(s)
        below = (w * q * q).sum()
        return f16((w * q * x.astype(np.float64)).sum() / below) if below else f16(0)

    def around(s: np.float16) -> list[np.float16]:
        return [s, np.nextafter(s, f16(np.inf)), np.nextafter(s, f16(-np.inf))]

    def allowed(scales: list[np.float16]) -> list[np.float16]:
        return [s for s in scales if np.isfinite(s) and s != 0 and (negative or s > 0)]

    extreme = x[np.abs(x).argmax()]
    scales = [f16(f32(end * f32(0.70 + 0.02 * i))) for end in (top / f32(high), extreme / f32(low)) for i in range(25)]
    scales += [f16(f32(reference) * f32(p)) for p in (0.25, 0.5, 2)] + around(reference) + around(fit(reference))
    best = min(allowed([reference, *scales]), key=loss)
    return min(loss(s) for s in allowed([best, *around(fit(best))]))


@pytest.mark.parametrize("negative", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_the_best_candidate_of_the_method_is_found(name: str, negative: bool) -> None:
    fmt, rng = by_name(name), np.random.default_rng(3)
    x = rng.standard_normal((3, 200)).astype(f32)
    x[0, :64], x[1, 70], x[1, :9], x[2] = 0, 9.0, -x[1, :9], x[2] * f32(1e-7)  # zeros, an outlier, tiny values
    w = rng.gamma(1.0, 1.0, 200).astype(f32)
    got = losses(fmt, x, decoded(fmt, grouped_search(fmt, x, w, negative_scales=negative), x), w)
    low, high = {"q4_g64": (-8, 7), "q5_g64": (-16, 15), "q6_g64": (-32, 31), "q8_g32": (-127, 127)}[name]
    pad = ((0, 0), (0, fmt.padded_k(200) - 200))
    groups = np.pad(x, pad).reshape(-1, fmt.block), np.tile(np.pad(w, pad[1:]), 3).reshape(-1, fmt.block)
    want = np.array([best_loss(a, b, low, high, negative) for a, b in zip(*groups, strict=True)])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-30)  # float32 sums choose among nearly equal candidates


@pytest.mark.parametrize("name", FORMATS)
def test_trained_weights_lose_less_than_with_the_largest_values_scale(name: str) -> None:
    fmt = by_name(name)
    x = open_artifact(DATA / "tiny-qwen35.gguf").get("model.layers.3.mlp.down_proj.weight").f32()[:128]
    w = np.random.default_rng(5).gamma(0.3, 1.0, (x.shape[1],)).astype(f32)
    reference = decoded(fmt, fmt.pack(x), x)
    plain, weighted = (decoded(fmt, grouped_search(fmt, x, i), x) for i in (None, w))
    positive = decoded(fmt, grouped_search(fmt, x, negative_scales=False), x)
    before, after = losses(fmt, x, reference), losses(fmt, x, plain)
    assert (after <= before).all() and after.sum() < 0.95 * before.sum()
    assert (losses(fmt, x, positive) <= before).all() and after.sum() <= losses(fmt, x, positive).sum()
    assert losses(fmt, x, weighted, w).sum() < losses(fmt, x, plain, w).sum() < losses(fmt, x, reference, w).sum()


def test_rows_do_not_depend_on_what_is_encoded_with_them() -> None:
    fmt, x = by_name("q4_g64"), np.random.default_rng(1).standard_normal((700, 128)).astype(f32)
    w = np.random.default_rng(2).random((700, 128)).astype(f32)
    whole = grouped_search(fmt, x, w)
    assert np.array_equal(fmt.slice_rows(whole, x.shape, 401, 5), grouped_search(fmt, x[401:406], w[401:406]))


@pytest.mark.parametrize("name", ["t2_g128", "q4_0", "bf16"])
def test_formats_without_an_encoder_of_groups_are_refused(name: str) -> None:
    with pytest.raises(ArtifactError, match=f"{name} has no scales to search for"):
        grouped_search(by_name(name), np.ones((2, 128), f32))
