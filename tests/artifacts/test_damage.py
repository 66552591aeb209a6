"""Files with everything in them, damaged at random; parts that are missing, altered or of another conversion."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from ninfer.artifacts import open_artifact
from ninfer.artifacts.convert import make_plan
from ninfer.artifacts.convert_objects import to_artifact
from ninfer.artifacts.ninfer_write import NewArtifact, raw_object, write_artifact
from ninfer.artifacts.recipes import recipe
from ninfer.config import EngineConfig
from ninfer.errors import ArtifactError, NinferError
from ninfer.models import dflash
from ninfer.models.family import Rounds
from ninfer.runtime import load as loading
from ninfer.runtime.load import open_model
from ninfer.runtime.weights import bind_weights
from tests.artifacts.test_ninfer import alter, places
from tests.checkpoints import DATA
from tests.drawn_drafter import drafter_checkpoint

DENSE = DATA / "qwen3_5_dense"
SPECS = ("mtp", "dflash2")


def everything(tmp_path: Path) -> NewArtifact:
    """Text, MTP, a DFlash2 drafter, a proposal head; uses with every auxiliary; a vision component that is not run."""
    drafter = open_artifact(drafter_checkpoint(DATA / "dflash2", tmp_path / "dflash2"))
    plan = make_plan(
        recipe("q8"), open_artifact(DENSE), {"dflash2": drafter}, name="all", proposal=range(3, 90),
        components=("text", "mtp", "dflash2"),
    )  # fmt: skip
    new = to_artifact(plan)
    # hidden size 64: rotations of 1024 cannot be, but what they hang on can be damaged all the same
    signs = raw_object("a.signs", np.full(64, 0x3F80, "<u2").tobytes(), shape=(64,), format="bf16",
                       layout="contiguous_le_v1")  # fmt: skip
    divisor = raw_object("a.divisor", struct.pack("<f", 2.0), shape=(), format="fp32", layout="contiguous_le_v1")
    uses = [dict(u) for u in new.uses]
    uses[3]["auxiliaries"] = {"activation_input_divisor": {"object": "a.divisor"}}
    components = {**new.components, "vision": {"config": {"depth": 2}, "target": "text"}}
    return attrs.evolve(new, objects=[*new.objects, signs, divisor], uses=uses, components=components)


def read_all(path: Path, specs: Sequence[str] = SPECS) -> None:
    """Everything that a start with drafts does before it copies weights."""
    for spec in specs:
        model = open_model(EngineConfig(model=str(path), spec=spec, device="cpu"), tokenizer_needed=False)
        rounds = Rounds(hidden_rows=8, journal_rows=4)
        modes = ["verify", "fold", "draft"]
        if model.drafter is not None:
            rounds, modes = Rounds(0, 4, model.drafter.taps, 8, 16), [dflash.CONTEXT, dflash.BLOCK]
        for mode in modes:
            bind_weights(model.graph(mode, rounds), model.artifact)
        model.artifact.close()


@pytest.mark.parametrize("seed,count", [(2026, 100), pytest.param(7, 1000, marks=pytest.mark.slow)])
def test_a_file_with_everything_in_it_may_be_damaged_anywhere(tmp_path: Path, seed: int, count: int) -> None:
    """Values of the directory replaced or dropped: an error of ours in one line, or a model that can be read."""
    path = tmp_path / "model.ninfer"
    write_artifact(everything(tmp_path), path)
    read_all(path)
    raw, rng = path.read_bytes(), np.random.default_rng(seed)
    (n,) = struct.unpack("<Q", raw[8:16])
    root = json.loads(raw[32 : 32 + n])
    pools = [
        [p for p in places(root) if p[0] == "components"],
        [p for p in places(root) if p[0] in ("bindings", "uses") and ("proposal" in str(p) or "uses" in p)],
        [p for p in places(root) if p[0] in ("objects", "files", "metadata")],
        [p for p in places(root) if p[0] == "bindings"],
    ]
    refused, seen = 0, set[str]()
    tracemalloc.start()
    for i in range(count):
        changed, pool = json.loads(raw[32 : 32 + n]), pools[i % len(pools)]
        place = alter(changed, pool, rng)
        text = json.dumps(changed, separators=(",", ":")).encode()
        if len(text) > n:
            continue
        path.write_bytes(raw[:32] + text.ljust(n) + raw[32 + n :])
        try:
            read_all(path, SPECS[i // 4 % 2 :][:1])
        except NinferError as error:
            refused += 1
            seen.add(str(error).rsplit(": ", 1)[-1][:30])
            assert "\n" not in str(error), f"seed {seed}, mutation {i}: {place}"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 128 << 20
    assert refused > count // 2 and len(seen) > count // 5


Change = Callable[[Path, Path], Any]  # of the last part, beside that of another conversion of the same model

PARTS: dict[str, tuple[Change, str]] = {
    "missing": (lambda own, other: own.unlink(), "which holds .* is missing beside it"),
    "of another set": (lambda own, other: shutil.copy(other, own), r"belongs to another set \(offset 16\)"),
    "cut short": (lambda own, other: own.write_bytes(own.read_bytes()[:-100]), "it is truncated or damaged"),
    "longer": (lambda own, other: own.write_bytes(own.read_bytes() + b"x"), "it is truncated or damaged"),
    "of no model": (lambda own, other: own.write_bytes(b"x" * 5000), "not a part of a .ninfer model"),
}


@pytest.mark.parametrize("name", PARTS)
def test_no_weight_is_copied_where_a_part_does_not_fit(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, message = PARTS[name]
    new = to_artifact(make_plan(recipe("bf16"), open_artifact(DENSE), {}, name="x"))
    for which in ("own", "other"):
        write_artifact(new, tmp_path / f"{which}.ninfer", max_file_bytes=1 << 18)
    last = sorted(tmp_path.glob("own.ninfer.part-*"))[-1]
    change(last, tmp_path / last.name.replace("own", "other"))
    from ninfer.devices.cpu import CpuDevice

    def copied(*args: Any) -> Any:
        raise AssertionError("weights were given to the device")

    monkeypatch.setattr(CpuDevice, "memory", copied)
    config = EngineConfig(model=str(tmp_path / "own.ninfer"), device="cpu", max_context=256)
    with pytest.raises(ArtifactError, match=message) as error:
        loading.load_scorer(config, "logits", tokenizer_needed=False)
    assert "\n" not in str(error.value)
