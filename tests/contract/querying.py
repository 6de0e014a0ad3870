"""Laws of find, count_where, delete and update. What a query means is tested in full by replaybuf itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import ClosedError
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import Harness, found, group, matching, only, plain

#: Queries over the four groups of `four`, with the places of those that match.
QUERIES: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [0, 1, 2, 3]),
    ({"$or": []}, []),
    ({"task_name": "math"}, [0, 1, 2]),
    ({"task_name": {"$gt": "code"}}, [0, 1, 2]),
    ({"status": Status.FAILED}, [2]),
    ({"status": {"$ne": "failed"}}, [0, 1, 3]),
    ({"staleness": {"$lt": 5}}, [2, 3]),
    ({"staleness": {"$between": [5, 9]}}, [0, 1]),
    ({"priority": {"$gte": 1.5}}, [2, 3]),
    ({"reward": None}, [3]),
    ({"reward": {"$ne": 0.5}}, [0, 2, 3]),
    ({"reward": {"$gt": -1}}, [0, 1, 2]),
    ({"reward": {"$not_in": [0.5, None]}}, [0, 2]),
    ({"reward": {"$nin": [0.5]}}, [0, 2, 3]),
    ({"times_sampled": 0}, [0, 1, 2, 3]),
    ({"created_at": {"$gt": 0}}, [0, 1, 2, 3]),
    ({"tags.n": 1}, [0, 2]),
    ({"tags.n": "1"}, [1]),
    ({"tags.n": {"$gte": 0}}, [0, 2]),
    ({"tags.n": None}, [3]),
    ({"tags.none": {"$ne": "x"}}, [0, 1, 2, 3]),
    ({"tags.n": {"$in": ["1", None]}}, [1, 3]),
    ({"$not": {"task_name": "math", "priority": 0}}, [1, 2, 3]),
    ({"staleness": {"$gt": 4, "$lt": 9}}, [1]),
    ({"staleness": {"$not": {"$gt": 4}}}, [2, 3]),
]


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

    async def test_queries(self, buffer: ReplayBuffer) -> None:
        """A query finds the same in `find` and `count_where`."""
        uids = await four(buffer)
        for query, places in QUERIES:
            assert await matching(buffer, query) == [uids[place] for place in places], query

    async def test_uids_and_timestamps_can_be_asked_for(self, buffer: ReplayBuffer) -> None:
        """By themselves, in lists, and by order."""
        uids = await four(buffer)
        assert await matching(buffer, {"uid": {"$in": [uids[0], uids[3], 10**12]}}) == [uids[0], uids[3]]
        assert await matching(buffer, {"uid": {"$gt": uids[1]}}) == uids[2:]
        [first, *_] = await found(buffer)
        assert await matching(buffer, {"timestamp_id": first.timestamp_id}) == uids[:1]

    async def test_find_gives_groups_with_metadata(self, buffer: ReplayBuffer) -> None:
        """Every item has its metadata and its rollouts, and nothing is consumed."""
        uids = await four(buffer)
        [item] = await found(buffer, {"priority": 2})
        assert (item.uid, item.task_name, item.status, item.staleness) == (uids[2], "math", Status.FAILED, -1)
        assert (item.priority, item.reward, item.times_sampled) == (2.0, 0.0, 0)
        assert plain(item.tags) == plain({"n": True, "none": None})
        assert plain(item.item) == plain(group(2, reward=0.0, seq_staleness=-1, status=Status.FAILED))
        assert len(buffer) == 4

    async def test_find_without_payloads_gives_the_metadata(self, buffer: ReplayBuffer) -> None:
        """All of it, in the same order, and no rollouts."""
        await four(buffer)
        whole = await found(buffer, order_by="-reward")
        assert await found(buffer, order_by="-reward", payloads=False) == [replace(one, item=[]) for one in whole]

    async def test_find_orders(self, buffer: ReplayBuffer) -> None:
        """By one field or several, groups without a value last, ties in insertion order."""
        uids = await four(buffer)
        orders: list[tuple[Any, list[int]]] = [
            (None, [0, 1, 2, 3]),
            ("uid", [0, 1, 2, 3]),
            ("-timestamp_id", [3, 2, 1, 0]),
            ("reward", [2, 1, 0, 3]),
            ("-reward", [0, 1, 2, 3]),
            ("staleness", [2, 3, 1, 0]),
            (["task_name", "-priority"], [3, 2, 1, 0]),
            ("status", [0, 1, 3, 2]),
            ("times_sampled", [0, 1, 2, 3]),
        ]
        for order_by, places in orders:
            got = [item.uid for item in await found(buffer, order_by=order_by)]
            assert got == [uids[place] for place in places], order_by

    async def test_find_limits(self, buffer: ReplayBuffer) -> None:
        """`limit` bounds the number of groups; None doesn't; negative or fractional ones are refused."""
        uids = await four(buffer)
        for limit, expected in ((0, []), (2, uids[:2]), (9, uids), (None, uids)):
            assert [item.uid for item in await found(buffer, limit=limit)] == expected
        for wrong in (-1, 1.5, True):
            with pytest.raises(ValueError, match="limit"):
                buffer.find({}, limit=wrong)  # type: ignore[arg-type]

    async def test_find_streams_while_others_change(self, buffer: ReplayBuffer) -> None:
        """Between two items anyone can put, take and delete; groups that stay are each given once."""
        uids = [await buffer.put(group(i, extra_fields={"x": b"x" * 200_000}), "math") for i in range(60)]
        seen = []
        async for item in buffer.find({}):
            seen.append(item.uid)
            if len(seen) == 1:
                await buffer.delete({"uid": {"$gte": uids[30]}})
                await buffer.get(5, "math")
                await buffer.put(group(99), "math")
        assert seen == sorted(set(seen))
        assert seen[0] == uids[0]
        assert set(uids[5:30]) <= set(seen)
        # Groups read ahead may still come, but not all of them.
        assert len(seen) < 61

    async def test_find_can_be_left_early(self, buffer: ReplayBuffer) -> None:
        """An iteration that is broken off leaves nothing behind that blocks others."""
        await four(buffer)
        stream = buffer.find({})
        await anext(stream)
        assert await buffer.delete({}) == 4
        await stream.aclose()  # type: ignore[attr-defined]
        assert len(buffer) == 0

    async def test_a_find_that_has_begun_ends_when_closed(self, buffer: ReplayBuffer) -> None:
        """With the items that were read ahead, or ClosedError; it doesn't hang."""
        await four(buffer)
        stream = buffer.find({})
        seen = [await anext(stream)]
        await buffer.close()
        try:
            seen += [item async for item in stream]
        except ClosedError:
            assert len(seen) < 4


class ChangingLaws(Harness):
    """delete and update."""

    async def test_delete_removes_what_matches(self, buffer: ReplayBuffer) -> None:
        """And says how many; `{}` removes all."""
        uids = await four(buffer)
        assert await buffer.delete({"reward": {"$gte": 0.5}}) == 2
        assert [item.uid for item in await found(buffer)] == uids[2:]
        assert await buffer.delete({"reward": 3}) == 0
        assert await buffer.delete({}) == 2
        assert len(buffer) == 0

    async def test_update_sets_metadata(self, buffer: ReplayBuffer) -> None:
        """Status, priority and tags; the rest stays; it returns the number that matched."""
        uids = await four(buffer)
        assert await buffer.update({"uid": uids[0]}, status="filtered", priority=9, tags={"new": 1}) == 1
        assert await buffer.update({"uid": {"$in": uids[1:3]}}, priority=8) == 2
        assert await buffer.update({"uid": uids[2]}, tags=None) == 1
        assert await buffer.update({"uid": -1}, priority=1) == 0
        items = await found(buffer)
        statuses = [Status.FILTERED, Status.COMPLETED, Status.FAILED, Status.COMPLETED]
        assert [item.status for item in items] == statuses
        assert [item.priority for item in items] == [9, 8, 8, 3]
        assert [item.tags for item in items] == [{"new": 1}, {"n": "1"}, None, None]

    async def test_update_keeps_identity_order_and_staleness(self, buffer: ReplayBuffer) -> None:
        """uid, timestamp_id, created_at, staleness, reward and the rollouts stay, also through a change of status."""
        await buffer.put(group(1), "math", model_step=3, current_train_step=8, key="k")
        before = await only(buffer)
        await buffer.update({}, status="archived", priority=7, tags={"a": 1})
        after = await only(buffer)
        kept = ("uid", "timestamp_id", "created_at", "staleness", "reward", "key", "times_sampled")
        assert [getattr(after, name) for name in kept] == [getattr(before, name) for name in kept]
        assert plain(after.item) == plain(before.item)

    async def test_a_group_of_another_status_is_taken_as_such(self, buffer: ReplayBuffer) -> None:
        """After an update it belongs to its new status, in its old place."""
        for i in range(3):
            await buffer.put(group(i, status=Status.FAILED if i == 1 else Status.COMPLETED), "math")
        await buffer.update({"status": "failed"}, status="completed")
        assert [g[0].rollout_id for g in await buffer.get(9, "math")] == [0, 1, 2]
