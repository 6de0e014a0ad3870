"""The processes of a load: the parent starts workers and trainers, collects their reports, and cleans up.

A process opens the buffer, says so, gets the time of the first call, and sends its report at its end. It ends with its
parent, also by kill -9.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Literal

from replaybuf.cli.bench.load import TASK, BenchSettings, Load, Report, train, work
from replaybuf.common import units
from replaybuf.errors import InputError, ReplayBufError, StorageError, UnreachableError
from replaybuf.storage.sql.inspection.measures import count_unswept
from replaybuf.storage.sql.inspection.reader import Reader, open_reader
from replaybuf.storage.sql.inspection.writer import forget_buffer

Role = Literal["worker", "trainer"]
#: Prefix of the names of loads' buffers; other buffers may hold a user's groups.
PREFIX = "replaybuf-bench-"
#: Timeouts in seconds: for the processes to open the buffer (in all, and more for each), and to end after the load.
_OPENING, _OPENING_EACH, _ENDING = 60.0, 1.0, 60.0
_SOON = 0.3  # seconds from when all processes are ready to the first call
_LOOK_SECONDS = 0.2
_SWEEP_SECONDS = 60.0
#: Modules that the fork server imports once, before it forks the processes.
PRELOADED = ["replaybuf.cli.bench.run"]
_READY = "ready"

Tell = Callable[[str], object]


# A worker or a trainer


def _main(connection: Connection, role: Role, number: int, settings: BenchSettings, stop: Any, ended: Any) -> None:
    """Run a process, whose last message is its report, or why it failed."""
    for one in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group: the parent decides
        signal.signal(one, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.getLogger("replaybuf").setLevel(logging.ERROR)  # sixty processes would write to one terminal
    message: Report | str
    try:
        message = asyncio.run(_run(connection, role, number, settings, stop, ended))
    except BaseException as error:
        message = str(error) if isinstance(error, ReplayBufError) else f"{type(error).__name__}: {error}"
    with suppress(OSError):
        connection.send(message)
    sys.exit(isinstance(message, str))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


async def _run(
    connection: Connection, role: Role, number: int, settings: BenchSettings, stop: Any, ended: Any
) -> Report:
    async with settings.config(f"{role}-{number}").build() as buffer:
        await buffer.count(TASK, "completed")  # opens the buffer
        connection.send(_READY)
        start = await asyncio.to_thread(connection.recv)
        load = Load(settings, number, buffer, start, start + settings.seconds, stop, ended)
        if await load.at(start):
            await (work(load) if role == "worker" else train(load))
        load.report.cpu = time.process_time()
        return load.report


# The parent


@dataclass(slots=True)
class Child:
    """A process, and why it failed, if it did."""

    role: Role
    number: int
    process: Any
    connection: Connection
    why: str | None = None

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"


@dataclass(slots=True)
class Outcome:
    """The measurements of a load.

    `began` is in seconds since the epoch; `seconds` is the time in which puts were begun. `reports` are the sums of the
    workers' and the trainers' reports. `left` are the uids in the buffer at the end, None if they can't be read, with
    the reason in `notes`. `signalled`: the number of the signal that ended the load early, 0 for none.
    """

    settings: BenchSettings
    where: str
    began: float = 0.0
    seconds: float = 0.0
    children: list[Child] = field(default_factory=list)
    reports: dict[Role, Report] = field(default_factory=lambda: {"worker": Report(), "trainer": Report()})
    left: list[int] | None = None
    load: float = 0.0
    signalled: int = 0
    notes: list[str] = field(default_factory=list)


def run(settings: BenchSettings, tell: Tell) -> Outcome:
    """Run a load, clean up, and return its outcome; `tell` gets lines of progress.

    Ctrl-C and SIGTERM end it early, with the measurements so far. Raises InputError for a database with other groups
    than those of loads, and ReplayBufError if a process can't open the buffer.
    """
    settings.check()
    _refuse_others(settings.url)
    asyncio.run(_open(settings))
    reader = open_reader(settings.url)
    outcome = Outcome(settings, reader.where)
    with _signals(outcome):
        try:
            _measure(outcome, reader, tell)
        finally:
            if not settings.keep:
                try:
                    asyncio.run(_remove(settings, reader))
                    forget_buffer(reader, settings.buffer)
                except ReplayBufError as error:
                    outcome.notes.append(f"the groups of this load, in buffer {settings.buffer}, are left: {error}")
    return outcome


async def _open(settings: BenchSettings) -> None:
    """Create the database and its schema if they don't exist."""
    async with settings.config("bench").build() as buffer:
        await buffer.count(TASK, "completed")


async def _remove(settings: BenchSettings, reader: Reader) -> None:
    """Delete the groups of the load, and wait until their payloads are swept."""
    async with settings.config("bench").build() as buffer:
        await buffer.delete({})
        deadline = time.monotonic() + _SWEEP_SECONDS
        while await asyncio.to_thread(reader.read, count_unswept) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)


@contextmanager
def _signals(outcome: Outcome) -> Iterator[None]:
    """Record SIGINT and SIGTERM in the block instead of ending; a second signal ends the process."""

    def note(number: int, _: FrameType | None) -> None:
        if outcome.signalled:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        outcome.signalled = number

    noted = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, note) for number in noted]
    try:
        yield
    finally:
        for number, handler in zip(noted, before, strict=True):
            signal.signal(number, handler)


def _measure(outcome: Outcome, reader: Reader, tell: Tell) -> None:
    # Forked from a process that has imported everything: starting 64 interpreters takes a minute on two processors.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    # Read at the import of numpy: BLAS threads would be useless here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    settings, stop, ended = outcome.settings, context.Event(), context.Event()
    try:
        roles: Sequence[tuple[Role, int]] = (("worker", settings.workers), ("trainer", settings.trainers))
        for role, count in roles:
            for number in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_main, args=(theirs, role, number, settings, stop, ended), daemon=True)
                process.start()
                theirs.close()
                outcome.children.append(Child(role, number, process, ours))
        _let_go(outcome, stop, ended, tell)
        outcome.load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    finally:
        for child in outcome.children:
            child.process.join(5 if stop.is_set() else 0)
            child.process.kill()
            child.process.join()
            child.connection.close()
    try:
        outcome.left = reader.read(lambda tx: [int(uid) for uid in tx.values(_LEFT, buffer=settings.buffer)])
    except ReplayBufError as error:
        outcome.notes.append(f"the database can't be read any more: {error}")


def _let_go(outcome: Outcome, stop: Any, ended: Any, tell: Tell) -> None:
    """Run the load: until the workers have ended, and then the trainers. Raises ReplayBufError if it can't begin."""
    children = outcome.children
    tell(f"{len(children)} processes open the buffer")
    deadline = time.monotonic() + _OPENING + _OPENING_EACH * len(children)
    for child in children:
        if (message := _receive(child, outcome, deadline)) != _READY:
            raise ReplayBufError(f"{child.name} can't begin: {message or child.why}")
    if outcome.signalled:
        raise KeyboardInterrupt
    tell(f"they put and take groups, for {outcome.settings.seconds:,.0f} s at most")
    start, outcome.began = time.monotonic() + _SOON, time.time() + _SOON
    until = start + outcome.settings.seconds
    for child in children:
        with suppress(OSError):  # it has ended, which is found out when its report is due
            child.connection.send(start)
    for role in ("worker", "trainer"):
        for child in (one for one in children if one.role == role):
            message = _receive(child, outcome, max(until, time.monotonic()) + _ENDING, stop)
            if isinstance(message, Report):
                outcome.reports[child.role].add(message)
            else:
                child.why = child.why or message
        if role == "worker":
            outcome.seconds = max(1e-3, min(time.monotonic(), until) - start)
        ended.set()
    stop.set()


def _receive(child: Child, outcome: Outcome, deadline: float, stop: Any = None) -> Any:
    """Return the next message of a process; None if it has ended without one, or is killed after the deadline."""
    while not child.connection.poll(_LOOK_SECONDS):
        if outcome.signalled and stop is not None:
            stop.set()
        if time.monotonic() > deadline:
            child.process.kill()
            child.why = "it was not heard of in time, and was killed"
    try:
        return child.connection.recv()
    except (EOFError, OSError):
        child.process.join(5)
        code = child.process.exitcode
        killed = code is not None and code < 0
        how = f"was killed ({signal.Signals(-code).name})" if killed else f"ended with exit code {code}"
        child.why = child.why or f"it {how}, without a word"
        return None


# The database

_OTHERS = """
SELECT buffer FROM rb_lane l
WHERE buffer NOT LIKE :ours AND EXISTS (SELECT 1 FROM rb_group g WHERE g.lane = l.id)
UNION SELECT buffer FROM rb_checkpoint WHERE buffer NOT LIKE :ours ORDER BY 1"""
_LEFT = "SELECT g.uid FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE l.buffer = :buffer"


def _refuse_others(url: str) -> None:
    """Raise InputError for a database with groups or checkpoints in buffers other than those of loads."""
    try:
        reader = open_reader(url)
    except UnreachableError:
        return  # a file that will be created
    try:
        found = reader.read(lambda tx: tx.values(_OTHERS, ours=f"{PREFIX}%"))
    except StorageError as error:
        if error.reason != "not a database":
            raise
        return  # without tables, or invalid, which opening the buffer reports
    if found:
        raise InputError(
            f"{reader.where} holds groups or checkpoints of buffer {units.some(found)}: a load would take disk and "
            "locks from them. Give it a database of its own on the same server or disk (createdb, or another file)"
        )
