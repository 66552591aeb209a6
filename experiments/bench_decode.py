"""Plain decode steps of a model on a GPU: tokens per second, beside what the memory bus allows.

    python experiments/bench_decode.py synthetic:qwen3.5-27b --format q4_g64/q5_g64 --context 512 131072 --json out.json

The roofline is the bytes that a token must move (weights once, keys and values of the context, recurrent states read
and written) over the read bandwidth that ceilings.py measures in the same run. "step" is the device's time for a step,
"wall" includes what Python does for a request; "host" is what starting a step costs the host beside the wait.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, evolve

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ceilings

from ninfer.artifacts import open_artifact
from ninfer.artifacts.artifact import Artifact
from ninfer.artifacts.synthetic import PREFIX, SyntheticArtifact
from ninfer.devices.cuda import CudaDevice, CudaExecutable, Weight
from ninfer.devices.plan import Launch, Place, Plan
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.ir.graph import Graph
from ninfer.ir.op import Op
from ninfer.ir.ops.experts import ExpertGlu, ExpertSum, PickExperts
from ninfer.ir.ops.fused_experts import FusedExperts
from ninfer.ir.rewrites import fuse
from ninfer.ir.types import Env, Types
from ninfer.models import identify
from ninfer.routes.cuda import cuda_routes
from ninfer.routes.digest import fresh
from ninfer.routes.lower import Lowering
from ninfer.routes.profile import load_profile
from ninfer.routes.render import Renderer
from ninfer.routes.route import Candidate, RouteRegistry
from ninfer.routes.select import Selector
from ninfer.routes.weave import weaver_for
from ninfer.runtime.backend import synthetic_weights
from ninfer.runtime.batch import Draw, SeqRows
from ninfer.runtime.request import Sampling
from ninfer.runtime.steps import fill_step, read_drawn
from ninfer.runtime.weights import bind_weights

PAGE = 64


def open_model(name: str, format: str | None) -> Artifact:
    return SyntheticArtifact(name, format) if name.startswith(PREFIX) else open_artifact(Path(name))


def weights_of(graph: Graph, artifact: Artifact) -> dict[str, Weight]:
    """Matrices of a synthetic model are markers, which the device fills."""
    if isinstance(artifact, SyntheticArtifact):
        return synthetic_weights(graph, artifact)
    return dict(bind_weights(graph, artifact))


def bytes_per_step(
    device: CudaDevice, graph: Graph, weights: dict[str, Weight], env: Env, rows: int, context: int
) -> dict[str, int]:
    """What a step must move at least. An embedding table that is not also the head gives its rows only, a stack of
    experts those that so many rows pick at most."""
    used = {a: 1.0 for node in graph.nodes for a in node.args if node.op.key != "embed"}
    for node in graph.nodes:
        if isinstance(node.op, ExpertGlu | ExpertSum):
            places = node.args[2 if isinstance(node.op, ExpertGlu) else 3].type.shape[0]
            assert isinstance(places, int)
            used.update((a, min(1.0, rows * node.op.top_k / places)) for a in node.args if a.type.fmt is not None)
    matrices = sum(int(used[v] * device.weight_bytes(weights[v.name])) for v in graph.weights if v in used)
    kv = sum(t.type.nbytes(env) for n, t in graph.states.items() if n.startswith("kv.")) // (env.pages * PAGE)
    state = sum(v.type.nbytes(env) for n, v in graph.states.items() if n.startswith(("delta.", "conv.")))
    return {"weights": matrices, "kv": rows * context * kv, "state": 2 * state * rows // env.slots}


def bind(
    device: CudaDevice, lowering: Lowering, graph: Graph, weights: dict[str, Weight], env: Env, least: int = 0
) -> CudaExecutable:
    """least: bytes of the arena that other plans need."""
    plan = lowering.lower(graph, env)
    start = time.perf_counter()
    entries = device.compile([plan])
    compiled = time.perf_counter()
    memory = device.memory(weights, {n: v.type for n, v in graph.states.items()}, env, max(least, plan.arena_bytes))
    loaded = time.perf_counter()
    runtime = device.cupy.cuda.runtime
    for name, array in memory.states.items():  # small bf16 numbers: a cache of zeros would draw less power
        if name.startswith("kv."):
            runtime.memsetAsync(array.data.ptr, 0x3C, array.nbytes, device.stream.ptr)
    table = np.arange(env.slots * env.max_pages, dtype=np.int32) % env.pages
    memory.write_state("page_table", slice(None), table.reshape(env.slots, env.max_pages))
    executable = device.bind(plan, memory, {v.name: a for v, a in graph.consts.items()}, entries)
    print(f"  {len(plan.launches)} launches, {len(entries)} kernels; compiled {compiled - start:.1f} s, "
          f"weights {loaded - compiled:.1f} s, captured {time.perf_counter() - loaded:.1f} s", flush=True)  # fmt: skip
    return executable


def measure(executable: CudaExecutable, rows: int, context: int, seconds: float) -> dict[str, float]:
    """Each row is a sequence of its own with `context` tokens."""
    draw = Draw(sampling=Sampling(temperature=0.0), seed=1)

    def batch(token: int) -> list[SeqRows]:
        return [SeqRows(slot=s, kv_len=context, tokens=(token,), generated=True, draw=draw) for s in range(rows)]

    for _ in range(3):
        fill_step(batch(1), executable.step, executable.header)
        executable.launch()
    executable.time(3)
    repeats = max(5, int(seconds / 7 / executable.time(5)))
    steps = [executable.time(repeats) for _ in range(7)]
    walls, token = [], 1
    for _ in range(7 * min(repeats, 50)):
        began = time.perf_counter()
        seqs = batch(token)
        fill_step(seqs, executable.step, executable.header)
        drawn = read_drawn(seqs, executable.launch())
        walls.append(time.perf_counter() - began)
        token = max(0, drawn[0].token) if drawn[0] is not None else 1
    return {
        "step_s": statistics.median(steps),
        "spread": (max(steps) - min(steps)) / statistics.median(steps),
        "wall_s": statistics.median(walls),
        "host_s": executable.host_seconds(20),
    }


def parts(device: CudaDevice, executable: CudaExecutable) -> list[dict[str, Any]]:
    """Where a step's time goes, by kinds of launches. us: their time in a chain of their own, whose sum is not the
    step's, since neighbours overlap by dependent launch; None for experts, whose picks are overwritten by the end of a
    step. saved_us: what a step without them is shorter by; None for the picks, without which experts read nonsense."""
    plan, rows = executable.plan, list[dict[str, Any]]()
    kinds: dict[tuple[str, str, tuple[str, ...]], list[Launch]] = {}
    for launch in plan.launches:
        weights = tuple(str(t) for t in launch.types if t.fmt is not None)
        kinds.setdefault((launch.op.key, f"{launch.route} {stage_of(launch)}", weights), []).append(launch)
    whole = executable.time_part(lambda _: True, 20)
    for (key, route, weights), launches in kinds.items():
        chosen = {id(x) for x in launches}
        ops = {type(x.op) for x in launches}
        alone = saved = None
        if not ops & {ExpertGlu, ExpertSum}:
            alone = executable.time_part(lambda x, chosen=chosen: id(x) in chosen, 5)  # type: ignore[misc]
        if PickExperts not in ops:
            saved = whole - executable.time_part(lambda x, chosen=chosen: id(x) not in chosen, 20)  # type: ignore[misc]
        time = saved if alone is None else alone
        assert time is not None
        nbytes = sum(weight_bytes(device, executable, x) for x in launches if x.op.key != "embed")
        rows.append({
            "op": key, "route": route, "weights": list(weights), "launches": len(launches),
            "us": None if alone is None else round(alone * 1e6, 1), "us_each": round(time * 1e6 / len(launches), 2),
            "saved_us": None if saved is None else round(saved * 1e6, 1), "tb_per_s": round(nbytes / time / 1e12, 3),
        })  # fmt: skip
    return sorted(rows, key=lambda r: -(r["us"] or r["saved_us"]))


def stage_of(launch: Launch) -> str:
    """The template that a launch was rendered from: what tells the stages of a route apart."""
    return "" if launch.source is None else launch.source.entry.removeprefix("ni_").rpartition("_")[0]


def weight_bytes(device: CudaDevice, executable: CudaExecutable, launch: Launch) -> int:
    """Bytes of matrices that a launch reads, of a stack of experts those that its rows pick at most."""
    nbytes = sum(device.weight_bytes(executable.memory.weights[r.name]) for r in launch.args if r.place is Place.WEIGHT)
    if isinstance(launch.op, FusedExperts):
        stacks = [r for r, t in zip(launch.args, launch.types, strict=False) if t.fmt is not None]
        down = launch.op.num_stacks
        second = stage_of(launch) == "expert_second"
        sizes = [device.weight_bytes(executable.memory.weights[r.name]) for r in stacks]
        picked = sum(sizes[down : down + 1] if second else sizes[:down])
        num = launch.types[2].shape[0]
        assert isinstance(num, int)
        picked = picked * min(num, executable.env.rows * launch.op.pick.top_k) // num
        beside = sizes[down + 1 :]  # of scores in parts, gate and up before the matrix
        return picked + sum(beside[-1:] if second else beside[:-1])
    if not isinstance(launch.op, ExpertGlu | ExpertSum):
        return nbytes
    num = launch.types[2 if isinstance(launch.op, ExpertGlu) else 3].shape[0]
    assert isinstance(num, int)
    return nbytes * min(num, executable.env.rows * launch.op.top_k) // num


@define
class Forced(Selector):
    """Takes one candidate wherever an op has it."""

    wanted: str = ""

    def choose(self, op: Op, types: Types, env: Env) -> Candidate | None:
        found = self.registry.candidates(op, types, env, self.info)
        return next((c for c in found if c.id == self.wanted), None) or super().choose(op, types, env)


def compare(device: CudaDevice, executable: CudaExecutable, plans: dict[str, Plan], graph: Graph) -> None:
    """The whole step's time by each plan, and the token that it draws from empty states, with its logprob."""
    memory, consts = executable.memory, {v.name: a for v, a in graph.consts.items()}
    for name, plan in plans.items():
        other = device.bind(plan, memory, consts, device.compile([plan]))
        for state, array in memory.states.items():
            if state.startswith(("delta.", "conv.")):
                device.cupy.cuda.runtime.memsetAsync(array.data.ptr, 0, array.nbytes, device.stream.ptr)
        draw = Draw(sampling=Sampling(temperature=0.0), seed=1, logprobs=2)
        seqs = [SeqRows(slot=s, kv_len=64, tokens=(7,), generated=True, draw=draw) for s in range(plan.env.rows)]
        fill_step(seqs, other.step, other.header)
        drawn = read_drawn(seqs, other.launch())[0]
        other.time(3)
        times = sorted(other.time(20) for _ in range(5))
        print(f"    {times[2] * 1e3:.4f} ms  {name}  {drawn}", flush=True)
        other.free()


def plans_with(routes: list[str], graph: Graph, plain: Graph, selector: Selector, env: Env) -> dict[str, Plan]:
    """Plans with each candidate whose name begins so, and one of the graph that is not fused."""
    renderer = Renderer(selector.info)
    plans = {"not fused": Lowering(selector, renderer).lower(plain, env)}
    for node in graph.nodes:
        for c in selector.registry.candidates(node.op, tuple(a.type for a in node.args), env, selector.info):
            if c.id.startswith(tuple(routes)):
                forced = Forced(selector.registry, selector.info, selector.profile, wanted=c.id)
                plans[c.id] = plans.get(c.id) or Lowering(forced, renderer).lower(graph, env)
    return plans


def stages(device: CudaDevice, executable: CudaExecutable) -> None:
    """When the stages of one woven launch of a step begin and end, by the stamps of all blocks: microseconds."""
    last: dict[str, Launch] = {x.source.entry: x for x in executable.plan.launches if x.stages and x.source}
    for entry, launch in last.items():
        found = device.libs.driver.cuModuleGetGlobal(device.modules[entry], f"{entry}_stamps".encode())
        at, nbytes = int(device.driver("finding stamps", found)), int(found[2])
        raw = np.empty(nbytes // 8, np.uint64)
        device.cupy.cuda.runtime.memcpy(raw.ctypes.data, at, nbytes, 2)
        us = raw.reshape(len(launch.stages), -1, 5).astype(np.int64)
        us = (us - us[0, :, 0].min()) / 1e3
        print("  stage: begins | wait over | activations there | chunks done, median and last | ends, median and last")
        for s, x in zip(us, launch.stages, strict=True):
            waited, there, done = (np.median(s[:, i]) for i in (1, 2, 3))
            middle = f"{waited:8.2f} | {there:8.2f} | {done:8.2f} {s[:, 3].max():8.2f} | "
            middle = middle if x.op.key == "fused_linear" else ""  # others have no stamps within
            print(f"    {x.op.key:14} {s[:, 0].min():8.2f} | {middle}{np.median(s[:, 4]):8.2f} {s[:, 4].max():8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"{PREFIX}NAME or a model file")
    parser.add_argument("--format", help="weight format of a synthetic model, e.g. q4_g64/q5_g64")
    parser.add_argument("--context", type=int, nargs="+", default=[512])
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="sequences of one token each")
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each point")
    parser.add_argument("--parts", action="store_true", help="time the kinds of launches on their own")
    parser.add_argument("--compare", metavar="ROUTE", nargs="+", help="time the step with each candidate of such names")
    parser.add_argument("--plain", action="store_true", help="without the fusions of a decode plan")
    parser.add_argument("--woven", type=json.loads, help='woven kernels, with fields of the Weaver: e.g. {"flying": 3}')
    parser.add_argument("--stages", action="store_true", help="when the stages of woven kernels begin and end")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--explain", action="store_true", help="print the plan")
    parser.add_argument("--profile", type=Path, help="a device profile, over the shipped one and the user's")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    device = ceilings.open_gpu(args.device)
    read = ceilings.bandwidth(device, ceilings.Timer(device, 0.3))["read_tb_per_s"] * 1e12
    artifact = open_model(args.model, args.format)
    family, spec = identify(artifact.config)
    print(f"{device.info.name}: read {read / 1e12:.2f} TB/s;  {args.model}: {spec.summary}, {artifact.summary()}")
    graph = family.build(spec, artifact.info, kv=kv_by_name(args.kv_dtype), mode="sample")
    registry = RouteRegistry(cuda_routes(device.info.units))
    selector = Selector(
        registry, device.info, load_profile(device.info, args.profile, check=lambda p: fresh(p, registry.routes)[0])
    )
    renderer = Renderer(device.info)
    weaver = None if args.woven is None else weaver_for(device.info, renderer)
    if weaver is not None:
        weaver = evolve(weaver, stamps=args.stages, **args.woven)
    lowering = Lowering(selector, renderer, weaver)
    weights, points = weights_of(graph, artifact), list[dict[str, Any]]()
    for batch in args.batch:
        pages_each = (max(args.context) + PAGE) // PAGE + 1
        env = Env(rows=batch, logit_rows=batch, seqs=batch, slots=batch, pages=batch * pages_each, max_pages=pages_each)

        def accepts(op: Op, types: Types, env: Env = env) -> bool:
            return bool(registry.candidates(op, types, env, device.info))

        step_graph = graph if args.plain else fuse(graph, accepts)
        others = plans_with(args.compare, step_graph, graph, selector, env) if args.compare else {}
        least = max((p.arena_bytes for p in others.values()), default=0)
        executable = bind(device, lowering, step_graph, weights, env, least)
        if args.explain:
            print(executable.plan.table())
        for context in args.context:
            moved = bytes_per_step(device, graph, weights, env, batch, context)
            m = measure(executable, batch, context, args.seconds)
            floor = sum(moved.values()) / read
            point = {
                "model": args.model, "format": args.format, "batch": batch, "context": context, "kv": args.kv_dtype,
                "tok_per_s": round(batch / m["wall_s"], 1), "step_ms": round(m["step_s"] * 1e3, 4),
                "wall_ms": round(m["wall_s"] * 1e3, 4), "host_us": round(m["host_s"] * 1e6, 1),
                "spread": round(m["spread"], 4), "bytes": moved, "roofline": round(floor / m["step_s"], 4),
                "launches": len(executable.plan.launches), "device": device.info.name,
                "read_tb_per_s": read / 1e12, "date": datetime.date.today().isoformat(),
            }  # fmt: skip
            points.append(point)
            line = f"batch {batch}  context {context:>6}  {point['tok_per_s']:>7} tok/s  step {point['step_ms']:.3f} ms"
            line += (
                f"  {sum(moved.values()) / 1e9:.2f} GB  {point['roofline']:.1%} of the bus  host {point['host_us']} us"
            )
            print(line, flush=True)
            if args.stages:
                stages(device, executable)
            if args.parts and not any(x.stages for x in executable.plan.launches):
                point["parts"] = parts(device, executable)
                for r in point["parts"]:
                    alone = f"{r['us'] or '-':>8} us  saves {r['saved_us'] or 0:>7}"
                    each = f"{r['launches']:>3} x {r['us_each']:>7}  {r['tb_per_s']:.2f} TB/s"
                    print(f"    {alone}  {each}  {r['op']} {r['route']} {' '.join(r['weights'])}", flush=True)
            print(json.dumps(point), flush=True)
            compare(device, executable, others, step_graph)
        device.close()
    if args.json:
        args.json.write_text(json.dumps(points, indent=1))


if __name__ == "__main__":
    main()
