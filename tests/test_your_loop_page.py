"""The loops of docs/your-loop.md run, and go on after a kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from replaybuf.storage.sql.inspection.reader import open_reader
from tests.pages import DOCS, Page

PAGE = Page("your-loop.md", "## Seven mistakes")
PROMPTS = 240


def program(name: str) -> str:
    found = re.search(rf'(?ms)^```python title="{name}"\n(.*?)^```', PAGE.text)
    assert found is not None
    return found[1]


def run(folder: Path, name: str, url: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent), "DATABASE": url}
    command = [sys.executable, "-W", "error", name]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


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
    for one in ("loop.py", "loop_async.py"):
        (tmp_path / one).write_text(program(one), "utf-8")
    seen = 0
    while seen < 30:  # killed once
        with run(tmp_path, name, shared_url) as process:
            assert process.stdout is not None
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
