"""Fused graphs compute what the graphs they came from do, and are what a decode step should be."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from attrs import evolve

from ninfer.artifacts.artifact import PROPOSAL_HEAD, TensorInfo
from ninfer.artifacts.synthetic import SyntheticArtifact
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.formats.quant import Packed, by_name
from ninfer.formats.tile import make_tile
from ninfer.ir.graph import Graph
from ninfer.ir.interp import interpret
from ninfer.ir.op import Op
from ninfer.ir.ops.fused_experts import FusedExperts
from ninfer.ir.ops.packed_act import FusedLinear
from ninfer.ir.ops.rotated import Rotated
from ninfer.ir.ops.rotated_linear import RotatedLinear
from ninfer.ir.rewriter import Accepts
from ninfer.ir.rewrites import fuse, fuse_rotations
from ninfer.ir.types import Array, Env, Types
from ninfer.models import identify
from ninfer.models.family import HIDDEN_RING, Rounds
from ninfer.models.proposal import parse_proposal
from ninfer.runtime.batch import Draw, SeqRows
from ninfer.runtime.request import Sampling
from ninfer.runtime.steps import fill_step, step_arrays
from ninfer.runtime.weights import bind_weights

MODELS = ("qwen3.5-tiny", "llama-tiny", "bonsai-tiny")


def build(name: str, mode: str = "logits") -> tuple[Graph, dict[str, Array]]:
    artifact = SyntheticArtifact(name)
    family, spec = identify(artifact.config)
    graph = family.build(spec, artifact.info, kv=kv_by_name("f32"), mode=mode)
    return graph, bind_weights(graph, artifact)


def run(graph: Graph, weights: dict[str, Array], chunks: list[int]) -> list[np.ndarray]:
    env = Env(rows=max(chunks), logit_rows=1, seqs=1, slots=1, pages=2, max_pages=2)
    states = {n: np.zeros(v.type.concrete(env), v.type.dtype.numpy) for n, v in graph.states.items()}
    states["page_table"][0] = [1, 0]
    past, results = 0, []
    for n in chunks:
        step, header = step_arrays(Env(rows=n, logit_rows=1, seqs=1))
        fill_step(
            [SeqRows(slot=0, kv_len=past, tokens=tuple(range(past, past + n)), generated=False, draw=None)],
            step,
            header,
        )
        step["logit_rows"][0] = n - 1
        outputs = interpret(graph, step=step, weights=weights, states=states)
        results.append(np.asarray(outputs["logits"]))
        past += n
    return results


def no_codes(op: Op, types: Types) -> bool:
    return not any(getattr(op, name, 0) for name in ("quant", "packed", "weigh"))


@pytest.mark.parametrize(("accepts", "most"), [(no_codes, 1e-5), (lambda op, types: True, 0.05)])
@pytest.mark.parametrize("name", MODELS)
def test_a_fused_graph_gives_the_same_logits(name: str, accepts: Accepts, most: float) -> None:
    """Up to int8 codes between the ops, where they are: 0.6 % of each value that passes."""
    graph, weights = build(name)
    fused = fuse(graph, accepts)
    for want, got in zip(*(run(g, weights, [5, 1, 1]) for g in (graph, fused)), strict=True):
        assert np.linalg.norm(got - want) < most * np.linalg.norm(want)


@pytest.mark.parametrize(("name", "beside"), [("qwen3.5-moe-tiny", "joined"), ("gemma4-tiny", "own")])
def test_experts_are_one_op_with_what_is_beside_them(name: str, beside: str) -> None:
    graph, weights = build(name)
    fused = fuse(graph, no_codes)
    ops = [n.op for n in fused.nodes if isinstance(n.op, FusedExperts)]
    layers = {n.layer for n in graph.nodes if n.layer is not None and n.op.key == "expert_sum"}
    assert len(ops) == len(layers) and all(op.beside == beside for op in ops)
    for want, got in zip(*(run(g, weights, [5, 1, 1]) for g in (graph, fused)), strict=True):
        assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


def test_a_layer_is_five_launches() -> None:
    graph, _ = build("qwen3.5-tiny", "sample")
    fused = fuse(graph, lambda op, types: True)
    kinds = Counter((node.op.key, node.layer) for node in fused.nodes if node.layer is not None)
    per_layer = Counter(layer for key, layer in kinds.elements())
    assert set(per_layer.values()) == {5}
    assert kinds["fused_attention", 3] == 1 and kinds["fused_delta", 0] == 1 and kinds["fused_linear", 0] == 4


def test_a_norm_is_prepared_by_the_sum_before_it() -> None:
    """All but the model's first, and the head's, whose rows are gathered."""
    graph, _ = build("qwen3.5-tiny", "sample")
    ops = [n.op for n in fuse(graph, lambda op, types: True).nodes if isinstance(n.op, FusedLinear)]
    assert [op.norm and not op.packed for op in ops].count(True) == 2
    assert sum(op.weigh > 0 for op in ops) == sum(op.norm and op.packed > 0 for op in ops) == len(ops) // 2 - 1


def test_nothing_is_fused_that_the_device_refuses() -> None:
    graph, _ = build("qwen3.5-tiny")
    same = fuse(graph, lambda op, types: False)
    assert [n.op for n in same.nodes] == [n.op for n in graph.nodes]
    keys = Counter(n.op.key for n in fuse(graph, no_codes).nodes)
    assert keys["linear_add"] == 8 and keys["fused_attention"] == 1


def test_the_given_graph_is_left_alone() -> None:
    graph, _ = build("llama-tiny")
    before = list(graph.nodes)
    fuse(graph, lambda op, types: True)
    assert graph.nodes == before


def round_graph(mode: str) -> tuple[Graph, dict[str, Array]]:
    artifact = SyntheticArtifact("qwen3.5-tiny")
    family, spec = identify(artifact.config)
    spec = evolve(spec, proposal=parse_proposal([*range(7, 4000, 3)], spec.vocab_size))
    rounds = Rounds(hidden_rows=8, journal_rows=8)
    info = artifact.info

    def told(name: str) -> TensorInfo:
        return TensorInfo((1331, 512), by_name("q4_g64")) if name == PROPOSAL_HEAD else info(name)

    graph = family.build(spec, told, kv=kv_by_name("f32"), mode=mode, rounds=rounds)
    whole = Graph()
    whole.weights = {v: w for v, w in graph.weights.items() if v.name != PROPOSAL_HEAD}
    head = Packed(by_name("q4_g64"), make_tile(by_name("q4_g64"), 1331, 512).raw, (1331, 512))
    return graph, bind_weights(whole, artifact) | {PROPOSAL_HEAD: head}


def test_a_round_that_only_looks_stays_one_and_keeps_its_inputs_itself() -> None:
    graph, _ = round_graph("verify")
    keys = Counter(n.op.key for n in fuse(graph, lambda op, types: True).nodes)
    assert keys["fused_delta_record"] == 3 and keys["fused_delta"] == keys["delta_peek"] == keys["ring_store"] == 0
    assert keys["keep_normed"] == 1 and keys["rms_norm"] == 0
    keys = Counter(n.op.key for n in fuse(graph, lambda op, types: op.key != "fused_delta_record").nodes)
    assert keys["fused_delta_peek"] == 3 and keys["ring_store"] == 9


def test_a_draft_is_eleven_launches() -> None:
    graph, _ = round_graph("draft")
    kinds = [n.op.key for n in fuse(graph, lambda op, types: True).nodes]
    ends = ["embed", "draft_input"], ["keep_normed", "fused_linear", "argmax_picked"]
    assert len(kinds) == 11 and (kinds[:2], kinds[-3:]) == ends
    plain = [n.op.key for n in fuse(graph, lambda op, types: True, codes=False).nodes]
    assert plain.count("draft_input") == plain.count("keep_normed") == 1


@pytest.mark.parametrize("mode", ["verify", "fold", "draft"])
def test_a_rounds_states_are_those_of_its_parts(mode: str) -> None:
    """Those of the first layer bit for bit, since references of fused ops are compositions."""
    graph, weights = round_graph(mode)
    fused = fuse(graph, no_codes)
    assert mode != "fold" or [n.op.key for n in fused.nodes] == ["fold_deltas"]
    env, dice = Env(rows=4, logit_rows=4, seqs=2, slots=2, pages=2, max_pages=1), np.random.default_rng(1)
    start = {
        n: dice.standard_normal(v.type.concrete(env)).astype(v.type.dtype.numpy)
        for n, v in graph.states.items() if n.startswith(("conv.", "delta.", "journal.", HIDDEN_RING))
    }  # fmt: skip
    start |= {n: np.zeros(v.type.concrete(env), v.type.dtype.numpy) for n, v in graph.states.items() if n not in start}
    start["page_table"][:, 0] = [1, 0]
    step, header = step_arrays(env)
    draw = Draw(sampling=Sampling(temperature=0), seed=1)
    fill_step(
        [SeqRows(slot=s, kv_len=7, tokens=(1, 2), generated=True, draw=draw, num_draws=2) for s in (1, 0)], step, header
    )
    results = []
    for g in (graph, fused):
        states = {n: a.copy() for n, a in start.items()}
        outputs = interpret(g, step=step, weights=weights, states=states)
        results.append((states, outputs))
    (states, outputs), (fused_states, fused_outputs) = results
    for name, array in outputs.items():
        if array.dtype == np.int32:
            np.testing.assert_array_equal(array, fused_outputs[name])
    if mode != "fold":
        np.testing.assert_allclose(states[HIDDEN_RING], fused_states[HIDDEN_RING], rtol=1e-4, atol=1e-5)
        assert (states[HIDDEN_RING] != start[HIDDEN_RING]).any()
    for name in ("conv.0", "delta.0", "journal.0.qkv", "journal.0.a", "journal.0.b") if mode != "draft" else ():
        np.testing.assert_array_equal(fused_states[name], states[name])
        assert (states[name] == start[name]).all() == (name.startswith("journal") == (mode == "fold")), name


def test_rotations_take_no_launch_of_their_own_but_codes_with_them() -> None:
    """Eleven or twelve launches of a layer become nine or ten; products get codes, and none is rotated twice."""
    graph, _ = build("bonsai-tiny", "sample")
    fused = fuse(graph, lambda op, types: not isinstance(op, RotatedLinear))
    kinds = Counter((node.op.key, node.layer) for node in fused.nodes)
    for layer, attention in ((0, False), (3, True)):
        assert kinds["rotated", layer] == 4 and kinds["hadamard", layer] == kinds["rms_norm", layer] == 0
        assert kinds["fused_linear", layer] == 4 and kinds["linear", layer] == (0 if attention else 1)  # a and b: plain
    assert [n.op.key for n in fused.nodes].count("hadamard") == 1  # of the embedding's rows
    rotated = [n.op for n in fused.nodes if isinstance(n.op, Rotated)]
    assert all(op.quant for op in rotated) and sum(op.keep for op in rotated) == 3  # layers with a and b


def test_products_rotate_their_rows_themselves_and_take_plain_ones_along() -> None:
    graph, weights = build("bonsai-tiny")
    fused = fuse(graph, lambda op, types: isinstance(op, Rotated | RotatedLinear))
    kinds = Counter((node.op.key, node.layer) for node in fused.nodes)
    for layer in (0, 3):
        assert kinds["rotated", layer] == 1 and kinds["rotated_linear", layer] == 3  # gated rows have a maker
    products = [n.op for n in fused.nodes if isinstance(n.op, RotatedLinear)]
    assert sum(op.straight for op in products) == 2 * 3 and {op.epilogue for op in products} == {
        "none",
        "swiglu",
        "add",
    }
    for want, got in zip(*(run(g, weights, [5, 1]) for g in (graph, fused)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_rotations_alone_fuse_to_the_same_bits() -> None:
    graph, weights = build("bonsai-tiny")
    fused = fuse_rotations(graph, lambda op, types: True)
    assert len(fused.nodes) == len(graph.nodes) - 3 * 4 - 1  # two norms and a gate of each layer, the head's norm
    assert len([n for n in fused.nodes if isinstance(n.op, Rotated) and n.op.quant]) == 0
    for want, got in zip(*(run(g, weights, [5, 1]) for g in (graph, fused)), strict=True):
        np.testing.assert_array_equal(got, want)
