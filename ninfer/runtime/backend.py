"""The device that a config asks for, with what loading needs to know of it: its routes, its memory, its fusions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from ninfer.artifacts import Artifact
from ninfer.artifacts.synthetic import SyntheticArtifact
from ninfer.config import EngineConfig
from ninfer.devices.base import Device, DeviceInfo
from ninfer.devices.cpu import CpuBench, CpuDevice, cpu_info
from ninfer.devices.cuda import CudaBench, CudaDevice, count_devices, cuda_info, libraries
from ninfer.devices.cuda_sim import SimDevice, SimPrograms, sim_info
from ninfer.devices.nvrtc import CubinCache
from ninfer.devices.programs import ProgramCache, find_compiler
from ninfer.devices.synthetic import Synthetic
from ninfer.errors import DeviceError, UsageError
from ninfer.formats.quant import Packed
from ninfer.ir.graph import Graph
from ninfer.ir.op import Op
from ninfer.ir.rewrites import by_permission, fuse, fuse_rotations
from ninfer.ir.types import Array, Env, TensorType, Types
from ninfer.routes.cuda import cuda_routes
from ninfer.routes.cuda_layout import device_layout
from ninfer.routes.digest import fresh
from ninfer.routes.fp4_cuda import PREFILL_4BIT
from ninfer.routes.gemm8_cuda import PREFILL_8BIT
from ninfer.routes.lower import Lowering
from ninfer.routes.measure import Bench
from ninfer.routes.profile import DeviceProfile, cache_dir, load_profile
from ninfer.routes.render import Renderer
from ninfer.routes.route import RouteRegistry
from ninfer.routes.select import Selector
from ninfer.routes.tables import REGISTRY
from ninfer.routes.weave import weaver_for
from ninfer.runtime.memory_plan import host_available_bytes
from ninfer.runtime.weights import bind_weights

Report = Callable[[str, str], None]
Progress = Callable[[str, int, int], None]  # what, done, total

Answers = dict[tuple[Op, Types], bool]  # whether there is a route

CODES_WIDTH = 32  # rows up to which 8-bit codes pass between a GPU's kernels; wider steps are bound by arithmetic


@frozen(kw_only=True)
class Backend:
    """device: where plans run. registry: its routes. free_bytes: memory for weights, states and the arena, if known.
    is_opted: routes with fewer bits of activations are offered, which not every weight may allow."""

    device: Device
    registry: RouteRegistry
    free_bytes: int | None
    deterministic: bool = False
    is_opted: bool = False
    _fused: dict[tuple[Graph, bool], list[tuple[Answers, Graph]]] = field(factory=dict, init=False)

    @property
    def info(self) -> DeviceInfo:
        return self.device.info

    @property
    def is_gpu(self) -> bool:
        """A GPU or its simulation."""
        return self.info.kind != "cpu"

    def graph(self, graph: Graph, env: Env) -> Graph:
        """The graph as this device runs it at a width: fused as far as there are routes.

        Fused kernels of GPUs round activations; under --deterministic every width runs the same unfused routes, but
        for rotations, which are the same bits fused or not. One that was fused for another width is taken where every
        question on the way has the same answer.
        """
        codes = env.rows <= CODES_WIDTH
        known = self._fused.setdefault((graph, codes), [])
        for answers, fused in known:
            if all(self._accepts(op, types, env) == answer for (op, types), answer in answers.items()):
                return fused
        asked: Answers = {}

        def accepts(op: Op, types: Types) -> bool:
            answer = asked[op, types] = self._accepts(op, types, env)
            return answer

        if not self.is_gpu or self.deterministic:
            fused = fuse_rotations(graph, accepts)
        else:
            fused = fuse(by_permission(graph) if self.is_opted and not codes else graph, accepts, codes=codes)
        known.append((asked, fused))
        return fused

    def _accepts(self, op: Op, types: Types, env: Env) -> bool:
        return bool(self.registry.candidates(op, types, env, self.info))

    def weights(
        self, graph: Graph, artifact: Artifact, progress: Progress, *, bound: Collection[str] = ()
    ) -> dict[str, Any]:
        """Arrays by name, but for names in `bound`; on a GPU, matrices of a synthetic model are markers that the
        device fills itself."""
        if isinstance(artifact, SyntheticArtifact) and isinstance(self.device, CudaDevice):
            return {name: w for name, w in synthetic_weights(graph, artifact).items() if name not in bound}

        def told(done: int, total: int) -> None:
            progress("binding weights", done, total)

        return dict(bind_weights(graph, artifact, told, bound=bound))

    def weight_bytes(self, weights: Mapping[str, Any]) -> int:
        if isinstance(self.device, CudaDevice):
            return sum(self.device.weight_bytes(w) for w in weights.values())
        return sum(w.raw.nbytes if isinstance(w, Packed) else w.nbytes for w in weights.values())

    def lowering(self, config: EngineConfig, report: Report) -> Lowering:
        """Routes in default order, with what the device's profile measured on top."""
        profile = DeviceProfile(self.info.hardware_class)
        if config.device_profile != "off":
            profile, stale = self.profile(config.device_profile_path)
            bands = [winner for found in profile.routes.values() for _, winner in found if winner]
            if profile.routes:
                more = f", {stale} stale (run ninfer-calibrate to measure them)" if stale else ""
                report("profile", f"{profile.hardware_class}  {len(bands)} of {len(bands) + stale} bands used{more}")
        renderer = Renderer(self.info)
        weaver = weaver_for(self.info, renderer) if config.decode_kernels == "woven" else None
        return Lowering(Selector(self.registry, self.info, profile, config.deterministic), renderer, weaver)

    def profile(self, path: Path | None = None) -> tuple[DeviceProfile, int]:
        """What was measured of the kernels as they are, and the number of bands that are of others."""
        stale = 0

        def check(found: DeviceProfile) -> DeviceProfile:
            nonlocal stale
            kept, gone = fresh(found, self.registry.routes)
            stale += gone
            return kept

        return load_profile(self.info, path, check=check), stale

    def bench(
        self,
        weights: Mapping[str, Array],
        states: Mapping[str, TensorType],
        env: Env,
        consts: Mapping[str, NDArray[Any]],
    ) -> Bench:
        """For calibration.   Raises UsageError on a device whose times mean nothing."""
        if isinstance(self.device, CudaDevice):
            return CudaBench(self.device, weights, states, env, consts)
        if isinstance(self.device, CpuDevice):
            return CpuBench(self.device, weights, states, env, consts)
        raise UsageError(f"--device {self.info.kind}: times of a simulation mean nothing; calibrate cpu or cuda")


def open_backend(config: EngineConfig, report: Report, progress: Progress) -> Backend:
    """--device: auto takes a GPU where there is one.   Raises DeviceError."""
    opted = {"8bit": (PREFILL_8BIT,), "4bit": (PREFILL_4BIT,)}.get(config.prefill_activations, ())
    if opted and config.deterministic:
        raise UsageError(
            f"--prefill-activations {config.prefill_activations} is for wide chunks only, so --deterministic, which "
            "computes every width alike, excludes it: leave one of them out"
        )
    kind, _, index = config.device.partition(":")
    if kind == "auto":
        kind = "cuda" if _has_gpu() else "cpu"
    if opted and kind not in ("cuda", "cuda-sim"):
        raise UsageError(
            f"--prefill-activations {config.prefill_activations} is for GPUs, not --device {kind}: leave it out"
        )
    if kind == "cuda":
        backend = _cuda(int(index or 0), opted, report, progress)
    elif kind == "cuda-sim":
        backend = _simulated(opted, report, progress)
    else:
        backend = _cpu(config, report, progress)
    if PREFILL_4BIT in opted and "sm120a" not in backend.info.features:
        raise UsageError(f"--prefill-activations 4bit needs an sm_120a card, which {backend.info.name} is not: "
                         "8bit runs on every GPU")  # fmt: skip
    return evolve(backend, deterministic=config.deterministic, is_opted=bool(opted))


def _has_gpu() -> bool:
    try:
        return count_devices(libraries()) > 0
    except DeviceError:
        return False


def _cpu(config: EngineConfig, report: Report, progress: Progress) -> Backend:
    info = cpu_info()
    threads = config.threads or info.units
    compiler = None if config.device == "cpu-numpy" else find_compiler()
    report("device", f"{info.name}  {threads} threads  {' '.join(sorted(info.features)) or 'portable'}")
    free = host_available_bytes()
    if compiler is None:
        report("compiler", "none found: every op runs on numpy, slowly; install g++ or clang++, or pip install ziglang")
        return Backend(device=CpuDevice(info, None, threads), registry=RouteRegistry(()), free_bytes=free)
    report("compiler", compiler.name)
    programs = ProgramCache(compiler, cache_dir() / "programs", info.arch)
    device = CpuDevice(info, programs, threads, lambda done, total: progress("compiling kernels", done, total))
    return Backend(device=device, registry=REGISTRY, free_bytes=free)


def _cuda(index: int, opted: Collection[str], report: Report, progress: Progress) -> Backend:
    libs = libraries()
    info = cuda_info(libs, index)
    programs = CubinCache(cache_dir() / "programs", info.arch)

    def compiled(done: int, total: int) -> None:
        progress("compiling kernels", done, total)

    device = CudaDevice(libs, info, programs, device_layout, index, compiled)
    free, total = libs.cupy.cuda.runtime.memGetInfo()
    report(
        "device", f"{info.name}  {info.arch}  {info.units} units  {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    )
    registry = RouteRegistry(cuda_routes(info.units, opted=opted))
    return Backend(device=device, registry=registry, free_bytes=int(free) - (512 << 20))


def _simulated(opted: Collection[str], report: Report, progress: Progress) -> Backend:
    compiler = find_compiler()
    if compiler is None:
        raise DeviceError("--device cuda-sim needs a C++ compiler: install g++ or clang++, or pip install ziglang")
    info = sim_info()
    report("device", f"{info.name}  CUDA kernels on the processor, to test them: slow")
    programs = SimPrograms(compiler, cache_dir() / "programs", cpu_info().arch)
    registry = RouteRegistry(cuda_routes(info.units, opted=opted))
    return Backend(device=SimDevice(programs, device_layout), registry=registry, free_bytes=host_available_bytes())


def synthetic_weights(graph: Graph, artifact: SyntheticArtifact) -> dict[str, Any]:
    """Markers for matrices, arrays for vectors."""
    weights: dict[str, Any] = {}
    for i, (value, spec) in enumerate(graph.weights.items()):
        shape = tuple(int(d) for d in value.type.shape if isinstance(d, int))
        if value.type.fmt is not None:
            weights[value.name] = Synthetic(value.type.fmt, shape, i)
        else:
            weights[value.name] = np.ascontiguousarray(artifact.get(spec.pieces[0].param).f32().reshape(shape))
    return weights
