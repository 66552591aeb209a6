"""Building graphs: what is refused, and where the message points; and the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from ninfer.errors import ShapeError
from ninfer.formats.quant import by_name
from ninfer.ir.graph import Graph, Kind
from ninfer.ir.interp import interpret
from ninfer.ir.ops.embed import embed, take_rows
from ninfer.ir.ops.journal import RingStore, ring_load, ring_state, ring_store
from ninfer.ir.ops.linear import linear, linear_add
from ninfer.ir.ops.norm import rms_norm
from ninfer.ir.types import TensorType

F32 = by_name("f32")


def test_a_wrong_shape_fails_where_it_is_added() -> None:
    g = Graph()
    x = embed(g, g.step["tokens"], g.matrix("embedding", (8, 16), F32))
    with (
        g.layer(3),
        pytest.raises(ShapeError, match=r"^linear: weight 0 is f32\[4, 12\], .* in layer 3 .*w: f32\[4, 12\]"),
    ):
        linear(g, x, g.matrix("w", (4, 12), F32))
    assert len(g.nodes) == 1, "the refused node is not in the graph"


def test_written_arguments_are_states() -> None:
    g = Graph()
    x = embed(g, g.step["tokens"], g.matrix("embedding", (8, 16), F32))
    ring = g.weight("ring", ring_state(Graph(), "r", 4, 16).type)
    with pytest.raises(ShapeError, match=r"^ring_store: argument 1 \(ring\) is written, so it must be a state"):
        g.add(RingStore(), x, ring, *(g.step[n] for n in ("row_seq", "row_start", "seq_slot", "kv_len")))


def test_a_state_is_declared_once() -> None:
    g = Graph()
    ring_state(g, "r", 4, 16)
    with pytest.raises(ShapeError, match="state r is declared twice"):
        ring_state(g, "r", 4, 16)


def test_layers_tag_what_is_added_inside() -> None:
    g = Graph()
    x = embed(g, g.step["tokens"], g.matrix("embedding", (8, 16), F32))
    with g.layer(0):
        y = rms_norm(g, x, g.weight("n", TensorType((16,))), eps=1e-6)
    z = take_rows(g, y, g.step["logit_rows"])
    assert [node.layer for node in g.nodes] == [None, 0, None]
    assert [v.layer for v in g.weights] == [None, 0] and z.kind is Kind.NODE
    assert [v.name for v in g.inputs_used()] == ["tokens", "logit_rows"]


def test_the_interpreter_runs_nodes_in_order() -> None:
    g = Graph()
    x = embed(g, g.step["tokens"], g.matrix("embedding", (5, 3), F32))
    ring = ring_state(g, "ring", 4, 3)
    before = ring_load(g, ring)
    ring_store(g, x, ring)
    after = ring_load(g, ring)
    g.outputs["sum"] = linear_add(g, after, g.matrix("eye", (3, 3), F32), before)
    table = np.arange(15, dtype=np.float32).reshape(5, 3)
    states = {"ring": np.full((2, 4, 3), 100, np.float32), "page_table": np.zeros((2, 1), np.int32)}
    step = {
        name: np.array(values, np.int32)
        for name, values in {
            "tokens": [4, 1], "row_seq": [0, 0], "row_start": [0], "seq_slot": [1], "kv_len": [3],
        }.items()
    }  # fmt: skip
    seen: list[str] = []
    out = interpret(
        g,
        step=step,
        weights={"embedding": table, "eye": np.eye(3, dtype=np.float32)},
        states=states,
        watch=lambda node, results: seen.append(node.op.key),
    )
    np.testing.assert_array_equal(out["sum"], table[[4, 1]] + 100)
    np.testing.assert_array_equal(states["ring"][1, [3, 0]], table[[4, 1]])
    assert seen == ["embed", "ring_load", "ring_store", "ring_load", "linear_add"]
