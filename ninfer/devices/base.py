"""What the rest of the engine knows of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.ir.types import Env, TensorType

if TYPE_CHECKING:
    from ninfer.devices.plan import Plan


@frozen
class DeviceInfo:
    """kind: cpu, cuda or cuda-sim. features: what routes may need. arch: compiler target, e.g. sm_90a.

    units: cores or multiprocessors. memory_bytes: in all. hardware_class: the name of its profile file.
    """

    kind: str
    name: str
    hardware_class: str
    features: frozenset[str]
    arch: str
    units: int
    memory_bytes: int


@frozen
class Source:
    """A rendered kernel. entry: the C symbol; equal text gives equal entry.

    headers: shared pieces (types, format decoders) that `text` needs, in order. A translation unit of several
    kernels has each distinct header once.
    """

    entry: str
    text: str
    headers: tuple[str, ...] = ()


@frozen
class Geometry:
    """grid: blocks, or chunks of work on a CPU (any thread may take any chunk). block: threads. shared: bytes."""

    grid: tuple[int, int, int] = (1, 1, 1)
    block: int = 1
    shared: int = 0


def noise(count: int) -> NDArray[np.float32]:
    """What calibration puts into activations, the same each time: positive, as scales and sums of squares are."""
    return np.abs(np.random.default_rng(7).standard_normal(count, np.float32))


class Memory(Protocol):
    """The regions of one engine on one device: weights, states (KV pages, recurrent), step records.

    Everything is allocated before the first executable is bound.
    """

    @property
    def states(self) -> Mapping[str, Any]:
        """Arrays of the device, for their shapes."""

    def write_state(self, name: str, index: Any, values: NDArray[Any]) -> None:
        """states[name][index] = values, ordered before the next launch."""

    def read_state(self, name: str, index: Any) -> NDArray[Any]:
        """A host copy of states[name][index], after the last launch."""

    def read_rows(self, names: Sequence[str], index: int) -> NDArray[np.uint8]:
        """The bytes of states[name][index] side by side, as the last launch left them. On a GPU they lie in pinned
        memory and may still be on their way, beside later launches: they are there after `settle`."""

    def write_rows(self, names: Sequence[str], index: int, data: NDArray[np.uint8]) -> None:
        """The other way round, ordered before the next launch. data must not change until `settle`."""

    def settle(self) -> None:
        """Wait for copies, and for nothing else."""

    def reserve_rows(self, counts: Mapping[int, int]) -> None:
        """counts: of results of `read_rows` that will be kept, by their bytes. A hint: pinning a gigabyte takes longer
        than filling it, and is better done in the background than in the midst of a prompt."""


class Executable(Protocol):
    """A plan bound to memory. `step` holds host arrays, one per step input, with the Env's full extents."""

    @property
    def env(self) -> Env: ...

    @property
    def header(self) -> NDArray[Any]:
        """The StepHeader record, shape (), to be filled before each launch."""

    @property
    def step(self) -> Mapping[str, NDArray[Any]]: ...

    def launch(self) -> Mapping[str, NDArray[Any]]:
        """Run the plan and wait. Returns the graph's outputs (host views, valid until the next launch)."""


class Device(Protocol):
    """`Memory` objects go back to the device that made them, so they are opaque here."""

    @property
    def info(self) -> DeviceInfo: ...

    def memory(
        self, weights: Mapping[str, Any], states: Mapping[str, TensorType], env: Env, arena_bytes: int
    ) -> Memory:
        """Place the weights, and allocate states for env's slots and pages and an arena for every plan."""

    def compile(self, plans: Sequence[Plan]) -> dict[str, int]:
        """Handles of all kernels of the plans, by entry."""

    def bind(
        self, plan: Plan, memory: Any, consts: Mapping[str, NDArray[Any]], entries: Mapping[str, int]
    ) -> Executable: ...

    def close(self) -> None:
        """Give up threads and memory; nothing may be launched after it."""
