"""Laws of queries, changes, claims and imports."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import ClosedError, FullError, InputError, LeaseLostError
from replaybuf.storage.values import Cursor, NewGroup
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.contract.dropping import DROPPING, counted, stale
from tests.contract.harness import Harness, OpenBuffer, found, group, ids, total
from tests.contract.leasing import LONG, prompts_leased


async def four(buffer: ReplayBuffer) -> list[int]:
    """Put four groups that differ in everything. Return their uids."""
    options: list[dict[str, Any]] = [
        {"reward": 1.0, "seq_staleness": 9},
        {"reward": 0.5, "seq_staleness": 5},
        {"reward": 0.0, "seq_staleness": -1, "status": Status.FAILED},
        {"reward": None, "seq_staleness": 0},
    ]
    tags: list[Any] = [{"n": 1}, {"n": "1"}, {"n": True, "none": None}, None]
    uids = []
    for i, fields in enumerate(options):
        uid = await buffer.put(group(i, **fields), "math" if i < 3 else "code", priority=i, tags=tags[i])
        assert uid is not None
        uids.append(uid)
    return uids


class QueryingLaws(Harness):
    """Reading without consuming."""

    async def test_find_without_payloads_gives_the_metadata(self, buffer: ReplayBuffer) -> None:
        """All of it, in the same order, and no rollouts."""
        await four(buffer)
        items = await found(buffer, order_by="-reward")
        assert await found(buffer, order_by="-reward", payloads=False) == [replace(item, item=[]) for item in items]

    async def test_a_find_that_has_begun_ends_when_closed(self, buffer: ReplayBuffer) -> None:
        """With the items that were read ahead, or ClosedError; it doesn't hang."""
        await four(buffer)
        stream = buffer.find({})
        items = [await anext(stream)]
        await buffer.close()
        try:
            items += [item async for item in stream]
        except ClosedError:
            assert len(items) < 4


class ClaimLaws(Harness):
    """Groups that are leased from the beginning, in the transaction that moves a cursor."""

    def prompt(self, number: int) -> NewGroup:
        """Return a group without any generated rollouts yet."""
        return NewGroup("math", Status.INIT, 0, group(number, status=Status.INIT), 1.0)

    async def test_a_claim_moves_the_cursor_with_its_groups(self, buffer: ReplayBuffer) -> None:
        """In one transaction; a claim from another version of the cursor does nothing."""
        storage = buffer.storage
        first = await storage.claim([self.prompt(1), self.prompt(2)], Cursor("data", 0, 2, b"x"), LONG)
        assert first is not None
        assert ids([item.item for item in first.items["math"]]) == [1, 2]
        assert [(item.times_sampled, item.deliveries) for item in first.items["math"]] == [(1, 1), (1, 1)]
        assert await storage.claim([self.prompt(3)], Cursor("data", 0, 3, b"y"), LONG) is None
        assert await storage.cursor("data") == Cursor("data", 1, 2, b"x")
        second = await storage.claim([self.prompt(3)], Cursor("data", 1, 3, b"y"), LONG)
        assert second is not None
        assert second.token > first.token
        assert await storage.claim([self.prompt(4)], Cursor("data", 1, 4, b"z"), LONG) is None

    async def test_a_claim_from_before_a_restore_does_nothing(self, buffer: ReplayBuffer) -> None:
        """The cursor has the same version again but another place: a worker was just reading the dataset."""
        storage = buffer.storage
        await storage.move_cursor(Cursor("data", 0, 1, b"one"))
        await buffer.checkpoint(1)
        await storage.move_cursor(Cursor("data", 1, 9, b"nine"))
        cursor = await storage.cursor("data")
        await buffer.restore(1)
        await storage.move_cursor(replace(await storage.cursor("data"), position=2, value=b"two"))
        assert not await storage.move_cursor(replace(cursor, position=10, value=b"ten"))
        assert await storage.claim([self.prompt(1)], replace(cursor, position=10, value=b"ten"), LONG) is None
        assert await storage.cursor("data") == Cursor("data", 2, 2, b"two")


class ImportLaws(Harness):
    """Groups that are put in the transaction that moves a cursor."""

    def moved(self, number: int, **options: Any) -> NewGroup:
        """Return a completed group from another store, as that had it."""
        rollouts = group(number)
        payload = Codec(RolloutType(type(rollouts[0]))).encode(rollouts)
        return NewGroup("math", Status.COMPLETED, 2, rollouts, 1.0, payload=payload, **options)

    async def test_groups_are_put_with_the_cursors_move_or_not_at_all(self, buffer: ReplayBuffer) -> None:
        storage = buffer.storage
        groups = [self.moved(1), self.moved(4, key="k"), self.moved(2, key="k")]  # the last one of a key stays
        assert await storage.put_with_cursor(groups, Cursor("file", 0, 2, b"x"))
        assert not await storage.put_with_cursor([self.moved(3)], Cursor("file", 0, 3, b"y"))
        assert await storage.cursor("file") == Cursor("file", 1, 2, b"x")
        assert ids(await buffer.get(9, "math")) == [1, 2]

    async def test_a_group_without_room_leaves_nothing_of_the_others(self, open_buffer: OpenBuffer) -> None:
        buffer = await open_buffer(capacity=1, on_full="reject")
        storage = buffer.storage
        with pytest.raises(FullError):
            await storage.put_with_cursor([self.moved(1), self.moved(2)], Cursor("file"))
        assert len(buffer) == 0
        assert (await storage.cursor("file")).version == 0


class SettlingLaws(Harness):
    """Results that are stored in the place of leased groups."""

    async def test_a_lease_can_go_on_with_other_content(self, buffer: ReplayBuffer) -> None:
        """The new group is held in the place of the old one, and comes back instead of it."""
        lease = await prompts_leased(buffer, 1)
        half = group(2, status=Status.ABORTED)
        newer = await lease.save(half, "math", replaces=lease.open)
        assert lease.open == {newer}
        assert len(buffer) == 0
        await lease.extend()
        assert await lease.give_back(failed="x") == 1
        [item] = await found(buffer)
        assert (item.uid, ids([item.item]), item.status, item.deliveries) == (newer, [2], Status.ABORTED, 1)

    async def test_another_handle_settles_what_was_saved(self, buffer: ReplayBuffer) -> None:
        lease = await prompts_leased(buffer, 2)
        saved = await lease.save(group(2, status=Status.ABORTED), "math", replaces=[min(lease.open)])
        adopted = buffer.adopt(lease.handle, heartbeat=False)
        assert adopted.open == lease.open
        assert saved in adopted.open
        assert await total(buffer, "leased") == 2
        await adopted.acknowledge()
        assert await total(buffer, "leased") == 0

    async def test_a_put_for_a_lost_lease_is_refused(self, buffer: ReplayBuffer) -> None:
        """LeaseLostError, and nothing is stored, dropped or counted: the group is with another consumer by then."""
        lease = await prompts_leased(buffer, 1)
        other = await buffer.lease_batch({"math": 0}, seconds=LONG)
        with pytest.raises(InputError, match="not open in this lease"):
            await other.finish(group(2), "math", replaces=lease.open)
        await buffer.storage.give_back(lease._leased, sorted(lease.open))
        await buffer.lease_batch({"math": 1}, group_status="init", seconds=LONG, heartbeat=False)
        for settle in (lease.finish, lease.save):
            for result, options in ((group(2), {}), (stale(), DROPPING)):
                with pytest.raises(LeaseLostError):
                    await settle(result, "math", replaces=lease.open, **options)
        assert (len(buffer), await counted(buffer)) == (0, (1, 0, 0))

    async def test_of_several_results_at_once_only_the_lost_one_is_refused(self, buffer: ReplayBuffer) -> None:
        """Each is stored or refused as if it were alone, in the order of the calls."""
        lease = await prompts_leased(buffer, 4)
        uids = [item.uid for item in lease.items["math"]]
        await buffer.storage.give_back(lease._leased, uids[1:2])
        await buffer.delete({"uid": uids[1]})
        puts = [lease.finish(group(10 + n), "math", replaces=[uid]) for n, uid in enumerate(uids)]
        results = await asyncio.gather(*puts, return_exceptions=True)
        assert [type(result) for result in results] == [int, LeaseLostError, int, int]
        assert ids(await buffer.get(9, "math")) == [10, 12, 13]
        assert lease.open == {uids[1]}

    async def test_results_for_which_there_is_no_room_stay_leased(self, open_buffer: OpenBuffer) -> None:
        """Of several at once, as many as there is room for are stored."""
        buffer = await open_buffer(capacity=2, on_full="reject")
        lease = await prompts_leased(buffer, 4)
        uids = sorted(lease.open)
        puts = [lease.finish(group(10 + n), "math", replaces=[uid]) for n, uid in enumerate(uids)]
        results = await asyncio.gather(*puts, return_exceptions=True)
        assert [type(result) for result in results] == [int, int, FullError, FullError]
        assert sorted(lease.open) == uids[2:]
        assert await lease.give_back() == 2
        assert ids(await buffer.get(9, "math", "init")) == [2, 3]

    async def test_a_result_says_what_it_was_made_from(self, buffer: ReplayBuffer) -> None:
        """InputError otherwise, and for uids that aren't of the lease; nothing is stored."""
        await buffer.put(group(1), "math")
        lease = await buffer.lease_batch({"math": 1}, seconds=LONG)
        refused_replaces: list[Any] = [[], [-1], ["1"], "1", None, [7], [*lease.open, 7]]
        for replaces in refused_replaces:
            for settle in (lease.finish, lease.save):
                with pytest.raises(InputError, match=r"replaces|not open in this lease"):
                    await settle(group(2), "math", replaces=replaces)
        assert (await total(buffer, "put"), len(lease.open)) == (1, 1)
