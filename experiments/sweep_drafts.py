"""Drafters and draft counts: tokens per second and accepted drafts per round, by kind of text.

    python experiments/sweep_drafts.py MODEL [--spec none mtp ngram] [--drafts 1 3 7 15] [--concurrency 1 8]
        [--temperature 0.7] [--jsonl OUT.jsonl] [--plot OUT.png]

Each point answers the prompts of one kind, a warm-up and then --repeat times; the rate is the median, with the slowest
and the fastest beside it. A drafter that the model lacks is named and left out. Every reply is compared with the one
without drafts: with --deterministic they are equal, else near ties may part. The plot needs the `plot` extra.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from tqdm import tqdm

from ninfer.config import EngineConfig
from ninfer.errors import UsageError
from ninfer.runtime.engine import Engine, drive
from ninfer.runtime.load import Loaded, load
from ninfer.runtime.request import GenerateRequest, Sampling

KINDS = {
    "counting": ["Count from 7 to 15.", "Count from 1 to 30."],
    "json": [
        "Give a JSON object with name Moses, age 80 and city river.",
        "Give a JSON object with name Ruth, age 31 and city Moab.",
    ],
    "copying": [
        "Repeat exactly: In the beginning God created the heaven and the earth.",
        "Repeat exactly: And the evening and the morning were the first day.",
    ],
    "prose": ["Continue: In the beginning God created the heaven and the earth.", "Continue: And it came to pass"],
}


@frozen
class Setting:
    spec: str
    drafts: int
    concurrency: int

    def __str__(self) -> str:
        return self.spec if self.spec == "none" else f"{self.spec} {self.drafts}"


def settings(specs: Sequence[str], drafts: Sequence[int], concurrency: Sequence[int]) -> list[Setting]:
    """Plain decoding first: it is what the others are compared with."""
    found = [Setting("none", 0, c) for c in concurrency]
    return found + [Setting(s, k, c) for s in specs if s != "none" for k in drafts for c in concurrency]


def requests(loaded: Loaded, kind: str, args: argparse.Namespace, copies: int) -> list[GenerateRequest]:
    made: list[GenerateRequest] = []
    for i, text in enumerate(KINDS[kind] * copies):
        prompt = text
        if loaded.chat_template is not None:
            prompt = loaded.chat_template.render([{"role": "user", "content": text}], enable_thinking=False)
        made.append(
            GenerateRequest(
                id=str(i),
                prompt_ids=tuple(loaded.tokenizer.encode(prompt)),
                sampling=Sampling(temperature=args.temperature, seed=args.seed + i),
                max_tokens=args.tokens,
            )
        )
    return made


def measure(
    engine: Engine, batch: Sequence[GenerateRequest], repeat: int, concurrency: int
) -> tuple[list[float], list[list[int]], dict[str, float]]:
    """Rates of decoding, the replies, and what became of drafts."""
    rates: list[float] = []
    texts: list[list[int]] = []
    before = engine.stats().drafts
    for n in range(repeat + 1):
        begun, decoded = time.perf_counter(), engine.stats()
        texts = []
        for at in range(0, len(batch), concurrency):
            group = batch[at : at + concurrency]
            said = drive(engine, group)
            texts += [[t.id for d in said[r.id] for t in d.tokens] for r in group]
        now = engine.stats()
        seconds = now.decode_s - decoded.decode_s
        tokens = sum(len(t) for t in texts) - len(texts)  # the first of each comes with its prompt
        assert time.perf_counter() - begun >= seconds
        if n:
            rates.append(tokens / seconds if seconds else 0.0)
    after = engine.stats().drafts
    found: dict[str, float] = {"rounds": 0, "drafted": 0, "accepted": 0, "per_round": 0.0}
    if before is not None and after is not None:
        rounds = after.num_rounds - before.num_rounds
        accepted = after.num_accepted - before.num_accepted
        found = {
            "rounds": rounds,
            "drafted": after.num_drafted - before.num_drafted,
            "accepted": accepted,
            "per_round": round(accepted / rounds, 3) if rounds else 0.0,
        }
    return rates, texts, found


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    base = EngineConfig(
        model=args.model,
        device=args.device,
        max_context=args.context,
        deterministic=args.deterministic,
        threads=args.threads,
        ngram_min_match=args.ngram_min_match,
    )
    points: list[dict[str, Any]] = []
    plain: dict[tuple[str, int], tuple[float, list[list[int]]]] = {}
    lacking: set[str] = set()
    todo = settings(args.spec, args.drafts, args.concurrency)
    with tqdm(total=len(todo) * len(KINDS), unit="point", file=sys.stderr) as bar:
        for setting in todo:
            bar.set_description(f"{setting}, {setting.concurrency} together")
            config = evolve(base, spec=setting.spec, draft_tokens=setting.drafts or None)
            config = evolve(config, max_concurrency=setting.concurrency)
            try:
                loaded = load(config) if setting.spec not in lacking else None
            except UsageError as error:
                lacking.add(setting.spec)
                bar.write(str(error))
                loaded = None
            if loaded is None:
                bar.update(len(KINDS))
                continue
            with Engine(loaded.runner, config, speculation=loaded.speculation) as engine:
                for kind in KINDS:
                    batch = requests(loaded, kind, args, max(1, setting.concurrency // len(KINDS[kind])))
                    rates, texts, drafts = measure(engine, batch, args.repeat, setting.concurrency)
                    rate = statistics.median(rates)
                    if setting.spec == "none":
                        plain[kind, setting.concurrency] = (rate, texts)
                    reference, expected = plain[kind, setting.concurrency]
                    point = {
                        "model": Path(args.model).name,
                        "spec": setting.spec,
                        "drafts": setting.drafts,
                        "concurrency": setting.concurrency,
                        "kind": kind,
                        "temperature": args.temperature,
                        "tokens_per_s": round(rate, 1),
                        "slowest": round(min(rates), 1),
                        "fastest": round(max(rates), 1),
                        "ratio": round(rate / reference, 3) if reference else 0.0,
                        "same_text": texts == expected,
                        **drafts,
                        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
                        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    }
                    points.append(point)
                    if args.jsonl is not None:
                        with args.jsonl.open("a") as file:
                            print(json.dumps(point), file=file)
                    bar.update()
    return points


def table(points: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'kind':10} {'drafter':10} {'together':>8} {'tok/s':>8} {'ratio':>6} {'kept/round':>10} {'same':>5}  load"
    ]
    for p in sorted(points, key=lambda p: (p["concurrency"], p["kind"])):
        name = p["spec"] if p["spec"] == "none" else f"{p['spec']} {p['drafts']}"
        lines.append(
            f"{p['kind']:10} {name:10} {p['concurrency']:>8} {p['tokens_per_s']:>8.1f} {p['ratio']:>6.2f} "
            f"{p['per_round']:>10.2f} {'yes' if p['same_text'] else 'NO':>5}  {p['load']}"
        )
    return "\n".join(lines)


def plot(points: Sequence[dict[str, Any]], path: Path) -> None:
    """The ratio to plain decoding over the draft count, a panel for each kind of text.   Raises UsageError."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install ninfer[plot]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(KINDS), figsize=(3.2 * len(KINDS), 3.2), sharey=True, squeeze=False)
    for axis, kind in zip(axes[0], KINDS, strict=True):
        lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for p in points:
            if p["kind"] == kind and p["spec"] != "none":
                lines.setdefault((p["spec"], p["concurrency"]), []).append((p["drafts"], p["ratio"]))
        for (spec, concurrency), line in lines.items():
            x, y = zip(*sorted(line), strict=True)
            axis.plot(x, y, marker="o", label=f"{spec}, {concurrency} together")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_title(kind)
        axis.set_xlabel("drafts per round")
    axes[0][0].set_ylabel("tokens/s, plain decoding = 1")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--spec", nargs="+", default=["none", "mtp", "ngram"])
    parser.add_argument("--drafts", nargs="+", type=int, default=[1, 3, 7])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1])
    parser.add_argument("--tokens", type=int, default=96, help="of a reply at most")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--ngram-min-match", type=int, default=4)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    try:
        points = sweep(args)
        print(table(points))
        if args.plot is not None:
            plot(points, args.plot)
    except UsageError as error:
        raise SystemExit(f"sweep_drafts: {error}") from None


if __name__ == "__main__":
    main()
