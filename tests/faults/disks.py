"""What is done on a disk that gets full, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBuffer
from replaybuf.errors import StorageError
from tests.faults.conftest import Figures
from tests.faults.processes import Ledger, entries, numbers
from tests.postgres import own_server
from tests.stores import TASK, build, group, numbers_of, take_all

LIMIT = 4_000_000
_SIZE = 60_000

Room = Callable[[], None]


def check(ledger: Path, figures: Figures, named: str) -> None:
    """Every call that failed says why and names the database; all groups whose put returned are there, each once."""
    if refusal := entries(ledger, "not-permitted"):
        pytest.skip(f"mounting is refused: {refusal[0]}")
    full, put_numbers = entries(ledger, "full"), numbers(ledger, "put")
    remaining = numbers(ledger, "take") + numbers(ledger, "left")
    figures.compare(len(full), put_numbers, remaining)
    assert len(full) >= 2
    assert all(named in message and "free some space" in message for message in full)
    assert len(put_numbers) > 20
    assert sorted(remaining) == sorted(set(put_numbers))


def under_a_limit(ledger: Ledger, folder: str) -> None:
    """Files may grow to LIMIT bytes, and then further."""

    def lift_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
    asyncio.run(_fill_and_go_on(ledger, f"sqlite:///{folder}/run.db", lift_limit))


def on_a_small_disk(ledger: Ledger, folder: str) -> None:
    """On a file system of its own, of LIMIT bytes, that nobody else sees and that grows later."""
    asyncio.run(_fill_and_go_on(ledger, f"sqlite:///{folder}/run.db", small_disk(ledger, folder, LIMIT)))


def own_mounts(ledger: Ledger) -> Callable[..., None]:
    """Give this process mounts that nobody else sees; returns libc's `mount`. Ends where that isn't permitted."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            ledger.write("not-permitted", os.strerror(ctypes.get_errno()))
            os._exit(0)

    check(libc.unshare(0x20000))  # CLONE_NEWNS
    check(libc.mount(b"none", b"/", None, 0x44000, None))  # MS_REC | MS_PRIVATE

    def mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
        texts = [None if argument is None else argument.encode() for argument in (source, target, kind, options)]
        for _ in range(200):  # until files that are being closed are
            if (result := libc.mount(*texts[:3], flags, texts[3])) == 0:
                return
            time.sleep(0.05)
        check(result)

    return mount


def small_disk(ledger: Ledger, folder: str, size: int) -> Callable[[str], None]:
    """Mount a file system of so many bytes; the function mounts it again, with other options, or read-only ("ro")."""
    mount = own_mounts(ledger)
    mount("none", folder, "tmpfs", 0, f"size={size}")

    def remount(options: str = "size=400m") -> None:
        mount("none", folder, "tmpfs", 0x21 if options == "ro" else 0x20, None if options == "ro" else options)

    return remount


#: Of a PostgreSQL's disk: about half of it is what a new one takes.
SERVER_LIMIT = 80_000_000


def postgres_on_a_small_disk(ledger: Ledger, folder: str) -> None:
    """A server whose data are on such a file system, and its WAL elsewhere: without room for that it ends."""
    enlarge = small_disk(ledger, folder, SERVER_LIMIT)
    os.chmod(folder, 0o755)
    tempfile.tempdir = folder
    with own_server() as server:
        server.configure(fsync="off", full_page_writes="off", max_wal_size="64MB", min_wal_size="32MB")
        server.stop("fast")
        server.move_wal(Path(folder).with_name("wal"))
        server.start()

        def room() -> None:
            enlarge()
            with contextlib.suppress(subprocess.CalledProcessError):  # it runs
                server.start()

        asyncio.run(_fill_and_go_on(ledger, server.url, room, size=500_000))


async def _fill_and_go_on(ledger: Ledger, url: str, more_room: Room, size: int = _SIZE) -> None:
    async with build(url) as buffer:
        await _put_until_full(ledger, buffer, size)
        await _put_until_full(ledger, buffer, size)  # and again: nothing is stuck
        await _try_all_else(ledger, buffer)
    async with build(url) as buffer:  # also for those who open it then
        await _try_all_else(ledger, buffer)
        more_room()
        for number in range(5000, 5010):
            await buffer.put(group(number, text="x" * _SIZE), TASK)
            ledger.write("put", number)
        ledger.write("left", *await take_all(buffer))


async def _put_until_full(ledger: Ledger, buffer: ReplayBuffer, size: int) -> None:
    first = await buffer.count(TASK, "completed")
    for number in range(first, first + 1000):
        try:
            await buffer.put(group(number, text="x" * size), TASK)
        except StorageError as error:
            if error.reason != "disk full":
                raise
            ledger.write("full", error)
            return
        ledger.write("put", number)


async def _try_all_else(ledger: Ledger, buffer: ReplayBuffer) -> None:
    """Reading goes on; what writes may do so or not, and says so."""
    ledger.write("seen", *numbers_of([item.item async for item in buffer.find({})]))
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "take": lambda: buffer.get(1, TASK),
        "refresh": lambda: buffer.refresh_staleness(task_stale_thresholds={TASK: 9}, current_train_step=9),
        "update": lambda: buffer.update({}, tags={"long": "x" * 100_000}),
    }
    for name, call in calls.items():
        try:
            result = await call()
        except StorageError as error:
            if error.reason != "disk full":
                raise
            ledger.write("full", error)
        else:
            ledger.write(name, *(numbers_of(result) if isinstance(result, list) else ()))
