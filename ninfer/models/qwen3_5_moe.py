"""Qwen3.5 with experts (35B-A3B): the dense model with a mixture of experts in the place of each MLP."""

from __future__ import annotations

from attrs import frozen

from ninfer.ir.graph import Graph, Value
from ninfer.models.family import Config, Family, Stored
from ninfer.models.fields import Fields
from ninfer.models.moe import MoeShape, moe
from ninfer.models.qwen3_5 import FULL, Qwen35Spec, parse_common, text_fields


@frozen(kw_only=True)
class Qwen35MoeSpec(Qwen35Spec):
    mixture: MoeShape

    @property
    def summary(self) -> str:
        full, m = self.layer_types.count(FULL), self.mixture
        kinds = f"{self.num_layers - full} delta, {full} attention, {m.top_k} of {m.experts} experts"
        return f"{self.num_layers} layers ({kinds}) of {self.hidden_size}, vocabulary {self.vocab_size}"

    def feed_forward(self, g: Graph, w: Stored, p: str, h: Value, residual: Value) -> Value:
        return moe(g, w, p, h, residual, self.mixture, hidden=self.hidden_size)


def parse_mixture(f: Fields) -> MoeShape:
    f.must("mlp_only_layers", [], why="every layer has experts")
    f.must("decoder_sparse_step", 1, why="every layer has experts")
    experts, top_k = f.whole("num_experts"), f.whole("num_experts_per_tok")
    if top_k > experts:
        f.fail("num_experts_per_tok", f"but there are {experts} experts")
    inner = f.whole("moe_intermediate_size")
    shared = f.whole("shared_expert_intermediate_size", 0, least=0)
    return MoeShape(experts, top_k, inner, shared, f.flag("norm_topk_prob", True))


def parse(config: Config) -> Qwen35MoeSpec:
    f = text_fields(config)
    mixture = parse_mixture(f)
    return Qwen35MoeSpec(**parse_common(f), intermediate_size=mixture.inner, mixture=mixture)


FAMILY = Family(
    "qwen3_5_moe",
    ("qwen3_5_moe", "qwen3_5_moe_text"),
    ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    parse,
)
