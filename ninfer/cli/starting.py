"""What goes on beside the loading of a model, the same for every command that answers with one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from ninfer.devices.cuda_wake import wake


@contextmanager
def starting(device: str) -> Iterator[None]:
    """Around imports and loading: the GPU's driver wakes in the background, and nobody looks for garbage. What there is
    in the end stays, and is not looked through again."""
    wake(device)
    gc.disable()  # it would look time and again through what has just been made: a third of a start
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
