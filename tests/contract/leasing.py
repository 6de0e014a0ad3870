"""Laws of leases: who holds groups, and when their time is over."""

from __future__ import annotations

import asyncio
import time
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
from tests.stores import until

#: A lease that doesn't end while a test runs, in seconds.
LONG = 1000.0


async def lease_of(buffer: ReplayBuffer, size: int = 1, seconds: float = LONG) -> Lease:
    """Return a lease of this many groups, without a heartbeat, to be settled by hand."""
    lease = await buffer.lease_batch({"math": size}, seconds=seconds, heartbeat=False)
    assert lease.counts == {"math": size}
    return lease


async def prompts_leased(buffer: ReplayBuffer, count: int) -> Lease:
    """Return a lease of so many prompts, numbered from 0."""
    for number in range(count):
        await buffer.put(group(number, status=Status.INIT), "math")
    return await buffer.lease_batch({"math": count}, group_status="init", seconds=LONG, heartbeat=False)


class LeaseLaws(Harness):
    """What becomes of leased groups when their consumer says so."""

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

    async def test_an_exception_that_cannot_say_what_it_is_gives_back(self, buffer: ReplayBuffer) -> None:
        """And it goes on, not one of its own text."""

        class MuteError(Exception):
            def __str__(self) -> str:
                raise AttributeError("response")

        await fill(buffer, 1)
        with pytest.raises(MuteError):
            async with buffer.lease_batch({"math": 1}, seconds=LONG):
                raise MuteError
        assert [item.deliveries for item in await found(buffer)] == [1]

    async def test_an_error_that_names_a_group_fails_that_one_alone(self, buffer: ReplayBuffer) -> None:
        """The others come back uncounted; also those of an exception group, and where none is of the lease."""
        uids = await fill(buffer, 4)
        for named_uids, count in (([uids[1]], 1), (uids[2], 1), (9999, 0)):
            error: Exception = GroupError("its reward is NaN", uids=named_uids)
            with pytest.raises((GroupError, ExceptionGroup)):
                async with buffer.lease_batch({"math": 4}, seconds=LONG):
                    raise error if count else ExceptionGroup("of two", [error])
        items = await found(buffer)
        assert [(item.uid, item.deliveries) for item in items] == [(uid, int(uid in uids[1:3])) for uid in uids]

    async def test_a_group_is_settled_once(self, buffer: ReplayBuffer) -> None:
        """Settled groups, and those of other leases, are refused, and nothing happens to the others."""
        uids = await fill(buffer, 3)
        lease, other = await lease_of(buffer, 2), await lease_of(buffer)
        await lease.acknowledge(uids[:1])
        for uid in (uids[0], uids[2], 9999):
            for call in (lease.acknowledge([uids[1], uid]), lease.give_back([uids[1], uid])):
                with pytest.raises(InputError, match=f"group {uid} is not open"):
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
        adopted, late_lease = (buffer.adopt(lease.handle, heartbeat=False) for _ in range(2))
        await lease.acknowledge()
        await adopted.acknowledge()
        assert [item.times_sampled for item in await found(buffer)] == [1] * (times - 1)
        second = await buffer.lease_batch({"math": 1}, seconds=LONG, heartbeat=False)
        await late_lease.acknowledge()
        await second.acknowledge()
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

    async def test_a_lost_group_is_not_acknowledged_by_the_record_of_others(self, buffer: ReplayBuffer) -> None:
        """Though of its lease only a record is left that other groups have settled."""
        work = buffer.storage
        work.sweeper._history = 1
        uids = await fill(buffer, 3)
        lease = await lease_of(buffer, 3, SHORT)
        other = buffer.adopt(lease.handle, heartbeat=False)
        for step, uid in enumerate(uids[:2]):
            await lease.acknowledge([uid], train_step=step)
        await work.thread.run(work.sweeper.prune_history)
        await buffer.wait_ready({"math": 1}, timeout=SOON)
        with pytest.raises(LeaseLostError):
            await other.acknowledge()

    async def test_a_lease_waits_for_a_whole_batch(self, buffer: ReplayBuffer) -> None:
        """As take_batch does; at the timeout nothing is leased, and the error says what others hold."""
        await fill(buffer, 2)
        first = await lease_of(buffer)
        with pytest.raises(NotReadyError, match=r"task math: 1 completed group there, 2 needed \(1 leased\)"):
            await buffer.lease_batch({"math": 2}, timeout=0.05)
        task = await waiting(buffer, buffer.lease_batch({"math": 2}, timeout=SOON, seconds=LONG).__aenter__())
        await first.give_back()
        lease = await asyncio.wait_for(task, SOON)
        assert ids(lease.batch["math"]) == [0, 1]
        await lease.acknowledge()


#: A lease that ends soon, in seconds.
SHORT = 0.25


async def past(moment: float) -> None:
    """Wait until this time is over by the clock of this machine, with a margin for the store's clock."""
    while time.time() < moment + 0.1:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def set_clock(monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    """Set the wall clock of this process."""
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + ahead)


class LeaseTimeLaws(Harness):
    """Groups whose consumer is silent."""

    async def test_groups_of_a_silent_consumer_come_back(self, buffer: ReplayBuffer) -> None:
        """After the lease's time, in their old place, with the delivery counted."""
        uids = await fill(buffer, 3)
        await lease_of(buffer, 2, SHORT)
        await until(lambda: buffer.is_ready({"math": 3}), SOON)
        items = await found(buffer)
        assert [(item.uid, item.times_sampled) for item in items] == [(uid, 0) for uid in uids]
        assert [item.deliveries for item in items] == [1, 1, 0]
        assert (len(buffer), await total(buffer, "lease_expired")) == (3, 2)

    async def test_those_who_wait_get_what_comes_back(self, buffer: ReplayBuffer) -> None:
        """Without any other change of the buffer."""
        await fill(buffer, 1)
        await lease_of(buffer, 1, SHORT)
        batch, _ = await asyncio.wait_for(buffer.take_batch({"math": 1}, timeout=None), SOON)
        assert ids(batch["math"]) == [0]

    async def test_those_who_wait_hear_of_what_a_draw_brings_back(self, buffer: ReplayBuffer) -> None:
        """A draw that finds too few groups ends expired leases, and may leave some of their groups to others."""
        await fill(buffer, 2)
        lease = await lease_of(buffer, 2, SHORT)
        before = buffer.storage.version()
        await past(lease.until)
        assert ids(await buffer.get(1, "math")) == [0]
        assert buffer.storage.version() != before

    async def test_a_late_acknowledgement_is_refused(self, buffer: ReplayBuffer) -> None:
        """If another consumer has the groups by then: LeaseLostError, and they stay with it."""
        await fill(buffer, 2)
        late_lease = await lease_of(buffer, 2, SHORT)
        other = await buffer.lease_batch({"math": 2}, timeout=SOON, seconds=LONG, heartbeat=False)
        assert other.token > late_lease.token
        with pytest.raises(LeaseLostError, match="2 of the groups"):
            await late_lease.acknowledge()
        with pytest.raises(LeaseLostError):
            await late_lease.extend()
        assert await late_lease.give_back() == 0
        assert await total(buffer, "leased") == 2
        await other.acknowledge()
        assert await total(buffer, "taken") == 2

    async def test_a_lost_lease_shows_at_the_end_of_the_block(self, buffer: ReplayBuffer) -> None:
        """Unless the block raised an error already, which is the one to see."""
        await fill(buffer, 1)

        async def outlast(error: Exception | None) -> None:
            async with buffer.lease_batch({"math": 1}, timeout=SOON, seconds=SHORT, heartbeat=False):
                await buffer.take_batch({"math": 1}, timeout=SOON)
                if error is not None:
                    raise error

        with pytest.raises(LeaseLostError):
            await outlast(None)
        await fill(buffer, 1)
        with pytest.raises(ZeroDivisionError):
            await outlast(ZeroDivisionError())

    async def test_an_acknowledgement_is_whole(self, buffer: ReplayBuffer) -> None:
        """If one group of several is lost, none of them is acknowledged."""
        uids = await fill(buffer, 2)
        late_lease = await lease_of(buffer, 2, SHORT)
        await buffer.wait_ready({"math": 2}, timeout=SOON)
        assert await drawn(buffer) == uids[:1]
        with pytest.raises(LeaseLostError):
            await late_lease.acknowledge()
        assert [item.uid for item in await found(buffer)] == uids[1:]

    async def test_extend_keeps_a_lease(self, buffer: ReplayBuffer) -> None:
        """Beyond the time that it had."""
        await fill(buffer, 1)
        lease = await lease_of(buffer, 1, 1.0)
        until = lease.until
        await lease.extend(LONG)
        assert lease.until > until
        await past(until)
        assert await buffer.get(1, "math") == []
        await lease.acknowledge()
        assert await total(buffer, "taken") == 1

    async def test_a_handle_that_others_have_settled_ends_with_its_lease(self, buffer: ReplayBuffer) -> None:
        """Its heartbeats don't go on for ever; a late acknowledgement of the same groups isn't an error."""
        await fill(buffer, 1)
        lease = await lease_of(buffer, 1, 1.5)
        adopted = buffer.adopt(lease.handle, seconds=1.5)
        await lease.acknowledge()
        end = adopted.until
        await adopted.extend(LONG)
        assert adopted.until == end
        await until(lambda: adopted.lost, SOON)
        await adopted.acknowledge()
        assert await total(buffer, "taken") == 1

    async def test_a_heartbeat_keeps_a_lease(self, buffer: ReplayBuffer) -> None:
        """While its consumer works, also when that blocks the event loop."""
        await fill(buffer, 1)
        async with buffer.lease_batch({"math": 1}, seconds=1.0) as lease:
            until = lease.until
            while time.time() < until + 0.2:
                time.sleep(0.05)  # noqa: ASYNC251
            assert lease.until > until
            assert await buffer.get(1, "math") == []
        assert await total(buffer, "taken") == 1

    async def test_a_heartbeat_never_shortens_a_lease(self, buffer: ReplayBuffer) -> None:
        """That of another handle, or one that was extended; who extends it may."""
        await fill(buffer, 1)
        lease = await lease_of(buffer)
        adopted, end = buffer.adopt(lease.handle, seconds=SHORT, heartbeat=False), lease.until
        assert await adopted.beat()
        assert adopted.until >= end
        await lease.extend(2 * LONG)
        end = lease.until
        assert await lease.beat()
        assert lease.until >= end
        await lease.extend(SOON)
        assert lease.until < end

    @pytest.mark.parametrize("jump", [3600.0, -3600.0])
    async def test_leases_pass_evenly_though_the_clock_is_set(
        self, buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch, jump: float
    ) -> None:
        """A live one is kept, with and without its heartbeat; a silent one ends at its time."""
        uids = await fill(buffer, 3)
        async with buffer.lease_batch({"math": 1}, seconds=1.5) as live:
            long = await lease_of(buffer)
            await lease_of(buffer, 1, SHORT)
            set_clock(monkeypatch, jump)
            await buffer.wait_ready({"math": 1}, timeout=SOON)
            assert [item.uid for item in await found(buffer)] == uids[2:]
            assert await live.beat()
            assert [item.uid for item in await found(buffer)] == uids[2:]
            await long.extend()
            await long.acknowledge()
        assert await total(buffer, "taken") == 2

    async def test_silence_counts_as_a_delivery_in_vain(self, open_buffer: OpenBuffer) -> None:
        """A group that its consumers die of is set aside."""
        buffer = await open_buffer(max_deliveries=1)
        await fill(buffer, 1)
        await lease_of(buffer, 1, SHORT)
        await buffer.wait_ready({"math": 1}, "failed", timeout=SOON)
        item = await only(buffer)
        assert item.error is not None
        assert "silent" in item.error
