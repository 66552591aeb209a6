"""From stored parameters to the weights that a graph names. Whole parameters are views of the mapped file."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from math import prod

import numpy as np
from attrs import define, field

from ninfer.artifacts import Artifact, Parameter
from ninfer.errors import ArtifactError
from ninfer.formats.bits import U8Array
from ninfer.formats.quant import Packed, QuantFormat
from ninfer.ir.graph import Graph, Rows, Value, WeightSpec
from ninfer.ir.types import Array

Progress = Callable[[int, int], None]  # weights done, weights in all


def bind_weights(
    graph: Graph,
    artifact: Artifact,
    progress: Progress = lambda done, total: None,
    *,
    bound: Collection[str] = (),
) -> dict[str, Array]:
    """Arrays by weight name: Packed for matrices with a format, float32 for the rest.   bound: names to leave out.

    Raises ArtifactError naming the tensor, with what was found and what was expected.
    """
    if not bound:
        refuse_unread(graph, artifact)
    binder = _Binder(artifact)
    weights: dict[str, Array] = {}
    wanted = {value: spec for value, spec in graph.weights.items() if value.name not in bound}
    for i, (value, spec) in enumerate(wanted.items()):
        weights[value.name] = binder.bind(value, spec)
        progress(i + 1, len(wanted))
    return weights


# Experts are offered under several names; those of the MTP block and of other towers are for other graphs.
_LAYER = re.compile(r"^model\.layers\.\d+\.(?!.*\bexperts\.).*\.(weight|bias)$")


def refuse_unread(graph: Graph, artifact: Artifact) -> None:
    """Raises ArtifactError for weights of layers that the graph leaves out: its results would not be the model's."""
    read = {piece.param.partition("/")[0] for spec in graph.weights.values() for piece in spec.pieces}
    if "model.norm.weight" not in read:
        return  # of a drafter, or of states alone
    unread = [name for name in artifact.names() if name not in read and _LAYER.match(name)]
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise ArtifactError(
            f"{artifact.path}: tensor {unread[0]!r}{more} is not part of the model that the config describes: weights "
            "and config are of different models, or of a variant that is not supported"
        )


@define
class _Binder:
    artifact: Artifact
    _last: Parameter | None = field(default=None)  # a parameter may be costly to make, and pieces follow each other

    def bind(self, value: Value, spec: WeightSpec) -> Array:
        if value.type.fmt is None:
            return self._decoded(value, spec)
        fmt = value.type.fmt
        pieces = [self._piece(value, piece, fmt) for piece in spec.pieces]
        raw, shape = pieces[0]
        if len(pieces) > 1:
            raw, shape = fmt.stack_rows(pieces), (sum(shape[0] for _, shape in pieces), shape[1])
        if shape != value.type.shape:
            raise ArtifactError(f"weight {value.name!r} has shape {list(shape)}, but {value.type} is expected")
        return Packed(fmt, raw, shape)

    def _get(self, name: str) -> Parameter:
        if self._last is None or self._last.name != name:
            self._last = self.artifact.get(name)
        return self._last

    def _decoded(self, value: Value, spec: WeightSpec) -> Array:
        (piece,) = spec.pieces
        p = self._get(piece.param)
        if tuple(d for d in p.shape if d > 1) != tuple(d for d in value.type.shape if d != 1):
            raise ArtifactError(f"tensor {p.name!r} has shape {list(p.shape)}, but {value.type} is expected")
        return np.ascontiguousarray(p.f32().reshape([int(d) for d in value.type.shape]))

    def _piece(self, value: Value, rows: Rows, fmt: QuantFormat) -> tuple[U8Array, tuple[int, int]]:
        p = self._get(rows.param)
        if p.format is not fmt or len(p.shape) < 2:
            raise ArtifactError(
                f"tensor {p.name!r} is {p.format.name} {list(p.shape)}, but {value.type} is expected of it"
            )
        n, k = prod(p.shape[:-1]), p.shape[-1]  # experts lie below each other
        if rows.count is None and rows.start == 0:
            return p.raw, (n, k)
        if rows.period is None:
            count = n - rows.start if rows.count is None else rows.count
            if rows.start + count > n:
                raise ArtifactError(f"tensor {p.name!r} has {n} rows, too few for {rows}")
            return fmt.slice_rows(p.raw, p.shape, rows.start, count), (count, k)
        starts = np.arange(rows.start, n, rows.period)
        count = rows.period if rows.count is None else rows.count
        index = (starts[:, None] + np.arange(count)).reshape(-1)
        if index.size == 0 or index[-1] >= n:
            raise ArtifactError(f"tensor {p.name!r} has {n} rows, which do not divide into {rows}")
        return fmt.gather_rows(p.raw, p.shape, index), (len(index), k)
