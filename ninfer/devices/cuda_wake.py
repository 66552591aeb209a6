"""What a GPU needs before it can be asked for anything, in the background: Python imports the rest meanwhile.

The driver's start and a context take a quarter of a second or more, in which no lock of the interpreter is held.
Nothing is handed over: whoever needs the driver or a context next finds it there or waits for it, and is told what is
wrong with it. Packages are not imported here: two threads that import take as long as one, and of modules that need
each other one of them may see half.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress


def wake(device: str) -> threading.Thread | None:
    """device: as --device says. None: it needs no GPU."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda"):
        return None
    thread = threading.Thread(target=_retain_context, args=(int(index or 0),), name="ninfer-wake", daemon=True)
    thread.start()
    return thread


def _retain_context(index: int) -> None:
    """Of the card's primary context, which cupy uses: kept until the process ends."""
    with suppress(OSError):  # no driver
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
