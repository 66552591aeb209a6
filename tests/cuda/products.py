"""A product case through one candidate, kernel by kernel, in the simulation; numpy stands for libraries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.devices.base import DeviceInfo, Source
from ninfer.devices.cpu import aligned
from ninfer.devices.cuda_sim import SIM_FEATURES, run_kernel, sim_info
from ninfer.formats.dtypes import bf16_to_f32, f32_to_bf16
from ninfer.formats.quant import Packed
from ninfer.ir.step import HEADER
from ninfer.routes import join_cuda, linear_cuda
from ninfer.routes.cuda_layout import layout_of
from ninfer.routes.render import Renderer
from ninfer.routes.route import Geometry, RouteRegistry
from tests.cuda import parity

UNITS = 5
REGISTRY = RouteRegistry((*join_cuda.routes(UNITS), *linear_cuda.routes(UNITS)))
# As a real GPU, so that routes around library products are offered.
INFO = DeviceInfo("cuda", "simulated", "simulated", SIM_FEATURES | {"sm90a"}, "sim", UNITS, 1 << 34)
RENDERER = Renderer(sim_info(UNITS))


@frozen
class Trial(parity.Trial):
    @property
    def id(self) -> str:
        return f"{self.case.name}-{self.candidate.id}-for{self.env.rows}"


def sources(trial: Trial) -> Iterator[tuple[Source | None, Geometry]]:
    op, route, tuning = trial.case.op, trial.candidate.route, trial.candidate.tuning
    types = (*trial.case.types, *op.infer(trial.case.types))
    stages = [(route.template, route.geometry, None), *((s.template, s.geometry, s.library) for s in route.then)]
    for template, geometry, library in stages:
        if library is not None:
            yield None, Geometry()
        else:
            source = RENDERER.render(trial.candidate, op, types, trial.env, template=template)
            yield source, geometry(op, types, trial.env, tuning)


def error_of(got: Sequence[NDArray[np.generic]], want: Sequence[NDArray[np.generic]]) -> float:
    pairs = zip(got, want, strict=True)
    return max(float(np.linalg.norm(a.astype(np.float64) - b.astype(np.float64)) / np.linalg.norm(b)) for a, b in pairs)


def run(
    trial: Trial, want: Sequence[NDArray[np.generic]], order: int, compiled: dict[str, int]
) -> list[NDArray[np.generic]]:
    case, route, tuning = trial.case, trial.candidate.route, trial.candidate.tuning
    types = (*case.types, *case.op.infer(case.types))
    header = aligned(64)[: HEADER.numpy.itemsize].view(HEADER.numpy).reshape(())
    header["rows"] = case.env.rows
    operands = [on_device(a) for a in case.arrays]
    results = [on_device(np.full((trial.env.rows, *w.shape[1:]), 77).astype(w.dtype)) for w in want]
    workspace = aligned(max(route.workspace(case.op, types, trial.env, tuning), 16), 256)
    workspace[:] = 0xFF
    buffers = [*operands, *results, workspace]
    pointers = [header.ctypes.data, *(b.ctypes.data for b in buffers)]
    if not route.workspace(case.op, types, trial.env, tuning):
        pointers.pop()
    for source, g in sources(trial):
        if source is None:
            library(route.context(case.op, types, trial.env, tuning), buffers, case.env.rows)
        else:
            address = compiled[f"{source.entry}_sim"]
            run_kernel(source.entry, address, pointers, g.grid, g.block, g.shared, order=order)
    for r, w in zip(results, want, strict=True):
        assert (r[len(w) :] == np.full((), 77).astype(w.dtype)).all(), "rows that the step does not have were written"
    return [r[: len(w)] for r, w in zip(results, want, strict=True)]


def on_device(array: NDArray[np.generic] | Packed) -> NDArray[np.generic]:
    source = layout_of(array.format).repack(array.raw, array.shape) if isinstance(array, Packed) else array
    copy = aligned(source.nbytes, 256)[: source.nbytes].view(source.dtype).reshape(source.shape)
    copy[...] = source
    return copy


def library(context: object, buffers: Sequence[NDArray[np.generic]], rows: int) -> None:
    assert isinstance(context, dict)
    n, k = context["n"], context["k"]

    def words(name: str, count: int) -> NDArray[np.uint8]:
        flat = buffers[context[name]].reshape(-1).view(np.uint8)
        return flat[context[f"{name}_offset"] :][:count]

    a = bf16_to_f32(words("a", 2 * rows * k).view(np.uint16)).reshape(rows, k)
    b = bf16_to_f32(words("b", 2 * n * k).view(np.uint16)).reshape(n, k)
    c = a @ b.T
    if context["out"] == "f32":
        words("c", 4 * rows * n).view(np.float32)[:] = c.reshape(-1)
    else:
        words("c", 2 * rows * n).view(np.uint16)[:] = f32_to_bf16(c).reshape(-1)
