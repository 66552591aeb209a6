"""`post_thinking` in every dialect that has it: what the engine is asked to do behind the end of reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.config import EngineConfig, PostThinking, SamplingDefaults, ServeConfig, parse
from ninfer.errors import UsageError
from ninfer.runtime.request import Sampling, Switch
from tests.api.conftest import Server, Start

HI = [{"role": "user", "content": "hi"}]
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "enable_thinking": True},
    "/v1/responses": {"input": "hi", "chat_template_kwargs": {"enable_thinking": True}},
    "/v1/messages": {"messages": HI, "thinking": {"type": "enabled", "budget_tokens": 2000}},
}
NAMED: dict[str, Any] = {
    "temperature": 0.4,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": -1,
}


def asked(server: Server, path: str = "/v1/chat/completions", **fields: Any) -> Switch | None:
    response = server.http.post(path, json={**ASKS[path], **fields})
    assert response.status_code == 200, response.text
    return server.client.requests[-1].switch


@pytest.mark.parametrize("path", ASKS)
def test_the_answer_is_drawn_as_the_request_says(server: Server, path: str) -> None:
    [close_id] = server.ids("</think>")
    switch = asked(server, path, temperature=0.9, post_thinking={**NAMED, "seed": 3})
    assert switch == Switch(close_id, Sampling(**NAMED, seed=3))
    assert server.client.requests[-1].sampling.temperature == 0.9
    assert asked(server, path) is None and asked(server, path, post_thinking=None) is None


def test_nothing_named_is_the_models_preset_at_a_fifth(start: Start) -> None:
    server = start(generation_config={"temperature": 0.9, "top_k": 20, "top_p": 0.95})
    switch = asked(server, temperature=1.5, top_k=3, post_thinking={})
    assert switch is not None and switch.sampling == Sampling(temperature=0.2, top_k=20, top_p=0.95)


def test_flags_go_over_the_preset_and_requests_over_flags(start: Start) -> None:
    flags = PostThinking(post_thinking_sampler="temp=0.5,top_k=9,presence=0.25", post_thinking_top_k=4)
    server = start(generation_config={"top_p": 0.95}, post_thinking=flags)
    switch = asked(server)
    assert switch is not None
    assert switch.sampling == Sampling(temperature=0.5, top_k=4, top_p=0.95, presence_penalty=0.25)
    switch = asked(server, post_thinking={"temperature": 0.7})
    assert switch is not None and switch.sampling.temperature == 0.7 and switch.sampling.top_k == 4
    assert server.chat("hi").status_code == 200  # toy template: thinking off
    assert server.client.requests[-1].switch is not None  # a reply may begin to reason by itself


def test_the_bias_and_the_repetition_penalty_stay_and_greedy_wins(start: Start) -> None:
    server = start(defaults=SamplingDefaults(greedy=True))
    switch = asked(server, post_thinking={"temperature": 1}, logit_bias={"5": 2}, repetition_penalty=1.1)
    assert switch is not None
    assert (switch.sampling.temperature, dict(switch.sampling.logit_bias)) == (0, {5: 2})
    assert switch.sampling.repetition_penalty == 1.1


def test_each_of_n_answers_has_a_seed_of_its_own(server: Server) -> None:
    asked(server, n=3, post_thinking={"seed": 10})
    switches = [r.switch for r in server.client.requests[-3:]]
    assert sorted(s.sampling.seed or 0 for s in switches if s is not None) == [10, 11, 12]


def test_a_model_that_knows_no_reasoning_has_nothing_to_switch(start: Start) -> None:
    server = start(template="{{ messages[0].content }}")
    assert server.chat("hi", post_thinking={}).status_code == 200
    assert server.client.requests[-1].switch is None


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.3, "post_thinking: expected an object, got 0.3"),
        ({"temperature": 3}, "post_thinking.temperature: expected a number from 0 to 2, got 3"),
        ({"temprature": 1}, "post_thinking: 'temprature' is none of temperature, top_p"),
    ],
)
@pytest.mark.parametrize("path", ASKS)
def test_a_malformed_one_is_refused_by_its_path(server: Server, path: str, value: Any, told: str) -> None:
    response = server.http.post(path, json={**ASKS[path], "post_thinking": value})
    assert response.status_code == 400 and told in response.json()["error"]["message"]


@pytest.mark.parametrize("bad", ["", "temp", "temp=x", "heat=1", "temp=3"])
def test_a_bad_sampler_flag_is_refused(bad: str) -> None:
    with pytest.raises(UsageError, match=r"--post-thinking-sampler: .* is not fields such as temp=0\.2"):
        parse(ServeConfig, ["demo", "--post-thinking-sampler", bad], prog="x", description="", version="1")


def test_the_switch_alone_turns_it_on() -> None:
    config = parse(ServeConfig, ["demo", "--post-thinking"], prog="x", description="", version="1")
    assert config.post_thinking.fields() == {}
    assert ServeConfig(engine=EngineConfig(model="demo")).post_thinking.fields() is None
