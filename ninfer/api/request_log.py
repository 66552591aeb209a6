"""Requests as JSON lines in a file that rotates. Written on a thread of its own: the event loop waits for no disk."""

from __future__ import annotations

import json
import logging
import logging.handlers
import queue
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ninfer.errors import UsageError

SCHEMA = {"name": "ninfer_serve_request_log", "version": 1}


class _File(logging.handlers.RotatingFileHandler):
    """Every file begins with `head`, so that each can be read by itself."""

    def __init__(self, path: Path, max_bytes: int, keep: int, head: str) -> None:
        self._head = head
        super().__init__(path, maxBytes=max_bytes, backupCount=keep, encoding="utf-8")
        self._begin()

    def doRollover(self) -> None:
        super().doRollover()
        self._begin()

    def _begin(self) -> None:
        stream = self.stream or self._open()
        self.stream = stream
        stream.write(self._head + self.terminator)
        stream.flush()


class RequestLog:
    """max_mib: where a file is closed and the next begun; 0: never. keep: how many closed ones stay, as FILE.1 and on.

    Raises UsageError if the file cannot be written.
    """

    def __init__(self, path: Path, *, max_mib: int, keep: int, server: Mapping[str, Any]) -> None:
        self._common = {"server_instance_id": secrets.token_hex(8)}
        try:
            file = _File(path, max_mib << 20, keep, self._line("server_start", {"schema": SCHEMA, **server}))
        except OSError as error:
            raise UsageError(f"--request-log-jsonl: cannot write {path}: {error.strerror}") from None
        records: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._logger = logging.Logger("ninfer.requests")
        self._logger.addHandler(logging.handlers.QueueHandler(records))
        self._file = file
        self._closed = False
        self._listener = logging.handlers.QueueListener(records, file)
        self._listener.start()

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        self._logger.info("%s", self._line(event, fields))

    def close(self) -> None:
        """All that was written is in the file afterwards. A second time is a no-op."""
        if not self._closed:
            self._closed = True
            self._listener.stop()
            self._file.close()

    def _line(self, event: str, fields: Mapping[str, Any]) -> str:
        now = {"event": event, "timestamp_unix_ms": time.time_ns() // 1_000_000}
        return json.dumps({**now, **self._common, **fields}, ensure_ascii=False, default=str)
