"""Processes that start in milliseconds: they are forked from one that has imported everything and opened nothing."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from tests.faults.ledger import Ledger, entries

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.faults.preloaded"])
_started: list[BaseProcess] = []


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
