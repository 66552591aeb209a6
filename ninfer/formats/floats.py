"""Formats whose words are small floats: FP8 with a scale per row, MXFP8, NVFP4.

    w[n, k] = float(word) * scale   (and, in NVFP4, / divisor)

in float32: the product of word and scale is exact, the division rounds once. Layouts (A: rounded up to 256 bytes):

    rows         words [N, K], A, one scale per row
    interleaved  each row: K words, one scale
    groups       words [N, K], A, one scale per 32 values
    tiles        two words a byte, the low half first [N, K / 2], A, one scale per 16 values in the order of the
                 tensor cores' scale tiles (128 rows by 4 groups), one f32 divisor per N / divisors rows
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.errors import ArtifactError
from ninfer.formats.bits import F32Array, U8Array
from ninfer.formats.dtypes import (
    E2M1_VALUES,
    E4M3_VALUES,
    U8,
    bf16_to_f32,
    e4m3_to_f32,
    f32_to_bf16,
    f32_to_e2m1,
    f32_to_e4m3,
)
from ninfer.formats.format import PLANE_ALIGN, PlaneSpan, QuantFormat, align_up, matrix_of
from ninfer.formats.record import Field, Record

TILE_ROWS, TILE_GROUPS = 128, 4
_SLICE_VALUES = 1 << 20


@frozen(eq=False, repr=False)
class FloatFormat(QuantFormat):
    """word: e4m3 (one byte) or e2m1 (half of one); scale: the type of a scale."""

    layout: Literal["rows", "interleaved", "groups", "tiles"] = "rows"
    word: Literal["e4m3", "e2m1"] = "e4m3"
    scale: Literal["bf16", "f16", "e8m0", "e4m3"] = "bf16"
    divisors: int = 0

    @classmethod
    def rows(cls, name: str, scale: Literal["bf16", "f16"], *, interleaved: bool = False) -> FloatFormat:
        record = Record(name, (Field("word", U8),))
        return cls(name, None, 1, record, 1, layout="interleaved" if interleaved else "rows", scale=scale)

    @classmethod
    def mxfp8(cls, name: str) -> FloatFormat:
        record = Record(name, (Field("words", U8, 32), Field("scale", U8)))
        return cls(name, None, 32, record, 32, layout="groups", scale="e8m0")

    @classmethod
    def nvfp4(cls, name: str, divisors: int) -> FloatFormat:
        record = Record(name, (Field("words", U8, 32), Field("scale", U8, 4)))
        return cls(name, None, 64, record, 16, layout="tiles", word="e2m1", scale="e4m3", divisors=divisors)

    # sizes

    @property
    def can_pack(self) -> bool:
        return True

    @property
    def row_step(self) -> int:
        return TILE_ROWS if self.layout == "tiles" else 1

    def least_rows(self, rows: int) -> int:
        return align_up(rows, self.row_step * max(1, self.divisors))

    def _shape(self, shape: Sequence[int]) -> tuple[int, int]:
        n, k = matrix_of(shape)
        self.blocks_per_row(k)
        if self.layout == "tiles" and n % (TILE_ROWS * self.divisors):
            raise ArtifactError(
                f"{self.name} has tiles of {TILE_ROWS} rows in each of {self.divisors} sources: {n} rows do not divide "
                "into them"
            )
        return n, k

    def _row_parts(self, k: int) -> dict[str, int]:
        """Bytes of a row: its words, its scales."""
        words = k if self.word == "e4m3" else k // 2
        return {
            "words": words,
            "scale": {"rows": 2, "interleaved": 2, "groups": k // 32, "tiles": k // 16}[self.layout],
        }

    def planes(self, shape: Sequence[int]) -> tuple[PlaneSpan, ...]:
        n, k = self._shape(shape)
        parts = self._row_parts(k)
        if self.layout == "interleaved":
            return (PlaneSpan("blocks", 0, n * sum(parts.values())),)
        at = align_up(n * parts["words"], PLANE_ALIGN)
        spans = [PlaneSpan("words", 0, n * parts["words"]), PlaneSpan("scale", at, n * parts["scale"])]
        if self.layout == "tiles":
            spans.append(PlaneSpan("divisor", at + n * parts["scale"], 4 * self.divisors))
        return tuple(spans)

    def bpw(self, k: int) -> float:
        return 8 * sum(self._row_parts(k).values()) / k

    def row_bytes(self, k: int) -> int:
        if self.layout != "interleaved":
            raise ArtifactError(f"{self.name} keeps words and scales apart: a row has no single extent")
        return sum(self._row_parts(k).values())

    def row_spans(self, shape: Sequence[int], start: int, count: int) -> list[tuple[int, int]]:
        n, _ = self._shape(shape)
        self._shape((count, shape[-1]))
        if self.layout == "tiles" and (start, count) != (0, n):
            raise ArtifactError(f"{self.name}: divisors are of the whole matrix, which is made at once")
        spans = self.planes(shape)
        if (start, count) == (0, n):
            return [(s.offset, s.nbytes) for s in spans]
        return [(s.offset + start * s.nbytes // n, count * s.nbytes // n) for s in spans]

    # rows

    def fields(self, raw: U8Array, shape: Sequence[int]) -> dict[str, U8Array]:
        """[N, bytes of a row]: words, scale, and divisor where there is one. In tiles, scales are a copy."""
        n, k = self._shape(shape)
        raw, spans = raw.reshape(-1), self.planes(shape)
        if raw.size != self.nbytes(shape):
            raise ArtifactError(f"a {self.name} matrix {list(shape)} takes {self.nbytes(shape)} bytes, not {raw.size}")
        parts = self._row_parts(k)
        if self.layout == "interleaved":
            rows = raw.reshape(n, -1)
            return {"words": rows[:, : parts["words"]], "scale": rows[:, parts["words"] :]}
        planes = {s.name: raw[s.offset : s.offset + s.nbytes] for s in spans}
        out = {"words": planes["words"].reshape(n, -1)}
        if self.layout != "tiles":
            return {**out, "scale": planes["scale"].reshape(n, -1)}
        tiles = planes["scale"].reshape(n // TILE_ROWS, k // 64, 32, 4, 4)  # tile, 4 groups, row % 32, row / 32, group
        divisor = planes["divisor"].reshape(self.divisors, 4).repeat(n // self.divisors, axis=0)
        return {**out, "scale": tiles.transpose(0, 3, 2, 1, 4).reshape(n, -1), "divisor": divisor}

    def from_fields(self, fields: dict[str, U8Array], k: int) -> U8Array:
        """The inverse of `fields`."""
        n = len(fields["words"])
        raw = np.zeros(self.nbytes((n, k)), np.uint8)
        if self.layout == "interleaved":
            raw.reshape(n, -1)[:] = np.concatenate([fields["words"], fields["scale"]], axis=1)
            return raw
        planes = {s.name: raw[s.offset : s.offset + s.nbytes] for s in self.planes((n, k))}
        planes["words"][:] = fields["words"].reshape(-1)
        scale = fields["scale"]
        if self.layout == "tiles":
            scale = scale.reshape(n // TILE_ROWS, 4, 32, k // 64, 4).transpose(0, 3, 2, 1, 4)
            divisor = fields["divisor"].reshape(self.divisors, -1, 4)
            if (divisor != divisor[:, :1]).any():
                raise ArtifactError(f"{self.name}: rows of sources with different divisors do not make one matrix")
            planes["divisor"][:] = divisor[:, 0].reshape(-1)
        planes["scale"][:] = scale.reshape(-1)
        return raw

    def slice_rows(self, raw: U8Array, shape: Sequence[int], start: int, count: int) -> U8Array:
        if self.layout == "interleaved":
            width = self.row_bytes(matrix_of(shape)[1])
            return raw.reshape(-1)[start * width : (start + count) * width]
        if (start, count) == (0, matrix_of(shape)[0]):
            return raw.reshape(-1)
        rows = {name: f[start : start + count] for name, f in self.fields(raw, shape).items()}
        return self.from_fields(rows, matrix_of(shape)[1])

    def gather_rows(self, raw: U8Array, shape: Sequence[int], index: NDArray[np.intp]) -> U8Array:
        fields = {name: f[index] for name, f in self.fields(raw, shape).items()}
        return self.from_fields(fields, matrix_of(shape)[1])

    def stack_rows(self, parts: Sequence[tuple[U8Array, Sequence[int]]]) -> U8Array:
        k = parts[0][1][-1]
        if any(shape[-1] != k for _, shape in parts):
            raise ArtifactError(f"rows of {', '.join(str(shape[-1]) for _, shape in parts)} values cannot be stacked")
        all_fields = [self.fields(raw, shape) for raw, shape in parts]
        return self.from_fields({n: np.concatenate([f[n] for f in all_fields]) for n in all_fields[0]}, k)

    def can_move_columns(self, width: int) -> bool:
        return False

    # values

    def _scales(self, fields: dict[str, U8Array]) -> F32Array:
        """[N, scales of a row]."""
        raw = np.ascontiguousarray(fields["scale"])
        match self.scale:
            case "bf16":
                return bf16_to_f32(raw.view("<u2"))
            case "f16":
                return raw.view("<f2").astype(np.float32)
            case "e4m3":
                return e4m3_to_f32(raw)
            case "e8m0":
                return _E8M0[raw]

    def unpack(self, raw: U8Array, shape: Sequence[int]) -> F32Array:
        n, k = self._shape(shape)
        fields, out = self.fields(raw, shape), np.empty((n, k), np.float32)
        step = max(1, _SLICE_VALUES // k)
        for r in range(0, n, step):
            out[r : r + step] = self._values({name: f[r : r + step] for name, f in fields.items()}, k)
        return out.reshape(tuple(shape))

    def unpack_rows(self, raw: U8Array, shape: Sequence[int], index: NDArray[np.intp]) -> F32Array:
        return self._values({name: f[index] for name, f in self.fields(raw, shape).items()}, shape[-1])

    def _values(self, fields: dict[str, U8Array], k: int) -> F32Array:
        """[rows, k]."""
        words, scale = fields["words"], self._scales(fields)
        if self.word == "e2m1":
            both = np.stack([words & np.uint8(15), words >> np.uint8(4)], axis=-1)
            values = E2M1_VALUES[both.reshape(len(words), k)]
        else:
            values = E4M3_VALUES[words]
        with np.errstate(over="ignore", invalid="ignore"):
            values = values.reshape(len(words), scale.shape[1], -1) * scale[:, :, None]
            if "divisor" in fields:
                values = values / np.ascontiguousarray(fields["divisor"]).view("<f4")[:, :, None]
        return values.reshape(len(words), k)

    def check(self, raw: U8Array, shape: Sequence[int]) -> None:
        """Raises ArtifactError for words and scales that no valid matrix holds."""
        fields = self.fields(raw, shape)
        scale = self._scales(fields)
        if not np.isfinite(scale).all() or np.signbit(scale).any():
            raise ArtifactError(f"{self.name}: a scale is negative, infinite or NaN")
        if self.word == "e4m3" and (fields["words"] & np.uint8(0x7F) == 0x7F).any():
            raise ArtifactError(f"{self.name}: a word is NaN")
        if self.layout in ("rows", "interleaved") and (fields["words"][scale[:, 0] == 0] & np.uint8(0x7F)).any():
            raise ArtifactError(f"{self.name}: a row has scale 0 but words other than 0")
        if "divisor" in fields:
            divisor = np.ascontiguousarray(fields["divisor"]).view("<f4")
            if not (np.isfinite(divisor) & (divisor > 0)).all():
                raise ArtifactError(f"{self.name}: a divisor is not a positive number")

    def pack(self, x: NDArray[Any]) -> U8Array:
        n, k = self._shape(x.shape)
        values = np.ascontiguousarray(x, np.float32).reshape(n, k)
        if not np.isfinite(values).all():
            raise ArtifactError(f"{self.name} cannot hold infinities or NaN")
        match self.layout:
            case "tiles":
                fields = _nvfp4_fields(values, self.divisors)
            case "groups":
                fields = _mxfp8_fields(values)
            case _:
                fields = _row_fields(values, self.scale)
        return self.from_fields(fields, k)

    # C

    def c_source(self, prefix: str, shape: Sequence[int], qualifier: str = "static inline") -> str:
        """As of other formats: f32 P_value(const u8 *w, u64 row, u32 k); and what it is made of,
        P_word(w, row, k), P_scale(w, row, k) and, in tiles, P_divisor(w, row)."""
        n, k = self._shape(shape)
        q, p, spans = qualifier, prefix, self.planes(shape)
        lines = [f"{q} f32 {p}_e4m3(u32 c) {{", _E4M3_C, "}"] if "e4m3" in (self.word, self.scale) else []
        if self.word == "e2m1":
            lines += [f"{q} f32 {p}_word(const u8 *w, u64 row, u32 k) {{",
                      f"    u32 c = w[row * {k // 2}u + k / 2] >> 4u * (k & 1u);",
                      "    f32 v = (f32)(u8)(0x0c08060403020100ull >> 8u * (c & 7u)) * 0.5f;",
                      "    return bits_to_f32(f32_to_bits(v) | (c & 8u) << 28);\n}"]  # fmt: skip
        else:
            width = k + 2 if self.layout == "interleaved" else k
            lines.append(f"{q} f32 {p}_word(const u8 *w, u64 row, u32 k) {{ return {p}_e4m3(w[row * {width}u + k]); }}")
        at = spans[-1].offset if self.layout != "tiles" else spans[1].offset
        place = {
            "rows": f"w + {at}u + 2u * row",
            "interleaved": f"w + row * {k + 2}u + {k}u",
            "groups": f"w + {at}u + row * {k // 32}u + k / 32u",
            "tiles": f"w + {at}u + (row / 128u * {k // 64}u + k / 64u) * 512u + row % 32u * 16u"
                     " + row % 128u / 32u * 4u + k / 16u % 4u",
        }[self.layout]  # fmt: skip
        value = {
            "bf16": "bits_to_f32((u32)(s[0] | (u32)s[1] << 8) << 16)",
            "f16": "f16_to_f32((u16)(s[0] | (u32)s[1] << 8))",
            "e8m0": "s[0] == 255u ? bits_to_f32(0x7fc00000u) : s[0] ? bits_to_f32((u32)s[0] << 23) : 0x1p-127f",
            "e4m3": f"{p}_e4m3(s[0])",
        }[self.scale]
        lines += [f"{q} f32 {p}_scale(const u8 *w, u64 row, u32 k) {{", "    (void)k;",
                  f"    const u8 *s = {place};", f"    return {value};\n}}"]  # fmt: skip
        over = ""
        if self.layout == "tiles":
            over = f" / {p}_divisor(w, row)"
            lines += [f"{q} f32 {p}_divisor(const u8 *w, u64 row) {{",
                      f"    const u8 *s = w + {spans[2].offset}u + row / {n // self.divisors}u * 4u;",
                      "    u32 v;\n    memcpy(&v, s, 4);\n    return bits_to_f32(v);\n}"]  # fmt: skip
        lines += [f"{q} f32 {p}_value(const u8 *w, u64 row, u32 k) {{",
                  f"    return {p}_word(w, row, k) * {p}_scale(w, row, k){over};\n}}"]  # fmt: skip
        return "\n".join(lines) + "\n"


# Moving the bits into place and multiplying by 2^120 gives subnormals too.
_E4M3_C = """    f32 v = bits_to_f32((c & 0x7fu) << 20) * 0x1p120f;
    v = (c & 0x7fu) == 0x7fu ? bits_to_f32(0x7fc00000u) : v;
    return bits_to_f32(f32_to_bits(v) | (c & 0x80u) << 24);"""
_E8M0: F32Array = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)


def _row_fields(x: F32Array, scale: str) -> dict[str, U8Array]:
    """scale = max|x| / 448 of the row in its own type; words = e4m3(clamp(x * (1 / scale)))."""
    x = bf16_to_f32(f32_to_bf16(x))
    amax = np.abs(x).max(axis=1)
    wanted = amax / np.float32(448)
    if scale == "bf16":
        bits = f32_to_bf16(wanted)
        value = bf16_to_f32(bits)
        if ((amax > 0) & (value <= np.float32(2.0**-128))).any():
            raise ArtifactError("a row is too small for a bf16 scale, whose reciprocal would overflow")
    else:
        with np.errstate(over="ignore"):
            half = wanted.astype("<f2")
        if not np.isfinite(half).all():
            raise ArtifactError("a row's scale does not fit float16")
        bits = half.view("<u2").copy()
        bits[(bits == 0) & (amax > 0)] = 1
        value = bits.view("<f2").astype(np.float32)
    inverse = np.divide(np.float32(1), value, out=np.zeros_like(value), where=value > 0)
    words = f32_to_e4m3(np.clip(x * inverse[:, None], -448, 448))
    words[amax == 0] = 0
    return {"words": words, "scale": bits.astype("<u2").reshape(-1, 1).view(np.uint8)}


def _mxfp8_fields(x: F32Array) -> dict[str, U8Array]:
    """The power of two that brings max|x| of 32 values into [256, 512), of which 448 is the greatest value."""
    n, k = x.shape
    y = x.reshape(n, -1, 32)
    amax = np.abs(y).max(axis=-1)
    _, exponent = np.frexp(amax)
    e = np.where(amax > 0, np.clip(exponent - 1 - 8 + 127, 0, 254), 127).astype(np.uint8)
    return {"words": f32_to_e4m3(y / _E8M0[e][:, :, None]).reshape(n, k), "scale": e}


def _nvfp4_fields(x: F32Array, divisors: int) -> dict[str, U8Array]:
    """divisor = 448 * 6 / max|x| of a source, scale = e4m3(max|x| / 6 * divisor) of 16 values, nearest words."""
    n, k = x.shape
    amax = np.abs(x).reshape(divisors, -1).max(axis=1)
    divisor = np.divide(np.float32(448 * 6), amax, out=np.ones_like(amax), where=amax > 0)
    rows = divisor.repeat(n // divisors)[:, None]
    y = x.reshape(n, -1, 16)
    scale = f32_to_e4m3(np.abs(y).max(axis=-1) / np.float32(6) * rows)
    value = e4m3_to_f32(scale)[:, :, None]
    z = np.divide(y * rows[:, :, None], value, out=np.zeros_like(y), where=value > 0)
    words = f32_to_e2m1(z).reshape(n, k)
    raw = rows.astype("<f4").view(np.uint8)
    return {"words": words[:, ::2] | words[:, 1::2] << np.uint8(4), "scale": scale, "divisor": raw}
