"""Experts from the router's scores to the sum as one op, with the branch beside them: the first of `ir/rewrites.py`.

pick_experts, expert_glu, expert_sum                                  fused_experts
glu_rows, linear_add before them (Qwen's shared expert)               beside "joined"
gelu_mul, linear, joined with them afterwards (Gemma's dense MLP)     beside "own"
rms_norm, read by these and the router's product only                 norm of both
join_norms -> linear                                                  join_linear
linear_add -> fused_linear(norm) of scores, gate and up -> experts    scored_add, and gate and up with the experts
"""

from __future__ import annotations

from attrs import evolve

from ninfer.ir.graph import Kind, Node, Value
from ninfer.ir.ops.elementwise import GeluMul, GluRows
from ninfer.ir.ops.experts import ExpertGlu, ExpertSum, PickExperts
from ninfer.ir.ops.fused_experts import FusedExperts
from ninfer.ir.ops.join import JoinNorms
from ninfer.ir.ops.join_linear import JoinLinear
from ninfer.ir.ops.linear import Linear, LinearAdd
from ninfer.ir.ops.norm import RmsNorm
from ninfer.ir.ops.packed_act import FusedLinear
from ninfer.ir.ops.scored_add import PART, ScoredAdd
from ninfer.ir.rewriter import Rewriter


def experts(r: Rewriter) -> None:
    for node in list(r.nodes):
        if isinstance(node.op, ExpertSum):
            _experts(r, node)
    for node in list(r.nodes):
        if isinstance(node.op, JoinNorms) and node.op.two:
            _beside(r, node)


def _only(r: Rewriter, value: Value, nodes: list[Node]) -> bool:
    """Whether nothing but these nodes reads it."""
    return value not in r.graph.outputs.values() and all(any(n is o for o in nodes) for n in r.readers(value))


def _experts(r: Rewriter, node: Node) -> None:
    h, ids, weights, places, down, *residual = node.args
    glu, pick = r.made_by(h, ExpertGlu), r.maker(ids)
    if glu is None or pick is None or glu.args[1:3] != (ids, places) or pick.outs != (ids, weights):
        return
    assert isinstance(node.op, ExpertSum) and isinstance(glu.op, ExpertGlu) and isinstance(pick.op, PickExperts)
    if not _only(r, ids, [glu, node]) or not _only(r, weights, [node]):
        return
    x, logits, scale, stacks = glu.args[0], pick.args[0], pick.args[1:], glu.args[3:]
    old, dense, score = [pick, glu, node], tuple[Value, ...](), tuple[Value, ...]()
    add = r.made_by(residual[0], LinearAdd) if residual else None
    rows = r.made_by(add.args[0], GluRows) if add else None
    if add and rows and rows.args[2] is x and glu.op.act == "silu":
        dense, score, residual = (*rows.args[:2], add.args[1]), rows.args[3:], [add.args[2]]
        old += [rows, add]
    op = FusedExperts(
        pick.op, glu.op, node.op, len(stacks), scaled=bool(scale), beside="joined" if dense else "",
        gated=bool(score), residual=bool(residual),
    )  # fmt: skip
    norm, router = r.maker(x), r.maker(logits)
    if norm and isinstance(norm.op, RmsNorm) and norm.args[1].type.shape == x.type.shape[1:] and router:
        alone = isinstance(router.op, Linear) and router.args[0] is x and _only(r, x, [*old, router])
        product = FusedLinear(norm=True, eps=norm.op.eps, offset=norm.op.offset)
        normed = evolve(op, norm=True, eps=norm.op.eps, offset=norm.op.offset)
        source, weight = norm.args
        args = (source, logits, places, *stacks, down, *scale, weight, *dense, *score, *residual)
        alone = alone and r.accepts(normed, tuple(a.type for a in args))
        if alone and r.put([norm, router], product, (source, weight, *router.args[1:]), router.outs):
            r.put(old, normed, args, node.outs)
            return
    r.put(old, op, (x, logits, places, *stacks, down, *scale, *dense, *score, *residual), node.outs)


def _beside(r: Rewriter, join: Node) -> None:
    """The other branch of a join ends in a product of gated values."""
    for branch, own in ((join.args[1], join.args[3]), (join.args[3], join.args[1])):
        node, product = r.made_by(own, FusedExperts), r.made_by(branch, Linear)
        glu = r.made_by(product.args[0], GeluMul) if product else None
        if node is None or product is None or glu is None:
            continue
        assert isinstance(node.op, FusedExperts)
        if node.op.glu.act == "gelu_tanh" and not node.op.beside and not node.op.residual:
            args = (*node.args, *glu.args, product.args[1])
            r.put([glu, product, node], evolve(node.op, beside="own"), args, (own, branch))
            return


def joins(r: Rewriter) -> None:
    """Products of a join's norms that nothing else reads go with it."""
    for node in list(r.nodes):
        if isinstance(node.op, JoinNorms):
            _products(r, node)


def _products(r: Rewriter, join: Node) -> None:
    assert isinstance(join.op, JoinNorms)
    y, *norms = join.outs
    readers = [r.only_reader(norm, Linear) for norm in norms]
    readers = [n if n is not None and n.args[0] is norm else None for n, norm in zip(readers, norms, strict=True)]
    found = [n for n in readers if n is not None]
    op = JoinLinear(join.op, tuple(0 if n is None else len(n.args) - 1 for n in readers))
    args = (*join.args, *(w for n in found for w in n.args[1:]))
    outs = [y]
    for norm, n in zip(norms, readers, strict=True):
        outs += [norm] if n is None else n.outs
    if found:
        r.put([join, *found], op, args, outs, first=True)


def scored(r: Rewriter) -> None:
    """The router's scores come with the sum that its norm reads, and the branch beside does its own products."""
    for node in list(r.nodes):
        if isinstance(node.op, FusedExperts) and node.op.norm and node.op.gated and not node.op.parts:
            _scored(r, node)


def _scored(r: Rewriter, node: Node) -> None:
    assert isinstance(node.op, FusedExperts)
    roles, (x, logits) = node.op.roles, node.args[:2]
    router, maker = r.maker(logits), r.maker(x)
    if router is None or maker is None or roles.dense is None or roles.norm is None:
        return
    gate, up, _ = roles.dense
    outs, n = (logits, node.args[gate], node.args[up]), x.type.shape[1]
    add, product = maker.op, router.op
    if not isinstance(add, FusedLinear) or not isinstance(product, FusedLinear) or router.outs != outs:
        return
    if add != FusedLinear(packed=add.packed, epilogue="add") or product.packed or not product.norm:
        return
    if any(not _only(r, v, [node]) for v in outs) or router.args[:2] != (x, node.args[roles.norm]):
        return
    if not add.packed or not isinstance(n, int) or n % PART:
        return
    op = ScoredAdd(add.packed, product.offset)
    weight, scores, *wide = router.args[1:]
    given = (*maker.args, weight, scores)
    if not r.accepts(op, tuple(a.type for a in given)):
        return
    sums = op.infer(tuple(a.type for a in given))[1]
    made = Value(f"{logits.name}.parts", sums, Kind.NODE, logits.layer)
    args = list(node.args)
    args[1], args[gate], args[up] = made, *wide
    if r.put([router, node], evolve(node.op, parts=n // PART), args, node.outs):
        r.put([maker], op, given, (x, made))
