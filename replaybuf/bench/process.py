"""A process of a load: a worker or a trainer, which reports to its parent once a second, and ends with its parent.

The parent sends `Go`, and `STOP` to end early or, to trainers, once the workers have ended. A closed connection means
that the parent is dead, also by kill -9: then the process ends, and the first one removes the load's groups.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Literal

from replaybuf import ReplayBuffer
from replaybuf.bench.counted import LoadCounter
from replaybuf.bench.loads import TASK, BenchSettings, Load, train, work
from replaybuf.errors import ReplayBufError

Role = Literal["worker", "trainer"]

#: Message from a process that has opened the buffer.
READY = "ready"
STOP = "stop"
#: Messages to workers: there are enough groups, and there is room again.
PAUSE, GO_ON = "pause", "go on"
_REPORT_SECONDS = 1.0
#: Seconds in which a process without a parent must end, and for which the first one waits for the others.
_ORPHAN_SECONDS, _OTHERS_SECONDS = 40.0, 8.0


@dataclass(frozen=True, slots=True)
class Go:
    """The message to begin: times of the monotonic clock, which all processes of a machine share."""

    start: float
    until: float
    counts_from: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The message from a process that ends with an error."""

    why: str


def main(connection: Connection, role: Role, number: int, settings: BenchSettings) -> None:
    """Run the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all; the parent decides
    child = _Child(connection, role, number, settings)
    try:
        asyncio.run(child.run())
    except BaseException as error:
        why = str(error) if isinstance(error, ReplayBufError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            connection.send(Failed(why))
        sys.exit(1)


class _Child:
    def __init__(self, connection: Connection, role: Role, number: int, settings: BenchSettings) -> None:
        self._connection, self._role, self._number, self._settings = connection, role, number, settings
        self._counter = LoadCounter()
        self._go: asyncio.Future[Go] | None = None
        self._stop, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()
        self._orphaned = False
        self._cpu = 0.0  # CPU time of this process before `Go`

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._go = loop.create_future()
        logging.getLogger("replaybuf").addHandler(_Warnings(self._counter))
        threading.Thread(target=self._listen, args=(loop,), daemon=True).start()
        async with self._settings.config(f"{self._role}-{self._number}").build() as buffer:
            await buffer.count(TASK, "completed")  # opens the buffer
            await self._send(READY)
            go = await self._go
            await self._load(buffer, go)
            if self._orphaned:
                await self._clean_up(buffer)
        await self._report(last=True)

    async def _load(self, buffer: ReplayBuffer, go: Go) -> None:
        self._counter.counts_from = go.counts_from
        load = Load(self._settings, self._number, buffer, self._counter, go.start, go.until, self._stop, self._room)
        if not await load.at(go.start):
            return
        self._cpu = time.process_time()
        running = asyncio.create_task(work(load) if self._role == "worker" else train(load))
        while not running.done():
            await asyncio.wait((running,), timeout=_REPORT_SECONDS)
            await self._report()
        await running

    async def _report(self, *, last: bool = False) -> None:
        counted, cpu = self._counter.report, time.process_time() - self._cpu
        report = replace(counted, cpu=cpu, memory=_resident(), last=last)
        counted.latencies = {}  # a new dict, since the old one is pickled in another thread
        await self._send(report)

    async def _send(self, message: Any) -> None:
        if not self._orphaned:
            try:
                await asyncio.to_thread(self._connection.send, message)
            except OSError:
                self._hear(None)

    async def _clean_up(self, buffer: ReplayBuffer) -> None:
        """If this is the first process, remove the groups of a load whose parent is dead, after the others' end."""
        first = self._number == 0 and (self._role == "worker" or not self._settings.workers)
        if first and not (self._settings.keep or self._settings.joined):
            await asyncio.sleep(_OTHERS_SECONDS)
            await buffer.delete({})

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive the parent's messages, in a thread."""
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                message = None
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._hear, message)
            if message is None:
                time.sleep(_ORPHAN_SECONDS)
                os._exit(1)

    def _hear(self, message: Go | str | None) -> None:
        """Handle a message of the parent; None means that the parent is dead."""
        if isinstance(message, Go):
            if self._go is not None and not self._go.done():
                self._go.set_result(message)
            return
        if message == PAUSE:
            self._room.clear()
            return
        if message == GO_ON:
            self._room.set()
            return
        self._orphaned = self._orphaned or message is None
        self._stop.set()
        if self._go is not None and not self._go.done():
            self._go.set_result(Go(0.0, 0.0, 0.0))


class _Warnings(logging.Handler):
    """Counts the log's warnings, so that sixty processes don't write them to one terminal."""

    def __init__(self, counter: LoadCounter) -> None:
        super().__init__(logging.WARNING)
        self._counter = counter

    def emit(self, record: logging.LogRecord) -> None:
        self._counter.warn(record.name, record.getMessage())


def _resident() -> int:
    """Return the resident memory of this process in bytes; its maximum where the system reports only that."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
