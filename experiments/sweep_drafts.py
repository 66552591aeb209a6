"""Drafters and draft counts: tokens per second and accepted drafts per round, by kind of text.

    python experiments/sweep_drafts.py MODEL [--spec none mtp ngram] [--drafts 1 3 7 15] [--concurrency 1 8]
        [--temperature 0.7] [--jsonl OUT.jsonl] [--plot OUT.png]

Each point answers the prompts of one kind, a warm-up and then --repeat times; the rate is the median, with the slowest
and the fastest beside it. Settings take turns, so that what else the machine does meets all of them. A drafter that the
model lacks is named and left out. Every reply is compared with the one without drafts: with --deterministic they are
equal, else near ties may part. The plot needs the `plot` extra.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from tqdm import tqdm

from ninfer.config import EngineConfig
from ninfer.errors import UsageError
from ninfer.runtime.engine import Engine, drive
from ninfer.runtime.load import Loaded, load
from ninfer.runtime.request import DraftStats, GenerateRequest, Sampling

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


def answer(engine: Engine, batch: Sequence[GenerateRequest], concurrency: int) -> tuple[float, list[list[int]]]:
    """Tokens per second of decoding, and the replies."""
    before = engine.stats().decode_s
    texts: list[list[int]] = []
    for at in range(0, len(batch), concurrency):
        group = batch[at : at + concurrency]
        said = drive(engine, group)
        texts += [[t.id for d in said[r.id] for t in d.tokens] for r in group]
    seconds = engine.stats().decode_s - before
    tokens = sum(len(t) for t in texts) - len(texts)  # the first of each comes with its prompt
    return tokens / seconds if seconds else 0.0, texts


def became(before: DraftStats | None, after: DraftStats | None) -> dict[str, float]:
    """What became of drafts between two counts."""
    if before is None or after is None:
        return {"rounds": 0, "drafted": 0, "accepted": 0, "per_round": 0.0}
    rounds, accepted = after.num_rounds - before.num_rounds, after.num_accepted - before.num_accepted
    return {
        "rounds": rounds,
        "drafted": after.num_drafted - before.num_drafted,
        "accepted": accepted,
        "per_round": round(accepted / rounds, 3) if rounds else 0.0,
    }


def open_all(args: argparse.Namespace, concurrency: int, bar: tqdm[Any]) -> dict[Setting, tuple[Loaded, Engine]]:
    base = EngineConfig(
        model=args.model,
        device=args.device,
        max_context=args.context,
        max_concurrency=concurrency,
        deterministic=args.deterministic,
        threads=args.threads,
        ngram_min_match=args.ngram_min_match,
    )
    found: dict[Setting, tuple[Loaded, Engine]] = {}
    lacking: set[str] = set()
    for setting in settings(args.spec, args.drafts, [concurrency]):
        if setting.spec in lacking:
            continue
        config = evolve(base, spec=setting.spec, draft_tokens=setting.drafts or None)
        try:
            loaded = load(config)
        except UsageError as error:
            lacking.add(setting.spec)
            bar.write(str(error))
            continue
        found[setting] = loaded, Engine(loaded.runner, config, speculation=loaded.speculation)
    return found


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    total = len(args.concurrency) * len(KINDS) * (args.repeat + 1)
    with tqdm(total=total, unit="turn", file=sys.stderr) as bar:
        for concurrency in args.concurrency:
            engines = open_all(args, concurrency, bar)
            for kind in KINDS:
                bar.set_description(f"{kind}, {concurrency} together")
                points += compare(engines, kind, args, concurrency, bar)
            for _, engine in engines.values():
                engine.close()
    return points


def compare(
    engines: Mapping[Setting, tuple[Loaded, Engine]],
    kind: str,
    args: argparse.Namespace,
    concurrency: int,
    bar: tqdm[Any],
) -> list[dict[str, Any]]:
    """A point for each setting."""
    rates: dict[Setting, list[float]] = {setting: [] for setting in engines}
    texts: dict[Setting, list[list[int]]] = {}
    before = {setting: engine.stats().drafts for setting, (_, engine) in engines.items()}
    for turn in range(args.repeat + 1):
        for setting, (loaded, engine) in engines.items():
            batch = requests(loaded, kind, args, max(1, concurrency // len(KINDS[kind])))
            rate, texts[setting] = answer(engine, batch, concurrency)
            if turn:
                rates[setting].append(rate)
        bar.update()
    points = []
    plain = next(iter(engines))
    reference = statistics.median(rates[plain])
    for setting, (_, engine) in engines.items():
        rate = statistics.median(rates[setting])
        point = {
            "model": Path(args.model).name,
            "spec": setting.spec,
            "drafts": setting.drafts,
            "concurrency": concurrency,
            "kind": kind,
            "temperature": args.temperature,
            "tokens_per_s": round(rate, 1),
            "slowest": round(min(rates[setting]), 1),
            "fastest": round(max(rates[setting]), 1),
            "ratio": round(rate / reference, 3) if reference else 0.0,
            "same_text": texts[setting] == texts[plain],
            **became(before[setting], engine.stats().drafts),
            "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        points.append(point)
        if args.jsonl is not None:
            with args.jsonl.open("a") as file:
                print(json.dumps(point), file=file)
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
