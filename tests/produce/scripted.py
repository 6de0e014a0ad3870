"""An agent loop whose delays, failures, interruptions and lengths are written down beforehand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from replaybuf import RolloutState, Status


@dataclass
class Script:
    """What happens to one group: so many tokens for each rollout, a pause of so many seconds before each.

    `failures`: so many calls raise; `status`: that of the rollouts in the end; `deaf`: it doesn't notice a pause.
    """

    tokens: int = 3
    seconds: float = 0.001
    failures: int = 0
    status: Status = Status.COMPLETED
    reward: Callable[[int], float] = float
    deaf: bool = False


@dataclass
class ScriptedLoop:
    """Generates by script: `scripts` by group id, and `default` for the others."""

    default: Script = field(default_factory=Script)
    scripts: dict[int, Script] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)
    order: list[int] = field(default_factory=list)  # the groups, as their generation began
    running: int = 0
    most: int = 0  # at the same time
    paused: bool = True
    pauses: int = 0

    async def generate_group(self, group: list[RolloutState], *, partial: bool) -> list[RolloutState]:
        number = int(group[0].group_id)  # type: ignore[arg-type]
        self.calls[number] += 1
        self.order.append(number)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._generate(group, self.scripts.get(number, self.default), self.calls[number], partial)
        finally:
            self.running -= 1
        return group

    async def _generate(self, group: list[RolloutState], script: Script, call: int, partial: bool) -> None:
        if call <= script.failures:
            await asyncio.sleep(script.seconds)
            raise ValueError(f"failure {call}")
        for place, rollout in enumerate(group):
            if rollout.status == Status.COMPLETED:
                continue
            if not partial or rollout.response_ids is None:
                rollout.response_ids, rollout.response = [], ""
            while len(rollout.response_ids) < script.tokens and (script.deaf or not self.paused):
                await asyncio.sleep(script.seconds)
                rollout.response_ids.append(len(rollout.response_ids))
            rollout.response = "".join(map(str, rollout.response_ids))
            done = len(rollout.response_ids) >= script.tokens
            rollout.status = script.status if done else Status.ABORTED
            rollout.reward = script.reward(place) if done else None

    async def pause(self) -> None:
        self.paused = True
        self.pauses += 1

    async def resume(self) -> None:
        self.paused = False


def prompts(size: int) -> list[dict[str, Any]]:
    """A dataset of prompts that can be told apart."""
    return [{"prompt": f"question {number}"} for number in range(size)]
