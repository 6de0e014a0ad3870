"""Laws of rules and leases in storages that outlive their process."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from tests.contract.durable import SamePlace
from tests.contract.harness import (
    CODEC,
    SOON,
    Harness,
    OpenBuffer,
    drawn,
    eventually,
    fill,
    found,
    group,
    ids,
    total,
)
from tests.contract.leasing import lease_of

#: Long enough to close a storage and open it again.
WHILE = 2.0


class DurableRulesLaws(Harness):
    """Storages over the same place go on where the others are."""

    @pytest.fixture
    def same_place(self) -> SamePlace:
        """A function that returns a further storage over the data of the one given, with its rules, for a codec."""
        raise NotImplementedError("give a fixture same_place; tests.contract says how")

    async def _reopened(self, buffer: ReplayBuffer, open_buffer: OpenBuffer, same_place: SamePlace) -> ReplayBuffer:
        await buffer.close()
        return await open_buffer(storage=same_place(buffer.storage, CODEC))

    @pytest.mark.parametrize("policy", ["uniform", "prioritized"])
    async def test_draws_go_on_as_if_never_closed(
        self, open_buffer: OpenBuffer, same_place: SamePlace, policy: str
    ) -> None:
        """The sequence of random draws is that of a buffer that was never closed."""
        sequences = []
        for closes in (False, True):
            buffer = await open_buffer(policy, seed=5, max_times_sampled=3)
            sequence = []
            for round_number in range(6):
                for number in range(4):
                    await buffer.put(group(number), "math", priority=1 + number % 3)
                if closes:
                    buffer = await self._reopened(buffer, open_buffer, same_place)
                sequence += [await drawn(buffer, 2), await drawn(buffer, 1 + round_number)]
            sequences.append(sequence)
        assert sequences[0] == sequences[1]

    async def test_several_storages_share_the_race(self, open_buffer: OpenBuffer, same_place: SamePlace) -> None:
        """Draws through either are the same as draws through one."""
        one = await open_buffer("uniform", seed=2, max_times_sampled=0)
        first = await open_buffer("uniform", seed=2, max_times_sampled=0)
        second = await open_buffer(storage=same_place(first.storage, CODEC))
        for buffer in (one, first):
            await fill(buffer, 9)
        expected = [await drawn(one, 2) for _ in range(8)]
        assert [await drawn((first, second)[turn % 2], 2) for turn in range(8)] == expected

    async def test_two_readers_never_get_the_same_draw(self, open_buffer: OpenBuffer, same_place: SamePlace) -> None:
        """Trinity-RFT's readers of SQLite get the same rows; here groups are drawn as often as the limit says."""
        buffer = await open_buffer("uniform", seed=1, max_times_sampled=2)
        others = [await open_buffer(storage=same_place(buffer.storage, CODEC)) for _ in range(2)]
        uids = await fill(buffer, 12)
        calls = [drawn(one, 3) for one in (buffer, *others) for _ in range(4)]
        received = Counter([uid for batch in await asyncio.gather(*calls) for uid in batch])
        while batch := await drawn(buffer, 12):
            received.update(batch)
        assert received == dict.fromkeys(uids, 2)
        assert len(buffer) == 0

    async def test_the_capacity_is_that_of_the_place(self, open_buffer: OpenBuffer, same_place: SamePlace) -> None:
        """Puts through several storages at once never exceed it."""
        buffer = await open_buffer(capacity=4)
        other = await open_buffer(storage=same_place(buffer.storage, CODEC))
        await asyncio.gather(*((buffer, other)[n % 2].put(group(n), "math") for n in range(16)))
        assert len(buffer) == len(other) == 4
        assert await total(buffer, "evicted") == 12

    async def test_a_take_elsewhere_makes_room(self, open_buffer: OpenBuffer, same_place: SamePlace) -> None:
        """A put that waits here sees a take there."""
        buffer = await open_buffer(capacity=1, on_full="block")
        other = await open_buffer(storage=same_place(buffer.storage, CODEC))
        await fill(buffer, 1)
        task = asyncio.create_task(buffer.put(group(1), "math", timeout=SOON * 2))
        await asyncio.sleep(0.05)
        assert ids(await other.get(1, "math")) == [0]
        await asyncio.wait_for(task, SOON)

    async def test_leases_survive_reopening(self, open_buffer: OpenBuffer, same_place: SamePlace) -> None:
        """Groups stay hidden from every storage over the place; when their lease ends, they come back."""
        buffer = await open_buffer()
        uids = await fill(buffer, 3)
        lease = await lease_of(buffer, 2, WHILE)
        again = await self._reopened(buffer, open_buffer, same_place)
        there = [item.uid for item in await found(again)]
        assert there == uids[2:] or time.time() > lease.until - 0.1  # this machine was too slow
        await eventually(lambda: again.is_ready({"math": 3}))
        assert [(item.uid, item.deliveries) for item in await found(again)] == [
            (uids[0], 1),
            (uids[1], 1),
            (uids[2], 0),
        ]

    async def test_tokens_grow_for_all(self, open_buffer: OpenBuffer, same_place: SamePlace) -> None:
        """Also after reopening: a token fences off earlier consumers of the groups."""
        buffer = await open_buffer()
        await fill(buffer, 3)
        first = await lease_of(buffer)
        other = await open_buffer(storage=same_place(buffer.storage, CODEC))
        second = await lease_of(other)
        again = await self._reopened(buffer, open_buffer, same_place)
        third = await lease_of(again)
        assert first.token < second.token < third.token

    async def test_a_heartbeat_ends_with_its_buffer(self, open_buffer: OpenBuffer, same_place: SamePlace) -> None:
        """A consumer that closed its buffer holds its groups no longer than the lease's time."""
        buffer = await open_buffer()
        await fill(buffer, 1)
        lease = await buffer.lease_batch({"math": 1}, seconds=0.5)
        again = await self._reopened(buffer, open_buffer, same_place)
        await again.wait_ready({"math": 1}, timeout=SOON)
        assert lease.open
