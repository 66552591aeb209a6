"""Tiny DFlash and DFlash2 checkpoints, drawn as their reference drew them (see drawn.py).

References under tests/data/dflash and dflash2 were computed in plain PyTorch from these weights; of logits they keep
every 32nd column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ninfer.artifacts.safetensors import read_json
from ninfer.formats.dtypes import bf16_to_f32, f32_to_bf16
from tests.drawn import F32, Generator


def shapes(c: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, d, inner, more = c["hidden_size"], c["head_dim"], c["intermediate_size"], c["dflash_config"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    yield "fc.weight", (h, h * len(more["target_layer_ids"]))
    yield from ((name, (h,)) for name in ("hidden_norm.weight", "norm.weight"))
    second = "conv_kernel_size" in more
    if second:
        taps, groups, rank = more["conv_kernel_size"], h // more["conv_group_size"], more["selector_rank"]
        yield "candidate_selector.hidden_projection.weight", (rank, h)
        for book in ("predecessor", "successor"):
            yield f"candidate_selector.{book}_codebook", (c["vocab_size"], rank)
    for n in range(c["num_hidden_layers"]):
        p, a = f"layers.{n}.", f"layers.{n}.self_attn."
        yield from ((f"{p}{name}_layernorm.weight", (h,)) for name in ("input", "post_attention"))
        yield from (
            (f"{a}{x}_proj.weight", s) for x, s in (("q", (q, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, q)))
        )
        yield from ((f"{a}{x}_norm.weight", (d,)) for x in "qk")
        yield from ((f"{p}mlp.{x}_proj.weight", (inner, h)) for x in ("gate", "up"))
        yield f"{p}mlp.down_proj.weight", (h, inner)
        for branch in ("attention_conv", "mlp_conv") if second else ():
            yield f"{p}{branch}.base_kernel", (2, taps, h)
            yield f"{p}{branch}.kernel_projection.weight", (2 * taps * groups, h)


def scaled(name: str, x: F32) -> F32:
    if name.endswith("base_kernel"):
        return x * np.float32(0.25) + np.array([1, 0], np.float32)[None, :, None]
    if "codebook" in name:
        return x * np.float32(0.4)
    if "kernel_projection" in name:
        return (x * np.float32(0.3)) / np.float32(sqrt(x.shape[-1]))
    if "norm" in name:
        sharp = name.endswith(("q_norm.weight", "k_norm.weight"))
        return (np.float32(1) + np.float32(0.2) * x) * np.float32(1.6 if sharp else 1)
    return (x * np.float32(3 if name.endswith("o_proj.weight") else 1)) / np.float32(sqrt(x.shape[-1]))


def drafter_checkpoint(source: Path, target: Path) -> Path:
    """A folder from `source`/config.json and drawn.json."""
    config, recipe = read_json(source / "config.json"), read_json(source / "drawn.json")
    gen = Generator(recipe["seed"])
    tensors = {}
    for name, shape in shapes(config):
        bits = f32_to_bf16(scaled(name, gen.normal(prod(shape)).reshape(shape)))
        for place, value in recipe["one_step_off"].get(name, ()):
            bits.reshape(-1)[place] = value
        tensors[name] = np.ascontiguousarray(bf16_to_f32(bits))
    target.mkdir(exist_ok=True)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target
