"""A Hugging Face folder: config.json, one or several safetensors files, and the tokenizer's files.

Our own header reader over a mapping: tensors are views of the file.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from ninfer.artifacts.artifact import Artifact, Parameter, TensorInfo, check_extents
from ninfer.artifacts.hf_quant import QuantTensor, StoredTensor, join
from ninfer.artifacts.mapped import MappedFile
from ninfer.errors import ArtifactError
from ninfer.formats.quant import BF16_FORMAT, F16_FORMAT, F32_FORMAT

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20
FORMAT_OF = {"F32": F32_FORMAT, "F16": F16_FORMAT, "BF16": BF16_FORMAT}
BITS_OF = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64,
}  # fmt: skip
_PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."),
             ("language_model.lm_head.", "lm_head."))  # fmt: skip


def logical_name(name: str) -> str:
    """Without the prefix that a multimodal checkpoint puts before its text model."""
    for prefix, short in _PREFIXES:
        if name.startswith(prefix):
            return short + name[len(prefix) :]
    return name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key occurs twice")
    return out


def _parse_json(path: Path, text: str | bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ArtifactError(f"{path}: {what} cannot be read as JSON: {reason}") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: {what} is not a JSON object")
    return value


def read_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None
    return _parse_json(path, text, "the file")


def _is_count(v: object) -> bool:
    return isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 62


def read_header(file: MappedFile) -> dict[str, StoredTensor]:
    """Tensors of one safetensors file under their own names."""
    path, size = file.path, file.size
    length = int.from_bytes(file.map[:8], "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise ArtifactError(
            f"{path}: the file announces a header of {length} bytes but has {size} in all: it is not a safetensors "
            "file, or truncated"
        )
    header = _parse_json(path, file.map[8 : 8 + length], "the header")
    header.pop("__metadata__", None)
    base = 8 + length
    tensors = {name: _read_entry(file, base, name, entry) for name, entry in header.items()}
    check_extents(path, size, ((t.name, t.offset, t.nbytes) for t in tensors.values()))
    return tensors


def _read_entry(file: MappedFile, base: int, name: str, entry: object) -> StoredTensor:
    def error(problem: str) -> ArtifactError:
        return ArtifactError(f"{file.path}: tensor {name!r} {problem}: the file is damaged")

    if not isinstance(entry, dict):
        raise error("has no description")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise error("has no dtype")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_is_count(d) for d in shape):
        raise error("has no valid shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(o) for o in offsets):
        raise error("has no valid data_offsets")
    nbytes = offsets[1] - offsets[0]
    if nbytes < 0 or (dtype in BITS_OF and nbytes * 8 != prod(shape) * BITS_OF[dtype]):
        raise error(f"has {nbytes} bytes, which do not fit {dtype} {shape}")
    return StoredTensor(name, dtype, tuple(shape), file, base + offsets[0], nbytes)


class SafetensorsArtifact(Artifact):
    """A folder in the layout of the Hugging Face hub.   only: one of its files alone, whose config is empty."""

    kind = "safetensors"

    def __init__(self, path: Path, only: str | None = None) -> None:
        self.path, self._only = path, only
        self.config = {} if only is not None else read_json(path / "config.json")
        self._files: list[MappedFile] = []
        try:
            self._stored, self._joined = join(self._open_files())
        except BaseException:
            self.close()
            raise
        self.generation_config = self._optional("generation_config.json")
        tokenizer = path / "tokenizer.json"
        self.tokenizer_source = tokenizer if tokenizer.is_file() else None
        self.chat_template = self._find_template()
        self.display_name = path.resolve().name
        if only is not None:
            self.path = path / only  # for messages

    def _optional(self, name: str) -> dict[str, Any]:
        file = self.path / name
        return read_json(file) if file.is_file() else {}

    def _find_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ArtifactError(f"{file}: cannot be read: {error}") from None
        template = self._optional("tokenizer_config.json").get("chat_template")
        if isinstance(template, list):  # several named ones
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        if template is None:
            template = self._optional("chat_template.json").get("chat_template")
        return template if isinstance(template, str) else None

    def _file_names(self) -> list[str]:
        if self._only is not None:
            return [self._only]
        if (self.path / INDEX).is_file():
            table = read_json(self.path / INDEX).get("weight_map")
            if not isinstance(table, dict) or not all(isinstance(f, str) for f in table.values()):
                raise ArtifactError(f"{self.path / INDEX}: no weight_map from tensor to file names")
            return sorted(set(table.values()))
        files = sorted(p.name for p in self.path.glob("*.safetensors"))
        if "model.safetensors" in files:
            return ["model.safetensors"]
        if not files:
            raise ArtifactError(
                f"{self.path}: config.json is there, but no .safetensors file: download the weights too"
            )
        return files

    def _open_files(self) -> dict[str, StoredTensor]:
        stored: dict[str, StoredTensor] = {}
        for name in self._file_names():
            if Path(name).name != name:
                raise ArtifactError(f"{self.path / INDEX}: {name!r} is not the name of a file in the folder")
            if not (self.path / name).is_file():
                raise ArtifactError(f"{self.path}: {name} is missing: download the model again")
            file = MappedFile(self.path / name)
            self._files.append(file)
            for tensor in read_header(file).values():
                target = logical_name(tensor.name)
                if target in stored:
                    raise ArtifactError(f"{file.path}: tensor {tensor.name!r} is also in another file of the model")
                stored[target] = tensor
        return stored

    def names(self) -> tuple[str, ...]:
        return (*self._stored, *self._joined)

    def _find(self, name: str) -> StoredTensor:
        try:
            return self._stored[name]
        except KeyError:
            raise self.missing(name) from None

    def _quantised(self, name: str) -> QuantTensor | None:
        return self._joined.get(name)

    def divisors(self, name: str) -> tuple[float, ...]:
        """Of the activations that meet an NVFP4 matrix."""
        joined = self._quantised(name)
        return () if joined is None or joined.divisor is None else (joined.divisor,)

    def info(self, name: str) -> TensorInfo:
        joined = self._quantised(name)
        if joined is not None:
            return TensorInfo(joined.shape, joined.format)
        tensor = self._find(name)
        if tensor.dtype not in FORMAT_OF:
            raise ArtifactError(
                f"{tensor.file.path}: tensor {tensor.name!r} is stored as {tensor.dtype}; "
                f"supported are {', '.join(FORMAT_OF)}"
            )
        if not tensor.nbytes or not tensor.shape:
            raise ArtifactError(f"{tensor.file.path}: tensor {tensor.name!r} has shape {list(tensor.shape)}")
        return TensorInfo(tensor.shape, FORMAT_OF[tensor.dtype])

    def get(self, name: str) -> Parameter:
        info, joined = self.info(name), self._quantised(name)
        raw = self._find(name).raw if joined is None else joined.make()
        return Parameter(name, info.shape, info.format, raw)

    def close(self) -> None:
        for file in self._files:
            file.close()
