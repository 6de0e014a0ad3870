"""Random draws and evictions of both databases are those of the model in `tests/reference`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from replaybuf import ReplayBuffer, Status
from replaybuf.storage.sql.backend import SQLStorage
from tests.contract.harness import CODEC, drawn, fill, found, group, ids, rules_of
from tests.reference.backend import Reference

Draws = Callable[[ReplayBuffer], Awaitable[Any]]


async def replays(buffer: ReplayBuffer) -> Any:
    """Groups are drawn one by one and several at a time, again and again."""
    await fill(buffer, 10)
    return [await drawn(buffer, size) for size in [1] * 8 + [3] * 4 + [10] * 2]


async def priorities(buffer: ReplayBuffer) -> Any:
    """Priorities are given and changed, by uid and by a query."""
    uids = [uid for priority in (1, 2, 3, 4, 0, 0, 0) for uid in await fill(buffer, 1, priority=priority)]
    draws = [await drawn(buffer, 2) for _ in range(8)]
    await buffer.update_priorities({uids[0]: 4, uids[1]: 3.0, uids[3]: 0})
    draws += [await drawn(buffer, 2) for _ in range(8)]
    await buffer.update({"uid": {"$in": uids[:3]}}, priority=0.5)
    return draws + [await drawn(buffer, 6) for _ in range(8)]


async def idle(buffer: ReplayBuffer) -> Any:
    """All groups have priority 0."""
    await fill(buffer, 4, priority=0)
    return [await drawn(buffer, size) for size in [1] * 10 + [3] * 5]


async def narrowed(buffer: ReplayBuffer) -> Any:
    """Draws with a where, and draws of all between them."""
    await fill(buffer, 4, tags={"a": 1})
    await fill(buffer, 4)
    return [(await drawn(buffer, 2, where={"tags.a": 1}), await drawn(buffer, 1)) for _ in range(12)]


async def window(buffer: ReplayBuffer) -> Any:
    """New groups come in between the draws."""
    return [(await fill(buffer, 2), await drawn(buffer, 1), await drawn(buffer, 2)) for _ in range(10)]


async def tasks(buffer: ReplayBuffer) -> Any:
    """Every task has a race of its own."""
    for number in range(12):
        await buffer.put(group(number), f"task {number % 3}", priority=1 + number % 4)
    return [await drawn(buffer, 1, f"task {number % 3}") for number in range(24)]


async def same(url: str, draws: Draws, policy: str, **options: Any) -> None:
    """A buffer over the model and one over a database, with the same rules, give the same."""
    rules = [rules_of(policy, seed=5, **options) for _ in range(2)]
    results = []
    for storage in (Reference(CODEC, rules[0]), SQLStorage(url, CODEC, rules[1])):
        async with ReplayBuffer(storage) as buffer:  # type: ignore[arg-type]
            results.append(await draws(buffer))
    assert results[1] == results[0]


@pytest.mark.parametrize(
    ("policy", "draws", "limits"),
    [
        ("uniform", (replays, narrowed), {"max_times_sampled": 0}),
        ("uniform", (window,), {"max_times_sampled": 3}),
        ("prioritized", (priorities, idle, narrowed, window), {"max_times_sampled": 0}),
        ("prioritized", (tasks,), {"max_times_sampled": 1}),
    ],
    ids=["replayed", "used up", "prioritized", "taken"],
)
async def test_draws_are_those_of_the_model(
    shared_url: str, policy: str, draws: Sequence[Draws], limits: dict[str, int]
) -> None:
    async def one_after_the_other(buffer: ReplayBuffer) -> Any:
        return [await way(buffer) for way in draws]

    await same(shared_url, one_after_the_other, policy, **limits)


@pytest.mark.parametrize("remover", ["uniform", "prioritized"])
@pytest.mark.parametrize("policy", ["random", "fifo"])
async def test_evictions_are_those_of_the_model(shared_url: str, policy: str, remover: str) -> None:
    """Of groups of several statuses and priorities; and what is drawn from those that are left, at random or not."""

    async def evicted(buffer: ReplayBuffer) -> Any:
        states = []
        for number in range(20):
            status = (Status.COMPLETED, Status.FAILED, Status.ABORTED)[number % 7 % 3]
            await buffer.put(group(number, status=status), "math", priority=number % 4)
            states.append((ids([item.item for item in await found(buffer)]), await drawn(buffer, number % 3)))
        return states

    options: dict[str, Any] = {"remover": remover, "capacity": 6, "max_times_sampled": 0}
    await same(shared_url, evicted, remover if policy == "random" else policy, **options)
