"""Laws of leases: groups that are hidden while a consumer works on them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from replaybuf.buffer.lease import Lease
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import GroupError, InputError, LeaseLostError, NotReadyError
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import (
    SOON,
    Harness,
    OpenBuffer,
    drawn,
    fill,
    found,
    group,
    ids,
    only,
    total,
)
from tests.contract.waiting import waiting
from tests.stores import set_by

#: A lease that doesn't end while a test runs, in seconds.
LONG = 1000.0


async def lease_of(buffer: ReplayBuffer, size: int = 1, seconds: float = LONG) -> Lease:
    """Return a lease of this many groups, without a heartbeat, to be settled by hand."""
    lease = await buffer.lease_batch({"math": size}, seconds=seconds, heartbeat=False)
    assert lease.counts == {"math": size}
    return lease


class LeaseLaws(Harness):
    """What becomes of leased groups when their consumer says so."""

    async def test_leased_groups_are_hidden(self, buffer: ReplayBuffer) -> None:
        """From draws, reads, counts and deletions; the batch has them, with their metadata."""
        uids = await fill(buffer, 3)
        async with buffer.lease_batch({"math": 2}, seconds=LONG) as lease:
            assert ids(lease.batch["math"]) == [0, 1]
            assert [item.uid for item in lease.items["math"]] == uids[:2]
            assert (lease.counts, sorted(lease.open)) == ({"math": 2}, uids[:2])
            assert [item.uid for item in await found(buffer)] == uids[2:]
            assert (len(buffer), await buffer.count("math", "completed"), await buffer.count_where({})) == (1, 1, 1)
            assert await total(buffer, "leased") == 2
            assert await buffer.delete({}) == 1
            assert await buffer.get(9, "math") == []
        assert await total(buffer, "leased") == 0

    async def test_leaving_the_block_acknowledges(self, buffer: ReplayBuffer) -> None:
        """The groups have left the buffer, as if they had been taken."""
        await fill(buffer, 3)
        async with buffer.lease_batch({"math": 2}, seconds=LONG):
            pass
        assert ids(await buffer.get(9, "math")) == [2]
        assert await total(buffer, "taken") == 3

    async def test_an_exception_gives_back(self, buffer: ReplayBuffer) -> None:
        """In the old place, with the delivery counted; the exception goes on."""
        uids = await fill(buffer, 3)
        with pytest.raises(ZeroDivisionError):
            async with buffer.lease_batch({"math": 2}, seconds=LONG):
                raise ZeroDivisionError
        items = await found(buffer)
        assert [(item.uid, item.timestamp_id) for item in items] == [(uid, uid) for uid in uids]
        assert [item.deliveries for item in items] == [1, 1, 0]
        assert [item.times_sampled for item in items] == [0, 0, 0]
        assert ids(await buffer.get(9, "math")) == [0, 1, 2]
        assert await total(buffer, "returned") == 2

    async def test_cancellation_gives_back_uncounted(self, buffer: ReplayBuffer) -> None:
        """A consumer that is stopped says nothing against its groups."""
        await fill(buffer, 2)
        begun = asyncio.Event()

        async def work() -> None:
            async with buffer.lease_batch({"math": 2}, seconds=LONG):
                begun.set()
                await asyncio.sleep(LONG)

        task = asyncio.create_task(work())
        await set_by(begun, task, SOON)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [item.deliveries for item in await found(buffer)] == [0, 0]

    @pytest.mark.parametrize("ends", [1, 3, 20])
    async def test_a_block_that_is_cancelled_again_and_again_gives_back(self, buffer: ReplayBuffer, ends: int) -> None:
        """As scopes of anyio do it, in each turn of the event loop; so does one that was about to acknowledge."""
        await fill(buffer, 2)

        async def work() -> None:
            async with buffer.lease_batch({"math": 1}, seconds=LONG):
                begun.set()
                await leaving.wait()

        for leaves in (False, True):
            begun, leaving = asyncio.Event(), asyncio.Event()
            task = asyncio.create_task(work())
            await set_by(begun, task)
            if leaves:
                leaving.set()
                await asyncio.sleep(0)
            for _ in range(ends):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await total(buffer, "leased") == 0
            assert (await total(buffer, "taken"), await total(buffer, "returned")) == (leaves, 1)

    async def test_an_error_that_names_a_group_fails_that_one_alone(self, buffer: ReplayBuffer) -> None:
        """The others come back uncounted; also those of an exception group, and where none is of the lease."""
        uids = await fill(buffer, 4)
        for named, count in (([uids[1]], 1), (uids[2], 1), (9999, 0)):
            error: Exception = GroupError("its reward is NaN", uids=named)
            with pytest.raises((GroupError, ExceptionGroup)):
                async with buffer.lease_batch({"math": 4}, seconds=LONG):
                    raise error if count else ExceptionGroup("of two", [error])
        items = await found(buffer)
        assert [(item.uid, item.deliveries) for item in items] == [(uid, int(uid in uids[1:3])) for uid in uids]

    async def test_groups_may_be_settled_one_by_one(self, buffer: ReplayBuffer) -> None:
        """Some acknowledged, some given back; the end of the block acknowledges the rest."""
        uids = await fill(buffer, 4)
        async with buffer.lease_batch({"math": 4}, seconds=LONG) as lease:
            await lease.acknowledge(uids[:1])
            assert await lease.give_back(uids[1:2], failed="no good") == 1
            assert await lease.give_back(uids[2:3]) == 1
            assert lease.open == {uids[3]}
            assert [item.deliveries for item in await found(buffer)] == [1, 0]
        assert [item.uid for item in await found(buffer)] == uids[1:3]
        assert await total(buffer, "taken") == 2

    async def test_a_group_is_settled_once(self, buffer: ReplayBuffer) -> None:
        """Settled groups, and those of other leases, are refused, and nothing happens to the others."""
        uids = await fill(buffer, 3)
        lease, other = await lease_of(buffer, 2), await lease_of(buffer)
        await lease.acknowledge(uids[:1])
        for wrong in (uids[0], uids[2], 9999):
            for call in (lease.acknowledge([uids[1], wrong]), lease.give_back([uids[1], wrong])):
                with pytest.raises(InputError, match=f"group {wrong} is not open"):
                    await call
        assert await total(buffer, "leased") == 2
        await lease.give_back()
        await other.give_back()
        assert [item.uid for item in await found(buffer)] == uids[1:]

    async def test_a_settled_lease_has_nothing_left_to_do(self, buffer: ReplayBuffer) -> None:
        """Settling all open groups when none is open is no error; nor is an empty lease."""
        await fill(buffer, 1)
        async with buffer.lease_batch({"math": 1, "code": 2}, seconds=LONG) as lease:
            assert lease.counts == {"math": 1, "code": 0}
            await lease.acknowledge()
            await lease.acknowledge()
            assert await lease.give_back() == 0
            await lease.extend()
        async with buffer.lease_batch({"math": 3}, seconds=LONG) as lease:
            assert lease.counts == {"math": 0}

    async def test_what_was_given_back_is_not_acknowledged(self, buffer: ReplayBuffer) -> None:
        """LeaseLostError, if nothing is left to acknowledge; leaving the block is no acknowledgement then."""
        await fill(buffer, 2)
        async with buffer.lease_batch({"math": 2}) as lease:
            await lease.give_back()
            with pytest.raises(LeaseLostError, match="2 groups of lease"):
                await lease.acknowledge()
        assert await total(buffer, "taken") == 0
        assert len(buffer) == 2

    async def test_what_another_holder_gave_back_is_not_acknowledged(self, buffer: ReplayBuffer) -> None:
        """Before the lease's end, too: LeaseLostError, whether another consumer has it or nobody; nothing happens."""
        uids = await fill(buffer, 3)
        lease = await lease_of(buffer, 3)
        assert await buffer.adopt(lease.handle, heartbeat=False).give_back(uids[:2]) == 2
        next_one = await lease_of(buffer)
        with pytest.raises(
            LeaseLostError, match=rf"2 of the groups .* held \({uids[0]}, {uids[1]}\): .* the others by"
        ):
            await lease.acknowledge()
        assert (await total(buffer, "leased"), await total(buffer, "taken")) == (2, 0)
        await lease.acknowledge(uids[2:])
        await next_one.acknowledge()
        assert [item.uid for item in await found(buffer)] == uids[1:2]

    @pytest.mark.parametrize("times", [1, 2])
    async def test_what_another_holder_acknowledged_is_acknowledged(self, open_buffer: OpenBuffer, times: int) -> None:
        """Once, though both of them say so, and also if it stays for its next draw or is leased for that."""
        buffer = await open_buffer(max_times_sampled=times)
        await fill(buffer, 1)
        lease = await lease_of(buffer)
        adopted, late = (buffer.adopt(lease.handle, heartbeat=False) for _ in range(2))
        await lease.acknowledge()
        await adopted.acknowledge()
        assert [item.times_sampled for item in await found(buffer)] == [1] * (times - 1)
        again = await buffer.lease_batch({"math": 1}, seconds=LONG, heartbeat=False)
        await late.acknowledge()
        await again.acknowledge()
        assert (len(buffer), await total(buffer, "taken")) == (0, 1)

    async def test_what_another_holder_settled_in_part_is_acknowledged(self, buffer: ReplayBuffer) -> None:
        """The groups left are, though the other one has renewed the lease beyond the end that this one knows of."""
        uids = await fill(buffer, 3)
        lease = await lease_of(buffer, 3)
        other = buffer.adopt(replace(lease.handle, until=0.0), heartbeat=False)
        await lease.acknowledge(uids[:1])
        await lease.finish(group(7), "math", replaces=uids[1:2])
        await other.acknowledge()
        assert ids(await buffer.get(9, "math")) == [7]
        assert await total(buffer, "leased") == 0

    async def test_a_lease_waits_for_a_whole_batch(self, buffer: ReplayBuffer) -> None:
        """As take_batch does; at the timeout nothing is leased, and the error says what others hold."""
        await fill(buffer, 2)
        held = await lease_of(buffer)
        with pytest.raises(NotReadyError, match=r"task math: 1 completed group there, 2 needed \(1 leased\)"):
            await buffer.lease_batch({"math": 2}, timeout=0.05)
        task = await waiting(buffer, buffer.lease_batch({"math": 2}, timeout=SOON, seconds=LONG).__aenter__())
        await held.give_back()
        lease = await asyncio.wait_for(task, SOON)
        assert ids(lease.batch["math"]) == [0, 1]
        await lease.acknowledge()

    async def test_too_many_deliveries_set_a_group_aside(self, open_buffer: OpenBuffer) -> None:
        """As FAILED, with the reason of the last one; a new status clears both."""
        buffer = await open_buffer(max_deliveries=2)
        await fill(buffer, 1)
        for reason in ("out of memory", "nan loss"):
            assert await buffer.count("math", "completed") == 1
            await (await lease_of(buffer)).give_back(failed=reason)
        item = await only(buffer)
        assert (item.status, item.deliveries) == (Status.FAILED, 2)
        assert item.error is not None
        assert "2 times" in item.error
        assert "nan loss" in item.error
        assert await total(buffer, "set_aside") == 1
        await buffer.update({}, status="completed")
        item = await only(buffer)
        assert (item.status, item.deliveries, item.error) == (Status.COMPLETED, 0, None)

    async def test_each_acknowledgement_is_one_draw(self, open_buffer: OpenBuffer) -> None:
        """With reuse: a group given back was not drawn; an acknowledgement clears the deliveries."""
        buffer = await open_buffer(max_times_sampled=2)
        await fill(buffer, 1)
        await (await lease_of(buffer)).give_back(failed="?")
        assert [(item.times_sampled, item.deliveries) for item in await found(buffer)] == [(0, 1)]
        await (await lease_of(buffer)).acknowledge()
        assert [(item.times_sampled, item.deliveries) for item in await found(buffer)] == [(1, 0)]
        lease = await lease_of(buffer)
        assert lease.items["math"][0].times_sampled == 2
        await lease.acknowledge()
        assert len(buffer) == 0
        assert (await total(buffer, "sampled_new"), await total(buffer, "sampled_again")) == (1, 1)

    async def test_a_put_of_the_same_key_replaces_a_leased_group(self, buffer: ReplayBuffer) -> None:
        """It doesn't come back, whether it is acknowledged or given back."""
        await buffer.put(group(1), "math", key="a")
        await buffer.put(group(2), "math", key="b")
        first, second = await lease_of(buffer), await lease_of(buffer)
        await buffer.put(group(11), "math", key="a")
        await buffer.put(group(12), "math", key="b")
        await first.acknowledge()
        assert await second.give_back() == 0
        assert ids(await buffer.get(9, "math")) == [11, 12]
        assert (await total(buffer, "replaced"), await total(buffer, "leased")) == (2, 0)

    async def test_priorities_of_leased_groups_can_be_updated(self, open_buffer: OpenBuffer) -> None:
        """A trainer knows priorities at that time; they count when the groups are back."""
        buffer = await open_buffer("prioritized", max_times_sampled=0, seed=1)
        uids = await fill(buffer, 3)
        lease = await lease_of(buffer, 3)
        assert await buffer.update_priorities({uids[0]: 0, uids[1]: 0, uids[2]: 7.0}) == 3
        await lease.acknowledge()
        assert [item.priority for item in await found(buffer)] == [0, 0, 7]
        assert [await drawn(buffer) for _ in range(3)] == [uids[2:]] * 3
