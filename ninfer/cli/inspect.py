"""ninfer inspect MODEL: what a model file has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from ninfer.artifacts import open_artifact
from ninfer.artifacts.demo import demo_path
from ninfer.cli.output import configure_logging, version
from ninfer.config import flag, parse, positional, text
from ninfer.errors import ArtifactError

DESCRIPTION = "What a model file has: its configuration and its tensors, without loading them."


@frozen(kw_only=True)
class InspectConfig:
    model: str = positional("a model file or directory, or demo", text)
    config: bool = flag("print the model's configuration as JSON instead", default=False)


def body(argv: Sequence[str]) -> int:
    config = parse(InspectConfig, argv, prog="ninfer inspect", description=DESCRIPTION, version=version())
    configure_logging("warning")
    artifact = open_artifact(_demo() if config.model == "demo" else Path(config.model))
    if config.config:
        print(json.dumps(_plain(artifact.config), indent=2, ensure_ascii=False))
        return 0
    print(f"{artifact.display_name}  {artifact.kind}  {artifact.num_values() / 1e6:,.1f} million weights")
    print("\n".join([*artifact.details(), artifact.summary()]))
    tokenizer = "no" if artifact.tokenizer_source is None else "a"
    print(f"{tokenizer} tokenizer, {'no' if artifact.chat_template is None else 'a'} chat template")
    names = sorted(artifact.names(), key=_natural)
    width = max(map(len, names), default=0)
    for name in names:
        try:
            info = artifact.info(name)
        except ArtifactError as error:
            print(f"{name:<{width}}  {error}")
            continue
        shape = "x".join(map(str, info.shape))
        print(f"{name:<{width}}  {shape:>16}  {info.format.name:<10} {info.nbytes:>14,} bytes")
    return 0


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _demo() -> Path:
    from ninfer.routes.profile import cache_dir  # late: it brings all route tables along

    return demo_path(cache_dir())


def _plain(value: Any) -> Any:
    """Mappings and sequences as json knows them; long arrays by their length."""
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value] if len(value) <= 256 else f"[{len(value)} values]"
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
