"""The processes of a load: the parent starts workers and trainers, collects their reports, and cleans up.

All processes open the buffer, and begin together. They end with their parent, also by kill -9.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from threading import BrokenBarrierError
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
_LOOK_SECONDS = 0.2
_SWEEP_SECONDS = 60.0
#: Modules that the fork server imports once, before it forks the processes.
PRELOADED = ["replaybuf.cli.bench.run"]

Tell = Callable[[str], object]


# A worker or a trainer


@dataclass(frozen=True, slots=True)
class _Shared:
    """Values that the processes of a load share: a barrier for all that have opened the buffer, and two events."""

    settings: BenchSettings
    opened: Any
    stop: Any
    workers_ended: Any


_shared: _Shared


def _prepare(shared: _Shared) -> None:
    """Prepare a process of the pool."""
    global _shared
    _shared = shared
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    logging.getLogger("replaybuf").setLevel(logging.ERROR)  # sixty processes would write to one terminal


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _main(role: Role, number: int) -> Report:
    """Run a process, and return its report. Raises BrokenBarrierError if another one can't begin."""
    try:
        return asyncio.run(_run(role, number))
    except BrokenBarrierError:
        raise
    except BaseException as error:
        _shared.opened.abort()  # nobody waits for this one
        text = str(error) if isinstance(error, ReplayBufError) else f"{type(error).__name__}: {error}"
        raise ReplayBufError(f"{role} {number}: {text}") from None


async def _run(role: Role, number: int) -> Report:
    settings = _shared.settings
    async with settings.config(f"{role}-{number}").build() as buffer:
        await buffer.count(TASK, "completed")  # opens the buffer
        await asyncio.to_thread(_shared.opened.wait)
        start = time.monotonic()
        load = Load(settings, number, buffer, start, start + settings.seconds, _shared.stop, _shared.workers_ended)
        await (work(load) if role == "worker" else train(load))
        return load.report


# The parent


@dataclass(slots=True)
class Outcome:
    """The measurements of a load.

    `seconds` is the time in which puts were begun. `reports` are the sums of the workers' and the trainers' reports.
    `left` are the uids in the buffer at the end, None if they can't be read. `failed` says which processes have no
    report, and what else failed.
    """

    settings: BenchSettings
    where: str
    seconds: float = 0.0
    reports: dict[Role, Report] = field(default_factory=lambda: {"worker": Report(), "trainer": Report()})
    left: list[int] | None = None
    failed: list[str] = field(default_factory=list)


def run(settings: BenchSettings, tell: Tell) -> Outcome:
    """Run a load, clean up, and return its outcome; `tell` gets lines of progress.

    Raises InputError for a database with other groups than those of loads, and ReplayBufError if a process can't open
    the buffer.
    """
    is_new = _refuse_others(settings.url)
    asyncio.run(_open(settings))
    reader = open_reader(settings.url)
    outcome = Outcome(settings, reader.where)
    try:
        _measure(outcome, tell)
        outcome.left = reader.read(lambda tx: [int(uid) for uid in tx.values(_LEFT_UIDS, buffer=settings.buffer)])
    except StorageError as error:
        outcome.failed.append(f"the database can't be read any more: {error}")
    finally:
        try:
            asyncio.run(_remove(settings, reader))
            forget_buffer(reader, settings.buffer)
        except ReplayBufError as error:
            outcome.failed.append(f"the groups of this load, in buffer {settings.buffer}, are left: {error}")
            tell(outcome.failed[-1])  # nobody sees the outcome after a signal
        if is_new and reader.path and settings.payloads == "database":  # a place belongs to its database
            for suffix in ("", "-wal", "-shm"):
                Path(f"{reader.path}{suffix}").unlink(missing_ok=True)
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


def _measure(outcome: Outcome, tell: Tell) -> None:
    """Run the load: until the workers have ended, and then the trainers. Raises ReplayBufError if it can't begin."""
    # Forked from a process that has imported everything: starting 64 interpreters takes a minute on two processors.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Read at the import of numpy: BLAS threads would be useless here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    settings = outcome.settings
    count = settings.workers + settings.trainers
    shared = _Shared(settings, context.Barrier(count + 1), context.Event(), context.Event())
    with ProcessPoolExecutor(count, context, _prepare, (shared,)) as pool:
        workers = [pool.submit(_main, "worker", number) for number in range(settings.workers)]
        trainers = [pool.submit(_main, "trainer", number) for number in range(settings.trainers)]
        tell(f"{count} processes open the buffer")
        try:
            shared.opened.wait(_OPENING + _OPENING_EACH * count)
            tell(f"they put and take groups, for {settings.seconds:,.0f} s at most")
            start = time.monotonic()
            _collect(outcome, "worker", workers, start + settings.seconds, shared)
            outcome.seconds = max(1e-3, min(time.monotonic() - start, settings.seconds))
            shared.workers_ended.set()
            _collect(outcome, "trainer", trainers, time.monotonic(), shared)
        except BrokenBarrierError:
            raise _first_error([*workers, *trainers]) from None
        finally:  # also after Ctrl-C
            shared.stop.set()
            shared.opened.abort()


def _first_error(futures: list[Future[Report]]) -> ReplayBufError:
    """Return why the processes of a load couldn't begin: the error of the first that failed by itself."""
    errors = [
        error for future in futures if (error := future.exception()) and not isinstance(error, BrokenBarrierError)
    ]
    return ReplayBufError(f"the load can't begin: {errors[0] if errors else 'a process did not open the buffer'}")


def _collect(outcome: Outcome, role: Role, futures: list[Future[Report]], until: float, shared: _Shared) -> None:
    """Wait for processes. They are killed when they don't end in time."""
    waiting = set(futures)
    while waiting := wait(waiting, timeout=_LOOK_SECONDS).not_done:
        if time.monotonic() > until + _ENDING:
            shared.stop.set()
        if time.monotonic() > until + 2 * _ENDING:
            for process in multiprocessing.active_children():
                process.kill()
    for future in futures:
        try:
            outcome.reports[role].add(future.result())
        except ReplayBufError as error:
            outcome.failed.append(str(error))
        except BrokenProcessPool:
            shared.stop.set()
            outcome.failed = outcome.failed or ["a process was killed, and the load ended with it"]


# The database

_OTHER_BUFFERS = """
SELECT buffer FROM rb_lane l
WHERE buffer NOT LIKE :ours AND EXISTS (SELECT 1 FROM rb_group g WHERE g.lane = l.id)
UNION SELECT buffer FROM rb_checkpoint WHERE buffer NOT LIKE :ours ORDER BY 1"""
_LEFT_UIDS = "SELECT g.uid FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE l.buffer = :buffer"


def _refuse_others(url: str) -> bool:
    """Raise InputError for a database with groups or checkpoints of others. Return whether it doesn't exist yet."""
    try:
        reader = open_reader(url)
        buffers = reader.read(lambda tx: tx.values(_OTHER_BUFFERS, ours=f"{PREFIX}%"))
    except UnreachableError:
        return True  # a file that will be created
    except StorageError as error:
        if error.reason != "not a database":
            raise
        return False  # without tables, or invalid, which opening the buffer reports
    if buffers:
        raise InputError(
            f"{reader.where} holds groups or checkpoints of buffer {units.some(buffers)}: a load would take disk and "
            "locks from them. Give it a database of its own on the same server or disk (createdb, or another file)"
        )
    return False
