"""C decoders of the formats whose codes index a grid: their tables, and one run of 32 values of a block."""

from __future__ import annotations

from ninfer.formats import grids
from ninfer.formats.quant import QuantFormat

# Statements that fill out[0..31] with run r of the block at b; GRID(i) points to the int8 entries of grid point i.
_SIGNED = """
    for (u32 j = 0; j < 4; ++j) {
        const i8* g = GRID(%(index)s);
        const u32 s = %(signs)s;
        for (u32 i = 0; i < 8; ++i) out[8 * j + i] = %(d)s * (f32)g[i] * (s >> i & 1 ? -1.0f : 1.0f);
    }"""
_SIGNED4 = """
    for (u32 j = 0; j < 8; ++j) {
        const i8* g = GRID(%(index)s);
        const u32 s = %(signs)s >> 4 * (j & 1);
        for (u32 i = 0; i < 4; ++i) out[4 * j + i] = %(d)s * %(value)s;
    }"""
_D = "f16_to_f32((u16)(b[0] | b[1] << 8))"

GRIDS = {
    "iq2_xxs": f"""
    const u32 word = word32(b + 6 + 8 * r);
    const f32 d = {_D} * (0.5f + (f32)(word >> 28)) * 0.25f;"""
    + _SIGNED % {"index": "b[2 + 8 * r + j]", "signs": "even_signs(word >> 7 * j & 127)", "d": "d"},
    "iq2_xs": f"""
    const f32 d = {_D};
    const f32 db[2] = {{d * (0.5f + (f32)(b[66 + r] & 15)) * 0.25f, d * (0.5f + (f32)(b[66 + r] >> 4)) * 0.25f}};
    u32 q[4];
    for (u32 j = 0; j < 4; ++j) q[j] = b[2 + 8 * r + 2 * j] | (u32)b[3 + 8 * r + 2 * j] << 8;"""
    + _SIGNED % {"index": "q[j] & 511", "signs": "even_signs(q[j] >> 9)", "d": "db[j / 2]"},
    "iq2_s": f"""
    const f32 d = {_D};
    const f32 db[2] = {{d * (0.5f + (f32)(b[74 + r] & 15)) * 0.25f, d * (0.5f + (f32)(b[74 + r] >> 4)) * 0.25f}};"""
    + _SIGNED
    % {
        "index": "b[2 + 4 * r + j] | (u32)(b[66 + r] >> 2 * j & 3) << 8",
        "signs": "b[34 + 4 * r + j]",
        "d": "db[j / 2]",
    },
    "iq3_xxs": f"""
    const u32 word = word32(b + 66 + 4 * r);
    const f32 d = {_D} * (0.5f + (f32)(word >> 28)) * 0.5f;"""
    + _SIGNED4
    % {
        "index": "b[2 + 8 * r + j]",
        "signs": "even_signs(word >> 7 * (j / 2) & 127)",
        "d": "d",
        "value": "(f32)g[i] * (s >> i & 1 ? -1.0f : 1.0f)",
    },
    "iq3_s": f"""
    const f32 d = {_D} * (1.0f + 2.0f * (f32)(b[106 + r / 2] >> 4 * (r & 1) & 15));"""
    + _SIGNED4
    % {
        "index": "b[2 + 8 * r + j] | (u32)(b[66 + r] >> j & 1) << 8",
        "signs": "b[74 + 4 * r + j / 2]",
        "d": "d",
        "value": "((f32)g[i] * (s >> i & 1 ? -1.0f : 1.0f))",
    },
    "iq1_s": f"""
    const u32 qh = b[34 + 2 * r] | (u32)b[35 + 2 * r] << 8;
    const f32 d = {_D} * (f32)(2 * (qh >> 12 & 7) + 1), delta = qh & 0x8000 ? -0.125f : 0.125f;
    for (u32 j = 0; j < 4; ++j) {{
        const i8* g = GRID(b[2 + 4 * r + j] | (qh >> 3 * j & 7) << 8);
        for (u32 i = 0; i < 8; ++i) out[8 * j + i] = d * ((f32)g[i] + delta);
    }}""",
    "iq1_m": """
    u32 s[4];
    for (u32 j = 0; j < 4; ++j) s[j] = b[48 + 2 * j] | (u32)b[49 + 2 * j] << 8;
    const f32 d = f16_to_f32((u16)(s[0] >> 12 | (s[1] >> 8 & 0xf0) | (s[2] >> 4 & 0xf00) | (s[3] & 0xf000)));
    for (u32 j = 0; j < 4; ++j) {
        const u32 high = b[32 + 2 * r + j / 2] >> 4 * (j & 1), part = 2 * r + j / 2;
        const f32 dl = d * (f32)(2 * (s[part / 4] >> 3 * (part % 4) & 7) + 1), delta = high & 8 ? -0.125f : 0.125f;
        const i8* g = GRID(b[4 * r + j] | (high & 7) << 8);
        for (u32 i = 0; i < 8; ++i) out[8 * j + i] = dl * ((f32)g[i] + delta);
    }""",
}


def grid_source(fmt: QuantFormat) -> str:
    """`static void <format>_run(const u8* b, u32 r, f32* out)` with its tables."""
    table = grids.grid(fmt.name)
    body = GRIDS[fmt.name].replace("GRID(", f"{fmt.name}_point(")
    values = ",".join(str(int(v)) for v in table.reshape(-1))
    return f"""static const i8 {fmt.name}_grid[] = {{{values}}};
static inline const i8* {fmt.name}_point(u32 i) {{ return {fmt.name}_grid + {table.shape[1]} * i; }}
static inline u32 {fmt.name}_even(u32 s) {{ return s | (u32)__builtin_parity(s) << 7; }}
static inline u32 {fmt.name}_word(const u8* b) {{ u32 x; memcpy(&x, b, 4); return x; }}
static void {fmt.name}_run(const u8* b, u32 r, f32* out) {{{
        body.replace("even_signs(", f"{fmt.name}_even(").replace("word32(", f"{fmt.name}_word(")
    }
}}
"""
