from __future__ import annotations

import re
from pathlib import Path

import pytest
from attrs import evolve

from ninfer.errors import UsageError
from ninfer.ir.step import PAGE
from ninfer.runtime.memory_plan import ModelSizes, host_available_bytes, plan_memory
from tests.runtime.fake_runner import config

GIB = 2**30
SIZES = ModelSizes(context_len=32768, domain=1000, weight_bytes=4 * GIB, page_bytes=2**20, slot_bytes=2**20)


def test_without_flags_every_slot_can_have_a_whole_context() -> None:
    plan = plan_memory(config(), SIZES, 100 * GIB)
    assert plan.limits.context_len == 8192
    assert plan.limits.pages == 8 * 8192 // PAGE == 8 * plan.limits.max_pages
    assert plan.free_bytes == 100 * GIB - 4 * GIB - 8 * 2**20 - plan.kv_bytes
    assert plan_memory(config(), SIZES).limits == plan.limits


def test_a_small_window_is_the_context() -> None:
    assert plan_memory(config(), evolve(SIZES, context_len=2048)).limits.context_len == 2048


def test_pages_shrink_to_the_memory_there_is() -> None:
    plan = plan_memory(config(), SIZES, 5 * GIB)
    assert plan.limits.max_pages <= plan.limits.pages < 8 * plan.limits.max_pages
    assert plan.free_bytes is not None and plan.free_bytes > 0


def test_what_does_not_fit_is_refused_with_a_context_that_does() -> None:
    with pytest.raises(UsageError, match=r"needs .* GiB .* available; --max-context (\d+) would fit") as error:
        plan_memory(config(max_context=32768), SIZES, int(4.5 * GIB))
    fits = int(str(error.value).split("--max-context ")[1].split()[0])
    plan_memory(config(max_context=fits), SIZES, int(4.5 * GIB))
    with pytest.raises(UsageError, match="smaller model"):
        plan_memory(config(), SIZES, 3 * GIB)


@pytest.mark.parametrize(
    ("context", "flags"), [(8192, r"--kv-capacity (\d+)"), (32768, r"--kv-capacity (\d+) --max-context (\d+)")]
)
def test_a_capacity_that_does_not_fit_names_one_that_does(context: int, flags: str) -> None:
    asked = (
        rf"--kv-capacity 100000 needs 5\.53 GiB \(4\.01 .* 1\.53 .*\), but 4\.50 GiB are available; {flags} would fit"
    )
    with pytest.raises(UsageError, match=f"^{asked}$") as error:
        plan_memory(config(kv_capacity=100_000, max_context=context), SIZES, int(4.5 * GIB))
    found = re.search(flags, str(error.value).split(";")[1])
    assert found is not None
    capacity, *window = map(int, found.groups())
    plan = plan_memory(config(kv_capacity=capacity, max_context=(*window, context)[0]), SIZES, int(4.5 * GIB))
    assert plan.limits.pages * PAGE == capacity
    assert "rk8v4, 16,384 B/token" in plan.line("rk8v4")


def test_flags_that_contradict_each_other_name_what_would_work() -> None:
    with pytest.raises(UsageError, match="--kv-capacity 8192 or --max-context 4096"):
        plan_memory(config(kv_capacity=4096), SIZES)
    with pytest.raises(UsageError, match="window of 32768"):
        plan_memory(config(max_context=40000), SIZES)
    assert plan_memory(config(kv_capacity=8200, max_concurrency=2), SIZES).limits.pages == 129


def test_a_step_has_room_for_a_round_of_all_slots() -> None:
    assert plan_memory(config(prefill_chunk=16, max_concurrency=64), SIZES).limits.max_rows == 64


def test_available_memory_is_the_tighter_of_host_and_control_group(tmp_path: Path) -> None:
    assert host_available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert host_available_bytes(tmp_path) == 5000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000\n")
    (group / "memory.max").write_text("max\n")
    assert host_available_bytes(tmp_path) == 5000 * 1024
    (group / "memory.max").write_text("3000\n")
    assert host_available_bytes(tmp_path) == 2000
