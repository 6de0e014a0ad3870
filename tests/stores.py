"""Databases for tests, and groups that can be told apart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from replaybuf import ReplayBuffer, ReplayBufferConfig, RolloutState, Status
from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.past import sweep

TASK = "math"


def group(number: int, size: int = 1, *, status: Status = Status.COMPLETED, text: str = "4") -> list[RolloutState]:
    """A group whose rollouts carry its number."""
    return [
        RolloutState(
            rollout_id=number,
            message=[{"role": "user", "content": "2 + 2"}],
            prompt_ids=[1, 2],
            response=text,
            response_ids=[3, 4],
            response_mask=[1, 1],
            reward=1.0,
            status=status,
        )
        for _ in range(size)
    ]


def number_of(rollouts: list[Any]) -> int:
    return int(rollouts[0].rollout_id)


def numbers_of(groups: Iterable[list[Any]]) -> list[int]:
    return [number_of(rollouts) for rollouts in groups]


def build(url: str, **options: Any) -> ReplayBuffer:
    return ReplayBufferConfig(url=url, **({"policy": "fifo"} | options)).build()


async def take_all(buffer: ReplayBuffer, task_name: str = TASK) -> list[int]:
    """The numbers of all completed groups, taken until nothing comes any more."""
    numbers: list[int] = []
    while groups := await buffer.get(1000, task_name):
        numbers += numbers_of(groups)
    return numbers


async def fill(buffer: ReplayBuffer, count: int, first: int = 0) -> None:
    await asyncio.gather(*(buffer.put(group(number), TASK) for number in range(first, first + count)))


def sweep_now(tx: Transaction, before: float = 1e12, limit: int = 1000) -> int:
    """Sweep, after another sweep that runs: `sweep` itself would do nothing."""
    tx.lock(Lock.SWEEP)
    return sweep(tx, before, limit)


async def until(holds: Callable[[], Any], seconds: float = 10) -> None:
    """Wait until something holds; TimeoutError when it doesn't come to pass."""
    async with asyncio.timeout(seconds):
        while not (await outcome if isinstance(outcome := holds(), Awaitable) else outcome):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_equal(expected: object, ask: Callable[[], Awaitable[object]], seconds: float = 10) -> None:
    """Wait until the answer is what is expected; TimeoutError when it never is."""

    async def is_it() -> bool:
        return await ask() == expected

    await until(is_it, seconds)


async def rows(buffer: ReplayBuffer, statement: str, **values: Any) -> list[tuple[Any, ...]]:
    """The rows that a statement gives in the database of a buffer."""
    return [tuple(row) for row in await buffer.storage._read(lambda tx: tx.tuples(statement, **values))]


async def set_by(event: asyncio.Event | threading.Event, task: asyncio.Future[Any], seconds: float = 60) -> None:
    """Wait until an event is set by a task; raise an AssertionError if that ends first, or TimeoutError."""
    in_loop = isinstance(event, asyncio.Event)
    waiting = asyncio.ensure_future(event.wait() if in_loop else asyncio.to_thread(event.wait, seconds))
    try:
        await asyncio.wait({waiting, task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not event.is_set():
            if not task.done():
                raise TimeoutError(f"the event isn't set after {seconds:g} s by {task!r:.200}")
            raise AssertionError("the task ended before it set the event") from task.exception()
    finally:
        waiting.cancel()
        event.set()  # ends a thread that waits for it


@contextmanager
def opened(url: str, **options: Any) -> Iterator[ReplayBuffer]:
    """A buffer for tests that run event loops of their own."""
    buffer = build(url, **options)
    try:
        yield buffer
    finally:
        asyncio.run(buffer.close())


def because(reason: str) -> Callable[[BaseException], bool]:
    """Whether an error of ours has this reason."""
    return lambda error: isinstance(error, ReplayBufError) and error.reason == reason
