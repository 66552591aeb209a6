"""KV cache formats: bytes per token, perplexity of a text, and the rates of prompts and of decoding.

    python experiments/sweep_kv.py MODEL [--text FILE] [--formats bf16 rk8v4 rk4v4] [--context 1024]
        [--jsonl OUT.jsonl] [--plot OUT.png]

Perplexity is scored through prefill, every token once, over windows of --context that advance by half. Rates are those
of one request with a prompt of --context - 128 tokens of the text and a reply of 64: a warm-up, then --repeat times;
the median, with the slowest and the fastest beside it. A format that the model's heads do not fit is named and left
out. The plot needs the `plot` extra.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve
from tqdm import tqdm

from ninfer.config import EngineConfig
from ninfer.errors import UsageError
from ninfer.formats.kv import KV_FORMATS
from ninfer.runtime.engine import Engine, drive
from ninfer.runtime.load import Model, load, load_scorer
from ninfer.runtime.perplexity import score_text
from ninfer.runtime.request import GenerateRequest, Sampling
from ninfer.text.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("peer_text.txt")
REPLY = 64
SPARE = 128  # of the context: reply and a little more


def token_bytes(model: Model) -> int:
    """KV of a token, all layers."""
    graph = model.graph("score")
    types = [value.type for name, value in graph.states.items() if name.startswith("kv.")]
    return sum(int(t.shape[1]) for t in types if isinstance(t.shape[1], int)) // 64


def rates(config: EngineConfig, prompt: tuple[int, ...], repeat: int) -> dict[str, list[float]]:
    """Tokens per second of prompts and of decoding, a number a run."""
    found: dict[str, list[float]] = {"prefill": [], "decode": []}
    with Engine(load(config).runner, config) as engine:
        for n in range(repeat + 1):
            request = GenerateRequest(id=str(n), prompt_ids=prompt, max_tokens=REPLY, sampling=Sampling(temperature=0))
            timings = drive(engine, [request])[request.id][-1].timings
            assert timings is not None
            if n:
                found["prefill"].append(timings.num_prompt_tokens / timings.prefill_s)
                found["decode"].append((timings.num_generated_tokens - 1) / timings.decode_s)
    return found


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    base = EngineConfig(
        model=args.model,
        device=args.device,
        max_context=args.context,
        max_concurrency=1,
        threads=args.threads,
        no_prefix_reuse=True,
    )
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {args.text}: {error}") from None
    points: list[dict[str, Any]] = []
    with tqdm(total=2 * len(args.formats), unit="step", file=sys.stderr) as bar:
        for name in args.formats:
            config = evolve(base, kv_dtype=name)
            bar.set_description(f"{name}: perplexity")
            try:
                scorer, model, limits = load_scorer(config)
            except UsageError as error:
                bar.write(str(error))
                bar.update(2)
                continue
            tokens = Tokenizer.from_artifact(model.artifact).encode(text)
            score = score_text(scorer, limits, tokens)
            bar.update()
            bar.set_description(f"{name}: rates")
            prompt = tuple(tokens[: args.context - SPARE])
            measured = rates(config, prompt, args.repeat)
            bar.update()
            point = {
                "model": Path(args.model).name,
                "kv_dtype": name,
                "bytes_per_token": token_bytes(model),
                "text": args.text.name,
                "scored_tokens": len(score.nll),
                "window": limits.context_len,
                "perplexity": round(score.perplexity, 4),
                "context": len(prompt),
                **{f"{kind}_tokens_per_s": round(statistics.median(v), 1) for kind, v in measured.items()},
                **{f"{kind}_range": [round(min(v), 1), round(max(v), 1)] for kind, v in measured.items()},
                "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
            points.append(point)
            if args.jsonl is not None:
                with args.jsonl.open("a") as file:
                    print(json.dumps(point), file=file)
    return points


def table(points: Sequence[dict[str, Any]]) -> str:
    """The first point is what the others are compared with."""
    lines = [f"{'format':10} {'B/token':>8} {'perplexity':>11} {'change':>9} {'prefill':>8} {'decode tok/s':>22}  load"]
    for p in points:
        change = 100 * (p["perplexity"] / points[0]["perplexity"] - 1)
        low, high = p["decode_range"]
        decode = f"{p['decode_tokens_per_s']:.1f} ({low:.1f}-{high:.1f})"
        lines.append(
            f"{p['kv_dtype']:10} {p['bytes_per_token']:>8} {p['perplexity']:>11.4f} {change:>+8.2f}% "
            f"{p['prefill_tokens_per_s']:>8.1f} {decode:>22}  {p['load']}"
        )
    return "\n".join(lines)


def plot(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Perplexity and the rate of decoding over bytes per token.   Raises UsageError."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install ninfer[plot]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for axis, key, label in zip(
        axes, ("perplexity", "decode_tokens_per_s"), ("perplexity", "decoded tokens/s"), strict=True
    ):
        axis.scatter([p["bytes_per_token"] for p in points], [p[key] for p in points])
        for p in points:
            axis.annotate(p["kv_dtype"], (p["bytes_per_token"], p[key]), fontsize="small")
        axis.set_xlabel("bytes per token")
        axis.set_ylabel(label)
    if points and max(p["perplexity"] for p in points) > 2 * points[0]["perplexity"]:
        axes[0].set_yscale("log")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--formats", nargs="+", default=[f.name for f in KV_FORMATS], metavar="FORMAT",
                        choices=[f.name for f in KV_FORMATS])  # fmt: skip
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    try:
        if args.context <= SPARE:
            raise UsageError(f"--context {args.context}: {SPARE} of them are for the reply; use 256 or more")
        points = sweep(args)
        print(table(points))
        if args.plot is not None and points:
            plot(points, args.plot)
    except UsageError as error:
        raise SystemExit(f"sweep_kv: {error}") from None


if __name__ == "__main__":
    main()
