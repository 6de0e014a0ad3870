"""Processes that start in milliseconds: they are forked from one that has imported everything and opened nothing."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.faults.preloaded"])
_started: list[BaseProcess] = []
#: Enough for what is left at the end, in seconds.
_PATIENCE = 600


def barrier(count: int) -> Barrier:
    """What so many processes wait at for each other."""
    return _context.Barrier(count)


def pipe() -> tuple[Connection, Connection]:
    """Two ends of a channel, one of which is handed to a process."""
    return _context.Pipe()


def start(function: Callable[..., Any], ledger: Path, *arguments: object) -> BaseProcess:
    """Run `function(Ledger(ledger), *arguments)`, which may be a coroutine function, in a process of its own."""
    process = _context.Process(target=_run, args=(function, ledger, arguments), daemon=True)
    process.start()
    _started.append(process)
    return process


def reap() -> None:
    """Kill what a test that failed has left."""
    while _started:
        process = _started.pop()
        with contextlib.suppress(ValueError):  # it was closed, as it should be
            kill(process)


def _run(function: Callable[..., Any], path: Path, arguments: tuple[Any, ...]) -> None:
    ledger = Ledger(path)
    try:
        result = function(ledger, *arguments)
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except BaseException:
        ledger.write("problem", repr(traceback.format_exc()))
        raise


def end(process: BaseProcess, ledger: Path, seconds: float = 60) -> int:
    """Wait for a process: 0, or SIGKILL's -9 for one that was killed; any other end is a failure of the test."""
    process.join(seconds)
    problems = entries(ledger, "problem")
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the process hangs; its ledger ends with {ledger.read_text()[-1000:]!r}")
    assert problems == [], problems[0].replace("\\n", "\n")
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    code = process.exitcode
    process.close()
    return code


def kill(process: BaseProcess) -> None:
    """SIGKILL, and wait for the end."""
    process.kill()
    process.join()
    process.close()


class Ledger:
    """A file that one process writes to. A line that was written survives the death of its writer."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, kind: str, *values: object) -> None:
        """One line: what happened, and to which."""
        os.write(self._file, (" ".join([kind, *map(str, values)]) + "\n").encode())


def entries(path: Path, wanted: str) -> list[str]:
    """What was written of a kind, in order."""
    if not path.exists():
        return []
    lines = [line.partition(" ") for line in path.read_text().split("\n")[:-1]]  # whole ones
    return [text for kind, _, text in lines if kind == wanted]


def numbers(path: Path, kind: str) -> list[int]:
    """As `entries`, where they are numbers, several to a line."""
    return [int(number) for text in entries(path, kind) for number in text.split()]


def wait_for_lines(path: Path, count: int) -> None:
    """Wait until so many lines were written, of any kind."""
    deadline = time.monotonic() + 120
    while (line_count := _lines(path)) < count:
        assert time.monotonic() < deadline, f"{path.name} has {line_count} lines of {count}"
        time.sleep(0.005)


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


class Crowd:
    """Processes in roles, each with a ledger of its own; whoever is killed is started again, with a new ledger.

    `call(role, number)` gives the function of the process of a number, as for `start`, and its arguments.
    """

    def __init__(self, folder: Path, seed: int, call: Callable[[str, int], tuple[Any, ...]]) -> None:
        self.folder, self.chance, self._call = folder, random.Random(seed), call
        self.running: dict[str, tuple[BaseProcess, Path]] = {}
        self.ledgers: list[Path] = []
        self.killed = 0

    def start(self, *roles: str) -> None:
        for role in roles:
            number = len(self.ledgers) + 1
            self.ledgers.append(ledger := self.folder / f"{role}-{number}.ledger")
            function, *arguments = self._call(role, number)
            self.running[role] = start(function, ledger, *arguments), ledger

    def wait_for_lines(self, role: str, count: int, seconds: float = 0.0) -> bool:
        """Wait until it has written so many lines, and for a part of some seconds; return False if it has ended."""
        process, ledger = self.running[role]
        while process.is_alive() and _lines(ledger) < count:
            time.sleep(0.005)
        time.sleep(self.chance.random() * seconds)
        assert entries(ledger, "problem") == [], entries(ledger, "problem")[0].replace("\\n", "\n")
        return process.is_alive()

    def shoot(self, role: str, lines: int = 1, seconds: float = 0.2) -> None:
        """Kill one after so many lines, at whatever it is doing, and start it again; not one that has ended."""
        if self.wait_for_lines(role, lines, seconds):
            kill(self.running[role][0])
            self.killed += 1
            self.start(role)

    def end(self, prefix: str = "") -> None:
        """Wait for all that have not ended, or those of a kind of role; they have to end well."""
        for role in [role for role in self.running if role.startswith(prefix)]:
            assert end(*self.running.pop(role), _PATIENCE) == 0
