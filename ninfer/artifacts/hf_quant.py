"""Quantised weights of Hugging Face folders: several stored tensors that are one matrix.

    NVFP4   weight_packed u8 [N, K/2], weight_scale e4m3 [N, K/16], weight_global_scale (compressed-tensors), or
            weight u8, weight_scale, weight_scale_2 = 1 / divisor (ModelOpt)               -> nvfp4
    MXFP4   weight_packed u8 [N, K/2], weight_scale u8 [N, K/32]                           -> mxfp4
    MXFP8   weight e4m3 [N, K], weight_scale u8 [N, K/32]                                  -> mxfp8
    FP8     weight e4m3 [N, K], weight_scale: a number per row, or one                     -> fp8_e4m3fn_row_bf16
    FP8     weight e4m3 [N, K], weight_scale_inv: a multiplier per 128 x 128 values        -> f32

The matrix is offered as `<name>.weight`. Bytes are put in the format's order when it is asked for; blocks of FP8, and
row scales that bf16 does not hold, are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.artifacts.mapped import MappedFile
from ninfer.errors import ArtifactError
from ninfer.formats.bits import F32Array, U8Array
from ninfer.formats.dtypes import bf16_to_f32, e4m3_to_f32, f32_to_bf16
from ninfer.formats.quant import F32_FORMAT, QuantFormat, by_name, nvfp4

E4M3, BYTES = "F8_E4M3", ("U8", "F8_E8M0")
_COMPANIONS = ("weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale",
               "input_global_scale", "input_scale", "weight_shape")  # fmt: skip
_OF_CACHE = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")
_REFUSED = {
    "weight_zero_point": "integers with zero points (AWQ, GPTQ)",
    "qweight": "GPTQ or AWQ integers",
    "qzeros": "GPTQ or AWQ integers",
    "weight_g_idx": "integers in activation order (GPTQ)",
}
BLOCK = 128


@frozen
class StoredTensor:
    """offset: of its first byte in `file`. dtype: as the file spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: MappedFile
    offset: int
    nbytes: int

    @property
    def raw(self) -> U8Array:
        found = self.file.bytes[self.offset : self.offset + self.nbytes]
        if found.size != self.nbytes:
            raise ArtifactError(f"{self.file.path}: already closed")
        return found

    def error(self, problem: str) -> ArtifactError:
        return ArtifactError(f"{self.file.path}: tensor {self.name!r} {problem}")


Parts: TypeAlias = Mapping[str, StoredTensor]  # by the last word of the name


@frozen(eq=False)
class QuantTensor:
    """A matrix of several stored tensors. divisor: of activations, for products with 4-bit ones."""

    shape: tuple[int, int]
    format: QuantFormat
    make: Callable[[], U8Array]
    divisor: float | None = None


def join(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, QuantTensor]]:
    """What stays a tensor of its own, and the matrices that others make up.   Raises ArtifactError."""
    groups: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        stem, _, word = name.rpartition(".")
        if word in _REFUSED:
            raise tensor.error(f"belongs to weights that are {_REFUSED[word]}, which are not supported; use the bf16 "
                               "checkpoint, an FP8 or an NVFP4 one")  # fmt: skip
        if word in _COMPANIONS or (word == "weight" and tensor.dtype in (E4M3, "U8")):
            groups.setdefault(stem, {})[word] = tensor
    for stem, parts in groups.items():
        if f"{stem}.weight" in stored:
            parts.setdefault("weight", stored[f"{stem}.weight"])
    made = {f"{stem}.weight": t for stem, parts in groups.items() if (t := _matrix(parts)) is not None}
    used = {t.name for stem, parts in groups.items() if f"{stem}.weight" in made for t in parts.values()}
    rest = {n: t for n, t in stored.items() if t.name not in used and not n.endswith(_OF_CACHE)}
    return {n: t for n, t in rest.items() if n.rpartition(".")[2] not in ("input_scale", "input_global_scale")}, made


def _matrix(parts: Parts) -> QuantTensor | None:
    scale, packed = parts.get("weight_scale"), parts.get("weight_packed")
    weight = parts.get("weight")
    if weight is not None and weight.dtype not in (E4M3, "U8"):
        return None  # an ordinary tensor with scales of activations beside it
    words = packed if packed is not None else weight
    if words is None:
        return None
    if "weight_scale_inv" in parts:
        return _fp8_blocks(words, parts["weight_scale_inv"])
    if scale is None:
        raise words.error(f"is {words.dtype} without a scale beside it (weight_scale, weight_scale_inv)")
    if words.dtype == E4M3:
        mx = scale.dtype in BYTES
        return _mxfp8(words, scale) if mx else _fp8_rows(words, scale)
    if words.dtype != "U8":
        raise words.error(f"is packed as {words.dtype}; supported are NVFP4 and MXFP4 in U8")
    if scale.dtype == E4M3:
        return _nvfp4(words, scale, parts)
    if scale.dtype in BYTES:
        return _mxfp4(words, scale)
    raise scale.error(f"is {scale.dtype}, not a scale of NVFP4 ({E4M3}) or MXFP4 (U8)")


def _rank2(t: StoredTensor) -> tuple[int, int]:
    if len(t.shape) != 2 or not all(t.shape):
        raise t.error(f"has shape {list(t.shape)}, not a matrix")
    return t.shape[0], t.shape[1]


def _check(t: StoredTensor, *shapes: tuple[int, ...]) -> None:
    if t.shape not in shapes:
        raise t.error(f"has shape {list(t.shape)}, but {' or '.join(str(list(s)) for s in shapes)} is expected of it")


def _numbers(t: StoredTensor) -> F32Array:
    match t.dtype:
        case "F32":
            return t.raw.view("<f4").astype(np.float32)
        case "BF16":
            return bf16_to_f32(t.raw.view("<u2"))
        case "F16":
            return t.raw.view("<f2").astype(np.float32)
    raise t.error(f"is {t.dtype}; scales are F32, BF16 or F16")


def _scalar(t: StoredTensor) -> float:
    values = _numbers(t)
    if not values.size or not (np.isfinite(values) & (values > 0)).all() or (values != values[0]).any():
        raise t.error("is not one positive number")
    return float(values[0])


def _reciprocal(t: StoredTensor) -> float:
    return float(np.float32(1) / np.float32(_scalar(t)))


def _fp8_rows(words: StoredTensor, scale: StoredTensor) -> QuantTensor:
    n, k = _rank2(words)
    _check(scale, (n, 1), (n,), (), (1,), (1, 1))

    def scales() -> F32Array:
        return np.ascontiguousarray(np.broadcast_to(_numbers(scale).reshape(-1, 1), (n, 1)))

    half = f32_to_bf16(scales())
    if np.array_equal(bf16_to_f32(half), scales()):
        fmt = by_name("fp8_e4m3fn_row_bf16")
        return QuantTensor((n, k), fmt, lambda: _planes(fmt, (n, k), words.raw, half.astype("<u2").view(np.uint8)))
    return QuantTensor((n, k), F32_FORMAT, lambda: _bytes(_words(words) * scales()))


def _fp8_blocks(words: StoredTensor, scale: StoredTensor) -> QuantTensor:
    n, k = _rank2(words)
    _check(scale, (-(-n // BLOCK), -(-k // BLOCK)))

    def make() -> U8Array:
        values, factors = _words(words), _numbers(scale).reshape(scale.shape).repeat(BLOCK, axis=1)[:, :k]
        for i, row in enumerate(factors):
            values[i * BLOCK : (i + 1) * BLOCK] *= row
        return _bytes(values)

    return QuantTensor((n, k), F32_FORMAT, make)


def _mxfp8(words: StoredTensor, scale: StoredTensor) -> QuantTensor:
    n, k = _rank2(words)
    if k % 32:
        raise words.error(f"has rows of {k} values, which are not blocks of 32")
    _check(scale, (n, k // 32))
    fmt = by_name("mxfp8")
    return QuantTensor((n, k), fmt, lambda: _planes(fmt, (n, k), words.raw, scale.raw))


def _mxfp4(words: StoredTensor, scale: StoredTensor) -> QuantTensor:
    """ggml's blocks: the scale's byte, then value j of the block beside value j + 16."""
    n, half = _rank2(words)
    k, fmt = 2 * half, by_name("mxfp4")
    if k % 32:
        raise words.error(f"has rows of {k} values, which are not blocks of 32")
    _check(scale, (n, k // 32))

    def make() -> U8Array:
        pairs = words.raw.reshape(-1, 16)
        codes = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=-1).reshape(-1, 32)
        blocks = np.empty((len(pairs), 17), np.uint8)
        blocks[:, 0] = scale.raw
        blocks[:, 1:] = codes[:, :16] | codes[:, 16:] << np.uint8(4)
        return blocks.reshape(-1)

    return QuantTensor((n, k), fmt, make)


def _nvfp4(words: StoredTensor, scale: StoredTensor, parts: Parts) -> QuantTensor:
    n, half = _rank2(words)
    k = 2 * half
    _check(scale, (n, k // 16))
    if "weight_global_scale" in parts:
        divisor = _scalar(parts["weight_global_scale"])
        given = parts.get("input_global_scale")
        activations = None if given is None else _scalar(given)
    elif "weight_scale_2" in parts:
        divisor = _reciprocal(parts["weight_scale_2"])
        given = parts.get("input_scale")
        activations = None if given is None else _reciprocal(given)
    else:
        raise words.error("is NVFP4 without weight_global_scale or weight_scale_2 beside it")
    fmt = nvfp4(1)
    try:
        fmt.nbytes((n, k))
    except ArtifactError as error:
        raise words.error(f"cannot be used: {error}") from None
    column = np.full((n, 1), divisor, "<f4").view(np.uint8)

    def make() -> U8Array:
        fields = {"words": words.raw.reshape(n, -1), "scale": scale.raw.reshape(n, -1), "divisor": column}
        return fmt.from_fields(fields, k)

    return QuantTensor((n, k), fmt, make, activations)


def _words(t: StoredTensor) -> F32Array:
    return e4m3_to_f32(t.raw).reshape(t.shape)


def _bytes(values: NDArray[Any]) -> U8Array:
    return np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)


def _planes(fmt: QuantFormat, shape: tuple[int, int], *planes: U8Array) -> U8Array:
    out = np.zeros(fmt.nbytes(shape), np.uint8)
    for span, raw in zip(fmt.planes(shape), planes, strict=True):
        out[span.offset : span.offset + span.nbytes] = raw.reshape(-1)
    return out
