"""Random calls of xtuner's own buffer, and the same by its rules (`test_their_rules`).

    python -m tests.xtuner.in_xtuner RUNS

prints the numbers of the runs in which they differ.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from xtuner.v1.data_proto.rl_data import RolloutState, Status
from xtuner.v1.rl.replay_buffer import AsyncReplayBufferConfig, SyncReplayBufferConfig

from tests.frameworks import XtunerRollout, XtunerStatus
from tests.xtuner.test_their_rules import Run, said
from tests.xtuner.their_rules import Theirs


class Buffer:
    """Their buffer, for rollouts and statuses of `tests.frameworks`, which the rules are written for."""

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.refresh_staleness = buffer, buffer.refresh_staleness

    async def put(self, group: list[XtunerRollout], task_name: str, **options: Any) -> None:
        converted = [RolloutState(**fields_of(rollout), status=Status(rollout.status.value)) for rollout in group]
        await self.buffer.put(converted, task_name, **options)

    async def get(self, size: int, task_name: str, status: XtunerStatus) -> list[list[XtunerRollout]]:
        return [ours(group) for group in await self.buffer.get(size, task_name, Status(status.value))]

    async def stored(self) -> list[Any]:
        items = self.buffer._storage._items.values()
        return [(said(ours(item.item)), item.status.value, item.staleness) for item in items]


def ours(group: list[Any]) -> list[XtunerRollout]:
    return [XtunerRollout(**fields_of(rollout), status=XtunerStatus(rollout.status.value)) for rollout in group]


def fields_of(rollout: Any) -> dict[str, Any]:
    return dict(rollout.model_dump(include=set(XtunerRollout.model_fields) - {"status", "sample_params"}))


async def main(runs: int) -> None:
    differing_seeds = []
    for seed in range(runs):
        buffer = Buffer((AsyncReplayBufferConfig if seed % 4 else SyncReplayBufferConfig)().build())
        rules = Theirs(by_staleness=seed % 4 > 0, by_steps=False)
        if await Run(seed, rules, buffer).differs(buffer.stored):
            differing_seeds.append(seed)
    print(differing_seeds)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
