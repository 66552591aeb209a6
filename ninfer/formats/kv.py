"""KV cache formats: how keys and values of one token are stored, and what a page of them looks like.

A page holds PAGE tokens of one layer: a plane of keys [G][PAGE][D], then a plane of values. No group of values
that share a scale spans two tokens, so a page may be cut, overwritten or shared at any token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.errors import UsageError
from ninfer.formats.dtypes import BF16, F16, F32, DType, bf16_to_f32, f32_to_bf16

PAGE = 64  # tokens


@frozen
class Side:
    """Keys or values. code: type of a stored number.

    A quantised side also has scales: one of type `scale` for every `group` numbers of a token (0: one for the
    row), in a plane [G][PAGE][D / group] behind its codes. rotate: a Hadamard transform comes before.
    """

    code: DType
    scale: DType | None = None
    group: int = 0
    rotate: bool = False

    def code_bytes(self, head_dim: int) -> int:
        return head_dim * self.code.bits // 8

    def scale_bytes(self, head_dim: int) -> int:
        if self.scale is None:
            return 0
        return self.scale.nbytes * (head_dim // self.group if self.group else 1)

    def row_bytes(self, head_dim: int) -> int:
        """One token of one KV head."""
        return self.code_bytes(head_dim) + self.scale_bytes(head_dim)

    def encode(self, x: NDArray[np.float32]) -> NDArray[np.uint8]:
        """[..., D] -> code bytes [..., code_bytes(D)]."""
        if self.scale is not None or self.rotate:
            raise NotImplementedError(f"no encoder for {self}")
        bits: NDArray[Any]
        if self.code is BF16:
            bits = f32_to_bf16(x)
        else:
            with np.errstate(over="ignore"):
                bits = np.ascontiguousarray(x, self.code.numpy)
        return np.ascontiguousarray(bits).view(np.uint8)

    def decode(self, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        """[..., code bytes] -> [..., D]."""
        if self.scale is not None or self.rotate:
            raise NotImplementedError(f"no decoder for {self}")
        bits = np.ascontiguousarray(raw).view(self.code.numpy)
        return bf16_to_f32(bits) if self.code is BF16 else bits.astype(np.float32)


@frozen(eq=False, repr=False)
class KVFormat:
    """Compared by identity: there is one value per format, in KV_FORMATS."""

    name: str
    k: Side
    v: Side

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def bytes_per_token(self, num_kv_heads: int, head_dim: int) -> int:
        """Of one layer."""
        return num_kv_heads * (self.k.row_bytes(head_dim) + self.v.row_bytes(head_dim))

    def page_bytes(self, num_kv_heads: int, head_dim: int, page: int = PAGE) -> int:
        """Of one layer."""
        return page * self.bytes_per_token(num_kv_heads, head_dim)

    def v_offset(self, num_kv_heads: int, head_dim: int, page: int = PAGE) -> int:
        """Where the value plane of a page begins."""
        return page * num_kv_heads * self.k.row_bytes(head_dim)


def _same(name: str, code: DType) -> KVFormat:
    return KVFormat(name, Side(code), Side(code))


KV_FORMATS: tuple[KVFormat, ...] = (_same("bf16", BF16), _same("f16", F16), _same("f32", F32))
_BY_NAME = {f.name: f for f in KV_FORMATS}


def by_name(name: str) -> KVFormat:
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UsageError(f"no KV format {name!r}; there are {', '.join(_BY_NAME)}") from None
