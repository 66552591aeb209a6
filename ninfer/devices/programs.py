"""The host compiler and the disk cache of compiled programs.

A program is one shared library of several kernels. Its key is the hash of source, compiler, version, flags and CPU.
Files appear under their names only when complete (written beside, then renamed), so a killed process leaves at most a
stray temporary file and two processes can only write the same thing twice.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attrs import define, field, frozen

from ninfer.devices.base import Source
from ninfer.errors import CompileError

BASE_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-fno-math-errno",
              "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi", "-Wno-ignored-attributes")  # fmt: skip


@frozen
class Compiler:
    """command: as run; version: its first line, part of every key."""

    command: tuple[str, ...]
    version: str
    native: tuple[str, ...]  # flags that mean "this CPU"

    @property
    def name(self) -> str:
        return self.version.split("\n")[0][:60]


def find_compiler() -> Compiler | None:
    """$CXX, g++, clang++, c++, or the ziglang package; None when there is none."""
    commands: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    if os.environ.get("CXX"):
        commands.append((tuple(os.environ["CXX"].split()), ("-march=native",)))
    commands += [((name,), ("-march=native",)) for name in ("g++", "clang++", "c++") if shutil.which(name)]
    if importlib.util.find_spec("ziglang") is not None:
        commands.append(((sys.executable, "-m", "ziglang", "c++", "-nostdlib++"), ("-mcpu=native",)))
    for command, native in commands:
        try:
            asked = [c for c in command if c != "-nostdlib++"]
            result = subprocess.run([*asked, "--version"], capture_output=True, text=True, timeout=60)
        except OSError as error:
            raise CompileError(f"cannot run the compiler {command[0]} (CXX): {error.strerror}; unset CXX") from None
        except subprocess.TimeoutExpired:
            continue
        if result.returncode == 0:
            return Compiler(command, result.stdout.strip() or command[0], native)
    return None


@define
class ProgramCache:
    """Compiles sources for the host and finds their entry points."""

    compiler: Compiler
    directory: Path
    cpu: str  # what "native" means here: part of the key
    portable: bool = False  # no CPU-specific flags
    extra: tuple[str, ...] = ()  # flags after all others
    workers: int = field(factory=lambda: os.cpu_count() or 1)
    _libraries: dict[Path, ctypes.CDLL] = field(factory=dict)

    @property
    def flags(self) -> tuple[str, ...]:
        return (*BASE_FLAGS, *(() if self.portable else self.compiler.native), *self.extra)

    def addresses(
        self, sources: Sequence[Source], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> dict[str, int]:
        """The address of every entry, compiling what is missing.   progress(kernels ready, kernels in all)."""
        found = {s.entry: self._cached(s) for s in sources}
        missing = [s for s in sources if found[s.entry] is None]
        progress(len(sources) - len(missing), len(sources))
        if missing:
            units = self._split(missing, max(1, min(len(missing), 2 * self.workers)))
            ready = len(sources) - len(missing)
            with ThreadPoolExecutor(self.workers) as pool:
                for unit, path in zip(units, pool.map(self._compile_unit, units), strict=True):
                    found.update((s.entry, path) for s in unit)
                    ready += len(unit)
                    progress(ready, len(sources))
        return {entry: self._symbol(path, entry) for entry, path in found.items() if path is not None}

    def library(self, text: str) -> ctypes.CDLL:
        """A library of one source text, compiled or from the cache."""
        path = self.directory / f"{self._key(text)}.so"
        if not path.exists():
            self._compile(text, path)
        return self._open(path)

    def _key(self, text: str) -> str:
        parts = (text, self.compiler.version, " ".join(self.compiler.command), " ".join(self.flags), self.cpu)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def _link(self, source: Source) -> Path:
        return self.directory / f"{self._key(chr(0).join([*source.headers, source.text]))}.link"

    def _cached(self, source: Source) -> Path | None:
        """The library that has this kernel: named in a small file under the kernel's own key."""
        try:
            path = self.directory / self._link(source).read_text()
        except OSError:
            return None
        return path if path.is_file() else None

    def _split(self, sources: Sequence[Source], parts: int) -> list[list[Source]]:
        """Deal the sources out to about `parts` units. A unit has one prelude (the first header) and like kernels."""
        ordered = sorted(sources, key=lambda s: (s.headers, s.entry))
        size = max(1, -(-len(ordered) // parts))
        units: list[list[Source]] = []
        for source in ordered:
            if not units or len(units[-1]) == size or not self._fits(units[-1], source):
                units.append([])
            units[-1].append(source)
        return units

    def _fits(self, unit: Sequence[Source], source: Source) -> bool:
        """Whether a kernel may stand in one text with those."""
        return unit[0].headers[:1] == source.headers[:1]

    def _compile_unit(self, unit: Sequence[Source]) -> Path:
        text = "\n".join([*dict.fromkeys(h for s in unit for h in s.headers), *(s.text for s in unit)])
        path = self.directory / f"{self._key(text)}.so"
        if not path.exists():
            self._compile(text, path)
        for source in unit:
            _write_whole(self._link(source), path.name.encode())
        return path

    def _compile(self, text: str, path: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.directory, prefix="building-") as scratch:
            src, out = Path(scratch, "unit.cpp"), Path(scratch, "unit.so")
            src.write_text(text)
            command = [*self.compiler.command, *self.flags, str(src), "-o", str(out), "-lm", "-lpthread"]
            try:
                result = subprocess.run(command, capture_output=True, text=True)
            except OSError as error:
                raise CompileError(f"cannot run {self.compiler.command[0]}: {error.strerror}") from None
            if result.returncode != 0 or not out.exists():
                raise CompileError(_explain(self.compiler, result.stderr, text))
            _write_whole(path.with_suffix(".cpp"), text.encode())
            os.replace(out, path)

    def _open(self, path: Path) -> ctypes.CDLL:
        if path not in self._libraries:
            try:
                self._libraries[path] = ctypes.CDLL(str(path))
            except OSError as error:
                path.unlink(missing_ok=True)
                raise CompileError(f"a cached program does not load ({error}); it was removed, start again") from None
        return self._libraries[path]

    def _symbol(self, path: Path, entry: str) -> int:
        address = ctypes.cast(getattr(self._open(path), entry), ctypes.c_void_p).value
        assert address is not None
        return address


def _write_whole(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix="writing-")
    with os.fdopen(handle, "wb") as f:
        f.write(content)
    os.replace(name, path)


def _explain(compiler: Compiler, stderr: str, text: str) -> str:
    """The compiler's first errors with the lines of the rendered source that they point to."""
    lines = text.split("\n")
    notes = []
    for line in stderr.splitlines():
        if "error" in line:
            fields = line.split("unit.cpp:")[-1].split(":")
            at = int(fields[0]) if fields[0].isdigit() else 0
            notes.append(line.split("unit.cpp:")[-1])
            notes += [f"  {n:5} | {lines[n - 1]}" for n in range(at - 1, at + 2) if 0 < n <= len(lines)]
        if len(notes) > 12:
            break
    detail = "\n".join(notes) or stderr.strip()[-400:] or "it said nothing"
    return (
        f"the compiler {' '.join(compiler.command)} failed; set CXX to another one, or use --device cpu-numpy\n{detail}"
    )
