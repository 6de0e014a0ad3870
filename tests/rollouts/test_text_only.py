"""Responses without token ids: their text counts as written at `model_step`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from replaybuf import ReplayBuffer, RolloutState, Status
from replaybuf.errors import RolloutError
from replaybuf.values.rollouts.marks import Marks
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.stores import TASK, build

THRESHOLDS = ({"stale_threshold": 4}, {"token_stale_threshold": 4})


def rollout(**fields: Any) -> RolloutState:
    values = {"message": [{"role": "user", "content": "?"}], "response": "4", "status": Status.COMPLETED}
    return RolloutState(**(values | fields))


async def only(buffer: ReplayBuffer) -> Any:
    (item,) = [item async for item in buffer.find({})]
    return item


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=str)
async def test_a_text_is_as_old_as_the_model_step_of_its_put(threshold: dict[str, int]) -> None:
    """At put and in every refresh, until it expires by whichever threshold there is."""
    ((name, value),) = threshold.items()
    steps = {f"task_{name}s": {TASK: value}}
    async with build("memory://") as buffer:
        await buffer.put([rollout()], TASK, model_step=2, current_train_step=3, **threshold)  # type: ignore[arg-type]
        item = await only(buffer)
        assert (item.status, item.staleness, item.item[0].response_model_steps) == (Status.COMPLETED, 0, [2])
        for step, status, staleness in ((6, Status.COMPLETED, 3), (7, Status.EXPIRED, 4)):
            await buffer.refresh_staleness(
                **({"task_stale_thresholds": {TASK: None}} | steps),  # type: ignore[arg-type]
                current_train_step=step,
            )
            item = await only(buffer)
            assert (item.status, item.staleness) == (status, staleness)
        assert (item.item[0].response, item.item[0].response_model_steps) == ("", [])


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=str)
async def test_a_text_that_is_too_old_expires_at_its_put(threshold: dict[str, int]) -> None:
    async with build("memory://") as buffer:
        put = [rollout(response_mask=[]), rollout(response="5")]
        await buffer.put(put, TASK, model_step=2, current_train_step=7, **threshold)  # type: ignore[arg-type]
        item = await only(buffer)
        assert (item.status, item.staleness) == (Status.EXPIRED, 4)


async def test_a_text_that_newer_weights_went_on_with_is_as_old_as_its_beginning() -> None:
    async with build("memory://") as buffer:
        begun = rollout(status=Status.ABORTED)
        await buffer.put([begun], TASK, model_step=2, current_train_step=3)
        begun.response, begun.status = "42", Status.COMPLETED
        await buffer.put([begun], TASK, model_step=5, current_train_step=6, replaces=[1])
        item = await only(buffer)
        assert (item.staleness, item.item[0].response_model_steps) == (3, [2])


async def test_a_rollout_without_a_response_has_no_model_step() -> None:
    async with build("memory://") as buffer:
        await buffer.put([rollout(response=None), rollout(response="")], TASK, model_step=2, current_train_step=9)
        item = await only(buffer)
        assert (item.staleness, [one.response_model_steps for one in item.item]) == (0, [None, None])


@dataclass
class Answer:
    text: str
    steps: list[int] = field(default_factory=list)


async def test_a_class_needs_no_token_ids() -> None:
    """Neither a user's own nor a dict."""
    fields = {"response": "text", "response_model_steps": "steps"}
    async with build("memory://", name="answers", rollout_type=Answer, fields=fields) as buffer:
        await buffer.put([Answer("4")], TASK, model_step=2, current_train_step=5)  # type: ignore[list-item]
        assert ((await only(buffer)).staleness, (await only(buffer)).item) == (2, [Answer("4", [2])])
    async with build("memory://", name="dicts", rollout_type=dict) as buffer:
        await buffer.put([{"response": "4"}], TASK, model_step=2, current_train_step=5)  # type: ignore[list-item]
        assert (await only(buffer)).staleness == 2
        with pytest.raises(RolloutError, match="no 'response' needs field 'response_ids'"):
            await buffer.put([{"text": "4"}], TASK, model_step=2, current_train_step=5)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("fields", "newest"),
    [
        ({}, 3),
        ({"response": ""}, None),
        ({"response": None}, None),
        ({"labels": [1]}, None),
        ({"input_ids": [1]}, None),
    ],
    ids=str,
)
def test_the_newest_step_of_a_text_is_its_oldest(fields: dict[str, Any], newest: int | None) -> None:
    """Groups of agents are exempt, as with tokens."""
    one = rollout(response_model_steps=[3, 5], **fields)
    assert Marks.of([one], RolloutType(RolloutState)).newest == [newest]
