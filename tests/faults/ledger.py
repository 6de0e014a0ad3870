"""The truth, kept outside of the store: lines that the kernel has before anything else happens."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Ledger:
    """A file that one process writes to. A line that was written survives the death of its writer."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, *about: object) -> None:
        """One line: what happened, and to which."""
        os.write(self._file, (" ".join([what, *map(str, about)]) + "\n").encode())


def entries(path: Path, what: str) -> list[str]:
    """What was written of a kind, in order."""
    if not path.exists():
        return []
    lines = [line.partition(" ") for line in path.read_text().split("\n")[:-1]]  # whole ones
    return [about for kind, _, about in lines if kind == what]


def numbers(path: Path, what: str) -> list[int]:
    """As `entries`, where they are numbers, several to a line."""
    return [int(number) for about in entries(path, what) for number in about.split()]


def wait_for_lines(path: Path, count: int) -> None:
    """Wait until so many lines were written, of any kind."""
    deadline = time.monotonic() + 120
    while (there := path.read_text().count("\n") if path.exists() else 0) < count:
        assert time.monotonic() < deadline, f"{path.name} has {there} lines of {count}"
        time.sleep(0.005)
