"""The loops of docs/your-loop.md may be killed; its other examples: tests/test_examples_of_pages.py."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from replaybuf.storage.sql.inspection.reader import open_reader
from tests.pages import DOCS, Page
from tests.scripts import Program

PAGE = Page("your-loop.md", "## Seven mistakes")
PROMPTS = 240


def program(name: str, text: str = PAGE.text) -> str:
    found = re.search(rf'(?ms)^```python title="{name}"\n(.*?)^```', text)
    assert found is not None
    return found[1]


def run(folder: Path, name: str, url: str) -> Program:
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)} | ({"DATABASE": url} if url else {})
    return Program(str(folder / name), cwd=folder, env=environment)


@pytest.mark.parametrize(
    ("shared_url", "name"),
    [
        ("sqlite", "loop.py"),
        ("sqlite", "loop_async.py"),
        pytest.param("postgresql", "loop_async.py", marks=pytest.mark.long),
        pytest.param("postgresql", "loop.py", marks=pytest.mark.long),
    ],
    indirect=["shared_url"],
)
def test_a_loop_that_is_killed_goes_on_and_trains_each_prompt_once(name: str, shared_url: str, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(program("loop.py"), "utf-8")
    shutil.copy(DOCS / "examples/loop_async.py", tmp_path)
    seen = 0
    while seen < 30:  # killed once
        with run(tmp_path, name, shared_url) as process:
            first = process.stdout.readline()
            expected = (f"step {seen + 1}: ", f"step {seen}: ")  # it was killed before it had saved the weights
            assert first.startswith(expected), first + process.stdout.read()
            steps = [int(first.split()[1].rstrip(":"))]
            deadline = time.monotonic() + 60
            for line in process.stdout:
                assert line.startswith("step "), line + process.stdout.read()
                steps.append(int(line.split()[1].rstrip(":")))
                if seen == 0 and len(steps) == 12:
                    process.send_signal(signal.SIGKILL)
                assert time.monotonic() < deadline
        seen = steps[-1]
    trained = open_reader(shared_url).read(lambda tx: tx.values("SELECT prompt FROM groups WHERE status = 'archived'"))
    assert Counter(trained) == Counter(f"{number} + 5 =" for number in range(PROMPTS))
