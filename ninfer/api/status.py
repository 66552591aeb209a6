"""Whether the server answers, what it serves, what it has done. Read from a snapshot; never waits for the engine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from ninfer.api.common import NO_STORE
from ninfer.api.journal import WINDOW_S
from ninfer.api.serving import Serving
from ninfer.ir.step import PAGE
from ninfer.runtime.request import DraftStats, EngineStats

PROMETHEUS = "text/plain; version=0.0.4"  # the charset is added


def routes(serving: Serving) -> tuple[HTTPRouteHandler, ...]:
    @get(["/health", "/v1/health", "/v1/v1/health"], opt={"public": True}, sync_to_thread=False)
    def health() -> Response[dict[str, str]]:
        reason = serving.unhealthy()
        if reason is None:
            return Response({"status": "ok"})
        return Response({"status": "unavailable", "reason": reason}, status_code=503)

    @get("/metrics", sync_to_thread=False)
    def metrics() -> Response[str]:
        return Response(prometheus(serving), media_type=PROMETHEUS, headers={"cache-control": "no-store"})

    @get(["/v1/models", "/v1/v1/models", "/models"], sync_to_thread=False, response_headers=NO_STORE)
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [model(serving)]}

    @get(["/v1/models/{name:path}", "/v1/v1/models/{name:path}"], sync_to_thread=False, response_headers=NO_STORE)
    def one_model(request: Request[Any, Any, Any]) -> dict[str, Any]:
        serving.check_model(request.path_params["name"].removeprefix("/"))
        return model(serving)

    @get(["/v1", "/v1/v1"], sync_to_thread=False)
    def index(request: Request[Any, Any, Any]) -> dict[str, Any]:
        found = [
            {"method": method, "path": route.path}
            for route in request.app.routes
            if isinstance(route, HTTPRoute) and not route.path.startswith("/v1/v1")
            for method in sorted(set(route.methods) - {"OPTIONS"})
        ]
        return {"object": "api_base", "service": "ninfer-serve", "model": serving.model_id, "endpoints": found}

    @get(["/v1/load", "/v1/v1/load"], sync_to_thread=False, response_headers=NO_STORE)
    def snapshot() -> dict[str, Any]:
        return load(serving)

    @get("/stats", sync_to_thread=False, response_headers=NO_STORE)
    def stats() -> dict[str, Any]:
        return statistics(serving)

    return health, metrics, models, one_model, index, snapshot, stats


def model(serving: Serving) -> dict[str, Any]:
    context = serving.client.context_len
    return {
        "id": serving.model_id,
        "object": "model",
        "created": serving.started,
        "owned_by": "ninfer",
        "max_model_len": context,
        "context_window": context,
        "context_length": context,
        "modalities": {"vision": False},
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "status": {"value": "loaded"},
        "meta": {"n_vocab": serving.tokenizer.vocab_size, "n_ctx": context},
    }


def load(serving: Serving) -> dict[str, Any]:
    """How busy the server is, for balancers."""
    now = serving.client.stats()
    phases = [slot.get("phase") for slot in now.slots]
    used = now.num_pages - now.num_free_pages
    return {
        "object": "ninfer.load",
        "model": serving.model_id,
        "uptime_seconds": max(0, int(time.time()) - serving.started),
        "capacity": {
            "max_concurrency": now.max_concurrency,
            "max_pending_requests": serving.max_pending,
            "max_admitted_requests": serving.max_replies,
            "max_context": serving.client.context_len,
            "kv_capacity_tokens": now.num_pages * PAGE,
            "kv_capacity_pages": now.num_pages,
            "kv_page_tokens": PAGE,
        },
        "requests": {
            "admitted": now.num_running + now.num_waiting,
            "running": now.num_running,
            "prefilling": phases.count("prefill"),
            "decode_ready": phases.count("decode"),
            "waiting": now.num_waiting,
        },
        "occupancy": {"kv_pages": used, "kv_tokens": used * PAGE},
        "counters": {
            "requests": now.num_requests,
            "cancelled": now.num_cancelled,
            "computed_prefill_tokens": now.num_prompt_tokens,
            "reused_prompt_tokens": now.num_cached_tokens,
            "generated_tokens": now.num_generated_tokens,
            "decode_rounds": now.num_rounds,
            "decode_row_rounds": now.num_round_rows,
        },
    }


def statistics(serving: Serving) -> dict[str, Any]:
    """The load and what it has been: what a dashboard shows. acceptance is null where nothing drafts."""
    now, journal = serving.client.stats(), serving.journal
    found = load(serving)
    found["requests"] |= {"open": journal.num_open, "peak_open": journal.peak_open}
    queue = [
        {"request_id": id, "position": i + 1, "wait_seconds": round(wait_s, 3)}
        for i, (id, wait_s) in enumerate(now.queue)
    ]
    return found | {
        "object": "ninfer.stats",
        "failure": now.failure,
        "seconds_since_step": now.seconds_since_step,
        "seconds": {"prefill": now.prefill_s, "decode": now.decode_s},
        "tokens_per_second": {
            "prefill": _rate(now.num_prompt_tokens, now.prefill_s),
            "decode": _rate(now.num_generated_tokens, now.decode_s),
        },
        "recent": {
            "window_seconds": WINDOW_S,
            "requests_per_second": journal.ended.per_second(),
            "prompt_tokens_per_second": journal.prompt.per_second(),
            "generated_tokens_per_second": journal.generated.per_second(),
        },
        "latency": {"requests": len(journal.times), **journal.percentiles()},
        "rows_per_round": _rate(now.num_round_rows, now.num_rounds),
        "acceptance": None if now.drafts is None else _acceptance(now.drafts),
        "cache": {
            "reused_prompt_tokens": now.num_cached_tokens,
            "tiers": [dict(tier) for tier in now.tiers],
        },
        "memory": {**serving.memory, **_process_bytes()},
        "queue": {
            "depth": now.num_waiting,
            "longest_wait_seconds": round(max((wait_s for _, wait_s in now.queue), default=0.0), 3),
            "entries": queue,
        },
        "endpoints": {name: dict(counts) for name, counts in sorted(journal.outcomes.items())},
        "slots": [dict(slot) for slot in now.slots],
    }


def _acceptance(drafts: DraftStats) -> dict[str, Any]:
    rounds = drafts.num_rounds - drafts.num_plain_rounds
    return {
        "drafted_tokens": drafts.num_drafted,
        "accepted_tokens": drafts.num_accepted,
        "rate": _rate(drafts.num_accepted, drafts.num_drafted),
        "accepted_tokens_per_round": _rate(drafts.num_accepted, rounds),
        "accepted_per_position": list(drafts.accepted_at),
        "rounds": drafts.num_rounds,
        "rounds_without_drafts": drafts.num_plain_rounds,
        "copied_tokens": drafts.num_copied,
        "copied_tokens_accepted": drafts.num_copies_accepted,
    }


def _process_bytes() -> dict[str, int]:
    """Resident memory of this process, where the system tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return {}
    return {"process_bytes": pages * os.sysconf("SC_PAGE_SIZE")}


def prometheus(serving: Serving) -> str:
    """The metrics in Prometheus' text format."""
    lines: list[str] = []
    for name, kind, help, value in _metrics(serving.client.stats(), serving):
        lines += (f"# HELP {name} {help}", f"# TYPE {name} {kind}", f"{name} {value:.10g}")
    return "\n".join([*lines, *_draft_metrics(serving.client.stats().drafts)]) + "\n"


def _draft_metrics(s: DraftStats | None) -> list[str]:
    """Nothing without a drafter."""
    if s is None:
        return []
    spec = "llamacpp:spec_decode_num"
    found = [
        (f"{spec}_drafts_total", "Rounds with drafts, of each sequence.", s.num_rounds - s.num_plain_rounds),
        (f"{spec}_draft_tokens_total", "Tokens drafted.", s.num_drafted),
        (f"{spec}_accepted_tokens_total", "Drafted tokens that were kept.", s.num_accepted),
        ("ninfer:draft_plain_rounds_total", "Rounds without drafts, of each sequence.", s.num_plain_rounds),
        ("ninfer:ngram_draft_tokens_total", "Tokens drafted as copies of earlier text.", s.num_copied),
        ("ninfer:ngram_accepted_tokens_total", "Copied tokens that were kept.", s.num_copies_accepted),
    ]
    lines = [f"# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}" for name, help, value in found]
    at = f"{spec}_accepted_tokens_per_pos_total"
    lines.append(f"# HELP {at} Drafted tokens that were kept, by their place in the round.\n# TYPE {at} counter")
    return lines + [f'{at}{{position="{i}"}} {count}' for i, count in enumerate(s.accepted_at)]


def _metrics(s: EngineStats, serving: Serving) -> list[tuple[str, str, str, float]]:
    used = s.num_pages - s.num_free_pages
    journal, drafts = serving.journal, s.drafts or DraftStats()
    uptime_s = max(0, int(time.time()) - serving.started)
    return [
        ("llamacpp:prompt_tokens_total", "counter", "Prompt tokens processed.", s.num_prompt_tokens),
        ("llamacpp:prompt_seconds_total", "counter", "Seconds of prompt processing.", s.prefill_s),
        ("llamacpp:tokens_predicted_total", "counter", "Tokens generated.", s.num_generated_tokens),
        ("llamacpp:tokens_predicted_seconds_total", "counter", "Seconds of generation.", s.decode_s),
        (
            "llamacpp:prompt_tokens_seconds",
            "gauge",
            "Prompt tokens per second.",
            _rate(s.num_prompt_tokens, s.prefill_s),
        ),
        ("llamacpp:predicted_tokens_seconds", "gauge", "Tokens per second.", _rate(s.num_generated_tokens, s.decode_s)),
        ("llamacpp:n_decode_total", "counter", "Decode steps.", s.num_rounds),
        (
            "llamacpp:n_busy_slots_per_decode",
            "gauge",
            "Sequences in a decode step.",
            _rate(s.num_round_rows, s.num_rounds),
        ),
        ("llamacpp:kv_cache_tokens", "gauge", "Tokens that the used KV pages hold room for.", used * PAGE),
        ("llamacpp:kv_cache_usage_ratio", "gauge", "Used share of the KV pages.", _rate(used, s.num_pages)),
        ("llamacpp:requests_processing", "gauge", "Requests that run.", s.num_running),
        ("llamacpp:requests_deferred", "gauge", "Requests that wait.", s.num_waiting),
        ("ninfer:requests_total", "counter", "Requests finished.", s.num_requests),
        ("ninfer:requests_cancelled_total", "counter", "Requests whose client went.", s.num_cancelled),
        ("ninfer:requests_failed_total", "counter", "Requests that failed here.", journal.count("failed")),
        ("ninfer:requests_rejected_total", "counter", "Requests that were refused.", journal.count("rejected")),
        ("ninfer:reused_prompt_tokens_total", "counter", "Prompt tokens not computed anew.", s.num_cached_tokens),
        ("ninfer:draft_tokens_total", "counter", "Tokens drafted.", drafts.num_drafted),
        ("ninfer:draft_accepted_tokens_total", "counter", "Drafted tokens that were kept.", drafts.num_accepted),
        ("ninfer:requests_admitted", "gauge", "Requests that run or wait.", s.num_running + s.num_waiting),
        ("ninfer:uptime_seconds", "gauge", "Seconds since start.", uptime_s),
    ]


def _rate(count: float, per: float) -> float:
    return count / per if per > 0 else 0.0
