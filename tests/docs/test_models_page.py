"""Commands of docs/models.md: they parse, and name recipes and sources that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ninfer.artifacts.recipes import RECIPES, recipe
from ninfer.cli.convert import ConvertConfig, _components, _pairs
from ninfer.config import parse

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "models.md").read_text()
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
