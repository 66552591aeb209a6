"""A mixture of experts in the place of the MLP: names of the weights, however a checkpoint divides them."""

from __future__ import annotations

from attrs import frozen

from ninfer.ir.graph import Graph, Rows, Value
from ninfer.ir.ops.elementwise import glu_rows
from ninfer.ir.ops.experts import expert_glu, expert_places, expert_sum, pick_experts
from ninfer.ir.ops.linear import linear, linear_add
from ninfer.models.family import Stored


@frozen
class MoeShape:
    """experts: of a layer; top_k: picked for a token; inner: width of one; shared: width of the one that every token
    uses, 0: there is none. normalise: weights of the picked experts add up to one."""

    experts: int
    top_k: int
    inner: int
    shared: int = 0
    normalise: bool = True


def glu_stacks(w: Stored, p: str, shape: MoeShape, hidden: int) -> tuple[Value, ...]:
    """Gate and up weights of all experts: one stack of both, or one of each.

    Stored as gate_up_proj [E, 2I, H], as gate_proj and up_proj [E, I, H], or as matrices of single experts.
    """
    e, inner = shape.experts, shape.inner
    if w.has(f"{p}0.gate_proj.weight"):
        names = [f"{p}{i}.{part}_proj.weight" for i in range(e) for part in ("gate", "up")]
        pieces = [(Rows(name), inner) for name in names]
        return (w.gathered(f"{p}gate_up_proj", pieces, dict.fromkeys(names, inner), hidden),)
    if w.has(f"{p}gate_proj"):
        return tuple(w.stack(f"{p}{part}_proj", e, inner, hidden) for part in ("gate", "up"))
    return (w.stack(f"{p}gate_up_proj", e, 2 * inner, hidden),)


def down_stack(w: Stored, p: str, shape: MoeShape, hidden: int) -> Value:
    if not w.has(f"{p}0.down_proj.weight"):
        return w.stack(f"{p}down_proj", shape.experts, hidden, shape.inner)
    names = [f"{p}{i}.down_proj.weight" for i in range(shape.experts)]
    return w.gathered(f"{p}down_proj", [(Rows(n), hidden) for n in names], dict.fromkeys(names, hidden), shape.inner)


def places(g: Graph, num: int) -> Value:
    """One table for all layers of a graph."""
    return next((v for v in g.consts if v.name == "experts.places"), None) or expert_places(g, num)


def moe(g: Graph, w: Stored, p: str, h: Value, residual: Value, shape: MoeShape, *, hidden: int) -> Value:
    """residual + experts(h) + sigmoid(shared gate) * shared(h), as Qwen has it."""
    if shape.shared:
        rows = {"gate": shape.experts, "shared_expert.gate_proj": shape.shared, "shared_expert.up_proj": shape.shared}
        router, gate, up = linear(g, h, *(w.matrix(f"{p}{name}.weight", n, hidden) for name, n in rows.items()))
        score = w.row(f"{p}shared_expert_gate.weight", hidden)
        y = glu_rows(g, gate, up, h, score)  # weighed before the product: one number scales a row either way
        residual = linear_add(g, y, w.matrix(f"{p}shared_expert.down_proj.weight", hidden, shape.shared), residual)
    else:
        (router,) = linear(g, h, w.matrix(f"{p}gate.weight", shape.experts, hidden))
    picks = pick_experts(g, router, shape.top_k, normalise=shape.normalise)
    table, e = places(g, shape.experts), f"{p}experts."
    y = expert_glu(g, h, picks[0], table, glu_stacks(w, e, shape, hidden), inner=shape.inner)
    return expert_sum(g, y, picks, table, down_stack(w, e, shape, hidden), outer=hidden, residual=residual)
