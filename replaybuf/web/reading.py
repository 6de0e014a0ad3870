"""Reads of the database for the pages: a few at a time, each in a thread, none for long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

from replaybuf.errors import LockedError, StorageError
from replaybuf.storage.sql.inspection.reader import Reader

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

T = TypeVar("T")

#: Reads at the same time, seconds that another waits for its turn, and seconds that one may take.
AT_ONCE = 4
TURN_SECONDS = 10.0
READ_SECONDS = 10.0


class Readings:
    """Runs functions in read transactions, at most `AT_ONCE` at the same time."""

    def __init__(self, reader: Reader, *, seconds: float = READ_SECONDS) -> None:
        self.reader = reader
        self._seconds = seconds
        self._turns = anyio.Semaphore(AT_ONCE)

    async def read(self, function: Callable[[Transaction], T]) -> T:
        """Return what the function returns. Raises LockedError when it, or the wait for its turn, took too long."""
        return await self.run(lambda reader, seconds: reader.inspect(function, timeout=seconds))

    async def run(self, work: Callable[[Reader, float], T]) -> T:
        """Do the same with a function of the reader and of the seconds that its read may take."""
        try:
            with anyio.fail_after(TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            raise LockedError(f"{AT_ONCE} other reads went on for {TURN_SECONDS:g} s; try again") from None
        try:
            return await anyio.to_thread.run_sync(self._run, work)
        finally:
            self._turns.release()

    def _run(self, work: Callable[[Reader, float], T]) -> T:
        started = time.monotonic()
        try:
            return work(self.reader, self._seconds)
        except StorageError as error:
            if time.monotonic() - started < self._seconds:
                raise
            raise LockedError(
                f"reading took longer than {self._seconds:g} s and was stopped; choose a task, a status or a narrower "
                "query, or order by uid"
            ) from error
