"""Quantised KV formats against a value-by-value reading of their description, and their sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from ninfer.errors import UsageError
from ninfer.formats import kv, kv_codes
from ninfer.formats.kv import Side

f32 = np.float32
f16 = np.float16
CODED = [f for f in kv.KV_FORMATS if not f.is_plain]
SIDES = {f"{f.name}-{n}": getattr(f, n) for f in CODED for n in "kv"}

# bytes of a token of one KV head of 256, of the 27B and of the 35B-A3B
SIZES = {
    "bf16": (1024, 65536, 20480), "int8": (528, 33792, 10560), "fp8": (516, 33024, 10320),
    "rk8v4": (408, 26112, 8160), "k8v4": (402, 25728, 8040), "nvfp4": (288, 18432, 5760),
    "rk4v4": (280, 17920, 5600), "rk4v4-e8": (280, 17920, 5600), "rk2v4-e8": (216, 13824, 4320),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_bytes_of_a_token(name: str) -> None:
    fmt = kv.by_name(name)
    assert (fmt.bytes_per_token(1, 256), 16 * fmt.bytes_per_token(4, 256), 10 * fmt.bytes_per_token(2, 256)) == SIZES[
        name
    ]


# The description once more, a value at a time


def tree(values: list[f32]) -> f32:
    """Value l and value l + n/2, and so on: what a butterfly over lanes gives."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return tree([f32(a + b) for a, b in zip(values[:half], values[half:], strict=True)])


def e4m3_value(code: int) -> float:
    e, m = code >> 3 & 15, code & 7
    return (-1.0) ** (code >> 7) * (m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10))


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LLOYD_BOUNDS = (0.25825, 0.52245, 0.79960, 1.09930, 1.43715, 1.84355, 2.40080)
LLOYD = (6, 18, 31, 44, 58, 75, 96, 127)


def nearest(x: f32, values: list[float]) -> int:
    """Index of the nearest value; of two equally near, the even one."""
    gaps = [abs(abs(float(x)) - v) for v in values]
    best = [i for i, g in enumerate(gaps) if g == min(gaps)]
    return best[0] if len(best) == 1 else next(i for i in best if i % 2 == 0)


E4M3_POSITIVE = [e4m3_value(i) for i in range(127)]


def to_e4m3(x: f32) -> int:
    return nearest(x, E4M3_POSITIVE) | (128 if math.copysign(1, float(x)) < 0 else 0)


def to_e2m1(x: f32) -> int:
    return nearest(x, list(E2M1)) | (8 if math.copysign(1, float(x)) < 0 else 0)


def reciprocal(scale: f16) -> f32:
    return f32(1) / f32(scale) if scale > 0 else f32(0)


def nibbles(codes: list[int]) -> list[int]:
    return [(a & 15) | (b & 15) << 4 for a, b in zip(codes[0::2], codes[1::2], strict=True)]


def scale_bytes(scale: f16) -> list[int]:
    return list(np.array(scale, "<f2").tobytes())


Group = tuple[list[int], list[int], list[float]]  # code bytes, scale bytes, decoded


def whole_numbers(x: list[f32], top: int) -> Group:
    scale = f16(f32(max(abs(v) for v in x) / f32(top)))
    codes = [max(-top, min(top, int(np.rint(v * reciprocal(scale))))) for v in x]
    packed = [c & 255 for c in codes] if top == 127 else nibbles(codes)
    return packed, scale_bytes(scale), [c * float(scale) for c in codes]


def lloyd(x: list[f32]) -> Group:
    rms = f32(np.sqrt(tree([v * v for v in x]) / f32(64)))
    if rms == 0:
        return [0] * 32, [0, 0], [0.0] * 64
    index = [sum(bool(f32(b) <= f32(abs(v) / rms)) for b in LLOYD_BOUNDS) for v in x]
    levels = [f32(LLOYD[m] if v >= 0 else -LLOYD[m]) for m, v in zip(index, x, strict=True)]
    fit = tree([v * c for v, c in zip(x, levels, strict=True)]) / tree([c * c for c in levels])
    scale = f16(fit)
    codes = [m | (8 if v < 0 else 0) for m, v in zip(index, x, strict=True)]
    return nibbles(codes), scale_bytes(scale), [float(c) * float(scale) for c in levels]


def fp8_row(x: list[f32]) -> Group:
    top = max(abs(v) for v in x)
    if top == 0:
        return [0] * len(x), [0, 0], [0.0] * len(x)
    scale = f16(min(max(f32(top / f32(448)), f32(2.0**-24)), f32(65504)))
    codes = [to_e4m3(v * reciprocal(scale)) for v in x]
    return codes, scale_bytes(scale), [e4m3_value(c) * float(scale) for c in codes]


def nvfp4(x: list[f32]) -> Group:
    top = max(abs(v) for v in x)
    best: tuple[f32, Group] | None = None
    for target in (6, 4, 4.5, 5, 5.5):
        byte = to_e4m3(min(max(f32(top / f32(target)), f32(2.0**-9)), f32(448)))
        scale = f32(e4m3_value(byte))
        codes = [to_e2m1(v * f32(f32(1) / scale)) for v in x]
        values = [f32(E2M1[c & 7] * (-1 if c & 8 else 1)) * scale for c in codes]
        error = tree([f32(f32(v - w) * f32(v - w)) for v, w in zip(x, values, strict=True)])
        if best is None or error < best[0]:
            best = error, (nibbles(codes), [byte], [float(v) for v in values])
    assert best is not None
    return best[1]


def d8(z: list[f32]) -> list[f32]:
    r = [f32(np.rint(v)) for v in z]
    if int(sum(r)) % 2:
        off = [abs(v - w) for v, w in zip(z, r, strict=True)]
        i = off.index(max(off))
        r[i] += f32(1) if z[i] >= r[i] else f32(-1)
    return r


def e8_snap(x: list[f32]) -> Group:
    scale = f16(f32(max(abs(v) for v in x) / f32(7)))
    codes: list[int] = []
    for start in range(0, 64, 8):
        y = [v * reciprocal(scale) for v in x[start : start + 8]]
        points = d8(y), [f32(v + f32(0.5)) for v in d8([f32(v - f32(0.5)) for v in y])]
        a, b = (tree([f32(f32(v - w) * f32(v - w)) for v, w in zip(y, p, strict=True)]) for p in points)
        codes += [max(-8, min(7, int(np.rint(v)))) for v in points[1 if b < a else 0]]
    return nibbles(codes), scale_bytes(scale), [c * float(scale) for c in codes]


PAIRS = list(itertools.combinations(range(8), 2))
ROOTS = [
    [(s_i if k == i else s_j if k == j else 0) * 4 for k in range(8)]
    for i, j in PAIRS
    for s_i in (-1, 1)
    for s_j in (-1, 1)
]
for even in sorted((t for t in itertools.product((-1, 1), repeat=8) if t.count(-1) % 2 == 0), key=lambda t: t[1:]):
    ROOTS.append([2 * s for s in even[::-1]])
RADII = (0, 0.0992, 0.125, 0.1575, 0.1984, 0.25, 0.315, 0.3969, 0.5, 0.63, 0.7937, 1.0, 1.2599, 1.5874, 2.0, 2.5198)


def e8_root(x: list[f32]) -> Group:
    scale = f16(f32(max(abs(v) for v in x) / f32(7)))
    codes: list[int] = []
    out: list[float] = []
    for start in range(0, 64, 8):
        b = x[start : start + 8]
        length = f32(np.sqrt(tree([v * v for v in b])))
        u = [f32(v / f32(length + f32(1e-8))) for v in b]
        a = [abs(v) for v in u]
        i, j = sorted(sorted(range(8), key=lambda k: (-a[k], k))[:2])
        negative = [bool(v < 0) for v in u]
        half = f32(tree(a) * f32(0.5))
        signs = [-1 if n else 1 for n in negative]
        if sum(negative) % 2:
            least = a.index(min(a))
            half = f32(half - a[least])
            signs[least] = -signs[least]
        if half > f32(a[i] + a[j]):
            code = 112 + sum((s > 0) << k for k, s in enumerate(signs[:7]))
        else:
            code = 4 * PAIRS.index((i, j)) + 2 * (not negative[i]) + (not negative[j])
        root = [f32(v / 4) for v in ROOTS[code]]
        along = f32(tree([v * w for v, w in zip(u, root, strict=True)]) / f32(2))
        off = [f32(v - f32(along * w)) for v, w in zip(u, root, strict=True)]
        far = [abs(v) for v in off].index(max(abs(v) for v in off))
        ratio = f32(length / f32(f32(f32(scale) * f32(math.sqrt(8))) + f32(1e-8)))
        bounds = [f32(round(2 ** ((k - 8.5) / 3), 7)) for k in range(2, 16)]
        radius = 0 if ratio < f32(0.08) else 1 + sum(bool(v <= ratio) for v in bounds)
        codes += [code, radius << 4 | 2 * far | bool(off[far] < 0)]
        for k in range(8):
            value = ROOTS[code][k] + (k == far) * (-1 if off[far] < 0 else 1)
            out.append(float(np.rint(f32(value) * f32(RADII[radius]))) * float(scale))
    return codes, scale_bytes(scale), out


SLOW: dict[str, Callable[[list[f32]], Group]] = {
    "int8": lambda x: whole_numbers(x, 127),
    "int4": lambda x: whole_numbers(x, 7),
    "lloyd4": lloyd,
    "e4m3": fp8_row,
    "e2m1": nvfp4,
    "e8snap": e8_snap,
    "e8root": e8_root,
}


def rotated(x: np.ndarray) -> list[f32]:
    """Element by element: d = lane + 32 r; lane strides first, then strides of registers."""
    y, d = [f32(v) for v in x], len(x)
    for stride in (2**n for n in range(int(math.log2(d)))):
        y = [f32(y[i] + y[i + stride]) if not i & stride else f32(y[i - stride] - y[i]) for i in range(d)]
    return [v * f32(d**-0.5) for v in y]


def rows(d: int) -> np.ndarray:
    rng = np.random.default_rng(d)
    x = (rng.standard_normal((12, d)) * np.exp(rng.standard_normal((12, 1)))).astype(f32)
    x[0] = 0
    x[1] = 0
    x[1, 5] = -3.5  # one value
    x[2, ::3] *= f32(30)  # outliers
    x[3] = np.round(x[3] * 2) / 2  # ties
    x[4] *= f32(1e-6)  # scales below the smallest f16
    x[5] = f32(1.25)
    x[6, : d // 2] = 0
    x[7] *= f32(3e4)
    x[8] = -np.abs(x[8])
    return x


@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("name", SIDES)
def test_rows_are_coded_as_described(name: str, d: int) -> None:
    side: Side = SIDES[name]
    assert isinstance(side.code, kv_codes.KVCode)
    x = rows(d)
    raw, scales = side.encode(x)
    assert raw.shape == (12, side.code_bytes(d)) and scales.shape == (12, side.scale_bytes(d))
    group = side.group or d
    for t, row in enumerate(x):
        values = rotated(row) if side.rotate else [f32(v) for v in row]
        groups = [SLOW[side.code.name](values[i : i + group]) for i in range(0, d, group)]
        assert raw[t].tolist() == [b for codes, _, _ in groups for b in codes], f"row {t}"
        assert scales[t].tolist() == [b for _, s, _ in groups for b in s], f"row {t}"
        decoded = side.decode(raw[t], scales[t])
        assert decoded.tolist() == [v for _, _, out in groups for v in out], f"row {t}"


def test_every_code_decodes_as_described() -> None:
    every = np.arange(256, dtype=np.uint8)
    assert kv_codes.INT8.decode(every).tolist() == [*range(128), *range(-128, 0)]
    assert kv_codes.INT4.decode(every[:16] * np.uint8(16))[1::2].tolist() == [*range(8), *range(-8, 0)]
    assert kv_codes.LLOYD4.decode(every[:16])[0::2].tolist() == [*LLOYD, *(-v for v in LLOYD)]
    for code, row in enumerate(ROOTS):
        for axis in range(16):
            pair = np.array([code, 0xB0 | axis], np.uint8)  # radius 11: times 1
            want = [v + (k == axis >> 1) * (-1 if axis & 1 else 1) for k, v in enumerate(row)]
            assert kv_codes.E8_ROOT.decode(pair).tolist() == want


def test_the_roots_of_e8() -> None:
    roots = kv_codes.E8_ROOTS4.astype(int)
    assert roots.tolist() == ROOTS and len({tuple(r) for r in ROOTS}) == 240
    assert (np.square(roots).sum(axis=1) == 32).all()
    assert roots[0].tolist() == [-4, -4, 0, 0, 0, 0, 0, 0] and roots[1].tolist() == [-4, 4, 0, 0, 0, 0, 0, 0]
    assert roots[111].tolist() == [0] * 6 + [4, 4] and roots[112].tolist() == [-2] * 8
    assert roots[113].tolist() == [2, -2, -2, -2, -2, -2, -2, 2] and roots[239].tolist() == [2] * 8


def test_rotation_is_its_own_inverse_and_keeps_products() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 50, 256)).astype(f32)
    np.testing.assert_allclose(kv_codes.hadamard(kv_codes.hadamard(a)), a, atol=2e-6)  # 16 float32 sums
    product = (kv_codes.hadamard(a) * kv_codes.hadamard(b)).sum(axis=1)
    np.testing.assert_allclose(product, (a * b).sum(axis=1), atol=2e-5)


@pytest.mark.parametrize(
    ("code", "group", "error"),
    [("INT8", 64, 0.0060), ("LLOYD4", 64, 0.0944), ("E8_SNAP", 64, 0.1645), ("E8_ROOT", 64, 0.476)],
)
def test_reconstruction_errors_are_those_measured_elsewhere(code: str, group: int, error: float) -> None:
    x = np.random.default_rng(0).standard_normal((4000, group)).astype(f32)
    coding = getattr(kv_codes, code)
    raw, scale = coding.encode(x)
    off = coding.decode(raw) * scale[:, None] - x
    assert np.sqrt((off**2).mean() / (x**2).mean()) == pytest.approx(error, rel=0.01)  # 4000 groups


@pytest.mark.parametrize(("name", "head_dim"), [("int8", 32), ("rk8v4", 96), ("nvfp4", 80), ("rk2v4-e8", 8)])
def test_a_head_size_that_does_not_fit_is_refused_with_a_way_out(name: str, head_dim: int) -> None:
    message = f"{name} stores heads of 64, 128, 256, 512 values, this model's have {head_dim}; use --kv-dtype bf16"
    with pytest.raises(UsageError, match=message):
        kv.by_name(name).check(head_dim)
    kv.by_name("bf16").check(head_dim)


@pytest.mark.parametrize("fmt", kv.KV_FORMATS, ids=str)
def test_planes_of_a_page_fill_it(fmt: kv.KVFormat) -> None:
    k, k_scales, v, v_scales = fmt.plane_offsets(2, 128)
    rows = 64 * 2
    assert (k, k_scales - k) == (0, rows * fmt.k.code_bytes(128))
    assert (v - k_scales, v_scales - v) == (rows * fmt.k.scale_bytes(128), rows * fmt.v.code_bytes(128))
    assert fmt.page_bytes(2, 128) - v_scales == rows * fmt.v.scale_bytes(128) and fmt.v_offset(2, 128) == v
