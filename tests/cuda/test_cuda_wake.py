from __future__ import annotations

import ctypes
from typing import Any

import pytest

from ninfer.devices.cuda_wake import wake


class Driver:
    """Notes what it is asked for."""

    def __init__(self, count: int) -> None:
        self.count, self.calls = count, list[str]()

    def cuInit(self, flags: int) -> int:
        self.calls.append("init")
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        self.calls.append(f"device {index}")
        return 0 if index < self.count else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.calls.append("context")
        return 0


@pytest.mark.parametrize("device", ["cpu", "cpu-numpy", "cuda-sim"])
def test_what_needs_no_gpu_wakes_none(device: str) -> None:
    assert wake(device) is None


@pytest.mark.parametrize(
    "device, calls",
    [
        ("auto", ["init", "device 0", "context"]),
        ("cuda:1", ["init", "device 1", "context"]),
        ("cuda:2", ["init", "device 2"]),
    ],
)
def test_the_context_of_the_card_is_made(device: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(2)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    thread = wake(device)
    assert thread is not None
    thread.join()
    assert driver.calls == calls


def test_without_a_driver_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: no such file")

    said = list[object]()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr("threading.excepthook", said.append)
    thread = wake("cuda")
    assert thread is not None
    thread.join()
    assert not said
