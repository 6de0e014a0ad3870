"""A refresh of a task that never had a group warns: nothing of a misspelt task would ever expire."""

from __future__ import annotations

import pytest

from replaybuf import ReplayBuffer
from replaybuf.produce import Sampler
from tests.stores import TASK, build, fill, take_all


async def refresh(buffer: ReplayBuffer, *tasks: str, step: int = 5) -> None:
    await buffer.refresh_staleness(task_stale_thresholds=dict.fromkeys(tasks, 4), current_train_step=step)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "replaybuf.tasks"]


async def test_a_misspelt_task_is_warned_of_once_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    async with build("memory://") as buffer:
        await fill(buffer, 1)
        for step in (5, 6):
            await refresh(buffer, TASK, "Maths", step=step)
    (warning,) = warnings(caplog)
    assert warning == (
        "refresh_staleness, task Maths: nothing was ever put into this task; there is the task math. Did you mean math?"
    )


async def test_a_task_whose_groups_have_left_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async with build("memory://") as buffer:
        await fill(buffer, 1)
        await take_all(buffer)
        await refresh(buffer, TASK)
    assert warnings(caplog) == []


async def test_in_a_run_that_begins_none_is_until_another_has_groups(caplog: pytest.LogCaptureFixture) -> None:
    async with build("memory://") as buffer:
        await refresh(buffer, TASK, "Maths")
        assert warnings(caplog) == []
        await fill(buffer, 1)
        await refresh(buffer, TASK, "Maths", step=6)
    assert len(warnings(caplog)) == 1


async def test_a_task_whose_prompts_are_still_to_come_is_not(caplog: pytest.LogCaptureFixture) -> None:
    """The first batch of a second task is refreshed before it has groups."""
    async with build("memory://") as buffer:
        await fill(buffer, 1)
        Sampler(buffer, [], "maths")
        await refresh(buffer, "maths")
    assert warnings(caplog) == []
