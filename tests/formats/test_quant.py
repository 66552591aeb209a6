"""Weight formats against ggml's own values, against a slow packer written from the layout, and against C."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ninfer.errors import ArtifactError
from ninfer.formats import encode
from ninfer.formats.bits import Bits
from ninfer.formats.quant import FORMATS, Packed, QuantFormat, by_ggml, by_name

DATA = Path(__file__).parent.parent / "data" / "quant"
ORACLES = sorted(DATA.glob("*.npz"))
UNOFFICIAL = ("pq2_0",)  # types of one publisher, which ggml has not
OTHER_NAMES = {"nvfp4": "nvfp4_ggml"}
NATIVE = [f for f in FORMATS if f.split]
REFERENCE_ENCODERS = {
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q1_0", "q2_0", "tq1_0", "tq2_0", "mxfp4", "nvfp4_ggml",
}  # fmt: skip


def format_of(path: Path) -> QuantFormat:
    name = path.stem.lower()
    return by_name(OTHER_NAMES.get(name, name))


def normal(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


@pytest.mark.parametrize("path", ORACLES, ids=lambda p: p.stem)
def test_ggml_blocks_decode_to_the_values_of_ggml(path: Path) -> None:
    z, fmt = np.load(path), format_of(path)
    assert np.array_equal(fmt.unpack(z["packed"], z["values"].shape), z["values"])
    assert np.array_equal(fmt.unpack(z["random_packed"], z["random_values"].shape), z["random_values"])


def test_all_ggml_types_of_the_table_have_an_oracle() -> None:
    assert {format_of(p).name for p in ORACLES} == {
        f.name for f in FORMATS if f.ggml_type is not None and not f.is_plain and f.name not in UNOFFICIAL
    }


@pytest.mark.parametrize("path", [p for p in ORACLES if format_of(p).can_pack], ids=lambda p: p.stem)
def test_encoders_give_ggmls_bytes_or_an_error_close_to_its(path: Path) -> None:
    z, fmt = np.load(path), format_of(path)
    raw = fmt.pack(z["source"])
    if fmt.name in REFERENCE_ENCODERS:
        assert np.array_equal(raw, z["packed"].reshape(-1))
    mine = np.sqrt(np.mean((fmt.unpack(raw, z["source"].shape) - z["source"]) ** 2))
    theirs = np.sqrt(np.mean((z["values"] - z["source"]) ** 2))
    assert mine < 1.25 * theirs  # ggml searches for scales, we take them from the extremes


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.code is not None], ids=str)
def test_groups_times_codes_are_the_values(fmt: QuantFormat) -> None:
    raw = fmt.pack(normal(5, 2 * fmt.block if not fmt.split else 200))
    shape = (5, 2 * fmt.block if not fmt.split else 200)
    codes, d, m = fmt.groups(raw, shape)
    assert codes.dtype == np.int8 and codes.shape == shape and d.shape == (5, -(-shape[1] // fmt.group))
    g = np.arange(shape[1]) // fmt.group
    want = d[:, g] * codes
    if m is not None:
        want = want + m[:, g]
    assert want.dtype == np.float32
    assert np.array_equal(want, fmt.unpack(raw, shape))


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.can_pack and f.code is not None], ids=str)
def test_every_code_value_survives(fmt: QuantFormat) -> None:
    """Codes written at every place of a block are read back, whatever the neighbours hold."""
    assert fmt.code is not None
    count = fmt.block
    raw = np.zeros((256, fmt.block_bytes), np.uint8)
    fields, at = {}, 0
    for f in fmt.record.fields:
        fields[f.name] = raw[:, at : at + f.nbytes]
        at += f.nbytes
    rng = np.random.default_rng(7)
    values = np.unique(np.array([v for v in range(fmt.code.map.low, fmt.code.map.high + 1)], np.int8))
    if hasattr(fmt.code.map, "values"):
        values = np.unique(np.array(fmt.code.map.values, np.int8))
    codes = values[rng.integers(0, len(values), (256, count))]
    codes[: len(values), 0] = values
    fmt.code.write(fields, codes)
    assert np.array_equal(fmt.code.read(fields, count), codes)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.can_pack], ids=str)
def test_packing_the_decoded_values_again_changes_little(fmt: QuantFormat) -> None:
    x = normal(3, 512)
    once = fmt.unpack(fmt.pack(x), x.shape)
    scale = np.abs(once).max()
    twice = fmt.unpack(fmt.pack(once), x.shape)
    assert np.abs(twice - once).max() <= 0.3 * scale  # idempotent up to one step of the coarsest format


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.is_grid], ids=str)
def test_grid_formats_refuse_to_pack(fmt: QuantFormat) -> None:
    with pytest.raises(ArtifactError, match="can be read but not written"):
        fmt.pack(normal(1, 256))
    with pytest.raises(ArtifactError, match="grid"):
        fmt.groups(np.zeros(fmt.block_bytes, np.uint8), (1, 256))


def test_plain_formats_keep_bits() -> None:
    x = normal(3, 7)
    assert np.array_equal(by_name("f32").unpack(by_name("f32").pack(x), (3, 7)), x)
    assert np.array_equal(
        by_name("f16").unpack(by_name("f16").pack(x), (3, 7)), x.astype(np.float16).astype(np.float32)
    )
    bf16 = by_name("bf16")
    once = bf16.unpack(bf16.pack(x), (3, 7))
    assert np.abs(once / x - 1).max() <= 2**-8
    assert np.array_equal(bf16.pack(once), bf16.pack(x))


# native formats

SLOW = {"q4_g64": (4, 64, 7), "q5_g64": (5, 64, 15), "q6_g64": (6, 64, 31), "q8_g32": (8, 32, 127)}


def slow_pack(x: np.ndarray, bits: int, group: int, top: int) -> bytes:
    """Lane by lane, in Python integers, from the written layout."""
    k = x.shape[1]
    k_pad = -(-k // 128) * 128
    base, high, scales = bytearray(), bytearray(), bytearray()
    for row in x:
        for g in range(k_pad // group):
            lanes = [np.float32(row[i]) if i < k else np.float32(0) for i in range(g * group, (g + 1) * group)]
            amax = max(abs(v) for v in lanes)
            s16 = np.float16(np.float32(amax / np.float32(top)))
            if amax > 0 and s16 == 0:
                s16 = np.frombuffer(b"\x01\x00", np.float16)[0]
            q = [0] * group
            if amax > 0:
                inv = np.float32(np.float32(1) / np.float32(s16))
                low = -top if bits == 8 else -top - 1
                q = [min(max(int(np.rint(np.float32(v * inv))), low), top) for v in lanes]
            u = [v % (1 << bits) for v in q]
            if bits == 8:
                base += bytes(u)
            else:
                base += bytes((u[2 * j] & 15) | ((u[2 * j + 1] & 15) << 4) for j in range(32))
                stream = [(u[i] >> (4 + b)) & 1 for i in range(group) for b in range(bits - 4)]
                for t in range(0, len(stream), 8):
                    high.append(sum(bit << i for i, bit in enumerate(stream[t : t + 8])))
            scales += np.array([s16], "<f2").tobytes()
    out = base + bytes(-len(base) % 256)
    if high:
        out += high + bytes(-len(high) % 256)
    return bytes(out + scales)


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("k", [1, 128, 130, 200])
def test_native_bytes_equal_those_of_the_slow_packer(name: str, k: int) -> None:
    x = normal(3, k, seed=k)
    x[1] *= 1e-9  # scales underflow
    x[2, : k // 2] = 0
    assert by_name(name).pack(x).tobytes() == slow_pack(x, *SLOW[name])


def test_native_sizes_of_the_layout_sheet() -> None:
    q5 = by_name("q5_g64")
    assert [(s.name, s.offset, s.nbytes) for s in q5.planes((2, 130))] == [
        ("base", 0, 256), ("high", 256, 64), ("scale", 512, 16),
    ]  # fmt: skip
    assert q5.nbytes((2, 130)) == 528
    assert by_name("q4_g64").nbytes((7168, 5120)) == 19_496_960
    assert q5.nbytes((7168, 5120)) == 24_084_480
    assert [by_name(n).bpw(5120) for n in ("q4_g64", "q5_g64", "q6_g64", "q8_g32", "t2_g128")] == [
        4.25, 5.25, 6.25, 8.5, 2.125,
    ]  # fmt: skip


@pytest.mark.parametrize("fmt", NATIVE, ids=str)
def test_native_padding_is_zero(fmt: QuantFormat) -> None:
    assert fmt.code is not None
    raw = fmt.pack(normal(2, 130))
    codes = fmt.code.read(fmt.fields(raw, (2, 130)), fmt.block).reshape(2, 256)
    assert not codes[:, 130:].any()
    scales = fmt.fields(raw, (2, 130))["scale"].copy().view("<u2").reshape(2, -1)
    assert not scales[:, -(-130 // fmt.group) :].any()
    fmt.check(raw, (2, 130))


@pytest.mark.parametrize("fmt", NATIVE, ids=str)
def test_negative_scales_decode(fmt: QuantFormat) -> None:
    raw = fmt.pack(normal(2, 256))
    want = fmt.unpack(raw, (2, 256))
    fmt.fields(raw, (2, 256))["scale"][:, 1] ^= 0x80
    fmt.check(raw, (2, 256))
    assert np.array_equal(fmt.unpack(raw, (2, 256)), -want)


def test_ternary_is_exact_on_ternary_weights() -> None:
    x = np.random.default_rng(3).integers(-1, 2, (4, 256)).astype(np.float32) * np.float32(0.37109375)
    fmt = by_name("t2_g128")
    assert np.array_equal(fmt.unpack(fmt.pack(x), x.shape), x)


def test_illegal_native_words_are_found() -> None:
    for name, at, word in (("q8_g32", 0, 0x80), ("t2_g128", 0, 0b10)):
        fmt = by_name(name)
        raw = fmt.pack(normal(1, 128))
        raw[at] = word
        with pytest.raises(ArtifactError, match="is not a value"):
            fmt.check(raw, (1, 128))
    fmt = by_name("q4_g64")
    for bits, message in ((0x7C00, "infinite"), (0x8000, "-0"), (0, "scale 0")):
        raw = fmt.pack(normal(1, 128))
        raw[fmt.planes((1, 128))[-1].offset :][:2] = np.array([bits], "<u2").view(np.uint8)
        with pytest.raises(ArtifactError, match=message):
            fmt.check(raw, (1, 128))


# rows and columns


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_row_slices_and_gathers_decode_to_the_same_rows(fmt: QuantFormat) -> None:
    k = 256
    if fmt.can_pack:
        raw = fmt.pack(normal(6, k))
    else:
        raw = np.random.default_rng(0).integers(0, 64, 6 * fmt.row_bytes(k)).astype(np.uint8)
    want = fmt.unpack(raw, (6, k))
    assert np.array_equal(fmt.unpack(fmt.slice_rows(raw, (6, k), 2, 3), (3, k)), want[2:5], equal_nan=True)
    index = np.array([5, 0, 0, 3])
    assert np.array_equal(fmt.unpack(fmt.gather_rows(raw, (6, k), index), (4, k)), want[index], equal_nan=True)


def test_columns_move_as_whole_blocks() -> None:
    fmt, x = by_name("q4_0"), normal(3, 256)
    raw, index = fmt.pack(x), np.array([2, 0, 3, 1])
    moved = fmt.unpack(fmt.gather_columns(raw, (3, 256), 64, index), (3, 256))
    assert np.array_equal(moved, fmt.unpack(raw, (3, 256)).reshape(3, 4, 64)[:, index].reshape(3, 256))
    assert not by_name("q4_k").can_move_columns(128)
    with pytest.raises(ArtifactError, match="not whole blocks"):
        by_name("q4_k").gather_columns(np.zeros(144, np.uint8), (1, 256), 128, np.array([1, 0]))


def test_leading_dimensions_are_rows() -> None:
    fmt, x = by_name("q8_0"), normal(6, 64)
    bank = Packed(fmt, fmt.pack(x.reshape(2, 3, 64)), (2, 3, 64))
    assert np.array_equal(bank.f32(), fmt.unpack(fmt.pack(x), (6, 64)).reshape(2, 3, 64))


# errors


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(ArtifactError, match=r"no weight format 'q3'; there are f32, .*t2_g128"):
        by_name("q3")
    with pytest.raises(ArtifactError, match=r"type 141 is not supported; supported are f32 \(0\), .*q2_0 \(42\)"):
        by_ggml(141)


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    with pytest.raises(ArtifactError, match=r"a q4_0 matrix \[2, 64\] takes 72 bytes, not 71"):
        by_name("q4_0").unpack(np.zeros(71, np.uint8), (2, 64))
    with pytest.raises(ArtifactError, match="rows of 48 do not divide"):
        by_name("q4_0").nbytes((2, 48))
    with pytest.raises(ArtifactError, match="infinities or NaN"):
        by_name("q4_0").pack(np.full((1, 32), np.inf, np.float32))
    with pytest.raises(ArtifactError, match="does not fit float16"):
        by_name("q4_g64").pack(np.full((1, 64), 1e9, np.float32))


def test_declared_planes_cover_distinct_bits_inside_their_fields() -> None:
    for fmt in FORMATS:
        if not isinstance(fmt.code, Bits):
            continue
        used = {f.name: np.zeros((f.nbytes, 8), int) for f in fmt.record.fields}
        numbers = [(fmt.code, fmt.block)]
        numbers += [(s.sub, fmt.block // fmt.group) for s in (fmt.d, fmt.m) if s is not None and s.sub is not None]
        for bits, count in numbers:
            for plane in bits.planes:
                byte, shift = plane.where(count)
                for b in range(plane.bits):
                    np.add.at(used[plane.field], (byte, shift + b), 1)
        assert all(u.max() <= 1 for u in used.values()), fmt.name


# C

PRELUDE = """
#include <cstdint>
#include <cstring>
typedef uint8_t u8; typedef int8_t i8; typedef uint16_t u16; typedef int16_t i16; typedef uint32_t u32;
typedef int32_t i32; typedef uint64_t u64; typedef int64_t i64; typedef float f32; typedef double f64;
static inline f32 bits_to_f32(u32 b) { f32 f; memcpy(&f, &b, 4); return f; }
static inline f32 f16_to_f32(u16 h) { _Float16 f; memcpy(&f, &h, 2); return (f32)f; }
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_derived_c_decoders_equal_numpy_bit_for_bit(tmp_path: Path) -> None:
    text, cases = [PRELUDE], []
    for fmt in FORMATS:
        if fmt.code is None:
            continue
        shape = (3, 320) if fmt.split else (3, 2 * fmt.block)
        rng = np.random.default_rng(11)
        raw = rng.integers(0, 256, fmt.nbytes(shape)).astype(np.uint8)
        if fmt.name in UNOFFICIAL:
            raw = fmt.pack(normal(*shape))
        elif fmt.ggml_type is not None:
            oracle = next(p for p in ORACLES if format_of(p) is fmt)
            raw = np.load(oracle)["random_packed"].reshape(-1)[: raw.size].copy()
        else:
            raw[fmt.planes(shape)[-1].offset + 1 :: 2] &= 0xBF  # finite scales
        text.append(fmt.record.c_struct() + fmt.c_source(fmt.name, shape))
        text.append(f"""extern "C" void run_{fmt.name}(const u8 *w, f32 *out) {{
            for (u32 r = 0; r < {shape[0]}; r++) for (u32 k = 0; k < {shape[1]}; k++)
                *out++ = {fmt.name}_value(w, r, k); }}""")
        cases.append((fmt, raw, shape))
    source, library = tmp_path / "decode.cpp", tmp_path / "decode.so"
    source.write_text("\n".join(text))
    subprocess.run(["g++", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o", library, source], check=True)
    lib = ctypes.CDLL(str(library))
    for fmt, raw, shape in cases:
        out = np.empty(shape, np.float32)
        getattr(lib, f"run_{fmt.name}")(ctypes.c_void_p(raw.ctypes.data), ctypes.c_void_p(out.ctypes.data))
        assert np.array_equal(out, fmt.unpack(raw, shape), equal_nan=True), fmt.name


def test_encoder_of_a_zero_row_gives_zeros() -> None:
    for fmt in FORMATS:
        if fmt.can_pack and fmt.name != "q1_0":
            assert not fmt.unpack(fmt.pack(np.zeros((2, 512), np.float32)), (2, 512)).any(), fmt.name
    assert encode.grouped_absmax is by_name("q4_g64").encode
