"""Rotary frequencies and the ways to stretch them over longer contexts."""

from __future__ import annotations

from math import ceil, floor, log, pi

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from ninfer.errors import ArtifactError, UsageError
from ninfer.models.fields import Fields

MAX_HEAD_DIM = 1 << 14  # a damaged config must not ask for any amount of memory
KINDS = ("default", "linear", "llama3", "yarn")


@frozen(kw_only=True)
class RopeSpec:
    """Frequency i of the rotary_dim / 2 pairs is theta^(-2i / rotary_dim), changed as `kind` says.

    original_len: the window the model was trained with. divisors: of each frequency, as some files store them.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    original_len: int = 0
    low_freq_factor: float = 1.0  # llama3: wavelengths above original_len / low are stretched fully
    high_freq_factor: float = 4.0  # and those below original_len / high not at all
    beta_fast: float = 32.0  # yarn: pairs that turn more often than this in original_len keep their frequency
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # of cos and sin
    divisors: tuple[float, ...] = ()

    def frequencies(self) -> NDArray[np.float32]:
        """[rotary_dim / 2], radians per token; computed in float64, rounded once."""
        pairs = np.arange(self.rotary_dim // 2)
        freqs = self.theta ** (-2.0 * pairs / self.rotary_dim)
        match self.kind:
            case "linear":
                freqs = freqs / self.factor
            case "llama3":
                turns = self.original_len * freqs / (2 * pi)
                keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
                freqs = _blend(freqs, self.factor, np.clip(keep, 0, 1))
            case "yarn":
                low, high = self._yarn_range()
                freqs = _blend(freqs, self.factor, 1 - np.clip((pairs - low) / (high - low), 0, 1))
        if self.divisors:
            freqs = freqs / np.array(self.divisors)
        return freqs.astype(np.float32)

    def _yarn_range(self) -> tuple[float, float]:
        """Pairs up to the first keep their frequency, those from the second on are stretched fully."""
        low, high = (
            self.rotary_dim * log(self.original_len / (beta * 2 * pi)) / (2 * log(self.theta))
            for beta in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = floor(low), ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        return low, high if high != low else low + 0.001

    def stretched(self, factor: float, original_len: int) -> RopeSpec:
        """YaRN by `factor` over a model that has no scaling of its own (Peng et al. 2023)."""
        if factor < 1:
            raise UsageError(f"--rope-yarn {factor:g}: the factor is the new window over the old, at least 1")
        if self.kind != "default":
            raise UsageError(f"--rope-yarn {factor:g}: the model's rope has a scaling already, {self.kind}")
        return evolve(
            self, kind="yarn", factor=factor, original_len=original_len, attention_factor=yarn_attention_factor(factor)
        )


def _blend(freqs: NDArray[np.float64], factor: float, keep: NDArray[np.float64]) -> NDArray[np.float64]:
    return keep * freqs + (1 - keep) * freqs / factor


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0


def parse_rope(config: Fields, head_dim: int, context_len: int, *, rotary_share: float = 1.0) -> RopeSpec:
    """From `rope_parameters`, or `rope_theta` and `rope_scaling` of older files.   Raises ArtifactError."""
    if head_dim > MAX_HEAD_DIM:
        raise ArtifactError(f"{config.where}: heads of {head_dim} values; at most {MAX_HEAD_DIM} are possible")
    rope = config.below("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    theta = rope.real("rope_theta", config.get("rope_theta", 10000.0))
    share = rope.real("partial_rotary_factor", config.get("partial_rotary_factor", rotary_share))
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        rope.fail("partial_rotary_factor", f"but {share:g} of {head_dim} dimensions is not an even part of them")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "mrope":  # positions of several axes; text has one
        kind = "default"
    if kind not in KINDS:
        rope.fail("rope_type", f"but supported are {', '.join(KINDS)}")
    divisors = config.reals("rope_freq_factors", rotary_dim // 2) if "rope_freq_factors" in config else ()
    base = RopeSpec(theta=theta, rotary_dim=rotary_dim, kind=kind, divisors=divisors)
    if kind == "default":
        return base
    factor = rope.real("factor")
    window = "original_max_position_embeddings"
    original = rope.whole(window, config.get(window, context_len))
    if kind == "linear":
        return evolve(base, factor=factor)
    if kind == "llama3":
        low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
        if high <= low:
            rope.fail("high_freq_factor", f"but must be above low_freq_factor {low:g}")
        return evolve(base, factor=factor, original_len=original, low_freq_factor=low, high_freq_factor=high)
    if "attention_factor" in rope:
        attention = rope.real("attention_factor")
    elif "mscale" in rope and "mscale_all_dim" in rope:
        attention = yarn_attention_factor(factor, rope.real("mscale")) / yarn_attention_factor(
            factor, rope.real("mscale_all_dim")
        )
    else:
        attention = yarn_attention_factor(factor)
    return evolve(
        base,
        factor=factor,
        original_len=original,
        beta_fast=rope.real("beta_fast", 32.0),
        beta_slow=rope.real("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=attention,
    )
