"""From a model name on the command line to a runner with its tokenizer: everything before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs import define, frozen
from numpy.typing import NDArray

from ninfer.artifacts import Artifact, open_artifact
from ninfer.artifacts.beside import Beside
from ninfer.artifacts.demo import demo_path
from ninfer.artifacts.drafters import refuse_unknown
from ninfer.artifacts.quantize import quantize
from ninfer.artifacts.synthetic import PREFIX, SyntheticArtifact
from ninfer.config import EngineConfig
from ninfer.devices.base import DeviceInfo
from ninfer.devices.plan import Plan
from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.kv import KVFormat
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.ir.graph import Graph
from ninfer.ir.types import Env, TensorType
from ninfer.models import dflash, identify
from ninfer.models.dflash import DFlashSpec
from ninfer.models.family import Family, ModelSpec, Rounds
from ninfer.models.proposal import parse_proposal
from ninfer.routes.measure import Calibration, calibrate
from ninfer.routes.profile import cache_dir, save_profile, user_path
from ninfer.runtime.backend import Backend, Progress, Report, open_backend
from ninfer.runtime.batch import Draw, Limits, ModelRunner, SeqRows
from ninfer.runtime.draft.rounds import Speculation
from ninfer.runtime.draft.stages import Stage, lower_chains, lower_rounds, plan_rounds, speculation_of
from ninfer.runtime.grafts import Graft, load_grafts
from ninfer.runtime.kv.given import check_grafts, given_tier
from ninfer.runtime.kv.setup import fingerprint
from ninfer.runtime.kv.store import StateStore
from ninfer.runtime.memory_plan import ModelSizes, plan_memory
from ninfer.runtime.request import Sampling
from ninfer.runtime.runner import (
    CompiledRunner,
    Scorer,
    const_arrays,
    env_of,
    plan_widths,
    row_buckets,
    state_types,
)
from ninfer.runtime.steps import fill_step
from ninfer.text.chat import TURN_ENDS, ChatTemplate
from ninfer.text.tokenizer import Tokenizer

DRAFTED_BY_HEAD = ("mtp", "dflash", "dflash2")  # choices of --spec


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
    tokenizer: Tokenizer | None
    drafter: DFlashSpec | None = None

    def graph(self, mode: str, rounds: Rounds | None = None) -> Graph:
        if self.drafter is not None and rounds is not None and mode in dflash.MODES:
            info = self.artifact.info
            return dflash.build(self.drafter, self.spec, info, kv=self.kv, mode=mode, rounds=rounds)
        return self.family.build(self.spec, self.artifact.info, kv=self.kv, mode=mode, rounds=rounds)


@frozen(kw_only=True)
class Loaded:
    """What serving needs of a model."""

    runner: ModelRunner
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_id: str
    generation_config: Mapping[str, Any]
    eos_ids: frozenset[int]
    explain: Callable[[], str]
    speculation: Speculation | None = None
    memory: Mapping[str, int] = attrs.field(factory=dict)  # bytes by what they are for, such as weights_bytes
    grafts: Mapping[str, Graft] = attrs.field(factory=dict)


def open_model(config: EngineConfig, report: Report = no_report, *, tokenizer_needed: bool = True) -> Model:
    """Find the file, open it, know its family. Raises ArtifactError or UsageError."""
    artifact = _open_artifact(config)
    carried = artifact.drafter(config.spec)
    family, spec = identify(artifact.config)
    tokenizer = None
    if tokenizer_needed or artifact.tokenizer_source is not None:
        tokenizer = Tokenizer.from_artifact(artifact)
        spec = spec.with_domain(tokenizer.vocab_size)
    if config.quantize:
        artifact = quantize(artifact, config.quantize)
    artifact = _recoded(artifact, spec, config)
    if config.rope_yarn is not None:
        spec = spec.with_yarn(config.rope_yarn)
    if config.gdn_state_fp16:
        spec = spec.with_f16_state()
    spec = _with_proposal(spec, artifact, config)
    report("model", f"{family.name}  {spec.summary}")
    report("weights", artifact.summary())
    kv = kv_by_name(config.kv_dtype)
    beside = carried if config.draft_model is None else open_artifact(config.draft_model)
    if beside is None:
        return Model(artifact, family, spec, kv, tokenizer)
    drafter = dflash.parse(beside.config)
    drafter.check(spec)
    refuse_unknown(beside, drafter.name)
    report("drafter", f"{drafter.name}  {drafter.num_layers} layers of {drafter.hidden_size}  {beside.summary()}")
    return Model(Beside(artifact, beside, dflash.PREFIX), family, spec, kv, tokenizer, drafter)


def _with_proposal(spec: ModelSpec, artifact: Artifact, config: EngineConfig) -> ModelSpec:
    """--lm-head-draft, --full-draft-head: by default drafts are chosen by the file's proposal head.   Raises
    ArtifactError, UsageError."""
    if config.lm_head_draft and config.full_draft_head:
        raise UsageError("--lm-head-draft and --full-draft-head exclude each other: leave one of them out")
    if config.lm_head_draft and config.spec not in DRAFTED_BY_HEAD:
        raise UsageError(f"--lm-head-draft: --spec {config.spec} draws no drafts from a head; use it with "
                         f"{', '.join(DRAFTED_BY_HEAD)}")  # fmt: skip
    if not artifact.has_proposal:
        if config.lm_head_draft:
            raise UsageError(
                f"--lm-head-draft: {artifact.path} has no proposal head; convert with --proposal, or leave it "
                "out to draft by the model's head"
            )
        return spec
    if config.full_draft_head or config.spec not in DRAFTED_BY_HEAD:
        return spec
    rows = artifact.info("model.embed_tokens.weight").shape[0]
    if rows != spec.vocab_size:
        raise ArtifactError(
            f"{artifact.path}: the embedding has {rows} rows, but vocab_size is {spec.vocab_size}: weights and config "
            "are of different models"
        )
    try:
        return attrs.evolve(spec, proposal=parse_proposal(artifact.proposal_ids(), spec.vocab_size))
    except ArtifactError as error:
        raise ArtifactError(f"{artifact.path}: {error}; --full-draft-head drafts without it") from None


def _recoded(artifact: Artifact, spec: ModelSpec, config: EngineConfig) -> Artifact:
    """--embedding-q4, --lm-head-q6.   Raises UsageError where a tied head has no weights of its own."""
    if config.embedding_q4:
        artifact = quantize(artifact, "q4_g64", keep=lambda name: name != "model.embed_tokens.weight")
    if config.lm_head_q6:
        if spec.tied:
            raise UsageError("--lm-head-q6: this model's head is its embedding; use --embedding-q4, or leave both out")
        artifact = quantize(artifact, "q6_g64", keep=lambda name: name != "lm_head.weight")
    return artifact


def _open_artifact(config: EngineConfig) -> Artifact:
    if config.model.startswith(PREFIX):
        return SyntheticArtifact(config.model, config.format)
    if config.format is not None:
        raise UsageError(f"--format is for synthetic models; for {config.model} give --quantize {config.format}")
    return open_artifact(demo_path(cache_dir()) if config.model == "demo" else Path(config.model))


def load(
    config: EngineConfig,
    report: Report = no_report,
    progress: Progress = no_progress,
    *,
    grafts: Sequence[str] = (),
) -> Loaded:
    """Everything up to the first step. grafts: NAME=PATH.   Raises StartupError subclasses with one clear line."""
    started = time.perf_counter()
    model = open_model(config, report)
    assert model.tokenizer is not None
    found = load_grafts(grafts, model.spec)
    check_grafts(found.values(), config)
    backend = open_backend(config, report, progress)
    device = backend.device
    if config.device_profile == "calibrate":
        info, result = calibrate_model(config, progress=lambda done, total, what: progress("calibrating", done, total))
        save_profile(backend.profile()[0].layered(result.profile), user_path(info))
    lowering = backend.lowering(config, report)
    rounds = plan_rounds(config, model.spec, model.graph, model.drafter)
    graph = model.graph("sample", None if rounds is None else rounds.rounds)
    graphs = [graph, *(() if rounds is None else rounds.graphs.values())]
    weights: dict[str, Any] = {}
    for one in graphs:  # those that share a weight share its array
        weights |= backend.weights(one, model.artifact, progress, bound=weights)
    states = state_types(*graphs)
    limits = _limits(model, config, backend, states, weights, report)
    plans = {"sample": plan_widths(lowering, lambda env: backend.graph(graph, env), limits)}
    if rounds is not None:
        head = model.spec.proposal
        by = f"  by a proposal head of {head.num_rows:,} tokens" if head is not None and rounds.kind is not None else ""
        report("drafts", rounds.line() + by)
        plans |= lower_rounds(rounds, lowering, backend.graph, limits)
    chains = {} if rounds is None else lower_chains(rounds, lowering, backend.graph, limits)
    all_plans = [*(plan for by_width in plans.values() for plan in by_width.values()), *chains.values()]
    entries = device.compile(all_plans)
    arena = max(p.arena_bytes for p in all_plans)
    memory = device.memory(weights, states, env_of(limits, limits.max_rows), arena)
    store = StateStore(memory, states)
    given = given_tier(found.values(), model.spec, model.kv, store, limits)
    consts = const_arrays(*graphs)

    def bind(plan: Plan) -> Any:
        return device.bind(plan, memory, {name: consts[name] for name in plan.const_names}, entries)

    bound = {mode: {width: bind(plan) for width, plan in by.items()} for mode, by in plans.items()}
    widths = ", ".join(map(str, plans["sample"]))
    report("plans", f"widths {widths}  {len(entries)} kernels  ready in {time.perf_counter() - started:.1f} s")
    speculation = None
    if rounds is not None:
        runs = {mode: Stage(by_width) for mode, by_width in bound.items()}
        chain = {shape: bind(plan) for shape, plan in chains.items()}
        speculation = speculation_of(rounds, runs, model.tokenizer.special_ids, chain)
    return Loaded(
        runner=CompiledRunner(limits, device, memory, bound["sample"], store, _fingerprint(model, config), given),
        tokenizer=model.tokenizer,
        chat_template=_chat_template(model, config),
        model_id=config.model_id or model.artifact.model_id,
        generation_config=model.artifact.generation_config,
        eos_ids=_eos_ids(model),
        explain=lambda: "\n\n".join(
            [f"{mode} width {w}\n{plan.table()}" for mode, by_width in plans.items() for w, plan in by_width.items()]
            + [f"round of {n} sequences, then {k} drafts\n{plan.table()}" for (n, k), plan in chains.items()]
        ),
        speculation=speculation,
        memory=_ledger(states, backend.weight_bytes(weights), limits, arena),
        grafts=found,
    )


def _ledger(states: Mapping[str, TensorType], weight_bytes: int, limits: Limits, arena_bytes: int) -> dict[str, int]:
    env = env_of(limits, limits.max_rows)
    sizes = {name: t.nbytes(env) for name, t in states.items()}
    kv = sum(n for name, n in sizes.items() if name.startswith("kv."))
    rest = sum(sizes.values()) - kv
    return {"weights_bytes": weight_bytes, "kv_bytes": kv, "state_bytes": rest, "arena_bytes": arena_bytes}


def _fingerprint(model: Model, config: EngineConfig) -> str:
    path = model.artifact.path
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
    facts = {
        "path": path,
        "files": stats,
        "kv": model.kv.name,
        "weights": (config.quantize, config.embedding_q4, config.lm_head_q6),
        "prefill": config.prefill_activations,
        "spec": attrs.evolve(model.spec, proposal=None),  # no cached byte depends on it
        "drafter": (config.spec, config.draft_model),
    }
    return fingerprint(facts)


def load_scorer(
    config: EngineConfig, mode: str = "score", *, tokenizer_needed: bool = True
) -> tuple[Scorer, Model, Limits]:
    """A plan that gives log-probabilities ("score") or logits ("logits") of every row, for one sequence."""
    config = attrs.evolve(config, max_concurrency=1)
    model = open_model(config, tokenizer_needed=tokenizer_needed)
    backend = open_backend(config, no_report, no_progress)
    device = backend.device
    graph = model.graph(mode)
    weights = backend.weights(graph, model.artifact, no_progress)
    limits = _limits(model, config, backend, state_types(graph), weights)
    env = env_of(limits, limits.max_rows, logit_rows=limits.max_rows)
    plan = backend.lowering(config, no_report).lower(backend.graph(graph, env), env)
    memory = device.memory(weights, state_types(graph), env, plan.arena_bytes)
    executable = device.bind(plan, memory, const_arrays(graph), device.compile([plan]))
    return Scorer(executable, memory), model, limits


def calibrate_model(
    config: EngineConfig,
    *,
    only: str = "",
    repeat: int = 11,
    report: Report = no_report,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> tuple[DeviceInfo, Calibration]:
    """Time every route for the model's ops at every width."""
    model = open_model(config, report, tokenizer_needed=False)
    backend = open_backend(config, report, lambda what, done, total: progress(done, total, what))
    lowering = backend.lowering(attrs.evolve(config, device_profile="off"), no_report)
    graph = model.graph("sample")
    weights = backend.weights(graph, model.artifact, no_progress)
    limits = _limits(model, config, backend, state_types(graph), weights)
    envs = [env_of(limits, w) for w in row_buckets(limits.max_rows)]
    bench = backend.bench(weights, state_types(graph), envs[-1], const_arrays(graph))
    table = np.arange(limits.max_pages * limits.slots, dtype=np.int32) % limits.pages
    bench.memory.write_state("page_table", slice(None), table.reshape(limits.slots, -1))

    def fill(width: int, step: Mapping[str, NDArray[Any]], header: NDArray[Any]) -> None:
        fill_step(_typical_step(width, limits), step, header)

    def graph_at(env: Env) -> Graph:
        return backend.graph(graph, env)

    result = calibrate(graph_at, lowering, bench, envs, fill, only=only, repeat=repeat, progress=progress)
    bench.close()
    return backend.info, result


def _typical_step(width: int, limits: Limits) -> list[SeqRows]:
    """A round of `width` sequences with some context, or one prefill chunk where there are not so many slots."""
    draw = Draw(sampling=Sampling(temperature=0.7), seed=1)
    context = min(16384, limits.context_len // 2)  # where how attention is split matters
    if width <= limits.max_seqs:
        return [SeqRows(slot=i, kv_len=context, tokens=(5,), generated=True, draw=draw) for i in range(width)]
    tokens = tuple(range(3, 3 + width))
    return [SeqRows(slot=0, kv_len=0, tokens=tokens, generated=False, draw=draw)]


def _limits(
    model: Model,
    config: EngineConfig,
    backend: Backend,
    states: Mapping[str, TensorType],
    weights: Mapping[str, Any],
    report: Report = no_report,
) -> Limits:
    one = Env(rows=1, logit_rows=1, seqs=1)
    sizes = ModelSizes(
        context_len=model.spec.context_len,
        domain=model.spec.domain,
        weight_bytes=backend.weight_bytes(weights),
        page_bytes=sum(t.nbytes(one) for n, t in states.items() if n.startswith("kv.")) or 1,
        slot_bytes=sum(t.nbytes(one) for n, t in states.items() if not n.startswith("kv.")),
    )
    plan = plan_memory(config, sizes, backend.free_bytes)
    report("memory", plan.line(model.kv.name))
    return plan.limits


def _eos_ids(model: Model) -> frozenset[int]:
    """Of the generation config where it names any, else of the config; and what ends a turn in the chat template."""
    wanted = model.artifact.generation_config.get("eos_token_id", model.artifact.config.get("eos_token_id"))
    ids = wanted if isinstance(wanted, Sequence) else [wanted]
    template, tokenizer = model.artifact.chat_template or "", model.tokenizer
    turns = [tokenizer.token_to_id(t) for t in TURN_ENDS if t in template] if tokenizer is not None else []
    return frozenset(int(i) for i in (*ids, *turns) if isinstance(i, int))


def _chat_template(model: Model, config: EngineConfig) -> ChatTemplate | None:
    source = model.artifact.chat_template
    if config.chat_template is not None:
        try:
            source = config.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"--chat-template {config.chat_template}: {error}") from None
    if source is None:
        return None
    t = model.tokenizer
    assert t is not None
    bos = t.token_text(t.bos_id) if t.bos_id is not None else None
    eos = [text for i in sorted(_eos_ids(model)) if (text := t.token_text(i)) is not None]
    specials = {"bos_token": bos or "", **({"eos_token": eos[0]} if eos else {})}
    return ChatTemplate(source, specials)
