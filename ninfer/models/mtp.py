"""The multi-token-prediction block: one layer that drafts the token after next.

Row t reads the target's final hidden value of position t and the token at t + 1, and predicts the token at t + 2. Its
keys lie at position t of a cache of its own. It stores its output as the hidden value of position t + 1: so the next
draft is one more row, with the drafted token, at position t + 1; the target overwrites it with its own value when it
comes there. Rows of accepted positions are run again with the target's hidden values before new drafts are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ninfer.formats.kv import KVFormat
from ninfer.ir.graph import Graph
from ninfer.ir.ops.attention import kv_state
from ninfer.ir.ops.embed import embed, take_rows
from ninfer.ir.ops.journal import argmax, concat, ring_load, ring_store
from ninfer.ir.ops.linear import linear
from ninfer.models.family import Info, Rounds, Stored, hidden_ring
from ninfer.models.proposal import draft_scores

if TYPE_CHECKING:
    from ninfer.models.qwen3_5 import Qwen35Spec


def build(spec: Qwen35Spec, info: Info, *, kv: KVFormat, rounds: Rounds, logits: bool) -> Graph:
    """Output `draft`: the likeliest token at each logit row; or, with `logits`, the logits and all hidden values."""
    g = Graph()
    w = Stored(g, info, spec.rotation)
    hidden, freqs = spec.hidden_size, spec.freqs(g)
    embedding = w.matrix("model.embed_tokens.weight", spec.vocab_size, hidden)
    ring = hidden_ring(g, hidden, rounds.hidden_rows)
    rows = spec.rotation.embedded(g, embed(g, g.step["tokens"], embedding))
    with g.layer(spec.num_layers):
        token = spec.norm(g, w, "mtp.pre_fc_norm_embedding.weight", rows)
        past = spec.norm(g, w, "mtp.pre_fc_norm_hidden.weight", ring_load(g, ring))
        (x,) = linear(g, concat(g, token, past), w.matrix("mtp.fc.weight", hidden, 2 * hidden))
        p = "mtp.layers.0."
        cache = kv_state(g, spec.num_layers, kv, spec.num_kv_heads, spec.head_dim)
        h = spec.norm(g, w, f"{p}input_layernorm.weight", x)
        x = spec.attention(g, w, f"{p}self_attn.", h, x, freqs, cache, kv)
        h = spec.norm(g, w, f"{p}post_attention_layernorm.weight", x)
        x = spec.feed_forward(g, w, f"{p}mlp.", h, x)
        x = spec.norm(g, w, "mtp.norm.weight", x)
        ring_store(g, x, ring, ahead=1)
    scores = draft_scores(w, spec, take_rows(g, x, g.step["logit_rows"]))
    if logits:
        g.outputs.update(logits=scores, hidden=x)
    else:
        g.outputs["draft"] = argmax(g, scores, domain=spec.domain)
    return g
