"""Laws of puts and takes of one process."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.common.checks import Tags
from replaybuf.errors import ConflictError, InputError
from replaybuf.rules.query import parse
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import (
    OTHER_CODEC,
    SOON,
    Harness,
    OpenBuffer,
    fill,
    found,
    group,
    ids,
    new_group,
    only,
    plain,
    rollout,
)


class PuttingLaws(Harness):
    """Laws of putting, except what expires in a put (`tests/rollouts/test_expiry.py`)."""

    async def test_an_empty_group_is_a_no_op(self, buffer: ReplayBuffer) -> None:
        """An empty list returns None and stores nothing."""
        assert await buffer.put([], "math") is None
        assert len(buffer) == 0

    async def test_metadata_describes_the_group(self, buffer: ReplayBuffer) -> None:
        """task, status, priority, tags, key, times_sampled, created_at and error of a new group."""
        before = time.time()
        tags: Tags = {"text": "\N{SNOWMAN}", "int": -(2**63), "float": 0.1, "yes": True, "none": None, 'odd "$.name': 1}
        uid = await buffer.put(group(1), "math", priority=2.5, tags=tags, key="k")
        item = await only(buffer)
        assert (item.uid, item.task_name, item.status) == (uid, "math", Status.COMPLETED)
        assert (item.priority, item.key, item.times_sampled, item.error) == (2.5, "k", 0, None)
        assert plain(item.tags) == plain(tags)
        assert before <= item.created_at <= time.time()

    async def test_the_status_of_a_group_is_that_of_its_worst_rollout(self, buffer: ReplayBuffer) -> None:
        """COMPLETED when all are, otherwise the first of failed, aborted, expired, filtered, init, archived."""
        order = ["completed", "completed", "archived", "init", "filtered", "expired", "aborted", "failed"]
        for pair in pairwise(order):
            await buffer.put([rollout(i, status=Status(status)) for i, status in enumerate(pair)], "math")
        items = await found(buffer)
        assert [item.status for item in items] == order[1:]
        assert [[member.status for member in item.item] for item in items] == [list(pair) for pair in pairwise(order)]

    async def test_plain_dicts_are_rollouts_too(self, open_buffer: OpenBuffer) -> None:
        """Dicts are stored and come back as dicts; those without a status are completed."""
        buffer = await open_buffer(codec=OTHER_CODEC)
        for fields in ({"status": "completed", "answer": [1]}, {"answer": [1]}):
            await buffer.put([dict(fields)], "math")
            assert await buffer.get(1, "math") == [[fields]]

    async def test_the_status_of_a_group_may_be_given(self, buffer: ReplayBuffer) -> None:
        """It counts in place of what the rollouts say, which stay as they are."""
        await buffer.put(group(1), "math", status="aborted")
        item = await only(buffer)
        assert (item.status, item.item[0].status) == (Status.ABORTED, Status.COMPLETED)


class TakingLaws(Harness):
    """Taking removes groups, in the policy's order, for one taker each."""

    async def test_a_size_of_nothing_gives_nothing(self, buffer: ReplayBuffer) -> None:
        """0 is an empty batch, whatever the buffer holds; less is a mistake."""
        size = 0
        await buffer.put(group(1), "math")
        assert await buffer.get(size, "math") == []
        assert await buffer.take_batch({"math": size}) == ({"math": []}, {"math": 0})
        with pytest.raises(InputError):
            await buffer.take_batch({"math": -3})
        assert len(buffer) == 1

    async def test_a_group_goes_to_one_thread(self, buffer: ReplayBuffer) -> None:
        """Threads, each with an event loop of its own, put and take at the same time: every group arrives once."""

        async def put(first: int) -> None:
            for i in range(first, first + 25):
                await buffer.put(group(i), "math")

        async def take() -> list[int]:
            received: list[int] = []
            while len(received) < 50:
                batch, _ = await buffer.take_batch({"math": 5}, timeout=SOON)
                received += ids(batch["math"])
            return received

        threads = [asyncio.to_thread(asyncio.run, work) for work in (put(0), put(25), put(50), put(75), take(), take())]
        *_, first_taken, second_taken = await asyncio.gather(*threads)
        assert sorted([*first_taken, *second_taken]) == list(range(100))  # type: ignore[misc]


class CountingLaws(Harness):
    """Counts are right at any time, inside and outside of an event loop."""

    async def test_count_statuses_has_every_pair_asked_for(self, buffer: ReplayBuffer) -> None:
        """A zero where there is none."""
        await buffer.put(group(1), "math")
        counts = await buffer.count_statuses(["math", "code"], ["completed", Status.FAILED])
        assert [type(status) for status in counts["math"]] == [str, Status]  # as they were given
        zeros = {Status.COMPLETED: 0, Status.FAILED: 0}
        assert counts == {"math": zeros | {Status.COMPLETED: 1}, "code": zeros}

    async def test_count_stops_at_a_limit(self, storage: SQLStorage) -> None:
        """On the backend itself: `at_most` bounds what is counted."""
        for i in range(3):
            await storage.put(new_group(i))
        assert [await storage.count(parse({}), at_most=n) for n in (0, 2, 3, 9, None)] == [0, 2, 3, 3, 3]


class ReplacingLaws(Harness):
    """The groups that a put replaces leave, or the put doesn't happen."""

    async def test_a_group_is_replaced_once(self, buffer: ReplayBuffer) -> None:
        """Of several puts at once that replace the same group, one is stored."""
        uids = await fill(buffer, 1)
        puts = [buffer.put(group(number), "math", replaces=uids) for number in range(5)]
        other = buffer.put(group(5), "math")  # begins first, so that those of `puts` are in one transaction
        results = await asyncio.gather(other, *puts, return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["ConflictError"] * 4 + ["int"] * 2
        assert [item.uid for item in await found(buffer)] == [uid for uid in results if isinstance(uid, int)]

    async def test_a_group_goes_to_a_taker_or_is_replaced(self, buffer: ReplayBuffer) -> None:
        """Never both, in whichever order."""
        for number in range(10):
            uids = await fill(buffer, 1, first=number)
            batch, outcome = await asyncio.gather(
                buffer.get(1, "math", where={"uid": uids[0]}),
                buffer.put(group(100), "code", replaces=uids),
                return_exceptions=True,
            )
            assert isinstance(outcome, int) == (batch == [])
            assert isinstance(outcome, ConflictError) == (len(batch) == 1)
