"""Groups with arrays, by which they can be told apart, and a look at the table of files."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection, text

from replaybuf import ReplayBuffer, RolloutState, Status
from replaybuf.storage.places.owners import open_place
from replaybuf.storage.places.store import FILES, file_name
from tests.faults.copies import transact
from tests.stores import TASK, build, group, until

NBYTES = 100_000
#: What a buffer is built with so that groups with an array of NBYTES are kept apart, and of little patience.
OPTIONS: dict[str, Any] = {"payload_threshold": 20_000, "reconnect_timeout": 3.0}


def array_of(number: int, nbytes: int = NBYTES) -> np.ndarray[Any, Any]:
    """The array of a group: no two have the same bytes anywhere."""
    return np.arange(nbytes // 8, dtype=np.int64) + (number << 32)


def heavy(number: int, nbytes: int = NBYTES, *, status: Status = Status.COMPLETED) -> list[RolloutState]:
    """A group of one rollout with an array."""
    rollouts = group(number, status=status)
    rollouts[0].extra_fields = {"experts": array_of(number, nbytes)}
    return rollouts


def number_in(rollouts: list[Any]) -> int:
    """The number of a group, after a look at every byte of its array."""
    number = int(rollouts[0].rollout_id)
    array = rollouts[0].extra_fields["experts"]
    assert np.array_equal(array, array_of(number, array.nbytes)), number
    return number


def numbers_in(groups: Iterable[list[Any]]) -> list[int]:
    return [number_in(rollouts) for rollouts in groups]


def apart(url: str, place: str | Path, **options: Any) -> ReplayBuffer:
    """A buffer that keeps arrays in a place."""
    return build(url, **(OPTIONS | {"payloads": str(place)} | options))


async def put(buffer: ReplayBuffer, *numbers: int, **options: Any) -> list[int]:
    """Put groups together; return their uids."""
    uids = await asyncio.gather(*(buffer.put(heavy(number), TASK, **options) for number in numbers))
    return [uid for uid in uids if uid is not None]


async def take_all(buffer: ReplayBuffer, task_name: str = TASK) -> list[int]:
    """The numbers of all completed groups, each of whose bytes is looked at."""
    taken: list[int] = []
    while groups := await buffer.get(100, task_name):
        taken += numbers_in(groups)
    return taken


async def ask(url: str, statement: str) -> list[Any]:
    """Return what a statement returns."""

    def run(connection: Connection) -> list[Any]:
        found = connection.execute(text(statement))
        return [tuple(row) for row in found] if found.returns_rows else []

    return list(await transact(url, run))


async def named(url: str) -> dict[str, int]:
    """The number of groups of each file that the database names."""
    return {file_name(number): count for number, count in await ask(url, "SELECT id, groups FROM rb_file")}


async def payload_rows(url: str) -> int:
    """How many payloads are kept apart."""
    [(count,)] = await ask(url, "SELECT count(*) FROM rb_payload WHERE file IS NOT NULL")
    return int(count)


def files(place: Path) -> dict[str, int]:
    """The files in a folder, and their sizes."""
    sizes: dict[str, int] = {}
    for one in (place / FILES).iterdir() if place.exists() else ():
        with contextlib.suppress(FileNotFoundError):  # a store has deleted it meanwhile
            sizes[one.name] = one.stat().st_size
    return sizes


def rename(old: Path, new: Path) -> None:
    """Move a folder, as an unmount or another mount does with what is in it."""
    old.rename(new)


async def listed(place: str) -> list[str]:
    """The files that are in a place."""
    store = open_place(place, 30.0)
    try:
        return [one.name for one in await asyncio.to_thread(lambda: list(store.files()))]
    finally:
        store.close()


async def in_its_thread(buffer: ReplayBuffer, work: Callable[[], Any]) -> Any:
    """Run something in the thread of a buffer's storage."""
    return await buffer.storage.thread.run(work)


async def until_rows(url: str, count: int) -> None:
    """Wait until so many payloads are kept apart."""

    async def are_there() -> bool:
        return await payload_rows(url) == count

    await until(are_there)


async def until_no_files(url: str) -> None:
    """Wait until the database names no files any more."""

    async def are_gone() -> bool:
        return await named(url) == {}

    await until(are_gone)
