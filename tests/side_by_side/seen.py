"""What can be seen of a buffer, so that two of them can be compared."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from replaybuf import ReplayBuffer, Status
from replaybuf.errors import ReplayBufError
from replaybuf.storage.values import StorageItem
from tests.contract.harness import plain
from tests.side_by_side.drawn import (
    TASKS,
)


async def outcome(operation: Callable[[ReplayBuffer], Awaitable[Any]], buffer: ReplayBuffer) -> Any:
    try:
        return plain(await operation(buffer))
    except ReplayBufError as error:
        return plain_error(error)


def plain_error(result: Any) -> Any:
    if not isinstance(result, BaseException):
        return result
    # Only a database knows the workers of other processes, which its sentence and other facts are about; the numbers of
    # tasks are the same.
    since, found, said = str(result).partition(": ")
    numbers = "; ".join(sorted(one for one in said.split("; ") if one.startswith("task ")))
    numbers = f"{since}: {numbers}" if found and since.startswith("after ") and numbers else str(result)
    return type(result).__name__, numbers


async def caught(operation: Callable[[ReplayBuffer], Awaitable[Any]], buffer: ReplayBuffer) -> Any:
    try:
        return await operation(buffer)
    except ReplayBufError as error:
        return error


def seen(drawn: Mapping[str, list[StorageItem]]) -> Any:
    """All that can be seen of groups that were drawn."""
    return {task: [fields(item) for item in items] for task, items in drawn.items()}


def fields(item: StorageItem) -> Any:
    # By default the train step of a draw is that of the last refresh, which state dicts don't tell of.
    return plain({name: getattr(item, name) for name in type(item).__slots__ if name != "trained_step"})


async def all_items(buffer: ReplayBuffer) -> list[Any]:
    return [item async for item in buffer.find({})]


async def everything(buffer: ReplayBuffer) -> dict[str, Any]:
    items = await all_items(buffer)
    return {
        "items": [fields(item) for item in items],
        "len": len(buffer),
        "counts": await buffer.count_statuses(TASKS, Status),
        "dropped": [await buffer.dropped(task) for task in TASKS],
        "ready": await buffer.is_ready({"a": 2, "b": 1}),
        "tallies": {key: n for key, n in (await buffer.storage.tallies()).items() if n},
        **await buffer.storage.histograms(("staleness", "times_sampled")),
    }
