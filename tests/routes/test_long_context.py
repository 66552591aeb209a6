"""Position arithmetic at the end of a window of 1,048,576 tokens, by the host's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ninfer.devices.cpu import CpuDevice, cpu_info
from ninfer.devices.programs import ProgramCache, find_compiler
from ninfer.formats.dtypes import I32, U8
from ninfer.formats.kv import KVFormat, by_name
from ninfer.formats.kv_codes import hadamard
from ninfer.ir import casework as cw
from ninfer.ir.op import Case
from ninfer.ir.ops.attention import Attention, KvAppend, Rope, page_views
from ninfer.ir.step import PAGE
from ninfer.ir.types import B, Env, M, P, S, T, TensorType, plain
from tests.routes.test_cpu_routes import build, candidates, lowering_of, run, view

WINDOW = 1 << 20
NUM_PAGES = WINDOW // PAGE
D, HEADS, KV_HEADS, POOL = 64, 2, 1, 8


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> CpuDevice:
    compiler = find_compiler()
    assert compiler is not None, "these tests need a C++ compiler"
    info = cpu_info()
    return CpuDevice(info, ProgramCache(compiler, tmp_path_factory.mktemp("programs"), info.arch), threads=2)


def results(device: CpuDevice, case: Case) -> list[list[Any]]:
    """The operands after each route that takes the case."""
    lowering = lowering_of(device)
    found = []
    for candidate in candidates(device, case):
        plan, spots = build(lowering, case, candidate)
        found.append(run(device, case, plan, spots, device.compile([plan])))
    assert found
    return found


def paging(kv_len: int, rows: int) -> tuple[tuple[TensorType, ...], tuple[Any, ...], Env]:
    """One sequence whose table names each page of a small pool many times; the last page is its own."""

    table = np.array([np.arange(NUM_PAGES) % (POOL - 1)], np.int32)
    table[0, -1] = POOL - 1
    typed = (
        (TensorType((S, M), I32), table),
        cw.ints(T, [0] * rows),
        cw.ints(B, [0]),
        cw.ints(B, [0]),
        cw.ints(B, [kv_len]),
    )
    env = Env(rows=rows, logit_rows=1, seqs=1, slots=1, pages=POOL, max_pages=NUM_PAGES)
    return tuple(t for t, _ in typed), tuple(a for _, a in typed), env


def pool(fmt: KVFormat) -> np.ndarray:
    cache = np.zeros((POOL, fmt.page_bytes(KV_HEADS, D)), np.uint8)
    content = np.random.default_rng(3).standard_normal((2, POOL, KV_HEADS, PAGE, D)).astype(np.float32)
    for rows, x in zip(page_views(cache, fmt, KV_HEADS, D), content, strict=True):
        rows.store(..., x)
    return cache


def test_rotation_at_the_last_position_is_that_of_the_exact_angle(device: CpuDevice) -> None:

    positions = [0, WINDOW // 4 - 1, WINDOW - 2, WINDOW - 1]
    freqs = (10_000_000.0 ** -(np.arange(D // 2) / (D // 2))).astype(np.float32)
    x = np.zeros((4, D), np.float32)
    x[:, : D // 2] = 1
    (pt, p) = cw.ints(T, positions)
    case = Case(Rope(D), "far", (TensorType((T, D)), pt, TensorType((D // 2,))), (x, p, freqs), Env(4, 1, 1))
    angle = np.array(positions, np.float64)[:, None] * freqs.astype(np.float64)
    want = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    (reference,) = case.op.reference(case.arrays)
    np.testing.assert_allclose(plain(reference), want, atol=1e-6)  # one rounding to float32
    for after in results(device, case):
        np.testing.assert_allclose(view(after[-1], case.types[0], case), want, atol=1e-6)


@pytest.mark.parametrize("name", ["bf16", "rk8v4", "rk4v4"])
def test_the_last_tokens_are_stored_in_the_last_page(device: CpuDevice, name: str) -> None:

    fmt, rows = by_name(name), 2
    types, arrays, env = paging(WINDOW - rows, rows)
    (kt, k), (vt, v) = cw.rows(T, rows, KV_HEADS * D, seed=1), cw.rows(T, rows, KV_HEADS * D, seed=2)
    cache_type = TensorType((P, fmt.page_bytes(KV_HEADS, D)), U8)
    case = Case(KvAppend(fmt, KV_HEADS, D), name, (kt, vt, cache_type, *types), (k, v, pool(fmt), *arrays), env)
    want = pool(fmt)
    for view_, x in zip(page_views(want, fmt, KV_HEADS, D), (k, v), strict=True):
        assert isinstance(x, np.ndarray)
        view_.store((POOL - 1, 0, slice(PAGE - rows, PAGE)), x)
    for after in results(device, case):
        np.testing.assert_array_equal(after[2].reshape(want.shape), want)


@pytest.mark.parametrize("name", ["bf16", "rk4v4"])
def test_the_last_token_attends_to_a_million_keys(device: CpuDevice, name: str) -> None:

    fmt = by_name(name)
    types, arrays, env = paging(WINDOW - 1, 1)
    qt, q = cw.rows(T, 1, HEADS * D, seed=4)
    assert isinstance(q, np.ndarray)
    cache = pool(fmt)
    cache_type = TensorType((P, fmt.page_bytes(KV_HEADS, D)), U8)
    op = Attention(fmt, HEADS, KV_HEADS, D, D**-0.5)
    case = Case(op, name, (qt, cache_type, *types), (q, cache, *arrays), env)
    times = np.bincount(arrays[0][0], minlength=POOL)  # how often each page is in the table
    k, v = (rows.load((slice(None), 0)).astype(np.float64).reshape(-1, D) for rows in page_views(cache, fmt, 1, D))
    query = q.reshape(HEADS, D).astype(np.float64)
    if fmt.k.rotate:
        query = hadamard(q.reshape(HEADS, D)).astype(np.float64)
    weights = np.exp(query @ k.T * D**-0.5) * np.repeat(times, PAGE)
    want = weights / weights.sum(axis=1, keepdims=True) @ v
    for after in results(device, case):
        got = view(after[-1], qt, case).reshape(HEADS, D)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)  # float32 sums of a million terms, in spans
