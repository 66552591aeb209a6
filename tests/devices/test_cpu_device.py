"""The executor and the program cache."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from ninfer.devices.base import Source
from ninfer.devices.cpu import _LAUNCH, CpuDevice, cpu_info
from ninfer.devices.programs import Compiler, ProgramCache, find_compiler
from ninfer.errors import CompileError

ADD_ONE = Source(
    "add_one",
    'extern "C" void add_one(void* const* a, int chunk, int chunks) {'
    " long* x = (long*)a[1]; long n = *(long*)a[0];"
    " for (long i = chunk; i < n; i += chunks) x[i] += 1; }",
)
# Reads its left neighbour of the array before: wrong unless all chunks of the launch before have finished.
SHIFT = Source(
    "shift",
    'extern "C" void shift(void* const* a, int chunk, int chunks) {'
    " long n = *(long*)a[0]; const long* x = (const long*)a[1]; long* y = (long*)a[2];"
    " for (long i = chunk; i < n; i += chunks) y[i] = x[(i + n - 1) % n] + 1; }",
)


def compiler() -> Compiler:
    found = find_compiler()
    assert found is not None, "these tests need a C++ compiler"
    return found


@pytest.fixture
def device(tmp_path: Path) -> CpuDevice:
    info = cpu_info()
    return CpuDevice(info, ProgramCache(compiler(), tmp_path, info.arch), threads=2)


def block(*arrays: np.ndarray) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))


def test_launches_run_in_order_whatever_the_number_of_chunks(device: CpuDevice) -> None:
    assert device.programs is not None
    entry = device.programs.addresses([SHIFT])["shift"]
    n = np.array([97], np.int64)
    x, y = np.arange(97, dtype=np.int64), np.zeros(97, np.int64)
    there, back = block(n, x, y), block(n, y, x)
    launches = np.array(
        [(entry, ctypes.addressof(there if i % 2 == 0 else back), 1 + i % 40) for i in range(300)], _LAUNCH
    )
    for _ in range(200):
        device.run(launches)
    rolled = np.roll(np.arange(97), 200 * 300) + 200 * 300
    np.testing.assert_array_equal(x, rolled)
    device.close()


def test_a_plan_finishes_while_other_threads_keep_every_core_busy(device: CpuDevice) -> None:
    assert device.programs is not None
    entry = device.programs.addresses([ADD_ONE])["add_one"]
    n, x = np.array([64], np.int64), np.zeros(64, np.int64)
    args = block(n, x)
    launches = np.array([(entry, ctypes.addressof(args), 8)] * 500, _LAUNCH)
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        for _ in range(20):
            device.run(launches)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert (x == 20 * 500).all()
    device.close()


def test_a_program_is_compiled_once_and_found_again(tmp_path: Path) -> None:
    first = ProgramCache(compiler(), tmp_path, "cpu")
    first.addresses([ADD_ONE, SHIFT])
    built = sorted(tmp_path.glob("*.so"))
    seen: list[tuple[int, int]] = []
    again = ProgramCache(Compiler(("/nonexistent",), compiler().version, compiler().native), tmp_path, "cpu")
    with pytest.raises(CompileError):  # another command is another key: it would have to compile
        again.addresses([ADD_ONE])
    ProgramCache(compiler(), tmp_path, "cpu").addresses(
        [ADD_ONE, SHIFT], lambda done, total: seen.append((done, total))
    )
    assert seen == [(2, 2)]
    assert sorted(tmp_path.glob("*.so")) == built


def test_two_compilations_at_once_leave_whole_files(tmp_path: Path) -> None:
    caches = [ProgramCache(compiler(), tmp_path, "cpu") for _ in range(4)]
    threads = [threading.Thread(target=c.addresses, args=([ADD_ONE, SHIFT],)) for c in caches]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not list(tmp_path.glob("building-*")) and not list(tmp_path.glob("writing-*"))
    assert set(ProgramCache(compiler(), tmp_path, "cpu").addresses([ADD_ONE, SHIFT])) == {"add_one", "shift"}


def test_a_truncated_library_is_removed_with_a_clear_error(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"  # apart: this process has the whole one mapped
    ProgramCache(compiler(), whole, "cpu").addresses([ADD_ONE])
    shutil.copytree(whole, cut)
    (library,) = cut.glob("*.so")
    library.write_bytes(library.read_bytes()[:100])
    with pytest.raises(CompileError, match="removed, start again"):
        ProgramCache(compiler(), cut, "cpu").addresses([ADD_ONE])
    assert ProgramCache(compiler(), cut, "cpu").addresses([ADD_ONE])


def test_a_compile_error_quotes_the_rendered_line(tmp_path: Path) -> None:
    broken = Source("broken", 'extern "C" void broken(void* const*, int, int) {\n  not_a_thing();\n}')
    with pytest.raises(CompileError, match=r"2 \|   not_a_thing"):
        ProgramCache(compiler(), tmp_path, "cpu").addresses([broken])


def test_a_broken_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "fake-cxx"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit 0\necho out of order >&2\nexit 1\n')
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("CXX", str(fake))
    found = find_compiler()
    assert found is not None and found.name == "fake 1.0"
    with pytest.raises(CompileError, match=r"fake-cxx failed.*\n.*out of order"):
        ProgramCache(found, tmp_path, "cpu").addresses([ADD_ONE])
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(CompileError, match="unset CXX"):
        find_compiler()
