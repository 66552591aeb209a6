"""llama.cpp and ninfer on one GGUF file, same threads, alternately in one run: rates and ratios with their spread.

    pip install '.[peer]'            # builds llama.cpp, some minutes
    python experiments/peer_cpu.py   # the demo model, 2 threads

Each round measures both engines one after the other, so that a busy moment of the machine meets both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ninfer.config import EngineConfig
from ninfer.runtime.batch import Draw, SeqRows
from ninfer.runtime.load import load
from ninfer.runtime.request import Sampling

TEXT = Path(__file__).resolve().parent / "peer_text.txt"
PAGE = 64


class Ninfer:
    """The compiled runner, driven directly, as the engine drives it."""

    name = "ninfer"

    def __init__(self, path: str, threads: int) -> None:
        config = EngineConfig(model=path, threads=threads, max_context=2048, max_concurrency=8, prefill_chunk=512)
        self.runner = load(config).runner
        self.greedy = Draw(sampling=Sampling(temperature=0.0), seed=0)
        for slot in range(8):
            pages = range(slot * 32, slot * 32 + 32) if slot * 32 + 32 <= self.runner.limits.pages else range(32)
            self.runner.set_pages(slot, 0, list(pages))

    def prefill(self, tokens: Sequence[int]) -> float:
        start = time.perf_counter()
        self._rows(0, 0, tokens)
        return len(tokens) / (time.perf_counter() - start)

    def decode(self, tokens: Sequence[int], context: int, count: int) -> float:
        self._rows(0, 0, tokens[:context])
        start = time.perf_counter()
        for i in range(count):
            self._rows(0, context + i, tokens[context + i : context + i + 1])
        return count / (time.perf_counter() - start)

    def batch(self, tokens: Sequence[int], context: int, count: int, num_seqs: int) -> float:
        """Total tokens per second of `num_seqs` sequences that decode together."""
        for slot in range(num_seqs):
            self._rows(slot, 0, tokens[:context])
        start = time.perf_counter()
        for i in range(count):
            self.runner.step(
                [
                    SeqRows(slot=s, kv_len=context + i, tokens=(tokens[context + i],), generated=True, draw=self.greedy)
                    for s in range(num_seqs)
                ]
            )
        return num_seqs * count / (time.perf_counter() - start)

    def _rows(self, slot: int, kv_len: int, tokens: Sequence[int]) -> None:
        self.runner.step([SeqRows(slot=slot, kv_len=kv_len, tokens=tuple(tokens), generated=False, draw=self.greedy)])


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, path: str, threads: int) -> None:
        from llama_cpp import Llama

        self.model = Llama(path, n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def prefill(self, tokens: Sequence[int]) -> float:
        self.model.reset()
        start = time.perf_counter()
        self.model.eval(list(tokens))
        return len(tokens) / (time.perf_counter() - start)

    def decode(self, tokens: Sequence[int], context: int, count: int) -> float:
        self.model.reset()
        self.model.eval(list(tokens[:context]))
        start = time.perf_counter()
        for i in range(count):
            self.model.eval([tokens[context + i]])
        return count / (time.perf_counter() - start)


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo", help="a GGUF file (default: the demo model)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="tasks whose name has this part")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line as well")
    args = parser.parse_args()
    path = args.model
    if path == "demo":
        from ninfer.artifacts.demo import demo_path
        from ninfer.routes.profile import cache_dir

        path = str(demo_path(cache_dir()))
    ours, peer = Ninfer(path, args.threads), LlamaCpp(path, args.threads)
    tokens = (peer.model.tokenize(TEXT.read_bytes()) * 3)[:1600]
    tasks: list[tuple[str, Callable[[Any], float]]] = [
        ("prefill 512", lambda e: e.prefill(tokens[:512])),
        ("decode, 16 tokens in context", lambda e: e.decode(tokens, 16, 48)),
        ("decode, 512 tokens in context", lambda e: e.decode(tokens, 512, 48)),
    ]
    print(f"{'task':32} {'llama.cpp':>22} {'ninfer':>22} {'ratio':>18}")
    for name, task in tasks:
        if args.only not in name:
            continue
        task(ours), task(peer)  # warm
        pairs = [(task(peer), task(ours)) for _ in range(args.rounds)]
        theirs, mine = [list(x) for x in zip(*pairs, strict=True)]
        ratios = [b / a for a, b in pairs]
        row = {"task": name, "llama.cpp": summary(theirs), "ninfer": summary(mine), "ratio": summary(ratios)}
        print(f"{name:32} {_text(theirs):>22} {_text(mine):>22} {_text(ratios, 2):>18}", flush=True)
        if args.json:
            print(json.dumps({**row, "threads": args.threads, "model": Path(path).name}))
    if args.only in "8 requests / 1 request":
        runs = [(ours.batch(tokens, 16, 32, 1), ours.batch(tokens, 16, 32, 8)) for _ in range(args.rounds + 1)][1:]
        print(f"{'8 requests / 1 request':32} {_text([one for one, _ in runs]):>22} {_text([a for _, a in runs]):>22} "
              f"{_text([a / one for one, a in runs], 2):>18}")  # fmt: skip


def _text(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
