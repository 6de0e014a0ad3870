"""Laws of puts and takes of one process."""

from __future__ import annotations

import asyncio
import copy
import time
from typing import Any

import numpy as np
import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.common.checks import Tags
from replaybuf.errors import ConflictError, InputError, RolloutError
from replaybuf.rules.policies import OrderTerm, ReplayPolicy
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import Draw
from replaybuf.values.rollouts.rollout import RolloutState, Status
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
    total,
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
        [item] = await found(ReplayBuffer(storage))
        assert (item.uid, item.staleness, item.created_at, item.priority) == (uid, 5, 12.5, 0.0)


class BestFirst(ReplayPolicy):
    """A policy of a user: highest reward first."""

    name = "best_first"
    order = (OrderTerm("reward", descending=True), OrderTerm("timestamp_id"))


async def put_steps(buffer: ReplayBuffer, *steps: int | None, train_step: int = 20) -> None:
    """Put groups 0, 1, ... with these model steps."""
    for i, step in enumerate(steps):
        await buffer.put(group(i), "math", model_step=step, current_train_step=train_step)


class TakingLaws(Harness):
    """Taking removes groups, in the policy's order, for one taker each."""

    async def test_get_takes_the_oldest_first(self, buffer: ReplayBuffer) -> None:
        """With `fifo` groups come in insertion order, and leave the buffer."""
        for i in range(5):
            await buffer.put(group(i), "math")
        assert ids(await buffer.get(2, "math")) == [0, 1]
        assert ids(await buffer.get(10, "math")) == [2, 3, 4]
        assert len(buffer) == 0

    async def test_staleness_takes_the_most_stale_first(self, open_buffer: OpenBuffer) -> None:
        """With `staleness`: those of the oldest weights first, without model steps last, then oldest."""
        buffer = await open_buffer("staleness")
        await put_steps(buffer, 7, 3, None, 7, 1, 21)
        assert ids(await buffer.get(10, "math")) == [4, 1, 0, 3, 5, 2]

    async def test_staleness_orders_after_a_refresh(self, open_buffer: OpenBuffer) -> None:
        """The order doesn't depend on the staleness that groups brought, which a refresh replaces."""
        buffer = await open_buffer("staleness")
        await buffer.put(group(0, seq_staleness=50, response_model_steps=[9]), "math")
        await buffer.put(group(1, seq_staleness=-7, response_model_steps=[2]), "math")
        await buffer.put(group(2, seq_staleness=9), "math")
        await buffer.put(group(3), "math", model_step=5, current_train_step=20)
        assert [item.staleness for item in await found(buffer, order_by="-staleness")] == [50, 14, 9, -7]
        await buffer.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=12)
        assert ids(await buffer.get(10, "math")) == [1, 3, 0, 2]

    async def test_a_policy_of_ones_own(self, open_buffer: OpenBuffer) -> None:
        """Any order of fields works; groups without a value come last."""
        buffer = await open_buffer(BestFirst())
        for i, reward in enumerate((0.5, None, 1.0, 0.5)):
            await buffer.put(group(i, reward=reward), "math")
        assert ids(await buffer.get(10, "math")) == [2, 0, 3, 1]

    async def test_get_takes_of_one_task_and_status(self, buffer: ReplayBuffer) -> None:
        """Tasks and statuses don't mix."""
        await buffer.put(group(1), "math")
        await buffer.put(group(2), "code")
        await buffer.put(group(3, status=Status.ABORTED), "math")
        assert ids(await buffer.get(9, "math")) == [1]
        assert ids(await buffer.get(9, "math", "aborted")) == [3]
        assert await buffer.get(9, "none such") == []
        assert len(buffer) == 1

    async def test_a_size_of_nothing_gives_nothing(self, buffer: ReplayBuffer) -> None:
        """0 is an empty batch, whatever the buffer holds; less is a mistake."""
        size = 0
        await buffer.put(group(1), "math")
        assert await buffer.get(size, "math") == []
        assert await buffer.take_batch({"math": size}) == ({"math": []}, {"math": 0})
        with pytest.raises(InputError):
            await buffer.take_batch({"math": -3})
        assert len(buffer) == 1

    async def test_take_batch_without_timeout_takes_what_is_there(self, buffer: ReplayBuffer) -> None:
        """Up to the sizes, of each task; the counts say how many."""
        for i in range(3):
            await buffer.put(group(i), "math")
        await buffer.put(group(9), "code")
        batch, counts = await buffer.take_batch({"math": 2, "code": 5, "none": 1})
        assert {task: ids(groups) for task, groups in batch.items()} == {"math": [0, 1], "code": [9], "none": []}
        assert counts == {"math": 2, "code": 1, "none": 0}
        assert len(buffer) == 1

    async def test_a_take_of_enough_or_nothing(self, storage: SQLStorage) -> None:
        """On the backend itself: None and nothing taken unless every task has at least as many as it has to."""
        for i in range(2):
            await storage.put(new_group(i))
        await storage.put(new_group(8, task="code"))
        for least in ({"code": 1, "math": 3}, {"code": 2, "math": 0}, {"code": 2}):
            assert await storage.take(Draw({"code": 2, "math": 3}, at_least=least)) is None
        assert len(storage) == 3
        taken = await storage.take(Draw({"code": 2, "math": 3}, at_least={"code": 1, "math": 2}))
        assert taken is not None
        assert {task: ids([item.item for item in items]) for task, items in taken.items()} == {
            "code": [8],
            "math": [0, 1],
        }
        assert len(storage) == 0

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
        *_, one, other = await asyncio.gather(*threads)
        assert sorted([*one, *other]) == list(range(100))  # type: ignore[misc]


class CountingLaws(Harness):
    """Counts are right at any time, inside and outside of an event loop."""

    async def test_count_is_of_a_task_and_status(self, buffer: ReplayBuffer) -> None:
        """`count` takes a Status or its value, and unknown ones are refused."""
        for status in ("completed", "completed", "failed"):
            await buffer.put(group(1, status=Status(status)), "math")
        assert await buffer.count("math", "completed") == 2
        assert await buffer.count("math", Status.FAILED) == 1
        assert await buffer.count("code", Status.FAILED) == 0
        with pytest.raises(InputError, match="unknown status"):
            await buffer.count("math", "done")

    async def test_count_statuses_has_every_pair_asked_for(self, buffer: ReplayBuffer) -> None:
        """A zero where there is none."""
        await buffer.put(group(1), "math")
        counts = await buffer.count_statuses(["math", "code"], ["completed", Status.FAILED])
        assert [type(status) for status in counts["math"]] == [str, Status]  # as they were given
        none = {Status.COMPLETED: 0, Status.FAILED: 0}
        assert counts == {"math": none | {Status.COMPLETED: 1}, "code": none}

    async def test_is_ready_wants_every_task(self, buffer: ReplayBuffer) -> None:
        """True as soon as each task has as many groups of the status."""
        await buffer.put(group(1), "math")
        assert await buffer.is_ready({"math": 1})
        assert await buffer.is_ready({})
        assert await buffer.is_ready({"math": 1, "code": 0})
        assert not await buffer.is_ready({"math": 1, "code": 1})
        assert not await buffer.is_ready({"math": 2})
        assert not await buffer.is_ready({"math": 1}, "failed")

    async def test_len_counts_everything_inside_a_running_loop(self, buffer: ReplayBuffer) -> None:
        """All tasks and statuses."""
        assert len(buffer) == 0
        await buffer.put(group(1), "math")
        await buffer.put(group(2, status=Status.FAILED), "code")
        assert len(buffer) == 2

    async def test_len_counts_outside_of_the_loop(self, buffer: ReplayBuffer) -> None:
        """From a thread without an event loop."""
        await buffer.put(group(1), "math")
        assert await asyncio.to_thread(len, buffer) == 1

    async def test_count_stops_at_a_limit(self, storage: SQLStorage) -> None:
        """On the backend itself: `at_most` bounds what is counted."""
        from replaybuf.rules.query import parse

        for i in range(3):
            await storage.put(new_group(i))
        assert [await storage.count(parse({}), at_most=n) for n in (0, 2, 3, 9, None)] == [0, 2, 3, 3, 3]


class ReplacingLaws(Harness):
    """The groups that a put replaces leave, or the put doesn't happen."""

    async def test_a_put_replaces_what_it_names(self, buffer: ReplayBuffer) -> None:
        """Groups of any task and status; the new one comes last."""
        [first, second, third] = await fill(buffer, 3)
        aborted = await buffer.put(group(8, status=Status.ABORTED), "code")
        assert aborted is not None
        uid = await buffer.put(group(9), "math", replaces=[first, aborted])
        assert [item.uid for item in await found(buffer)] == [second, third, uid]
        assert (await total(buffer, "replaced"), await total(buffer, "replaced", "code")) == (1, 1)

    async def test_a_missing_group_is_a_conflict(self, buffer: ReplayBuffer) -> None:
        """ConflictError names it, nothing is stored and nothing leaves."""
        uids = await fill(buffer, 2)
        await buffer.delete({"uid": uids[0]})
        with pytest.raises(ConflictError, match=f"group {uids[0]}"):
            await buffer.put(group(9), "math", replaces=[uids[1], uids[0]], key="a")
        assert [item.uid for item in await found(buffer)] == uids[1:]
        assert (await total(buffer, "put"), await total(buffer, "replaced")) == (2, 0)

    async def test_a_group_is_replaced_once(self, buffer: ReplayBuffer) -> None:
        """Of several puts at once that replace the same group, one is stored."""
        uids = await fill(buffer, 1)
        puts = [buffer.put(group(number), "math", replaces=uids) for number in range(5)]
        results = await asyncio.gather(*puts, return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["ConflictError"] * 4 + ["int"]
        assert [item.uid for item in await found(buffer)] == [uid for uid in results if isinstance(uid, int)]

    async def test_puts_at_once_replace_each_their_own(self, buffer: ReplayBuffer) -> None:
        """One that can't be stored leaves the others alone; the groups that it names stay."""
        uids = await fill(buffer, 8)
        await buffer.delete({"uid": uids[3]})
        puts = [buffer.put(group(10 + n), "math", replaces=uids[2 * n : 2 * n + 2]) for n in range(4)]
        results = await asyncio.gather(*puts, buffer.put(group(20), "math"), return_exceptions=True)
        assert [type(result).__name__ for result in results] == ["int", "ConflictError", "int", "int", "int"]
        assert [item.item[0].rollout_id for item in await found(buffer)] == [2, 10, 12, 13, 20]
        assert await total(buffer, "replaced") == 6

    async def test_a_group_goes_to_a_taker_or_is_replaced(self, buffer: ReplayBuffer) -> None:
        """Never both, in whichever order."""
        for number in range(10):
            uids = await fill(buffer, 1, first=number)
            taken, put = await asyncio.gather(
                buffer.get(1, "math", where={"uid": uids[0]}),
                buffer.put(group(100), "code", replaces=uids),
                return_exceptions=True,
            )
            assert isinstance(put, int) == (taken == [])
            assert isinstance(put, ConflictError) == (len(taken) == 1)

    async def test_a_put_that_fails_replaces_nothing(self, buffer: ReplayBuffer) -> None:
        """Values that can't be stored, and invalid uids."""
        uids = await fill(buffer, 1)
        with pytest.raises(RolloutError):
            await buffer.put(group(9, extra_fields={"x": object()}), "math", replaces=uids)
        wrong: list[Any] = [[-1], ["1"], [1.5], [True], "1", 1, [None], [2**63]]
        for replaces in wrong:
            with pytest.raises(InputError, match="replaces"):
                await buffer.put(group(9), "math", replaces=replaces)
        assert [item.uid for item in await found(buffer)] == uids

    async def test_a_key_and_uids_go_together(self, buffer: ReplayBuffer) -> None:
        """The group of the same key leaves too, and may be named as well."""
        first = await buffer.put(group(1), "math", key="a")
        assert first is not None
        uids = await fill(buffer, 2, first=2)
        await buffer.put(group(9), "math", key="a", replaces=[first, uids[0], uids[0]])
        assert ids(await buffer.get(9, "math")) == [3, 9]
        assert await total(buffer, "replaced") == 2
