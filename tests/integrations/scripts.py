"""The scripts of docs/examples for frameworks: those of a folder are run together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.scripts import Program

ROOT = Path(__file__).resolve().parents[2]
MATH = ROOT / "tests/data/math.verl.jsonl"
#: Arguments of Python that start a script as two ranks.
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SILENT = {"TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}


def files_of(folder: str) -> dict[str, str]:
    """Return the scripts of a folder of docs/examples by their names."""
    return {path.name: path.read_text("utf-8") for path in (ROOT / "docs/examples" / folder).glob("*.py")}


def lines_of(code: str) -> int:
    """Return the number of lines of code, without the docstring and blank ones."""
    return sum(1 for line in code.split('"""', 2)[2].splitlines() if line.strip())


def write(folder: str, target: Path) -> None:
    """Copy the scripts of a folder of docs/examples."""
    for file, code in files_of(folder).items():
        (target / file).write_text(code, "utf-8")


def output_of(code: str) -> str:
    """Return what a script says that it prints, in the comment at its end."""
    return "".join(re.findall(r"(?m)^# (.*\n)", code.partition("\n# Prints:\n")[2]))


def start(script: str, folder: Path, modules: tuple[str, ...]) -> Program:
    """Start a script in a folder, where these modules are imported; what it prints goes to `script.log` there."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with (folder / f"{script}.log").open("ab") as log:
        return Program(script, cwd=folder, env=environment, stdout=log, modules=modules)


def until(true: Callable[[], object], event: str, *processes: Program, seconds: float = 240) -> None:
    """Wait until something is true of the files of processes that go on meanwhile."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds} s until {event}"
        assert all(process.poll() is None for process in processes), f"a process ended before {event}"
        time.sleep(0.05)


def printed_by(arguments: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> str:
    """Run Python with these arguments in a folder; return what it prints. It has to succeed."""
    command, environment = (
        [sys.executable, *arguments],
        {**os.environ, "PYTHONPATH": str(ROOT), **SILENT, **(env or {})},
    )
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def run(folder: str, script: str, target: Path, modules: tuple[str, ...]) -> None:
    """Run a script of docs/examples, and compare what it prints with the comment at its end."""
    write(folder, target)
    with Program(script, cwd=target, modules=modules) as program:
        printed, _ = program.communicate(timeout=300)
        assert printed == output_of(files_of(folder)[script])
        assert program.returncode == 0
