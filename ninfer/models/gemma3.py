"""Gemma 3, text: norms before and after each part, sliding windows in five layers of six, q and k normed per head."""

from __future__ import annotations

from math import sqrt
from typing import Any, NoReturn

from attrs import frozen

from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.kv import KVFormat
from ninfer.ir.graph import Graph, Value
from ninfer.ir.ops.attention import Attention, kv_state, paged_attention, rope
from ninfer.ir.ops.embed import embed
from ninfer.ir.ops.join import join_norms
from ninfer.ir.ops.linear import linear
from ninfer.ir.ops.norm import rms_norm
from ninfer.ir.types import TensorType
from ninfer.models.family import Config, Family, Info, ModelSpec, Rounds, Stored, finish, geglu
from ninfer.models.fields import Fields
from ninfer.models.qwen3_5 import text_fields
from ninfer.models.rope import RopeSpec, parse_rope

FULL, SLIDING = "full_attention", "sliding_attention"


@frozen(kw_only=True)
class Gemma3Spec(ModelSpec):
    """rope: of full layers. norm_offset: 1 where weights are stored as w - 1. cap: of the logits, 0: none."""

    layer_types: tuple[str, ...]
    sliding_rope: RopeSpec
    window: int
    scale: float
    norm_offset: float
    cap: float

    @property
    def summary(self) -> str:
        full = self.layer_types.count(FULL)
        kinds = f"{self.num_layers - full} sliding over {self.window}, {full} full"
        return f"{self.num_layers} layers ({kinds}) of {self.hidden_size}, vocabulary {self.vocab_size}"

    def with_yarn(self, factor: float) -> NoReturn:
        raise UsageError(f"--rope-yarn {factor:g}: not for models with sliding windows, which have two kinds of rope")

    def build(self, info: Info, *, kv: KVFormat, mode: str, rounds: Rounds | None = None) -> Graph:
        if mode == "fold":
            return Graph()  # there is no recurrent state
        g = Graph()
        w = Stored(g, info)
        freqs = {
            kind: g.const(f"rope.freqs.{kind}", TensorType((r.rotary_dim // 2,)), r.frequencies())
            for kind, r in ((FULL, self.rope), (SLIDING, self.sliding_rope))
        }
        embedding = w.matrix("model.embed_tokens.weight", self.vocab_size, self.hidden_size)
        x = embed(g, g.step["tokens"], embedding, scale=sqrt(self.hidden_size))
        with g.layer(0):
            h = self._norm(g, w, "model.layers.0.input_layernorm.weight", x)
        for i, kind in enumerate(self.layer_types):
            with g.layer(i):
                p = f"model.layers.{i}."
                h = self._attention(g, w, p, i, h, freqs[kind], kv)
                x, h = self._join(g, w, x, h, f"{p}post_attention", f"{p}pre_feedforward")
                h = geglu(g, w, f"{p}mlp.", h, hidden=self.hidden_size, inner=self.intermediate_size)
                last = i + 1 == self.num_layers
                after = None if last else f"model.layers.{i + 1}.input"
                x, h = self._join(g, w, x, h, f"{p}post_feedforward", after)
        norm = w.vector("model.norm.weight", self.hidden_size)
        head = embedding if self.tied else w.matrix("lm_head.weight", self.vocab_size, self.hidden_size)
        rows = 0 if rounds is None else rounds.hidden_rows
        finish(
            g,
            x,
            norm,
            head,
            eps=self.eps,
            offset=self.norm_offset,
            mode=mode,
            domain=self.domain,
            hidden_rows=rows,
            cap=self.cap,
        )
        return g

    def _join(self, g: Graph, w: Stored, x: Value, h: Value, before: str, after: str | None) -> tuple[Value, Value]:
        """x + norm(h), and its norm for what follows. before, after: names of the norms; None: nothing follows."""
        weight, *following = (w.vector(f"{n}_layernorm.weight", self.hidden_size) for n in (before, after) if n)
        y = join_norms(g, x, [(h, weight)], eps=self.eps, offset=self.norm_offset, following=following)
        return y[0], y[-1]

    def _norm(self, g: Graph, w: Stored, name: str, x: Value, size: int | None = None) -> Value:
        return rms_norm(g, x, w.vector(name, size or self.hidden_size), eps=self.eps, offset=self.norm_offset)

    def _attention(self, g: Graph, w: Stored, p: str, i: int, h: Value, freqs: Value, kv: KVFormat) -> Value:
        d, p = self.head_dim, f"{p}self_attn."
        widths = {"q": self.num_heads * d, "k": self.num_kv_heads * d, "v": self.num_kv_heads * d}
        q, k, v = linear(
            g, h, *(w.matrix(f"{p}{n}_proj.weight", n_rows, self.hidden_size) for n, n_rows in widths.items())
        )
        q, k = (self._norm(g, w, f"{p}{n}_norm.weight", y, d) for n, y in (("q", q), ("k", k)))
        kind = self.rope if self.layer_types[i] == FULL else self.sliding_rope
        q, k = (rope(g, y, freqs, head_dim=d, mscale=kind.attention_factor) for y in (q, k))
        window = None if self.layer_types[i] == FULL else self.window
        op = Attention(kv, self.num_heads, self.num_kv_heads, d, self.scale, window)
        y = paged_attention(g, q, k, v, kv_state(g, i, kv, self.num_kv_heads, d), op)
        (y,) = linear(g, y, w.matrix(f"{p}o_proj.weight", self.hidden_size, widths["q"]))
        return y


def layer_kinds(f: Fields, layers: int, pattern: int) -> tuple[str, ...]:
    """Sliding or full; by default every `pattern`th layer is full."""
    if "layer_types" not in f:
        return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(layers))
    kinds = f.get("layer_types")
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        f.fail("layer_types", f"but must be a list of {layers}, one for each of num_hidden_layers")
    unknown = [k for k in kinds if k not in (FULL, SLIDING)]
    if unknown:
        raise ArtifactError(f"{f.where}: layer_types has {unknown[0]!r}; supported are {FULL} and {SLIDING}")
    return tuple(kinds)


def rope_of(f: Fields, kind: str, old: dict[str, Any]) -> Fields:
    """The rope parameters of a kind of layer as fields of their own. old: what older files mean."""
    both = f.below("rope_parameters")
    if kind not in both:
        return Fields(old, f.where)
    values = both.below(kind)
    return Fields({"rope_parameters": values.values}, both.where)


def parse(config: Config) -> Gemma3Spec:
    f = text_fields(config)
    f.must("hidden_activation", "gelu_pytorch_tanh", why="other activations are not implemented")
    f.must("attention_bias", False, why="projections with a bias are not implemented")
    f.must("attn_logit_softcapping", None, why="attention scores are not capped")
    f.must("use_bidirectional_attention", False, why="the text model is causal")
    layers, heads, kv_heads = (
        f.whole("num_hidden_layers", 26),
        f.whole("num_attention_heads", 8),
        f.whole("num_key_value_heads", 4),
    )
    if heads % kv_heads:
        f.fail("num_key_value_heads", f"but must divide num_attention_heads {heads}")
    head_dim, vocab = f.whole("head_dim", 256), f.whole("vocab_size", 262208)
    context = f.whole("max_position_embeddings", 131072)
    full = {k: f.get(k) for k in ("rope_scaling", "rope_parameters") if k in f} | {
        "rope_theta": f.real("rope_theta", 1e6)
    }
    sliding = {"rope_theta": f.real("rope_local_base_freq", 10000.0)}
    return Gemma3Spec(
        num_layers=layers,
        hidden_size=f.whole("hidden_size", 2304),
        intermediate_size=f.whole("intermediate_size", 9216),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        domain=vocab,
        context_len=context,
        eps=f.real("rms_norm_eps", 1e-6),
        rope=parse_rope(rope_of(f, FULL, full), head_dim, context),
        tied=f.flag("tie_word_embeddings", True),
        layer_types=layer_kinds(f, layers, f.whole("sliding_window_pattern", 6)),
        sliding_rope=parse_rope(rope_of(f, SLIDING, sliding), head_dim, context),
        window=f.whole("sliding_window", 4096),
        scale=f.real("query_pre_attn_scalar", 256.0) ** -0.5,
        norm_offset=0.0 if f.flag("norm_plus_one", False) else 1.0,
        cap=f.real("final_logit_softcapping", 0.0, above=-1.0),
    )


FAMILY = Family("gemma3", ("gemma3", "gemma3_text"), ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), parse)
