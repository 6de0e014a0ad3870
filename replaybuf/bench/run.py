"""The parent process of a load: it starts the others, collects their counters, and cleans up."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from replaybuf.bench.counted import ActivitySampler, Histogram, Report, Said, UidSums, figures, refuse_others, uids_left
from replaybuf.bench.loads import TASK, BenchSettings
from replaybuf.bench.process import GO_ON, PAUSE, READY, STOP, Failed, Go, Role, main
from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.inspection.measures import count_unswept
from replaybuf.storage.sql.inspection.reader import Reader, open_reader
from replaybuf.storage.sql.inspection.writer import forget_buffer

#: Timeouts in seconds: for the processes to open the buffer (in all, and more for each), and to end after `STOP`.
_OPENING, _OPENING_EACH, _ENDING = 60.0, 1.0, 60.0
_SOON = 0.3  # seconds from when all processes are ready to the first call
#: At the beginning of a load all processes connect and prepare statements at once. Latencies of this warm-up don't
#: count: seconds, or seconds per process if that is more, but at most this fraction of the load.
_WARM_UP, _WARM_UP_EACH, _WARM_UP_PART = 3.0, 0.1, 0.15
_LOOK_SECONDS = 0.2
_SWEEP_SECONDS = 60.0
#: Modules that the fork server imports once, before it forks the processes.
PRELOADED = ["replaybuf.bench.process"]

Tell = Callable[[str], object]


@dataclass(slots=True)
class Child:
    """A process: its last report, and the reason of its end (`why`; None after a normal one)."""

    role: Role
    number: int
    process: Any
    connection: Connection
    ready: bool = False
    ended: bool = False
    why: str | None = None
    report: Report = field(default_factory=Report)
    first_memory: int = 0
    most_memory: int = 0

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"


@dataclass(slots=True)
class Second:
    """A second of a load: its end, the totals until then, and the latencies within it, by call."""

    at: float
    put: int
    taken: int
    latencies: dict[str, Histogram] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """The measurements of a load.

    `began` is in seconds since the epoch; `seconds` is the time in which puts were begun. `left` are the groups in the
    buffer at the end, None if they can't be read, with the reason in `notes`. `signalled`: the number of the signal
    that ended the load early, 0 for none. `busy`: the used fraction of this machine's processors, None if unknown.
    `load`: the system's load average at the end.
    """

    settings: BenchSettings
    where: str
    began: float = 0.0
    seconds: float = 0.0
    counts_after: float = 0.0
    children: list[Child] = field(default_factory=list)
    latencies: dict[str, Histogram] = field(default_factory=dict)
    over_time: list[Second] = field(default_factory=list)
    left: UidSums | None = None
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)
    busy: float | None = None
    load: float | None = None
    signalled: int = 0
    notes: list[str] = field(default_factory=list)


def run(settings: BenchSettings, tell: Tell) -> Outcome:
    """Run a load, clean up, and return its outcome; `tell` gets a line of progress every few seconds.

    Ctrl-C and SIGTERM end it early, with the measurements so far. Raises InputError for a database with other groups
    than those of loads, and ReplayBufError if a process can't open the buffer.
    """
    settings.check()
    refuse_others(settings.url)
    _open(settings)
    reader = open_reader(settings.url)
    outcome = Outcome(settings, reader.where)
    with _signals(outcome):
        try:
            _measure(outcome, reader, tell)
        finally:
            if not settings.keep and not settings.joined:
                try:
                    _clean_up(settings, reader, tell)
                except ReplayBufError as error:
                    outcome.notes.append(f"the groups of this load, in buffer {settings.buffer}, are left: {error}")
    return outcome


def _open(settings: BenchSettings) -> None:
    """Create the database and its schema if they don't exist."""

    async def look() -> None:
        async with settings.config("bench").build() as buffer:
            await buffer.count(TASK, "completed")

    asyncio.run(look())


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
    settings = outcome.settings
    outcome.children = _start(settings)
    try:
        _until_ready(outcome, tell)
        outcome.before = figures(reader)
        busy = _processor_times()
        with ActivitySampler(reader, settings.buffer) as sampler:
            _let_go(outcome, sampler, tell)
        outcome.busy, outcome.load = _busy_since(busy), os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    finally:
        _end(outcome.children)
    outcome.seen = sampler.figures()
    try:
        outcome.after = figures(reader)
        outcome.left = UidSums().add(*uids_left(reader, settings.buffer))
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
    deadline = time.monotonic() + _OPENING + _OPENING_EACH * len(children)
    told = time.monotonic()
    while not all(child.ready for child in children):
        _hear(outcome)
        if failed := [child for child in children if child.ended]:
            raise ReplayBufError(f"{failed[0].name} can't begin: {failed[0].why}")
        if outcome.signalled:
            raise KeyboardInterrupt
        waiting = sum(not child.ready for child in children)
        if time.monotonic() > deadline:
            raise ReplayBufError(f"{waiting} of {len(children)} processes haven't opened {outcome.where} in time")
        if time.monotonic() - told > 2:
            told = time.monotonic()
            tell(f"{len(children) - waiting} of {len(children)} processes have opened the buffer")


def _let_go(outcome: Outcome, sampler: ActivitySampler, tell: Tell) -> None:
    """Run the load: first until the workers have ended, then until the trainers have."""
    settings = outcome.settings
    start = time.monotonic() + _SOON
    until = start + settings.seconds
    warm_up = max(_WARM_UP, _WARM_UP_EACH * len(outcome.children))
    outcome.counts_after = 0.0 if settings.groups else min(warm_up, _WARM_UP_PART * settings.seconds)
    outcome.began = time.time() + _SOON
    for child in outcome.children:
        _send(child, Go(start, until, start + outcome.counts_after))
    workers, trainers = ([one for one in outcome.children if one.role == role] for role in ("worker", "trainer"))
    told, paused = time.monotonic(), False
    while time.monotonic() < until and not outcome.signalled and not all(one.ended for one in workers or trainers):
        _hear(outcome)
        _note_second(outcome, start)
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
    _note_second(outcome, start, last=True)


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
            child.ended = True
            killed = code is not None and code < 0
            how = f"was killed ({signal.Signals(-code).name})" if killed else f"ended with exit code {code}"
            child.why = child.why or f"it {how}, without a word"
            continue
        if message == READY:
            child.ready = True
        elif isinstance(message, Failed):
            child.why, child.ended = message.why, True
        else:
            child.ended = message.last
            _take_in(outcome, child, message)


def _take_in(outcome: Outcome, child: Child, report: Report) -> None:
    child.report = report
    child.first_memory = child.first_memory or report.memory
    child.most_memory = max(child.most_memory, report.memory)
    for call, found in report.latencies.items():
        for to in (outcome.latencies, outcome.over_time[-1].latencies if outcome.over_time else {}):
            to.setdefault(call, Histogram()).merge(found)


def _note_second(outcome: Outcome, start: float, *, last: bool = False) -> None:
    """Update the current second of the load, and begin the next one when it is over."""
    at, seconds = time.monotonic() - start, outcome.over_time
    if seconds:
        seconds[-1].put, seconds[-1].taken = totals(outcome)
        seconds[-1].at = at
    if not last and at >= 0 and (not seconds or at >= len(seconds)):
        seconds.append(Second(at, *totals(outcome)))


def totals(outcome: Outcome) -> tuple[int, int]:
    """Return the numbers of groups put and taken so far."""
    reports = [child.report for child in outcome.children]
    return sum(one.put.count for one in reports), sum(one.taken.count for one in reports)


def _progress(outcome: Outcome, at: float) -> str:
    put, taken = totals(outcome)
    errors = sum(said.count for child in outcome.children for said in child.report.errors.values())
    clock, length = (f"{int(seconds) // 60}:{int(seconds) % 60:02d}" for seconds in (at, outcome.settings.seconds))
    line = f"{clock} of {length}: {put:,} groups put, {taken:,} taken, {put - taken:,} in the buffer"
    return line + (f", {errors:,} errors" if errors else "")


def _end(children: Sequence[Child]) -> None:
    """Terminate the remaining processes, or kill them."""
    for child in children:
        if not child.ended:
            child.process.terminate()
    for child in children:
        child.process.join(5)
        if child.process.is_alive():
            child.process.kill()
            child.process.join()
        child.connection.close()


def said(outcome: Outcome, what: str) -> dict[Any, Said]:
    """Return the `errors` or `warnings` of all processes."""
    every: dict[Any, Said] = {}
    for child in outcome.children:
        for key, one in getattr(child.report, what).items():
            every.setdefault(key, Said(0, one.first)).count += one.count
    return every


# Afterwards


def _clean_up(settings: BenchSettings, reader: Reader, tell: Tell) -> None:
    """Remove the groups of the load, wait until their payloads are swept, and remove the buffer's records."""

    async def remove() -> None:
        async with settings.config("bench").build() as buffer:
            if await buffer.delete({}):
                tell("removing the groups of this load")
            deadline = time.monotonic() + _SWEEP_SECONDS
            while await asyncio.to_thread(reader.read, count_unswept) and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_SECONDS)

    asyncio.run(remove())
    forget_buffer(reader, settings.buffer)


# This machine


def _processor_times() -> tuple[int, int] | None:
    """Return the idle time of all processors, and their total time, in ticks; None if unknown."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        with open("/proc/stat") as file:
            ticks = [int(text) for text in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    return ticks[3] + ticks[4], sum(ticks)


def _busy_since(before: tuple[int, int] | None) -> float | None:
    now = _processor_times()
    if before is None or now is None or now[1] <= before[1]:
        return None
    return 1 - (now[0] - before[0]) / (now[1] - before[1])
