"""What can be seen of a buffer, so that two of them can be compared."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from replaybuf import ReplayBuffer, Status
from replaybuf.errors import ReplayBufError
from replaybuf.storage.values import StorageItem
from replaybuf.testing.harness import plain
from tests.drawn import (
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
    # Only a database knows the workers of other processes, which its sentence is about; the numbers are the same.
    numbers = re.sub(r"(?s)^(after [^:]*: ).*?; (task )", r"\1\2", str(result))
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
    return plain({name: getattr(item, name) for name in type(item).__slots__})


def without_payloads(state: dict[str, Any]) -> dict[str, Any]:
    """Payloads are equal when decoded, not as bytes; and the clock on the wall goes on."""
    groups = [
        record | {"payload": None, "archived_at": record["archived_at"] is not None}
        for record in state["storage"]["groups"]
    ]
    return state | {"storage": state["storage"] | {"groups": groups}}


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
        "staleness": await buffer.storage.histogram("staleness"),
        "times_sampled": await buffer.storage.histogram("times_sampled"),
    }
