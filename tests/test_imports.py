"""A room imports rooms on lower lines only, and heavy packages are imported in one place each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ninfer"

LINES = (
    {"errors"},
    {"config"},
    {"formats"},
    {"ir"},
    {"artifacts", "devices"},
    {"text", "models", "routes"},
    {"runtime"},
    {"api"},
    {"cli"},
    {"__main__", "convert"},
)
HEIGHT = {room: i for i, line in enumerate(LINES) for room in line}

# Third-party packages and where alone they may be imported (function-level imports count).
ONLY_IN = {
    "cupy": ("devices/cuda",),
    "cupyx": ("devices/cuda",),
    "cuda": ("devices/",),
    "litestar": ("api/",),
    "uvicorn": ("api/", "cli/"),
    "xgrammar": ("text/grammar",),
    "jinja2": ("routes/render", "text/chat"),
    "tokenizers": ("text/",),
    "gguf": ("formats/", "artifacts/"),
}
NO_THREADS = ("ir/", "models/", "routes/")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    relative = path.relative_to(PACKAGE).as_posix()
    room = relative.split("/")[0].removesuffix(".py")
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "ninfer" and rest and room != "__init__":
            other = rest[0]
            assert other == room or HEIGHT[other] < HEIGHT[room], f"{relative} imports {name}: rooms look down only"
        if top in ONLY_IN:
            assert relative.startswith(ONLY_IN[top]), f"{relative} imports {name}; only {ONLY_IN[top]} may"
        if relative.startswith(NO_THREADS):
            assert top not in ("threading", "asyncio"), f"{relative} imports {name}"
