"""What a file allows of activations that meet its weights (A16Only, AllowA8, AllowA4) decides over opt-in routes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from ninfer.artifacts import open_artifact
from ninfer.artifacts.convert import make_plan
from ninfer.artifacts.convert_objects import to_artifact
from ninfer.artifacts.ninfer_artifact import NinferArtifact
from ninfer.artifacts.ninfer_write import NewArtifact, write_artifact
from ninfer.artifacts.recipes import recipe
from ninfer.config import EngineConfig
from ninfer.devices.cuda_sim import sim_info
from ninfer.errors import ArtifactError
from ninfer.ir.types import Env
from ninfer.routes.cuda import cuda_routes
from ninfer.routes.fp4_cuda import PREFILL_4BIT
from ninfer.routes.gemm8_cuda import PREFILL_8BIT
from ninfer.routes.route import RouteRegistry
from ninfer.runtime.backend import open_backend
from ninfer.runtime.load import no_progress, no_report, open_model
from tests.checkpoints import DATA
from tests.cuda.test_cuda_formats import FP4, fp4_trials
from tests.cuda.test_gemm8 import CASES, ROOM

MODEL = DATA / "qwen3_5_dense_hd256"


def written(tmp_path: Path, **policies: str) -> Path:
    """In q8, with other permissions for matrices whose names end so."""
    new = to_artifact(make_plan(recipe("q8"), open_artifact(MODEL), {}, name="x"))
    uses = [dict(u) for u in new.uses]
    for use in uses:
        for end, policy in policies.items():
            if str(use["parameter"]).endswith(f"/{end}"):
                use["activation_policy"] = policy
    path = tmp_path / "model.ninfer"
    write_artifact(attrs.evolve(new, uses=uses), path)
    return path


def test_the_strictest_use_of_a_matrix_counts(tmp_path: Path) -> None:
    artifact = open_artifact(written(tmp_path, up="AllowA4", key="A16Only", query="AllowA4"))
    p = "model.layers."
    bits = {
        f"{p}0.mlp.up_proj.weight": 4, f"{p}0.mlp.gate_proj.weight": 8, f"{p}1.self_attn.k_proj.weight": 16,
        f"{p}1.self_attn.q_proj.weight": 8, f"{p}1.self_attn.q_proj.weight/query": 4,
        f"{p}0.linear_attn.in_proj_qkv.weight": 16, f"{p}0.linear_attn.in_proj_a.weight": 16,
        "model.embed_tokens.weight": 0,
    }  # fmt: skip
    assert {name: artifact.info(name).least_bits for name in bits} == bits
    assert open_artifact(MODEL).info(f"{p}0.mlp.up_proj.weight").least_bits == 0


def test_a_use_without_a_permission_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    new = to_artifact(make_plan(recipe("q8"), open_artifact(MODEL), {}, name="x"))
    uses = [{k: v for k, v in u.items() if k != "activation_policy"} for u in new.uses]
    write_artifact(NewArtifact(new.components, new.objects, new.bindings, uses, {}, {}), tmp_path / "m.ninfer")
    artifact = open_artifact(tmp_path / "m.ninfer")
    assert isinstance(artifact, NinferArtifact)
    assert artifact.info("model.norm.weight").least_bits == 0
    with pytest.raises(ArtifactError, match="states no activation_policy"):
        open_model(EngineConfig(model=str(tmp_path / "m.ninfer"), device="cpu"), tokenizer_needed=False).graph("logits")


def offered(kind: str, bits: int) -> bool:
    """Whether an opt-in route is offered for a product of weights of this permission."""
    if kind == PREFILL_4BIT:
        case, info, env = next(fp4_trials()).case, FP4, None
    else:
        case, info = CASES["linear-q4_g64"], sim_info()
        env = attrs.evolve(case.env, rows=ROOM)
    types = tuple(t if t.fmt is None else attrs.evolve(t, least_bits=bits) for t in case.types)
    registry = RouteRegistry(cuda_routes(info.units, opted=[kind]))
    found = registry.candidates(case.op, types, env or case.env, info)
    assert found, "another route takes it"
    said = registry.explain(case.op, types, env or case.env, info)
    is_offered = any(c.route.opt_in for c in found)
    assert is_offered or f"but the model's file allows {bits} or more" in said
    return is_offered


@pytest.mark.parametrize(("kind", "least"), [(PREFILL_4BIT, 4), (PREFILL_8BIT, 8)])
def test_routes_make_no_fewer_bits_than_the_file_allows(kind: str, least: int) -> None:
    assert {bits: offered(kind, bits) for bits in (0, 4, 8, 16)} == {b: b <= least for b in (0, 4, 8, 16)}


def launches(path: Path, **changes: Any) -> Iterator[tuple[str, list[str]]]:
    """Routes of a prompt's products with the weights that they read."""
    config = EngineConfig(model=str(path), device="cuda-sim", prefill_chunk=256, **changes)
    model, backend = open_model(config, tokenizer_needed=False), open_backend(config, no_report, no_progress)
    env = Env(rows=256, logit_rows=1, seqs=1, slots=1, pages=8, max_pages=8)
    plan = backend.lowering(config, no_report).lower(backend.graph(model.graph("sample"), env), env)
    for x in plan.launches:
        names = [ref.name for ref in x.args if ref.name.startswith("model.layers.0.") and "norm" not in ref.name]
        if names:
            yield x.route, names


def test_a_prompt_keeps_sixteen_bits_where_the_file_says_so(tmp_path: Path) -> None:
    def eight(path: Path) -> set[str]:
        found = launches(path, prefill_activations="8bit")
        return {n.rsplit(".", 2)[-2].removesuffix("_proj") for route, names in found if "gemm8" in route for n in names}

    usual = eight(written(tmp_path))
    assert {"gate", "up", "down", "in_proj_qkv", "in_proj_z", "out"} <= usual
    assert not {"in_proj_a", "in_proj_b"} & usual, "the recipe says A16Only"
    (tmp_path / "strict").mkdir()
    strict = eight(written(tmp_path / "strict", down="A16Only", z="A16Only"))
    assert usual - strict == {"down", "in_proj_z"}
