"""What commands print beside their result, all on stderr: start-up lines, progress, errors, log records."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TextIO

from ninfer.errors import DeviceError, StartupError

LABEL = 9  # columns of a start-up line's label
REDRAW_S = 0.1
HEARTBEAT_S = 10.0  # progress where there is no terminal


def version() -> str:
    try:
        return metadata.version("ninfer")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "(not installed)"


class Console:
    """Lines for a person. A progress line is redrawn in place on a terminal; elsewhere it is a line now and then."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._drawn = False
        self._last_s = time.monotonic()

    def report(self, label: str, text: str) -> None:
        """One decision; further lines of the text are indented under it."""
        first, *rest = text.splitlines() or [""]
        self.line(f"{label:<{LABEL}} {first}".rstrip())
        for more in rest:
            self.line(f"{'':<{LABEL}} {more}")

    def line(self, text: str) -> None:
        self._clear()
        print(text, file=self._stream, flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        finished = done >= total
        if self._terminal:
            if finished:
                self._clear()
            elif now - self._last_s >= REDRAW_S:
                self._last_s = now
                self._stream.write(f"\r\x1b[K{what}  {done}/{total}")
                self._stream.flush()
                self._drawn = True
        elif now - self._last_s >= HEARTBEAT_S and not finished:
            self._last_s = now
            print(f"{what}  {done}/{total}", file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._drawn = False


class _Format(logging.Formatter):
    default_msec_format = "%s.%03d"


def configure_logging(level: str) -> None:
    """Log records to stderr: `YYYY-MM-DD HH:MM:SS.mmm LEVEL message`."""
    root = logging.getLogger()
    root.handlers.clear()
    if level == "off":
        root.addHandler(logging.NullHandler())
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format("%(asctime)s %(levelname)s %(message)s"))
    root.addHandler(handler)
    root.setLevel(level.upper())
    if level != "debug":
        for noisy in ("uvicorn", "asyncio"):
            logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


def run(prog: str, body: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """A command's exit code. An error that stops it is its message, without a traceback unless debugging."""
    try:
        return body(sys.argv[1:] if argv is None else argv)
    except (StartupError, DeviceError) as error:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout has left, and wants no complaint
        sys.stderr.close()
        return 0
