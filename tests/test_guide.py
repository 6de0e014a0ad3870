"""The guide's promises: its loop prints what it says, its other blocks run after it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
GUIDE = (ROOT / "docs" / "guide.md").read_text("utf-8")


def _blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def _run(code: str, folder: Path) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT)},
    )
    return done.stdout, done.stderr


def test_the_blocks_of_the_guide_run_and_print_what_it_says(tmp_path: Path) -> None:
    loop, *others = _blocks(GUIDE)
    output = re.search(r"```python\n.*?```\n\n```\n(.*?)```", GUIDE, re.DOTALL).group(1)
    assert _run(loop, tmp_path) == (output, "")
    assert others
    for code in others:
        assert _run(code, tmp_path) == ("", "")


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_python_blocks_compile(path: Path) -> None:
    for code in _blocks(path.read_text("utf-8")):
        compile(code, str(path), "exec")
