"""The parent process of a load: it starts the others, collects their reports, watches the database, and cleans up."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from replaybuf import units
from replaybuf.bench.load import TASK, BenchSettings, Report
from replaybuf.bench.process import GO_ON, PAUSE, READY, STOP, Failed, Go, Role, main
from replaybuf.errors import InputError, ReplayBufError, StorageError, UnreachableError
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.inspection.measures import count_unswept, tallies_of
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction, open_reader
from replaybuf.storage.sql.inspection.writer import forget_buffer

#: Prefix of the names of loads' buffers; other buffers may hold a user's groups.
PREFIX = "replaybuf-bench-"
#: Timeouts in seconds: for the processes to open the buffer (in all, and more for each), and to end after `STOP`.
_OPENING, _OPENING_EACH, _ENDING = 60.0, 1.0, 60.0
_SOON = 0.3  # seconds from when all processes are ready to the first call
#: Seconds between looks at the processes, and between samples of the database.
_LOOK_SECONDS, _SAMPLE_SECONDS = 0.2, 1.0
_SWEEP_SECONDS = 60.0
#: Modules that the fork server imports once, before it forks the processes.
PRELOADED = ["replaybuf.bench.process"]

Tell = Callable[[str], object]


@dataclass(slots=True)
class Child:
    """A process: whether it is ready, whether it has ended, and the reason (`why`; None after a normal end)."""

    role: Role
    number: int
    process: Any
    connection: Connection
    ready: bool = False
    ended: bool = False
    why: str | None = None
    cpu: float = 0.0

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
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    waits: Counter[str] = field(default_factory=Counter)
    load: float = 0.0
    signalled: int = 0
    notes: list[str] = field(default_factory=list)


def run(settings: BenchSettings, tell: Tell) -> Outcome:
    """Run a load, clean up, and return its outcome; `tell` gets a line of progress every few seconds.

    Ctrl-C and SIGTERM end it early, with the measurements so far. Raises InputError for a database with other groups
    than those of loads, and ReplayBufError if a process can't open the buffer.
    """
    settings.check()
    refuse_others(settings.url)
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


# The processes


def _measure(outcome: Outcome, reader: Reader, tell: Tell) -> None:
    outcome.children = _start(outcome.settings)
    try:
        _until_ready(outcome, tell)
        outcome.before = figures(reader)
        with DatabaseSampler(reader, outcome.settings.buffer, outcome.waits) as sampler:
            _let_go(outcome, sampler, tell)
        outcome.load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    finally:
        _end(outcome.children)
    try:
        outcome.after = figures(reader)
        outcome.left = reader.read(lambda tx: [int(uid) for uid in tx.values(_LEFT, buffer=outcome.settings.buffer)])
    except ReplayBufError as error:
        outcome.notes.append(f"the database can't be read any more: {error}")


def _start(settings: BenchSettings) -> list[Child]:
    # Forked from a process that has imported everything: starting 64 interpreters takes a minute on two processors.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    # Read at the import of numpy: BLAS threads would be useless here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    children = []
    roles: Sequence[tuple[Role, int]] = (("worker", settings.workers), ("trainer", settings.trainers))
    for role, count in roles:
        for number in range(count):
            ours, theirs = context.Pipe()
            process: Any = context.Process(target=main, args=(theirs, role, number, settings), daemon=True)  # type: ignore[attr-defined]
            process.start()
            theirs.close()
            children.append(Child(role, number, process, ours))
    return children


def _until_ready(outcome: Outcome, tell: Tell) -> None:
    """Wait until all processes have opened the buffer. Raises ReplayBufError if one can't, or takes too long."""
    children = outcome.children
    tell(f"{len(children)} processes open the buffer")
    deadline = time.monotonic() + _OPENING + _OPENING_EACH * len(children)
    while not all(child.ready for child in children):
        _hear(outcome)
        if failed := [child for child in children if child.ended]:
            raise ReplayBufError(f"{failed[0].name} can't begin: {failed[0].why}")
        if outcome.signalled:
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            waiting = sum(not child.ready for child in children)
            raise ReplayBufError(f"{waiting} of {len(children)} processes haven't opened {outcome.where} in time")


def _let_go(outcome: Outcome, sampler: DatabaseSampler, tell: Tell) -> None:
    """Run the load: first until the workers have ended, then until the trainers have."""
    settings = outcome.settings
    start = time.monotonic() + _SOON
    until = start + settings.seconds
    outcome.began = time.time() + _SOON
    for child in outcome.children:
        _send(child, Go(start, until))
    workers, trainers = ([one for one in outcome.children if one.role == role] for role in ("worker", "trainer"))
    told, paused = time.monotonic(), False
    while time.monotonic() < until and not outcome.signalled and not all(one.ended for one in workers):
        _hear(outcome)
        if settings.most and paused != (sampler.groups > settings.most):
            paused = not paused
            for child in workers:
                _send(child, PAUSE if paused else GO_ON)
        if time.monotonic() - told >= 5:
            told = time.monotonic()
            tell(_progress(outcome, told - start))
    outcome.seconds = max(1e-3, min(time.monotonic(), until) - start)
    for some in (workers, trainers):
        for child in some:
            _send(child, STOP)
        deadline = time.monotonic() + _ENDING
        while not all(child.ended for child in some):
            _hear(outcome)
            if time.monotonic() > deadline:
                for child in (one for one in some if not one.ended):
                    child.process.kill()
                    child.why, child.ended = f"it didn't end within {_ENDING:g} s, and was killed", True


def _send(child: Child, message: Any) -> None:
    with suppress(OSError):  # the process has ended, which `_hear` handles
        child.connection.send(message)


def _hear(outcome: Outcome) -> None:
    """Handle messages of processes, for at most `_LOOK_SECONDS`."""
    open_ones = {child.connection: child for child in outcome.children if not child.ended}
    for connection in wait([*open_ones], _LOOK_SECONDS):
        child = open_ones[connection]  # type: ignore[index]
        try:
            message = child.connection.recv()
        except (EOFError, OSError):
            child.process.join(5)
            code = child.process.exitcode
            killed = code is not None and code < 0
            how = f"was killed ({signal.Signals(-code).name})" if killed else f"ended with exit code {code}"
            child.ended, child.why = True, child.why or f"it {how}, without a word"
            continue
        if message == READY:
            child.ready = True
        elif isinstance(message, Failed):
            child.why, child.ended = message.why, True
        else:
            child.ended, child.cpu = message.last, message.cpu
            _add(outcome.reports[child.role], message)


def _add(total: Report, one: Report) -> None:
    total.put += one.put
    total.taken += one.taken
    for call, seconds in one.latencies.items():
        total.latencies[call] += seconds
    total.errors.update(one.errors)
    total.waited += one.waited
    total.late += one.late
    total.in_doubt += one.in_doubt


def _progress(outcome: Outcome, at: float) -> str:
    put, taken = len(outcome.reports["worker"].put), len(outcome.reports["trainer"].taken)
    errors = sum(report.errors.total() for report in outcome.reports.values())
    clock, length = (f"{int(seconds) // 60}:{int(seconds) % 60:02d}" for seconds in (at, outcome.settings.seconds))
    line = f"{clock} of {length}: {put:,} groups put, {taken:,} taken, {put - taken:,} in the buffer"
    return line + (f", {errors:,} errors" if errors else "")


def _end(children: Sequence[Child]) -> None:
    """Wait for the processes that have ended, and kill the others."""
    for child in children:
        if not child.ended:
            child.process.kill()
    for child in children:
        child.process.join(5)
        if child.process.is_alive():
            child.process.kill()
            child.process.join()
        child.connection.close()


# The database

_OTHERS = """
SELECT buffer FROM rb_lane l
WHERE buffer NOT LIKE :ours AND EXISTS (SELECT 1 FROM rb_group g WHERE g.lane = l.id)
UNION SELECT buffer FROM rb_checkpoint WHERE buffer NOT LIKE :ours ORDER BY 1"""
_LEFT = "SELECT g.uid FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE l.buffer = :buffer"
_SERVER = """
SELECT 'postgresql' AS kind, current_setting('server_version') AS version,
    pg_database_size(current_database()) AS bytes,
    pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint AS wal_position, xact_commit AS commits
FROM pg_stat_database WHERE datname = current_database()"""
_FILE = """
SELECT 'sqlite' AS kind, sqlite_version() AS version, p.page_size * c.page_count AS bytes
FROM pragma_page_size AS p, pragma_page_count AS c"""
# Active sessions and those in a transaction, by wait event.
_SESSIONS = """
SELECT CASE WHEN state LIKE 'idle in transaction%' THEN 'the client (in a transaction)'
    ELSE coalesce(wait_event_type || ' ' || wait_event, 'nothing (it runs)') END AS wait, count(*) AS sessions
FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND backend_type = 'client backend' AND state <> 'idle' GROUP BY 1"""


def refuse_others(url: str) -> None:
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


def figures(reader: Reader) -> dict[str, Any]:
    """Return the kind, version and size of the database; on PostgreSQL its WAL position and commits, too."""
    return reader.read(lambda tx: tx.rows(_SERVER if reader.path is None else _FILE)[0])


class DatabaseSampler:
    """Samples the database every second in a thread, inside a `with` block.

    `groups` is the number of groups available to take in the last sample. The wait events of PostgreSQL's sessions are
    counted in `waits`.
    """

    def __init__(self, reader: Reader, buffer: str, waits: Counter[str]) -> None:
        self._reader, self._buffer, self._waits = reader, buffer, waits
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replaybuf-bench-sampler", daemon=True)
        self.groups = 0

    def __enter__(self) -> DatabaseSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            with suppress(ReplayBufError):  # the processes count their own errors
                self._reader.read_any(self._look, timeout=5)

    def _look(self, tx: ReadTransaction) -> None:
        tallies = tallies_of(tx, self._buffer)[self._buffer]
        self.groups = sum(n for (_, *name), n in tallies.items() if name == [Status.COMPLETED, Tally.SIZE])
        if self._reader.path is None:
            self._waits.update({str(wait): int(count) for wait, count in tx.tuples(_SESSIONS)})
