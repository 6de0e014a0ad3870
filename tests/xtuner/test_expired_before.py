"""Groups with rollouts that were EXPIRED before they were put: they become what xtuner makes of them."""

from __future__ import annotations

import copy
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.frameworks import XtunerRollout, XtunerStatus
from tests.xtuner import stand_in
from tests.xtuner.their_rules import Theirs

A, C, E = XtunerStatus.ABORTED, XtunerStatus.COMPLETED, XtunerStatus.EXPIRED


@pytest.fixture
async def build() -> AsyncIterator[Callable[..., Any]]:
    with stand_in.installed():
        from replaybuf.integrations.xtuner import SyncReplayBufferConfig

        buffers: list[Any] = []

        def build(url: str, name: str = "default") -> Any:
            buffers.append(SyncReplayBufferConfig(url=url, name=name).build())
            return buffers[-1]

        yield build
        for buffer in buffers:
            await buffer.close()


def rollout(status: XtunerStatus, steps: list[int], **fields: Any) -> XtunerRollout:
    given: dict[str, Any] = {
        "message": [],
        "prompt_ids": [1, 2],
        "tokens": [1, 2, *range(len(steps))],
        "response": "x" * len(steps),
        "response_ids": list(range(len(steps))),
        "response_model_steps": steps,
        "reward": {"score": 1.0},
        "status": status,
    }
    return XtunerRollout(**(given | fields))


async def all_of(buffer: Any) -> list[tuple[list[XtunerRollout], str, int]]:
    found = buffer.buffer.find({}, order_by="timestamp_id")
    return [(one.item, one.status.value, one.staleness) async for one in found]


def drawn(chance: random.Random) -> list[XtunerRollout]:
    """Some rollouts, many of them EXPIRED or ABORTED; those of one group have different steps."""
    statuses = chance.choices([C, A, E, XtunerStatus.FAILED, XtunerStatus.FILTERED], [6, 3, 3, 1, 1], k=4)
    group = []
    for status in statuses[: chance.randint(1, 4)]:
        steps = [chance.randint(0, 6) for _ in range(chance.randint(0, 3))]
        mask = chance.choice([None, [chance.randint(0, 1) for _ in steps]])
        group.append(rollout(status, steps, response_mask=mask, seq_staleness=chance.randint(0, 3)))
    return group


def said(group: list[XtunerRollout]) -> list[dict[str, Any]]:
    """The rollouts, but for their masks: tokens too old to train on are masked here when they are stored."""
    return [one.model_dump(exclude={"response_mask"}) for one in group]


@pytest.mark.parametrize("runs", [40, pytest.param(600, marks=pytest.mark.long)])
async def test_random_runs_are_the_same_as_xtuners(build: Callable[..., Any], shared_url: str, runs: int) -> None:
    buffer = build(shared_url, "runs")
    different: list[int] = []
    for seed in range(runs):
        chance, theirs, task = random.Random(seed), Theirs(), "math"
        tokens = chance.choice([None, 1, 3])
        counts: list[tuple[int, int]] = []
        step = 1
        for _ in range(chance.randint(2, 6)):
            step += chance.randint(0, 2)
            rule = {"tokens": tokens, "threshold": chance.randint(1, 6), "retryable": chance.random() < 0.8}
            ours = {"token_stale_threshold": tokens, "stale_threshold": rule["threshold"]}
            if chance.random() < 0.7:
                group, at = drawn(chance), chance.choice([None, step])
                model_step = chance.choice([None, step])
                theirs.put(copy.deepcopy(group), model_step=model_step, train_step=at, **rule)
                await buffer.put(
                    group,
                    task,
                    model_step=model_step,
                    current_train_step=at,
                    expired_groups_retryable=rule["retryable"],
                    **ours,
                )
            else:
                refreshed = await buffer.refresh_staleness(
                    task_stale_thresholds={task: rule["threshold"]},
                    task_token_stale_thresholds={} if tokens is None else {task: tokens},
                    expired_groups_retryable_by_task={task: rule["retryable"]},
                    current_train_step=step,
                )
                counts.append((refreshed[task], theirs.refresh(step, **rule)))
        there = [(said(group), status, staleness) for group, status, staleness in await all_of(buffer)]
        expected = [(said(group), status.value, staleness) for group, status, staleness in theirs.groups]
        if there != expected or any(one != other for one, other in counts):
            different.append(seed)
        await buffer.buffer.delete({})
    assert not different
