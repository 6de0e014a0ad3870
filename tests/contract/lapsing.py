"""Laws of the time of leases: the groups of silent consumers."""

from __future__ import annotations

import asyncio
import time

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import LeaseLostError
from tests.contract.harness import SOON, Harness, OpenBuffer, drawn, eventually, fill, found, ids, only, total
from tests.contract.leasing import LONG, lease_of

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
        await eventually(lambda: buffer.is_ready({"math": 3}))
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
        late = await lease_of(buffer, 2, SHORT)
        other = await buffer.lease_batch({"math": 2}, timeout=SOON, seconds=LONG, heartbeat=False)
        assert other.token > late.token
        with pytest.raises(LeaseLostError, match="2 of the groups"):
            await late.acknowledge()
        with pytest.raises(LeaseLostError):
            await late.extend()
        assert await late.give_back() == 0
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
        late = await lease_of(buffer, 2, SHORT)
        await buffer.wait_ready({"math": 2}, timeout=SOON)
        assert await drawn(buffer) == uids[:1]
        with pytest.raises(LeaseLostError):
            await late.acknowledge()
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
