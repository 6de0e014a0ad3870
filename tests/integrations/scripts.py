"""Pages of docs/frameworks: blocks of code that begin with `# name.py` are files, which are run together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MATH = ROOT / "tests/data/math.verl.jsonl"

_BLOCK = re.compile(r"(?ms)^```python\n(.*?)^```$")


def page(name: str) -> str:
    """Return the text of a page of docs/frameworks."""
    return (ROOT / "docs/frameworks" / name).read_text("utf-8")


def files_of(name: str) -> dict[str, str]:
    """Return the blocks of code of a page by their names. Every block has one."""
    blocks = _BLOCK.findall(page(name))
    named = {re.match(r"# (\w+\.py)\n", block)[1]: block for block in blocks}  # type: ignore[index]
    assert len(named) == len(blocks)
    return named


def lines_of(code: str) -> int:
    """Return the number of lines of code: neither blank ones, nor the name of the file."""
    return sum(1 for line in code.splitlines()[1:] if line.strip())


def write(name: str, folder: Path) -> None:
    """Write the files of a page to a folder."""
    for file, code in files_of(name).items():
        (folder / file).write_text(code, "utf-8")


def start(script: str, folder: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a script in a folder; what it prints goes to `script.log` there."""
    with (folder / f"{script}.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-u", script],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                **(env or {}),
            },
        )


def until(true: Callable[[], object], what: str, *processes: subprocess.Popen[str], seconds: float = 240) -> None:
    """Wait until something is true of the files of processes that go on meanwhile."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds} s until {what}"
        assert all(process.poll() is None for process in processes), f"a process ended before {what}"
        time.sleep(0.05)


def run(name: str, script: str, folder: Path) -> None:
    """Run a file of a page, and compare what it prints with the block that follows it there."""
    write(name, folder)
    match = re.search(rf"(?ms)^```python\n# {script}\n.*?^```\n\n```\n(.*?)^```$", page(name))
    assert match is not None
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    assert done.returncode == 0, done.stderr
    if os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS"):
        text = page(name)
        (ROOT / "docs/frameworks" / name).write_text(
            text[: match.start(1)] + done.stdout + text[match.end(1) :], "utf-8"
        )
    else:
        assert done.stdout == match[1], done.stderr
