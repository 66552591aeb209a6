"""Health, models and metrics."""

from __future__ import annotations

from typing import Any

import attrs
import openai
import pytest

from ninfer.errors import NinferError
from ninfer.runtime.request import DraftStats
from tests.api.conftest import MODEL, FakeClient, Server, Start

WORK: dict[str, Any] = {
    "num_running": 1,
    "num_waiting": 2,
    "num_pages": 8,
    "num_free_pages": 6,
    "num_generated_tokens": 30,
}


def test_health_fails_with_the_engine_and_with_steps_that_never_end(server: Server) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/v1/health").status_code == 200
    now = server.client.stats_now
    for stats in (attrs.evolve(now, failure="boom"), attrs.evolve(now, num_running=1, seconds_since_step=1e4)):
        server.client.stats_now = stats
        response = server.http.get("/health")
        assert response.status_code == 503
        assert response.json()["status"] == "unavailable"
    server.client.stats_now = attrs.evolve(now, seconds_since_step=1e4)
    assert server.http.get("/health").status_code == 200  # idle


def test_the_model_is_listed_and_found_by_name(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    listed = server.http.get("/models").json()["data"][0]
    assert listed["max_model_len"] == server.client.context_len
    assert listed["meta"]["n_vocab"] == server.tokenizer.vocab_size
    missing = server.http.get("/v1/models/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_metrics_are_prometheus_text(server: Server) -> None:
    server.client.stats_now = attrs.evolve(server.client.stats_now, decode_s=2.0, **WORK)
    response = server.http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = response.text.splitlines()
    values = dict(line.split(" ") for line in lines if not line.startswith("#"))
    assert values["llamacpp:requests_processing"] == "1"
    assert values["llamacpp:requests_deferred"] == "2"
    assert values["llamacpp:kv_cache_usage_ratio"] == "0.25"
    assert values["llamacpp:predicted_tokens_seconds"] == "15"
    assert values["llamacpp:tokens_predicted_total"] == "30"
    for name in values:
        assert any(line.startswith(f"# TYPE {name} ") for line in lines)
        assert any(line.startswith(f"# HELP {name} ") for line in lines)


def test_load_and_stats_are_one_snapshot(server: Server) -> None:
    server.client.stats_now = attrs.evolve(server.client.stats_now, decode_s=2.0, **WORK)
    load, stats = server.http.get("/v1/load"), server.http.get("/stats").json()
    assert load.headers["cache-control"] == "no-store"
    told = load.json()
    assert told["requests"] == {"admitted": 3, "running": 1, "prefilling": 0, "decode_ready": 0, "waiting": 2}
    assert told["occupancy"] == {"kv_pages": 2, "kv_tokens": 128}
    assert told["capacity"]["kv_capacity_tokens"] == 8 * 64
    assert stats["object"] == "ninfer.stats" and stats["tokens_per_second"]["decode"] == 15.0
    assert stats["requests"].items() >= told["requests"].items()


def test_stats_tell_drafts_tiers_and_the_queue_where_the_engine_does(server: Server) -> None:
    stats = server.http.get("/stats").json()
    assert stats["acceptance"] is None and stats["cache"]["tiers"] == [] and stats["queue"]["entries"] == []
    server.client.stats_now = attrs.evolve(
        server.client.stats_now,
        drafts=DraftStats(num_rounds=4, num_plain_rounds=1, num_drafted=8, num_accepted=6, accepted_at=(3, 3)),
        num_cached_tokens=5,
        num_waiting=2,
        queue=(("a-0", 2.5), ("b-0", 1.0)),
        tiers=({"name": "host", "used_bytes": 1, "capacity_bytes": 4},),
    )
    stats = server.http.get("/stats").json()
    told = stats["acceptance"]
    assert (told["drafted_tokens"], told["accepted_tokens"], told["rate"]) == (8, 6, 0.75)
    assert told["accepted_tokens_per_round"] == 2.0 and told["accepted_per_position"] == [3, 3]
    assert stats["cache"] == {
        "reused_prompt_tokens": 5,
        "tiers": [{"name": "host", "used_bytes": 1, "capacity_bytes": 4}],
    }
    assert stats["queue"]["depth"] == 2 and stats["queue"]["longest_wait_seconds"] == 2.5
    assert stats["queue"]["entries"][1] == {"request_id": "b-0", "position": 2, "wait_seconds": 1.0}


def test_stats_count_what_became_of_requests(start: Start) -> None:
    server = start(FakeClient(script=lambda request: [[65], [66], [67]]))
    server.chat()
    server.chat(stream=True)
    server.chat(temperature="hot")
    server.client.failure = NinferError("broken")
    server.http.post("/v1/messages", json={"messages": [{"role": "user", "content": "hi"}]})
    stats = server.http.get("/stats").json()
    assert stats["endpoints"]["openai_chat_completions"] == {"done": 2, "cancelled": 0, "rejected": 1, "failed": 0}
    assert stats["endpoints"]["anthropic_messages"]["failed"] == 1
    assert stats["requests"]["open"] == 0 and stats["requests"]["peak_open"] == 1
    assert stats["latency"]["requests"] == 3 and stats["latency"]["total_seconds"]["p95"] > 0
    assert stats["recent"]["generated_tokens_per_second"] == pytest.approx(0.9)  # 9 tokens in 10 s
    lines = server.http.get("/metrics").text.splitlines()
    assert "ninfer:requests_failed_total 1" in lines and "ninfer:requests_rejected_total 1" in lines


def test_the_index_lists_the_routes(server: Server) -> None:
    found = server.http.get("/v1").json()
    assert {"method": "POST", "path": "/v1/messages"} in found["endpoints"] and found["model"] == MODEL


def test_drafts_are_counted_by_round_and_place(server: Server) -> None:
    assert "spec_decode" not in server.http.get("/metrics").text
    drafts = DraftStats(num_rounds=4, num_plain_rounds=1, num_drafted=8, num_accepted=6, accepted_at=(4, 2))
    server.client.stats_now = attrs.evolve(server.client.stats_now, drafts=drafts)
    lines = server.http.get("/metrics").text.splitlines()
    assert "llamacpp:spec_decode_num_drafts_total 3" in lines
    assert "llamacpp:spec_decode_num_draft_tokens_total 8" in lines
    assert 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2' in lines
    assert "ninfer:draft_plain_rounds_total 1" in lines


def test_a_stop_string_inside_a_round_ends_the_count_there(start: Start) -> None:
    server = start(FakeClient(script=lambda request: [[65, 66, 67, 68]]))
    body = server.chat(stop=["c"], max_tokens=4).json()
    assert body["choices"][0]["message"]["content"] == "b"
    assert body["usage"]["completion_tokens"] == 2
