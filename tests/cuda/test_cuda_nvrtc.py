"""Compiling without a driver: errors point at lines, programs are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from ninfer.devices.base import Source
from ninfer.devices.nvrtc import CubinCache, compile_cubin, nvrtc_missing
from ninfer.errors import CompileError

pytestmark = pytest.mark.skipif(nvrtc_missing() is not None, reason=nvrtc_missing() or "")

GOOD = Source("twice", 'extern "C" __global__ void twice(f32* x) { x[threadIdx.x] *= 2; }', ("typedef float f32;",))


def test_a_kernel_becomes_machine_code() -> None:
    cubin, report = compile_cubin(GOOD, "sm_86")
    assert cubin[:4] == b"\x7fELF" and b"twice" in cubin
    assert report.registers > 0 and report.spill_bytes == 0


def test_an_error_quotes_the_rendered_line() -> None:
    bad = Source("bad", 'extern "C" __global__ void bad(f32* x) {\n    x[0] = missing;\n}', GOOD.headers)
    with pytest.raises(CompileError, match=r"(?s)missing.*3 |     x.0. = missing;"):
        compile_cubin(bad, "sm_90a")


def test_compiled_programs_are_kept(tmp_path: Path) -> None:
    cache, seen = CubinCache(tmp_path, "sm_89"), list[tuple[int, int]]()
    first = cache.cubins([GOOD], lambda done, total: seen.append((done, total)))
    again = cache.cubins([GOOD], lambda done, total: seen.append((done, total)))
    assert first == again and seen == [(0, 1), (1, 1), (1, 1)]
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".cu", ".cubin"]


def test_many_programs_are_compiled_by_workers(tmp_path: Path) -> None:
    sources = [Source(f"k{i}", GOOD.text.replace("twice", f"k{i}"), GOOD.headers) for i in range(9)]
    cubins = CubinCache(tmp_path, "sm_86", workers=2).cubins(sources)
    assert all(f"k{i}".encode() in cubins[f"k{i}"] for i in range(9))
    bad = Source("bad", "nonsense", ())
    with pytest.raises(CompileError, match="nonsense"):
        CubinCache(tmp_path, "sm_89", workers=2).cubins([*sources, bad])
