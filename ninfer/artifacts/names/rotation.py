"""Matrices in a rotated basis, as PrismML's `prism.hadamard.*` keys tell."""

from __future__ import annotations

from typing import Any

import numpy as np

from ninfer.artifacts.names.metadata import Metadata, is_count, short
from ninfer.artifacts.names.table import BLOCK, GLOBALS, Rules, Tensors
from ninfer.errors import ArtifactError

_PRISM = {
    "version": 1,
    "transform": "normalized-sylvester-walsh-hadamard",
    "axis": "input-last-dimension",
    "sign_mode": "explicit",
}


def rotation(meta: Metadata, tensors: Tensors, layers: int, block: Rules) -> dict[str, Any]:
    """Signs of the rotated matrices (PrismML's `prism.hadamard.*`), as bf16 words by the checkpoint's names."""

    def get(key: str) -> Any:
        return meta.values.get(f"prism.hadamard.{key}")

    if get("version") is None:
        return {}
    for key, only in _PRISM.items():
        if get(key) != only:
            raise ArtifactError(f"{meta.path}: prism.hadamard.{key} is {short(get(key))}; supported is {only!r}")
    widths, values = get("sign_widths"), get("sign_values")
    fits = isinstance(widths, list) and all(map(is_count, widths)) and isinstance(values, list)
    if not fits or sum(widths) != len(values) or any(v not in (1, -1) for v in values):
        raise ArtifactError(f"{meta.path}: prism.hadamard.sign_values are not a sign for each of sign_widths")
    words, at, signs = np.where(np.array(values) > 0, 0x3F80, 0xBF80).astype(np.uint16), 0, dict[int, Any]()
    for width in widths:
        signs[width], at = words[at : at + width], at + width
    names, inverse = get("weight_names") or [], get("inverse_weight_names") or []
    if inverse not in ([], ["token_embd.weight"]):
        raise ArtifactError(f"{meta.path}: prism.hadamard.inverse_weight_names is {short(inverse)}; supported is the "
                            "embedding alone")  # fmt: skip
    found = {}
    for name in [*names, *inverse]:
        tensor = tensors.get(name)
        if tensor is None or tensor.shape[-1] not in signs:
            raise ArtifactError(f"{meta.path}: prism.hadamard names {name!r}, which has no signs or is not there")
        match = BLOCK.match(name)
        if match is None:
            target = GLOBALS[name].target if name in GLOBALS else name
        else:
            prefix = f"model.layers.{match[1]}." if int(match[1]) < layers else "mtp.layers.0."
            target = prefix + (block[match[2]].target if match[2] in block else match[2])
        found[target] = signs[tensor.shape[-1]]
    return {
        "hadamard_signs": found,
        "hadamard_block": get("block_size"),
        "gdn_v_grouped": get("gdn_v_grouped") is True,
    }
