"""The delta layers of a round of drafts: verification that keeps its inputs itself, and a fold in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from ninfer.ir.graph import Node, Value
from ninfer.ir.ops.fused import FusedDeltaPeek
from ninfer.ir.ops.fused_rounds import FoldDeltas, FusedDeltaRecord
from ninfer.ir.ops.journal import RingLoad, RingStore
from ninfer.ir.ops.recurrent import CausalConvSilu, GatedDelta
from ninfer.ir.rewriter import Rewriter


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
