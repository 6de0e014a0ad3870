"""Groups with arrays, and what is deferred of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, text

from replaybuf import ReplayBuffer, ReplayBufferConfig, RolloutState, Status
from replaybuf.storage.places.owners import open_place
from replaybuf.storage.places.store import FILES, file_name
from tests.faults.copies import transact
from tests.stores import TASK, build, group, until_equal

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


async def put(buffer: ReplayBuffer, *numbers: int, **options: Any) -> None:
    """Put groups together."""
    await asyncio.gather(*(buffer.put(heavy(number), TASK, **options) for number in numbers))


async def take_all(buffer: ReplayBuffer, task_name: str = TASK) -> list[int]:
    """The numbers of all completed groups, each of whose bytes is looked at."""
    numbers: list[int] = []
    while groups := await buffer.get(100, task_name):
        numbers += numbers_in(groups)
    return numbers


async def ask(url: str, statement: str) -> list[Any]:
    """Return what a statement returns."""

    def run(connection: Connection) -> list[Any]:
        result = connection.execute(text(statement))
        return [tuple(row) for row in result] if result.returns_rows else []

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
    for file in (place / FILES).iterdir() if place.exists() else ():
        with suppress(FileNotFoundError):  # a store has deleted it meanwhile
            sizes[file.name] = file.stat().st_size
    return sizes


def rename(old: Path, new: Path) -> None:
    """Move a folder, as an unmount or another mount does with what is in it."""
    old.rename(new)


async def listed(place: str) -> list[str]:
    """The files that are in a place, in order."""
    return await asyncio.to_thread(_listed, place)


def _listed(place: str) -> list[str]:
    with closing(open_place(place, 30.0)) as store:
        return sorted(name for name, _ in store.files()) if store.read_marker() is not None else []


async def until_rows(url: str, count: int) -> None:
    """Wait until so many payloads are kept apart."""
    await until_equal(count, lambda: payload_rows(url))


async def until_no_files(url: str) -> None:
    """Wait until the database names no files any more."""
    await until_equal({}, lambda: named(url))


#: The settings by which payloads are kept somewhere.
PLACES = ["sqlite", "sqlite, folder", "sqlite, objects", "memory", "postgresql", "postgresql, folder"]
LARGE = 40_000  # items


def experts(number: int = 0, size: int = LARGE) -> np.ndarray[Any, Any]:
    return np.arange(number, number + size, dtype=np.int32).reshape(-1, 8)


def rollout(number: int = 0, **extra: Any) -> RolloutState:
    return RolloutState(
        message=[],
        rollout_id=number,
        prompt_ids=[1, 2],
        response_ids=[3, 4],
        response_mask=[1, 1],
        response_model_steps=[1, 8],
        logprobs=[-0.5, -0.25],
        routed_experts=experts(number),
        extra_fields=extra,
        reward=1.0,
        status=Status.COMPLETED,
    )


@dataclass
class Kept:
    """Where the payloads of a test are."""

    url: str
    payloads: str = "database"

    def config(self, **options: Any) -> ReplayBufferConfig[Any]:
        return ReplayBufferConfig(url=self.url, payloads=self.payloads, **({"policy": "fifo"} | options))

    @asynccontextmanager
    async def opened(self, **options: Any) -> AsyncIterator[ReplayBuffer[Any]]:
        async with self.config(**options).build() as buffer:
            yield buffer

    def files(self) -> list[Path]:
        return sorted(Path(self.payloads, "files").glob("*.bin"))


def kept_at(place: str, request: pytest.FixtureRequest, folder: Path) -> Kept:
    database, _, apart = place.partition(", ")
    url = {"sqlite": f"sqlite:///{folder}/buffer.db", "memory": "memory://"}.get(database)
    payloads = "database"
    if apart == "folder":
        payloads = str(folder / "payloads")
        Path(payloads).mkdir()
    elif apart:
        payloads = str(request.getfixturevalue("bucket"))
    return Kept(url or str(request.getfixturevalue("lent_database")), payloads)


async def lent(buffer: ReplayBuffer[Any], count: int = 1, deferred: Any = ("routed_experts",)) -> Any:
    """A lease, and the first rollouts of its groups."""
    lease = await buffer.lease_batch({TASK: count}, deferred=list(deferred), timeout=0)
    return lease, [item.item[0] for item in lease.items[TASK]]


def same(array: Any, expected: np.ndarray[Any, Any]) -> bool:
    return (
        type(array) is np.ndarray
        and (array.dtype, array.shape) == (expected.dtype, expected.shape)
        and array.flags.fnc == expected.flags.fnc
        and bytes(array.tobytes()) == expected.tobytes()
    )
