"""Groups to train on, and what has become of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.view.steps import read_steps

TASK = "math"


def group(number: int) -> list[RolloutState]:
    """Two rollouts, the second one right, whose prompt is the number."""
    return [
        RolloutState(
            message=[],
            prompt_ids=[number, number],
            response_ids=[1] * (1 + number % 5 + right),
            logprobs=[-0.5] * (1 + number % 5 + right),
            reward=float(right),
            status=Status.COMPLETED,
        )
        for right in (0, 1)
    ]


def put(config: ReplayBufferConfig, count: int, since: int = 0) -> None:
    async def put_all() -> None:
        async with config.build() as buffer:
            for number in range(since, since + count):
                await buffer.put(group(number), TASK)

    asyncio.run(put_all())


def totals(config: ReplayBufferConfig) -> Counter[Tally]:
    """The tallies of all tasks and statuses together, without the zeros."""

    async def read() -> Counter[Tally]:
        found: Counter[Tally] = Counter()
        async with config.build() as buffer:
            for (_, _, name), count in (await buffer.tallies()).items():
                found[name] += count
        return +found

    return asyncio.run(read())


def settled(config: ReplayBufferConfig) -> dict[int, int]:
    """The number of groups that were trained on at each train step, as `replaybuf trace` tells."""
    reader = open_reader(config.url)
    return {one.step: one.settled for one in reader.read(lambda tx: read_steps(tx, "default").rows)}


def numbers(items: list[Any]) -> list[int]:
    """Collate for tests: the numbers of the groups."""
    return [item.item[0].prompt_ids[0] for item in items]
