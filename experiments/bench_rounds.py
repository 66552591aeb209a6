"""Rounds of MTP drafts at a forced acceptance: tokens per second, beside what the arithmetic says of them.

    python experiments/bench_rounds.py synthetic:qwen3.5-27b --format q4_g64/q5_g64 --drafts 3 --accept-rate 0 0.8 1

A reply is first generated without drafts, then by rounds whose drafts are all refused (rate 0), then again with drafts:
each is the token of the rounds' own reply with the given chance, else another one. (The rounds' reply, since kernels of
several rows may round otherwise than those of one, which a model of random weights turns into other tokens.)
Everything else of a round is done as ever, MTP's drafts included, which are then not looked at; so a model of random
weights gives the speed of a trained one that accepts so much. With n drafts and rate p a round has 1 + p + ... + p^n
tokens, and tokens per second should be that times the rounds per second at rate 0.

"columns" compares by the device's clock (on a CPU by the wall's) a round of 1 + n rows with a plain step, and says what
parts of it take by themselves: verification, fold of all rows, one draft. --json writes everything.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field

from ninfer.config import EngineConfig
from ninfer.devices.base import Executable
from ninfer.runtime.batch import Draw, SeqRows
from ninfer.runtime.draft.drafter import Want
from ninfer.runtime.draft.mtp import MtpDrafter
from ninfer.runtime.draft.rounds import Speculation
from ninfer.runtime.draft.stages import Stage
from ninfer.runtime.engine import Engine, drive
from ninfer.runtime.load import Loaded, load
from ninfer.runtime.request import Delta, GenerateRequest, Sampling
from ninfer.runtime.runner import CompiledRunner
from ninfer.runtime.steps import fill_step


@define
class Rehearsed(MtpDrafter):
    """MTP that works as ever, and proposes known texts in place of what it found.   texts: prompt and reply by the
    prompt's first token; rate: the chance of a draft to be right, decided by its position."""

    texts: dict[int, list[int]] = field(factory=dict)
    rate: float = 1.0
    domain: int = 1
    _text: dict[int, list[int]] = field(init=False, factory=dict)  # by slot

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        MtpDrafter.begin(self, slot, prompt)
        self._text[slot] = self.texts[prompt[0]]

    def propose(self, wants: Sequence[Want]) -> list[tuple[int, ...]]:
        own = MtpDrafter.propose(self, wants)
        return [self._right_or_wrong(w, len(drafts)) for w, drafts in zip(wants, own, strict=True)]

    def _right_or_wrong(self, want: Want, count: int) -> tuple[int, ...]:
        text, at = self._text[want.slot], want.kv_len + 1
        dice = np.random.default_rng([want.slot, at]).random(count)
        known = text[at : at + count]
        return tuple(t if u < self.rate else (t + 1) % self.domain for t, u in zip(known, dice, strict=False))


def requests(count: int, prompt_len: int, tokens: int, domain: int) -> list[GenerateRequest]:
    """Prompts that differ in their first token. No end token: all replies have their full length."""
    dice = np.random.default_rng(1)
    return [
        GenerateRequest(
            id=str(i),
            prompt_ids=(10 + i, *(int(t) for t in dice.integers(10, min(domain, 4000), prompt_len - 1))),
            sampling=Sampling(temperature=0),
            max_tokens=tokens,
        )
        for i in range(count)
    ]


def generate(engine: Engine, batch: Sequence[GenerateRequest]) -> tuple[float, dict[str, list[Delta]]]:
    """Tokens per second of decoding, all sequences together."""
    deltas = drive(engine, batch)
    tokens, seconds = 0, 0.0
    for told in deltas.values():
        timings = told[-1].timings
        assert timings is not None
        tokens += timings.num_generated_tokens - 1
        seconds = max(seconds, timings.decode_s)
    return tokens / seconds, deltas


def reply(deltas: Sequence[Delta]) -> list[int]:
    return [t.id for d in deltas for t in d.tokens]


def rates(loaded: Loaded, config: EngineConfig, args: argparse.Namespace) -> list[dict[str, Any]]:
    speculation = loaded.speculation
    assert speculation is not None and isinstance(speculation.drafter, MtpDrafter)
    domain = loaded.runner.limits.domain
    batch = requests(config.max_concurrency, args.prompt, args.tokens, domain)
    plain_engine = Engine(loaded.runner, config)
    generate(plain_engine, batch)
    plain: list[float] = []
    found: dict[str, list[Delta]] = {}
    for _ in range(args.repeat):
        rate, found = generate(plain_engine, batch)
        plain.append(rate)
    drafter = Rehearsed(
        run=speculation.drafter.run,
        texts={r.prompt_ids[0]: [*r.prompt_ids, *reply(found[r.id])] for r in batch},
        domain=domain,
    )
    points: list[dict[str, Any]] = []
    for p in sorted({0.0, *args.accept_rate}):
        drafter.rate = p
        rehearsed = Speculation(
            speculation.run_verify, speculation.run_fold, drafter, None, speculation.num_drafts, 0,
            chain=speculation.chain,
        )  # fmt: skip
        engine = Engine(loaded.runner, config, speculation=rehearsed)
        generate(engine, batch)
        before = rehearsed.stats()
        seen, same = [], 0
        for _ in range(args.repeat):
            rate, deltas = generate(engine, batch)
            seen.append(rate)
            if not points:
                found = deltas
                drafter.texts.update({r.prompt_ids[0]: [*r.prompt_ids, *reply(found[r.id])] for r in batch})
            same = sum(reply(deltas[r.id]) == reply(found[r.id]) for r in batch)
        after = rehearsed.stats()
        rounds = after.num_rounds - before.num_rounds
        kept = (after.num_accepted - before.num_accepted) / rounds
        point = {
            "accept_rate": p, "tok_per_s": statistics.median(seen), "low": min(seen), "high": max(seen),
            "kept_per_round": kept, "rounds": rounds, "one_plan": rehearsed.chain is not None, "same_texts": same,
            "plain_tok_per_s": statistics.median(plain), "texts": len(batch),
        }  # fmt: skip
        points.append(point)
        first = points[0]
        point["expected_tok_per_s"] = first["tok_per_s"] * (1 + kept) / (1 + first["kept_per_round"])
        point["ideal_tokens"] = sum(p**i for i in range(1 + speculation.num_drafts))
        off = point["tok_per_s"] / point["expected_tok_per_s"] - 1
        print(f"accept {p:4.2f}  {point['tok_per_s']:8.1f} tok/s  [{min(seen):.1f}, {max(seen):.1f}]  "
              f"{1 + kept:.2f} tokens a round (ideally {point['ideal_tokens']:.2f})  "
              f"arithmetic {point['expected_tok_per_s']:8.1f} ({off:+.1%})  "
              f"plain {point['plain_tok_per_s']:.1f}  same texts {same} of {len(batch)}", flush=True)  # fmt: skip
    return points


def seconds_of(executable: Executable, seqs: Sequence[SeqRows], repeat: int) -> float:
    """Of a launch: by the device's clock where it has one."""
    fill_step(seqs, executable.step, executable.header)
    for _ in range(3):
        executable.launch()
    clock: Callable[[int], float] | None = getattr(executable, "time", None)
    if clock is not None:
        return statistics.median(clock(repeat) for _ in range(7))
    took = []
    for _ in range(7 * repeat):
        start = time.perf_counter()
        executable.launch()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def columns(loaded: Loaded, args: argparse.Namespace) -> dict[str, float]:
    """On whatever the slots' pages hold. The context is what attention reads; drafts are refused by the target."""
    speculation, runner = loaded.speculation, loaded.runner
    assert speculation is not None and speculation.chain is not None and isinstance(runner, CompiledRunner)
    count, n = args.concurrency, speculation.num_drafts
    draw = Draw(sampling=Sampling(temperature=0), seed=1)

    def rows(tokens: int, drawn: bool = True) -> list[SeqRows]:
        each = runner.limits.pages // count
        for slot in range(count):
            runner.set_pages(slot, 0, range(slot * each, (slot + 1) * each))
        return [
            SeqRows(
                slot=slot, kv_len=args.context, tokens=tuple(range(5, 5 + tokens)), generated=True,
                draw=draw if drawn else None, num_draws=tokens if drawn else 1, room=64, most_drafts=n,
            )
            for slot in range(count)
        ]  # fmt: skip

    def stage(run: Any, seqs: Sequence[SeqRows]) -> float:
        assert isinstance(run, Stage)
        wanted = sum(len(s.tokens) for s in seqs)
        return seconds_of(next(e for w, e in run.executables.items() if w >= wanted), seqs, args.repeat)

    plain = next(e for w, e in runner.executables.items() if w >= count)
    whole = next(e for (s, _), e in speculation.chain.executables.items() if s >= count)
    drafter = speculation.drafter
    assert isinstance(drafter, MtpDrafter)
    found = {
        "plain_ms": seconds_of(plain, rows(1), args.repeat),
        "round_ms": seconds_of(whole, rows(1 + n), args.repeat),
        "verify_ms": stage(speculation.run_verify, rows(1 + n)),
        "fold_ms": stage(speculation.run_fold, rows(1 + n, drawn=False)) if speculation.run_fold else 0.0,
        "draft_ms": stage(drafter.run, rows(1)),
    }
    found = {name: 1e3 * value for name, value in found.items()}
    ratio = found["round_ms"] / found["plain_ms"]
    print("  ".join(f"{name[:-3]} {value:.3f} ms" for name, value in found.items()))
    print(f"a round of {1 + n} rows is {ratio:.2f} plain steps: it pays from {ratio - 1:.2f} kept drafts on")
    return {**found, "rows": 1 + n, "context": args.context, "round_in_plain_steps": ratio}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model with an MTP block, such as synthetic:qwen3.5-27b")
    parser.add_argument("--format", help="weight format of a synthetic model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--accept-rate", type=float, nargs="+", default=[0.5, 0.8, 1.0])
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--prompt", type=int, default=48, help="tokens")
    parser.add_argument("--tokens", type=int, default=256, help="of a reply")
    parser.add_argument("--context", type=int, default=512, help="of the comparison of columns")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--full-draft-head", action="store_true", help="draft by the model's head")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    config = EngineConfig(
        model=args.model, format=args.format, device=args.device, spec="mtp", draft_tokens=args.drafts,
        ngram_draft_tokens=0, max_concurrency=args.concurrency, kv_dtype=args.kv_dtype, no_prefix_reuse=True,
        max_context=max(args.prompt + args.tokens, args.context + 64), deterministic=args.deterministic,
        full_draft_head=args.full_draft_head, prefill_chunk=max(64, args.prompt),  # no plans that no step here uses
    )  # fmt: skip
    loaded = load(config, report=lambda label, text: print(f"{label:9} {text}"))
    found: dict[str, Any] = {
        "model": args.model, "drafts": args.drafts, "concurrency": args.concurrency, "kv": args.kv_dtype,
        "date": datetime.date.today().isoformat(), "columns": columns(loaded, args),
        "rates": rates(loaded, config, args),
    }  # fmt: skip
    loaded.runner.close()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()
