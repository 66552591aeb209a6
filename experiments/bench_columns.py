"""A round of drafts beside a plain step, and what each part of it takes by the device's clock.

    python experiments/bench_columns.py synthetic:qwen3.5-27b --format q4_g64/q5_g64 --drafts 3 --parts

A plain step of one row and one of 1 + n rows of as many sequences, a round of 1 + n rows in one plan, and by
themselves verification, fold, and a draft after one row and after 1 + n. Only these plans are compiled and bound, so
that it says all in a few seconds after the weights are there. --parts: the launches of each kind in a chain of their
own. Their sum is not the plan's time, since neighbours overlap by dependent launch. --variants OP or OP=TEXT: plans by
each candidate (with TEXT in its name) for such ops: fold_deltas, fused_delta_record, fused_attention. On devices
without a clock, times are the wall's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, frozen

from ninfer.config import EngineConfig
from ninfer.devices.base import Executable
from ninfer.devices.plan import Launch, Place, Plan
from ninfer.routes.lower import Lowering
from ninfer.routes.profile import op_key
from ninfer.runtime.backend import Backend, open_backend
from ninfer.runtime.batch import Draw, Limits, SeqRows
from ninfer.runtime.draft.chain import lower_chain
from ninfer.runtime.draft.stages import RoundPlan, plan_rounds
from ninfer.runtime.load import Model, no_progress, open_model
from ninfer.runtime.request import Sampling
from ninfer.runtime.runner import const_arrays, env_of, state_types
from ninfer.runtime.steps import fill_step

PAGE = 64
CHAINED = "round"
VARIED = ("plain", "verification", "fold", CHAINED)  # plans that are made in several ways


@frozen
class Bound:
    """Plans over one memory, by name.   rows: of a sequence in a step of the plan; seqs: how many."""

    executables: Mapping[str, Executable]
    plans: Mapping[str, Plan]
    shapes: Mapping[str, tuple[int, int]]
    weight_bytes: Mapping[str, int]
    varied: Mapping[str, str]  # the op of which a plan has another candidate
    memory: Any


def limits_of(args: argparse.Namespace, model: Model, seqs: int) -> Limits:
    pages = (args.context + 64) // PAGE + 1
    return Limits(
        max_rows=64, max_seqs=seqs, slots=seqs + 1, pages=seqs * pages, max_pages=pages,
        context_len=args.context + 64, domain=model.spec.domain,
    )  # fmt: skip


def bind(args: argparse.Namespace, config: EngineConfig, model: Model, backend: Backend, rounds: RoundPlan) -> Bound:
    lowering, n = backend.lowering(config, lambda label, text: print(f"{label:9} {text}")), args.drafts
    few, many = limits_of(args, model, args.concurrency), limits_of(args, model, args.concurrency * (1 + n))
    c, wide = args.concurrency, args.concurrency * (1 + n)
    sample = model.graph("sample")  # a step without drafts keeps nothing for a drafter
    kept = env_of(few, wide, c)
    graphs = {
        "plain": (sample, env_of(few, c), (1, c)),
        f"plain of {wide}": (sample, env_of(many, wide), (1, wide)),
        "verification": (rounds.graphs["verify"], env_of(few, wide, wide), (1 + n, c)),
        "fold": (rounds.graphs["fold"], kept, (1 + n, c)),
        "draft": (rounds.graphs["draft"], env_of(few, c), (1, c)),
        f"draft after {1 + n}": (rounds.graphs["draft"], kept, (1 + n, c)),
    }
    graphs = {name: found for name, found in graphs.items() if found[0].nodes}

    def plan_of(name: str, lowering: Lowering) -> Plan:
        if name == CHAINED:
            return lower_chain(rounds.graphs, (c, n), lowering, backend.graph, few, 1 + n)
        graph, env, _ = graphs[name]
        return lowering.lower(backend.graph(graph, env), env)

    plans = {name: plan_of(name, lowering) for name in (*graphs, CHAINED)}
    shapes = {name: shape for name, (_, _, shape) in graphs.items()} | {CHAINED: (1 + n, c)}
    varied: dict[str, str] = {}
    for name in VARIED:
        for key, _, text in (v.partition("=") for v in (args.variants if name in plans else ())):
            for candidate, other in variants(backend, lowering, plans[name], key, text).items():
                made = f"{name} {candidate}"
                plans[made], shapes[made], varied[made] = plan_of(name, other), shapes[name], key
    every = [sample, *rounds.graphs.values()]
    weights: dict[str, Any] = {}
    for graph in every:
        weights |= backend.weights(graph, model.artifact, no_progress, bound=weights)
    device, began = backend.device, time.perf_counter()
    entries = device.compile(list(plans.values()))
    compiled = time.perf_counter()
    env = evolve(env_of(many, many.max_rows), slots=many.slots, pages=many.pages)
    memory = device.memory(weights, state_types(*every), env, max(p.arena_bytes for p in plans.values()))
    loaded = time.perf_counter()
    table = np.arange(many.slots * many.max_pages, dtype=np.int32) % many.pages
    memory.write_state("page_table", slice(None), table.reshape(many.slots, many.max_pages))
    consts = const_arrays(*every)
    executables = {
        name: device.bind(plan, memory, {k: consts[k] for k in plan.const_names}, entries)
        for name, plan in plans.items()
    }
    print(f"{len(entries)} kernels compiled in {compiled - began:.1f} s, memory filled in {loaded - compiled:.1f} s, "
          f"plans bound in {time.perf_counter() - loaded:.1f} s", flush=True)  # fmt: skip
    sizes = {name: backend.weight_bytes({name: w}) for name, w in weights.items()}
    return Bound(executables, plans, shapes, sizes, varied, memory)


def variants(backend: Backend, lowering: Lowering, plan: Plan, key: str, text: str) -> dict[str, Lowering]:
    """Lowerings by each candidate, with that text in its name, for a plan's ops of that key."""
    found = dict[str, Lowering]()
    launch = next((x for x in plan.launches if x.op.key == key), None)
    if launch is None:
        return found
    types, env = launch.types[: launch.num_inputs], plan.frames[launch.frame]
    for candidate in backend.registry.candidates(launch.op, types, env, backend.info):
        if text not in candidate.id:
            continue
        profile = evolve(lowering.selector.profile, routes={
            **lowering.selector.profile.routes, op_key(launch.op, types): ((1 << 30, candidate.id),)
        })  # fmt: skip
        found[candidate.id] = evolve(lowering, selector=evolve(lowering.selector, profile=profile))
    return found


def step_of(bound: Bound, name: str, args: argparse.Namespace) -> list[SeqRows]:
    rows, seqs = bound.shapes[name]
    drawn = not name.startswith("fold")
    many = rows > 1 and name.startswith(("verification", CHAINED))
    return [
        SeqRows(
            slot=slot, kv_len=args.context, tokens=tuple(range(5, 5 + rows)), generated=True,
            draw=Draw(sampling=Sampling(temperature=0), seed=1) if drawn else None,
            num_draws=rows if many else 1, room=64, most_drafts=args.drafts,
        )
        for slot in range(seqs)
    ]  # fmt: skip


def seconds_of(executable: Executable, seqs: Sequence[SeqRows], repeat: int) -> float:
    fill_step(seqs, executable.step, executable.header)
    for _ in range(3):
        executable.launch()
    clock: Callable[[int], float] | None = getattr(executable, "time", None)
    if clock is not None:
        return statistics.median(clock(repeat) for _ in range(5))
    took = []
    for _ in range(repeat):
        start = time.perf_counter()
        executable.launch()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def parts(executable: Any, plan: Plan, weight_bytes: Mapping[str, int], repeat: int) -> list[dict[str, Any]]:
    """Launches by kind, the costly first."""
    kinds: dict[tuple[str, str, str, int, str], list[Launch]] = {}
    for x in plan.launches:
        weights = " ".join(str(t) for t in x.types if t.fmt is not None)
        kinds.setdefault((x.op.key, x.route, "x".join(map(str, x.geometry.grid)), x.frame, weights), []).append(x)
    found = []
    for (op, route, grid, frame, weights), launches in kinds.items():
        chosen = {id(x) for x in launches}
        seconds = executable.time_part(lambda x, chosen=chosen: id(x) in chosen, repeat)
        nbytes = sum(weight_bytes[r.name] for x in launches if x.op.key != "embed" for r in x.args
                     if r.place is Place.WEIGHT)  # fmt: skip
        found.append({
            "op": op, "route": route, "grid": grid, "record": frame, "weights": weights, "launches": len(launches),
            "us": round(1e6 * seconds, 1), "us_each": round(1e6 * seconds / len(launches), 2),
            "tb_per_s": round(nbytes / seconds / 1e12, 2),
        })  # fmt: skip
    return sorted(found, key=lambda r: -float(r["us"]))


def show(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"  {name}: {sum(r['launches'] for r in rows)} launches, {sum(r['us'] for r in rows):.0f} us in chains")
    for r in rows:
        print(f"    {r['us']:>8} us  {r['launches']:>3} x {r['us_each']:>7}  {r['tb_per_s']:>5} TB/s  {r['op']} "
              f"{r['route']} [{r['grid']}] {r['weights']}", flush=True)  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model with an MTP block, such as synthetic:qwen3.5-27b")
    parser.add_argument("--format", help="weight format of a synthetic model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=20, help="steps in a row, of which five series are timed")
    parser.add_argument("--parts", action="store_true", help="time the kinds of launches on their own")
    parser.add_argument(
        "--variants", nargs="*", default=[], metavar="OP", help="time plans by every candidate for these ops"
    )
    parser.add_argument("--full-draft-head", action="store_true", help="draft by the model's head")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    config = EngineConfig(
        model=args.model, format=args.format, device=args.device, spec="mtp", draft_tokens=args.drafts,
        ngram_draft_tokens=0, max_concurrency=args.concurrency, kv_dtype=args.kv_dtype,
        deterministic=args.deterministic, full_draft_head=args.full_draft_head,
    )  # fmt: skip
    model = open_model(config, tokenizer_needed=False)
    backend = open_backend(config, lambda label, text: print(f"{label:9} {text}"), no_progress)
    rounds = plan_rounds(config, model.spec, model.graph)
    assert rounds is not None
    bound = bind(args, config, model, backend, rounds)
    head = model.spec.proposal
    by = f"{head.num_rows} tokens" if head is not None else "the model's head"
    print(f"{args.model}  context {args.context}  {args.concurrency} sequences  drafts chosen among {by}")
    times: dict[str, float] = {}
    for name, executable in bound.executables.items():
        ms = times[name] = 1e3 * seconds_of(executable, step_of(bound, name, args), args.repeat)
        print(f"  {name:16} {ms:8.3f} ms  {ms / times['plain']:6.3f} of a plain step  "
              f"{len(bound.plans[name].launches):>4} launches", flush=True)  # fmt: skip
    found: dict[str, Any] = {
        "model": args.model, "format": args.format, "drafts": args.drafts, "context": args.context,
        "concurrency": args.concurrency, "kv": args.kv_dtype, "date": datetime.date.today().isoformat(),
        "head": by, "ms": times,
    }  # fmt: skip
    if args.parts and all(hasattr(e, "time_part") for e in bound.executables.values()):
        found["parts"] = {}
        for name, executable in bound.executables.items():
            rows = parts(executable, bound.plans[name], bound.weight_bytes, 5) if name != CHAINED else []
            key = bound.varied.get(name)
            found["parts"][name] = [r for r in rows if key is None or r["op"] == key]
            show(name, found["parts"][name])
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    backend.device.close()
    return found


if __name__ == "__main__":
    main()
