"""DFlash2 on the simulated GPU: the reference's proposals, and draws over vocabularies of several slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from ninfer.artifacts import open_artifact
from ninfer.artifacts.beside import Beside
from ninfer.devices.cuda_sim import SimDevice, SimPrograms, sim_info
from ninfer.formats.dtypes import F32, I32, U32
from ninfer.ir import casework as cw
from ninfer.ir.op import Case
from ninfer.ir.ops.block import SelectDrafts
from ninfer.ir.ops.reject import SampleRejecting
from ninfer.ir.ops.sample import PARAM_WORDS
from ninfer.ir.step import MASK_ROWS, PROPOSAL_COPY, PROPOSAL_DRAWN, SAMPLE_PARAMS, USE_BIAS, USE_LOGPROBS, USE_MASK
from ninfer.ir.types import B, Env, L, S, T, TensorType
from ninfer.models import dflash
from ninfer.routes.cuda import cuda_routes
from ninfer.routes.cuda_layout import device_layout
from ninfer.routes.route import RouteRegistry
from ninfer.runtime.batch import SeqRows
from ninfer.runtime.draft.stages import Stage
from ninfer.runtime.runner import const_arrays, state_types
from ninfer.runtime.weights import bind_weights
from tests.checkpoints import DATA, GREEDY, oracle
from tests.cuda.parity import Trial, check, lowering_for
from tests.cuda.sim import SimRun
from tests.drawn_drafter import drafter_checkpoint
from tests.models.test_dflash import Pair

INFO = sim_info()
V, COUNT = 5000, 16  # three slices


def run_case(case: Case, programs: SimPrograms) -> float:
    """Through the op's only route, against its reference."""
    (candidate,) = RouteRegistry(cuda_routes(INFO.units)).candidates(case.op, case.types, case.env, INFO)

    return check(Trial(case, candidate, case.env), lowering_for(INFO), SimRun(programs))


def settings(n: int, temperatures: Sequence[float]) -> NDArray[Any]:
    p = np.zeros(n, SAMPLE_PARAMS.numpy)
    p["top_p"] = p["repetition_penalty"] = 1
    p["temperature"] = np.resize(temperatures, n)
    p["seed"], p["position"] = np.arange(n) // 4 + 99, np.arange(n) + 7
    return p


def test_candidates_of_a_wide_vocabulary(sim_programs: SimPrograms) -> None:
    """Ties within and across slices, and more candidates in one slice than a list has."""
    n, rank = 24, 40
    dice = np.random.default_rng(2)
    logits = dice.standard_normal((n, V)).astype(np.float32)
    logits[0, 2040:2060] = 9  # equal, on both sides of an edge
    logits[1, 100:140] = np.arange(40) + 9
    logits[2] = np.round(logits[2])
    logits[:, V - 10 :] = 50  # beyond the domain
    gate, pred, succ = (dice.standard_normal((k, rank)).astype(np.float32) * 0.4 for k in (n, V, V))
    params = settings(n, [0, 0.7, 1.3])
    tokens = dice.integers(0, V - 10, n + 3).tolist()
    typed = (
        cw.ints(T, tokens),
        cw.ints(T, [0] * 9 + [1] * 9 + [2] * 9),
        cw.ints(B, [0, 9, 18]),
        cw.ints(L, [*range(1, 9), *range(10, 18), *range(19, 27)]),
    )
    types = (
        *(TensorType((d, k)) for d, k in ((L, V), (L, rank), (V, rank), (V, rank))),
        TensorType((L, PARAM_WORDS), U32),
        *(t for t, _ in typed),
    )
    arrays = (logits, gate, pred, succ, params.view(np.uint32).reshape(n, -1), *(a for _, a in typed))
    case = Case(SelectDrafts(V - 10, COUNT), "wide", types, arrays, Env(n + 3, n, 3), rtol=1e-4, atol=1e-6)
    run_case(case, sim_programs)


def test_weighing_keeps_and_replaces_as_the_reference(sim_programs: SimPrograms) -> None:
    """Rows of every filter, drafts drawn and copied; about half of them stay."""
    n, slots = 96, 4
    dice = np.random.default_rng(3)
    logits = dice.standard_normal((n, V)).astype(np.float32)
    logits[:, :20] += 9
    params = settings(n, [0.6, 1.0, 1.4, 1.0, 0.0])
    params["slot"] = np.arange(n) * slots // n
    params["top_k"], params["top_p"] = np.resize([0, 0, 30, 0, 2500], n), np.resize([1, 0.9, 1, 0.7, 1, 1], n)
    params["min_p"] = np.resize([0, 0, 0, 0.1, 0, 0, 0], n)
    params["flags"] = np.resize([0, USE_LOGPROBS, 0, USE_MASK | USE_LOGPROBS, USE_BIAS], n)
    params["proposal"] = np.resize([PROPOSAL_DRAWN, PROPOSAL_COPY, PROPOSAL_DRAWN, 0], n)
    proposals = np.zeros((slots, MASK_ROWS, 2 * COUNT), np.float32)
    proposals[..., :COUNT] = dice.permuted(np.tile(np.arange(20), (slots, MASK_ROWS, 1)), axis=-1)[..., :COUNT]
    proposals[..., COUNT:] = dice.dirichlet(np.ones(COUNT) * 0.5, (slots, MASK_ROWS))
    each = n // slots // 2  # rows of a sequence: two sequences have a slot's proposals
    places = np.arange(n) % each
    drafts = [int(proposals[s, i, dice.integers(COUNT)]) for s, i in zip(params["slot"], places, strict=True)]
    count = n // each
    typed = (
        cw.ints(T, [t for b in range(count) for t in [1, *drafts[b * each : (b + 1) * each]]]),
        cw.ints(T, [b for b in range(count) for _ in range(each + 1)]),
        cw.ints(B, [b * (each + 1) for b in range(count)]),
        cw.ints(L, [b * (each + 1) + i for b in range(count) for i in range(each)]),
        (TensorType((S, MASK_ROWS, 2 * COUNT)), proposals),
    )
    words = (V + 31) // 32
    mask = dice.integers(0, 2**32, (slots, MASK_ROWS, words), dtype=np.uint32)
    types = (
        *(TensorType(s, d) for s, d in (((L, V), F32), ((L, PARAM_WORDS), U32), ((S, V), I32), ((S, V), F32))),
        TensorType((S, MASK_ROWS, words), U32),
        *(t for t, _ in typed),
    )
    bias = np.where(np.arange(V) % 7, 0, 0.5).astype(np.float32) * np.ones((slots, 1), np.float32)
    counts = np.zeros((slots, V), np.int32)
    arrays = (logits, params.view(np.uint32).reshape(n, -1), counts, bias, mask, *(a for _, a in typed))
    env = Env(n + count, n, count, slots=slots)
    case = Case(SampleRejecting(V - 10), "many", types, arrays, env, rtol=2e-5, atol=2e-5)
    judged = (params["proposal"] != 0) & (params["temperature"] > 0)
    stayed = np.asarray(case.op.reference(arrays)[0]) == drafts
    assert 0.2 < stayed[judged].mean() < 0.8, "both ends of the weighing are reached"
    run_case(case, sim_programs)


class SimPair:
    """A target run by references, its drafter's graphs in the simulation, on the same states."""

    def __init__(self, target: Pair, folders: Mapping[str, Path], programs: SimPrograms) -> None:
        device, lowering = SimDevice(programs, device_layout), lowering_for(INFO)
        modes = {mode: target.runs[mode] for mode in (dflash.CONTEXT, dflash.BLOCK_LOGITS)}
        env = evolve(limits_env(target), logit_rows=16)
        plans = {mode: lowering.lower(run.graph, env) for mode, run in modes.items()}
        entries = device.compile(list(plans.values()))
        both = Beside(open_artifact(folders["qwen3_5_dense"]), open_artifact(folders["dflash2"]), dflash.PREFIX)
        weights = {name: w for run in modes.values() for name, w in bind_weights(run.graph, both).items()}
        states = state_types(*(run.graph for run in modes.values()))
        memory = device.memory(weights, states, env, max(p.arena_bytes for p in plans.values()))
        consts = const_arrays(*(run.graph for run in modes.values()))
        self.memory, self.target = memory, target
        self.runs = {m: Stage({env.rows: device.bind(p, memory, consts, entries)}) for m, p in plans.items()}

    def sync(self) -> None:
        for name in self.memory.states:
            if not name.startswith(("kv.", "draft.")):
                self.memory.states[name][...] = self.target.runs["logits"].states[name]

    def run(self, mode: str, tokens: Sequence[int], kv_len: int, drafts: int = 0) -> dict[str, NDArray[Any]]:
        self.sync()
        draw = GREEDY if drafts else None
        rows = SeqRows(slot=1, kv_len=kv_len, tokens=tuple(tokens), generated=True, draw=draw, num_draws=max(1, drafts))
        return {name: array.copy() for name, array in self.runs[mode]([rows]).items()}


def limits_env(pair: Pair) -> Env:
    sized = pair.runs["logits"].limits
    return Env(64, 64, sized.max_seqs, sized.slots, sized.pages, sized.max_pages)


def test_two_rounds_are_the_references(tmp_path: Path, sim_programs: SimPrograms) -> None:
    """As tests/models/test_dflash.py has it of the ops' references."""
    want, count, key = oracle("dflash2"), 7, "k7_"
    folders = {"dflash2": drafter_checkpoint(DATA / "dflash2", tmp_path), "qwen3_5_dense": DATA / "qwen3_5_dense"}
    target = Pair(folders, "dflash2")
    sim = SimPair(target, folders, sim_programs)
    prompt = oracle("qwen3_5_dense")["input_ids"].tolist()
    target.run("logits", prompt, 0)
    sim.run(dflash.CONTEXT, prompt, 0)
    masks = [target.own.mask_id] * count
    got = sim.run(dflash.BLOCK_LOGITS, [int(want["anchor"]), *masks], 48, count)
    drafts = got["draft"][:count].tolist()
    assert drafts == want[key + "r1_draft_ids"].tolist()
    for found, ids in zip(got["candidates"][:count], want[key + "r1_cand_ids"], strict=True):
        assert len({*found.tolist()} & {*ids.tolist()}) >= COUNT - 3, "more than the last ones, which near ties decide"
    kept, then = int(want[key + "accepted"]), int(want[key + "next_anchor"])
    target.run("logits", [int(want["anchor"]), *drafts], 48)
    sim.run(dflash.CONTEXT, [int(want["anchor"]), *drafts[:kept]], 48)
    again = sim.run(dflash.BLOCK_LOGITS, [then, *masks], 49 + kept, count)
    assert again["draft"][:count].tolist() == want[key + "r2_draft_ids"].tolist()
    for values, which in ((got, "r1_logits"), (again, "r2_logits")):
        error = values["logits"][:count, ::32] - want[key + which]
        assert np.linalg.norm(error) < 0.02 * np.linalg.norm(want[key + which]), "products of 16-bit activations"
