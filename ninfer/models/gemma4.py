"""Gemma 4, text (26B-A4B, 31B): sliding and full layers with heads of other sizes; experts beside the dense MLP.

Full layers have no values of their own: the keys' projection, normed without a weight, is both. The attention has no
scale, since queries and keys are normed.
"""

from __future__ import annotations

from math import sqrt
from typing import Any, NoReturn

import numpy as np
from attrs import frozen

from ninfer.errors import UsageError
from ninfer.formats.kv import KVFormat
from ninfer.ir.graph import Graph, Value
from ninfer.ir.ops.attention import Attention, kv_state, paged_attention, rope
from ninfer.ir.ops.embed import embed
from ninfer.ir.ops.experts import expert_glu, expert_sum, pick_experts
from ninfer.ir.ops.join import join_norms
from ninfer.ir.ops.linear import linear
from ninfer.ir.ops.norm import rms_norm
from ninfer.ir.types import TensorType
from ninfer.models.family import Config, Family, Info, ModelSpec, Rounds, Stored, finish, geglu
from ninfer.models.fields import Fields
from ninfer.models.gemma3 import FULL, SLIDING, layer_kinds, rope_of
from ninfer.models.moe import MoeShape, down_stack, glu_stacks, places
from ninfer.models.qwen3_5 import text_fields
from ninfer.models.rope import RopeSpec, parse_rope

STILL = 1e30  # divides the frequency of pairs that do not turn


@frozen
class Heads:
    """Of a kind of layer. window None: full; shared: values come from the keys' projection."""

    kv_heads: int
    dim: int
    rope: RopeSpec
    window: int | None
    shared: bool = False


@frozen(kw_only=True)
class Gemma4Spec(ModelSpec):
    """head_dim, num_kv_heads and rope: of full layers. mixture: None in dense models."""

    kinds: tuple[Heads, ...]  # of each layer
    mixture: MoeShape | None
    cap: float

    @property
    def summary(self) -> str:
        full, m = sum(k.window is None for k in self.kinds), self.mixture
        kinds = f"{self.num_layers - full} sliding, {full} full" + (f", {m.top_k} of {m.experts} experts" if m else "")
        return f"{self.num_layers} layers ({kinds}) of {self.hidden_size}, vocabulary {self.vocab_size}"

    def with_yarn(self, factor: float) -> NoReturn:
        raise UsageError(f"--rope-yarn {factor:g}: not for models with sliding windows, which have two kinds of rope")

    def build(self, info: Info, *, kv: KVFormat, mode: str, rounds: Rounds | None = None) -> Graph:
        if mode == "fold":
            return Graph()  # there is no recurrent state
        g = Graph()
        w = Stored(g, info)
        embedding = w.matrix("model.embed_tokens.weight", self.vocab_size, self.hidden_size)
        x = embed(g, g.step["tokens"], embedding, scale=sqrt(self.hidden_size))
        with g.layer(0):
            h = self._norm(g, w, "model.layers.0.input_layernorm.weight", x)
        for i, kind in enumerate(self.kinds):
            with g.layer(i):
                x, h = self._layer(g, w, i, kind, x, h, kv)
        norm = w.vector("model.norm.weight", self.hidden_size)
        head = embedding if self.tied else w.matrix("lm_head.weight", self.vocab_size, self.hidden_size)
        rows = 0 if rounds is None else rounds.hidden_rows
        finish(
            g, x, norm, head, eps=self.eps, offset=0.0, mode=mode, domain=self.domain, hidden_rows=rows, cap=self.cap
        )
        return g

    def _layer(self, g: Graph, w: Stored, i: int, kind: Heads, x: Value, h: Value, kv: KVFormat) -> tuple[Value, Value]:
        """x: the residual; h: its norm. Returns both of the next layer; after the last there is no norm to make."""
        p, m, hidden = f"model.layers.{i}.", self.mixture, self.hidden_size

        def weight(name: str) -> Value:
            return w.vector(f"{p}{name}", hidden)

        h = self._attention(g, w, p, i, kind, h, kv)
        following = [weight("pre_feedforward_layernorm.weight")]
        if m is not None:
            following += [weight("router.scale"), weight("pre_feedforward_layernorm_2.weight")]
        after = (h, weight("post_attention_layernorm.weight"))
        x, h, *more = join_norms(g, x, [after], eps=self.eps, following=following)
        h = geglu(g, w, f"{p}mlp.", h, hidden=hidden, inner=self.intermediate_size)
        outer = weight("post_feedforward_layernorm.weight")
        branches = [(h, outer)]
        if m is not None:
            experts = self._experts(g, w, p, m, *more)
            first, second = (weight(f"post_feedforward_layernorm_{n}.weight") for n in (1, 2))
            branches = [(h, first), (experts, second)]
        last = i + 1 == self.num_layers
        following = [] if last else [w.vector(f"model.layers.{i + 1}.input_layernorm.weight", hidden)]
        scale = w.vector(f"{p}layer_scalar", 1)
        x, *rest = join_norms(g, x, branches, eps=self.eps, outer=outer, scale=scale, following=following)
        return x, rest[0] if rest else x

    def _norm(self, g: Graph, w: Stored, name: str, x: Value, size: int | None = None) -> Value:
        return rms_norm(g, x, w.vector(name, size or self.hidden_size), eps=self.eps)

    def _plain_norm(self, g: Graph, x: Value, size: int) -> Value:
        """Without a weight."""
        ones = _const(g, f"ones.{size}", np.ones(size, np.float32))
        return rms_norm(g, x, ones, eps=self.eps)

    def _attention(self, g: Graph, w: Stored, p: str, i: int, kind: Heads, h: Value, kv: KVFormat) -> Value:
        d, p = kind.dim, f"{p}self_attn."
        widths = {"q": self.num_heads * d, "k": kind.kv_heads * d, "v": kind.kv_heads * d}
        if kind.shared:
            del widths["v"]
        q, k, *v = linear(
            g, h, *(w.matrix(f"{p}{n}_proj.weight", n_rows, self.hidden_size) for n, n_rows in widths.items())
        )
        value = self._plain_norm(g, v[0] if v else k, d)
        q, k = (self._norm(g, w, f"{p}{n}_norm.weight", y, d) for n, y in (("q", q), ("k", k)))
        freqs = _const(g, f"rope.freqs.{FULL if kind.window is None else SLIDING}", kind.rope.frequencies())
        q, k = (rope(g, y, freqs, head_dim=d) for y in (q, k))
        op = Attention(kv, self.num_heads, kind.kv_heads, d, 1.0, kind.window)
        y = paged_attention(g, q, k, value, kv_state(g, i, kv, kind.kv_heads, d), op)
        (y,) = linear(g, y, w.matrix(f"{p}o_proj.weight", self.hidden_size, widths["q"]))
        return y

    def _experts(self, g: Graph, w: Stored, p: str, m: MoeShape, read: Value, h: Value) -> Value:
        """read: the residual as the router has it; h: as the experts have it."""
        hidden = self.hidden_size
        (router,) = linear(g, read, w.matrix(f"{p}router.proj.weight", m.experts, hidden))
        each = w.vector(f"{p}router.per_expert_scale", m.experts)
        picks = pick_experts(g, router, m.top_k, factor=hidden**-0.5, scale=each)
        table, e = places(g, m.experts), f"{p}experts."
        h = expert_glu(g, h, picks[0], table, glu_stacks(w, e, m, hidden), inner=m.inner, act="gelu_tanh")
        return expert_sum(g, h, picks, table, down_stack(w, e, m, hidden), outer=hidden, residual=None)


def _const(g: Graph, name: str, array: Any) -> Value:
    """One of a name in a graph."""
    found = next((v for v in g.consts if v.name == name), None)
    return found or g.const(name, TensorType(array.shape), array)


def _rope(f: Fields, kind: str, head_dim: int, context: int) -> RopeSpec:
    """Proportional: frequencies over the whole head, of which the first share of pairs turns."""
    fields = rope_of(f, kind, {})
    rope = fields.below("rope_parameters")
    if rope.get("rope_type", "default") == "divided":  # of a GGUF file
        return RopeSpec(
            theta=rope.real("rope_theta"), rotary_dim=head_dim, divisors=f.reals("rope_freq_factors", head_dim // 2)
        )
    if rope.get("rope_type", "default") != "proportional":
        return parse_rope(fields, head_dim, context)
    share = rope.real("partial_rotary_factor", 1.0)
    turning = int(share * head_dim // 2)
    divisors = (1.0,) * turning + (STILL,) * (head_dim // 2 - turning)
    return RopeSpec(theta=rope.real("rope_theta"), rotary_dim=head_dim, divisors=divisors)


def parse(config: Config) -> Gemma4Spec:
    f = text_fields(config)
    f.must("hidden_activation", "gelu_pytorch_tanh", why="other activations are not implemented")
    f.must("attention_bias", False, why="projections with a bias are not implemented")
    f.must("hidden_size_per_layer_input", 0, why="models with embeddings per layer (E2B, E4B) are not implemented")
    f.must("num_kv_shared_layers", 0, why="layers that share a cache are not implemented")
    f.must("use_double_wide_mlp", False, why="layers of another MLP width are not implemented")
    layers, heads, vocab = f.whole("num_hidden_layers"), f.whole("num_attention_heads"), f.whole("vocab_size")
    context, hidden, head_dim = f.whole("max_position_embeddings", 131072), f.whole("hidden_size"), f.whole("head_dim")
    kv_heads, full_dim = f.whole("num_key_value_heads"), f.whole("global_head_dim", head_dim)
    shared = f.flag("attention_k_eq_v", False)
    full_kv = f.whole("num_global_key_value_heads", kv_heads) if shared else kv_heads
    for name, count in (("num_key_value_heads", kv_heads), ("num_global_key_value_heads", full_kv)):
        if heads % count:
            f.fail(name, f"but must divide num_attention_heads {heads}")
    full = Heads(full_kv, full_dim, _rope(f, FULL, full_dim, context), None, shared)
    sliding = Heads(kv_heads, head_dim, _rope(f, SLIDING, head_dim, context), f.whole("sliding_window"))
    kinds = layer_kinds(f, layers, 6)
    mixture = None
    if f.flag("enable_moe_block", False):
        mixture = MoeShape(f.whole("num_experts"), f.whole("top_k_experts"), f.whole("moe_intermediate_size"))
        if mixture.top_k > mixture.experts:
            f.fail("top_k_experts", f"but there are {mixture.experts} experts")
    return Gemma4Spec(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=f.whole("intermediate_size"),
        num_heads=heads,
        num_kv_heads=full_kv,
        head_dim=full_dim,
        vocab_size=vocab,
        domain=vocab,
        context_len=context,
        eps=f.real("rms_norm_eps", 1e-6),
        rope=full.rope,
        tied=f.flag("tie_word_embeddings", True),
        kinds=tuple(full if kind == FULL else sliding for kind in kinds),
        mixture=mixture,
        cap=f.real("final_logit_softcapping", 0.0, above=-1.0),
    )


FAMILY = Family("gemma4", ("gemma4", "gemma4_text"), ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), parse)
