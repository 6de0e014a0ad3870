"""Processes that keep arrays apart and are killed, stopped or cut off: at a fail point, or at any moment."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBuffer, RolloutState
from replaybuf.errors import PayloadStoreError, StorageError
from replaybuf.storage.places import folder, objects
from replaybuf.storage.places import store as place_store
from replaybuf.storage.places.store import FILES
from replaybuf.storage.sql.engine.sqlite import SqliteDatabase
from replaybuf.storage.sql.statements.past import sweep
from replaybuf.storage.sql.tasks import payload_files as tasks
from replaybuf.storage.sql.tasks import sweeper
from tests.faults.disks import small_disk
from tests.faults.failpoints import FailPoints
from tests.faults.processes import Ledger
from tests.histories.history import Recorder
from tests.histories.workers import Worker
from tests.places.arrays import apart, heavy, numbers_in, put, take_all
from tests.stores import TASK

#: Machines that run tests may be busy.
PATIENT = {"reconnect_timeout": 30.0}
SIZES = (30_000, 100_000, 250_000)


def cut_retries() -> None:
    """Let files be small, and sweeps frequent."""
    place_store.FILE_BYTES = 450_000
    tasks._CHECK_SECONDS = 0.1
    sweeper.GRACE_SECONDS = 0.1
    sweeper._IDLE_SECONDS = sweeper._POLL_SECONDS = 0.05


# At fail points


class FilePoints(FailPoints):
    """Points before and after every write, sync and deletion of a file, too."""

    def __init__(self, ledger: Ledger, kill_at: int | None = None) -> None:
        super().__init__(ledger, kill_at)
        self._surround(folder, "_write_all", "write")
        self._surround(os, "fsync", "sync")
        self._surround(objects.ObjectStore, "write", "write")
        for store in (folder.FolderStore, objects.ObjectStore):
            self._surround(store, "delete", "delete")

    def _surround(self, owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if what == "sync" and f"/{FILES}" not in os.readlink(f"/proc/self/fd/{arguments[0]}"):
                return real(*arguments)  # of another file
            self.reach(f"before {what}")
            result = real(*arguments, **options)
            self.reach(f"after {what}")
            return result

        setattr(owner, name, call)


#: The variables of the environment that an object store needs, which the process that others are forked from lacks.
Variables = dict[str, str]


def live(ledger: Ledger, url: str, place: str, kill_at: int | None, variables: Variables) -> None:
    """All that can happen to a file: written, named, emptied in part and whole, deleted."""
    cut_retries()
    os.environ.update(variables)
    points = FilePoints(ledger, kill_at)

    async def run() -> None:
        with points.armed():
            buffer = apart(url, place, durability="full", **PATIENT)
            await _live(Recorder(ledger), buffer)
            await buffer.close()

    asyncio.run(run())


async def _live(recorder: Recorder, buffer: ReplayBuffer) -> None:
    async def do(first: int, count: int) -> None:
        numbers = range(first, first + count)
        await recorder.call("put", put(buffer, *numbers), groups=[*numbers])

    async def take(count: int) -> None:
        await recorder.call("take", buffer.get(count, TASK), numbers_in, asked=count)

    await do(0, 6)
    await do(6, 6)
    await take(4)
    await _tend(buffer)
    await do(12, 8)
    deleting = buffer.delete({"timestamp_id": {"$gt": 5, "$lte": 12}})
    await recorder.call("acknowledge", deleting, groups=[*range(5, 12)])
    await _tend(buffer)
    await do(20, 4)
    await _tend(buffer)
    await take(3)


async def _tend(buffer: ReplayBuffer) -> None:
    """Sweep and tidy up until there is nothing to do."""
    storage = buffer.storage

    async def step() -> None:
        for _ in range(4):
            await storage.files.maintain(True)
            await storage.engine.write(lambda tx: sweep(tx, time.time(), 100), storage.transactions.scope)
            if storage.files._tidy_task is not None:
                await storage.files._tidy_task

    await storage.thread.run(step)


# With checkpoints

STEPS = 6


def train(ledger: Ledger, url: str, place: str, kill_at: int | None) -> None:
    """From the last checkpoint to the last step, and all that is left: `batch STEP N N`, `left N ...`.

    The points are those in checkpoints and restores.
    """
    cut_retries()
    points = FilePoints(ledger, kill_at)

    async def run() -> None:
        async with apart(url, place, **PATIENT) as buffer:
            await _train(ledger, buffer, points)

    asyncio.run(run())


async def _train(ledger: Ledger, buffer: ReplayBuffer, points: FailPoints) -> None:
    checkpoints = await buffer.checkpoints()
    with points.armed():
        await (buffer.restore(checkpoints[-1].step) if checkpoints else buffer.checkpoint(0))
    for step in range(checkpoints[-1].step + 1 if checkpoints else 1, STEPS + 1):
        await put(buffer, *range(10 * step, 10 * step + 4), current_train_step=step)
        ledger.write("batch", step, *numbers_in(await buffer.get(3, TASK, current_train_step=step)))
        await _tend(buffer)  # what no checkpoint needs is gone
        with points.armed():
            await buffer.checkpoint(step)
    for checkpoint in await buffer.checkpoints():
        await buffer.drop_checkpoint(checkpoint.step)
    while groups := await buffer.get(50, TASK):
        ledger.write("left", *numbers_in(groups))


# At any moment


class HeavyWorker(Worker):
    """Puts groups with arrays, and looks at every byte of what it gets."""

    def made(self, number: int) -> list[RolloutState]:
        return heavy(number, SIZES[number % len(SIZES)])

    def numbers(self, groups: Iterable[list[Any]]) -> list[int]:
        return numbers_in(groups)


def work(ledger: Ledger, url: str, place: str, stop: str, first: int, variables: Variables) -> None:
    """Put, take and lease groups until the file `stop` exists; numbers from `first` on."""
    cut_retries()
    os.environ.update(variables)

    async def run() -> None:
        async with apart(url, place, **PATIENT) as buffer:
            worker = HeavyWorker(buffer, Recorder(ledger), first, first)
            while not os.path.exists(stop):  # noqa: ASYNC240
                await worker.call()
                await asyncio.sleep(0.01)

    asyncio.run(run())


def stall(ledger: Ledger, url: str, place: str, variables: Variables) -> None:
    """Put two groups, and stop after their arrays were written, until somebody lets this process go on."""
    os.environ.update(variables)
    write = place_store.FileBatch.flush
    stops: list[Callable[[], None]] = []

    def flush(batch: place_store.FileBatch) -> None:
        write(batch)
        if stops:
            ledger.write("written", 0)
            stops.pop()()

    place_store.FileBatch.flush = flush  # type: ignore[method-assign]

    async def run() -> None:
        async with apart(url, place, **PATIENT) as buffer:
            await buffer.storage.open()
            thread, engine = buffer.storage.thread, buffer.storage.engine

            async def stop() -> None:
                """Stop between transactions: others could not write if this process had SQLite's lock."""
                async with engine._turn if isinstance(engine, SqliteDatabase) else nullcontext():
                    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread does nothing more

            stops.append(lambda: asyncio.run_coroutine_threadsafe(stop(), thread.loop).result())
            with pytest.raises(PayloadStoreError, match="put it again"):
                await buffer.put_many([heavy(2), heavy(3)], TASK)
            await buffer.put_many([heavy(2), heavy(3)], TASK)
            ledger.write("put", 2, 3)

    asyncio.run(run())


# On a disk of its own


def fill_up(ledger: Ledger, url: str, place: str, problem: str) -> None:
    """Put until the disk is full or can't be written to; read; go on with more room."""
    cut_retries()
    place_store.FILE_BYTES = 2_000_000
    asyncio.run(_fill_up(ledger, url, place, problem, small_disk(ledger, place, 5_000_000)))


async def _fill_up(ledger: Ledger, url: str, place: str, problem: str, remount: Callable[[str], None]) -> None:
    async with apart(url, place, **PATIENT) as buffer:
        recorder = Recorder(ledger)
        for number in range(200):
            if problem == "read-only" and number == 10:
                remount("ro")
            try:
                await recorder.call("put", buffer.put(heavy(number), TASK), groups=[number])
            except StorageError as error:
                ledger.write("refused", type(error).__name__, error)
                break
        items = [item async for item in buffer.find({})]
        ledger.write("seen", *numbers_in([item.item for item in items]))
        await recorder.call("take", buffer.get(3, TASK), numbers_in, asked=3)
        remount("size=100m")
        for number in range(1000, 1010):
            await recorder.call("put", buffer.put(heavy(number), TASK), groups=[number])
        await recorder.call("take", take_all(buffer), lambda numbers: numbers)
        ledger.write("failed", await buffer.count(TASK, "failed"))
    ledger.write("files", len(await asyncio.to_thread(os.listdir, Path(place) / FILES)))
