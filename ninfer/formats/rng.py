"""A keyed uniform: the same (seed, position, purpose, sub) gives the same number in numpy, C and CUDA.

With x -> mix(x) the finaliser of splitmix64 (all arithmetic modulo 2**64):
    k = mix(seed ^ position * POSITION_STEP)
    k = mix(k ^ purpose << 21 ^ sub * SUB_STEP)
    u = ((k >> 41) + 0.5) * 2**-23
The last line is exact in float32 and lies in [2**-24, 1 - 2**-24]: with one more bit the addition would round, and
its largest result would be 1, whose double logarithm is infinite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIX_ADD = 0x9E3779B97F4A7C15
MIX_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shift, multiplier
MIX_LAST = 31
POSITION_STEP = 0xD1B54A32D192ED03
SUB_STEP = 0x2545F4914F6CDD1D
PURPOSE_SHIFT = 21

U64Array = NDArray[np.uint64]


def mix(x: U64Array) -> U64Array:
    x = x + np.uint64(MIX_ADD)
    for shift, multiplier in MIX_STEPS:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(multiplier)
    return x ^ (x >> np.uint64(MIX_LAST))


def random_bits(seed: ArrayLike, position: ArrayLike, purpose: int, sub: ArrayLike) -> U64Array:
    """64 bits for each of the broadcast keys: seed u64; position, purpose and sub u32."""
    with np.errstate(over="ignore"):
        start = np.asarray(seed, np.uint64) ^ (np.asarray(position, np.uint64) * np.uint64(POSITION_STEP))
        k = mix(np.atleast_1d(start)) ^ np.uint64(purpose << PURPOSE_SHIFT)
        return mix(k ^ (np.asarray(sub, np.uint64) * np.uint64(SUB_STEP)))


def uniform(seed: ArrayLike, position: ArrayLike, purpose: int, sub: ArrayLike) -> NDArray[np.float32]:
    """float32 in (0, 1), at least one-dimensional."""
    x = random_bits(seed, position, purpose, sub) >> np.uint64(41)
    values: NDArray[Any] = (x.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return values


def rng_c(qualifier: str = "static inline") -> str:
    """The same in C: u64 rng_mix(u64), u64 random_bits(u64 seed, u32 position, u32 purpose, u32 sub) and
    f32 uniform(...) with the same arguments, over the type names u32, u64 and f32."""
    steps = "\n".join(f"    x = (x ^ (x >> {shift})) * {by:#x}ull;" for shift, by in MIX_STEPS)
    return f"""{qualifier} u64 rng_mix(u64 x) {{
    x += {MIX_ADD:#x}ull;
{steps}
    return x ^ (x >> {MIX_LAST});
}}
{qualifier} u64 random_bits(u64 seed, u32 position, u32 purpose, u32 sub) {{
    u64 k = rng_mix(seed ^ ((u64)position * {POSITION_STEP:#x}ull));
    return rng_mix(k ^ ((u64)purpose << {PURPOSE_SHIFT}) ^ ((u64)sub * {SUB_STEP:#x}ull));
}}
{qualifier} f32 uniform(u64 seed, u32 position, u32 purpose, u32 sub) {{
    return ((f32)(u32)(random_bits(seed, position, purpose, sub) >> 41) + 0.5f) * {2.0**-23!r}f;
}}
"""


RNG_C: str = rng_c()
