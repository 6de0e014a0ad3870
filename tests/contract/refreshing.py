"""Laws of refreshes."""

from __future__ import annotations

from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import InputError
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import Harness, found, group
from tests.reference.snapshots import held_by


async def refresh(buffer: ReplayBuffer, step: int, threshold: int | None = None, **options: Any) -> dict[str, int]:
    """Refresh the task math."""
    return await buffer.refresh_staleness(task_stale_thresholds={"math": threshold}, current_train_step=step, **options)


async def staleness(buffer: ReplayBuffer) -> list[int]:
    """Return the staleness of all groups, and check that it is that of their most stale rollout."""
    items = await found(buffer)
    for item in items:
        assert item.staleness == max(rollout.seq_staleness for rollout in item.item)
    return [item.staleness for item in items]


async def masks(buffer: ReplayBuffer) -> list[Any]:
    """Return the response mask of the first rollout of each group."""
    return [item.item[0].response_mask for item in await found(buffer)]


class RefreshingLaws(Harness):
    """The effects of a refresh on staleness, status and reads."""

    async def test_statuses_default_to_those_that_expire(self, buffer: ReplayBuffer) -> None:
        """completed, aborted and expired; groups of other statuses keep their staleness."""
        for status in set(Status) - {Status.FILLING}:
            await buffer.put(group(1, status=status, response_model_steps=[1]), "math")
        await buffer.put(group(1, response_model_steps=[1]), "math", group="some", size=2)
        await refresh(buffer, 9)
        after = {item.status: item.staleness for item in await found(buffer)}
        assert {status for status, value in after.items() if value == 7} == {"completed", "aborted", "expired"}
        assert set(after.values()) == {0, 7}

    async def test_statuses_can_be_chosen(self, buffer: ReplayBuffer) -> None:
        """Any of them, also some that put doesn't expire; these expire too."""
        for status in ("completed", "failed", "aborted"):
            await buffer.put(group(1, status=Status(status), response_model_steps=[1]), "math")
        assert await refresh(buffer, 9, 3, statuses=["failed", Status.ABORTED]) == {"math": 2}
        assert [(i.status, i.staleness) for i in await found(buffer)] == [
            ("completed", 0),
            ("expired", 7),
            ("expired", 7),
        ]
        rows = held_by(buffer)["groups"]
        assert [row["archived_at"] for row in rows] == [None, None, None]  # the failed one is no longer set aside
        assert await refresh(buffer, 9, 3, statuses=[]) == {"math": 0}
        with pytest.raises(InputError):
            await refresh(buffer, 9, statuses=["done"])

    @pytest.mark.parametrize("marks", ['{"oldest": 7}', '{"oldest": [1, 9], "newest": [1, 9], "reward": [1, "x"]}'])
    async def test_a_group_whose_marks_are_damaged_is_set_aside(self, buffer: ReplayBuffer, marks: str) -> None:
        """And says why; the others are refreshed."""
        uids = [await buffer.put(group(number, response_model_steps=[1]), "math") for number in range(2)]
        spoil = "UPDATE rb_group SET marks = :marks WHERE uid = :uid"
        await buffer.storage._write(lambda tx: tx.change(spoil, marks=marks, uid=uids[0]))
        for statuses in (None, ["failed"]):
            assert await refresh(buffer, 9, 3, statuses=statuses) == {"math": 0 if statuses else 1}
        [failed, expired] = await found(buffer)
        assert (failed.uid, failed.status, failed.staleness, failed.item) == (uids[0], Status.FAILED, 7, [])
        assert (failed.error or "").startswith(f"group {uids[0]}: ")
        assert (expired.uid, expired.status, expired.staleness) == (uids[1], Status.EXPIRED, 7)

    async def test_an_updated_status_decides(self, buffer: ReplayBuffer) -> None:
        """A group is refreshed if its new status is, and otherwise keeps its staleness."""
        await buffer.put(group(1), "math", model_step=1, current_train_step=4)
        await refresh(buffer, 5)
        await buffer.update({}, status="filtered")
        await refresh(buffer, 9)
        assert await staleness(buffer) == [3]
        await buffer.update({}, status="completed")
        assert await staleness(buffer) == [3]
        await refresh(buffer, 9)
        assert await staleness(buffer) == [7]

    async def test_partly_stale_responses_are_masked(self, buffer: ReplayBuffer) -> None:
        """As in put; what is masked stays masked, until the next refresh masks more or the rollout expires."""
        fields: list[dict[str, Any]] = [{}, {"response_mask": [1, 1, 0]}, {"response_mask": None}, {"labels": [1]}]
        for options in fields:
            await buffer.put(group(1, response_model_steps=[0, 4, 7], **options), "math", current_train_step=8)
        assert await refresh(buffer, 8) == {"math": 0}
        assert await masks(buffer) == [[1, 1, 1], [1, 1, 0], None, [1, 1, 1]]
        for threshold in (4, 9):
            assert await refresh(buffer, 8, task_token_stale_thresholds={"math": threshold}) == {"math": 0}
            assert await masks(buffer) == [[0, 1, 1], [0, 1, 0], [0, 1, 1], [1, 1, 1]]
        assert await refresh(buffer, 9, task_token_stale_thresholds={"math": 4}) == {"math": 1}
        assert await masks(buffer) == [[0, 0, 1], None, [0, 0, 1], [1, 1, 1]]
