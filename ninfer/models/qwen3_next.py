"""Qwen3-Next: Qwen3.5's layers with experts, with the inputs of the delta rule fused by key head."""

from __future__ import annotations

from attrs import frozen

from ninfer.ir.graph import Rows, Value
from ninfer.models.family import Config, Family, Stored
from ninfer.models.fields import Fields
from ninfer.models.qwen3_5 import parse_common
from ninfer.models.qwen3_5_moe import Qwen35MoeSpec, parse_mixture


@frozen(kw_only=True)
class Qwen3NextSpec(Qwen35MoeSpec):
    def delta_inputs(self, w: Stored, p: str) -> list[Value]:
        """in_proj_qkvz has q, k and the group's v and z of each key head; in_proj_ba the group's b and a.

        A file may have qkv and z apart already.
        """
        hk, dk, hidden = self.key_heads, self.key_dim, self.hidden_size
        group = self.value_heads // hk
        wide, fused = group * self.value_dim, f"{p}in_proj_qkvz.weight"
        period, gates = 2 * dk + 2 * wide, f"{p}in_proj_ba.weight"
        a, b = (
            w.rows(gates, part, 2 * self.value_heads, hidden, start=start, count=group, period=2 * group)
            for part, start in (("a", group), ("b", 0))
        )
        if not w.has(fused):
            qkv = w.matrix(f"{p}in_proj_qkv.weight", self.channels, hidden)
            return [qkv, w.matrix(f"{p}in_proj_z.weight", hk * wide, hidden), a, b]
        parts = [
            (Rows(fused, start, count, period), hk * count) for start, count in ((0, dk), (dk, dk), (2 * dk, wide))
        ]
        qkv = w.gathered(f"{p}in_proj_qkv.weight", parts, {fused: hk * period}, hidden)
        z = w.rows(fused, "z", hk * period, hidden, start=2 * dk + wide, count=wide, period=period)
        return [qkv, z, a, b]


def parse(config: Config) -> Qwen3NextSpec:
    f = Fields({"mtp_num_hidden_layers": config.get("num_nextn_predict_layers"), **config})
    mixture = parse_mixture(f)
    return Qwen3NextSpec(**parse_common(f), intermediate_size=mixture.inner, mixture=mixture)


FAMILY = Family("qwen3_next", ("qwen3_next",), ("Qwen3NextForCausalLM",), parse)
