"""Qwen3.5 (also 3.6 and 3.8), dense text model: gated attention every few layers, Gated DeltaNet in the others."""

from __future__ import annotations

from functools import reduce
from typing import Any, Self

from attrs import evolve, frozen

from ninfer.errors import ArtifactError
from ninfer.formats.dtypes import F16, F32, DType
from ninfer.formats.kv import KVFormat
from ninfer.ir.graph import Graph, Value
from ninfer.ir.ops.attention import Attention, kv_state, paged_attention, rope
from ninfer.ir.ops.elementwise import sigmoid_mul, take_heads
from ninfer.ir.ops.embed import embed
from ninfer.ir.ops.journal import concat, conv_peek, delta_peek, ring_load, ring_state, ring_store
from ninfer.ir.ops.norm import gated_rms_norm, rms_norm
from ninfer.ir.ops.recurrent import GatedDelta, causal_conv_silu, gated_delta
from ninfer.ir.types import S, TensorType
from ninfer.models import mtp
from ninfer.models.family import Config, Family, Info, ModelSpec, Rounds, Stored, finish, mlp, tap
from ninfer.models.fields import Fields
from ninfer.models.rope import parse_rope
from ninfer.models.rotation import EMBEDDING, parse_rotation

FULL, LINEAR = "full_attention", "linear_attention"


@frozen(kw_only=True)
class Qwen35Spec(ModelSpec):
    """norm_offset: 1 where weights are stored as w - 1, except that of the delta rule's gated norm.

    tiled_out: names of out_proj weights whose columns have the value heads in tiled order.
    """

    layer_types: tuple[str, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int
    norm_offset: float
    mtp_layers: int
    tiled_out: frozenset[str]
    state: DType = F32  # of the delta rule

    def with_f16_state(self) -> Self:
        return evolve(self, state=F16) if self.is_recurrent else super().with_f16_state()

    @property
    def summary(self) -> str:
        full = self.layer_types.count(FULL)
        kinds = f"{self.num_layers - full} delta, {full} attention"
        return f"{self.num_layers} layers ({kinds}) of {self.hidden_size}, vocabulary {self.vocab_size}"

    @property
    def delta(self) -> GatedDelta:
        return GatedDelta(self.key_heads, self.value_heads, self.key_dim, self.value_dim)

    @property
    def tiled_order(self) -> tuple[int, ...]:
        """Value heads, grouped by key head, in tiled order: heads of equal place within their group come together."""
        group = self.value_heads // self.key_heads
        return tuple((t % self.key_heads) * group + t // self.key_heads for t in range(self.value_heads))

    @property
    def num_mtp_layers(self) -> int:
        return self.mtp_layers

    @property
    def is_recurrent(self) -> bool:
        return LINEAR in self.layer_types

    def build(self, info: Info, *, kv: KVFormat, mode: str, rounds: Rounds | None = None) -> Graph:
        if rounds is not None and mode == "fold":
            return self._fold(info, rounds)
        if rounds is not None and mode in ("draft", "draft_logits"):
            return mtp.build(self, info, kv=kv, rounds=rounds, logits=mode == "draft_logits")
        return self._target(info, kv, mode, rounds)

    def _target(self, info: Info, kv: KVFormat, mode: str, rounds: Rounds | None) -> Graph:
        journal_rows = rounds.journal_rows if rounds is not None and mode == "verify" else 0
        g = Graph()
        w = Stored(g, info, self.rotation)
        freqs = self.freqs(g)
        embedding = w.matrix(EMBEDDING, self.vocab_size, self.hidden_size)
        x = self.rotation.embedded(g, embed(g, g.step["tokens"], embedding))
        for i, kind in enumerate(self.layer_types):
            with g.layer(i):
                p = f"model.layers.{i}."
                h = self.norm(g, w, f"{p}input_layernorm.weight", x)
                if kind == FULL:
                    cache = kv_state(g, i, kv, self.num_kv_heads, self.head_dim)
                    x = self.attention(g, w, f"{p}self_attn.", h, x, freqs, cache, kv)
                else:
                    x = self._delta(g, w, f"{p}linear_attn.", i, h, x, journal_rows)
                h = self.norm(g, w, f"{p}post_attention_layernorm.weight", x)
                x = self.feed_forward(g, w, f"{p}mlp.", h, x)
                tap(g, x, i, rounds)
        norm = w.vector("model.norm.weight", self.hidden_size)
        head = embedding if self.tied else w.matrix("lm_head.weight", self.vocab_size, self.hidden_size)
        finish(
            g,
            x,
            norm,
            head,
            eps=self.eps,
            offset=self.norm_offset,
            mode=mode,
            domain=self.domain,
            hidden_rows=0 if rounds is None else rounds.hidden_rows,
            candidates=0 if rounds is None else rounds.candidates,
            rotation=self.rotation,
        )
        return g

    def _fold(self, info: Info, rounds: Rounds) -> Graph:
        """The delta layers' states alone, over rows that a "verify" step has kept."""
        g = Graph()
        w = Stored(g, info)
        for i, kind in enumerate(self.layer_types):
            if kind == LINEAR:
                with g.layer(i):
                    qkv, a, b = (ring_load(g, ring) for ring in self._journal(g, i, rounds.journal_rows))
                    self._recurrence(g, w, f"model.layers.{i}.linear_attn.", i, qkv, a, b, peek=False)
        return g

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def _journal(self, g: Graph, layer: int, rows: int) -> list[Value]:
        """Rings of the recurrence's inputs: qkv before the convolution, a, b."""
        widths = {"qkv": self.channels, "a": self.value_heads, "b": self.value_heads}
        return [ring_state(g, f"journal.{layer}.{name}", rows, width) for name, width in widths.items()]

    def freqs(self, g: Graph) -> Value:
        return g.const("rope.freqs", TensorType((self.rope.rotary_dim // 2,)), self.rope.frequencies())

    def norm(self, g: Graph, w: Stored, name: str, x: Value, size: int | None = None) -> Value:
        weight = w.vector(name, size or self.hidden_size)
        return rms_norm(g, x, weight, eps=self.eps, offset=self.norm_offset)

    def feed_forward(self, g: Graph, w: Stored, p: str, h: Value, residual: Value) -> Value:
        return mlp(g, w, p, h, residual, hidden=self.hidden_size, inner=self.intermediate_size)

    def attention(
        self, g: Graph, w: Stored, p: str, h: Value, residual: Value, freqs: Value, cache: Value, kv: KVFormat
    ) -> Value:
        """q_proj holds query and gate of each head side by side; the gate is neither normed nor rotated."""
        hidden, d = self.hidden_size, self.head_dim
        width, kv_width = self.num_heads * d, self.num_kv_heads * d
        query, gate = (
            w.rows(f"{p}q_proj.weight", part, 2 * width, hidden, start=start, count=d, period=2 * d)
            for part, start in (("query", 0), ("gate", d))
        )
        key, value = (w.matrix(f"{p}{n}_proj.weight", kv_width, hidden) for n in "kv")
        q, k, v, z = w.products(h, query, key, value, gate)
        q, k = self.norm(g, w, f"{p}q_norm.weight", q, d), self.norm(g, w, f"{p}k_norm.weight", k, d)
        q, k = (rope(g, y, freqs, head_dim=d, mscale=self.rope.attention_factor) for y in (q, k))
        op = Attention(kv, self.num_heads, self.num_kv_heads, d, d**-0.5)
        y = sigmoid_mul(g, paged_attention(g, q, k, v, cache, op), z)
        return w.add_product(y, w.matrix(f"{p}o_proj.weight", hidden, width), residual)

    def _delta(self, g: Graph, w: Stored, p: str, layer: int, h: Value, residual: Value, journal_rows: int) -> Value:
        """journal_rows: of a "verify" step, which keeps the inputs and leaves the states; 0: the states move."""
        inner = self.value_heads * self.value_dim
        *parts, z, a, b = w.products(h, *self.delta_inputs(w, p))
        qkv = reduce(lambda left, right: concat(g, left, right), parts)
        if journal_rows:
            for x, ring in zip((qkv, a, b), self._journal(g, layer, journal_rows), strict=True):
                ring_store(g, x, ring)
        y = self._recurrence(g, w, p, layer, qkv, a, b, peek=journal_rows > 0)
        y = gated_rms_norm(g, y, w.vector(f"{p}norm.weight", self.value_dim), z, eps=self.eps)
        out = f"{p}out_proj.weight"
        if out in self.tiled_out:
            y = take_heads(g, y, self.tiled_order, head_dim=self.value_dim)
        return w.add_product(y, w.matrix(out, self.hidden_size, inner), residual)

    def delta_inputs(self, w: Stored, p: str) -> list[Value]:
        """Weights of qkv (in one piece or several), z, a and b."""
        hv = self.value_heads
        qkv = w.matrices(f"{p}in_proj_qkv.weight", self.channels, self.hidden_size)
        rows = {"z": hv * self.value_dim, "a": hv, "b": hv}
        return [*qkv, *(w.matrix(f"{p}in_proj_{n}.weight", count, self.hidden_size) for n, count in rows.items())]

    def _recurrence(
        self, g: Graph, w: Stored, p: str, layer: int, qkv: Value, a: Value, b: Value, *, peek: bool
    ) -> Value:
        """Convolution and delta rule; peek: without moving their states."""
        hv = self.value_heads
        conv = g.state(f"conv.{layer}", TensorType((S, self.channels, self.conv_taps - 1), F32))
        state = g.state(f"delta.{layer}", TensorType((S, hv, self.value_dim, self.key_dim), self.state))
        taps = w.taps(f"{p}conv1d.weight", self.channels, self.conv_taps)
        a_log, dt_bias = w.vector(f"{p}A_log", hv), w.vector(f"{p}dt_bias", hv)
        u = (conv_peek if peek else causal_conv_silu)(g, qkv, taps, conv)
        return (delta_peek if peek else gated_delta)(g, self.delta, u, a, b, a_log, dt_bias, state)


def parse(config: Config) -> Qwen35Spec:
    f = text_fields(config)
    if "num_experts" in f:
        f.fail("num_experts", "but the architecture is the dense one; the config is of two models")
    return Qwen35Spec(**parse_common(f), intermediate_size=f.whole("intermediate_size"))


def text_fields(config: Config) -> Fields:
    """The text model's fields, wherever they stand."""
    outer = Fields(config)
    if "text_config" not in outer:
        return outer
    text = outer.below("text_config")
    tie = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in outer else {}
    return Fields({**text.values, **tie}, text.where)


def parse_common(f: Fields) -> dict[str, Any]:
    """What dense models and those with experts share: arguments of Qwen35Spec."""
    f.must("hidden_act", "silu", why="other activations are not implemented")
    f.must("attention_bias", False, why="projections with a bias are not implemented")
    f.must("attn_output_gate", True, why="the family's attention has a gate")
    f.must("mtp_use_dedicated_embeddings", False, why="the MTP block reads the model's embedding")
    f.must("mamba_ssm_dtype", "float32", why="the recurrent state is kept in float32")
    layers, vocab, head_dim = f.whole("num_hidden_layers"), f.whole("vocab_size"), f.whole("head_dim")
    heads, context = f.whole("num_attention_heads"), f.whole("max_position_embeddings", 32768)
    kv_heads, hk, hv = (
        f.whole("num_key_value_heads"),
        f.whole("linear_num_key_heads"),
        f.whole("linear_num_value_heads"),
    )
    if heads % kv_heads:
        f.fail("num_key_value_heads", f"but must divide num_attention_heads {heads}")
    if hv % hk:
        f.fail("linear_num_key_heads", f"but must divide linear_num_value_heads {hv}")
    rope = parse_rope(f, head_dim, context, rotary_share=0.25)
    _check_mrope(f, rope.rotary_dim)
    return dict(
        num_layers=layers,
        hidden_size=f.whole("hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        domain=vocab,
        context_len=context,
        eps=f.real("rms_norm_eps", 1e-6),
        rope=rope,
        tied=f.flag("tie_word_embeddings", False),
        layer_types=_layer_types(f, layers),
        key_heads=hk,
        value_heads=hv,
        key_dim=f.whole("linear_key_head_dim"),
        value_dim=f.whole("linear_value_head_dim"),
        conv_taps=f.whole("linear_conv_kernel_dim", 4, least=2),
        norm_offset=0.0 if f.flag("norm_plus_one", False) else 1.0,
        mtp_layers=f.whole("mtp_num_hidden_layers", 0, least=0),
        tiled_out=frozenset(f.get("gdn_tiled_out_columns", ())),
        rotation=parse_rotation(f),
    )


def _layer_types(f: Fields, layers: int) -> tuple[str, ...]:
    if "layer_types" not in f:
        interval = f.whole("full_attention_interval", 4)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers))
    kinds = f.get("layer_types")
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        f.fail("layer_types", f"but must be a list of {layers}, one for each of num_hidden_layers")
    unknown = [k for k in kinds if k not in (FULL, LINEAR)]
    if unknown:
        raise ArtifactError(f"{f.where}: layer_types has {unknown[0]!r}; supported are {FULL} and {LINEAR}")
    return tuple(kinds)


def _check_mrope(f: Fields, rotary_dim: int) -> None:
    """Text has equal positions on all axes, so the sections do not matter; but they must fit."""
    rope = f.below("rope_parameters")
    section = rope.get("mrope_section", None)
    whole = isinstance(section, list | tuple) and all(type(n) is int for n in section)
    if section is not None and (not whole or sum(section) != rotary_dim // 2):
        rope.fail("mrope_section", f"but its numbers must add up to {rotary_dim // 2}, half of the rotary dimensions")


FAMILY = Family(
    "qwen3_5",
    ("qwen3_5", "qwen3_5_text"),
    ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    parse,
    rotates=True,
)
