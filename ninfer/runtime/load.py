"""From a model name on the command line to a runner with its tokenizer: everything before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from attrs import define, frozen

from ninfer.artifacts import open_artifact
from ninfer.artifacts.artifact import Artifact
from ninfer.artifacts.demo import demo_path
from ninfer.artifacts.quantize import quantize
from ninfer.config import EngineConfig
from ninfer.devices.cpu import CpuDevice, cpu_info
from ninfer.devices.programs import ProgramCache, find_compiler
from ninfer.errors import UsageError
from ninfer.formats.kv import KVFormat
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.ir.graph import Graph
from ninfer.ir.step import PAGE
from ninfer.ir.types import Array
from ninfer.models import identify
from ninfer.models.family import Family, ModelSpec
from ninfer.routes.tables import REGISTRY
from ninfer.routes.lower import Lowering
from ninfer.routes.profile import cache_dir, load_profile
from ninfer.routes.render import Renderer
from ninfer.routes.select import Selector
from ninfer.runtime.batch import Limits, ModelRunner
from ninfer.runtime.runner import CompiledRunner, Scorer, const_arrays, env_of, plan_widths, state_types
from ninfer.runtime.weights import bind_weights
from ninfer.text.chat import ChatTemplate
from ninfer.text.tokenizer import Tokenizer

Report = Callable[[str, str], None]
Progress = Callable[[str, int, int], None]  # what, done, total


def no_report(label: str, text: str) -> None:
    pass


def no_progress(what: str, done: int, total: int) -> None:
    pass


@define
class Model:
    """An opened artifact whose family is known. Graphs of any mode are built from it over shared weights."""

    artifact: Artifact
    family: Family
    spec: ModelSpec
    kv: KVFormat

    def graph(self, mode: str) -> Graph:
        return self.family.build(self.spec, self.artifact.info, kv=self.kv, mode=mode)

    def weights(self, graph: Graph) -> dict[str, Array]:
        return bind_weights(graph, self.artifact)


@frozen(kw_only=True)
class Loaded:
    """What serving needs of a model."""

    runner: ModelRunner
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    model_id: str
    generation_config: Mapping[str, Any]
    eos_ids: frozenset[int]
    explain: Callable[[], str]


def open_model(config: EngineConfig, report: Report = no_report, progress: Progress = no_progress) -> Model:
    """Find the file, open it, know its family. Raises ArtifactError or UsageError."""
    path = demo_path(cache_dir()) if config.model == "demo" else Path(config.model)
    artifact: Artifact = open_artifact(path)
    family, spec = identify(artifact.config)
    if config.quantize:
        artifact = quantize(artifact, config.quantize)
    report("model", f"{family.name}  {spec.summary}  {artifact.summary()}")
    return Model(artifact, family, spec, kv_by_name(config.kv_dtype))


def cpu_device(config: EngineConfig, report: Report = no_report, progress: Progress = no_progress) -> CpuDevice:
    """The host, with its compiler if there is one."""
    info = cpu_info()
    threads = config.threads or info.units
    compiler = None if config.device == "cpu-numpy" else find_compiler()
    programs = None
    if compiler is not None:
        programs = ProgramCache(compiler, cache_dir() / "programs", info.arch)
        report("device", f"{info.name}  {threads} threads  {' '.join(sorted(info.features)) or 'portable'}")
        report("compiler", compiler.name)
    else:
        reason = "asked for" if config.device == "cpu-numpy" else "no C++ compiler found (install g++ for speed)"
        report("device", f"{info.name}  numpy routes only: {reason}")
    return CpuDevice(info, programs, threads, lambda done, total: progress("compiling kernels", done, total))


def lowering_for(device: CpuDevice, config: EngineConfig, report: Report = no_report) -> Lowering:
    profile = load_profile(device.info, Path(config.device_profile_path) if config.device_profile_path else None)
    registry = REGISTRY if device.programs is not None else REGISTRY.without_routes()
    if config.device_profile == "off":
        profile = type(profile)(profile.hardware_class)
    if profile.routes:
        report("profile", f"{profile.hardware_class}  {len(profile.routes)} ops with a measured choice")
    selector = Selector(registry, device.info, profile, config.deterministic)
    return Lowering(selector, Renderer(device.info))


def limits_for(model: Model, config: EngineConfig) -> Limits:
    """Sizes from the flags and the model. Raises UsageError with the numbers that would work."""
    window = model.spec.context_len
    context = config.max_context or min(window, 8192)
    if context > window:
        raise UsageError(f"--max-context {context} exceeds the model's window of {window} tokens; use {window} or less")
    pages_each = ceil(context / PAGE)
    if config.kv_capacity is None:
        pages = pages_each * min(config.max_concurrency, 4)
    else:
        pages = ceil(config.kv_capacity / PAGE)
        if pages < pages_each:
            raise UsageError(
                f"--kv-capacity {config.kv_capacity} holds less than one context of {context} tokens; "
                f"use --kv-capacity {pages_each * PAGE} or --max-context {pages * PAGE}"
            )
    return Limits(
        max_rows=max(config.prefill_chunk, config.max_concurrency),
        max_seqs=config.max_concurrency,
        slots=config.max_concurrency,
        pages=pages + 1,
        max_pages=pages_each,
        context_len=context,
        domain=model.spec.domain,
    )


def load(config: EngineConfig, report: Report = no_report, progress: Progress = no_progress) -> Loaded:
    """Everything up to the first step.   Raises StartupError subclasses with one clear line."""
    started = time.perf_counter()
    model = open_model(config, report, progress)
    limits = limits_for(model, config)
    device = cpu_device(config, report, progress)
    lowering = lowering_for(device, config, report)
    graph = model.graph("sample")
    weights = model.weights(graph)
    plans = plan_widths(lowering, graph, limits)
    entries = device.compile(list(plans.values()))
    arena = max(p.arena_bytes for p in plans.values())
    memory = device.memory(weights, state_types(graph), env_of(limits, limits.max_rows), arena)
    consts = const_arrays(graph)
    runner = CompiledRunner(
        limits, device, memory, {w: device.bind(p, memory, consts, entries) for w, p in plans.items()}
    )
    _report_memory(report, memory, arena, limits, model)
    report("plans", f"widths {', '.join(map(str, plans))}  {len(entries)} kernels  "
           f"ready in {time.perf_counter() - started:.1f} s")  # fmt: skip
    return Loaded(
        runner=runner,
        tokenizer=Tokenizer.from_artifact(model.artifact),
        chat_template=_chat_template(model, config),
        model_id=config.model_id or model.artifact.display_name,
        generation_config=model.artifact.generation_config,
        eos_ids=_eos_ids(model),
        explain=lambda: "\n\n".join(f"width {w}\n{plan.table()}" for w, plan in plans.items()),
    )


def load_scorer(config: EngineConfig, mode: str = "score") -> tuple[Scorer, Model, Limits]:
    """A plan that gives log-probabilities ("score") or logits ("logits") of every row, for one sequence."""
    model = open_model(config)
    limits = limits_for(model, config)
    device = cpu_device(config)
    lowering = lowering_for(device, config)
    graph = model.graph(mode)
    env = env_of(limits, limits.max_rows, logit_rows=limits.max_rows)
    plan = lowering.lower(graph, env)
    memory = device.memory(model.weights(graph), state_types(graph), env, plan.arena_bytes)
    executable = device.bind(plan, memory, const_arrays(graph), device.compile([plan]))
    return Scorer(executable), model, limits


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"


def _report_memory(report: Report, memory: Any, arena: int, limits: Limits, model: Model) -> None:
    kv = sum(a.nbytes for n, a in memory.states.items() if n.startswith("kv."))
    rest = sum(a.nbytes for n, a in memory.states.items() if not n.startswith("kv."))
    weights = sum(int(w.nbytes) for w in memory.weights.values())
    report("memory", f"weights {_gib(weights)}  kv {_gib(kv)} ({limits.pages - 1} pages, {model.kv.name})  "
           f"state {_gib(rest)}  arena {_gib(arena)} GiB")  # fmt: skip


def _eos_ids(model: Model) -> frozenset[int]:
    wanted = model.artifact.generation_config.get("eos_token_id", model.artifact.config.get("eos_token_id"))
    ids = wanted if isinstance(wanted, Sequence) else [wanted]
    return frozenset(int(i) for i in ids if isinstance(i, int))


def _chat_template(model: Model, config: EngineConfig) -> ChatTemplate | None:
    source = Path(config.chat_template).read_text() if config.chat_template else model.artifact.chat_template
    return None if source is None else ChatTemplate(source)
