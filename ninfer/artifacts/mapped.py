"""A file mapped into memory, read-only."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import numpy as np

from ninfer.errors import ArtifactError
from ninfer.formats.bits import U8Array


class MappedFile:
    """bytes: uint8 [size]. Pages are read when touched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = path.stat().st_size
                if self.size == 0:
                    raise ArtifactError(f"{path}: the file is empty")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None
        self.bytes: U8Array = np.frombuffer(self.map, np.uint8)

    def close(self) -> None:
        self.bytes = np.zeros(0, np.uint8)
        with contextlib.suppress(BufferError):  # arrays still in use keep the mapping until they go
            self.map.close()
