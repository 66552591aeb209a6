"""DFlash and DFlash2: drafters that fill a block of positions in one pass, from what the target's layers said before.

The target's outputs of a few layers ("taps") of every final position, projected and normed, give each draft layer a key
and a value there: the context. A block is the last token and K masks at the positions after the context; its rows see
the context and, where a layer is not causal, each other, and each mask proposes the token at its own position. The
keys of a block lie in the cache behind the context until the context takes their places.

DFlash2 adds a convolution along the block before and after attention and MLP, and a selector that walks the candidates
of each position with regard to the one chosen before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from ninfer.errors import ArtifactError
from ninfer.formats.kv import KVFormat
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.ir.graph import Graph, Value
from ninfer.ir.ops.attention import Attention, KvAppend, kv_state, rope
from ninfer.ir.ops.block import BlockAttention, BlockConv, SelectDrafts, block_attention, block_conv
from ninfer.ir.ops.elementwise import add, silu_mul
from ninfer.ir.ops.embed import embed, take_rows
from ninfer.ir.ops.journal import argmax, concat, ring_load
from ninfer.ir.ops.linear import linear, linear_add
from ninfer.ir.ops.norm import rms_norm
from ninfer.ir.ops.reject import keep_proposals
from ninfer.ir.types import TensorType
from ninfer.models.family import Info, ModelSpec, Rounds, Stored, mlp, tap_ring
from ninfer.models.fields import Fields, short
from ninfer.models.proposal import draft_scores
from ninfer.models.rope import MAX_HEAD_DIM, RopeSpec

PREFIX = "drafter/"  # of the drafter's tensors beside the target's
ARCHITECTURES = {"DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2"}
SLIDING, FULL = "sliding_attention", "full_attention"
MAX_LAYERS = 999  # as many as artifacts/drafters.py names
CONTEXT, BLOCK, BLOCK_LOGITS = MODES = ("context", "block", "block_logits")  # of graphs


@frozen(kw_only=True)
class Second:
    """What DFlash2 adds.   rank: of the selector's codebooks."""

    taps: int
    group: int
    rank: int
    count: int


@frozen(kw_only=True)
class DFlashSpec:
    """A drafter's config, checked.   taps: layers of the target, counted from 0. windows, causal: of each layer."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    taps: tuple[int, ...]
    mask_id: int
    block_size: int
    second: Second | None

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    def check(self, target: ModelSpec) -> None:
        """Raises ArtifactError where the drafter is of another target."""
        for what, own, other in (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, target.num_layers),
        ):
            if own != other:
                raise ArtifactError(f"--draft-model: {what} is {own}, but the model has {other}: it drafts for another")


def parse(config: Mapping[str, Any]) -> DFlashSpec:
    """Raises ArtifactError."""
    f = Fields(config)
    names = config.get("architectures")
    first = names[0] if isinstance(names, list | tuple) and names else names
    name = ARCHITECTURES.get(first) if isinstance(first, str) else None
    if name is None:
        known = ", ".join(ARCHITECTURES)
        raise ArtifactError(f"--draft-model: config: {short(first)} is no drafter; known are {known}")
    f.must("hidden_act", "silu", why="other activations are not implemented")
    f.must("attention_bias", False, why="projections with a bias are not implemented")
    inner = f.below("dflash_config")
    neutral = (("sample_from_anchor", False), ("input_embedding_scale", 1), ("output_multiplier", 1))
    hidden, vocab = f.whole("hidden_size"), f.whole("vocab_size")
    others = (
        ("final_logit_softcapping", None), ("use_swa", False), ("swa_window_size", None),
        ("attention_sink_bias", False), ("attention_value_scale", 1), ("draft_vocab_size", vocab),
        ("target_hidden_size", hidden), ("partial_rotary_factor", 1), ("rope_is_neox_style", True),
        ("is_neox_style", True),
    )  # fmt: skip
    for fields in (inner, f):  # keys of other drafters of this kind, unless they change nothing
        for key, only in (*neutral, *others):
            if fields.values.get(key) not in (only, None):
                fields.fail(key, f"but only {only} is implemented")
        for key in fields.values:
            if key.startswith("markov_") and fields.values.get(key):
                fields.fail(key, "but drafters with a Markov head are not implemented")
    layers, head_dim = f.whole("num_hidden_layers"), f.whole("head_dim")
    for key, value, most in (("num_hidden_layers", layers, MAX_LAYERS), ("head_dim", head_dim, MAX_HEAD_DIM)):
        if value > most:
            f.fail(key, f"but at most {most} are possible")
    kinds = f.get("layer_types", [FULL] * layers)
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or any(k not in (SLIDING, FULL) for k in kinds):
        f.fail("layer_types", f"but must name {layers} layers {SLIDING} or {FULL}")
    window = f.whole("sliding_window") if SLIDING in kinds and f.flag("use_sliding_window", True) else None
    causal = f.get("is_causal", inner.get("causal", None)) if "is_causal" not in f else f.flag("is_causal")
    theta = f.below("rope_parameters").real("rope_theta", f.get("rope_theta", 10000.0))
    taps = inner.get("target_layer_ids")
    targets = f.whole("num_target_layers")
    if not isinstance(taps, list | tuple) or not taps or not all(type(t) is int and 0 <= t < targets for t in taps):
        inner.fail("target_layer_ids", f"but must list layers from 0 to {targets - 1}")
    mask_id = inner.whole("mask_token_id", least=0)
    if mask_id >= vocab:
        inner.fail("mask_token_id", f"but must be a token below vocab_size {vocab}")
    second = None
    if name == "dflash2":
        second = Second(
            taps=inner.whole("conv_kernel_size"),
            group=inner.whole("conv_group_size"),
            rank=inner.whole("selector_rank"),
            count=inner.whole("selector_top_k"),
        )
    return DFlashSpec(
        name=name,
        hidden_size=f.whole("hidden_size"),
        intermediate_size=f.whole("intermediate_size"),
        num_heads=f.whole("num_attention_heads"),
        num_kv_heads=f.whole("num_key_value_heads"),
        head_dim=head_dim,
        vocab_size=f.whole("vocab_size"),
        num_target_layers=targets,
        eps=f.real("rms_norm_eps", 1e-6),
        rope=RopeSpec(theta=theta, rotary_dim=head_dim),
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
        causal=tuple(bool(causal) if causal is not None else kind == SLIDING for kind in kinds),
        taps=tuple(taps),
        mask_id=mask_id,
        block_size=inner.whole("block_size", f.whole("block_size", 16)),
        second=second,
    )


def cache_format(kv: KVFormat) -> KVFormat:
    """Of a drafter whose target has a cache of format `kv`: drafters keep plain values, as they were trained."""
    return kv if kv.is_plain else kv_by_name("bf16")


@frozen
class _Builder:
    """One graph over the drafter's weights and the target's embedding and head."""

    g: Graph
    spec: DFlashSpec
    target: ModelSpec
    kv: KVFormat
    w: Stored

    def norm(self, x: Value, name: str, size: int | None = None) -> Value:
        weight = self.w.vector(PREFIX + name, size or self.spec.hidden_size)
        return rms_norm(self.g, x, weight, eps=self.spec.eps)

    def linear(self, x: Value, name: str, n: int, k: int) -> Value:
        (y,) = linear(self.g, x, self.w.matrix(f"{PREFIX}{name}.weight", n, k))
        return y

    def rope(self, x: Value, freqs: Value) -> Value:
        return rope(self.g, x, freqs, head_dim=self.spec.head_dim)

    def append(self, x: Value, layer: int, freqs: Value) -> Value:
        """Keys and values of rows into the layer's cache, which is returned."""
        s, g, p = self.spec, self.g, f"layers.{layer}.self_attn."
        width = s.num_kv_heads * s.head_dim
        k = self.norm(self.linear(x, f"{p}k_proj", width, s.hidden_size), f"{p}k_norm.weight", s.head_dim)
        v = self.linear(x, f"{p}v_proj", width, s.hidden_size)
        cache = kv_state(g, self.target.num_layers + layer, self.kv, s.num_kv_heads, s.head_dim)
        step = g.step
        paging = (g.states["page_table"], step["row_seq"], step["row_start"], step["seq_slot"], step["kv_len"])
        g.add(KvAppend(self.kv, s.num_kv_heads, s.head_dim), self.rope(k, freqs), v, cache, *paging)
        return cache

    def attention(self, x: Value, layer: int, freqs: Value) -> Value:
        """Without the projection out."""
        s, g, p = self.spec, self.g, f"layers.{layer}.self_attn."
        width = s.num_heads * s.head_dim
        q = self.norm(self.linear(x, f"{p}q_proj", width, s.hidden_size), f"{p}q_norm.weight", s.head_dim)
        cache = self.append(x, layer, freqs)
        kind = Attention if s.causal[layer] else BlockAttention
        op = kind(self.kv, s.num_heads, s.num_kv_heads, s.head_dim, s.head_dim**-0.5, s.windows[layer])
        q = self.rope(q, freqs)
        if isinstance(op, BlockAttention):
            return block_attention(g, q, cache, op)
        step = g.step
        paging = (g.states["page_table"], step["row_seq"], step["row_start"], step["seq_slot"], step["kv_len"])
        return g.one(op, q, cache, *paging)

    def layer(self, x: Value, layer: int, freqs: Value) -> Value:
        s, g, p = self.spec, self.g, f"layers.{layer}."
        h, width = s.hidden_size, s.num_heads * s.head_dim
        n = self.norm(x, f"{p}input_layernorm.weight")
        out = self.w.matrix(f"{PREFIX}{p}self_attn.o_proj.weight", h, width)
        if s.second is None:
            x = linear_add(g, self.attention(n, layer, freqs), out, x)
            m = self.norm(x, f"{p}post_attention_layernorm.weight")
            return mlp(g, self.w, f"{PREFIX}{p}mlp.", m, x, hidden=h, inner=s.intermediate_size)
        conv = self.convolutions(n, f"{p}attention_conv", s.second)
        (y,) = linear(g, self.attention(conv(n, 0), layer, freqs), out)
        x = add(g, x, conv(y, 1))
        m = self.norm(x, f"{p}post_attention_layernorm.weight")
        conv = self.convolutions(m, f"{p}mlp_conv", s.second)
        gate, up = (self.w.matrix(f"{PREFIX}{p}mlp.{i}_proj.weight", s.intermediate_size, h) for i in ("gate", "up"))
        down = self.w.matrix(f"{PREFIX}{p}mlp.down_proj.weight", h, s.intermediate_size)
        (y,) = linear(g, silu_mul(g, *linear(g, conv(m, 0), gate, up)), down)
        return add(g, x, conv(y, 1))

    def convolutions(self, n: Value, name: str, second: Second) -> Any:
        """Both sides read the same projection of the branch's input."""
        h = self.spec.hidden_size
        rows = 2 * second.taps * (h // second.group)
        delta = self.linear(n, f"{name}.kernel_projection", rows, h)
        base = self.w.tensor(f"{PREFIX}{name}.base_kernel", 2, second.taps, h)
        return lambda x, side: block_conv(self.g, x, delta, base, BlockConv(side, second.taps, second.group))

    def propose(self, x: Value, *, logits: bool) -> None:
        s, g = self.spec, self.g
        hidden = self.norm(take_rows(g, x, g.step["logit_rows"]), "norm.weight")
        scores = draft_scores(self.w, self.target, hidden)
        if logits:
            g.outputs.update(hidden=hidden, logits=scores)
        if s.second is None:
            g.outputs["draft"] = argmax(g, scores, domain=self.target.domain)
            return
        p = "candidate_selector."
        gate = self.linear(hidden, f"{p}hidden_projection", s.second.rank, s.hidden_size)
        books = [
            self.w.tensor(f"{PREFIX}{p}{n}_codebook", s.vocab_size, s.second.rank) for n in ("predecessor", "successor")
        ]
        step = g.step
        fields = (step["params"], step["tokens"], step["row_seq"], step["row_start"], step["logit_rows"])
        op = SelectDrafts(self.target.domain, s.second.count)
        draft, candidates, q = g.add(op, scores, gate, *books, *fields)
        keep_proposals(g, candidates, q, s.second.count)
        g.outputs.update(draft=draft, candidates=candidates, q=q)


def build(spec: DFlashSpec, target: ModelSpec, info: Info, *, kv: KVFormat, mode: str, rounds: Rounds) -> Graph:
    """kv: of the target's cache. Mode "context": the rows' taps become keys and values. "block": `draft` at the logit
    rows, DFlash2 with its `candidates` and their probabilities `q`; "block_logits" with `hidden` and `logits` too."""
    g = Graph()
    b = _Builder(g, spec, target, cache_format(kv), Stored(g, info, target.rotation))
    freqs = g.const("drafter.freqs", TensorType((spec.head_dim // 2,)), spec.rope.frequencies())
    if mode == CONTEXT:
        rings = [ring_load(g, tap_ring(g, i, spec.hidden_size, rounds.tap_rows)) for i in spec.taps]
        features = rings[0]
        for more in rings[1:]:
            features = concat(g, features, more)
        c = b.norm(b.linear(features, "fc", spec.hidden_size, spec.hidden_size * len(rings)), "hidden_norm.weight")
        for i in range(spec.num_layers):
            with g.layer(target.num_layers + i):
                b.append(c, i, freqs)
        return g
    embedding = b.w.matrix("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    x = target.rotation.embedded(g, embed(g, g.step["tokens"], embedding))
    for i in range(spec.num_layers):
        with g.layer(target.num_layers + i):
            x = b.layer(x, i, freqs)
    b.propose(x, logits=mode == BLOCK_LOGITS)
    return g
