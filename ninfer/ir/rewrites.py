"""Chains of ops to fused ops, where the device has a route for them. A fused graph computes what the graph did.

    rms_norm -> linear | linear_swiglu                                    fused_linear(norm)
    rms_norm, rope, kv_append, attention, sigmoid_mul                     fused_attention
    causal_conv_silu, gated_delta, gated_rms_norm                         fused_delta
    what rounds of drafts have besides                                    rewrite_rounds.py
    any of these -> linear, linear_add, nothing else reading              codes between them: quant, packed
    linear_add -> fused_linear(norm)                                      codes of weighed values, squares: weigh
    what stands before other attention, where values are normed           turn_heads
    experts, from the router's scores to the sum                          fused_experts: rewrite_experts.py
    norm or product -> hadamard -> products                               rotated or within: rewrite_rotated.py

A decode step of a layer is so five launches: projections in, mixer, projection out, gate and up, down.
"""

from __future__ import annotations

from attrs import evolve

from ninfer.ir.graph import Graph, Kind, Node, Value
from ninfer.ir.ops.attention import Attention, KvAppend, Rope
from ninfer.ir.ops.elementwise import SigmoidMul
from ninfer.ir.ops.fused import FusedAttention, FusedDelta, FusedDeltaPeek
from ninfer.ir.ops.fused_experts import FusedExperts
from ninfer.ir.ops.fused_rounds import FusedDeltaRecord
from ninfer.ir.ops.journal import ConvPeek, DeltaPeek
from ninfer.ir.ops.linear import Linear, LinearAdd, LinearSwiglu
from ninfer.ir.ops.norm import GatedRmsNorm, RmsNorm
from ninfer.ir.ops.packed_act import FusedLinear
from ninfer.ir.ops.recurrent import CausalConvSilu, GatedDelta
from ninfer.ir.ops.turn_heads import TurnHeads
from ninfer.ir.rewrite_experts import experts, joins, scored
from ninfer.ir.rewrite_rotated import coded_rotations, rotated_products, rotations
from ninfer.ir.rewrite_rounds import drafter, fold_at_once, record
from ninfer.ir.rewriter import GROUP, Accepts, Rewriter, over


def fuse(graph: Graph, accepts: Accepts, *, codes: bool = True) -> Graph:
    """A graph over the same weights, states and step inputs, with fused nodes.   Leaves the given one as it is.

    codes: int8 codes may pass between ops, where routes quantise activations anyway.
    """
    r = Rewriter(graph, accepts)
    if codes:
        experts(r)
        joins(r)
    for node in graph.nodes:
        match node.op:
            case Attention():
                _attention(r, node)
            case GatedDelta():
                _delta(r, node)
    record(r)
    fold_at_once(r)
    drafter(r, codes=codes)
    for node in list(r.nodes):
        if isinstance(node.op, Linear | LinearSwiglu):
            _normed(r, node)
    for node in list(r.nodes):
        if codes and isinstance(node.op, LinearAdd | Linear):
            _packed(r, node)
    scored(r)
    for node in list(r.nodes):
        if codes and isinstance(node.op, FusedLinear) and node.op.norm and not node.op.packed:
            _weighed(r, node)
    rotations(r)
    if codes:
        rotated_products(r)
        coded_rotations(r)
    return r.done()


def fuse_rotations(graph: Graph, accepts: Accepts) -> Graph:
    """As `fuse`, for devices whose products take rows as they are: what is computed stays the same, bit for bit."""
    r = Rewriter(graph, accepts)
    rotations(r)
    return r.done()


def by_permission(graph: Graph) -> Graph:
    """Products of one activation apart where the file allows them activations of other bits: a launch that reads it for
    all would have to keep to the strictest."""
    nodes = list[Node]()
    for node in graph.nodes:
        weights = node.args[1:] if isinstance(node.op, Linear) else ()
        kinds = list(dict.fromkeys(w.type.least_bits for w in weights))
        if len(kinds) < 2:
            nodes.append(node)
            continue
        for bits in kinds:
            own = [i for i, w in enumerate(weights) if w.type.least_bits == bits]
            args = (node.args[0], *(weights[i] for i in own))
            nodes.append(Node(node.op, args, tuple(node.outs[i] for i in own), node.layer))
    return over(graph, nodes)


def _attention(r: Rewriter, node: Node) -> None:
    attention = node.op
    assert isinstance(attention, Attention)
    q, cache, *paging = node.args
    append = next((n for n in r.readers(cache) if isinstance(n.op, KvAppend) and n.args[2] is cache), None)
    if append is None:
        return
    k, v = append.args[:2]
    rope_q, rope_k = r.made_by(q, Rope), r.made_by(k, Rope)
    if rope_q is None or rope_k is None or rope_q.op != rope_k.op or rope_q.args[1:] != rope_k.args[1:]:
        return
    assert isinstance(rope_q.op, Rope)
    old, norms = [rope_q, rope_k, append, node], list[Value]()
    q, k = rope_q.args[0], rope_k.args[0]
    op = FusedAttention(
        attention.fmt,
        attention.heads,
        attention.kv_heads,
        attention.head_dim,
        attention.scale,
        attention.window,
        rope_q.op.mscale,
    )
    norm_q, norm_k = r.made_by(q, RmsNorm), r.made_by(k, RmsNorm)
    if norm_q is not None and norm_k is not None and norm_q.op == norm_k.op:
        assert isinstance(norm_q.op, RmsNorm)
        if norm_q.args[1].type.shape == norm_k.args[1].type.shape == (attention.head_dim,):
            op = evolve(op, norm=True, eps=norm_q.op.eps, offset=norm_q.op.offset)
            norms = [norm_q.args[1], norm_k.args[1]]
            q, k = norm_q.args[0], norm_k.args[0]
            old += [norm_q, norm_k]
            norm_v = r.made_by(v, RmsNorm)
            if norm_v is not None and norm_v.op == norm_k.op and norm_v.args[1].type == norm_k.args[1].type:
                op, v = evolve(op, norm_v=True), norm_v.args[0]
                norms.append(norm_v.args[1])
                old.append(norm_v)
    (out,) = node.outs
    gate = list[Value]()
    mul = r.only_reader(out, SigmoidMul)
    if mul is not None and mul.args[0] is out:
        op, gate, (out,) = evolve(op, gate=True), [mul.args[1]], mul.outs
        old.append(mul)
    args = (q, k, v, cache, *paging, *rope_q.args[1:], *norms, *gate)
    if not r.put(old, op, args, (out,)) and op.norm_v:  # the attention does not do it itself
        turn = TurnHeads(op.fmt, op.kv_heads, op.head_dim, op.mscale, op.eps, op.offset)
        before = [n for n in old if n is not node and not isinstance(n.op, SigmoidMul)]
        r.put(before, turn, args[:14], rope_q.outs)


def _delta(r: Rewriter, node: Node) -> None:
    delta = node.op
    assert isinstance(delta, GatedDelta)
    peek = isinstance(delta, DeltaPeek)
    u, a, b, a_log, dt_bias, state, *seqs = node.args
    conv, (out,) = r.made_by(u, ConvPeek if peek else CausalConvSilu), node.outs
    norm = r.only_reader(out, GatedRmsNorm)
    if conv is None or norm is None or norm.args[0] is not out or list(conv.args[3:]) != seqs:
        return
    assert isinstance(norm.op, GatedRmsNorm)
    kind = FusedDeltaPeek if peek else FusedDelta
    op = kind(delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, norm.op.eps)
    if norm.args[1].type.shape != (delta.value_dim,):
        return
    x, taps, past = conv.args[:3]
    args = (x, taps, past, a, b, a_log, dt_bias, state, *norm.args[1:], *seqs)
    r.put([conv, node, norm], op, args, norm.outs)


def _normed(r: Rewriter, node: Node) -> None:
    x, *weights = node.args
    norm = r.made_by(x, RmsNorm)
    if norm is None or any(w is x for w in weights) or norm.args[1].type.shape != x.type.shape[1:]:
        return
    assert isinstance(norm.op, RmsNorm)
    epilogue = "swiglu" if isinstance(node.op, LinearSwiglu) else "none"
    op = FusedLinear(norm=True, epilogue=epilogue, eps=norm.op.eps, offset=norm.op.offset)
    r.put([norm, node], op, (*norm.args, *weights), node.outs)


def _packed(r: Rewriter, node: Node) -> None:
    """The producer of a product's x gives codes, which the product takes as they are."""
    x, *rest = node.args
    for kind in (FusedAttention, FusedDelta, FusedDeltaPeek, FusedDeltaRecord, FusedLinear):
        maker = r.made_by(x, kind)
        if maker is None:
            continue
        assert isinstance(maker.op, FusedAttention | FusedDelta | FusedLinear)
        n = x.type.shape[1]
        if not isinstance(n, int) or n % GROUP or maker.op.quant:
            return
        epilogue = "add" if isinstance(node.op, LinearAdd) else "none"
        op, product = evolve(maker.op, quant=GROUP), FusedLinear(packed=GROUP, epilogue=epilogue)
        types = op.infer(tuple(a.type for a in maker.args))
        outs = [Value(f"{x.name}.{part}", t, Kind.NODE, x.layer) for part, t in zip(("codes", "d"), types, strict=True)]
        args = (*outs, *rest)
        if r.accepts(product, tuple(a.type for a in args)) and r.put([maker], op, maker.args, outs):
            r.put([node], product, args, node.outs)
        return


def _weighed(r: Rewriter, node: Node) -> None:
    """The sum that a norm reads comes with codes of its weighed values, and the product normalises its results."""
    assert isinstance(node.op, FusedLinear)
    x, weight, *matrices = node.args
    if any(isinstance(n.op, FusedExperts) and n.args[1] is y for y in node.outs for n in r.readers(y)):
        return  # the router's scores choose: they are of activations as exact as can be
    maker, n = r.only_maker(x), x.type.shape[1]
    if maker is None or not isinstance(n, int) or n % GROUP:
        return
    add = FusedLinear(epilogue="add") if isinstance(maker.op, LinearAdd) else maker.op
    if not isinstance(add, FusedLinear) or add.epilogue != "add" or add.quant or add.weigh:
        return
    add = evolve(add, weigh=GROUP, offset=node.op.offset)
    op, given = evolve(node.op, packed=GROUP, offset=0.0), (*maker.args, weight)
    types = add.infer(tuple(a.type for a in given))[1:]
    named = zip(("codes", "d", "squares"), types, strict=True)
    outs = tuple(Value(f"{x.name}.{part}", t, Kind.NODE, x.layer) for part, t in named)
    args = (*outs, *matrices)
    if r.accepts(op, tuple(a.type for a in args)) and r.put([maker], add, given, (x, *outs)):
        r.put([node], op, args, node.outs)
