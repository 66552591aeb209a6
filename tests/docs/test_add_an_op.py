"""docs/add-an-op.md, followed to the letter on a copy of the project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_page_adds_an_op_that_passes_its_tests(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "add-an-op.md").read_text()
    for part in ("ninfer", "tests/routes", "tests/__init__.py", "pyproject.toml"):
        source, target = ROOT / part, tmp_path / part
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)

    files = re.findall(r"[Pp]ut this into\s+`([^`]+)`:\n\n```\w+\n(.*?)```", page, re.S)
    assert len(files) == 3
    for name, text in files:
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text(text)

    imported, entry, table_import, table = re.findall(r"```diff\n\+(.*?)\n```", page)
    ops = tmp_path / "ninfer/ir/ops/__init__.py"
    text = ops.read_text()
    text = text.replace("\nfrom ninfer.ir.ops.sample import", f"\n{imported}\nfrom ninfer.ir.ops.sample import", 1)
    text = text.replace("        Embed,\n", f"        Embed,\n{entry}\n", 1)
    assert text.count("ReluSquared") == 2
    ops.write_text(text)
    tables = tmp_path / "ninfer/routes/tables.py"
    text = tables.read_text().replace("\nfrom ninfer.routes.route", f"\n{table_import}\nfrom ninfer.routes.route", 1)
    tables.write_text(f"{text}{table}\n")

    (commands,) = re.findall(r"## 3\. Check it\n\n```\n(.*?)```", page, re.S)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in commands.splitlines():
        result = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
        assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-2000:]}"
        if "pytest" in command:
            assert re.search(r"[1-9]\d* passed", result.stdout), result.stdout
