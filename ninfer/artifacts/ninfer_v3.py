"""Framing of `.ninfer` version 3: an entry file with a JSON directory, further files beside it, one logical payload.

    entry  magic[8] json_bytes:u64 artifact_id[16] JSON, zeros to a multiple of 4096, payload
    part   magic[8] part_index:u64 artifact_id[16], zeros to 4096, payload

The payload is the concatenation of every file's payload bytes; offsets of objects count from its start. Integers are
little-endian. Files are mapped; a part is opened when something in it is read.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np

from ninfer.artifacts.mapped import MappedFile
from ninfer.artifacts.ninfer_directory import Directory, parse_directory, parse_json
from ninfer.errors import ArtifactError
from ninfer.formats.bits import U8Array
from ninfer.formats.quant import align_up

MAGIC = b"NINFER\0\x03"
PART_MAGIC = b"NINPRT\0\x03"
HEADER_BYTES = 32
PAYLOAD_ALIGN = 4096
MAX_JSON_BYTES = 256 << 20  # a directory of 70,000 bindings takes 20 MiB


class NinferFile:
    """An opened artifact: its directory, and bytes of the payload as views of the mapped files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entry = MappedFile(path)
        self._parts: dict[int, MappedFile] = {}
        try:
            self.directory, self._start = self._read_entry()
        except BaseException:
            self.close()
            raise
        sizes = [f.payload_bytes for f in self.directory.files]
        self._begins = [0, *accumulate(sizes)]

    def _error(self, text: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: {text}")

    def _read_entry(self) -> tuple[Directory, int]:
        size, source = self._entry.size, self._entry.map
        check_magic(self.path, source[:8])
        if size < HEADER_BYTES:
            raise self._error(f"the file has {size} bytes, less than the header of {HEADER_BYTES}: it is truncated")
        json_bytes = int.from_bytes(source[8:16], "little")
        if not 0 < json_bytes <= size - HEADER_BYTES:
            raise self._error(
                f"the header (offset 8) announces {json_bytes} bytes of directory, but the file has {size}: it is "
                "truncated or damaged"
            )
        if json_bytes > MAX_JSON_BYTES:
            raise self._error(f"the header (offset 8) announces {json_bytes} bytes of directory; "
                              f"at most {MAX_JSON_BYTES} are accepted")  # fmt: skip
        self.artifact_id = source[16:32]
        end = HEADER_BYTES + json_bytes
        start = align_up(end, PAYLOAD_ALIGN)
        where = f"{self.path}: directory (offset {HEADER_BYTES})"
        directory = parse_directory(where, parse_json(where, source[HEADER_BYTES:end]), self.path.name)
        want = start + directory.files[0].payload_bytes
        if size != want:
            raise self._error(
                f"files[0].payload_bytes and the header make {want} bytes, but the file has {size}: it is "
                + ("truncated: download or convert it again" if size < want else "damaged")
            )
        if any(source[end:start]):
            raise self._error(f"bytes {end} to {start} before the payload are not zero: the file is damaged")
        return directory, start

    @property
    def payload_bytes(self) -> int:
        return self._begins[-1]

    def read(self, offset: int, nbytes: int, what: str) -> U8Array:
        """Bytes of the logical payload: a view, or a copy where they straddle files.   what: for messages."""
        if self._entry.bytes.size != self._entry.size:
            raise self._error("already closed")
        if offset + nbytes > self.payload_bytes:
            raise self._error(f"{what} ends at {offset + nbytes}, but the payload has {self.payload_bytes} bytes")
        pieces, at = [], offset
        while at < offset + nbytes:
            i = bisect_right(self._begins, at) - 1
            file, start = self._file(i, what)
            end = min(offset + nbytes, self._begins[i + 1])
            pieces.append(file.bytes[start + at - self._begins[i] : start + end - self._begins[i]])
            at = end
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _file(self, index: int, what: str) -> tuple[MappedFile, int]:
        if index == 0:
            return self._entry, self._start
        if index not in self._parts:
            self._parts[index] = self._open_part(index, what)
        return self._parts[index], PAYLOAD_ALIGN

    def _open_part(self, index: int, what: str) -> MappedFile:
        entry = self.directory.files[index]
        path = self.path.with_name(entry.path)
        if not path.is_file():
            raise self._error(f"files[{index}] {entry.path!r}, which holds {what}, is missing beside it")
        file = MappedFile(path)
        try:
            _check_part(file, index, self.artifact_id, entry.payload_bytes)
        except BaseException:
            file.close()
            raise
        return file

    def check_parts(self) -> None:
        """Opens every file.   Raises ArtifactError for one that is missing, altered in length or of another set."""
        for i in range(len(self.directory.files)):
            self._file(i, "a part of the payload")

    def close(self) -> None:
        for file in (self._entry, *self._parts.values()):
            file.close()


def check_magic(path: Path, magic: bytes) -> None:
    if magic == MAGIC:
        return
    if magic[:7] == MAGIC[:7] and len(magic) == 8:
        raise ArtifactError(
            f"{path}: a .ninfer file of version {magic[7]}; version 3 is supported: convert the model again"
        )
    if magic == PART_MAGIC:
        raise ArtifactError(f"{path}: a part of a model in several files; give the .ninfer file it belongs to")
    raise ArtifactError(f"{path}: not a .ninfer file: it begins with {magic!r} instead of {MAGIC!r}")


def _check_part(file: MappedFile, index: int, artifact_id: bytes, payload_bytes: int) -> None:
    path, head = file.path, file.map[:HEADER_BYTES]
    if head[:8] != PART_MAGIC:
        raise ArtifactError(f"{path}: not a part of a .ninfer model: it begins with {head[:8]!r}")
    found = int.from_bytes(head[8:16], "little")
    if found != index:
        raise ArtifactError(f"{path}: it is part {found} (offset 8), but the directory names it as part {index}")
    if head[16:32] != artifact_id:
        raise ArtifactError(
            f"{path}: it belongs to another set (offset 16): id {head[16:32].hex()}, but the entry file has "
            f"{artifact_id.hex()}; put the parts of one conversion together"
        )
    if file.size != PAYLOAD_ALIGN + payload_bytes:
        raise ArtifactError(f"{path}: it has {file.size} bytes, but files[{index}] implies "
                            f"{PAYLOAD_ALIGN + payload_bytes}: it is truncated or damaged")  # fmt: skip


def entry_header(json_bytes: int, artifact_id: bytes) -> bytes:
    return MAGIC + json_bytes.to_bytes(8, "little") + artifact_id


def part_header(index: int, artifact_id: bytes) -> bytes:
    return (PART_MAGIC + index.to_bytes(8, "little") + artifact_id).ljust(PAYLOAD_ALIGN, b"\0")
