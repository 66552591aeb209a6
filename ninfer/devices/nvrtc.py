"""CUDA text to machine code by NVRTC: needs no driver, no GPU and no toolkit, so a build can check every architecture.

A program is one kernel. Its key is the hash of text, options, architecture and NVRTC version.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from ninfer.devices.base import Source
from ninfer.errors import CompileError

# -default-device: helpers need no annotation. No headers are used: NVRTC has none of the host's.
OPTIONS = ("--std=c++17", "-default-device", "--extra-device-vectorization")
ARCHITECTURES = ("sm_86", "sm_89", "sm_90a", "sm_120a")  # what a build checks


@frozen
class KernelReport:
    """What the assembler said of a kernel."""

    registers: int
    spill_bytes: int
    shared_bytes: int


def nvrtc_missing() -> str | None:
    """None, or why NVRTC cannot be used."""
    try:
        version()
    except CompileError as error:
        return str(error)
    return None


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise CompileError(
            "CUDA kernels need the packages cuda-bindings and nvidia-cuda-nvrtc: pip install 'ninfer[nvrtc]'"
        ) from None
    return nvrtc


def _call(nvrtc: Any, what: str, result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code) != 0:
        raise CompileError(f"NVRTC: {what} failed with {code}")
    return values[0] if len(values) == 1 else tuple(values)


def version() -> str:
    """`13.5`. Raises CompileError where NVRTC is missing."""
    nvrtc = _nvrtc()
    try:
        major, minor = _call(nvrtc, "version", nvrtc.nvrtcVersion())
    except Exception as error:  # the library is looked up at the first call; what is raised depends on the release
        if isinstance(error, CompileError):
            raise
        raise CompileError(f"the NVRTC library cannot be loaded ({error}): pip install 'ninfer[nvrtc]'") from None
    return f"{major}.{minor}"


def whole_text(source: Source) -> str:
    return "\n".join([*source.headers, source.text])


def compile_cubin(source: Source, arch: str, *, options: Sequence[str] = OPTIONS) -> tuple[bytes, KernelReport]:
    """Machine code of one kernel.   arch: `sm_90a`. Raises CompileError with numbered lines."""
    nvrtc, text = _nvrtc(), whole_text(source)
    program = _call(nvrtc, "create", nvrtc.nvrtcCreateProgram(text.encode(), f"{source.entry}.cu".encode(), 0, [], []))
    try:
        flags = [f.encode() for f in (*options, f"--gpu-architecture={arch}", "--ptxas-options=-v")]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        log = _text(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if int(code) != 0:
            raise CompileError(f"NVRTC refused {source.entry} for {arch}\n{explain(log, text)}")
        size = _call(nvrtc, "cubin size", nvrtc.nvrtcGetCUBINSize(program))
        cubin = bytearray(size)
        _call(nvrtc, "cubin", (*nvrtc.nvrtcGetCUBIN(program, cubin), None))
        return bytes(cubin), _report(log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(nvrtc: Any, size_of: Any, get: Any, program: Any) -> str:
    buffer = bytearray(_call(nvrtc, "log size", size_of(program)))
    get(program, buffer)
    return bytes(buffer).rstrip(b"\0").decode(errors="replace")


def _report(log: str) -> KernelReport:
    def find(pattern: str) -> int:
        return max((int(m) for m in re.findall(pattern, log)), default=0)

    return KernelReport(find(r"Used (\d+) registers"), find(r"(\d+) bytes spill stores"), find(r"(\d+) bytes smem"))


def explain(log: str, text: str) -> str:
    """The first errors, each with the rendered lines about it."""
    lines, notes = text.split("\n"), list[str]()
    for line in log.splitlines():
        if "error" not in line:
            continue
        notes.append(line.strip())
        place = re.search(r"\((\d+)\): ", line)
        at = int(place[1]) if place else 0
        notes += [f"  {n:5} | {lines[n - 1]}" for n in range(at - 1, at + 2) if at and 0 < n <= len(lines)]
        if len(notes) > 16:
            break
    return "\n".join(notes) or log.strip()[-2000:]


@define
class CubinCache:
    """Compiled kernels of one architecture on disk, under the same rules as the host's programs."""

    directory: Path
    arch: str
    workers: int = field(factory=lambda: min(16, os.cpu_count() or 1))
    _version: str = field(factory=version)

    def cubins(
        self, sources: Sequence[Source], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Mapping[str, bytes]:
        """Machine code by entry, compiling what is missing.   progress(kernels ready, kernels in all)."""
        found = {s.entry: self._cached(s) for s in sources}
        missing = [s for s in sources if found[s.entry] is None]
        ready = len(sources) - len(missing)
        progress(ready, len(sources))
        for source, cubin in self._compile_all(missing):
            found[source.entry] = cubin
            ready += 1
            progress(ready, len(sources))
        return {entry: cubin for entry, cubin in found.items() if cubin is not None}

    def _compile_all(self, sources: Sequence[Source]) -> Iterator[tuple[Source, bytes]]:
        """In this process, or where there are many by workers: threads of one process wait for each other in NVRTC."""
        workers = min(self.workers, len(sources) // 4)
        if workers < 2:
            for source in sources:
                yield source, self._compile(source)
            return
        with ThreadPoolExecutor(workers) as pool:
            shares = [sources[i::workers] for i in range(workers)]
            for share in pool.map(self._compile_share, shares):
                for source in share:
                    cubin = self._cached(source)
                    yield source, self._compile(source) if cubin is None else cubin  # what failed says why here

    def _compile_share(self, sources: Sequence[Source]) -> Sequence[Source]:
        """By a process of its own, into the directory."""
        order = {
            "directory": str(self.directory),
            "arch": self.arch,
            "sources": [[s.entry, s.text, list(s.headers)] for s in sources],
        }
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        subprocess.run(
            [sys.executable, "-m", "ninfer.devices.nvrtc"],
            input=json.dumps(order),
            text=True,
            env=environment,
            capture_output=True,
        )
        return sources

    def _path(self, source: Source) -> Path:
        parts = (whole_text(source), self.arch, " ".join(OPTIONS), self._version)
        return self.directory / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.cubin"

    def _cached(self, source: Source) -> bytes | None:
        try:
            return self._path(source).read_bytes() or None
        except OSError:
            return None

    def _compile(self, source: Source) -> bytes:
        cubin, _ = compile_cubin(source, self.arch)
        path = self._path(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path.with_suffix(".cu"), whole_text(source).encode())
        _write_whole(path, cubin)
        return cubin


def _write_whole(path: Path, content: bytes) -> None:
    """Under a temporary name first: no reader sees half a file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix="writing-")
    with os.fdopen(handle, "wb") as f:
        f.write(content)
    os.replace(name, path)


def _work(order: Mapping[str, Any]) -> None:
    """What a worker process does. A kernel that does not compile is left to the one who asked."""
    cache = CubinCache(Path(order["directory"]), order["arch"])
    for entry, text, headers in order["sources"]:
        with contextlib.suppress(CompileError):
            cache._compile(Source(entry, text, tuple(headers)))


if __name__ == "__main__":
    _work(json.load(sys.stdin))
