"""Commands of docs/models.md: they parse, and name recipes and sources that exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ninfer.artifacts.recipes import RECIPES, recipe
from ninfer.cli.convert import ConvertConfig, _components, _pairs
from ninfer.config import parse

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "models.md").read_text()
COMMANDS = re.findall(r"`(ninfer-convert --model [^`]+)`", PAGE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_fits_its_recipe(command: str) -> None:
    config = parse(ConvertConfig, shlex.split(command)[1:], prog="ninfer-convert", description="", version="0")
    assert config.recipe is not None and config.out is not None and config.out.suffix == ".ninfer"
    components = _components(config.components)
    needed = {*recipe(config.recipe).sources, *(c for c in components if c.startswith("dflash"))}
    assert set(_pairs("--source", config.source)) == needed
    assert "text" in components


def test_every_recipe_has_its_place_on_the_page() -> None:
    told = {parse(ConvertConfig, shlex.split(c)[1:], prog="", description="", version="").recipe for c in COMMANDS}
    short = set(re.findall(r"also ([a-z0-9, ]+)\)", PAGE)[0].split(", "))
    assert {r.name for r in RECIPES} <= told | short


def test_the_pages_family_is_one_file_that_is_found(tmp_path: Path) -> None:
    """On a copy of the package: a Llama checkpoint that calls itself so gives the same graph; a window is refused."""
    shutil.copytree(ROOT / "ninfer", tmp_path / "ninfer", ignore=shutil.ignore_patterns("__pycache__"))
    ((name, text),) = re.findall(r"put this into\s+`([^`]+)`:\n\n```python\n(.*?)```", PAGE, re.S)
    assert not (tmp_path / name).exists()
    (tmp_path / name).write_text(text)
    check = f"""
from pathlib import Path
from ninfer.artifacts import open_artifact
from ninfer.formats.kv import by_name
from ninfer.models import identify

artifact, keys = open_artifact(Path({str(ROOT / "tests/data/llama")!r})), {{}}
for arch in ("LlamaForCausalLM", "MistralForCausalLM"):
    family, spec = identify({{**artifact.config, "architectures": [arch]}})
    graph = family.build(spec, artifact.info, kv=by_name("bf16"), mode="logits")
    keys[family.name] = [n.op for n in graph.nodes]
assert keys["llama"] == keys["mistral"] and len(keys["llama"]) > 10
try:
    identify({{**artifact.config, "architectures": ["MistralForCausalLM"], "sliding_window": 4096}})
except Exception as error:
    print(error)
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", check], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert "sliding_window is 4096, but only None is supported" in result.stdout
