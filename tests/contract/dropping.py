"""Laws of groups that leave: archives and deletions."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import ConflictError, FullError, InputError, LeaseLostError
from replaybuf.storage.values import StorageItem
from replaybuf.values.rollouts.rollout import RolloutState, Status
from tests.contract.harness import (
    SOON,
    Harness,
    OpenBuffer,
    drawn,
    eventually,
    fill,
    found,
    group,
    ids,
    only,
    plain,
    total,
)
from tests.contract.leasing import LONG, lease_of
from tests.contract.waiting import waiting

#: Options that drop `stale()`.
DROPPING: dict[str, Any] = {"stale_threshold": 4, "expired_groups_retryable": False}


def stale() -> list[RolloutState]:
    """Return a group that is too old to be stored."""
    return group(9, seq_staleness=4)


def plain_items(items: list[StorageItem]) -> list[Any]:
    """Return groups in a form that compares by ==, in the order of their uids."""
    ordered = sorted(items, key=lambda item: item.uid)
    return [plain({name: getattr(item, name) for name in StorageItem.__slots__}) for item in ordered]


async def counted(buffer: ReplayBuffer) -> tuple[int, int, int]:
    """Return the numbers of groups put, dropped and replaced so far."""
    put, dropped, replaced = [await total(buffer, name) for name in ("put", "dropped", "replaced")]
    return put, dropped, replaced


class DroppingLaws(Harness):
    """The groups that a put replaces also leave if the new group is dropped, or nothing happens."""

    async def test_what_a_dropped_group_replaces_leaves(self, buffer: ReplayBuffer) -> None:
        """As if the group had been stored; it counts as put and dropped."""
        uids = await fill(buffer, 3)
        assert await buffer.put(stale(), "math", replaces=uids[:2], **DROPPING) is None
        assert [item.uid for item in await found(buffer)] == uids[2:]
        assert await counted(buffer) == (4, 1, 2)

    async def test_what_has_the_key_of_a_dropped_group_leaves(self, buffer: ReplayBuffer) -> None:
        """It may be named, too; groups of other tasks and keys stay."""
        first = await buffer.put(group(1), "math", key="a")
        assert first is not None
        other = await buffer.put(group(2), "math", key="b")
        elsewhere = await buffer.put(group(3), "code", key="a")
        assert await buffer.put(stale(), "math", key="a", replaces=[first], **DROPPING) is None
        assert [item.uid for item in await found(buffer)] == [other, elsewhere]
        assert await counted(buffer) == (3, 1, 1)

    async def test_a_leased_group_of_the_key_leaves(self, buffer: ReplayBuffer) -> None:
        """It doesn't come back beside a later group with its key."""
        await buffer.put(group(1), "math", key="a")
        lease = await buffer.lease_batch({"math": 1}, seconds=LONG)
        assert await buffer.put(stale(), "math", key="a", **DROPPING) is None
        assert await lease.give_back() == 0
        assert (await found(buffer), await counted(buffer)) == ([], (2, 1, 1))

    async def test_a_dropped_group_that_replaces_a_missing_one_is_a_conflict(self, buffer: ReplayBuffer) -> None:
        """ConflictError names it; nothing leaves, and nothing is counted."""
        uids = await fill(buffer, 2)
        await buffer.put(group(3), "math", key="a")
        await buffer.delete({"uid": uids[0]})
        with pytest.raises(ConflictError, match=f"group {uids[0]}"):
            await buffer.put(stale(), "math", replaces=[uids[1], uids[0]], key="a", **DROPPING)
        assert len(buffer) == 2
        assert await counted(buffer) == (3, 0, 0)

    async def test_a_dropped_group_needs_no_room(self, open_buffer: OpenBuffer) -> None:
        """Nothing comes in, so nothing has to wait."""
        buffer = await open_buffer(capacity=1, on_full="reject")
        await fill(buffer, 1)
        assert await buffer.put(stale(), "math", **DROPPING) is None
        assert (len(buffer), await total(buffer, "refused")) == (1, 0)

    @pytest.mark.parametrize("how", ["finish", "save"])
    async def test_a_dropped_result_settles_what_it_was_made_from(self, buffer: ReplayBuffer, how: str) -> None:
        """The leased groups leave, and the lease doesn't hold them any more; the others are as they were."""
        for number in range(2):
            await buffer.put(group(number, status=Status.INIT), "math")
        lease = await buffer.lease_batch({"math": 2}, group_status="init", seconds=LONG)
        first, second = sorted(lease.open)
        put = lease.finish if how == "finish" else lease.save
        assert await put(stale(), "math", replaces=[first], **DROPPING) is None
        assert lease.open == {second}
        assert await lease.give_back() == 1
        assert ids(await buffer.get(9, "math", "init")) == [1]
        assert await counted(buffer) == (3, 1, 1)

    @pytest.mark.parametrize("how", ["finish", "save"])
    async def test_a_dropped_result_of_a_lost_lease_is_refused(self, buffer: ReplayBuffer, how: str) -> None:
        """LeaseLostError; nothing leaves, and nothing is counted."""
        await buffer.put(group(1), "math")
        lease = await lease_of(buffer)
        await buffer.storage.give_back(lease._leased, sorted(lease.open))
        put = lease.finish if how == "finish" else lease.save
        with pytest.raises(LeaseLostError):
            await put(stale(), "math", replaces=lease.open, **DROPPING)
        assert (len(buffer), await counted(buffer)) == (1, (1, 0, 0))

    async def test_a_caller_can_have_what_leaves(self, open_buffer: OpenBuffer) -> None:
        """What a put replaces, by uid and key, and what it evicts: as it was. Nothing that leaves otherwise."""
        buffer = await open_buffer(capacity=4)
        for number in range(3):
            await buffer.put(group(number), "math", tags={"n": number}, model_step=number)
        await buffer.put(group(3), "math", key="a")
        await buffer.put(group(9), "code")
        before = {item.uid: item for item in await found(buffer)}
        first, *_, keyed, _ = before
        gone: list[StorageItem] = []
        assert await buffer.put(group(4), "math", dropped=gone) is not None
        assert plain_items(gone) == plain_items([before[first]])
        await buffer.put(group(5), "math", key="a", replaces=[first + 1], dropped=gone)
        assert plain_items(gone[1:]) == plain_items([before[first + 1], before[keyed]])
        await buffer.put(group(6), "math")
        await buffer.put(group(7), "math", dropped=gone)
        assert ids([item.item for item in gone]) == [0, 1, 3, 2]

    async def test_puts_at_the_same_time_are_each_told_of_theirs(self, open_buffer: OpenBuffer) -> None:
        """What each replaced, by uid and key, and of what was evicted one group for each that found no room."""
        buffer = await open_buffer(capacity=8)
        uids = await fill(buffer, 6)
        keyed = await buffer.put(group(6), "math", key="a")
        gone: list[list[StorageItem]] = [[] for _ in range(6)]
        await asyncio.gather(
            buffer.put(group(7), "math"),
            buffer.put(group(8), "math", key="a", dropped=gone[0]),
            buffer.put(group(9), "math", replaces=uids[5:], dropped=gone[1]),
            *(buffer.put(group(10 + number), "math", dropped=gone[2 + number]) for number in range(4)),
            *(buffer.put(group(number), "code", dropped=gone[2]) for number in range(2)),
        )
        assert [[item.uid for item in items] for items in gone] == [[keyed], uids[5:], *([uid] for uid in uids[:4])]
        assert ids([item.item for items in gone for item in items]) == [6, 5, 0, 1, 2, 3]
        assert sorted(ids([item.item for item in await found(buffer)])) == [0, 1, 4, *range(7, 14)]

    async def test_puts_of_a_key_at_the_same_time_are_each_told(self, buffer: ReplayBuffer) -> None:
        """Of the group that the one before has put."""
        gone: list[list[StorageItem]] = [[] for _ in range(4)]
        puts = (buffer.put(group(number), "math", key="a", dropped=gone[number]) for number in range(4))
        uids = await asyncio.gather(*puts)
        assert [[item.uid for item in items] for items in gone] == [[], *([uid] for uid in uids[:3])]

    async def test_a_caller_can_have_its_own_dropped_group(self, buffer: ReplayBuffer) -> None:
        """With the uid 0, as it was given, and what it replaces."""
        uids, gone = await fill(buffer, 2), list[StorageItem]()
        put = stale()
        assert await buffer.put(put, "math", replaces=uids[:1], tags={"a": 1}, dropped=gone, **DROPPING) is None
        assert [(item.uid, item.status) for item in gone] == [(uids[0], "completed"), (0, "expired")]
        assert (gone[1].item, gone[1].tags, gone[1].task_name) == (put, {"a": 1}, "math")

    async def test_a_caller_of_refresh_can_have_what_is_dropped(self, buffer: ReplayBuffer) -> None:
        """With the responses, at the new step; not groups that stay to be generated again."""
        for task in ("math", "code"):
            await buffer.put(group(1), task, model_step=0, current_train_step=1)
            await buffer.put(group(2, status=Status.EXPIRED), task)
            await buffer.put(group(3), task, model_step=8, current_train_step=9)
        gone: list[StorageItem] = []
        await buffer.refresh_staleness(
            task_stale_thresholds={"math": 5, "code": 5},
            expired_groups_retryable_by_task={"math": False},
            current_train_step=9,
            dropped=gone,
        )
        gone.sort(key=lambda item: item.uid)
        assert [(item.task_name, item.status, item.staleness) for item in gone] == [
            ("math", "completed", 8), ("math", "expired", 0)
        ]  # fmt: skip
        assert [(item.item[0].response, item.item[0].seq_staleness) for item in gone] == [
            ("the answer", 8), ("the answer", 0)
        ]  # fmt: skip

    async def test_nothing_that_stays_is_told(self, open_buffer: OpenBuffer) -> None:
        """A put that is refused, or in conflict, leaves the list as it was."""
        buffer = await open_buffer(capacity=1, on_full="reject")
        [uid] = await fill(buffer, 1)
        gone: list[StorageItem] = []
        with pytest.raises(FullError):
            await buffer.put(group(1), "math", dropped=gone)
        with pytest.raises(ConflictError):
            await buffer.put(group(1), "math", replaces=[uid, uid + 1], dropped=gone)
        assert (gone, len(buffer)) == ([], 1)

    async def test_a_cancelled_caller_is_told_the_truth(self, open_buffer: OpenBuffer) -> None:
        """Whatever was evicted by a put that was cancelled at any moment is in its list."""
        buffer = await open_buffer(capacity=1)
        await fill(buffer, 1)
        for pause in (0, 0, 0.0005, 0.001, 0.002, 0.005):
            [before] = await found(buffer)
            gone: list[StorageItem] = []
            putting = asyncio.create_task(buffer.put(group(1), "math", dropped=gone))
            await asyncio.sleep(pause)
            putting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await putting
            [after] = await found(buffer)
            assert [item.uid for item in gone] == ([] if after.uid == before.uid else [before.uid])

    async def test_a_lease_tells_what_its_result_replaced(self, buffer: ReplayBuffer) -> None:
        """finish and save give the leased groups that leave."""
        for number in range(2):
            await buffer.put(group(number, status=Status.INIT), "math")
        lease = await buffer.lease_batch({"math": 2}, group_status="init", seconds=LONG)
        first, second = sorted(lease.open)
        gone: list[StorageItem] = []
        saved = await lease.save(group(8, status=Status.ABORTED), "math", replaces=[first], dropped=gone)
        assert saved is not None
        await lease.finish(group(9), "math", replaces=[saved, second], dropped=gone)
        assert sorted(item.uid for item in gone) == sorted([first, saved, second])
        assert {item.deliveries for item in gone} == {1}

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

    async def test_what_was_drawn_stays_as_archived(self, open_buffer: OpenBuffer) -> None:
        """With its rollouts, uid and metadata; it counts as taken."""
        buffer = await open_buffer(archive_groups=MANY)
        uids = await fill(buffer, 2, tags={"a": 1}, priority=2)
        await drawn(buffer, 1)
        items = await found(buffer, {"status": "archived"})
        assert [(item.uid, item.timestamp_id, item.times_sampled) for item in items] == [(uids[0], uids[0], 1)]
        assert (items[0].tags, items[0].priority, ids([items[0].item])) == ({"a": 1}, 2, [0])
        assert (await total(buffer, "taken"), await total(buffer, "archived")) == (1, 1)
        assert await buffer.count("math", "archived") == 1

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

    async def test_archived_groups_take_no_room(self, open_buffer: OpenBuffer) -> None:
        """The capacity is that of the others, and eviction passes the archive."""
        buffer = await open_buffer(archive_groups=MANY, capacity=2)
        uids = await fill(buffer, 2)
        await drawn(buffer, 2)
        uids += await fill(buffer, 3)
        assert [item.uid for item in await found(buffer)] == [*uids[:2], *uids[3:]]
        assert await total(buffer, "evicted") == 1

    async def test_groups_are_archived_with_their_last_draw(self, open_buffer: OpenBuffer) -> None:
        """Not before; an acknowledged lease is a draw, one that was given back isn't."""
        buffer = await open_buffer(archive_groups=MANY, max_times_sampled=2)
        await fill(buffer, 1)
        await drawn(buffer)
        assert await buffer.count("math", "archived") == 0
        lease = await buffer.lease_batch({"math": 1}, seconds=1000, heartbeat=False)
        await lease.give_back()
        assert await buffer.count("math", "archived") == 0
        async with buffer.lease_batch({"math": 1}, seconds=1000):
            assert await found(buffer) == []
        assert (await only(buffer)).status == Status.ARCHIVED

    async def test_the_archive_is_pruned_by_number(self, open_buffer: OpenBuffer) -> None:
        """Of each task the last ones stay, in the order in which they left; soon."""
        buffer = await open_buffer("lifo", archive_groups=3)
        uids = await fill(buffer, 6)
        await fill(buffer, 1, "code")
        await drawn(buffer, 1, "code")
        for _ in range(6):
            await drawn(buffer)

        async def pruned() -> bool:
            return await buffer.count("math", "archived") == 3

        await eventually(pruned)
        assert [item.uid for item in await found(buffer, {"task_name": "math"})] == uids[:3]
        assert await buffer.count("code", "archived") == 1
        assert await total(buffer, "pruned") == 3

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

        await eventually(pruned)
        assert await total(buffer, "pruned") >= 2

    async def test_what_is_young_stays(self, open_buffer: OpenBuffer) -> None:
        """An archive by age has no bound in number."""
        buffer = await open_buffer(archive_seconds=10_000)
        await fill(buffer, 20)
        for _ in range(4):
            await drawn(buffer, 5)
        assert await buffer.count("math", "archived") == 20
        assert await total(buffer, "pruned") == 0

    async def test_an_update_brings_a_group_back(self, open_buffer: OpenBuffer) -> None:
        """With another status it is in the buffer again, and can be drawn; and the other way round."""
        buffer = await open_buffer(archive_groups=MANY)
        [uid, other] = await fill(buffer, 2)
        await drawn(buffer, 1)
        assert await buffer.update({"status": "archived"}, status="completed") == 1
        assert len(buffer) == 2
        await buffer.update({"uid": other}, status="archived")
        assert len(buffer) == 1
        assert await drawn(buffer, 9) == [uid]
        assert await buffer.count("math", "archived") == 2

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

        async def pruned() -> bool:
            return await buffer.count("math", status) == 2

        await eventually(pruned)
        assert {item.uid for item in await found(buffer, {"task_name": "math", "status": status})} == {uids[-1], first}
        assert (await buffer.count("code", status), await buffer.count("math", "archived")) == (1, 3)
        assert await total(buffer, "pruned") == 5

    async def test_what_is_unfit_is_pruned_by_age(self, open_buffer: OpenBuffer) -> None:
        """Counted from when it became so, not from its put."""
        buffer = await open_buffer(unfit_seconds=0.5)
        [late] = await fill(buffer, 1)
        await buffer.put(group(1, status=Status.FILTERED), "math")

        async def pruned() -> bool:
            await buffer.update({"uid": late}, priority=2)  # in memory, groups leave as others change
            return await buffer.count("math", "filtered") == 0

        await eventually(pruned)
        await buffer.update({"uid": late}, status="failed")
        assert await buffer.count("math", "failed") == 1

    async def test_without_a_bound_what_is_unfit_stays(self, open_buffer: OpenBuffer) -> None:
        """An archive's bound isn't theirs."""
        buffer = await open_buffer(archive_groups=1)
        for number in range(3):
            await buffer.put(group(number, status=Status.FAILED), "math")
        await fill(buffer, 2)
        await drawn(buffer, 2)
        assert await buffer.count("math", "failed") == 3

    @pytest.mark.parametrize("status", [Status.FILTERED, Status.FAILED])
    async def test_what_is_unfit_need_not_be_stored(self, buffer: ReplayBuffer, status: Status) -> None:
        """keep_unfit=False: it is counted as put and pruned, and what it replaces leaves; the caller can have both."""
        [uid], gone = await fill(buffer, 1), list[StorageItem]()
        options: dict[str, Any] = {"replaces": [uid], "keep_unfit": False, "dropped": gone}
        assert await buffer.put(group(7, status=status), "math", **options) is None
        assert [(item.uid, item.status) for item in gone] == [(uid, "completed"), (0, status)]
        assert await found(buffer) == []
        counted = [await total(buffer, name) for name in ("put", "replaced", "pruned", "dropped")]
        assert counted == [2, 1, 1, 0]
        assert await buffer.put(group(8), "math", keep_unfit=False) is not None
