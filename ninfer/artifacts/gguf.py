"""GGUF files, versions 2 and 3: our own parser, since others refuse tensor types that they do not know.

A file is untrusted input: every length is compared with what is left of the file before anything is allocated.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from ninfer.artifacts.artifact import Artifact, Parameter, TensorInfo, check_extents
from ninfer.artifacts.mapped import MappedFile
from ninfer.artifacts.names import architecture
from ninfer.artifacts.names.metadata import Metadata
from ninfer.artifacts.names.table import Rule
from ninfer.errors import ArtifactError
from ninfer.formats.quant import QuantFormat, align_up, by_ggml

MAGIC = b"GGUF"
OLD_MAGICS = (b"ggml", b"ggmf", b"ggjt", b"lmgg", b"fmgg", b"tjgg")
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NESTING = 4
MAX_ITEMS = 1 << 24  # of one metadata array
MAX_ALIGNMENT = 1 << 20
MAX_SHARDS = 1000

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_LEAST_BYTES = {**{k: np.dtype(v).itemsize for k, v in _SCALARS.items()}, _STRING: 8, _ARRAY: 12}
_SHARD = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


class _Cursor:
    """Reads little-endian values and never past the end."""

    def __init__(self, file: MappedFile) -> None:
        self.file, self.at = file, 0

    def error(self, text: str) -> ArtifactError:
        return ArtifactError(f"{self.file.path}: {text}")

    def take(self, nbytes: int, what: str) -> bytes:
        if nbytes > self.file.size - self.at:
            raise self.error(
                f"the header says {nbytes} bytes for {what} at {self.at}, but the file has {self.file.size}; "
                "it is truncated or damaged: download it again"
            )
        self.at += nbytes
        return self.file.map[self.at - nbytes : self.at]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, least_bytes: int, what: str) -> int:
        """A u64 count of things that take at least so many bytes each."""
        n = self.u64(f"the number of {what}")
        if n > (self.file.size - self.at) // least_bytes:
            raise self.error(f"the header announces {n} {what}, more than the file can hold: it is damaged")
        return n

    def string(self, what: str, *, strict: bool = True) -> str:
        raw = self.take(self.u64(what), what)
        try:
            return raw.decode("utf-8", "strict" if strict else "replace")
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8: the file is damaged") from None

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.take(dtype.itemsize, f"key {key!r}"), dtype)[0].item()
        if kind == _STRING:
            return self.string(f"key {key!r}", strict=False)
        if kind != _ARRAY:
            raise self.error(f"key {key!r} has value type {kind}; GGUF has 0 to 12: the file is damaged")
        if depth == MAX_NESTING:
            raise self.error(f"key {key!r} nests arrays more than {MAX_NESTING} deep")
        item = self.u32(f"key {key!r}")
        if item not in _LEAST_BYTES:
            raise self.error(f"key {key!r} is an array of value type {item}; GGUF has 0 to 12: the file is damaged")
        n = self.count(_LEAST_BYTES[item], f"items of key {key!r}")
        if n > MAX_ITEMS:
            raise self.error(f"key {key!r} has {n} items; at most {MAX_ITEMS} are accepted")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item])
            return np.frombuffer(self.take(n * dtype.itemsize, f"key {key!r}"), dtype).tolist()
        if item == _STRING:
            return self.strings(n, f"key {key!r}")
        return [self.value(item, key, depth + 1) for _ in range(n)]

    def strings(self, count: int, what: str) -> list[str]:
        """Vocabularies have hundreds of thousands: the same as `string`, in a tight loop."""
        source, at, size, found = self.file.map, self.at, self.file.size, []
        for _ in range(count):
            length = int.from_bytes(source[at : at + 8], "little")
            if at + 8 + length > size:
                self.at = at
                self.string(what)  # raises what is wrong
            found.append(source[at + 8 : at + 8 + length].decode("utf-8", "replace"))
            at += 8 + length
        self.at = at
        return found


@frozen
class StoredTensor:
    """offset: of its first byte in `file`."""

    info: TensorInfo
    file: MappedFile
    offset: int


class GgufFile:
    """One file: its metadata and its tensors under their own names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        try:
            self.metadata, self.tensors = self._parse(_Cursor(self.file))
        except BaseException:
            self.file.close()
            raise

    def _parse(self, c: _Cursor) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        check_magic(self.path, c.take(4, "the magic number"))
        version = c.u32("the version")
        if version not in VERSIONS:
            if version & 0xFFFF == 0 and version:
                raise c.error("it is a big-endian GGUF file; convert it to little-endian (gguf-convert-endian)")
            raise c.error(f"GGUF version {version} is not supported; versions 2 and 3 are: convert the model again")
        num_tensors = c.count(8 + 1 + 4 + 8 + 4 + 8, "tensors")
        num_keys = c.count(8 + 1 + 4 + 1, "metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = c.string("a metadata key")
            if key in metadata:
                raise c.error(f"metadata key {key!r} occurs twice: the file is damaged")
            metadata[key] = c.value(c.u32(f"key {key!r}"), key)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise c.error(f"general.alignment is {alignment!r}, not a power of two up to {MAX_ALIGNMENT}")
        found: dict[str, tuple[TensorInfo, int]] = {}
        for _ in range(num_tensors):
            name = c.string("a tensor name")
            if name in found:
                raise c.error(f"tensor {name!r} occurs twice: the file is damaged")
            found[name] = self._tensor(c, name, alignment)
        base = align_up(c.at, alignment)
        tensors = {n: StoredTensor(info, self.file, base + offset) for n, (info, offset) in found.items()}
        self._check_type_42(tensors, alignment)
        check_extents(self.path, self.file.size, ((n, t.offset, t.info.nbytes) for n, t in tensors.items()))
        return metadata, tensors

    def _check_type_42(self, tensors: Mapping[str, StoredTensor], alignment: int) -> None:
        """The id has been used for three layouts; places of tensors tell which. Only ggml's own is read."""
        order = sorted(tensors.items(), key=lambda t: t[1].offset)
        ends = [*(t.offset for _, t in order), self.file.size][1:]
        for (name, t), end in zip(order, ends, strict=False):
            values, room = prod(t.info.shape), end - t.offset
            if t.info.format.ggml_type != 42 or room >= t.info.nbytes:
                continue
            what = f"{self.path}: tensor {name!r} is of type 42, but "
            if align_up(values // 128 * 34, alignment) == room or values // 128 * 34 == room:
                raise ArtifactError(
                    f"{what}lies 34 bytes per 128 values from the next one: a layout of earlier ternary files, not "
                    "ggml's (18 bytes per 64 values); use a file made by a current converter, or the PQ2_0 one"
                )
            raise ArtifactError(f"{what}has {room} bytes, which are not 18 per 64 values: the file is of another "
                                "layout, or damaged")  # fmt: skip

    def _tensor(self, c: _Cursor, name: str, alignment: int) -> tuple[TensorInfo, int]:
        rank = c.u32(f"tensor {name!r}")
        if not 1 <= rank <= MAX_DIMS:
            raise c.error(f"tensor {name!r} has {rank} dimensions; 1 to {MAX_DIMS} are possible")
        shape = tuple(reversed(struct.unpack(f"<{rank}Q", c.take(8 * rank, f"tensor {name!r}"))))
        type_id, offset = c.u32(f"tensor {name!r}"), c.u64(f"tensor {name!r}")
        try:
            format: QuantFormat = by_ggml(type_id)
            format.nbytes(shape)
        except ArtifactError as error:
            raise c.error(f"tensor {name!r}: {error}") from None
        if offset % alignment:
            raise c.error(f"tensor {name!r} begins at {offset}, not a multiple of {alignment}: the file is damaged")
        return TensorInfo(shape, format), offset

    def close(self) -> None:
        self.file.close()


def check_magic(path: Path, magic: bytes) -> None:
    if magic == MAGIC:
        return
    if magic in OLD_MAGICS:
        raise ArtifactError(f"{path}: a model file older than GGUF ({magic.decode()!r}); convert the model again")
    if magic == MAGIC[::-1]:
        raise ArtifactError(f"{path}: it is a big-endian GGUF file; convert it to little-endian")
    raise ArtifactError(f"{path}: not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}")


def _open_shards(path: Path) -> list[GgufFile]:
    """The file, or all files of a split model, in order."""
    first = GgufFile(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return [first]
    match = _SHARD.match(path.name)
    first.close()
    if match is None or int(match[3]) != count or count > MAX_SHARDS:
        raise ArtifactError(
            f"{path}: part of a model in {count} files, whose names must end with -00001-of-{count:05}.gguf and so on"
        )
    paths = [path.with_name(f"{match[1]}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    absent = [p.name for p in paths if not p.is_file()]
    if absent:
        raise ArtifactError(f"{path}: {len(absent)} of the model's {count} files are missing: {', '.join(absent[:3])}")
    files: list[GgufFile] = []
    try:
        for i, p in enumerate(paths):
            files.append(GgufFile(p))
            if files[-1].metadata.get("split.no") != i:
                raise ArtifactError(f"{p}: split.no is {files[-1].metadata.get('split.no')!r}, not {i}")
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


class GgufArtifact(Artifact):
    """A model in one or several GGUF files."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _open_shards(path)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        values = self._files[0].metadata
        stored: dict[str, StoredTensor] = {}
        for file in self._files:
            for name, tensor in file.tensors.items():
                if name in stored:
                    raise ArtifactError(f"{file.path}: tensor {name!r} is also in another file of the model")
                stored[name] = tensor
        total = values.get("split.tensors.count", len(stored))
        if len(self._files) > 1 and total != len(stored):
            raise ArtifactError(f"{self.path}: its files hold {len(stored)} tensors, but the first announces {total}")
        arch = architecture(self.path, values)
        self.metadata = Metadata(self.path, values, arch.name)
        infos = {name: tensor.info for name, tensor in stored.items()}
        self.config: dict[str, Any] = arch.config(self.metadata, infos)
        self._stored: dict[str, tuple[StoredTensor, Rule]] = {}
        for name, tensor in stored.items():
            target, rule = arch.target(self.path, name, self.config)
            if target in self._stored:
                raise ArtifactError(f"{self.path}: tensor {name!r} and another one both stand for {target!r}")
            self._stored[target] = tensor, rule
        self.generation_config = _generation_config(values)
        tokenizer = {k: v for k, v in values.items() if k.startswith("tokenizer.")}
        has_tokens = isinstance(values.get("tokenizer.ggml.tokens"), list)
        self.tokenizer_source = tokenizer if has_tokens else None
        template = values.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) else None
        title = values.get("general.name")
        self.display_name = title if isinstance(title, str) and title else self.path.stem
        if "rope_freqs.weight" in self._stored:
            self.config["rope_freq_factors"] = self.get("rope_freqs.weight").f32().reshape(-1).tolist()

    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def _find(self, name: str) -> tuple[StoredTensor, Rule]:
        try:
            return self._stored[name]
        except KeyError:
            raise self.missing(name) from None

    def info(self, name: str) -> TensorInfo:
        tensor, rule = self._find(name)
        return TensorInfo(rule.shape(tensor.info.shape), tensor.info.format)

    def get(self, name: str) -> Parameter:
        tensor, rule = self._find(name)
        info = tensor.info
        raw = tensor.file.bytes[tensor.offset : tensor.offset + info.nbytes]
        if raw.size != info.nbytes:
            raise ArtifactError(f"{self.path}: already closed")
        try:
            return rule.fix(Parameter(name, info.shape, info.format, raw), self.config)
        except ArtifactError as error:
            raise ArtifactError(f"{self.path}: tensor {name!r}: {error}") from None

    def close(self) -> None:
        for file in self._files:
            file.close()


_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def _generation_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Stop ids and sampling defaults under the names of generation_config.json."""
    ids = {name: values.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    known = {name: i for name, i in ids.items() if isinstance(i, int) and not isinstance(i, bool)}
    out: dict[str, Any] = {}
    stops = [known[name] for name in ("eos", "eot") if name in known]
    if stops:
        out["eos_token_id"] = list(dict.fromkeys(stops))
    if "bos" in known:
        out["bos_token_id"] = known["bos"]
    if "padding" in known:
        out["pad_token_id"] = known["padding"]
    for theirs, ours in _SAMPLING.items():
        value = values.get(f"general.sampling.{theirs}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            out[ours] = value
    return out
