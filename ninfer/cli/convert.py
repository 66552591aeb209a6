"""ninfer-convert: checkpoints to a .ninfer artifact."""
# ruff: noqa: RUF009  (flag makes attrs fields)

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen
from tqdm import tqdm

from ninfer.artifacts import Artifact, open_artifact, open_source
from ninfer.artifacts.convert import COMPONENTS, Plan, make_plan
from ninfer.artifacts.convert_objects import to_artifact
from ninfer.artifacts.imatrix import read_importance
from ninfer.artifacts.logical import checkpoint_config, flat
from ninfer.artifacts.ninfer_write import NewArtifact, check_written, write_artifact
from ninfer.artifacts.ranking import read_ranking, shortlist
from ninfer.artifacts.recipes import RECIPES, recipe
from ninfer.cli.output import configure_logging, run, version
from ninfer.config import flag, parse, text, whole
from ninfer.errors import UsageError
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.models import identify
from ninfer.text.tokenizer import Tokenizer

DESCRIPTION = "Convert a checkpoint (a Hugging Face folder, with --source also GGUF) to one .ninfer file."


@frozen(kw_only=True)
class ConvertConfig:
    model: str | None = flag("folder with config, tokenizer and weights; or a GGUF file", text, value="PATH")
    recipe: str | None = flag("how weights are stored; --list shows what there is", text, value="NAME")
    source: tuple[str, ...] = flag(
        "further weights, which go before those of --model; may be repeated", text, value="NAME=PATH", default=()
    )
    components: str = flag("comma list of text, mtp, dflash, dflash2", text, value="LIST", default="text")
    resource: tuple[str, ...] = flag(
        "a file in place of the model's, as chat_template.jinja=PATH; may be repeated", text, value="ROLE=PATH",
        default=(),
    )  # fmt: skip
    proposal: bool = flag("add a head of the most frequent tokens, by which drafts are chosen", default=False)
    proposal_rows: int = flag("tokens of that head, or all if there are fewer", whole(1), default=131072)
    ranking: Path | None = flag(
        "its tokens, the most frequent first: a JSON list of ids (by id, the order of merging)", Path, value="FILE"
    )
    search: bool = flag(
        "search for the scales of q4_g64 ... q8_g32 that lose least (--source imatrix=GGUF: weighted by it)",
        default=False,
    )
    name: str | None = flag("the name to serve the model under (that of --model)", text, value="NAME")
    out: Path | None = flag("the file to write; it must not exist", Path, value="FILE")
    max_file_bytes: int | None = flag("split into files of at most so many bytes (one file)", whole(16384))
    verify: bool = flag("read the result back and compare every byte with a second encoding", default=False)
    list: bool = flag("show the recipes", default=False)


def body(argv: Sequence[str]) -> int:
    config = parse(ConvertConfig, argv, prog="ninfer-convert", description=DESCRIPTION, version=version())
    configure_logging("warning")
    if config.list:
        width = max(len(r.name) for r in RECIPES)
        for r in RECIPES:
            needs = f"  (needs {', '.join(f'--source {s}=PATH' for s in r.sources)})" if r.sources else ""
            print(f"{r.name:<{width}}  {r.about}{needs}")
        return 0
    if config.model is None or config.recipe is None or config.out is None:
        missing = next(f for f in ("model", "recipe", "out") if getattr(config, f) is None)
        raise UsageError(f"--{missing} is required (see ninfer-convert --help; --list shows the recipes)")
    convert(config, config.model, config.recipe, config.out)
    return 0


def convert(config: ConvertConfig, model: str, recipe_name: str, out: Path) -> None:
    chosen = recipe(recipe_name)
    if config.ranking is not None and not config.proposal:
        raise UsageError("--ranking is for the head that --proposal adds: give both")
    paths = _pairs("--source", config.source)
    imatrix = paths.pop("imatrix", None)
    sources = {name: open_source(path) for name, path in paths.items()}
    if "base" in sources:
        raise UsageError("--source: the name base stands for --model; use another")
    base = open_artifact(Path(model))
    started = time.perf_counter()
    proposal = _proposal(config, base) if config.proposal else None
    plan = make_plan(
        chosen,
        base,
        sources,
        name=config.name or base.display_name,
        components=_components(config.components),
        resources=_pairs("--resource", config.resource),
        proposal=proposal,
        search=config.search,
        importance=None if imatrix is None else read_importance(imatrix, base.config),
    )
    _check_model(plan)
    new = write_with_bar(to_artifact(plan), out, config.max_file_bytes)
    seconds = time.perf_counter() - started
    print(summary(plan, new, seconds), file=sys.stderr)
    report = {**new.provenance, "name": plan.name, "config": plan.config, "payload_bytes": new.payload_bytes,
              "seconds": round(seconds, 3), "objects": [o.member() for o in new.objects]}  # fmt: skip
    out.with_name(f"{out.name}.conversion.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    if config.verify:
        with _bar("verifying", new) as bar:
            check_written(new, out, lambda id, n: _advance(bar, n))
        open_artifact(out).close()
        print(f"{out}: verified, {new.payload_bytes:,} bytes are what the sources give", file=sys.stderr)


def write_with_bar(new: NewArtifact, out: Path, max_file_bytes: int | None = None) -> NewArtifact:
    with _bar("converting", new) as bar:
        return write_artifact(new, out, max_file_bytes=max_file_bytes, progress=lambda id, n: _advance(bar, n))


def _bar(what: str, new: NewArtifact) -> Any:
    """Shown on a terminal only."""
    total = sum(o.nbytes for o in new.objects)
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, disable=None, leave=False)


def _advance(bar: Any, nbytes: int) -> None:
    bar.update(nbytes)


def _pairs(flag_name: str, given: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for pair in given:
        name, equals, path = pair.partition("=")
        if not name or not equals or not path:
            raise UsageError(f"{flag_name}: {pair!r} is not NAME=PATH")
        if name in found:
            raise UsageError(f"{flag_name}: {name} is given twice")
        found[name] = Path(path)
    return found


def _components(value: str) -> tuple[str, ...]:
    names = tuple(value.split(","))
    for name in names:
        if name not in COMPONENTS:
            raise UsageError(f"--components: {name!r} cannot be converted; there are {', '.join(COMPONENTS)}")
    if len(set(names)) != len(names) or "text" not in names:
        raise UsageError(f"--components: {value!r} must name text, and nothing twice")
    return names


def _proposal(config: ConvertConfig, base: Artifact) -> tuple[int, ...]:
    """Tokens of the proposal head.   Raises UsageError."""
    spec = identify(flat(base.config))[1]
    domain, special = spec.vocab_size, frozenset[int]()
    if base.tokenizer_source is not None:
        tokenizer = Tokenizer.from_artifact(base)
        domain, special = min(domain, tokenizer.vocab_size), tokenizer.special_ids
    ranking = () if config.ranking is None else read_ranking(config.ranking, domain)
    return shortlist(min(config.proposal_rows, domain), domain, special, ranking)


def _check_model(plan: Plan) -> None:
    """Builds the model's graph over what will be written: a wrong or missing tensor is refused before any is read."""
    family, spec = identify(checkpoint_config(plan.config, "mtp" in plan.components))
    family.build(spec, plan.info, kv=kv_by_name("bf16"), mode="logits")


def summary(plan: Plan, new: NewArtifact, seconds: float) -> str:
    """Bytes and bits per weight of each module."""
    sizes: dict[str, list[int]] = {}
    for m in plan.objects:
        entry = sizes.setdefault(_module(m.parts[0][0], m.policy), [0, 0])
        values = 1
        for d in m.shape:
            values *= d
        entry[0] += m.format.nbytes(m.shape)
        entry[1] += values
    total = [sum(column) for column in zip(*sizes.values(), strict=True)]
    copied = sum(m.format.nbytes(m.shape) for m in plan.objects if m.policy and m.is_copied)
    lines = [f"{'module':<12} {'bytes':>16} {'weights':>16} {'bits':>6}"]
    for name, (nbytes, values) in [*sorted(sizes.items(), key=lambda e: -e[1][0]), ("total", total)]:
        lines.append(f"{name:<12} {nbytes:>16,} {values:>16,} {8 * nbytes / values:>6.2f}")
    rate = new.payload_bytes / 1e9 / max(seconds, 1e-9)
    lines.append(f"{new.payload_bytes:,} bytes ({copied:,} of them copied as they are) in {seconds:.1f} s, "
                 f"{rate:.2f} GB/s")  # fmt: skip
    return "\n".join(lines)


def _module(part: str, policy: str) -> str:
    if not policy:
        return "vectors"
    words: Mapping[str, str] = {
        "embed": "embedding", "output_head": "head", "lm_head": "head", "/attention/": "attention",
        "self_attn": "attention", "/gdn/": "delta", "linear_attn": "delta", "expert": "experts",
        "/moe/": "experts", "mlp": "mlp",
    }  # fmt: skip
    if part.startswith(("mtp", "dflash", "proposal")):
        return part.split("/", 1)[0]
    return next((module for word, module in words.items() if word in part), "other")


def main(argv: Sequence[str] | None = None) -> int:
    return run("ninfer-convert", body, argv)
