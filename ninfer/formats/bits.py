"""Where the small integers of a packed block lie, and what they mean: declarations with a numpy and a C reading.

The bytes of a block come as fields: a mapping from a record's field name to uint8 [blocks, field bytes].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.formats.dtypes import E4M3_VALUES

Fields: TypeAlias = Mapping[str, NDArray[np.uint8]]
I8Array: TypeAlias = NDArray[np.int8]
U8Array: TypeAlias = NDArray[np.uint8]
F32Array: TypeAlias = NDArray[np.float32]


@frozen
class Plane:
    """A run of `bits`-wide numbers in a field: `span` bytes give their low bits first, then the next bits, and so on.

    With per_byte = 8 // bits, element e lies in chunk e // (span * per_byte); with r the rest,
        byte  = offset + chunk * span + r % span + hop * (r // span)
        shift = shift0 + step * (r // span)
    and it supplies bits `lsb` and up of the number. `step` is `bits` unless given; only the 6-bit scales of the
    K formats need `step` and `hop`.
    """

    field: str
    bits: int
    span: int
    offset: int = 0
    lsb: int = 0
    shift0: int = 0
    step: int | None = None
    hop: int = 0

    @property
    def chunk(self) -> int:
        return self.span * (8 // self.bits)

    @property
    def shift_step(self) -> int:
        return self.bits if self.step is None else self.step

    def where(self, count: int) -> tuple[NDArray[np.intp], U8Array]:
        """Byte index and right shift of each of the first `count` elements."""
        chunk, r = np.divmod(np.arange(count), self.chunk)
        turn, lane = np.divmod(r, self.span)
        byte = self.offset + chunk * self.span + lane + self.hop * turn
        return byte.astype(np.intp), (self.shift0 + self.shift_step * turn).astype(np.uint8)

    def read(self, fields: Fields, count: int) -> U8Array:
        byte, shift = self.where(count)
        raw = np.take(fields[self.field], byte, axis=1)
        if shift.any():
            raw >>= shift
        if self.bits < 8:
            raw &= np.uint8((1 << self.bits) - 1)
        if self.lsb:
            raw <<= np.uint8(self.lsb)
        return raw

    def write(self, out: Fields, u: U8Array) -> None:
        """Ors the bits of u [blocks, count] into the zeroed field."""
        byte, shift = self.where(u.shape[1])
        part = (u >> np.uint8(self.lsb)) & np.uint8((1 << self.bits) - 1)
        for s in np.unique(shift):  # elements with one shift never share a byte
            here = shift == s
            out[self.field][:, byte[here]] |= part[:, here] << s

    def c_expr(self, at: str, e: str) -> str:
        """u32-valued C expression of element `e`; `at` holds a pointer per field."""
        turn = f"{e} % {self.chunk} / {self.span}" if self.chunk > self.span else "0"
        terms = [str(self.offset)] if self.offset else []
        if self.span == self.chunk:
            terms.append(e)
        elif self.span == 1:
            terms.append(f"{e} / {self.chunk}")
        else:
            terms.append(f"{e} / {self.chunk} * {self.span} + {e} % {self.span}")
        if self.hop:
            terms.append(f"{self.hop} * ({turn})")
        shifts = [str(self.shift0)] if self.shift0 else []
        if self.shift_step and self.chunk > self.span:
            shifts.append(f"{self.shift_step} * ({turn})")
        text = f"(u32){at}.{self.field}[{' + '.join(terms)}]"
        if shifts:
            text = f"({text} >> ({' + '.join(shifts)}))"
        if self.bits < 8:
            text = f"({text} & {(1 << self.bits) - 1}u)"
        return f"({text} << {self.lsb})" if self.lsb else text


@frozen
class Signed:
    """Two's complement of `bits`. illegal: words that no valid file holds."""

    bits: int
    illegal: tuple[int, ...] = ()

    @property
    def low(self) -> int:
        return -(1 << (self.bits - 1)) + (1 if self.illegal else 0)

    @property
    def high(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def decode(self, u: U8Array) -> I8Array:
        sign = 1 << (self.bits - 1)
        return ((u ^ np.uint8(sign)) - np.uint8(sign)).view(np.int8)

    def encode(self, code: I8Array) -> U8Array:
        return code.view(np.uint8) & np.uint8((1 << self.bits) - 1)

    def c_expr(self, u: str) -> str:
        sign = 1 << (self.bits - 1)
        return f"(i32)(({u}) ^ {sign}u) - {sign}"


@frozen
class Offset:
    """word - zero."""

    bits: int
    zero: int = 0

    @property
    def low(self) -> int:
        return -self.zero

    @property
    def high(self) -> int:
        return (1 << self.bits) - 1 - self.zero

    def decode(self, u: U8Array) -> I8Array:
        return (u - np.uint8(self.zero)).view(np.int8)

    def encode(self, code: I8Array) -> U8Array:
        return code.view(np.uint8) + np.uint8(self.zero)

    def c_expr(self, u: str) -> str:
        return f"(i32)({u}) - {self.zero}" if self.zero else f"(i32)({u})"


@frozen
class Table:
    """values[word], integers of at most 8 bits; at most 16 of them."""

    values: tuple[int, ...]

    @property
    def low(self) -> int:
        return min(self.values)

    @property
    def high(self) -> int:
        return max(self.values)

    def decode(self, u: U8Array) -> I8Array:
        return np.array(self.values, np.int8)[u]

    def encode(self, code: I8Array) -> U8Array:
        """The first word with each value; a value not in the table is an error of the caller."""
        words = np.zeros(256, np.uint8)
        for word in reversed(range(len(self.values))):
            words[self.values[word] & 0xFF] = word
        return words[code.view(np.uint8)]

    def c_expr(self, u: str) -> str:
        """Bytes of two 64-bit constants, so that no table in memory is needed."""
        halves = []
        for start in range(0, len(self.values), 8):
            part = self.values[start : start + 8]
            halves.append(f"0x{sum((v & 0xFF) << (8 * i) for i, v in enumerate(part)):x}ull")
        word = halves[0] if len(halves) == 1 else f"(({u}) < 8u ? {halves[0]} : {halves[1]})"
        return f"(i32)(i8)({word} >> (8u * (({u}) & 7u)))"


CodeMap: TypeAlias = Signed | Offset | Table


@frozen
class Bits:
    """Integers whose bits lie in planes: map(plane | plane | ...)."""

    planes: tuple[Plane, ...]
    map: CodeMap

    def words(self, fields: Fields, count: int) -> U8Array:
        first, *others = self.planes
        u = first.read(fields, count)
        for plane in others:
            u |= plane.read(fields, count)
        return u

    def read(self, fields: Fields, count: int) -> I8Array:
        """[blocks, count]."""
        return self.map.decode(self.words(fields, count))

    def write(self, out: Fields, code: I8Array) -> None:
        u = self.map.encode(code)
        for plane in self.planes:
            plane.write(out, u)

    def c_body(self, at: str, e: str) -> str:
        """C statements that return number `e`."""
        word = " | ".join(p.c_expr(at, e) for p in self.planes)
        return f"u32 u = {word};\n    return {self.map.c_expr('u')};"


_POW3 = (1, 3, 9, 27, 81)
_TRIT_RUNS = (("qs", 0, 32, 5), ("qs", 32, 16, 5), ("qh", 0, 4, 4))  # field, first byte, bytes, digits of each


@frozen
class Trits:
    """-1, 0, 1 as base-3 digits, five to a byte, the byte being a fraction of 256. 256 numbers in qs[48], qh[4]."""

    map: Table = Table((-1, 0, 1))

    def words(self, fields: Fields, count: int) -> U8Array:
        parts = []
        for name, start, size, digits in _TRIT_RUNS:
            raw = fields[name][:, None, start : start + size]
            moved = raw * np.array(_POW3[:digits], np.uint8)[:, None]  # modulo 256 by the carrier
            parts.append(((moved.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(len(raw), -1))
        return np.concatenate(parts, axis=1)

    def read(self, fields: Fields, count: int) -> I8Array:
        return self.map.decode(self.words(fields, count))

    def write(self, out: Fields, code: I8Array) -> None:
        u, at = self.map.encode(code).astype(np.uint16), 0
        for name, start, size, digits in _TRIT_RUNS:
            part = u[:, at : at + size * digits].reshape(len(u), digits, size)
            at += size * digits
            number = sum(part[:, n] * (81 // _POW3[n]) for n in range(digits))
            out[name][:, start : start + size] = (np.asarray(number) * 256 + 242) // 243

    def c_body(self, at: str, e: str) -> str:
        return f"""u32 b, n, r = {e};
    if (r < 160) {{ b = {at}.qs[r % 32]; n = r / 32; }}
    else if (r < 240) {{ b = {at}.qs[32 + r % 16]; n = (r - 160) / 16; }}
    else {{ b = {at}.qh[r % 4]; n = (r - 240) / 4; }}
    while (n--) b *= 3;
    return (i32)(((b & 255u) * 3u) >> 8) - 1;"""


ScaleKind: TypeAlias = Literal["f16", "e8m0_half", "ue4m3_half"]


@frozen
class Scale:
    """A factor per group: a word of the block (or of the group, if the field has several), times a small integer.

    kind: what the word is. e8m0_half: 2**(byte - 128). ue4m3_half: half of an unsigned e4m3, 0x7f counting as 0.
    The product word * sub is taken in float32. negate: minus that product.
    """

    field: str
    kind: ScaleKind = "f16"
    sub: Bits | None = None
    negate: bool = False

    def words(self, fields: Fields) -> F32Array:
        raw = fields[self.field]
        match self.kind:
            case "f16":
                return np.ascontiguousarray(raw).view("<f2").astype(np.float32)
            case "e8m0_half":
                e = raw.astype(np.uint32)
                small = np.uint32(0x200000) << np.minimum(e, 1)
                return np.where(e < 2, small, (e - np.uint32(1)) << np.uint32(23)).astype(np.uint32).view(np.float32)
            case "ue4m3_half":
                word = raw & np.uint8(0x7F)
                return np.where(word == 0x7F, np.float32(0), E4M3_VALUES[word] * np.float32(0.5))

    def read(self, fields: Fields, groups: int) -> F32Array:
        """[blocks, groups]."""
        value = self.words(fields)
        if self.sub is not None:
            value = value * self.sub.read(fields, groups).astype(np.float32)
        elif value.shape[1] != groups:
            value = np.broadcast_to(value, (len(value), groups))
        return -value if self.negate else value

    def c_body(self, at: str, g: str, words: int) -> str:
        """C statements that return the factor of group `g`; `words`: how many words the field has."""
        p, i = f"{at}.{self.field}", g if words > 1 else "0"
        match self.kind:
            case "f16":
                j = f"2 * {i}" if words > 1 else "0"
                text = f"f32 v = f16_to_f32((u16)({p}[{j}] | ((u32){p}[{j} + 1] << 8)));"
            case "e8m0_half":
                text = f"u32 w = {p}[{i}];\n    f32 v = bits_to_f32(w < 2u ? 0x200000u << w : (w - 1u) << 23);"
            case "ue4m3_half":
                text = f"""u32 w = {p}[{i}] & 127u, x = w >> 3, f = w & 7u;
    f32 v = w == 127u ? 0.0f : x ? bits_to_f32(((x + 119u) << 23) | (f << 20)) : (f32)f * 0.0009765625f;"""
        sign = "-" if self.negate else ""
        if self.sub is None:
            return f"{text}\n    return {sign}v;"
        word = " | ".join(plane.c_expr(at, g) for plane in self.sub.planes)
        return f"{text}\n    u32 s = {word};\n    return {sign}(v * (f32)({self.sub.map.c_expr('s')}));"
