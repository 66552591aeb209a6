"""A plan: the launches of one step shape over symbolic buffers. Frozen, pointer-free, printable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.devices.base import Geometry, Source
from ninfer.ir.op import Op
from ninfer.ir.types import Env, TensorType, Types


class Place(Enum):
    ARENA = "arena"
    WEIGHT = "weight"
    STATE = "state"
    STEP = "step"
    CONST = "const"
    RESULT = "result"


@frozen
class BufferRef:
    """Where an operand lies: a named weight, state, const or step input, or bytes of the arena or the results at
    `offset`. frame: the record of a step input."""

    place: Place
    name: str = ""
    offset: int = 0
    frame: int = 0

    def __str__(self) -> str:
        if self.place is Place.ARENA:
            return f"arena+{self.offset:#x}"
        return f"{self.name}@{self.frame}" if self.frame else self.name


@frozen
class Launch:
    """One kernel, or one library call, or (both None) one call of the op's reference.

    args: inputs then outputs then workspace; types: the inputs' and outputs' types in the same order. frame: the record
    whose header it reads. stages: of a woven launch, whose kernel finds their kinds and arguments in a table; args are
    then what it needs besides.
    """

    op: Op
    route: str
    source: Source | None
    library: tuple[str, Mapping[str, Any]] | None
    geometry: Geometry
    args: tuple[BufferRef, ...]
    types: Types
    num_inputs: int
    layer: int | None
    frame: int = 0
    stages: tuple[Launch, ...] = ()
    kind: int = 0

    def table(self, address: Callable[[BufferRef], int]) -> NDArray[np.uint64]:
        """Of a woven launch: the stages to run, then each stage's kind and arguments."""
        stride = 1 + max(len(x.args) for x in self.stages)
        words = np.zeros(1 + len(self.stages) * stride, np.uint64)
        words[0] = len(self.stages) << 32
        for i, stage in enumerate(self.stages):
            row = [stage.kind, *map(address, stage.args)]
            words[1 + i * stride :][: len(row)] = row
        return words


@frozen
class Plan:
    """more_frames: extents of the records that launches of the plan fill; the host fills that of `env`."""

    env: Env
    launches: tuple[Launch, ...]
    arena_bytes: int
    unshared_bytes: int  # what the arena would be if no buffer were reused
    outputs: dict[str, tuple[BufferRef, TensorType]]
    result_bytes: int = 0
    more_frames: tuple[Env, ...] = ()

    @property
    def frames(self) -> tuple[Env, ...]:
        return (self.env, *self.more_frames)

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(dict.fromkeys(x.source for x in self.launches if x.source is not None))

    @property
    def const_names(self) -> frozenset[str]:
        parts = [part for x in self.launches for part in (x, *x.stages)]
        return frozenset(ref.name for x in parts for ref in x.args if ref.place is Place.CONST)

    def table(self) -> str:
        """One line per launch: layer, op, route, output, grid."""
        lines = [f"{'layer':>5} {'op':20} {'route':36} {'grid':>14}  operands"]
        for x in self.launches:
            layer = "" if x.layer is None else str(x.layer)
            grid = "x".join(str(n) for n in x.geometry.grid)
            names = " ".join(str(a) for a in x.args)
            lines.append(f"{layer:>5} {x.op.key:20} {x.route:36} {grid:>14}  {names}")
        return "\n".join(lines)
