"""What a format costs a token: decode time with and without, from the timings of a running server.

    ninfer-serve MODEL --port 8080 &
    python experiments/bench_grammar.py http://127.0.0.1:8080 --rounds 7 --json out.json

Each round asks for the same number of tokens without a format and with each of some, in turn; the first round of each
is a warm-up. Formats that never end keep the lengths equal. One JSON line per format with its median and its spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import httpx

FORMATS: dict[str, dict[str, Any]] = {
    "none": {},
    "regex of words": {"regex": "([a-z]+ )*"},
    "schema of integers": {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 100000}},
    "any JSON text": {"json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 100000}},
}


def ms_per_token(http: httpx.Client, format: dict[str, Any], num_tokens: int, seed: int) -> float:
    body = {"prompt": "List: ", "n_predict": num_tokens, "ignore_eos": True, "temperature": 1.0, "seed": seed}
    response = http.post("/completion", json=body | {"cache_prompt": False} | format)
    response.raise_for_status()
    return float(response.json()["timings"]["predicted_per_token_ms"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in FORMATS}
    with httpx.Client(base_url=args.url, timeout=600) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        for seed in range(args.rounds + 1):
            for name, format in FORMATS.items():
                found[name].append(ms_per_token(http, format, args.tokens, seed))
    plain = statistics.median(found["none"][1:])
    lines = []
    for name, all in found.items():
        times = all[1:]
        middle = statistics.median(times)
        line = {"model": model, "format": name, "tokens": args.tokens, "rounds": args.rounds, "ms_per_token": middle}
        lines.append(line | {"min": min(times), "max": max(times), "added_ms": middle - plain, "first_ms": all[0]})
        print(f"{name:20} {middle:8.3f} ms/token  ({min(times):.3f} to {max(times):.3f})  added {middle - plain:+.3f}")
    if args.json is not None:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
