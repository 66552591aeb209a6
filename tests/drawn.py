"""Weights drawn as PyTorch draws them on a CPU, so that a tiny checkpoint is a seed and a list of names.

References under tests/data beside a drawn.json were computed by transformers from weights of `torch.randn`. This makes
the same numbers: a Mersenne twister, uniforms of 24 bits, Box and Muller in blocks of 16. Their logarithms and cosines
are float32 there and float64 here; after rounding to bf16 a handful of values of a model differ by one step, and those
are listed beside the reference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ninfer.artifacts.safetensors import read_json
from ninfer.formats.dtypes import bf16_to_f32, f32_to_bf16

F32 = NDArray[np.float32]


class Generator:
    def __init__(self, seed: int) -> None:
        self._bits = np.random.RandomState(seed)  # its stream never changes
        self._spare: float | None = None  # of the scalar path

    def _words(self, n: int) -> NDArray[np.uint64]:
        return np.frombuffer(self._bits.bytes(4 * n), "<u4").astype(np.uint64)

    def _uniforms(self, n: int) -> NDArray[np.float64]:
        return (self._words(n) & np.uint64(0xFFFFFF)).astype(np.float64) * 2.0**-24

    def uniform(self, n: int, low: float, high: float) -> F32:
        return (self._uniforms(n).astype(np.float32) * np.float32(high - low) + np.float32(low)).astype(np.float32)

    def normal(self, n: int) -> F32:
        """Fewer than 16 values come one at a time, in double precision."""
        if n < 16:
            return np.array([self._one() for _ in range(n)], np.float32)
        values = self._uniforms(n)
        blocks = n // 16 * 16
        values[:blocks] = _box_muller(values[:blocks])
        if n % 16:
            values[-16:] = _box_muller(self._uniforms(16))
        return values.astype(np.float32)

    def _one(self) -> float:
        if self._spare is not None:
            value, self._spare = self._spare, None
            return value
        high, low, high2, low2 = (int(w) for w in self._words(4))
        u1, u2 = (((h << 32 | w) & (1 << 53) - 1) * 2.0**-53 for h, w in ((high, low), (high2, low2)))
        radius, angle = sqrt(-2.0 * np.log1p(-u2)), 2.0 * np.pi * u1
        self._spare = float(radius * np.sin(angle))
        return float(radius * np.cos(angle))


def _box_muller(u: NDArray[np.float64]) -> NDArray[np.float64]:
    pairs = u.reshape(-1, 2, 8)
    radius, angle = np.sqrt(-2.0 * np.log(1.0 - pairs[:, 0])), 2.0 * np.pi * pairs[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)


def drawn(gen: Generator, name: str, shape: tuple[int, ...], offset_norms: bool) -> F32:
    """One parameter. offset_norms: norms multiply by 1 + w."""
    n, leaf = prod(shape), name.rsplit(".", 1)[-1]
    if leaf == "A_log":
        return np.log(gen.uniform(n, 0.2, 4.0).astype(np.float64)).astype(np.float32).reshape(shape)
    if leaf == "layer_scalar":
        return (np.float32(0.7) + np.float32(0.3) * gen.uniform(n, 0, 1)).reshape(shape)
    x = gen.normal(n).reshape(shape)
    if leaf == "dt_bias":
        return x * np.float32(0.5) - np.float32(1)
    if "norm" in name.split(".")[-2] or leaf in ("scale", "per_expert_scale"):
        plain = not offset_norms or "linear_attn.norm" in name
        return x * np.float32(0.2) + np.float32(1 if plain else 0)
    if "embed_tokens" in name:
        return x * np.float32(1.0 if offset_norms else 0.15)
    fan_in = prod(shape[1:]) if "conv1d" in name else shape[-1]
    gain = 2.0 if "mlp.gate." in name or "router.proj" in name else 1.0
    return x * np.float32(gain / sqrt(fan_in))


def checkpoint(source: Path, target: Path) -> Path:
    """A folder with config.json and model.safetensors from `source`/drawn.json and config.json."""
    recipe: Mapping[str, Any] = read_json(source / "drawn.json")
    tensors: dict[str, NDArray[Any]] = {}
    for seed, names in recipe["draws"]:
        gen = Generator(seed)
        for name, shape in names:
            values = drawn(gen, name, tuple(shape), recipe["offset_norms"])
            keep = name.endswith(("A_log", "linear_attn.norm.weight"))
            tensors[name] = values if keep else f32_to_bf16(values)
    for name, places in recipe["one_step_off"].items():
        flat = tensors[name].reshape(-1)
        for place, bits in places:
            flat[place] = bits
    target.mkdir(exist_ok=True)
    if recipe.get("single_experts"):
        tensors = dict(pair for item in tensors.items() for pair in _single(*item))
    save_file({k: _stored(v) for k, v in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(read_json(source / "config.json")))
    return target


def _single(name: str, x: NDArray[Any]) -> list[tuple[str, NDArray[Any]]]:
    """Stacks of experts as matrices of single ones."""
    stem, leaf = name.rsplit(".", 1)
    if leaf == "down_proj":
        return [(f"{stem}.{e}.down_proj.weight", part) for e, part in enumerate(x)]
    if leaf != "gate_up_proj":
        return [(name, x)]
    half = x.shape[1] // 2
    return [
        (f"{stem}.{e}.{which}_proj.weight", part)
        for e, both in enumerate(x)
        for which, part in (("gate", both[:half]), ("up", both[half:]))
    ]


def _stored(x: NDArray[Any]) -> NDArray[Any]:
    """The library knows no bf16 in numpy: float32 of the same values."""
    return np.ascontiguousarray(bf16_to_f32(x)) if x.dtype == np.uint16 else np.ascontiguousarray(x)


# Which values of a reference are kept: every so many along the last axis, or of a state's values in a row.
COLUMNS = dict.fromkeys(("logits", "step_logits", "long_logits_tail", "mtp_logits", "mtp_draft_logits"), (3, 32))
COLUMNS |= dict.fromkeys(("layer_out", "final_hidden", "mtp_hidden"), (1, 16))
STATE_STEP = 17


def kept(key: str, x: NDArray[Any]) -> NDArray[Any]:
    """Of a whole array what its reference has."""
    first, step = COLUMNS[key]
    return x[..., first::step]
