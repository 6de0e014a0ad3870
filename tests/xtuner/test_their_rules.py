"""Random puts, refreshes and draws have the results that they have with xtuner's own buffer (`their_rules`)."""

from __future__ import annotations

import copy
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.frameworks import XtunerRollout, XtunerStatus
from tests.xtuner.their_rules import Theirs

A, C, E, F = XtunerStatus.ABORTED, XtunerStatus.COMPLETED, XtunerStatus.EXPIRED, XtunerStatus.FILTERED
TASK, NEWEST = "math", 6


class Run:
    """The same random calls of a buffer by xtuner's rules, and of another one: ours, or xtuner's own (`in_xtuner`).

    xtuner draws by the staleness of each group's put or last refresh, and ours by the oldest model step that is left.
    In these runs that is nearly always the same order: no group has model steps, or all that are drawn were refreshed
    to one train step.
    """

    def __init__(self, seed: int, theirs: Theirs, ours: Any) -> None:
        self.chance, self.theirs, self.ours = random.Random(seed), theirs, ours
        self.tokens = self.chance.choice([None, 1, 3])
        self.has_steps = self.chance.random() < 0.7
        self.step = 1
        self.results: list[tuple[Any, Any]] = []  # theirs and ours

    async def differs(self, stored: Callable[[], Awaitable[list[Any]]]) -> bool:
        """Make some calls, and return whether any result, or what is `stored` afterwards, isn't by the rules."""
        for _ in range(self.chance.randint(2, 8)):
            self.step += self.chance.randint(0, 2)
            await self.chance.choices([self.put, self.refresh, self.get], [6, 2, 2])[0]()
        expected = [(said(group), status.value, staleness) for group, status, staleness in self.theirs.groups]
        return await stored() != expected or any(result != other_result for result, other_result in self.results)

    def rule(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "threshold": self.chance.randint(1, 6), "retryable": self.chance.random() < 0.8}

    async def put(self) -> None:
        rule, group = self.rule(), self.group()
        steps = {name: self.chance.choice([None, self.step]) for name in ("model_step", "train_step")}
        self.theirs.put(copy.deepcopy(group), **steps, **rule)
        await self.ours.put(
            group,
            TASK,
            model_step=steps["model_step"],
            current_train_step=steps["train_step"],
            stale_threshold=rule["threshold"],
            token_stale_threshold=rule["tokens"],
            expired_groups_retryable=rule["retryable"],
        )

    def group(self) -> list[XtunerRollout]:
        """Some rollouts, many of them EXPIRED or ABORTED; those of one group have different steps."""
        statuses = self.chance.choices([C, A, E, XtunerStatus.FAILED, F], [6, 3, 3, 1, 1], k=4)
        return [self.rollout(status) for status in statuses[: self.chance.randint(1, 4)]]

    def rollout(self, status: XtunerStatus) -> XtunerRollout:
        steps = [self.chance.randint(0, NEWEST) for _ in range(self.chance.randint(0, 3) * self.has_steps)]
        return XtunerRollout(
            message=[],
            prompt_ids=[1, 2],
            tokens=[1, 2, *range(len(steps))],
            response="x" * len(steps),
            response_ids=list(range(len(steps))),
            response_model_steps=steps,
            response_mask=self.chance.choice([None, [self.chance.randint(0, 1) for _ in steps]]),
            reward={"score": 1.0},
            status=status,
            seq_staleness=self.chance.randint(0, 3),
        )

    async def refresh(self) -> None:
        rule = self.rule()
        refreshed = await self.ours.refresh_staleness(
            task_stale_thresholds={TASK: rule["threshold"]},
            task_token_stale_thresholds={} if self.tokens is None else {TASK: self.tokens},
            expired_groups_retryable_by_task={TASK: rule["retryable"]},
            current_train_step=self.step,
        )
        self.results.append((self.theirs.refresh(self.step, **rule), refreshed[TASK]))

    async def get(self) -> None:
        statuses = [C, C, A, E]
        if self.has_steps:
            self.step = max(self.step, NEWEST + 1)  # no model is ahead of the trainer
            await self.refresh()
        else:
            statuses.append(F)
        status, size = self.chance.choice(statuses), self.chance.randint(1, 5)
        theirs, ours = self.theirs.get(size, status), await self.ours.get(size, TASK, status)
        self.results.append(([*map(said, theirs)], [*map(said, ours)]))


def said(group: list[XtunerRollout]) -> list[dict[str, Any]]:
    """The rollouts, but for their masks: tokens too old to train on are masked here when they are stored."""
    return [member.model_dump(exclude={"response_mask"}) for member in group]


@pytest.mark.parametrize("runs", [20, pytest.param(600, marks=pytest.mark.long)])
async def test_random_runs_are_the_same_as_xtuners(build: Callable[..., Any], shared_url: str, runs: int) -> None:
    buffers = {kind: build(shared_url, kind, name=kind) for kind in ("Async", "Sync")}
    differing_seeds: list[int] = []
    for seed in range(runs):
        kind = "Async" if seed % 4 else "Sync"
        ours = buffers[kind]

        async def stored(find: Any = ours.buffer.find) -> list[Any]:
            items = find({}, order_by="timestamp_id")
            return [(said(item.item), item.status.value, item.staleness) async for item in items]

        if await Run(seed, Theirs(by_staleness=kind == "Async"), ours).differs(stored):
            differing_seeds.append(seed)
        await ours.buffer.delete({})
    assert not differing_seeds
