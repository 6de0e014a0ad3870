"""A process of a load: a worker or a trainer, which reports to its parent once a second, and ends with its parent.

The parent sends `Go`, `PAUSE` and `GO_ON` to workers, and `STOP`. A closed connection means that the parent is dead,
also by kill -9: then the process ends, too.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from replaybuf.bench.load import TASK, BenchSettings, Load, Report, train, work
from replaybuf.errors import ReplayBufError

Role = Literal["worker", "trainer"]

#: Message from a process that has opened the buffer.
READY = "ready"
STOP = "stop"
#: Messages to workers: there are enough groups, and there is room again.
PAUSE, GO_ON = "pause", "go on"
_REPORT_SECONDS = 1.0
#: Seconds in which a process without a parent must end.
_ORPHAN_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Go:
    """The message to begin: times of the monotonic clock, which all processes of a machine share."""

    start: float
    until: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The message from a process that ends with an error."""

    why: str


def main(connection: Connection, role: Role, number: int, settings: BenchSettings) -> None:
    """Run the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group: the parent decides
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("replaybuf").setLevel(logging.ERROR)  # sixty processes would write to one terminal
    try:
        asyncio.run(_Child(connection).run(role, number, settings))
    except BaseException as error:
        why = str(error) if isinstance(error, ReplayBufError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            connection.send(Failed(why))
        sys.exit(1)


class _Child:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stop, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()

    async def run(self, role: Role, number: int, settings: BenchSettings) -> None:
        loop = asyncio.get_running_loop()
        self._go: asyncio.Future[Go] = loop.create_future()
        threading.Thread(target=self._listen, args=(loop,), daemon=True).start()
        async with settings.config(f"{role}-{number}").build() as buffer:
            await buffer.count(TASK, "completed")  # opens the buffer
            await self._send(READY)
            go = await self._go
            load = Load(settings, number, buffer, go.start, go.until, self._stop, self._room)
            if await load.at(go.start):
                running = asyncio.create_task(work(load) if role == "worker" else train(load))
                while not running.done():
                    await asyncio.wait((running,), timeout=_REPORT_SECONDS)
                    await self._report(load)
                await running
        await self._report(load, last=True)

    async def _report(self, load: Load, *, last: bool = False) -> None:
        report, load.report = load.report, Report()
        report.cpu, report.last = time.process_time(), last
        await self._send(report)

    async def _send(self, message: Any) -> None:
        with suppress(OSError):  # the parent has ended: `_listen` notices
            await asyncio.to_thread(self._connection.send, message)

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
        if message == PAUSE:
            self._room.clear()
        elif message == GO_ON:
            self._room.set()
        elif isinstance(message, Go):
            self._go.set_result(message)
        else:
            self._stop.set()
            if not self._go.done():
                self._go.set_result(Go(0.0, 0.0))
