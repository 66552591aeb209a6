"""Scalar types, records, KV formats and the keyed uniform."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.errors import UsageError
from ninfer.formats import dtypes, kv, rng
from ninfer.formats.dtypes import BF16, F16, F32, I8, U8, U16, U32, U64
from ninfer.formats.record import Field, Record
from tests.formats.test_quant import PRELUDE

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def compiled(tmp_path: Path, text: str) -> ctypes.CDLL:
    source, library = tmp_path / "code.cpp", tmp_path / "code.so"
    source.write_text(PRELUDE + text)
    subprocess.run(["g++", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0xFF800001], np.uint32)
    want = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7F80, 0xFFC0]
    assert dtypes.f32_to_bf16(bits.view(np.float32)).tolist() == want
    every = np.arange(65536, dtype=np.uint16)
    finite = every[(every & 0x7F80) != 0x7F80]
    assert np.array_equal(dtypes.f32_to_bf16(dtypes.bf16_to_f32(finite)), finite)


@pytest.mark.parametrize("name,values,top", [("e4m3", dtypes.E4M3_VALUES, 0x7F), ("e2m1", dtypes.E2M1_VALUES, 8)])
def test_small_floats_encode_to_the_nearest_value_ties_to_even(
    name: str, values: NDArray[np.float32], top: int
) -> None:
    encode = getattr(dtypes, f"f32_to_{name}")
    positive = values[:top].astype(np.float64)
    assert np.array_equal(encode(positive.astype(np.float32)), np.arange(top))
    middle = ((positive[1:] + positive[:-1]) / 2).astype(np.float32)
    assert np.array_equal(encode(middle), [i if i % 2 == 0 else i + 1 for i in range(top - 1)])
    x = np.abs(np.random.default_rng(0).standard_normal(500) * positive[-1] / 2).astype(np.float32)
    nearest = np.abs(x[:, None].astype(np.float64) - positive).argmin(axis=1)
    assert np.array_equal(encode(x), nearest)
    assert np.array_equal(encode(-x), nearest + len(values) // 2)
    assert encode(np.array([1e9, np.inf], np.float32)).tolist() == [top - 1] * 2


def test_e4m3_values_of_the_definition() -> None:
    v = dtypes.E4M3_VALUES
    assert (v[1], v[8], v[0x7E], v[0x80]) == (2.0**-9, 2.0**-6, 448, 0) and np.isnan(v[0x7F])


def test_dtype_names() -> None:
    assert dtypes.by_name("bf16") is BF16
    with pytest.raises(KeyError, match="no dtype 'f8'; there are f64"):
        dtypes.by_name("f8")


ALIGNED = Record("Aligned", (Field("a", U32), Field("b", U8, 4), Field("c", U64), Field("d", F32, 2)))
PACKED = Record("Unaligned", (Field("a", U8), Field("b", F16), Field("c", U64), Field("d", I8, 3), Field("e", U16)))


def test_record_numpy_is_packed() -> None:
    assert (ALIGNED.nbytes, ALIGNED.numpy.itemsize, ALIGNED.is_aligned) == (24, 24, True)
    assert (PACKED.nbytes, PACKED.numpy.itemsize, PACKED.is_aligned) == (16, 16, False)
    fields = PACKED.numpy.fields
    assert fields is not None
    assert [fields[n][1] for n in "abcde"] == [PACKED.offset(n) for n in "abcde"] == [0, 1, 3, 11, 14]
    with pytest.raises(KeyError, match="no field 'z'"):
        PACKED.offset("z")


@needs_compiler
def test_record_c_struct_reads_what_numpy_wrote(tmp_path: Path) -> None:
    text = "#include <cstddef>\n" + ALIGNED.c_struct() + PACKED.c_struct()
    for r in (ALIGNED, PACKED):
        offsets = ", ".join(f"offsetof({r.name}, {f.name})" for f in r.fields)
        text += (
            f'extern "C" void offsets_{r.name}(u32 *o) {{ u32 all[] = {{{offsets}}}; memcpy(o, all, sizeof all); }}\n'
        )
    lib = compiled(tmp_path, text)
    for r in (ALIGNED, PACKED):
        out = np.zeros(len(r.fields), np.uint32)
        getattr(lib, f"offsets_{r.name}")(ctypes.c_void_p(out.ctypes.data))
        assert out.tolist() == [r.offset(f.name) for f in r.fields]
    assert "packed" in PACKED.c_struct() and "packed" not in ALIGNED.c_struct()


@pytest.mark.parametrize("fmt", [f for f in kv.KV_FORMATS if f.is_plain], ids=str)
def test_plain_kv_sizes_and_round_trip(fmt: kv.KVFormat) -> None:
    size = {"bf16": 2, "f16": 2, "f32": 4}[fmt.name]
    assert fmt.bytes_per_token(4, 256) == 4 * 2 * 256 * size
    assert fmt.page_bytes(4, 256) == 64 * 4 * 2 * 256 * size
    assert fmt.v_offset(4, 256) * 2 == fmt.page_bytes(4, 256)
    x = np.random.default_rng(0).standard_normal((3, 2, 32)).astype(np.float32)
    raw, scales = fmt.k.encode(x)
    assert raw.dtype == np.uint8 and raw.shape == (3, 2, fmt.k.code_bytes(32)) and scales.shape == (3, 2, 0)
    back = fmt.k.decode(raw, scales)
    assert np.abs(back - x).max() <= {"bf16": 2**-7, "f16": 2**-10, "f32": 0}[fmt.name]
    assert np.array_equal(fmt.v.encode(back)[0], raw)


def test_an_unknown_kv_format_is_refused_with_the_list() -> None:
    with pytest.raises(UsageError, match="no KV format 'int3'; there are bf16, f16, f32, int8"):
        kv.by_name("int3")


def plain_uniform(seed: int, position: int, purpose: int, sub: int) -> float:
    """The formula in Python integers."""
    wrap = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & wrap
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & wrap
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & wrap
        return x ^ (x >> 31)

    k = mix(seed ^ (position * 0xD1B54A32D192ED03) & wrap)
    k = mix(k ^ (purpose << 21) ^ (sub * 0x2545F4914F6CDD1D) & wrap)
    return ((k >> 41) + 0.5) * 2.0**-23


KEYS = [(0, 0, 0), (1, 0, 0), (2**64 - 1, 2**32 - 1, 5), (0x123456789ABCDEF0, 77, 3)]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_uniform_is_the_formula(key: tuple[int, int, int]) -> None:
    subs = np.array([0, 1, 2, 1000, 2**32 - 1], np.uint32)
    assert rng.uniform(*key, subs).tolist() == [plain_uniform(*key, int(s)) for s in subs]


def test_uniform_never_reaches_zero_or_one() -> None:
    top = (np.float32(2**23 - 1) + np.float32(0.5)) * np.float32(2.0**-23)
    assert np.float32(0) < np.float32(0.5) * np.float32(2.0**-23) and top < np.float32(1)


def test_uniform_looks_uniform_over_positions_and_subs() -> None:
    u = rng.uniform(42, np.arange(100_000), 1, 0)
    v = rng.uniform(42, 7, 1, np.arange(100_000))
    for x in (u, v):
        assert abs(x.mean() - 0.5) < 0.004 and abs(x.var() - 1 / 12) < 0.002  # 4 standard errors
        assert abs(np.corrcoef(x[1:], x[:-1])[0, 1]) < 0.013
    assert abs(np.corrcoef(u, rng.uniform(42, np.arange(100_000), 2, 0))[0, 1]) < 0.013


@needs_compiler
def test_uniform_in_c_is_bit_equal(tmp_path: Path) -> None:
    lib = compiled(
        tmp_path,
        rng.RNG_C
        + """
extern "C" void run(u64 seed, u32 position, u32 purpose, u32 count, f32 *out) {
    for (u32 i = 0; i < count; i++) out[i] = uniform(seed, position, purpose, i); }""",
    )
    for seed, position, purpose in KEYS:
        out = np.empty(1000, np.float32)
        lib.run(
            ctypes.c_uint64(seed),
            ctypes.c_uint32(position),
            ctypes.c_uint32(purpose),
            1000,
            ctypes.c_void_p(out.ctypes.data),
        )
        assert np.array_equal(out, rng.uniform(seed, position, purpose, np.arange(1000)))
