"""What a round of drafts has beside a step: delta layers that keep their inputs and fold in one launch, and what stands
before and after a drafter's block.

    ring_store of what a fused_delta_peek reads                           fused_delta_record
    ring_load, causal_conv_silu, gated_delta, nothing reading, all layers fold_deltas
    rms_norm | rms_norm of ring_load -> concat                            draft_input
    rms_norm -> ring_store and take_rows                                  keep_normed
    pick_columns -> argmax                                                argmax_picked
    draft_input | keep_normed -> linear, nothing else reading             codes between them: quant, packed
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from ninfer.ir.graph import Kind, Node, Value
from ninfer.ir.ops.embed import TakeRows
from ninfer.ir.ops.fused import FusedDeltaPeek
from ninfer.ir.ops.fused_draft import ArgmaxPicked, DraftInput, KeepNormed
from ninfer.ir.ops.fused_rounds import FoldDeltas, FusedDeltaRecord
from ninfer.ir.ops.journal import Argmax, Concat, PickColumns, RingLoad, RingStore
from ninfer.ir.ops.linear import Linear
from ninfer.ir.ops.norm import RmsNorm
from ninfer.ir.ops.packed_act import FusedLinear
from ninfer.ir.ops.recurrent import CausalConvSilu, GatedDelta
from ninfer.ir.rewriter import GROUP, Rewriter


def record(r: Rewriter) -> None:
    """Rings that are filled with what a FusedDeltaPeek reads are filled by it."""
    for node in list(r.nodes):
        op = node.op
        if not isinstance(op, FusedDeltaPeek):
            continue
        seqs, stores = node.args[10:14], list[Node]()
        for x in (node.args[i] for i in (0, 3, 4)):
            stores += [n for n in r.readers(x) if isinstance(n.op, RingStore) and _same_rows(n, seqs)][:1]
        if len(stores) == 3 and not any(s.op.ahead for s in stores if isinstance(s.op, RingStore)):
            kind = FusedDeltaRecord(op.key_heads, op.value_heads, op.key_dim, op.value_dim, op.eps, op.quant)
            r.put([node, *stores], kind, (*node.args, *(s.args[1] for s in stores)), node.outs)


def fold_at_once(r: Rewriter) -> None:
    """Recurrences over rows from rings, whose results nothing reads, become one op for all layers."""
    found: dict[tuple[object, ...], list[tuple[list[Node], tuple[Value, ...]]]] = {}
    for node in r.nodes:
        layer = _folded(r, node)
        if layer is not None:
            nodes, args, seqs = layer
            found.setdefault((node.op, *(a.type for a in args), *seqs), []).append((nodes, args))
    for (op, *_), layers in found.items():
        assert isinstance(op, GatedDelta)
        fold = FoldDeltas(op.key_heads, op.value_heads, op.key_dim, op.value_dim)
        last = layers[-1][0][-1]
        seqs = last.args[6:]
        every = [a for _, own in layers for a in own]
        r.put([n for nodes, _ in layers for n in nodes], evolve(fold, layers=len(layers)), (*every, *seqs), ())


def _folded(r: Rewriter, node: Node) -> tuple[list[Node], tuple[Value, ...], Sequence[Value]] | None:
    """Of a layer: its nodes, the delta rule's last; arguments of FoldDeltas but for the sequences; these."""
    if type(node.op) is not GatedDelta or r.readers(node.outs[0]) or node.outs[0] in r.graph.outputs.values():
        return None
    u, a, b, a_log, dt_bias, state, *seqs = node.args
    conv = r.made_by(u, CausalConvSilu)
    if conv is None or list(conv.args[3:]) != seqs:
        return None
    x, taps, past = conv.args[:3]
    loads = [r.made_by(value, RingLoad) for value in (x, a, b)]
    nodes = [n for n in loads if n is not None and _same_rows(n, seqs)]
    if len(nodes) < 3:
        return None
    rings = (n.args[0] for n in nodes)
    return [*nodes, conv, node], (*rings, taps, past, a_log, dt_bias, state), seqs


def _same_rows(ring_op: Node, seqs: Sequence[Value]) -> bool:
    """Whether the rows of a ring's op are those of a recurrence over these sequences."""
    row_start, _, seq_slot, kv_len = seqs
    return list(ring_op.args[-3:]) == [row_start, seq_slot, kv_len]


def drafter(r: Rewriter, *, codes: bool) -> None:
    """codes: products may take int8 codes."""
    for node in list(r.nodes):
        match node.op:
            case Concat():
                _draft_input(r, node)
            case TakeRows():
                _keep_normed(r, node)
            case Argmax():
                _picked(r, node)
    for node in list(r.nodes):
        if codes and isinstance(node.op, DraftInput | KeepNormed):
            _coded(r, node)


def _draft_input(r: Rewriter, node: Node) -> None:
    norms = [r.made_by(value, RmsNorm) for value in node.args]
    if norms[0] is None or norms[1] is None or norms[0].op != norms[1].op:
        return
    (x, w), (past, v), op = norms[0].args, norms[1].args, norms[0].op
    load = r.made_by(past, RingLoad)
    if load is None or not w.type.shape == v.type.shape == x.type.shape[1:]:
        return
    assert isinstance(op, RmsNorm)
    r.put([norms[0], norms[1], load, node], DraftInput(op.eps, op.offset), (x, w, v, *load.args), node.outs)


def _keep_normed(r: Rewriter, node: Node) -> None:
    """Nothing but the ring and the taken rows reads what the norm makes."""
    h, index = node.args
    norm, readers = r.only_maker(h), r.readers(h)
    store = next((n for n in readers if isinstance(n.op, RingStore)), None)
    if norm is None or not isinstance(norm.op, RmsNorm) or store is None:
        return
    if len(readers) != 2 or h in r.graph.outputs.values():
        return
    (x, w), norm_op, store_op = norm.args, norm.op, store.op
    if w.type.shape != x.type.shape[1:]:
        return
    assert isinstance(norm_op, RmsNorm) and isinstance(store_op, RingStore)
    op = KeepNormed(norm_op.eps, norm_op.offset, store_op.ahead)
    r.put([norm, store, node], op, (x, w, *store.args[1:], index), node.outs)


def _picked(r: Rewriter, node: Node) -> None:
    assert isinstance(node.op, Argmax)
    pick = r.made_by(node.args[0], PickColumns)
    if pick is not None:
        r.put([pick, node], ArgmaxPicked(node.op.domain), pick.args, node.outs)


def _coded(r: Rewriter, node: Node) -> None:
    """A product that alone reads the rows takes them as codes."""
    assert isinstance(node.op, DraftInput | KeepNormed)
    (y,), n = node.outs, node.outs[0].type.shape[1]
    product = r.only_reader(y, Linear)
    if product is None or product.args.count(y) > 1 or not isinstance(n, int) or n % (2 * GROUP):
        return
    op, linear = evolve(node.op, quant=GROUP), FusedLinear(packed=GROUP)
    types = op.infer(tuple(a.type for a in node.args))
    codes = tuple(Value(f"{y.name}.{p}", t, Kind.NODE, y.layer) for p, t in zip(("codes", "d"), types, strict=True))
    args = (*codes, *product.args[1:])
    if r.accepts(linear, tuple(a.type for a in args)) and r.put([node], op, node.args, codes):
        r.put([product], linear, args, product.outs)
