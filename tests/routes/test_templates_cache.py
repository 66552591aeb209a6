"""Compiled templates are kept between processes, and a folder that cannot be written does no harm."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from ninfer.devices.cuda_sim import sim_info
from ninfer.routes.render import Renderer

TEMPLATE = "cuda/embed.cu.j2"


def renderer(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Renderer:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return Renderer(sim_info())


def test_a_second_process_does_not_compile_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer(monkeypatch, tmp_path)._env.get_template(TEMPLATE)
    kept = list((tmp_path / "ninfer" / "templates").iterdir())
    assert kept
    monkeypatch.setattr(jinja2.Environment, "compile", lambda *a, **k: pytest.fail("a template was compiled again"))
    assert renderer(monkeypatch, tmp_path)._env.get_template(TEMPLATE).name == TEMPLATE


def test_without_a_folder_templates_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = renderer(monkeypatch, blocked)
    assert found._env.bytecode_cache is None and found._env.get_template(TEMPLATE).name == TEMPLATE


def test_a_damaged_entry_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer(monkeypatch, tmp_path)._env.get_template(TEMPLATE)
    for entry in (tmp_path / "ninfer" / "templates").iterdir():
        entry.write_bytes(entry.read_bytes()[:60])
    assert renderer(monkeypatch, tmp_path)._env.get_template(TEMPLATE).name == TEMPLATE
