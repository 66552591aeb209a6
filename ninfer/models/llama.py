"""Llama and models of its shape (SmolLM2): pre-norm, rotary grouped-query attention, SwiGLU."""

from __future__ import annotations

from attrs import frozen

from ninfer.errors import ArtifactError
from ninfer.formats.kv import KVFormat
from ninfer.ir.graph import Graph, Value
from ninfer.ir.ops.attention import Attention, kv_state, paged_attention, rope
from ninfer.ir.ops.embed import embed
from ninfer.ir.ops.linear import linear, linear_add
from ninfer.ir.ops.norm import rms_norm
from ninfer.ir.types import TensorType
from ninfer.models.family import Config, Family, Info, ModelSpec, Rounds, Stored, finish, mlp
from ninfer.models.fields import Fields
from ninfer.models.rope import parse_rope

NO_BIAS = "projections with a bias are not implemented; use a model without"


@frozen(kw_only=True)
class LlamaSpec(ModelSpec):
    def build(self, info: Info, *, kv: KVFormat, mode: str, rounds: Rounds | None = None) -> Graph:
        if mode == "fold":
            return Graph()  # there is no recurrent state
        g = Graph()
        w = Stored(g, info)
        freqs = g.const("rope.freqs", TensorType((self.rope.rotary_dim // 2,)), self.rope.frequencies())
        embedding = w.matrix("model.embed_tokens.weight", self.vocab_size, self.hidden_size)
        x = embed(g, g.step["tokens"], embedding)
        for i in range(self.num_layers):
            with g.layer(i):
                x = self._layer(g, w, i, x, freqs, kv)
        norm = w.vector("model.norm.weight", self.hidden_size)
        head = embedding if self.tied else w.matrix("lm_head.weight", self.vocab_size, self.hidden_size)
        rows = 0 if rounds is None else rounds.hidden_rows
        finish(g, x, norm, head, eps=self.eps, offset=0.0, mode=mode, domain=self.domain, hidden_rows=rows)
        return g

    def _layer(self, g: Graph, w: Stored, i: int, x: Value, freqs: Value, kv: KVFormat) -> Value:
        p, hidden, d = f"model.layers.{i}.", self.hidden_size, self.head_dim
        widths = {"q": self.num_heads * d, "k": self.num_kv_heads * d, "v": self.num_kv_heads * d}
        h = rms_norm(g, x, w.vector(f"{p}input_layernorm.weight", hidden), eps=self.eps)
        weights = [w.matrix(f"{p}self_attn.{n}_proj.weight", width, hidden) for n, width in widths.items()]
        q, k, v = linear(g, h, *weights)
        q, k = (rope(g, y, freqs, head_dim=d, mscale=self.rope.attention_factor) for y in (q, k))
        attention = Attention(kv, self.num_heads, self.num_kv_heads, d, d**-0.5)
        y = paged_attention(g, q, k, v, kv_state(g, i, kv, self.num_kv_heads, d), attention)
        x = linear_add(g, y, w.matrix(f"{p}self_attn.o_proj.weight", hidden, widths["q"]), x)
        h = rms_norm(g, x, w.vector(f"{p}post_attention_layernorm.weight", hidden), eps=self.eps)
        return mlp(g, w, f"{p}mlp.", h, x, hidden=hidden, inner=self.intermediate_size)


def parse(config: Config) -> LlamaSpec:
    f = Fields(config)
    f.must("hidden_act", "silu", why="other activations are not implemented")
    f.must("attention_bias", False, why=NO_BIAS)
    f.must("mlp_bias", False, why=NO_BIAS)
    hidden, heads = f.whole("hidden_size"), f.whole("num_attention_heads")
    kv_heads, context = f.whole("num_key_value_heads", heads), f.whole("max_position_embeddings", 2048)
    if heads % kv_heads:
        f.fail("num_key_value_heads", f"but must divide num_attention_heads {heads}")
    if "head_dim" not in f and hidden % heads:
        raise ArtifactError(f"config: hidden_size {hidden} does not divide into {heads} heads, and head_dim is missing")
    head_dim, vocab = f.whole("head_dim", hidden // heads), f.whole("vocab_size")
    return LlamaSpec(
        num_layers=f.whole("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=f.whole("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        domain=vocab,
        context_len=context,
        eps=f.real("rms_norm_eps", 1e-6),
        rope=parse_rope(f, head_dim, context),
        tied=f.flag("tie_word_embeddings", False),
    )


FAMILY = Family("llama", ("llama",), ("LlamaForCausalLM",), parse)
