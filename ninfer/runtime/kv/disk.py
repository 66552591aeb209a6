"""The disk tier: pages and images as files, one each, so that the cache survives a restart and a kill.

A file is written under a temporary name and renamed, so under its own name it is whole or absent; a checksum over all
of it finds what the medium or a power cut did. What does not pass is removed and was never there. Files lie in a
folder per fingerprint (model, KV format, everything that changes what bytes mean); other files are left alone.

    "NINFERKV"  version u32  kind u32  crc32 u32
    depth u32  num_tokens u32  reserved u32  state_bytes u64  page_bytes u64  key [16]  parent [16]
    tokens u32 [num_tokens]  state  page

Little endian. kind 1: a page of 64 tokens (no state). kind 2: an image, its state, and the page of its tail if it has
one. The checksum is zlib's, of everything behind it.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, Full, Queue

import numpy as np
from attrs import define, frozen

from ninfer.errors import UsageError
from ninfer.ir.step import PAGE
from ninfer.runtime.kv.prefix import Chunk, Key
from ninfer.runtime.kv.store import Bytes
from ninfer.runtime.kv.tiers import Image, ImageBytes, StoredPage, is_own

log = logging.getLogger(__name__)

MAGIC, VERSION = b"NINFERKV", 1
PAGE_KIND, IMAGE_KIND = 1, 2
_HEAD = struct.Struct("<8sIII")  # magic, version, kind, crc32
_REST = struct.Struct("<IIIQQ16s16s")  # depth, num_tokens, reserved, state_bytes, page_bytes, key, parent
_START = _HEAD.size + _REST.size
SUFFIX, TEMPORARY = ".kv", ".tmp"
QUEUE = 256  # writes that may wait; more are dropped
PAUSE_S = 30.0  # after a failed write

Name = tuple[Key, tuple[int, ...] | None]  # tail None: a page


@frozen
class _Meta:
    depth: int
    tokens: tuple[int, ...]
    state_bytes: int
    page_bytes: int
    key: Key
    parent: Key


@define
class _File:
    path: Path
    meta: _Meta
    nbytes: int


def encode(kind: int, meta: _Meta, state: Bytes | None, page: Bytes | None) -> bytes:
    rest = (
        _REST.pack(meta.depth, len(meta.tokens), 0, meta.state_bytes, meta.page_bytes, meta.key, meta.parent)
        + np.array(meta.tokens, "<u4").tobytes()
    )
    body = rest + b"".join(part.tobytes() for part in (state, page) if part is not None)
    return _HEAD.pack(MAGIC, VERSION, kind, zlib.crc32(body)) + body


def read_meta(raw: bytes, size: int) -> tuple[int, _Meta] | None:
    """Kind and description from the beginning of a file of `size` bytes; None: no such file, or cut short."""
    if len(raw) < _START:
        return None
    magic, version, kind, _ = _HEAD.unpack_from(raw)
    depth, count, _, state_bytes, page_bytes, key, parent = _REST.unpack_from(raw, _HEAD.size)
    end = _START + 4 * count
    if magic != MAGIC or version != VERSION or kind not in (PAGE_KIND, IMAGE_KIND) or count > PAGE or len(raw) < end:
        return None
    if size != end + state_bytes + page_bytes:
        return None
    tokens = tuple(np.frombuffer(raw, "<u4", count, _START).tolist())
    return kind, _Meta(depth, tokens, state_bytes, page_bytes, key, parent)


class DiskTier:
    """Reads on the engine's thread, writes on one of its own.   restore False: nothing is read back.

    Raises UsageError when the folder cannot be made or listed; later failures are logged, counted, and cost a hit.
    """

    name = "disk"

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        *,
        restore: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.num_hits = self.num_evicted = self.num_bad = self.num_failed = self.num_dropped = 0
        self._restore = restore
        self._clock = clock
        self._lock = threading.Lock()  # over the next three and used_bytes
        self._files: OrderedDict[Name, _File] = OrderedDict()  # least recently used first
        self._by_key: dict[Key, list[Name]] = {}
        self._pending: set[Name] = set()
        self._paused_until = 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._scan()
            self._trim()
        except OSError as error:
            raise UsageError(f"--disk-kv-path: cannot use {folder}: {error.strerror}; choose another folder") from None
        self._queue: Queue[tuple[Name, int, _Meta, Bytes | None, Bytes | None] | None] = Queue(QUEUE)
        self._writer = threading.Thread(target=self._write_all, name="ninfer-disk-kv", daemon=True)
        self._writer.start()

    def __len__(self) -> int:
        return len(self._files)

    # Reading

    def has_page(self, key: Key) -> bool:
        return self._restore and (key, None) in self._files

    def page(self, key: Key) -> StoredPage | None:
        found = self._read((key, None)) if self._restore else None
        if found is None:
            return None
        meta, body = found
        return StoredPage(Chunk(meta.key, meta.tokens), meta.parent, body[meta.state_bytes :])

    def images(self, key: Key) -> Iterator[Image]:
        if not self._restore:
            return
        with self._lock:
            names = list(self._by_key.get(key, ()))
        for name in names:
            file = self._files.get(name)
            if name[1] is not None and file is not None:
                yield Image(key, file.meta.depth, name[1], file.nbytes, partial(self._image_bytes, name))

    def drop(self, key: Key, following: tuple[int, ...], *, page: bool) -> None:
        with self._lock:
            names = list(self._by_key.get(key, ()))
        for name in names:
            if page if name[1] is None else is_own(name[1], following, page):
                self._forget(name, unlink=True)

    def _image_bytes(self, name: Name) -> ImageBytes | None:
        found = self._read(name)
        if found is None:
            return None
        meta, body = found
        return body[: meta.state_bytes], body[meta.state_bytes :] if meta.page_bytes else None

    def _read(self, name: Name) -> tuple[_Meta, Bytes] | None:
        """Description and payload, if the checksum is right; otherwise the file goes."""
        with self._lock:
            file = self._files.get(name)
        if file is None:
            return None
        try:
            raw = file.path.read_bytes()
        except OSError as error:
            self.num_bad += 1
            log.warning("disk cache: %s cannot be read (%s); computed anew", file.path.name, error.strerror)
            self._forget(name, unlink=False)
            return None
        with suppress(OSError):  # a folder that can only be read keeps no order of use
            os.utime(file.path)
        found = read_meta(raw, len(raw))
        good = found is not None and zlib.crc32(raw[_HEAD.size :]) == _HEAD.unpack_from(raw)[3]
        if not good or found is None or found[1] != file.meta:
            self.num_bad += 1
            log.warning("disk cache: %s is damaged; it is removed and computed anew", file.path.name)
            self._forget(name, unlink=True)
            return None
        with self._lock:
            if name in self._files:
                self._files.move_to_end(name)
        self.num_hits += 1
        return found[1], np.frombuffer(raw, np.uint8, offset=_START + 4 * len(found[1].tokens))

    # Writing

    def has_written(self, key: Key) -> bool:
        """Whether a page is here or on its way."""
        with self._lock:
            return (key, None) in self._files or (key, None) in self._pending

    def put_page(self, page: StoredPage) -> None:
        meta = _Meta(0, page.chunk.tokens, 0, page.data.nbytes, page.chunk.key, page.parent)
        if not page.chunk.extra:
            self._submit((page.chunk.key, None), PAGE_KIND, meta, None, page.data)

    def put_image(self, image: Image) -> None:
        data = image.load()
        if data is not None:
            state, page = data
            meta = _Meta(
                image.depth, image.tail, state.nbytes, 0 if page is None else page.nbytes, image.key, image.key
            )
            self._submit((image.key, image.tail), IMAGE_KIND, meta, state, page)

    def _submit(self, name: Name, kind: int, meta: _Meta, state: Bytes | None, page: Bytes | None) -> None:
        if self._clock() < self._paused_until:
            self.num_dropped += 1
            return
        with self._lock:
            if name in self._files or name in self._pending:
                return
            self._pending.add(name)
        try:
            self._queue.put_nowait((name, kind, meta, state, page))
        except Full:
            self.num_dropped += 1
            with self._lock:
                self._pending.discard(name)

    def flush(self) -> None:
        """Wait until everything submitted is written."""
        self._queue.join()

    def close(self) -> None:
        """Write what is left and stop. A second time is a no-op."""
        if self._writer.is_alive():
            self._queue.put(None)
            self._writer.join()

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            name, kind, meta, state, page = item
            try:
                self._write(name, encode(kind, meta, state, page), meta)
            except OSError as error:
                self.num_failed += 1
                self._paused_until = self._clock() + PAUSE_S
                reason = error.strerror or str(error)
                log.warning("disk cache: cannot write to %s (%s); trying again in %.0f s", self.folder, reason, PAUSE_S)
                self._skip_queue()
            finally:
                with self._lock:
                    self._pending.discard(name)
                self._queue.task_done()
        self._queue.task_done()

    def _skip_queue(self) -> None:
        """What waits would fail as well."""
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                return
            if item is None:  # closing: seen again after this write
                self._queue.task_done()
                self._queue.put(None)
                return
            self.num_dropped += 1
            with self._lock:
                self._pending.discard(item[0])
            self._queue.task_done()

    def _write(self, name: Name, raw: bytes, meta: _Meta) -> None:
        if len(raw) > self.capacity_bytes:
            return
        path = self._path(name)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
        try:
            with temporary.open("wb") as out:
                out.write(raw)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._remember(name, _File(path, meta, len(raw)))
        self._trim()

    def _trim(self) -> None:
        while self.used_bytes > self.capacity_bytes:
            with self._lock:
                oldest = next(iter(self._files))
            self._forget(oldest, unlink=True)
            self.num_evicted += 1

    # Files

    def _path(self, name: Name) -> Path:
        key, tail = name
        more = "" if tail is None else f"-{zlib.crc32(np.array(tail, '<u4').tobytes()):08x}-{len(tail)}"
        return self.folder / key[:1].hex() / f"{key.hex()}{more}{SUFFIX}"

    def _remember(self, name: Name, file: _File) -> None:
        with self._lock:
            old = self._files.pop(name, None)
            if old is not None:
                self.used_bytes -= old.nbytes
            else:
                self._by_key.setdefault(name[0], []).append(name)
            self._files[name] = file
            self.used_bytes += file.nbytes

    def _forget(self, name: Name, *, unlink: bool) -> None:
        with self._lock:
            file = self._files.pop(name, None)
            if file is None:
                return
            self.used_bytes -= file.nbytes
            group = self._by_key[name[0]]
            group.remove(name)
            if not group:
                del self._by_key[name[0]]
        if unlink:
            try:
                file.path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("disk cache: %s cannot be removed (%s)", file.path, error.strerror)

    def _scan(self) -> None:
        """Take note of what an earlier process left, oldest use first. Only beginnings of files are read."""
        found: list[tuple[float, Name, _File]] = []
        foreign = 0
        for path in sorted(p for sub in self.folder.iterdir() if sub.is_dir() for p in sub.iterdir()):
            if path.name.endswith(TEMPORARY):
                self._remove_leftover(path)
                continue
            try:
                size = path.stat().st_size
                with path.open("rb") as opened:
                    head = read_meta(opened.read(_START + 4 * PAGE), size)
                used = path.stat().st_mtime
            except OSError:
                head = None
            if head is None:
                foreign += 1
                continue
            kind, meta = head
            name: Name = (meta.key, meta.tokens if kind == IMAGE_KIND else None)
            if path != self._path(name):
                foreign += 1
                continue
            found.append((used, name, _File(path, meta, size)))
        for _, name, file in sorted(found, key=lambda item: item[0]):
            self._remember(name, file)
        if foreign:
            log.warning(
                "disk cache: %d files in %s are none of its own, or damaged; they are ignored", foreign, self.folder
            )

    @staticmethod
    def _remove_leftover(path: Path) -> None:
        """A write that its process did not live to finish, unless that process still lives."""
        try:
            pid = int(path.name.removesuffix(TEMPORARY).rpartition(".")[2])
            if pid != os.getpid():
                os.kill(pid, 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (ValueError, OSError):
            pass

    def stats(self) -> dict[str, object]:
        return {
            "name": self.name,
            "used_bytes": self.used_bytes,
            "capacity_bytes": self.capacity_bytes,
            "files": len(self._files),
            "hits": self.num_hits,
            "evicted": self.num_evicted,
            "damaged": self.num_bad,
            "failed_writes": self.num_failed,
            "dropped_writes": self.num_dropped,
        }
