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
        theirs = [RolloutState(**fields_of(one), status=Status(one.status.value)) for one in group]
        await self.buffer.put(theirs, task_name, **options)

    async def get(self, size: int, task_name: str, status: XtunerStatus) -> list[list[XtunerRollout]]:
        return [ours(group) for group in await self.buffer.get(size, task_name, Status(status.value))]

    async def stored(self) -> list[Any]:
        items = self.buffer._storage._items.values()
        return [(said(ours(one.item)), one.status.value, one.staleness) for one in items]


def ours(group: list[Any]) -> list[XtunerRollout]:
    return [XtunerRollout(**fields_of(one), status=XtunerStatus(one.status.value)) for one in group]


def fields_of(rollout: Any) -> dict[str, Any]:
    return dict(rollout.model_dump(include=set(XtunerRollout.model_fields) - {"status", "sample_params"}))


async def main(runs: int) -> None:
    different = []
    for seed in range(runs):
        buffer = Buffer((AsyncReplayBufferConfig if seed % 4 else SyncReplayBufferConfig)().build())
        rules = Theirs(by_staleness=seed % 4 > 0, stepless_last=False)
        if await Run(seed, rules, buffer).differs(buffer.stored):
            different.append(seed)
    print(different)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
