"""From flags to rounds: which drafter, its graphs beside the target's, and their plans bound to one memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from attrs import define, evolve, frozen
from numpy.typing import NDArray

from ninfer.config import EngineConfig
from ninfer.devices.base import Executable
from ninfer.devices.plan import Plan
from ninfer.errors import NoRoute, UsageError
from ninfer.ir.graph import Graph
from ninfer.ir.ops.sample import count_kept
from ninfer.ir.types import Env
from ninfer.models import dflash
from ninfer.models.dflash import DFlashSpec
from ninfer.models.family import ModelSpec, Rounds
from ninfer.routes.lower import Lowering
from ninfer.runtime.batch import Limits, SeqRows
from ninfer.runtime.draft.chain import Chain, Shape, chain_shapes, is_host_free, lower_chain
from ninfer.runtime.draft.dflash import DFlashDrafter
from ninfer.runtime.draft.drafter import Drafter, Run
from ninfer.runtime.draft.mtp import MtpDrafter
from ninfer.runtime.draft.ngram import NgramDrafter
from ninfer.runtime.draft.rounds import Speculation
from ninfer.runtime.draft.width import AdaptiveWidth
from ninfer.runtime.runner import env_of, row_buckets
from ninfer.runtime.steps import fill_step

MAX_DRAFTS = 15
ADAPTIVE_DRAFTS = 7  # at most, where the width is chosen by the round

BuildGraph = Callable[[str, Rounds], Graph]  # of a mode


@frozen
class DrafterKind:
    """A drafter with graphs of its own, of these modes.   num_drafts: by default. lacks: why a model cannot use it.
    make: from the graphs, by mode."""

    modes: tuple[str, ...]
    num_drafts: Callable[[DFlashSpec | None], int]
    lacks: Callable[[ModelSpec, DFlashSpec | None], str | None]
    make: Callable[[Mapping[str, Run], DFlashSpec | None], Drafter]
    chains: bool = False  # it needs nothing of the host between its graphs: a round can be one plan


def _lacks_mtp(spec: ModelSpec, drafter: DFlashSpec | None) -> str | None:
    return None if spec.num_mtp_layers else "the checkpoint has no multi-token-prediction block (mtp.*)"


def _lacks_drafter(spec: ModelSpec, drafter: DFlashSpec | None) -> str | None:
    return None if drafter is not None else "the drafter is a model of its own: give its folder with --draft-model"


def _block_drafts(drafter: DFlashSpec | None) -> int:
    return 0 if drafter is None else min(MAX_DRAFTS, drafter.block_size - 1)


def _make_block(runs: Mapping[str, Run], drafter: DFlashSpec | None) -> Drafter:
    assert drafter is not None
    return DFlashDrafter(runs[dflash.CONTEXT], runs[dflash.BLOCK], drafter.mask_id, drafter.name)


_BLOCK = DrafterKind(
    modes=(dflash.CONTEXT, dflash.BLOCK), num_drafts=_block_drafts, lacks=_lacks_drafter, make=_make_block
)
KINDS: Mapping[str, DrafterKind] = {
    "mtp": DrafterKind(
        modes=("draft",),
        num_drafts=lambda drafter: 3,
        lacks=_lacks_mtp,
        make=lambda runs, drafter: MtpDrafter(runs["draft"]),
        chains=True,
    ),
    "dflash": evolve(_BLOCK, chains=True),
    "dflash2": _BLOCK,
}


@frozen(kw_only=True)
class RoundPlan:
    """What the flags ask for, checked against the model.   kind None: copies alone."""

    name: str
    kind: DrafterKind | None
    num_drafts: int  # of the kind
    num_copied: int
    min_match: int
    adaptive: bool
    rounds: Rounds
    graphs: Mapping[str, Graph]
    drafter: DFlashSpec | None = None

    @property
    def most_rows(self) -> int:
        """Of a sequence in a round."""
        return self.rounds.journal_rows

    def line(self) -> str:
        """For the start-up report."""
        most = "up to " if self.adaptive else ""
        own = f"{self.name}  {most}{self.num_drafts} drafts a round" if self.kind is not None else "ngram"
        return f"{own}  copies of up to {self.num_copied} tokens" if self.num_copied else own


def plan_rounds(
    config: EngineConfig, spec: ModelSpec, build: BuildGraph, drafter: DFlashSpec | None = None
) -> RoundPlan | None:
    """None: no drafts. Raises UsageError where the model lacks what the drafter needs, with what would work."""
    if config.draft_model is not None and (drafter is None or drafter.name != config.spec):
        other = "another" if drafter is None else drafter.name
        raise UsageError(
            f"--draft-model {config.draft_model} is a drafter of --spec {other}, not of --spec {config.spec}"
        )
    if config.adaptive_mtp and config.spec != "mtp":
        raise UsageError(f"--adaptive-mtp chooses how many drafts MTP makes: use it with --spec mtp, not {config.spec}")
    if config.spec == "none":
        return None
    kind = KINDS.get(config.spec)
    reason = kind.lacks(spec, drafter) if kind is not None else None
    if reason is not None:
        raise UsageError(
            f"--spec {config.spec}: {reason}; --spec ngram works with every model, --spec none without drafts"
        )
    copied = config.ngram_draft_tokens
    if kind is None:
        copied = config.draft_tokens or copied
        if not copied:
            raise UsageError("--spec ngram with --ngram-draft-tokens 0 drafts nothing; use --spec none")
    usual = 0 if kind is None else ADAPTIVE_DRAFTS if config.adaptive_mtp else kind.num_drafts(drafter)
    num_drafts = 0 if kind is None else config.draft_tokens or usual
    if drafter is not None and num_drafts >= drafter.block_size:
        raise UsageError(
            f"--draft-tokens {num_drafts}: this drafter fills blocks of {drafter.block_size} positions, the first of "
            f"which is no draft; use --draft-tokens {_block_drafts(drafter)}"
        )
    second = None if drafter is None else drafter.second
    if second is not None and spec.proposal is not None and spec.proposal.has(spec.domain) < second.count:
        raise UsageError(
            f"--spec {config.spec}: the proposal head has {spec.proposal.has(spec.domain)} tokens, fewer than the "
            f"{second.count} candidates of a draft; use --full-draft-head"
        )
    rows = 1 + max(num_drafts, copied)
    most = max(config.prefill_chunk, config.max_concurrency, rows)
    taps = () if drafter is None else drafter.taps
    rounds = Rounds(
        hidden_rows=most if kind is not None and not taps else 0,
        journal_rows=rows,
        taps=taps,
        tap_rows=most if taps else 0,
        candidates=0 if second is None else second.count,
    )
    modes = ["verify", "fold", *(kind.modes if kind is not None else ())]
    graphs = {mode: build(mode, rounds) for mode in modes}
    if not rounds.candidates:  # else nobody with penalties is drafted for
        count_kept(graphs["fold"], graphs["verify"].states["counts"].type)
    if not all(f"tap.{layer}" in graphs["verify"].states for layer in taps):
        raise UsageError(
            f"--spec {config.spec}: this model's family does not show its layers to a drafter; use --spec ngram"
        )
    return RoundPlan(
        name=config.spec,
        kind=kind,
        num_drafts=num_drafts,
        num_copied=copied,
        min_match=config.ngram_min_match,
        adaptive=config.adaptive_mtp,
        rounds=rounds,
        graphs=graphs,
        drafter=drafter,
    )


def lower_rounds(
    plan: RoundPlan, lowering: Lowering, graph_at: Callable[[Graph, Env], Graph], limits: Limits
) -> dict[str, dict[int, Plan]]:
    """Plans of each graph by width, as the device runs it there. A drafter also runs over prompts.

    Raises UsageError where the device lacks kernels for the drafter.
    """
    most = limits.max_seqs * plan.most_rows
    plans: dict[str, dict[int, Plan]] = {}
    for mode, graph in plan.graphs.items():
        if not graph.nodes:
            continue
        rows = most if mode in ("verify", "fold", dflash.BLOCK) else max(most, limits.max_rows)
        logit_rows = most if mode in ("verify", dflash.BLOCK) else limits.max_seqs
        envs = [env_of(limits, w, min(w, logit_rows)) for w in row_buckets(rows)]
        try:
            plans[mode] = {env.rows: lowering.lower(graph_at(graph, env), env) for env in envs}
        except NoRoute as error:
            what, *why = str(error).splitlines()
            reason = f" ({' '.join(why[0].split())})" if len(why) == 2 else ""  # of the only route, before what to try
            raise UsageError(f"--spec {plan.name}: {what}{reason}; use --spec mtp or ngram, or --device cpu") from None
    return plans


def lower_chains(
    plan: RoundPlan, lowering: Lowering, graph_at: Callable[[Graph, Env], Graph], limits: Limits
) -> dict[Shape, Plan]:
    """Whole rounds, where the drafter and the device can: none, or all shapes."""
    if plan.kind is None or not plan.kind.chains:
        return {}
    shapes = chain_shapes(plan.num_drafts, plan.adaptive, limits.max_seqs)
    mask = None if plan.drafter is None else plan.drafter.mask_id
    plans = {
        shape: lower_chain(plan.graphs, shape, lowering, graph_at, limits, plan.most_rows, mask) for shape in shapes
    }
    return plans if all(map(is_host_free, plans.values())) else {}


@define
class Stage:
    """A graph's plans by width, ascending, over the memory of its model."""

    executables: Mapping[int, Executable]

    def __call__(self, seqs: Sequence[SeqRows]) -> Mapping[str, NDArray[Any]]:
        rows = sum(len(s.tokens) for s in seqs)
        executable = next((e for width, e in self.executables.items() if rows <= width), None)
        if executable is None:
            raise ValueError(f"a step of {rows} rows exceeds the {max(self.executables)} of the widest plan")
        fill_step(seqs, executable.step, executable.header)
        return executable.launch()


def speculation_of(
    plan: RoundPlan, runs: Mapping[str, Run], special: Collection[int], chain: Mapping[Shape, Executable] | None = None
) -> Speculation:
    """runs: of the plan's graphs; a graph without nodes needs none. special: tokens that no copy reaches over. chain:
    whole rounds, by shape."""
    drafter = None if plan.kind is None else plan.kind.make(runs, plan.drafter)
    copier = NgramDrafter(special, plan.min_match, beyond=plan.num_drafts) if plan.num_copied else None
    width = AdaptiveWidth(plan.num_drafts) if plan.adaptive else None
    return Speculation(
        runs["verify"],
        runs.get("fold"),
        drafter,
        copier,
        plan.num_drafts,
        plan.num_copied,
        width,
        rejects=plan.rounds.candidates > 0,
        chain=Chain(chain) if chain else None,
    )
