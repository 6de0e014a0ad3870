"""What is done to a damaged SQLite file in a process of its own: everything, noting what comes of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from replaybuf import ReplayBufError, ReplayBuffer, RolloutState
from tests.faults.processes import Ledger
from tests.stores import TASK, build, group, number_of

COUNT = 40


def original(number: int) -> list[RolloutState]:
    """A group of two rollouts; of some sizes, up to several pages."""
    return group(number, 2, text=f"{number} " * (10 ** (number % 5)))


async def fill(url: str) -> None:
    async with build(url) as buffer:
        for number in range(COUNT):
            await buffer.put(original(number), TASK, model_step=number % 7, current_train_step=8, tags={"n": number})


async def use(ledger: Ledger, url: str) -> None:
    """Read, refresh, take and put; `given N` for each group that came as it was put, `wrong` for any other."""
    buffer = build(url, lock_timeout=2)

    def check(rollouts: list[Any], kind: str) -> None:
        number = number_of(rollouts)
        is_same = [(r.response, r.message) for r in rollouts] == [(r.response, r.message) for r in original(number)]
        ledger.write(kind if is_same else "wrong", number)

    async def find() -> None:
        async for item in buffer.find({}):
            if item.error is None:
                check(item.item, "seen")
            else:
                ledger.write("unreadable", item.uid)

    async def take() -> None:
        for _ in range(COUNT):
            for rollouts in await buffer.get(7, TASK):
                check(rollouts, "given")

    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "find": find,
        "metrics": buffer.metrics,
        "query": lambda: buffer.count_where({"tags.n": {"$gt": 3}, "reward": 1.0}),
        "refresh": lambda: buffer.refresh_staleness(task_stale_thresholds={TASK: 9}, current_train_step=9),
        "take": take,
        "put": lambda: buffer.put(group(1000), "other"),
        "delete": lambda: buffer.delete({}),
        "close": buffer.close,
    }
    for name, call in calls.items():
        await _note(ledger, buffer, name, call)


async def _note(ledger: Ledger, buffer: ReplayBuffer, name: str, call: Callable[[], Awaitable[object]]) -> None:
    try:
        await call()
    except ReplayBufError as error:
        ledger.write("refused", name, type(error).__name__, repr(str(error)))
    else:
        ledger.write("done", name)
