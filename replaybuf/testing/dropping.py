"""Laws of dropped puts: a group that expired and isn't retryable is counted; the groups that it replaces leave."""

from __future__ import annotations

from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import ConflictError, LeaseLostError
from replaybuf.rollouts.rollout import RolloutState, Status
from replaybuf.storage.contract import LeaseStorage
from replaybuf.testing.harness import SOON, Harness, OpenBuffer, able, fill, found, group, ids, needs, total
from replaybuf.testing.leasing import LONG
from replaybuf.testing.waiting import waiting

#: Options that drop `stale()`.
DROPPING: dict[str, Any] = {"stale_threshold": 4, "expired_groups_retryable": False}


def stale() -> list[RolloutState]:
    """Return a group that is too old to be stored."""
    return group(9, seq_staleness=4)


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

    @needs(LeaseStorage)
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

    @needs(LeaseStorage)
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

    @needs(LeaseStorage)
    @pytest.mark.parametrize("how", ["finish", "save"])
    async def test_a_dropped_result_of_a_lost_lease_is_refused(self, buffer: ReplayBuffer, how: str) -> None:
        """LeaseLostError; nothing leaves, and nothing is counted."""
        await buffer.put(group(1), "math")
        lease = await buffer.lease_batch({"math": 1}, seconds=LONG, heartbeat=False)
        await able(buffer.storage, LeaseStorage).give_back(lease._leased, sorted(lease.open), counts=False)
        put = lease.finish if how == "finish" else lease.save
        with pytest.raises(LeaseLostError):
            await put(stale(), "math", replaces=lease.open, **DROPPING)
        assert (len(buffer), await counted(buffer)) == (1, (1, 0, 0))

    async def test_who_waits_for_room_hears_of_a_dropped_group(self, open_buffer: OpenBuffer) -> None:
        """The groups that it replaced have made room."""
        buffer = await open_buffer(capacity=1, on_full="block")
        uids = await fill(buffer, 1)
        waits = await waiting(buffer, buffer.put(group(2), "math", timeout=SOON))
        assert await buffer.put(stale(), "math", replaces=uids, **DROPPING) is None
        assert await waits is not None
