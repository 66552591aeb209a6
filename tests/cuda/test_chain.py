"""A round in one plan, of a model that is a table: on a CPU, in the simulation and on a pretended GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ninfer.devices.cpu import CpuDevice, cpu_info
from ninfer.devices.cuda import CudaDevice, cuda_info
from ninfer.devices.cuda_sim import SimDevice, SimPrograms
from ninfer.devices.programs import ProgramCache
from ninfer.formats.quant import Packed, by_name
from ninfer.ir.graph import Graph
from ninfer.ir.ops.embed import embed, take_rows
from ninfer.ir.ops.journal import argmax, ring_load, ring_state, ring_store
from ninfer.ir.ops.sample import sample
from ninfer.ir.types import Env
from ninfer.routes.cuda import cuda_routes
from ninfer.routes.cuda_layout import device_layout
from ninfer.routes.lower import Lowering
from ninfer.routes.profile import DeviceProfile
from ninfer.routes.render import Renderer
from ninfer.routes.route import RouteRegistry
from ninfer.routes.select import Selector
from ninfer.routes.tables import REGISTRY
from ninfer.runtime.batch import Draw, Limits, SeqRows
from ninfer.runtime.draft.chain import Chain, chain_shapes, lower_chain
from ninfer.runtime.request import Sampling
from ninfer.runtime.runner import env_of, state_types
from tests.cuda.fake_gpu import FakeGpu, FakePrograms

V = 64
LIMITS = Limits(max_rows=16, max_seqs=4, slots=5, pages=1, max_pages=1, context_len=64, domain=V)
MOST_DRAFTS = 3
NEXT = np.random.default_rng(1).permutation(V)  # what the target says after a token
GUESS = np.where(np.arange(V) % 4 == 0, (NEXT + 1) % V, NEXT)  # what the drafter says


def table(name: str, following: np.ndarray) -> Packed:
    fmt = by_name("f32")
    rows = np.zeros((V, V), np.float32)
    rows[np.arange(V), following] = 9
    return Packed(fmt, fmt.pack(rows), (V, V))


def graphs() -> dict[str, Graph]:
    """The target draws by its table; folding and drafting leave in rings what they were run over."""
    verify, fold, draft = Graph(), Graph(), Graph()
    fmt = by_name("f32")
    x = embed(verify, verify.step["tokens"], verify.matrix("next", (V, V), fmt))
    sample(verify, take_rows(verify, x, verify.step["logit_rows"]), domain=V)
    ring_store(verify, x, ring_state(verify, "journal", 8, V))
    x = ring_load(fold, ring_state(fold, "journal", 8, V))
    ring_store(fold, x, ring_state(fold, "folded", 64, V))
    x = embed(draft, draft.step["tokens"], draft.matrix("guess", (V, V), fmt))
    ring_store(draft, x, ring_state(draft, "drafted", 64, V))
    draft.outputs["draft"] = argmax(draft, take_rows(draft, x, draft.step["logit_rows"]), domain=V)
    return {"verify": verify, "fold": fold, "draft": draft}


Open = Callable[[SimPrograms, Any], tuple[Any, RouteRegistry]]


def on_cpu(sim: SimPrograms, folder: Any) -> tuple[Any, RouteRegistry]:
    return CpuDevice(cpu_info(), ProgramCache(sim.compiler, folder, cpu_info().arch), threads=2), REGISTRY


def in_simulation(sim: SimPrograms, folder: Any) -> tuple[Any, RouteRegistry]:
    device = SimDevice(sim, device_layout)
    return device, RouteRegistry(cuda_routes(device.info.units))


def on_pretended_gpu(sim: SimPrograms, folder: Any) -> tuple[Any, RouteRegistry]:
    gpu = FakeGpu()
    device = CudaDevice(gpu.libs, cuda_info(gpu.libs), FakePrograms(gpu, sim), device_layout)  # type: ignore[arg-type]
    return device, RouteRegistry(cuda_routes(device.info.units))


DEVICES = pytest.mark.parametrize("where", [on_cpu, in_simulation, on_pretended_gpu], ids=lambda f: f.__name__)


def chain_of(
    made: dict[str, Graph], where: Open, programs: SimPrograms, folder: Any, mask: int | None = None
) -> tuple[Chain, Any]:
    device, registry = where(programs, folder)
    lowering = Lowering(Selector(registry, device.info, DeviceProfile("test")), Renderer(device.info))

    def as_it_is(graph: Graph, env: Env) -> Graph:
        return graph

    plans = {
        shape: lower_chain(made, shape, lowering, as_it_is, LIMITS, 1 + MOST_DRAFTS, mask)
        for shape in chain_shapes(MOST_DRAFTS, mask is None, LIMITS.max_seqs)
    }
    states = state_types(*made.values())
    weights = {"next": table("next", NEXT), "guess": table("guess", GUESS)}
    env = env_of(LIMITS, LIMITS.max_rows, LIMITS.max_rows)
    memory = device.memory(weights, states, env, max(p.arena_bytes for p in plans.values()))
    entries = device.compile(list(plans.values()))
    return Chain({shape: device.bind(p, memory, {}, entries) for shape, p in plans.items()}), memory


def row(slot: int, kv_len: int, last: int, drafts: list[int], room: int, most: int = MOST_DRAFTS) -> SeqRows:
    draw = Draw(sampling=Sampling(temperature=0), seed=1)
    tokens = (last, *drafts)
    return SeqRows(
        slot=slot, kv_len=kv_len, tokens=tokens, generated=True, draw=draw, num_draws=len(tokens), room=room,
        most_drafts=most,
    )  # fmt: skip


def said(last: int, drafts: list[int]) -> list[int]:
    """Accepted drafts, and the target's own token behind them."""
    out = [int(NEXT[last])]
    for d in drafts:
        if d != out[-1]:
            break
        out.append(int(NEXT[d]))
    return out


def right(last: int, n: int) -> list[int]:
    out = [last]
    for _ in range(n):
        out.append(int(NEXT[out[-1]]))
    return out[1:]


ROUNDS = [
    [row(2, 10, 5, right(5, 3), room=7)],
    [row(0, 3, 9, [], room=0), row(1, 20, 8, [*right(8, 1), 63, 1], room=2), row(4, 61, 7, [0, 0, 0], room=9)],
    [row(i, 10 + i, 11 + i, right(11 + i, i), room=i - 1, most=1 + i % 2) for i in range(4)],
    [row(3, 5, 30, right(30, 2), room=0)],  # a round that drafts nothing more
]


@DEVICES
def test_a_round_is_what_the_host_would_have_done(where: Open, sim_programs: SimPrograms, tmp_path: Any) -> None:
    run, memory = chain_of(graphs(), where, sim_programs, tmp_path)
    for seqs in ROUNDS:
        result = run(seqs)
        for s, drawn, drafts in zip(seqs, result.drawn, result.drafts, strict=True):
            want = said(s.tokens[0], list(s.tokens[1:]))
            assert [d.token for d in drawn] == want
            wanted = min(max(0, s.room - len(want) + 1), s.most_drafts)
            guesses = [want[-1]]
            for _ in range(wanted):
                guesses.append(int(GUESS[guesses[-1]]))
            assert list(drafts) == guesses[1:]
            folded, drafted = (memory.read_state(name, s.slot).argmax(axis=1) for name in ("folded", "drafted"))
            end = s.kv_len + len(want)
            assert folded[s.kv_len : end].tolist() == NEXT[list(s.tokens[: len(want)])].tolist()
            inputs = [*want, *guesses[1:wanted]]  # of the drafter: what follows each kept row, then its own drafts
            places = [p % 64 for p in range(s.kv_len, s.kv_len + len(inputs))]
            assert drafted[places].tolist() == GUESS[inputs].tolist()
            assert not memory.read_state("folded", s.slot)[end % 64].any(), "a rejected row was folded"
        memory.write_state("folded", slice(None), np.zeros((), np.float32))


MASK = 62


@DEVICES
def test_a_round_with_a_block_behind_it(where: Open, sim_programs: SimPrograms, tmp_path: Any) -> None:
    """The drafter hears of the rows that were kept, then sees the last token with a mask for each draft behind it."""
    made = graphs()
    fold, draft = made["fold"], made.pop("draft")
    context, block = Graph(), draft
    x = ring_load(context, ring_state(context, "journal", 8, V))
    ring_store(context, x, ring_state(context, "context", 64, V))
    run, memory = chain_of(
        {"verify": made["verify"], "fold": fold, "context": context, "block": block},
        where,
        sim_programs,
        tmp_path,
        MASK,
    )
    for seqs in ROUNDS:
        result = run(seqs)
        for s, drawn, drafts in zip(seqs, result.drawn, result.drafts, strict=True):
            want = said(s.tokens[0], list(s.tokens[1:]))
            assert [d.token for d in drawn] == want
            wanted = min(max(0, s.room - len(want) + 1), s.most_drafts)
            assert list(drafts) == [GUESS[MASK]] * wanted
            end = s.kv_len + len(want)
            for name in ("folded", "context"):
                rows = memory.read_state(name, s.slot).argmax(axis=1)
                assert rows[s.kv_len : end].tolist() == NEXT[list(s.tokens[: len(want)])].tolist()
            behind = memory.read_state("drafted", s.slot)[[p % 64 for p in range(end, end + 1 + MOST_DRAFTS)]]
            inputs = [want[-1], *[MASK] * wanted] if wanted else []
            assert behind[: len(inputs)].argmax(axis=1).tolist() == GUESS[inputs].tolist()
            assert not behind[len(inputs) :].any(), "a row that nobody wanted"
        for name in ("folded", "context", "drafted"):
            memory.write_state(name, slice(None), np.zeros((), np.float32))


@DEVICES
def test_a_round_that_fits_no_plan_is_refused(where: Open, sim_programs: SimPrograms, tmp_path: Any) -> None:
    chain = chain_of(graphs(), where, sim_programs, tmp_path)
    with pytest.raises(ValueError, match="5 sequences, 5 rows and 3 drafts has no plan"):
        chain[0]([row(i, 3, 4, [], room=4) for i in range(5)])
