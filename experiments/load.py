"""Many clients of every dialect at once, some of whom hang up, against a server process of its own.

    python experiments/load.py --clients 64 --seconds 60 --leave 0.2 -- demo --max-context 2048

What follows `--` are arguments of ninfer-serve. Ends with 1 if a reply is broken, an error is anything but a 429, a
slot or page does not come back, or the process grows otherwise than by what the cache keeps in host memory. One JSON
line of results, and a table for people on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

WARM_S = 10.0  # after this the process should have all the memory it needs
GROWTH = 0.05  # of resident memory from then on
SETTLE_S = 5.0
WORDS = ["rivers", "bread", "lamps", "winter", "music", "stones", "letters", "gardens", "trains", "clouds"]

Body = dict[str, Any]


def chat(rng: random.Random, n: int) -> tuple[str, Body]:
    extras: list[Body] = [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["\n"]}]
    extra = rng.choice(extras)
    return "/v1/chat/completions", {"messages": _turns(rng), "max_tokens": n, **extra}


def completions(rng: random.Random, n: int) -> tuple[str, Body]:
    return "/v1/completions", {"prompt": _text(rng), "max_tokens": n}


def responses(rng: random.Random, n: int) -> tuple[str, Body]:
    return "/v1/responses", {"input": _text(rng), "max_output_tokens": n}


def messages(rng: random.Random, n: int) -> tuple[str, Body]:
    return "/v1/messages", {"messages": _turns(rng), "max_tokens": n}


def completion(rng: random.Random, n: int) -> tuple[str, Body]:
    return "/completion", {"prompt": _text(rng), "n_predict": n}


DIALECTS: tuple[Callable[[random.Random, int], tuple[str, Body]], ...] = (
    *(chat, completions, responses, messages, completion),
)

# Of a reply that is whole: what its last event, or its body, must have.
LAST: dict[str, Callable[[str], bool]] = {
    "/v1/chat/completions": lambda text: text.endswith("data: [DONE]\n\n") and '"finish_reason": "' in text,
    "/v1/completions": lambda text: text.endswith("data: [DONE]\n\n") and '"finish_reason": "' in text,
    "/v1/responses": lambda text: (
        text.count("event: response.completed") + text.count("event: response.incomplete") == 1
    ),
    "/v1/messages": lambda text: text.count("event: message_stop") == 1,
    "/completion": lambda text: text.count('"stop": true') == 1,
}
WHOLE: dict[str, Callable[[Body], bool]] = {
    "/v1/chat/completions": lambda b: all(c["finish_reason"] for c in b["choices"]),
    "/v1/completions": lambda b: all(c["finish_reason"] for c in b["choices"]),
    "/v1/responses": lambda b: b["status"] in ("completed", "incomplete"),
    "/v1/messages": lambda b: b["stop_reason"] is not None,
    "/completion": lambda b: b["stop"] is True,
}


def _text(rng: random.Random) -> str:
    return "Tell me about " + " and ".join(rng.choices(WORDS, k=rng.choice([1, 3, 10, 100])))


def _turns(rng: random.Random) -> list[Body]:
    return [{"role": "user", "content": _text(rng)}]


class Run:
    def __init__(self, url: str, seconds: float, leave: float, tokens: int, seed: int) -> None:
        self.url = url
        self.leave = leave
        self.tokens = tokens
        self.seed = seed
        self.end_s = time.monotonic() + seconds
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.first_s: list[float] = []
        self.total_s: list[float] = []
        self.faults: list[str] = []
        self.memory: list[tuple[float, int]] = []

    async def client(self, number: int, http: httpx.AsyncClient) -> None:
        rng = random.Random(self.seed * 1000 + number)
        while time.monotonic() < self.end_s:
            path, body = rng.choice(DIALECTS)(rng, rng.randrange(1, self.tokens + 1))
            body["stream"] = rng.random() < 0.5
            limit = rng.uniform(0.01, 3.0) if rng.random() < self.leave else None
            outcome = await self.one(http, path, body, limit)
            self.outcomes[path, outcome] += 1
            if outcome == "429":
                await asyncio.sleep(rng.uniform(0.5, 2.0))

    async def one(self, http: httpx.AsyncClient, path: str, body: Body, limit_s: float | None) -> str:
        """limit_s: when the client hangs up, whatever it has."""
        try:
            async with asyncio.timeout(limit_s):
                return await self.whole(http, path, body)
        except TimeoutError:
            return "left"
        except httpx.HTTPError as error:
            self.faults.append(f"{path}: {type(error).__name__}: {error}")
            return "broken"

    async def whole(self, http: httpx.AsyncClient, path: str, body: Body) -> str:
        begun = time.monotonic()
        async with http.stream("POST", path, json=body) as response:
            if response.status_code in (429, 529):
                await response.aread()
                return "429"
            pieces: list[bytes] = []
            async for piece in response.aiter_bytes():
                if not pieces:
                    self.first_s.append(time.monotonic() - begun)
                pieces.append(piece)
        text = b"".join(pieces).decode()
        good = response.status_code == 200
        if good:
            good = LAST[path](text) if body["stream"] else WHOLE[path](json.loads(text))
        if not good:
            self.faults.append(f"{path} {response.status_code}: {text[-300:]}")
            return "broken"
        self.total_s.append(time.monotonic() - begun)
        return "done"

    async def watch(self, http: httpx.AsyncClient) -> None:
        while True:
            stats = (await http.get("/stats")).json()
            cached = sum(tier["used_bytes"] for tier in stats["cache"]["tiers"] if tier["name"] == "host")
            self.memory.append((time.monotonic(), stats["memory"]["process_bytes"] - cached))
            await asyncio.sleep(1)


async def drive(run: Run, clients: int) -> Body:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=run.url, timeout=120, limits=limits) as http:
        before = (await http.get("/stats")).json()
        watcher = asyncio.ensure_future(run.watch(http))
        await asyncio.gather(*(run.client(i, http) for i in range(clients)))
        watcher.cancel()
        ended = time.monotonic()
        while time.monotonic() < ended + SETTLE_S:
            after: Body = (await http.get("/stats")).json()
            if not after["requests"]["admitted"] and not after["requests"]["open"]:
                break
            await asyncio.sleep(0.05)
    if after["requests"]["admitted"] or after["requests"]["open"]:
        run.faults.append(f"requests that never end: {after['requests']}")
    if any(slot["is_processing"] for slot in after["slots"]):
        run.faults.append("a slot did not come back")
    if after["occupancy"]["kv_pages"] != before["occupancy"]["kv_pages"]:
        run.faults.append(f"{after['occupancy']['kv_pages']} pages are held, {before['occupancy']['kv_pages']} were")
    return after


def quantile(values: list[float], q: float) -> float:
    order = sorted(values) or [0.0]
    return round(order[min(len(order) - 1, int(q * len(order)))], 3)


def start(argv: list[str]) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "ninfer.cli.serve", *argv, "--port", "0", "--log-level", "warning"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("ready"):
            return process, line.split()[1]
    raise SystemExit(f"the server ended with {process.wait()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--leave", type=float, default=0.2, help="share of requests whose client hangs up")
    parser.add_argument("--tokens", type=int, default=32, help="of a reply at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("serve", nargs="*", default=["demo"], help="arguments of ninfer-serve")
    args = parser.parse_args()
    process, url = start(args.serve or ["demo"])
    run = Run(url, args.seconds, args.leave, args.tokens, args.seed)
    try:
        begun = time.monotonic()
        after = asyncio.run(drive(run, args.clients))
        took = time.monotonic() - begun
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=30)[1]
    if process.returncode:
        run.faults.append(f"the server ended with {process.returncode}")
    if "Traceback" in rest or " ERROR " in rest:
        run.faults.append(f"the server logged: {rest[-1000:]}")
    warm = [n for at, n in run.memory if at > begun + min(WARM_S, args.seconds / 2)]
    growth = (warm[-1] - warm[0]) / warm[0] if warm else 0.0
    if growth > GROWTH:
        run.faults.append(f"the process grew by {growth:.1%} from {warm[0]} bytes")
    outcomes: Counter[str] = Counter()
    for (_, outcome), count in run.outcomes.items():
        outcomes[outcome] += count
    result = {
        "clients": args.clients,
        "seconds": round(took, 1),
        "leave": args.leave,
        "tokens": args.tokens,
        "seed": args.seed,
        "serve": args.serve,
        "requests": sum(outcomes.values()),
        "outcomes": dict(outcomes),
        "generated_tokens": after["counters"]["generated_tokens"],
        "generated_tokens_per_second": round(after["counters"]["generated_tokens"] / took, 1),
        "rows_per_round": round(after["rows_per_round"], 2),
        "first_byte_seconds": {"p50": quantile(run.first_s, 0.5), "p95": quantile(run.first_s, 0.95)},
        "total_seconds": {"p50": quantile(run.total_s, 0.5), "p95": quantile(run.total_s, 0.95)},
        "cancelled_in_engine": after["counters"]["cancelled"],
        "memory_mib": {"warm": warm[0] >> 20 if warm else 0, "end": warm[-1] >> 20 if warm else 0},
        "growth": round(growth, 4),
        "tiers": after["cache"]["tiers"],
        "faults": run.faults[:20],
    }
    print(json.dumps(result))
    for path in sorted({path for path, _ in run.outcomes}):
        row = {o: run.outcomes[path, o] for o in ("done", "left", "429", "broken")}
        print(f"{path:<24}" + "  ".join(f"{o} {n:>5}" for o, n in row.items()), file=sys.stderr)
    for fault in run.faults[:20]:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if run.faults else 0


if __name__ == "__main__":
    sys.exit(main())
