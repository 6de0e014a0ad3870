"""Laws of the archive, completed groups that left by being drawn and stay for queries, and of unfit groups."""

from __future__ import annotations

from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import InputError
from replaybuf.storage.values import StorageItem
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import (
    Harness,
    OpenBuffer,
    drawn,
    eventually,
    fill,
    found,
    group,
    ids,
    only,
    total,
)

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
        """Not in len, never drawn, and a status that can't be asked for."""
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
            with pytest.raises(InputError, match="archived groups are never drawn"):
                await call()
        with pytest.raises(InputError, match="archived groups are never drawn"):
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
