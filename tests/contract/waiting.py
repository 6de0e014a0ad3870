"""Laws of waits, figures and records."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.common.worker_name import working_as
from replaybuf.errors import ClosedError, LeaseLostError, NotReadyError
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import Cursor
from replaybuf.values.rollouts.rollout import Status
from tests.contract.filling import waits_for_room
from tests.contract.harness import (
    SOON,
    Harness,
    OpenBuffer,
    fill,
    found,
    group,
    ids,
    matching,
    new_group,
    only,
)
from tests.stores import set_by


async def waiting(buffer: ReplayBuffer, wait: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Return a task that runs `wait`, as soon as it waits for a change of the storage."""
    started = asyncio.Event()
    original = buffer.storage.changed

    async def changed(timeout: float, since: int) -> None:
        started.set()
        await original(timeout, since)

    buffer.storage.changed = changed  # type: ignore[method-assign]
    task = asyncio.create_task(wait)
    await set_by(started, task, SOON)
    return task


class WaitingLaws(Harness):
    """wait_ready and take_batch with a timeout."""

    async def test_what_is_ready_is_not_waited_for(self, buffer: ReplayBuffer) -> None:
        """Also with a timeout of 0, and for nothing at all."""
        await buffer.put(group(1), "math")
        await buffer.wait_ready({"math": 1}, timeout=0)
        await buffer.wait_ready({}, timeout=0)
        await buffer.wait_ready({"code": 0}, timeout=None)

    async def test_a_put_from_another_thread_wakes(self, buffer: ReplayBuffer) -> None:
        """From an event loop of its own."""
        task = await waiting(buffer, buffer.take_batch({"math": 1}, timeout=None))
        thread = threading.Thread(target=lambda: asyncio.run(_put(buffer)))
        thread.start()
        batch, _ = await asyncio.wait_for(task, SOON)
        assert ids(batch["math"]) == [7]
        await asyncio.to_thread(thread.join)

    @pytest.mark.parametrize(
        "change",
        [
            lambda buffer: buffer.update({}, status="completed"),
            lambda buffer: buffer.put(group(2), "math", key="a"),
        ],
        ids=["update", "replace"],
    )
    async def test_other_changes_wake_too(
        self, buffer: ReplayBuffer, change: Callable[[ReplayBuffer], Coroutine[Any, Any, Any]]
    ) -> None:
        """A group may become ready without being put."""
        await buffer.put(group(1, status=Status.ABORTED), "math", key="a")
        task = await waiting(buffer, buffer.wait_ready({"math": 1}, timeout=None))
        await change(buffer)
        await asyncio.wait_for(task, SOON)

    async def test_a_group_set_aside_wakes(self, storage: SQLStorage) -> None:
        """Those who wait for FAILED groups see one that a take could not decode."""
        uid = await storage.put(new_group(1))
        await self.damage(storage, uid)
        buffer = ReplayBuffer(storage)
        task = await waiting(buffer, buffer.wait_ready({"math": 1}, "failed", timeout=None))
        assert await buffer.get(1, "math") == []
        await asyncio.wait_for(task, SOON)

    async def test_waiting_ends_at_its_timeout(self, buffer: ReplayBuffer) -> None:
        """With an error that is a TimeoutError too and says what is missing."""
        await buffer.put(group(1), "math")
        start = time.monotonic()
        with pytest.raises(
            NotReadyError,
            match=r"[Tt]ask code: 0 completed groups there, 1 needed.* ready for math \(1 of 2\)",
        ) as caught:
            await buffer.wait_ready({"math": 2, "code": 1}, timeout=0.05)
        assert isinstance(caught.value, TimeoutError)
        assert 0.05 <= time.monotonic() - start < SOON

    async def test_take_batch_waits_for_all_tasks(self, buffer: ReplayBuffer) -> None:
        """It takes nothing until every task is ready, and then all at once."""
        await buffer.put(group(1), "math")
        task = await waiting(buffer, buffer.take_batch({"math": 2, "code": 1}, timeout=SOON))
        await buffer.put(group(2), "math")
        assert len(buffer) == 2
        await buffer.put(group(3), "code")
        batch, counts = await asyncio.wait_for(task, SOON)
        assert (ids(batch["math"]), ids(batch["code"]), counts) == ([1, 2], [3], {"math": 2, "code": 1})
        assert len(buffer) == 0

    async def test_those_who_wait_share_what_comes(self, buffer: ReplayBuffer) -> None:
        """Several waiting takers get whole batches, each group once."""
        tasks = [await waiting(buffer, buffer.take_batch({"math": 2}, timeout=SOON)) for _ in range(4)]
        await asyncio.gather(*(buffer.put(group(i), "math") for i in range(8)))
        batches = [batch["math"] for batch, _ in await asyncio.gather(*tasks)]
        assert sorted(i for batch in batches for i in ids(batch)) == list(range(8))

    async def test_changed_returns_by_its_timeout(self, storage: SQLStorage) -> None:
        """On the backend itself: without a change, `changed` returns at the timeout, without an error."""
        async with asyncio.timeout(SOON):
            await storage.changed(0.01, storage.version())
            waits = asyncio.create_task(storage.changed(SOON * 2, storage.version()))
            await asyncio.sleep(0)
            await storage.put(new_group(1))
            await waits


#: The calls that change a buffer, or take from it.
CHANGES: dict[str, Callable[[ReplayBuffer], Any]] = {
    "put": lambda buffer: buffer.put(group(9), "math"),
    "get": lambda buffer: buffer.get(1, "math"),
    "get nothing": lambda buffer: buffer.get(0, "math"),
    "take_batch": lambda buffer: buffer.take_batch({"math": 1}, timeout=SOON),
    "sample": lambda buffer: buffer.sample({"math": 1}),
    "lease": lambda buffer: buffer.lease_batch({"math": 1}, seconds=1000).__aenter__(),
    "delete": lambda buffer: buffer.delete({}),
    "update": lambda buffer: buffer.update({}, priority=2),
    "update_priorities": lambda buffer: buffer.update_priorities({1: 2.0}),
    "annotate": lambda buffer: buffer.annotate({1: {"kl": 2.0}}),
    "refresh": lambda buffer: buffer.refresh_staleness({"math": 1}, 9),
    "dropped put": lambda buffer: buffer.put(
        group(9, seq_staleness=5), "math", stale_threshold=4, expired_groups_retryable=False
    ),
    "cursor": lambda buffer: buffer.cursors.move(Cursor("data")),
    "claim": lambda buffer: buffer.cursors.claim([], Cursor("data"), 1000),
    "checkpoint": lambda buffer: buffer.checkpoint(7),
    "drop": lambda buffer: buffer.drop_checkpoint(1),
}


class ClosingLaws(Harness):
    """After close there is nothing but ClosedError."""

    async def test_close_can_be_called_again(self, buffer: ReplayBuffer) -> None:
        """By the buffer and on the backend itself; also when nothing was ever done."""
        await buffer.close()
        await buffer.close()
        await buffer.storage.close()

    async def test_a_buffer_is_closed_at_the_end_of_its_block(self, buffer: ReplayBuffer) -> None:
        """`async with` opens and closes."""
        async with buffer as entered:
            assert entered is buffer
            await buffer.put(group(1), "math")
        with pytest.raises(ClosedError):
            len(buffer)
        with pytest.raises(ClosedError):
            await buffer.__aenter__()

    async def test_everything_after_close_is_an_error(self, buffer: ReplayBuffer) -> None:
        """Every method, with a message that says what to do."""
        await buffer.put(group(1), "math")
        await buffer.close()
        calls: list[Callable[[], Any]] = [
            *(partial(change, buffer) for change in CHANGES.values()),
            lambda: buffer.put([], "math"),
            lambda: buffer.take_batch({"math": 1}, timeout=None),
            lambda: buffer.is_ready({"math": 1}),
            lambda: buffer.wait_ready({}, timeout=1),
            lambda: buffer.count("math", "completed"),
            lambda: buffer.count_statuses(["math"], ["completed"]),
            lambda: buffer.count_where({}),
            lambda: buffer.dropped("math"),
            lambda: buffer.find({}),
            lambda: buffer.update_priorities({}),
            lambda: buffer.annotate({}),
            lambda: buffer.metrics(),
            lambda: buffer.save("never"),
            lambda: buffer.resume("never"),
            lambda: len(buffer),
        ]
        for call in calls:
            with pytest.raises(ClosedError, match="build a new one"):
                await call()

    async def test_close_ends_those_who_wait(self, open_buffer: OpenBuffer) -> None:
        """With ClosedError, however long they would have waited: for groups, and for room, in line too."""
        buffer = await open_buffer(capacity=1, on_full="block")
        await fill(buffer, 1, "full")
        puts = [buffer.put(group(number), "full", timeout=None) for number in (1, 2)]
        tasks = [
            await waiting(buffer, buffer.wait_ready({"math": 1}, timeout=None)),
            await waiting(buffer, buffer.take_batch({"math": 1}, timeout=SOON * 10)),
            *await waits_for_room(buffer, *puts),
        ]
        await buffer.close()
        async with asyncio.timeout(SOON):
            for task in tasks:
                with pytest.raises(ClosedError):
                    await task


async def _put(buffer: ReplayBuffer) -> None:
    await buffer.put(group(7), "math")


TASKS = ("math", "code")
_GONE = (Tally.TAKEN, Tally.EVICTED, Tally.DROPPED, Tally.DELETED, Tally.REPLACED, Tally.PRUNED)


async def conserved(storage: SQLStorage) -> None:
    """Check that every group put is in the buffer or counted by its outcome, and that levels match the groups."""
    tallies = {key: n for key, n in (await storage.tallies()).items() if n}
    assert all(n > 0 for n in tallies.values()), tallies
    for task in TASKS:
        net = Counter[Tally]()
        for (name, status, tally), n in tallies.items():
            if name == task and status != Status.ARCHIVED:
                net[tally] += n
        assert net[Tally.PUT] == sum(net[name] for name in _GONE) + net[Tally.SIZE] + net[Tally.LEASED], (task, net)


class MetricsLaws(Harness):
    """metrics()."""

    async def test_distributions_are_of_completed_groups(self, buffer: ReplayBuffer) -> None:
        """Mean, quantiles and counts; left out where there are none, and when they aren't asked for."""
        for staleness in (0, 0, 1, 9):
            await buffer.put(group(1, seq_staleness=staleness), "math")
        await buffer.put(group(1, seq_staleness=50, status=Status.FAILED), "code")
        tasks = (await buffer.metrics())["tasks"]
        expected = {"mean": 2.5, "min": 0, "p50": 0, "p90": 9, "max": 9, "counts": {0: 2, 1: 1, 9: 1}}
        assert tasks["math"]["staleness"] == expected
        assert "staleness" not in tasks["code"]
        assert "staleness" not in (await buffer.metrics(distributions=False))["tasks"]["math"]

    async def test_waits_are_counted(self, buffer: ReplayBuffer) -> None:
        """How often, how long, and how often until the timeout."""
        await fill(buffer, 1)
        await buffer.take_batch({"math": 1}, timeout=1)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await buffer.take_batch({"math": 1}, timeout=0.2)
        waits = (await buffer.metrics())["waits"]["groups"]
        assert (waits["count"], waits["timeouts"]) == (2, 2)
        assert waits["seconds"] > 0


async def made_by(buffer: ReplayBuffer, *workers: str) -> list[int]:
    """Put a group for each of these workers. Return their uids."""
    uids = []
    for worker in workers:
        with working_as(worker):
            uids += await fill(buffer, 1)
    return uids


class RecordLaws(Harness):
    """`worker` and `trained_step`."""

    async def test_a_group_has_the_name_of_who_put_it(self, buffer: ReplayBuffer) -> None:
        """The one of the block, or else the process's; a draw, or a change, leaves it as it is."""
        [uid] = await made_by(buffer, "gpu-1")
        await fill(buffer, 1)
        await buffer.update({"uid": uid}, status="failed", priority=2)
        assert [item.worker for item in await found(buffer)] == ["gpu-1", buffer.worker]
        with working_as("trainer"):
            items = await buffer.sample({"math": 1}, group_status="failed")
        assert [item.worker for item in items["math"]] == ["gpu-1"]

    async def test_workers_and_train_steps_can_be_asked_for(self, open_buffer: OpenBuffer) -> None:
        """As other texts and numbers that may be None, and by order."""
        buffer = await open_buffer(max_times_sampled=2)
        a, b, c = await made_by(buffer, "a", "b", "é")
        await buffer.get(2, "math", current_train_step=7)
        await buffer.update({"uid": a}, priority=0)
        queries = [
            ({"worker": "a"}, [a]),
            ({"worker": {"$gt": "a"}}, [b, c]),
            ({"worker": {"$in": ["a", "x"]}}, [a]),
            ({"worker": {"$not_in": ["a", None]}}, [b, c]),
            ({"worker": None}, []),
            ({"trained_step": 7}, [a, b]),
            ({"trained_step": {"$lt": 7.5}}, [a, b]),
            ({"trained_step": {"$ne": 7}}, [c]),
            ({"trained_step": None}, [c]),
            ({"trained_step": {"$in": [None, 8]}}, [c]),
            ({"$not": {"trained_step": {"$gte": 7}}}, [c]),
        ]
        for query, uids in queries:
            assert await matching(buffer, query) == uids, query
        assert [item.uid for item in await found(buffer, order_by="-worker")] == [c, b, a]
        assert [item.uid for item in await found(buffer, order_by=["trained_step", "priority"])] == [a, b, c]
        assert await buffer.update({"trained_step": 7, "worker": "b"}, tags={"seen": True}) == 1
        assert await buffer.delete({"worker": {"$in": ["b", "é"]}}) == 2

    @pytest.mark.parametrize("leased", [False, True])
    async def test_a_draw_without_a_train_step_leaves_that_of_an_earlier_one(
        self, open_buffer: OpenBuffer, leased: bool
    ) -> None:
        buffer = await open_buffer(max_times_sampled=0)
        await fill(buffer, 1)
        await buffer.get(1, "math", current_train_step=3)
        if leased:
            async with buffer.lease_batch({"math": 1}) as lease:
                pass
            [item] = lease.items["math"]
        else:
            [item] = (await buffer.sample({"math": 1}))["math"]
        assert (item.trained_step, (await only(buffer)).trained_step) == (3, 3)


class LeaseRecordLaws(Harness):
    """What leases know of their draws, and of their store."""

    async def test_a_lease_of_another_store_is_refused(self, buffer: ReplayBuffer) -> None:
        """LeaseLostError that names both, from adopt and from every call with it; nothing is changed."""
        await fill(buffer, 2)
        lease = await buffer.lease_batch({"math": 2}, heartbeat=False)
        names = f"another.*{lease.handle.database}"
        with pytest.raises(LeaseLostError, match=names):
            buffer.adopt(replace(lease.handle, database="another"))
        strange = buffer.adopt(lease.handle, heartbeat=False)
        strange._leased = replace(lease.handle, database="another")  # as if the store had not been open by then
        for call in (strange.acknowledge, strange.give_back, strange.extend):
            with pytest.raises(LeaseLostError, match=names):
                await call()
        with pytest.raises(LeaseLostError, match=names):
            await strange.finish(group(5), "math", replaces=strange.open)
        await buffer.adopt(pickle.loads(pickle.dumps(lease.handle)), heartbeat=False).acknowledge()
        assert len(buffer) == 0
