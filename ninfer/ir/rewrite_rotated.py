"""Rotations to one launch with what makes their rows, and products in a rotated basis to products of codes.

    rms_norm | gated_rms_norm | sigmoid_mul | silu_mul -> hadamard        rotated(maker)
    rms_norm -> hadamard -> one of linear | linear_add | linear_swiglu    rotated_linear, where rows are few and short
    hadamard | rotated -> linear | linear_add | linear_swiglu, all        rotated(quant) -> fused_linear(packed)

Where others read the rows too (projections outside of the basis do), they are kept beside the rotated ones; a rotated
linear takes such projections along.
"""

from __future__ import annotations

from attrs import evolve

from ninfer.ir.graph import Kind, Node, Value
from ninfer.ir.ops.hadamard import Hadamard
from ninfer.ir.ops.linear import Linear, LinearAdd, LinearSwiglu
from ninfer.ir.ops.norm import RmsNorm
from ninfer.ir.ops.packed_act import FusedLinear
from ninfer.ir.ops.rotated import MAKERS, Rotated
from ninfer.ir.ops.rotated_linear import RotatedLinear
from ninfer.ir.rewriter import Rewriter

CODE_GROUP = 128  # values that share a scale: rotated ones are much alike
LONGEST = 8192  # values of a row that every block of a product may rotate for itself, rather than one launch for all
EPILOGUES: dict[type, str] = {Linear: "none", LinearAdd: "add", LinearSwiglu: "swiglu"}


def rotations(r: Rewriter) -> None:
    for node in list(r.nodes):
        if isinstance(node.op, Hadamard) and not node.op.inverse:
            _made_and_rotated(r, node)


def _made_and_rotated(r: Rewriter, node: Node) -> None:
    assert isinstance(node.op, Hadamard)
    x, signs = node.args
    maker = r.only_maker(x)
    if maker is None or not isinstance(maker.op, MAKERS) or signs.kind is not Kind.CONST:
        return
    keep = len(r.readers(x)) > 1 or x in r.graph.outputs.values()
    op, outs = Rotated(maker.op, node.op.block, keep), (x, *node.outs) if keep else node.outs
    r.put([maker, node], op, (*maker.args, signs), outs, first=True)  # other readers of x may come before the rotation


def rotated_products(r: Rewriter) -> None:
    for node in list(r.nodes):
        if isinstance(node.op, Rotated) or (isinstance(node.op, Hadamard) and not node.op.inverse):
            _rotated_product(r, node)


def _rotated_product(r: Rewriter, node: Node) -> None:
    *kept, turned = node.outs
    assert isinstance(node.op, Rotated | Hadamard)
    maker = node.op.maker if isinstance(node.op, Rotated) else None
    products = {id(n): n for n in r.readers(turned)}
    beside = {id(n): n for value in kept for n in r.readers(value)}
    if len(products) != 1 or not (maker is None or isinstance(maker, RmsNorm)):
        return
    (product,) = products.values()
    if any(v in r.graph.outputs.values() for v in node.outs) or product.args.count(turned) != 1:
        return
    if type(product.op) not in EPILOGUES or product.args[0] is not turned or turned.type.shape[1:] > (LONGEST,):
        return
    others = list(beside.values())
    if others and not all(type(n.op) is Linear and n.args[0] in kept for n in others):
        return
    if others and type(product.op) is not Linear:
        return
    straight = [w for n in others for w in n.args[1:]]
    op = RotatedLinear(epilogue=EPILOGUES[type(product.op)], block=node.op.block, straight=len(straight))
    if maker is not None:
        op = evolve(op, norm=True, eps=maker.eps, offset=maker.offset)
    outs = (*product.outs, *(o for n in others for o in n.outs))
    args, old = (*node.args, *product.args[1:], *straight), [node, product, *others]
    place = [r.nodes.index(n) for n in old]
    read = min((r.nodes.index(n) for o in outs for n in r.readers(o)), default=len(r.nodes))
    made = max((r.nodes.index(n) for a in args if (n := r.maker(a)) is not None), default=-1)
    if max(place) < read or made < min(place):
        r.put(old, op, args, outs, first=max(place) > read)


def coded_rotations(r: Rewriter) -> None:
    for node in list(r.nodes):
        if isinstance(node.op, Rotated) or (isinstance(node.op, Hadamard) and not node.op.inverse):
            _coded(r, node)


def _coded(r: Rewriter, node: Node) -> None:
    *kept, turned = node.outs
    rotated = node.op if isinstance(node.op, Rotated) else None
    if rotated is None:
        assert isinstance(node.op, Hadamard)
        rotated = Rotated(None, node.op.block)
    products = list({id(n): n for n in r.readers(turned)}.values())
    outside = turned in r.graph.outputs.values()
    if outside or not all(type(n.op) in EPILOGUES and list(n.args).index(turned) == 0 for n in products):
        return
    if rotated.block % CODE_GROUP or any(n.args.count(turned) > 1 for n in products):
        return
    op = evolve(rotated, quant=CODE_GROUP)
    types = op.infer(tuple(a.type for a in node.args))[-2:]
    named = zip(("codes", "d"), types, strict=True)
    codes = tuple(Value(f"{turned.name}.{part}", t, Kind.NODE, turned.layer) for part, t in named)
    coded = [
        (n, FusedLinear(packed=CODE_GROUP, epilogue=EPILOGUES[type(n.op)]), (*codes, *n.args[1:])) for n in products
    ]
    if not all(r.accepts(product, tuple(a.type for a in args)) for _, product, args in coded):
        return
    if r.put([node], op, node.args, (*kept, *codes)):
        for n, product, args in coded:
            r.put([n], product, args, n.outs)
