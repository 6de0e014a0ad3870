"""Laws of putting: what is stored, in which order, and what is refused."""

from __future__ import annotations

import asyncio
import copy
import time

import numpy as np
import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.common.checks import Tags
from replaybuf.errors import RolloutError
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.values.rollouts.rollout import RolloutState, Status
from tests.contract.harness import (
    CODEC,
    OTHER_CODEC,
    Harness,
    OpenBuffer,
    found,
    group,
    new_group,
    only,
    plain,
    rollout,
)


class PuttingLaws(Harness):
    """Laws of putting, except staleness and expiry, which are in `ExpiryLaws`."""

    async def test_an_empty_group_is_a_no_op(self, buffer: ReplayBuffer) -> None:
        """An empty list returns None and stores nothing."""
        assert await buffer.put([], "math") is None
        assert len(buffer) == 0

    async def test_what_comes_back_is_what_was_put(self, buffer: ReplayBuffer) -> None:
        """Every field survives: arrays with dtype and shape, lists as lists, nested extras."""
        put = group(
            1,
            2,
            response_ids=np.array([5, 6, 7], dtype=np.uint16),
            logprobs=np.array([-0.5, -1, 0], dtype=np.float32),
            routed_experts=np.arange(6, dtype=np.int8).reshape(3, 2),
            extra_fields={"bytes": b"\x00\xff", "tuple": (1, "a"), "set": {1}, "big": 2**70, "none": None},
            error_msg="\N{SNOWMAN} \x00",
        )
        expected = plain(copy.deepcopy(put))
        await buffer.put(put, "math")
        item = await only(buffer)
        assert plain(item.item) == expected
        assert [type(stored) for stored in item.item] == [RolloutState, RolloutState]

    async def test_the_stored_group_is_independent(self, buffer: ReplayBuffer) -> None:
        """The store's rollouts and tags are neither the caller's nor a reader's."""
        put = group(1)
        tags: Tags = {"run": "a"}
        await buffer.put(put, "math", tags=tags)
        first = await only(buffer)
        for mutable in (put[0], first.item[0]):
            mutable.extra_fields["origin"] = "changed"
            mutable.response_ids.append(9)
            mutable.status = Status.FAILED
        for changed in (tags, first.tags or {}):
            changed["run"] = "b"
        again = await only(buffer)
        assert plain(again.item) == plain(group(1))
        assert again.tags == {"run": "a"}

    async def test_uids_rise_in_insertion_order(self, buffer: ReplayBuffer) -> None:
        """Later puts get higher uids, and the timestamp_id has the same order, over all tasks."""
        uids = [await buffer.put(group(i), task) for i, task in enumerate(("math", "code", "math"))]
        assert uids == sorted(set(uids))  # type: ignore[type-var]
        items = await found(buffer)
        assert [item.uid for item in items] == uids
        assert [item.timestamp_id for item in items] == sorted({item.timestamp_id for item in items})

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

    @pytest.mark.parametrize(
        ("rewards", "mean"),
        [
            ([{"score": 1.0}, {"score": 0.0}], 0.5),
            ([0.25, {"score": 0.75}], 0.5),
            ([1, None], 1.0),
            ([{"other": 1.0}, float("nan")], None),
            ([None, None], None),
            ([np.float32(0.5), np.int64(1)], 0.75),
        ],
    )
    async def test_reward_is_the_mean_of_the_group(
        self, buffer: ReplayBuffer, rewards: list[object], mean: float | None
    ) -> None:
        """The reward is the mean of those rollouts that have one: a finite number, or one under "score"."""
        await buffer.put([rollout(i, reward=reward) for i, reward in enumerate(rewards)], "math")
        assert (await only(buffer)).reward == mean

    @pytest.mark.parametrize(
        ("statuses", "expected"),
        [
            (("completed", "completed"), Status.COMPLETED),
            (("completed", "archived"), Status.ARCHIVED),
            (("archived", "init"), Status.INIT),
            (("init", "filtered"), Status.FILTERED),
            (("filtered", "expired"), Status.EXPIRED),
            (("expired", "aborted"), Status.ABORTED),
            (("aborted", "failed"), Status.FAILED),
        ],
    )
    async def test_status_of_a_group(self, buffer: ReplayBuffer, statuses: tuple[str, str], expected: Status) -> None:
        """COMPLETED when all are, otherwise the first of failed, aborted, expired, filtered, init, archived."""
        await buffer.put([rollout(i, status=Status(status)) for i, status in enumerate(statuses)], "math")
        item = await only(buffer)
        assert item.status is expected
        assert [stored.status for stored in item.item] == list(statuses)

    async def test_a_key_replaces_the_group(self, buffer: ReplayBuffer) -> None:
        """The same key in the same task: one group, with a new uid and place in the order."""
        first = await buffer.put(group(1), "math", key="a", priority=2, tags={"x": 1})
        other = await buffer.put(group(2), "math")
        second = await buffer.put(group(3), "math", key="a")
        items = await found(buffer)
        assert [item.uid for item in items] == [other, second]
        assert first not in (other, second)
        assert (items[1].priority, items[1].tags, items[1].item[0].rollout_id) == (1.0, None, 3)

    async def test_a_key_belongs_to_its_task(self, buffer: ReplayBuffer) -> None:
        """The same key in two tasks means two groups; without a key every put adds one."""
        for task, key in (("math", "a"), ("code", "a"), ("math", None), ("math", None)):
            await buffer.put(group(1), task, key=key)
        assert len(buffer) == 4

    async def test_a_key_is_free_again_when_its_group_has_left(self, buffer: ReplayBuffer) -> None:
        """A put with the key of a group that was taken or deleted adds one."""
        await buffer.put(group(1), "math", key="a")
        assert len(await buffer.get(1, "math")) == 1
        await buffer.put(group(2), "math", key="a")
        await buffer.delete({})
        await buffer.put(group(3), "math", key="a")
        assert len(buffer) == 1

    async def test_a_key_replaces_a_group_of_any_status(self, buffer: ReplayBuffer) -> None:
        """A group whose status has changed since is still the one of its key."""
        await buffer.put(group(1), "math", key="a")
        await buffer.update({}, status="failed")
        await buffer.put(group(2), "math", key="a")
        assert (await only(buffer)).status is Status.COMPLETED

    async def test_concurrent_puts_are_all_stored(self, buffer: ReplayBuffer) -> None:
        """Puts that wait at the same time don't disturb each other."""
        uids = await asyncio.gather(*(buffer.put(group(i), "math") for i in range(40)))
        assert len(set(uids)) == 40
        stored = {item.uid: item.item[0].rollout_id for item in await found(buffer)}
        assert stored == {uid: i for i, uid in enumerate(uids)}

    async def test_concurrent_puts_of_one_key_leave_one_group(self, buffer: ReplayBuffer) -> None:
        """Whatever the order in which they are committed, one of them remains: the one with the highest uid."""
        uids = await asyncio.gather(*(buffer.put(group(i), "math", key="a") for i in range(20)))
        assert [item.uid for item in await found(buffer)] == [max(uid for uid in uids if uid is not None)]

    async def test_one_bad_group_fails_alone(self, buffer: ReplayBuffer) -> None:
        """Of puts that wait together, the one that can't be stored raises RolloutError, the others are stored."""
        groups = [group(i, extra_fields={"x": object() if i == 3 else i}) for i in range(8)]
        results = await asyncio.gather(*(buffer.put(g, "math") for g in groups), return_exceptions=True)
        assert [i for i, result in enumerate(results) if isinstance(result, RolloutError)] == [3]
        assert sorted(item.item[0].rollout_id for item in await found(buffer)) == [0, 1, 2, 4, 5, 6, 7]

    async def test_a_missing_field_is_named(self, open_buffer: OpenBuffer) -> None:
        """Rollouts of one's own type that lack what an option needs: an error with the field and the option."""
        buffer = await open_buffer(codec=OTHER_CODEC)
        with pytest.raises(RolloutError, match=r"response_ids.*model_step|model_step.*response_ids"):
            await buffer.put([{"status": "completed"}], "math", model_step=1)
        with pytest.raises(RolloutError, match="seq_staleness"):
            await buffer.put([{"status": "completed"}], "math", stale_threshold=1)

    async def test_plain_dicts_are_rollouts_too(self, open_buffer: OpenBuffer) -> None:
        """Dicts are stored and come back as dicts; those without a status are completed."""
        buffer = await open_buffer(codec=OTHER_CODEC)
        for one in ({"status": "completed", "answer": [1]}, {"answer": [1]}):
            await buffer.put([dict(one)], "math")
            assert await buffer.get(1, "math") == [[one]]

    async def test_the_status_of_a_group_may_be_given(self, buffer: ReplayBuffer) -> None:
        """It counts in place of what the rollouts say, which stay as they are."""
        await buffer.put(group(1), "math", status="aborted")
        item = await only(buffer)
        assert (item.status, item.item[0].status) == (Status.ABORTED, Status.COMPLETED)

    async def test_a_storage_keeps_what_it_is_given(self, storage: SQLStorage) -> None:
        """On the backend itself: staleness and created_at are those of the NewGroup."""
        uid = await storage.put(new_group(7, staleness=5, created_at=12.5, priority=0.0))
        [item] = await found(ReplayBuffer(storage, CODEC.rollout_type))
        assert (item.uid, item.staleness, item.created_at, item.priority) == (uid, 5, 12.5, 0.0)
