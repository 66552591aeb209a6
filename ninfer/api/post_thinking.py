"""`post_thinking`: how a reply is drawn once its reasoning is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.api.ask import Ask, Prompt
from ninfer.api.common import SAMPLING
from ninfer.api.fields import Value
from ninfer.api.serving import NEUTRAL, Serving
from ninfer.errors import BadRequest
from ninfer.runtime.request import Sampling, Switch

TEMPERATURE = 0.2  # of answers that nothing else is said of
FIELDS = tuple(name for name in SAMPLING if name != "repetition_penalty")


def post_thinking(body: Value) -> Mapping[str, Any] | None:
    """Fields of Sampling that the request names for its answer; none of them is the preset."""
    value = body["post_thinking"]
    if not value.given:
        return None
    for name in value.object():
        if name not in FIELDS:
            raise value.refused(f"{name[:40]!a} is none of {', '.join(FIELDS)}")
    found: dict[str, Any] = {name: SAMPLING[name](value[name]) for name in FIELDS if value[name].given}
    if "top_k" in found:
        found["top_k"] = max(0, found["top_k"])
    return found


def switch(serving: Serving, ask: Ask, prompt: Prompt, base: Sampling, index: int) -> Switch | None:
    """Of reply `index` to a prompt; None: nothing changes. Raises BadRequest where the model's reasoning has no end.

    What the request names goes over the flags, those over the preset: the model's own with another temperature.
    """
    flags = serving.post_thinking
    if prompt.thinking is None or (ask.post_thinking is None and flags is None):
        return None
    close_id = serving.tokenizer.token_to_id(prompt.tags.close)
    if close_id is None:
        if ask.post_thinking is None:
            return None
        raise BadRequest(
            "the end of the model's thinking is no single token, so nothing can change at it",
            path="post_thinking",
            code="post_thinking_not_supported",
        )
    asked = ask.post_thinking or {}
    sources = (asked, flags or {}, {"temperature": TEMPERATURE}, serving.generation_config)

    def pick(name: str) -> float:
        found = (source[name] for source in sources if isinstance(source.get(name), int | float))
        return next(found, getattr(NEUTRAL, name))

    seed = asked.get("seed")
    sampling = Sampling(
        temperature=0.0 if serving.defaults.greedy else pick("temperature"),
        top_k=int(pick("top_k")),
        top_p=pick("top_p"),
        min_p=pick("min_p"),
        repetition_penalty=base.repetition_penalty,
        presence_penalty=pick("presence_penalty"),
        frequency_penalty=pick("frequency_penalty"),
        seed=None if seed is None else seed + index,
        logit_bias=base.logit_bias,
    )
    return Switch(close_id, sampling)
