"""ninfer perplexity FILE: how well a model predicts a text."""
# ruff: noqa: RUF009  (flag and group make attrs fields)

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from ninfer.cli.output import Console, configure_logging, version
from ninfer.config import EngineConfig, file, flag, group, parse, positional, whole
from ninfer.errors import UsageError
from ninfer.formats.kv import KV_FORMATS

DESCRIPTION = "Perplexity of a model on a UTF-8 text: exp of the mean negative log-probability of its tokens."


@frozen(kw_only=True)
class PerplexityConfig:
    """--max-context is the window that slides over the text."""

    file: Path = positional("the text", file)
    engine: EngineConfig = group(EngineConfig)
    stride: int | None = flag("tokens between windows (half a window)", whole(1))
    log_level: str = flag(
        "what goes to stderr",
        choices=("debug", "info", "warning", "error", "critical", "off"),
        default="info",
    )


def body(argv: Sequence[str]) -> int:
    config = parse(
        PerplexityConfig,
        argv,
        prog="ninfer perplexity",
        description=DESCRIPTION,
        version=version(),
        choices={"kv_dtype": [f.name for f in KV_FORMATS]},
        defaults={"model": "demo", "max_concurrency": 1},
    )
    configure_logging(config.log_level)
    try:
        text = config.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{config.file}: {error}") from None
    from ninfer.runtime.load import load_scorer  # late: a bad flag is told at once
    from ninfer.runtime.perplexity import score_text
    from ninfer.text.tokenizer import Tokenizer

    console = Console()
    scorer, model, limits = load_scorer(config.engine)
    tokens = Tokenizer.from_artifact(model.artifact).encode(text)
    if len(tokens) < 2:
        raise UsageError(f"{config.file}: {len(tokens)} tokens are too few; two are needed")
    start = time.perf_counter()
    score = score_text(
        scorer,
        limits,
        tokens,
        stride=config.stride,
        progress=lambda done, total: console.progress("scoring", done, total),
    )
    rate = len(tokens) / (time.perf_counter() - start)
    print(f"{'tokens':>8} {'window':>7} {'perplexity':>11} {'tok/s':>8}")
    print(f"{len(score.nll):>8} {limits.context_len:>7} {score.perplexity:>11.4f} {rate:>8.1f}")
    return 0
