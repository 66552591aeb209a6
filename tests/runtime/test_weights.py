"""From stored parameters to a graph's weights: views, row selections and stacks in every format."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ninfer.artifacts import Artifact, Parameter
from ninfer.errors import ArtifactError
from ninfer.formats.quant import FORMATS, Packed, QuantFormat, by_name
from ninfer.ir.graph import Graph, Rows, WeightSpec
from ninfer.ir.types import TensorType
from ninfer.runtime.weights import bind_weights

N, K = 12, 512
PACKABLE = [f for f in FORMATS if f.can_pack]


def store(**arrays: tuple[QuantFormat, Any]) -> tuple[Artifact, list[str]]:
    """An artifact of packed arrays, and the names that were asked of it."""
    asked: list[str] = []

    def get(name: str) -> Parameter:
        asked.append(name)
        fmt, x = arrays[name]
        return Parameter(name, x.shape, fmt, fmt.pack(x.reshape(-1, x.shape[-1])))

    return cast(Artifact, SimpleNamespace(get=get)), asked


def matrix(seed: int = 0, n: int = N) -> Any:
    return (np.random.default_rng(seed).standard_normal((n, K)) / 8).astype(np.float32)


def bind(artifact: Artifact, shape: tuple[int, ...], fmt: QuantFormat | None, *pieces: Rows) -> Any:
    g = Graph()
    g.weight("w", TensorType(shape, fmt=fmt), WeightSpec(pieces))
    return bind_weights(g, artifact)["w"]


@pytest.mark.parametrize("fmt", PACKABLE, ids=str)
def test_a_whole_parameter_is_not_copied(fmt: QuantFormat) -> None:
    raw = fmt.pack(matrix())
    artifact = cast(Artifact, SimpleNamespace(get=lambda name: Parameter(name, (N, K), fmt, raw)))
    w = bind(artifact, (N, K), fmt, Rows("a"))
    assert isinstance(w, Packed) and np.shares_memory(w.raw, raw) and w.format is fmt and w.shape == (N, K)


@pytest.mark.parametrize("fmt", PACKABLE, ids=str)
@pytest.mark.parametrize(
    ("rows", "index"),
    [
        (Rows("a", 2, 3), [2, 3, 4]),
        (Rows("a", 9), [9, 10, 11]),
        (Rows("a", 1, 2, 4), [1, 2, 5, 6, 9, 10]),
        (Rows("a", 2, 1, 3), [2, 5, 8, 11]),
    ],
    ids=str,
)
def test_rows_are_selected_by_bytes(fmt: QuantFormat, rows: Rows, index: list[int]) -> None:
    artifact, _ = store(a=(fmt, matrix()))
    whole = fmt.unpack(fmt.pack(matrix()), (N, K))
    w = bind(artifact, (len(index), K), fmt, rows)
    np.testing.assert_array_equal(w.f32(), whole[index])


@pytest.mark.parametrize("fmt", PACKABLE, ids=str)
def test_pieces_are_stacked(fmt: QuantFormat) -> None:
    artifact, asked = store(a=(fmt, matrix(1)), b=(fmt, matrix(2, 5)))
    w = bind(artifact, (10, K), fmt, Rows("a", 0, 2), Rows("a", 3, 1, 4), Rows("b"))
    a, b = (fmt.unpack(fmt.pack(x), x.shape) for x in (matrix(1), matrix(2, 5)))
    np.testing.assert_array_equal(w.f32(), np.concatenate([a[:2], a[[3, 7, 11]], b]))
    assert asked == ["a", "b"], "a parameter whose pieces follow each other is read once"


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_vectors_are_decoded(name: str) -> None:
    fmt, x = by_name(name), np.arange(6, dtype=np.float32)
    for shape in ((6,), (1, 6)):
        artifact, _ = store(v=(fmt, x.reshape(shape)))
        got = bind(artifact, (6,), None, Rows("v"))
        assert got.dtype == np.float32 and got.shape == (6,)
        np.testing.assert_array_equal(got, x)
    artifact, _ = store(v=(fmt, x.reshape(3, 1, 2)))
    np.testing.assert_array_equal(bind(artifact, (3, 2), None, Rows("v")), x.reshape(3, 2))


@pytest.mark.parametrize(
    ("shape", "fmt", "rows", "message"),
    [
        ((N, K), "f16", Rows("a"), r"tensor 'a' is q8_0 \[12, 512\], but f16\[12, 512\] is expected"),
        ((N + 1, K), "q8_0", Rows("a"), r"weight 'w' has shape \[12, 512\], but q8_0\[13, 512\] is expected"),
        ((4, K), "q8_0", Rows("a", 10, 4), r"tensor 'a' has 12 rows, too few"),
        ((8, K), "q8_0", Rows("a", 4, 4, 5), r"tensor 'a' has 12 rows, which do not divide"),
        ((N,), None, Rows("a"), r"tensor 'a' has shape \[12, 512\], but f32\[12\] is expected"),
    ],
)
def test_what_does_not_fit_is_named(shape: Any, fmt: str | None, rows: Rows, message: str) -> None:
    artifact, _ = store(a=(by_name("q8_0"), matrix()))
    with pytest.raises(ArtifactError, match=message):
        bind(artifact, shape, None if fmt is None else by_name(fmt), rows)


def test_progress_counts_weights() -> None:
    artifact, _ = store(a=(by_name("f32"), matrix()), b=(by_name("f32"), matrix()))
    g, seen = Graph(), list[tuple[int, int]]()
    for name in "ab":
        g.matrix(name, (N, K), by_name("f32"))
    weights: Mapping[str, Any] = bind_weights(g, artifact, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)] and set(weights) == {"a", "b"}
