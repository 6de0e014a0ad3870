"""Laws of storages that outlive their process, or that several processes share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import NewGroup
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import CODEC, OTHER_CODEC, SOON, Harness, Open, OpenBuffer, group, ids, plain
from tests.contract.persistence import everything, fill
from tests.contract.waiting import waiting

SamePlace = Callable[[SQLStorage, Codec], SQLStorage]


class DurableLaws(Harness):
    """Committed groups are there for all that open the same place."""

    @pytest.fixture
    def same_place(self) -> SamePlace:
        """A function that returns a further storage over the data of the one given, with its rules, for a codec."""
        raise NotImplementedError("give a fixture same_place; tests.contract says how")

    async def test_what_was_put_is_there_again(
        self, buffer: ReplayBuffer, open_buffer: OpenBuffer, same_place: SamePlace
    ) -> None:
        """Closed and opened again: groups, metadata and dropped counts are as before."""
        await fill(buffer)
        before = await everything(buffer)
        await buffer.close()
        again = await open_buffer(storage=same_place(buffer.storage, CODEC))
        assert await everything(again) == before

    async def test_a_put_that_returned_is_seen_by_others(
        self, buffer: ReplayBuffer, open_buffer: OpenBuffer, same_place: SamePlace
    ) -> None:
        """At once, and in both directions."""
        other = await open_buffer(storage=same_place(buffer.storage, CODEC))
        await buffer.put(group(1), "math")
        assert len(other) == 1
        await other.put(group(2), "math")
        assert ids(await buffer.get(9, "math")) == [1, 2]
        assert len(other) == 0

    async def test_a_put_elsewhere_wakes_those_who_wait(
        self, buffer: ReplayBuffer, open_buffer: OpenBuffer, same_place: SamePlace
    ) -> None:
        """A wait here sees a put there."""
        other = await open_buffer(storage=same_place(buffer.storage, CODEC))
        task = await waiting(buffer, buffer.take_batch({"math": 1}, timeout=SOON * 2))
        await other.put(group(1), "math")
        batch, _ = await asyncio.wait_for(task, SOON)
        assert ids(batch["math"]) == [1]

    async def test_a_group_goes_to_one_taker_of_all(
        self, buffer: ReplayBuffer, open_buffer: OpenBuffer, same_place: SamePlace
    ) -> None:
        """Takers of several storages over one place get all groups, each once."""
        others = [await open_buffer(storage=same_place(buffer.storage, CODEC)) for _ in range(3)]
        for i in range(30):
            await buffer.put(group(i), "math")
        batches = await asyncio.gather(*(one.get(4, "math") for one in (buffer, *others) for _ in range(2)))
        assert sorted(i for batch in batches for i in ids(batch)) == list(range(30))

    async def test_uids_are_never_used_again_after_reopening(
        self, buffer: ReplayBuffer, open_buffer: OpenBuffer, same_place: SamePlace
    ) -> None:
        """Also when the store was emptied."""
        given = [await buffer.put(group(i), "math") for i in range(3)]
        await buffer.delete({})
        await buffer.close()
        again = await open_buffer(storage=same_place(buffer.storage, CODEC))
        assert await again.put(group(9), "math") not in given

    async def test_groups_of_another_type_wait_for_theirs(
        self, open_storage: Open, open_buffer: OpenBuffer, same_place: SamePlace
    ) -> None:
        """Set aside by a reader of the wrong rollout type, they are there for one of the right type."""
        storage = await open_storage(OTHER_CODEC)
        fields = {"status": "completed", "of_another_type": 1}
        await storage.put(NewGroup("math", Status.COMPLETED, 0, [fields], 1.0))
        wrong = await open_buffer(storage=same_place(storage, CODEC))
        assert await wrong.get(1, "math") == []
        right = ReplayBuffer(storage, OTHER_CODEC.rollout_type)
        assert plain(await right.get(1, "math", "failed")) == plain([[fields]])
