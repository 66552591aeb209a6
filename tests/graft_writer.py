"""Writes phantom-kv containers, whole ones and damaged ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.models.qwen3_5 import FULL, LINEAR, Qwen35Spec

Arrays = dict[str, NDArray[Any]]
DTYPES = {"<u2": "BF16", "<f4": "F32", "<i8": "I64"}


def random_state(spec: Qwen35Spec, n: int, seed: int = 0) -> Arrays:
    """k, v, conv, rec of small random values, bf16 as bits."""
    rng = np.random.default_rng(seed)

    def bf16(*shape: int) -> NDArray[np.uint16]:
        bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16
        return bits.astype("<u2")

    full, linear = spec.layer_types.count(FULL), spec.layer_types.count(LINEAR)
    kv = (full, n, spec.num_kv_heads, spec.head_dim)
    rec = rng.standard_normal((linear, spec.value_heads, spec.key_dim, spec.value_dim))
    return {
        "k": bf16(*kv),
        "v": bf16(*kv),
        "conv": bf16(linear, spec.channels, spec.conv_taps),
        "rec": rec.astype("<f4"),
    }


def description(spec: Qwen35Spec, kind: str, n: int) -> dict[str, Any]:
    return {
        "format_version": 1,
        "kind": kind,
        "n_slots": n,
        "n_layers": spec.num_layers,
        "layer_types": list(spec.layer_types),
        "n_attn_layers": spec.layer_types.count(FULL),
        "n_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "conv_dim": spec.channels,
        "conv_k": spec.conv_taps,
        "rec_shape": [spec.value_heads, spec.key_dim, spec.value_dim],
        **({"replay": "ids"} if kind == "prefill_kv" else {}),
    }


def write_graft(
    path: Path,
    spec: Qwen35Spec,
    kind: str = "prefill_kv",
    *,
    ids: Sequence[int] = (),
    n: int = 0,
    arrays: Arrays | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Path:
    """n: of positions, where there are no ids. arrays, meta: what is to be otherwise than it should; None: left out."""
    n = len(ids) or n
    tensors: Arrays = random_state(spec, n)
    if kind == "prefill_kv":
        tensors["replay_ids"] = np.array(ids, "<i8")
    if kind == "softprompt_kv":
        tensors["replay_embeds"] = np.zeros((n, spec.hidden_size), "<u2")
    tensors |= arrays or {}
    header, payload = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": DTYPES[array.dtype.str],
            "shape": list(array.shape),
            "data_offsets": [len(payload), len(payload) + len(raw)],
        }
        payload += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    told = description(spec, kind, n) | {"sha256": hashlib.sha256(payload).hexdigest()} | dict(meta or {})
    path.with_suffix(".json").write_text(json.dumps({k: v for k, v in told.items() if v is not None}))
    return path
