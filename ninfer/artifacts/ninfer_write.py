"""Writes `.ninfer` version 3: sizes first, then bytes at their places in temporary files, then the names.

Header and directory are written last and the entry file is renamed last, so a file under the wanted name is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from attrs import evolve, frozen

from ninfer.artifacts.ninfer_directory import RAW
from ninfer.artifacts.ninfer_formats import OBJECT_ALIGN
from ninfer.artifacts.ninfer_v3 import HEADER_BYTES, PAYLOAD_ALIGN, NinferFile, entry_header, part_header
from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.bits import U8Array
from ninfer.formats.quant import align_up

FLUSH_BYTES = 1 << 26  # on their way to the disk at a time


class Sink(Protocol):
    def put(self, offset: int, raw: U8Array) -> None:
        """Bytes of the object, from `offset` on. In any order; what is not put is zero."""


@frozen(eq=False)
class NewObject:
    """produce puts all bytes. shape: None for a resource. offset: filled in by the writer."""

    id: str
    nbytes: int
    produce: Callable[[Sink], None]
    shape: tuple[int, ...] | None = None
    format: str = ""
    layout: str = ""
    divisors: int = 1
    offset: int = 0

    def member(self) -> dict[str, Any]:
        place = {"offset": self.offset, "bytes": self.nbytes}
        if self.shape is None:
            return {"id": self.id, "kind": "resource", "encoding": RAW, **place}
        more = {"divisors": self.divisors} if self.divisors > 1 else {}
        return {"id": self.id, "kind": "tensor", "shape": list(self.shape), "format": self.format,
                "layout": self.layout, **place, **more}  # fmt: skip


def raw_object(id: str, raw: bytes, **more: Any) -> NewObject:
    """An object whose bytes are at hand."""
    values = np.frombuffer(raw, np.uint8)
    return NewObject(id, len(raw), lambda sink: sink.put(0, values), **more)


@frozen
class NewArtifact:
    """What goes into a directory. objects: in the order of the payload."""

    components: Mapping[str, Any]
    objects: Sequence[NewObject]
    bindings: Mapping[str, Any]
    uses: Sequence[Mapping[str, Any]]
    metadata: Mapping[str, Any]
    provenance: Mapping[str, Any]

    def placed(self) -> NewArtifact:
        at, found = 0, []
        for o in self.objects:
            at = at if o.shape is None else align_up(at, OBJECT_ALIGN)
            found.append(evolve(o, offset=at))
            at += o.nbytes
        return evolve(self, objects=found)

    @property
    def payload_bytes(self) -> int:
        return self.objects[-1].offset + self.objects[-1].nbytes


Progress = Callable[[str, int], None]  # object, bytes put


def write_artifact(
    new: NewArtifact, out: Path, *, max_file_bytes: int | None = None, progress: Progress = lambda id, n: None
) -> NewArtifact:
    """The artifact as written, with offsets.   Raises UsageError for an output that exists, ArtifactError for I/O."""
    if out.exists():
        raise UsageError(f"--out: {out} exists already; remove it or give another name")
    new = new.placed()
    artifact_id = uuid.uuid4().bytes
    text, sizes = _directory(new, out.name, max_file_bytes)
    start = align_up(HEADER_BYTES + len(text), PAYLOAD_ALIGN)
    finals = [out, *(out.with_name(_part_name(out.name, i)) for i in range(1, len(sizes)))]
    for path in finals[1:]:
        if path.exists():
            raise UsageError(f"--out: {path} exists already; remove it or give another name")
    _check_space(out, new.payload_bytes)
    temporary = [p.with_name(f".{p.name}.{artifact_id.hex()[:12]}.tmp") for p in finals]
    try:
        with _Files(temporary, [start, *[PAYLOAD_ALIGN] * (len(sizes) - 1)], sizes) as files:
            for o in new.objects:
                o.produce(_ObjectSink(files, o, progress))
            for i in range(1, len(sizes)):
                files.header(i, part_header(i, artifact_id))
            files.header(0, entry_header(len(text), artifact_id) + text)
        for source, target in reversed(list(zip(temporary, finals, strict=True))):
            os.replace(source, target)
    except OSError as error:
        raise ArtifactError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        for path in temporary:
            with contextlib.suppress(OSError):
                path.unlink()
    return new


def check_written(new: NewArtifact, path: Path, progress: Progress = lambda id, n: None) -> None:
    """Makes every byte again and compares it with the file.   Raises ArtifactError naming object and offset."""
    file = NinferFile(path)
    try:
        file.check_parts()
        for o in new.objects:
            o.produce(_CheckSink(file, o, progress))
    finally:
        file.close()


def _part_name(entry: str, index: int) -> str:
    return f"{entry}.part-{index:04}"


def _directory(new: NewArtifact, name: str, max_file_bytes: int | None) -> tuple[bytes, list[int]]:
    """JSON text padded with spaces, and payload bytes of each file."""
    root = {
        "components": new.components,
        "objects": [o.member() for o in new.objects],
        "bindings": new.bindings,
        "uses": new.uses,
        "metadata": new.metadata,
        "provenance": new.provenance,
    }
    reserve = PAYLOAD_ALIGN - HEADER_BYTES
    while True:
        sizes = _split(new.payload_bytes, align_up(HEADER_BYTES + reserve, PAYLOAD_ALIGN), max_file_bytes)
        paths = [None, *(_part_name(name, i) for i in range(1, len(sizes)))]
        files = [{"path": p, "payload_bytes": n} for p, n in zip(paths, sizes, strict=True)]
        text = json.dumps({**root, "files": files}, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= reserve:
            return text.ljust(reserve), sizes
        reserve = align_up(HEADER_BYTES + len(text), PAYLOAD_ALIGN) - HEADER_BYTES


def _split(payload_bytes: int, start: int, limit: int | None) -> list[int]:
    if limit is None or start + payload_bytes <= limit:
        return [payload_bytes]
    first, other = ((limit - s) // PAYLOAD_ALIGN * PAYLOAD_ALIGN for s in (start, PAYLOAD_ALIGN))
    if first <= 0 or other <= 0:
        raise UsageError(f"--max-file-bytes: {limit} leaves no room beside a directory of {start} bytes")
    rest = payload_bytes - first
    full, last = divmod(rest, other)
    return [first, *[other] * full, *([last] if last else [])]


def _check_space(out: Path, nbytes: int) -> None:
    if not out.parent.is_dir():
        raise UsageError(f"--out: the folder {out.parent} does not exist")
    free = shutil.disk_usage(out.parent).free
    if free < nbytes:
        raise UsageError(f"--out: {nbytes} bytes are to be written, but {out.parent} has {free} free")


class _Flusher:
    """Sends written bytes to the disk while others are made; a kernel left alone would begin much later."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds, self._unsent = fds, 0
        self._pool = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None

    def wrote(self, nbytes: int) -> None:
        """Raises OSError of an earlier flush: the system tells it once, to whoever asks first."""
        self._unsent += nbytes
        if self._unsent >= FLUSH_BYTES and (self._running is None or self._running.done()):
            self.wait()
            self._unsent, self._running = 0, self._pool.submit(self._flush)

    def _flush(self) -> None:
        for fd in self._fds:
            os.fdatasync(fd)

    def wait(self) -> None:
        if self._running is not None:
            self._running.result()

    def close(self) -> None:
        """No flush is under way after this."""
        self._pool.shutdown()


class _Files:
    """The temporary files; whole once closed without an error."""

    def __init__(self, paths: Sequence[Path], starts: Sequence[int], sizes: Sequence[int]) -> None:
        self._starts, self._sizes, self._fds = starts, sizes, list[int]()
        for path, start, size in zip(paths, starts, sizes, strict=True):
            self._fds.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644))
            os.ftruncate(self._fds[-1], start + size)
        self._flusher = _Flusher(self._fds)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._flusher.close()
        try:
            if kind is None:
                self._flusher.wait()
                for fd in self._fds:
                    os.fsync(fd)
        finally:
            for fd in self._fds:
                os.close(fd)

    def header(self, index: int, raw: bytes) -> None:
        _write(self._fds[index], 0, memoryview(raw))

    def put(self, offset: int, raw: U8Array) -> None:
        """At an offset of the payload."""
        view, begin = np.ascontiguousarray(raw).data, 0
        for fd, start, size in zip(self._fds, self._starts, self._sizes, strict=True):
            a, b = max(offset, begin), min(offset + raw.size, begin + size)
            if a < b:
                _write(fd, start + a - begin, view[a - offset : b - offset])
            begin += size
        self._flusher.wrote(raw.size)


def _write(fd: int, at: int, view: memoryview) -> None:
    while view:
        n = os.pwrite(fd, view, at)
        view, at = view[n:], at + n


@frozen(eq=False)
class _ObjectSink:
    files: _Files
    o: NewObject
    progress: Progress

    def put(self, offset: int, raw: U8Array) -> None:
        assert offset + raw.size <= self.o.nbytes, (self.o.id, offset, raw.size)
        self.files.put(self.o.offset + offset, raw.reshape(-1))
        self.progress(self.o.id, raw.size)


@frozen(eq=False)
class _CheckSink:
    file: NinferFile
    o: NewObject
    progress: Progress

    def put(self, offset: int, raw: U8Array) -> None:
        at = self.o.offset + offset
        if not np.array_equal(self.file.read(at, raw.size, self.o.id), raw.reshape(-1)):
            raise ArtifactError(
                f"{self.file.path}: bytes {at} to {at + raw.size} of the payload (object {self.o.id!r}) are not what "
                "the sources give: the file is damaged, or a source has changed; convert again"
            )
        self.progress(self.o.id, raw.size)


def pieces_of(rows: int, each: int) -> Iterator[tuple[int, int]]:
    """(first row, count) of runs of at most `each` rows."""
    for start in range(0, rows, each):
        yield start, min(each, rows - start)
