"""FP8, MXFP8 and NVFP4 against readings of the layouts written element by element, and against C."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ninfer.errors import ArtifactError
from ninfer.formats.dtypes import bf16_to_f32, f32_to_bf16
from ninfer.formats.quant import FLOATS, FloatFormat, by_name, nvfp4
from tests.formats.test_quant import PRELUDE, normal

ALL = (*FLOATS, nvfp4(3))
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3(word: int) -> float:
    e, m = word >> 3 & 15, word & 7
    if word & 127 == 127:
        return float("nan")
    value = m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
    return -value if word & 128 else value


def align(x: int) -> int:
    return -(-x // 256) * 256


def f32(raw: np.ndarray, dtype: str) -> float:
    return float(np.frombuffer(raw.tobytes(), dtype)[0])


def slow_rows(w: np.ndarray, n: int, k: int, row: int, col: int) -> tuple[float, float, float]:
    bits = np.frombuffer(w[align(n * k) + 2 * row :][:2].tobytes(), "<u2")
    return e4m3(int(w[row * k + col])), float(bf16_to_f32(bits)[0]), 1.0


def slow_interleaved(w: np.ndarray, n: int, k: int, row: int, col: int) -> tuple[float, float, float]:
    at = row * (k + 2)
    return e4m3(int(w[at + col])), f32(w[at + k : at + k + 2], "<f2"), 1.0


def slow_groups(w: np.ndarray, n: int, k: int, row: int, col: int) -> tuple[float, float, float]:
    e = int(w[align(n * k) + row * (k // 32) + col // 32])
    return e4m3(int(w[row * k + col])), float("nan") if e == 255 else 2.0 ** (e - 127), 1.0


def slow_tiles(divisors: int) -> Callable[..., tuple[float, float, float]]:
    def value(w: np.ndarray, n: int, k: int, row: int, col: int) -> tuple[float, float, float]:
        code = int(w[row * k // 2 + col // 2]) >> 4 * (col % 2) & 15
        g, at = col // 16, align(n * k // 2)
        place = ((row // 128) * (k // 64) + g // 4) * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + g % 4
        source = row // (n // divisors)
        d = f32(w[at + n * k // 16 + 4 * source :][:4], "<f4")
        return (-1 if code & 8 else 1) * E2M1[code & 7], e4m3(int(w[at + place])), d

    return value


SLOW = {"fp8_e4m3fn_row_bf16": slow_rows, "fp8_e4m3fn_row_fp16": slow_interleaved, "mxfp8": slow_groups,
        "nvfp4": slow_tiles(1), "nvfp4_d3": slow_tiles(3)}  # fmt: skip


def shape_of(fmt: FloatFormat) -> tuple[int, int]:
    return (128 * 3, 192) if fmt.row_step > 1 else (5, 160)


def random_bytes(fmt: FloatFormat, shape: tuple[int, int]) -> np.ndarray:
    """Any words and scales; divisors are numbers near 1."""
    raw = np.random.default_rng(5).integers(0, 256, fmt.nbytes(shape)).astype(np.uint8)
    for span in fmt.planes(shape):
        if span.name == "divisor":
            raw[span.offset :][: span.nbytes] = np.linspace(0.7, 3, span.nbytes // 4, dtype="<f4").view(np.uint8)
    return raw


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_every_element_is_where_the_layout_says(fmt: FloatFormat) -> None:
    n, k = shape_of(fmt)
    raw = random_bytes(fmt, (n, k))
    got, rng = fmt.unpack(raw, (n, k)), np.random.default_rng(1)
    for row, col in zip(rng.integers(0, n, 3000), rng.integers(0, k, 3000), strict=True):
        code, scale, divisor = SLOW[fmt.name](raw, n, k, int(row), int(col))
        with np.errstate(over="ignore"):
            want = np.float32(np.float32(code) * np.float32(scale)) / np.float32(divisor)
        assert np.array_equal(got[row, col], want, equal_nan=True), (row, col)


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_rows_move_with_their_scales(fmt: FloatFormat) -> None:
    n, k = shape_of(fmt)
    raw = fmt.pack(normal(n, k))
    want, step = fmt.unpack(raw, (n, k)), fmt.row_step
    if fmt.divisors < 2:
        index = np.arange(n)[::-1].copy()
        assert np.array_equal(fmt.unpack(fmt.gather_rows(raw, (n, k), index), (n, k)), want[index])
        assert np.array_equal(fmt.unpack(fmt.slice_rows(raw, (n, k), step, step), (step, k)), want[step : 2 * step])
        both = fmt.stack_rows([(raw, (n, k)), (raw, (n, k))])
        assert np.array_equal(fmt.unpack(both, (2 * n, k)), np.concatenate([want, want]))
    fmt.check(raw, (n, k))


def test_sizes_of_the_layout() -> None:
    assert by_name("fp8_e4m3fn_row_bf16").nbytes((14336, 5120)) == 73_428_992
    assert by_name("fp8_e4m3fn_row_fp16").nbytes((3, 7)) == 27
    assert by_name("nvfp4").nbytes((14336, 5120)) == 41_287_684
    assert by_name("nvfp4").bpw(5120) == 4.5 and by_name("mxfp8").bpw(5120) == 8.25
    with pytest.raises(ArtifactError, match="tiles of 128 rows in each of 1 sources: 64 rows"):
        by_name("nvfp4").nbytes((64, 128))
    with pytest.raises(ArtifactError, match="rows of 96 do not divide"):
        by_name("nvfp4").nbytes((128, 96))


@pytest.mark.parametrize("name", ["fp8_e4m3fn_row_bf16", "fp8_e4m3fn_row_fp16"])
def test_fp8_rows_are_encoded_as_the_layout_says(name: str) -> None:
    """One row at a time, one value at a time; ties and the clamp included."""
    fmt, x = by_name(name), normal(6, 96)
    assert isinstance(fmt, FloatFormat)
    x[1], x[2, :90], x[3] = 0, 0, x[3] * 1e-3
    x[4, 0] = 448.0
    x[5, 5] = -1e-30
    raw = fmt.pack(x)
    fields = fmt.fields(raw, x.shape)
    values = sorted((e4m3(w), w) for w in range(127))
    grid = np.array([v for v, _ in values])
    for row in range(6):
        y = bf16_to_f32(f32_to_bf16(x[row]))
        amax = np.abs(y).max()
        s = np.float32(amax / np.float32(448))
        s = bf16_to_f32(f32_to_bf16(np.array([s])))[0] if fmt.scale == "bf16" else np.float32(np.float16(s))
        if amax == 0:
            assert not fields["words"][row].any() and not fields["scale"][row].any()
            continue
        inverse = np.float32(np.float32(1) / s)
        for value, word in zip(y, fields["words"][row], strict=True):
            z = float(np.clip(np.float32(value * inverse), -448, 448))
            best = np.flatnonzero(np.abs(grid - abs(z)) == np.abs(grid - abs(z)).min())
            want = values[best[0]][1] if len(best) == 1 else next(w for _, w in (values[i] for i in best) if w % 2 == 0)
            assert int(word) == want | (128 if np.signbit(z) else 0), (row, value)


def test_errors_of_encoding_stay_small() -> None:
    x = normal(256, 512)
    for fmt, most in ((by_name("nvfp4"), 0.097), (by_name("mxfp8"), 0.035), (by_name("fp8_e4m3fn_row_bf16"), 0.03)):
        error = fmt.unpack(fmt.pack(x), x.shape) - x
        assert np.sqrt(np.mean(error**2)) < most * np.sqrt(np.mean(x**2)), fmt
    assert not by_name("nvfp4").unpack(by_name("nvfp4").pack(x * 0), x.shape).any()


def test_what_cannot_be_held_is_refused() -> None:
    with pytest.raises(ArtifactError, match="reciprocal would overflow"):
        by_name("fp8_e4m3fn_row_bf16").pack(np.full((1, 32), 1e-37, np.float32))
    with pytest.raises(ArtifactError, match="does not fit float16"):
        by_name("fp8_e4m3fn_row_fp16").pack(np.full((1, 32), 1e9, np.float32))
    with pytest.raises(ArtifactError, match="infinities or NaN"):
        by_name("mxfp8").pack(np.full((1, 32), np.inf, np.float32))
    fmt = by_name("fp8_e4m3fn_row_bf16")
    for at, word, message in ((3, 0x7F, "a word is NaN"), (257, 0x80, "a scale is negative")):
        raw = fmt.pack(normal(2, 128))
        raw[at] = word
        with pytest.raises(ArtifactError, match=message):
            fmt.check(raw, (2, 128))
    raw = by_name("nvfp4").pack(normal(128, 64))
    raw[-4:] = 0
    with pytest.raises(ArtifactError, match="a divisor is not a positive number"):
        by_name("nvfp4").check(raw, (128, 64))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_derived_c_decoders_equal_numpy_bit_for_bit(tmp_path: Path) -> None:
    text = [PRELUDE, "static inline u32 f32_to_bits(f32 f) { u32 b; memcpy(&b, &f, 4); return b; }"]
    for fmt in ALL:
        n, k = shape_of(fmt)
        text.append(fmt.c_source(fmt.name, (n, k)))
        text.append(f"""extern "C" void run_{fmt.name}(const u8 *w, f32 *out) {{
            for (u32 r = 0; r < {n}; r++) for (u32 c = 0; c < {k}; c++) *out++ = {fmt.name}_value(w, r, c); }}""")
    source, library = tmp_path / "decode.cpp", tmp_path / "decode.so"
    source.write_text("\n".join(text))
    subprocess.run(["g++", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o", library, source], check=True)
    lib = ctypes.CDLL(str(library))
    for fmt in ALL:
        shape = shape_of(fmt)
        raw, out = random_bytes(fmt, shape), np.empty(shape, np.float32)
        getattr(lib, f"run_{fmt.name}")(ctypes.c_void_p(raw.ctypes.data), ctypes.c_void_p(out.ctypes.data))
        assert np.array_equal(out, fmt.unpack(raw, shape), equal_nan=True), fmt.name
