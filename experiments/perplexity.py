"""Perplexity of a model on a text file, one JSON line and a table.

python experiments/perplexity.py demo TEXT.txt [--kv-dtype f16] [--context 2048 --stride 1024]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from tqdm import tqdm

from ninfer.config import EngineConfig
from ninfer.runtime.load import load_scorer
from ninfer.runtime.perplexity import score_text
from ninfer.text.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--stride", type=int)
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model, max_context=args.context, max_concurrency=1, kv_dtype=args.kv_dtype, threads=args.threads
    )
    scorer, model, limits = load_scorer(config)
    tokens = Tokenizer.from_artifact(model.artifact).encode(args.text.read_text())
    start = time.perf_counter()
    with tqdm(total=len(tokens), unit="tok", desc="scoring") as bar:
        score = score_text(
            scorer, limits, tokens, stride=args.stride, progress=lambda done, total: bar.update(done - bar.n)
        )
    seconds = time.perf_counter() - start
    row = {"model": args.model, "text": args.text.name, "tokens": len(score.nll), "context": args.context,
           "kv_dtype": args.kv_dtype, "perplexity": round(score.perplexity, 4),
           "tokens_per_s": round(len(tokens) / seconds, 1)}  # fmt: skip
    print(json.dumps(row))
    print(f"{'tokens':>8} {'perplexity':>11} {'tok/s':>8}")
    print(f"{len(score.nll):>8} {score.perplexity:>11.4f} {len(tokens) / seconds:>8.1f}")


if __name__ == "__main__":
    main()
