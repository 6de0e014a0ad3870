"""Laws of groups that leave: archives and deletions."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import InputError
from replaybuf.storage.sql.tasks import sweeper
from replaybuf.storage.values import StorageItem
from replaybuf.values.rollouts.rollout import RolloutState, Status
from tests.contract.harness import (
    SOON,
    Harness,
    OpenBuffer,
    drawn,
    fill,
    found,
    group,
    ids,
    total,
)
from tests.contract.leasing import prompts_leased
from tests.contract.waiting import waiting
from tests.stores import until, until_equal

#: Options that drop `stale()`.
DROPPING: dict[str, Any] = {"stale_threshold": 4, "expired_groups_retryable": False}


def stale() -> list[RolloutState]:
    """Return a group that is too old to be stored."""
    return group(9, seq_staleness=4)


async def counted(buffer: ReplayBuffer) -> tuple[int, int, int]:
    """Return the numbers of groups put, dropped and replaced so far."""
    stored, dropped, replaced = [await total(buffer, name) for name in ("put", "dropped", "replaced")]
    return stored, dropped, replaced


class DroppingLaws(Harness):
    """The groups that a put replaces also leave if the new group is dropped, or nothing happens."""

    @pytest.mark.parametrize("how", ["finish", "save"])
    async def test_a_dropped_result_settles_what_it_was_made_from(self, buffer: ReplayBuffer, how: str) -> None:
        """The leased groups leave, and the lease doesn't hold them any more; the others are as they were."""
        lease = await prompts_leased(buffer, 2)
        first, second = sorted(lease.open)
        settle = lease.finish if how == "finish" else lease.save
        assert await settle(stale(), "math", replaces=[first], **DROPPING) is None
        assert lease.open == {second}
        assert await lease.give_back() == 1
        assert ids(await buffer.get(9, "math", "init")) == [1]
        assert await counted(buffer) == (3, 1, 1)

    async def test_puts_at_the_same_time_are_each_told_of_theirs(self, open_buffer: OpenBuffer) -> None:
        """What each replaced, by uid and key, and of what was evicted one group for each that found no room."""
        buffer = await open_buffer(capacity=8)
        uids = await fill(buffer, 6)
        keyed = await buffer.put(group(6), "math", key="a")
        by_put: list[list[StorageItem]] = [[] for _ in range(6)]
        await asyncio.gather(
            buffer.put(group(7), "math"),
            buffer.put(group(8), "math", key="a", dropped=by_put[0]),
            buffer.put(group(9), "math", replaces=uids[5:], dropped=by_put[1]),
            *(buffer.put(group(10 + number), "math", dropped=by_put[2 + number]) for number in range(4)),
            *(buffer.put(group(number), "code", dropped=by_put[2]) for number in range(2)),
        )
        assert [[item.uid for item in items] for items in by_put] == [[keyed], uids[5:], *([uid] for uid in uids[:4])]
        assert ids([item.item for items in by_put for item in items]) == [6, 5, 0, 1, 2, 3]
        assert sorted(ids([item.item for item in await found(buffer)])) == [0, 1, 4, *range(7, 14)]

    async def test_a_caller_of_refresh_can_have_what_is_dropped(self, buffer: ReplayBuffer) -> None:
        """With the responses, at the new step; not groups that stay to be generated again."""
        for task in ("math", "code"):
            await buffer.put(group(1), task, model_step=0, current_train_step=1)
            await buffer.put(group(2, status=Status.EXPIRED), task)
            await buffer.put(group(3), task, model_step=8, current_train_step=9)
        dropped: list[StorageItem] = []
        await buffer.refresh_staleness(
            task_stale_thresholds={"math": 5, "code": 5},
            expired_groups_retryable_by_task={"math": False},
            current_train_step=9,
            dropped=dropped,
        )
        dropped.sort(key=lambda item: item.uid)
        assert [(item.task_name, item.status, item.staleness) for item in dropped] == [
            ("math", "completed", 8), ("math", "expired", 0)
        ]  # fmt: skip
        assert [(item.item[0].response, item.item[0].seq_staleness) for item in dropped] == [
            ("the answer", 8), ("the answer", 0)
        ]  # fmt: skip

    async def test_a_cancelled_caller_is_told_the_truth(self, open_buffer: OpenBuffer) -> None:
        """Whatever was evicted by a put that was cancelled at any moment is in its list."""
        buffer = await open_buffer(capacity=1)
        await fill(buffer, 1)
        for pause in (0, 0, 0.0005, 0.001, 0.002, 0.005):
            [before] = await found(buffer)
            dropped: list[StorageItem] = []
            putting = asyncio.create_task(buffer.put(group(1), "math", dropped=dropped))
            await asyncio.sleep(pause)
            putting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await putting
            [after] = await found(buffer)
            assert [item.uid for item in dropped] == ([] if after.uid == before.uid else [before.uid])

    async def test_a_lease_tells_what_its_result_replaced(self, buffer: ReplayBuffer) -> None:
        """finish and save give the leased groups that leave."""
        lease = await prompts_leased(buffer, 2)
        first, second = sorted(lease.open)
        dropped: list[StorageItem] = []
        saved = await lease.save(group(8, status=Status.ABORTED), "math", replaces=[first], dropped=dropped)
        assert saved is not None
        await lease.finish(group(9), "math", replaces=[saved, second], dropped=dropped)
        assert sorted(item.uid for item in dropped) == sorted([first, saved, second])
        assert {item.deliveries for item in dropped} == {1}

    async def test_who_waits_for_room_hears_of_a_dropped_group(self, open_buffer: OpenBuffer) -> None:
        """The groups that it replaced have made room."""
        buffer = await open_buffer(capacity=1, on_full="block")
        uids = await fill(buffer, 1)
        waits = await waiting(buffer, buffer.put(group(2), "math", timeout=SOON))
        assert await buffer.put(stale(), "math", replaces=uids, **DROPPING) is None
        assert await waits is not None


MANY = 1000


class ArchiveLaws(Harness):
    """Laws of `archive_groups`, `archive_seconds`, `unfit_groups` and `unfit_seconds` in the limits."""

    async def test_archived_groups_are_not_in_the_buffer(self, open_buffer: OpenBuffer) -> None:
        """Not in len, and a status that can't be asked for."""
        buffer = await open_buffer(archive_groups=MANY)
        await fill(buffer, 3)
        await drawn(buffer, 3)
        assert len(buffer) == 0
        assert await buffer.get(9, "math") == []
        for call in (
            lambda: buffer.get(1, "math", "archived"),
            lambda: buffer.take_batch({"math": 1}, group_status=Status.ARCHIVED),
            lambda: buffer.sample({"math": 1}, group_status="archived"),
            lambda: buffer.is_ready({"math": 1}, "archived"),
            lambda: buffer.wait_ready({"math": 1}, "archived", timeout=0),
        ):
            with pytest.raises(InputError, match="archived groups are drawn by mix= alone"):
                await call()
        with pytest.raises(InputError, match="archived groups are drawn by mix= alone"):
            buffer.lease_batch({"math": 1}, group_status="archived")

    async def test_the_archive_is_pruned_by_number(self, open_buffer: OpenBuffer) -> None:
        """Of each task the last ones stay, in the order in which they left; soon."""
        buffer = await open_buffer("lifo", archive_groups=3)
        uids = await fill(buffer, 6)
        await fill(buffer, 1, "code")
        await drawn(buffer, 1, "code")
        for _ in range(6):
            await drawn(buffer)
        await until_equal(3, lambda: buffer.count("math", "archived"), SOON)
        assert [item.uid for item in await found(buffer, {"task_name": "math"})] == uids[:3]
        assert await buffer.count("code", "archived") == 1
        assert await total(buffer, "pruned") == 3

    async def test_pruning_that_falls_behind_goes_on_at_once(
        self, open_buffer: OpenBuffer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Though the next poll would be much later."""
        buffer = await open_buffer(archive_groups=2)
        await fill(buffer, 8)
        monkeypatch.setattr(sweeper, "_POLL_SECONDS", 3600.0)
        buffer.storage.sweeper._limit = 1
        await drawn(buffer, 8)
        buffer.storage.sweeper._poll_at = 0.0

        async def pruned() -> bool:
            return await buffer.count("math", "archived") == 2

        await until(pruned, SOON)

    async def test_the_archive_is_pruned_by_age(self, open_buffer: OpenBuffer) -> None:
        """Groups archived longer ago leave, as others come after them."""
        buffer = await open_buffer(archive_seconds=0.3)
        uids = await fill(buffer, 2)
        await drawn(buffer, 2)
        after = uids[-1]

        async def pruned() -> bool:
            await fill(buffer, 1)
            await drawn(buffer)
            return await buffer.count_where({"uid": {"$lte": after}}) == 0

        await until(pruned, SOON)
        assert await total(buffer, "pruned") >= 2

    @pytest.mark.parametrize("status", [Status.FILTERED, Status.FAILED])
    async def test_what_is_unfit_is_pruned_by_number(self, open_buffer: OpenBuffer, status: Status) -> None:
        """Of each task and status those stay that became so last; others are as they were."""
        buffer = await open_buffer(unfit_groups=2, archive_groups=MANY)
        first, *uids = await fill(buffer, 4)
        for number in range(3):
            await buffer.put(group(number, status=status), "math")
        for uid in (*uids, first):
            await buffer.update({"uid": uid}, status=status)
        await buffer.put(group(9, status=status), "code")
        await fill(buffer, 3)
        await drawn(buffer, 3)
        await until_equal(2, lambda: buffer.count("math", status), SOON)
        assert {item.uid for item in await found(buffer, {"task_name": "math", "status": status})} == {uids[-1], first}
        assert (await buffer.count("code", status), await buffer.count("math", "archived")) == (1, 3)
        assert await total(buffer, "pruned") == 5

    async def test_what_is_unfit_is_pruned_by_age(self, open_buffer: OpenBuffer) -> None:
        """Counted from when it became so, not from its put."""
        buffer = await open_buffer(unfit_seconds=0.5)
        [late_uid] = await fill(buffer, 1)
        await buffer.put(group(1, status=Status.FILTERED), "math")

        async def pruned() -> bool:
            await buffer.update({"uid": late_uid}, priority=2)  # in memory, groups leave as others change
            return await buffer.count("math", "filtered") == 0

        await until(pruned, SOON)
        await buffer.update({"uid": late_uid}, status="failed")
        assert await buffer.count("math", "failed") == 1
