"""A session as a file: the tokens of a sequence, their pages, and images of its recurrent state.

    "NINFERSL"  version u32  num_tokens u32  num_pages u32  num_images u32  page_bytes u64  fingerprint [24]
    tokens u32 [num_tokens]  pages [num_pages][page_bytes]
    per image: depth u32  tail_len u32  state_bytes u64  tail_bytes u64, state, page of the tail
    crc32 u32

Little endian. The checksum is zlib's, of everything before it. A file is written under a temporary name and renamed,
so under its own name it is whole.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from attrs import define, frozen

from ninfer.errors import NinferError
from ninfer.ir.step import PAGE
from ninfer.runtime.kv.store import Bytes

MAGIC, VERSION = b"NINFERSL", 1
_HEAD = struct.Struct("<8sIIIIQ24s")
_IMAGE = struct.Struct("<IIQQ")
_END = struct.Struct("<I")

FNV_START, FNV_PRIME, MASK = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


class SessionError(NinferError):
    """A session that cannot be saved or brought back."""


@define(slots=False)
class Tokens:
    """What a slot held last."""

    ids: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """FNV-1a of 64 bits over the ids as u32, 16 hex digits."""
        value = FNV_START
        for byte in np.array(self.ids, "<u4").tobytes():
            value = (value ^ byte) * FNV_PRIME & MASK
        return f"{value:016x}"


@frozen(eq=False)
class SavedImage:
    """The state after `depth` pages and `tail_len` tokens, whose page is `tail`."""

    depth: int
    tail_len: int
    state: Bytes
    tail: Bytes | None


@frozen(eq=False)
class Session:
    """tokens: all that can be gone on from; pages: of the whole ones among them; images: ascending."""

    tokens: Tokens
    pages: Sequence[Bytes]
    images: Sequence[SavedImage] = ()

    @property
    def nbytes(self) -> int:
        images = sum(i.state.nbytes + (0 if i.tail is None else i.tail.nbytes) for i in self.images)
        return sum(p.nbytes for p in self.pages) + images


def write_session(path: Path, session: Session, fingerprint: str) -> int:
    """Returns the size of the file. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    crc = size = 0
    try:
        with temporary.open("wb") as out:
            for part in _parts(session, fingerprint):
                crc = zlib.crc32(part, crc)
                size += out.write(part)
            size += out.write(_END.pack(crc))
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return size


def _parts(session: Session, fingerprint: str) -> Iterator[bytes]:
    ids, pages, images = session.tokens.ids, session.pages, session.images
    page_bytes = pages[0].nbytes if pages else 0
    yield _HEAD.pack(MAGIC, VERSION, len(ids), len(pages), len(images), page_bytes, fingerprint.encode()[:24])
    yield np.array(ids, "<u4").tobytes()
    for page in pages:
        yield page.tobytes()
    for image in images:
        tail_bytes = 0 if image.tail is None else image.tail.nbytes
        yield _IMAGE.pack(image.depth, image.tail_len, image.state.nbytes, tail_bytes)
        yield image.state.tobytes()
        if image.tail is not None:
            yield image.tail.tobytes()


def read_session(path: Path, fingerprint: str) -> tuple[Session, int]:
    """The session, and the size of its file. Raises SessionError that says what is wrong with it."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SessionError(f"{path.name} cannot be read: {error.strerror or error}") from None
    if len(raw) < _HEAD.size + _END.size or raw[:8] != MAGIC:
        raise SessionError(f"{path.name} is no saved session")
    _, version, num_tokens, num_pages, num_images, page_bytes, owner = _HEAD.unpack_from(raw)
    if version != VERSION:
        raise SessionError(f"{path.name} is of version {version}, and {VERSION} is read")
    if zlib.crc32(raw[: -_END.size]) != _END.unpack_from(raw, len(raw) - _END.size)[0]:
        raise SessionError(f"{path.name} is damaged; save the session again")
    if owner.rstrip(b"\0").decode("ascii", "replace") != fingerprint[:24]:
        raise SessionError(
            f"{path.name} was saved by another model, or with other settings of the cache (--kv-dtype, --spec, "
            "weights converted while loading); serve as then"
        )
    reader = _Reader(raw, _HEAD.size)
    tokens = Tokens(tuple(np.frombuffer(reader.take(4 * num_tokens), "<u4").tolist()))
    pages = [reader.take(page_bytes) for _ in range(num_pages)]
    images = [reader.image() for _ in range(num_images)]
    deepest = images[-1].depth * PAGE + images[-1].tail_len if images else num_pages * PAGE
    if reader.at != len(raw) - _END.size or num_pages > num_tokens // PAGE or deepest != num_tokens:
        raise SessionError(f"{path.name} does not hold what it announces")
    return Session(tokens, pages, images), len(raw)


@define
class _Reader:
    raw: bytes
    at: int

    def take(self, size: int) -> Bytes:
        if size > len(self.raw) - _END.size - self.at:
            raise SessionError("the session's file ends before what it announces")
        found = np.frombuffer(self.raw, np.uint8, size, self.at).copy()  # or a page would keep the whole file
        self.at += size
        return found

    def image(self) -> SavedImage:
        depth, tail_len, state_bytes, tail_bytes = _IMAGE.unpack(self.take(_IMAGE.size).tobytes())
        state = self.take(state_bytes)
        return SavedImage(depth, tail_len, state, self.take(tail_bytes) if tail_bytes else None)
