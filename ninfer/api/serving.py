"""What every route works with: the engine's client, the model's text side, and what a request gets by default."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ninfer.api.journal import Journal
from ninfer.api.sse import PING_S
from ninfer.config import SamplingDefaults
from ninfer.errors import BadRequest, UnknownModel
from ninfer.runtime.grafts import Graft
from ninfer.runtime.request import EngineClient, Sampling
from ninfer.text.chat import ChatTemplate
from ninfer.text.grammar import Grammars
from ninfer.text.tokenizer import Tokenizer

NEUTRAL = Sampling()
STALLED_S = 300.0  # a step that takes longer counts as an engine that hangs


@frozen(kw_only=True)
class Serving:
    """max_replies: the most that can run and wait together. started: unix seconds."""

    client: EngineClient
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_id: str
    eos_ids: frozenset[int]
    generation_config: Mapping[str, Any] = field(factory=dict)
    defaults: SamplingDefaults = field(factory=SamplingDefaults)
    post_thinking: Mapping[str, float] | None = None  # what flags say of answers behind reasoning; None: nothing
    grafts: Mapping[str, Graft] = field(factory=dict)
    default_graft: str | None = None
    slot_save_path: Path | None = None
    max_replies: int = 128
    max_pending: int = 16
    timeout_s: float | None = None  # of a whole request
    memory: Mapping[str, int] = field(factory=dict)
    journal: Journal = field(factory=Journal)
    started: int = 0
    ping_s: float = PING_S

    @cached_property
    def grammars(self) -> Grammars:
        """Raises BadRequest where the library for them is missing."""
        return Grammars(self.tokenizer, self.eos_ids)

    def check_model(self, name: str | None) -> None:
        """No name is the served model. Raises UnknownModel."""
        if name and name != self.model_id:
            raise UnknownModel(f"model {name[:80]!a} is not served here; {self.model_id!a} is")

    def graft(self, name: str | None) -> Graft | None:
        """None: the default. Raises BadRequest."""
        name = self.default_graft if name is None else name
        if not name:
            return None
        if name not in self.grafts:
            there = ", ".join(self.grafts) or "none"
            message = f"graft: {name[:40]!a} is not loaded; there are {there}, and the empty name for no graft"
            raise BadRequest(message, path="graft", code="unknown_graft")
        return self.grafts[name]

    def template(self) -> ChatTemplate:
        """Raises BadRequest."""
        if self.chat_template is None:
            raise BadRequest(
                f"{self.model_id} has no chat template; use /v1/completions, or serve with --chat-template",
                path="messages",
                code="invalid_prompt",
            )
        return self.chat_template

    def sampling(self, asked: Mapping[str, Any]) -> Sampling:
        """asked: fields of Sampling that the request names; they go over the flags, the flags over the model's own."""

        def pick(name: str, neutral: float) -> float:
            for source in (asked.get(name), getattr(self.defaults, name, None), self.generation_config.get(name)):
                if isinstance(source, int | float):
                    return source
            return neutral

        drawn = "temperature" in asked or self.defaults.temperature is not None
        likeliest = self.defaults.greedy or (not drawn and self.generation_config.get("do_sample") is False)
        return Sampling(
            temperature=0.0 if likeliest else pick("temperature", NEUTRAL.temperature),
            top_k=int(pick("top_k", NEUTRAL.top_k)),
            top_p=pick("top_p", NEUTRAL.top_p),
            min_p=pick("min_p", NEUTRAL.min_p),
            repetition_penalty=pick("repetition_penalty", NEUTRAL.repetition_penalty),
            presence_penalty=pick("presence_penalty", NEUTRAL.presence_penalty),
            frequency_penalty=pick("frequency_penalty", NEUTRAL.frequency_penalty),
            seed=asked.get("seed", self.defaults.seed),
            logit_bias=asked.get("logit_bias", {}),
        )

    def max_tokens(self, asked: int | None) -> int:
        """None: the flag's, else what fits; below 0: what fits. The engine clamps to the window."""
        if asked is None:
            asked = self.defaults.default_max_tokens
        return self.client.context_len if asked is None or asked < 0 else asked

    def unhealthy(self) -> str | None:
        """Why requests would not be answered."""
        stats = self.client.stats()
        if stats.failure is not None:
            return stats.failure
        if stats.num_running + stats.num_waiting and stats.seconds_since_step > STALLED_S:
            return f"no step has ended for {stats.seconds_since_step:.0f} s"
        return None
