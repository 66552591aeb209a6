"""Seconds to the first token of a long prompt: computed, and read from the tiers of the context cache.

    python experiments/bench_reuse.py synthetic:qwen3.5-27b --tokens 24576 --kv-capacity 40960 --host-cache-mib 8192

A prompt is computed; asked again with its reply and a few tokens more, while its pages are on the device; asked again
after another prompt of the same length has taken their place (so `--kv-capacity` must hold one prompt, not two), from
host memory. Each is repeated with new prompts. The time is the wall's, from submitting a request to the first delta
with a token, in this thread; `cached` counts tokens that were not computed. Exit code 1: a tier gave less than the
prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ninfer.config import EngineConfig
from ninfer.runtime.engine import Engine
from ninfer.runtime.load import load
from ninfer.runtime.request import Delta, GenerateRequest, Sampling

REPLY = 4
MORE = 16  # tokens of the next turn


def first_token(engine: Engine, prompt: list[int], name: str) -> tuple[float, list[Delta]]:
    """Seconds, and all deltas."""
    told: list[Delta] = []
    at: list[float] = []

    def sink(news: Sequence[Delta]) -> None:
        told.extend(news)
        if not at and any(d.tokens for d in news):
            at.append(time.perf_counter())

    request = GenerateRequest(id=name, prompt_ids=tuple(prompt), sampling=Sampling(temperature=0), max_tokens=REPLY)
    start = time.perf_counter()
    engine.submit(request, sink)
    while engine.step():
        pass
    if not at:
        raise SystemExit(f"{name}: no token: {told[-1]}")
    return at[0] - start, told


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--format")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=24576)
    parser.add_argument("--kv-capacity", type=int, default=40960)
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--host-cache-mib", type=int, default=8192)
    parser.add_argument("--prefill-chunk", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    config = EngineConfig(
        model=args.model, format=args.format, device=args.device, kv_dtype=args.kv_dtype, max_concurrency=1,
        max_context=args.tokens + 4 * MORE, kv_capacity=args.kv_capacity, host_cache_mib=args.host_cache_mib,
        prefill_chunk=args.prefill_chunk,
    )  # fmt: skip
    loaded = load(config, report=lambda label, text: print(f"{label:9} {text}"))
    engine, dice = Engine(loaded.runner, config), np.random.default_rng(1)
    domain = min(loaded.runner.limits.domain, 4000)

    def text(n: int) -> list[int]:
        return [int(t) for t in dice.integers(10, domain, n)]

    first_token(engine, text(args.tokens), "warm")
    found: dict[str, list[float]] = {"computed": [], "device": [], "host": []}
    cached: dict[str, list[int]] = {kind: [] for kind in found}

    def ask(kind: str, prompt: list[int], turn: int) -> list[int]:
        """The prompt and its reply."""
        seconds, told = first_token(engine, prompt, f"{kind} {turn}")
        timings = told[-1].timings
        assert timings is not None
        found[kind].append(seconds)
        cached[kind].append(timings.num_cached_tokens)
        return prompt + [t.id for d in told for t in d.tokens]

    for turn in range(args.repeat):
        talk = ask("computed", text(args.tokens), turn)
        ask("device", talk + text(MORE), turn)
        first_token(engine, text(args.tokens), f"other {turn}")
        ask("host", talk + text(MORE), turn)
    for kind, seconds in found.items():
        print(f"{kind:9} first token after {statistics.median(seconds) * 1e3:9.1f} ms  [{min(seconds) * 1e3:.1f}, "
              f"{max(seconds) * 1e3:.1f}]  cached {min(cached[kind])} of {args.tokens} tokens")  # fmt: skip
    for tier in engine.stats().tiers:
        print(f"  {dict(tier)}")
    loaded.runner.close()
    if args.json:
        report = {"model": args.model, "tokens": args.tokens, "seconds": found, "cached": cached}
        args.json.write_text(json.dumps(report))
    return int(min(cached["device"] + cached["host"]) < args.tokens)


if __name__ == "__main__":
    sys.exit(main())
