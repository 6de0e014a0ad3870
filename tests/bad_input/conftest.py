"""A store that the tests share, because they leave it as it was; calls as data, and values that mean nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from replaybuf import Lease, ReplayBufError, ReplayBuffer, RolloutState
from replaybuf.buffer.lease import Leasing
from tests.postgres import new_url
from tests.stores import TASK, build, fill, group


@pytest.fixture(scope="module", params=["sqlite", "memory://", "postgresql"])
def kept_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database that the tests of this module share, because they don't change it."""
    if request.param == "memory://":
        yield request.param
    else:
        yield from new_url(request.param, request, tmp_path_factory.mktemp("kept"))


@pytest.fixture
async def kept(kept_url: str) -> AsyncIterator[ReplayBuffer]:
    async with build(kept_url) as buffer:
        if not len(buffer):
            await fill(buffer, 3)
        yield buffer


class Odd:
    """Something that nothing knows."""


def rollouts(**fields: Any) -> list[RolloutState]:
    rollout = RolloutState(message=[{"role": "user", "content": "?"}], status="completed", response_ids=[1])
    for name, value in fields.items():
        rollout.__dict__[name] = value
    return [rollout]


Call = Callable[[ReplayBuffer], Coroutine[Any, Any, Any]]


def put(items: Any = None, task_name: Any = TASK, **options: Any) -> Call:
    return lambda buffer: buffer.put(rollouts() if items is None else items, task_name, **options)


async def leased(
    buffer: ReplayBuffer, use: Callable[[Lease], Coroutine[Any, Any, Any]] | None = None, **options: Any
) -> None:
    """Lease a group, use the lease, and leave everything as it was."""
    lease = await buffer.lease_batch({TASK: 1}, **options)
    try:
        if use is not None:
            await use(lease)
    finally:
        await lease.give_back()
        await buffer.update({"task_name": TASK}, status="completed")  # deliveries start anew


async def entered_twice(leasing: Leasing) -> None:
    async with leasing, leasing:
        pass


def find(query: Any = None, **options: Any) -> Call:
    async def call(buffer: ReplayBuffer) -> list[Any]:
        return [item async for item in buffer.find({} if query is None else query, **options)]

    return call


def refresh(thresholds: Any, step: Any = 1, **options: Any) -> Call:
    return lambda buffer: buffer.refresh_staleness(task_stale_thresholds=thresholds, current_train_step=step, **options)


def itself() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


async def refused(url: str, kind: type[ReplayBufError], message: str, **options: Any) -> ReplayBufError:
    """That everything which a buffer does with this database ends in the same error, and that it can be closed."""
    buffer = build(url, **options)
    calls: list[Coroutine[Any, Any, Any]] = [
        buffer.put(group(1), TASK),
        buffer.get(1, TASK),
        buffer.take_batch({TASK: 1}, timeout=1),
        buffer.count_where({}),
        buffer.delete({}),
    ]
    for call in calls:
        with pytest.raises(kind, match=message) as caught:
            await call
    with pytest.raises(kind, match=message):
        len(buffer)
    await buffer.close()
    return caught.value


async def refused_put(url: str, kind: type[ReplayBufError], **options: Any) -> ReplayBufError:
    """The error of a first put. (One that waits for long is another.)"""
    buffer = build(url, **options)
    try:
        async with asyncio.timeout(10):
            with pytest.raises(kind) as caught:
                await buffer.put(group(1), TASK)
    finally:
        await buffer.close()
    return caught.value
