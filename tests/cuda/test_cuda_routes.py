"""Every case of every op through every CUDA route that takes it, in the simulation."""

from __future__ import annotations

import pytest
from attrs import evolve

from ninfer.devices.cuda import CudaDevice, cuda_info, cuda_missing, libraries
from ninfer.devices.cuda_sim import SimPrograms, sim_info
from ninfer.formats.dtypes import I32, U8
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.ir.ops.attention import Attention
from ninfer.ir.types import B, Env, M, P, S, T, TensorType
from ninfer.routes.cuda import cuda_routes
from ninfer.routes.route import Candidate, RouteRegistry, Tuning
from tests.cuda.gpu import GpuRun
from tests.cuda.parity import LINEAR, Trial, check, lowering_for, trials
from tests.cuda.sim import SimRun

INFO = sim_info()
TRIALS = [t for t in trials(INFO) if not isinstance(t.case.op, LINEAR)]  # those have tests of their own
LOWERING = lowering_for(INFO)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("trial", TRIALS, ids=lambda t: t.id)
def test_a_route_computes_its_op(trial: Trial, order: int, sim_programs: SimPrograms) -> None:
    check(trial, LOWERING, SimRun(sim_programs, order))


# of attention by tiles: several tiles a block, more than its ring has; columns together and apart
TILED: tuple[Tuning, ...] = tuple(
    {"warps": warps, "keys": keys, "stages": stages, "teams": teams, "blocks": blocks, "apart": apart}
    for warps, keys, stages, teams, blocks, apart in (
        (8, 16, 2, 1, 1, 0),
        (8, 16, 3, 1, 50, 16),
        (8, 32, 2, 1, 2, 0),
        (4, 32, 2, 1, 40, 16),
        (4, 64, 2, 1, 1, 0),
        (8, 64, 2, 1, 1, 0),
        (8, 128, 2, 1, 1, 0),
        (8, 32, 2, 2, 1, 0),
        (4, 32, 2, 3, 40, 16),
    )
)
MANY_TILES = [
    evolve(t, candidate=Candidate(t.candidate.route, tuning))
    for t in TRIALS
    if t.candidate.route.name.startswith("fused_attention.cuda.tile")
    and t.candidate.tuning == t.candidate.route.tunings[0]
    for tuning in TILED
    if t.candidate.route.fits(t.case.op, t.case.types, tuning)
]


@pytest.mark.parametrize("trial", MANY_TILES, ids=lambda t: t.id)
def test_a_block_of_attention_reads_many_tiles(trial: Trial, sim_programs: SimPrograms) -> None:
    check(trial, LOWERING, SimRun(sim_programs, 0))


def _gpu_trials() -> list[Trial]:
    if cuda_missing() is not None:
        return []
    return list(trials(cuda_info(libraries())))


@pytest.mark.gpu
@pytest.mark.skipif(cuda_missing() is not None, reason=cuda_missing() or "")
@pytest.mark.parametrize("trial", _gpu_trials(), ids=lambda t: t.id)
def test_a_route_computes_its_op_on_a_gpu(trial: Trial, gpu: CudaDevice) -> None:
    check(trial, lowering_for(gpu.info), GpuRun(gpu))


@pytest.mark.parametrize(("fmt", "advice"), [("nvfp4", "--kv-dtype bf16"), ("bf16", "a smaller --prefill-chunk")])
def test_a_cache_that_a_gpu_has_no_kernel_for_is_told_with_what_would_work(fmt: str, advice: str) -> None:
    """Heads of 48 values: no warp codes them or reads them."""
    info, kv = INFO, kv_by_name(fmt)
    op = Attention(kv, 2, 1, 48, 0.1, None)
    step = (TensorType((S, M), I32), *(TensorType((d,), I32) for d in (T, B, B, B)))
    types = (TensorType((T, 96)), TensorType((P, kv.page_bytes(1, 48)), U8), *step)
    registry = RouteRegistry(cuda_routes(info.units))
    assert not registry.candidates(op, types, Env(1, 1, 1), info)
    lines = str(registry.no_route(op, types, Env(1, 1, 1), info)).splitlines()
    assert "48" in "".join(lines[1:-1]) and lines[-1].startswith(f"  try: {advice}, ")
