"""A virtual environment for each group of peers, made once, below a cache folder."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.peers.registry import ENVIRONMENTS, Environment

#: A build of torch for CPUs alone: the one of PyPI brings gigabytes for GPUs along.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TIMEOUT_SECONDS = 1800
_OLDEST = 10


class CannotInstallError(Exception):
    """An environment can't be made. The text says why."""


def cache_folder() -> Path:
    """Return the folder of all environments: REPLAYBUF_PEERS_DIR, or one in the user's cache."""
    folder = os.environ.get("REPLAYBUF_PEERS_DIR")
    return (
        Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "replaybuf-peers"
    )


@functools.cache
def python_of(name: str) -> str:
    """Return the interpreter of an environment, which is made if it isn't there. Raise CannotInstallError."""
    if not name:
        return sys.executable
    wanted, folder = ENVIRONMENTS[name], cache_folder() / name
    python, mark = folder / "bin" / "python", folder / "installed.json"
    described = json.dumps([wanted.packages, wanted.torch])
    if mark.exists() and mark.read_text() == described and python.exists():
        return str(python)
    say(f"{name}: making an environment of some {wanted.megabytes:,} MB in {folder}")
    start = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    _make(folder, python, wanted)
    mark.write_text(described)
    say(f"{name}: installed in {time.monotonic() - start:.0f} s")
    return str(python)


def _make(folder: Path, python: Path, wanted: Environment) -> None:
    free = shutil.disk_usage(_existing(folder)).free / 1e6
    if free < 2 * wanted.megabytes:
        raise CannotInstallError(f"needs {2 * wanted.megabytes:,} MB of disk, {free:,.0f} are free")
    _run([_interpreter(wanted.newest), "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if wanted.torch:  # alone, so that the other index is asked for nothing else
        _run([*pip, "--no-deps", "--retries", "1", "--extra-index-url", TORCH_INDEX, wanted.torch])
    _run([*pip, *wanted.packages, *((wanted.torch,) if wanted.torch else ()), "psutil>=6"])


def _interpreter(newest: int) -> str:
    if _OLDEST <= sys.version_info.minor <= newest:
        return sys.executable
    for minor in range(newest, _OLDEST - 1, -1):
        interpreter = shutil.which(f"python3.{minor}")
        # pyenv has a command for each version that it knows, also if it isn't to be used
        if interpreter and subprocess.run([interpreter, "-c", ""], capture_output=True).returncode == 0:
            return interpreter
    raise CannotInstallError(f"needs Python 3.{_OLDEST} to 3.{newest}, of which none is on PATH")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise CannotInstallError(f"pip needed more than {TIMEOUT_SECONDS // 60} minutes") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
        raise CannotInstallError(lines[0].removeprefix("ERROR: ")[:200] if lines else "pip failed without a word")


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def say(line: str) -> None:
    """Show progress, beside the table on standard output."""
    print(line, file=sys.stderr, flush=True)
