"""Plans of large models on a GPU: no width falls to a slow route, and decode steps stay a few launches a layer."""

from __future__ import annotations

from functools import cache

import pytest
from attrs import define

from ninfer.config import EngineConfig
from ninfer.devices.base import DeviceInfo
from ninfer.devices.cuda import features_of
from ninfer.ir.graph import Graph
from ninfer.ir.types import Env
from ninfer.routes.cuda import cuda_routes
from ninfer.routes.lower import Lowering
from ninfer.routes.profile import DeviceProfile
from ninfer.routes.render import Renderer
from ninfer.routes.route import RouteRegistry
from ninfer.routes.select import Selector
from ninfer.runtime.backend import Backend
from ninfer.runtime.load import open_model


@define
class Paper:
    """A GPU that is described and not there."""

    info: DeviceInfo


@cache
def graph_of(model: str) -> Graph:
    return open_model(EngineConfig(model=model), tokenizer_needed=False).graph("sample")


@pytest.mark.parametrize(
    ("arch", "rows"), [*(("sm_90a", n) for n in (1, 2, 4, 8, 32, 512)), ("sm_86", 1), ("sm_86", 8)]
)
def test_products_of_a_27b_model_take_fast_routes(arch: str, rows: int) -> None:
    info = DeviceInfo("cuda", arch, arch, features_of(arch), arch, 132, 1 << 37)
    registry = RouteRegistry(cuda_routes(info.units))
    backend = Backend(device=Paper(info), registry=registry, free_bytes=None)  # type: ignore[arg-type]
    env = Env(rows=rows, logit_rows=min(rows, 8), seqs=min(rows, 8), slots=8, pages=1024, max_pages=128)
    lowering = Lowering(Selector(registry, info, DeviceProfile(arch)), Renderer(info))
    plan = lowering.lower(backend.graph(graph_of("synthetic:qwen3.5-27b"), env), env)
    slow = {x.route for x in plan.launches if x.op.key != "embed" and (".exact" in x.route or ".simple" in x.route)}
    assert not slow
    if arch == "sm_90a" and rows <= 8:
        assert len(plan.launches) < 5.2 * 64


def test_a_rotated_models_step_has_few_launches() -> None:
    """Five of a layer, and one that rotates the long rows between gate and down; with more rows, one for each."""
    info = DeviceInfo("cuda", "sm_90a", "sm_90a", features_of("sm_90a"), "sm_90a", 132, 1 << 37)
    registry = RouteRegistry(cuda_routes(info.units))
    backend = Backend(device=Paper(info), registry=registry, free_bytes=None)  # type: ignore[arg-type]
    for rows, rotated in ((1, 64), (8, 4 * 64 + 1)):
        env = Env(rows=rows, logit_rows=rows, seqs=rows, slots=8, pages=1024, max_pages=128)
        graph = backend.graph(graph_of("synthetic:bonsai2-27b"), env)
        keys = [n.op.key for n in graph.nodes]
        assert keys.count("hadamard") == 1 and keys.count("rms_norm") == 0  # the embedding's
        assert keys.count("rotated") == keys.count("fused_linear") == rotated
        assert keys.count("rotated_linear") == 4 * 64 + 1 - rotated
        assert keys.count("linear") == (0 if rows == 1 else 48)
        if rows == 1:
            products = [n for n in graph.nodes if n.op.key == "rotated_linear"]
            first = [registry.candidates(n.op, tuple(a.type for a in n.args), env, info)[0] for n in products]
            assert sum("early" in c.tuning for c in first) == 64 + 1  # gate and up, and the head: blocks that read long


@pytest.mark.parametrize(
    ("model", "most"), [("synthetic:qwen3.5-35b-a3b", 6 * 40), ("synthetic:gemma4-26b-a4b", 6 * 30 + 5 + 1)]
)
def test_a_layer_with_experts_is_six_launches(model: str, most: int) -> None:
    """Gemma's five full layers turn their heads in a launch of its own, and the last join has no product."""
    info = DeviceInfo("cuda", "sm_90a", "sm_90a", features_of("sm_90a"), "sm_90a", 132, 1 << 37)
    registry = RouteRegistry(cuda_routes(info.units))
    backend = Backend(device=Paper(info), registry=registry, free_bytes=None)  # type: ignore[arg-type]
    env = Env(rows=1, logit_rows=1, seqs=1, slots=1, pages=1024, max_pages=128)
    lowering = Lowering(Selector(registry, info, DeviceProfile("sm_90a")), Renderer(info))
    plan = lowering.lower(backend.graph(graph_of(model), env), env)
    assert len([x for x in plan.launches if x.layer is not None]) <= most
    assert not [x.route for x in plan.launches if ".exact" in x.route or ".simple" in x.route]
