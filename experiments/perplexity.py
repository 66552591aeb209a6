"""Perplexity of a model on a text file: a JSON line, a table, and a plot of how surprised it was where.

    python experiments/perplexity.py demo TEXT.txt [--kv-dtype f16] [--context 2048 --stride 1024]
        [--jsonl OUT.jsonl] [--plot OUT.png]

The plot needs the `plot` extra.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ninfer.config import EngineConfig
from ninfer.errors import StartupError, UsageError
from ninfer.formats.kv import KV_FORMATS
from ninfer.runtime.load import load_scorer
from ninfer.runtime.perplexity import score_text
from ninfer.text.tokenizer import Tokenizer

BINS = 40


def plot(nll: NDArray[np.float64], path: Path) -> None:
    """Perplexity of stretches of the text, and of all of it up to there.   Raises UsageError."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install ninfer[plot]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = np.array_split(nll, min(BINS, len(nll)))
    ends = np.cumsum([len(part) for part in parts])
    figure, axis = pyplot.subplots(figsize=(7, 3.6))
    axis.step(ends, [np.exp(part.mean()) for part in parts], where="pre", label="of a stretch")
    axis.plot(ends, [np.exp(nll[:end].mean()) for end in ends], label="up to there")
    axis.set_xlabel("scored tokens")
    axis.set_ylabel("perplexity")
    axis.set_yscale("log")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def measure(args: argparse.Namespace) -> None:
    config = EngineConfig(
        model=args.model, max_context=args.context, max_concurrency=1, kv_dtype=args.kv_dtype, threads=args.threads
    )
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{args.text}: {error}") from None
    scorer, model, limits = load_scorer(config)
    tokens = Tokenizer.from_artifact(model.artifact).encode(text)
    if len(tokens) < 2:
        raise UsageError(f"{args.text}: {len(tokens)} tokens are too few; two are needed")
    start = time.perf_counter()
    with tqdm(total=len(tokens), unit="tok", desc="scoring") as bar:
        score = score_text(
            scorer, limits, tokens, stride=args.stride, progress=lambda done, total: bar.update(done - bar.n)
        )
    seconds = time.perf_counter() - start
    row = {
        "model": Path(args.model).name,
        "text": args.text.name,
        "tokens": len(score.nll),
        "window": limits.context_len,
        "kv_dtype": args.kv_dtype,
        "perplexity": round(score.perplexity, 4),
        "tokens_per_s": round(len(tokens) / seconds, 1),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    print(json.dumps(row))
    if args.jsonl is not None:
        with args.jsonl.open("a") as file:
            print(json.dumps(row), file=file)
    print(f"{'tokens':>8} {'window':>7} {'perplexity':>11} {'tok/s':>8}")
    print(f"{len(score.nll):>8} {limits.context_len:>7} {score.perplexity:>11.4f} {len(tokens) / seconds:>8.1f}")
    if args.plot is not None:
        plot(score.nll, args.plot)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--stride", type=int)
    parser.add_argument("--kv-dtype", default="bf16", choices=[f.name for f in KV_FORMATS])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    try:
        measure(args)
    except StartupError as error:
        raise SystemExit(f"perplexity: {error}") from None


if __name__ == "__main__":
    main()
