"""Laws of what is kept of who put a group, and of the train steps that it was drawn for."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.common.worker_name import working_as
from replaybuf.errors import LeaseLostError
from tests.contract.harness import Harness, OpenBuffer, fill, found, group, matching, only


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

    async def test_a_group_that_stays_knows_its_last_train_step(self, open_buffer: OpenBuffer) -> None:
        """The one that the draw names, or else that of the last refresh, if any."""
        buffer = await open_buffer(max_times_sampled=0)
        await fill(buffer, 1)
        assert (await only(buffer)).trained_step is None
        seen = []
        for step in (None, 3, None):
            [item] = (await buffer.sample({"math": 1}, current_train_step=step))["math"]
            seen.append((item.trained_step, (await only(buffer)).trained_step))
            await buffer.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=9)
        assert seen == [(None, None), (3, 3), (9, 9)]

    async def test_an_archived_group_knows_its_train_step(self, open_buffer: OpenBuffer) -> None:
        """So that a step's groups can be looked at afterwards."""
        buffer = await open_buffer(archive_groups=10)
        uids = await fill(buffer, 3)
        await buffer.get(2, "math", current_train_step=413)
        assert await matching(buffer, {"trained_step": 413}) == uids[:2]

    @pytest.mark.parametrize("keep_new", [False, True])
    async def test_a_restore_takes_train_steps_back(self, open_buffer: OpenBuffer, keep_new: bool) -> None:
        """Those of groups that it brings back; groups that stay are as if they had never been drawn."""
        buffer = await open_buffer(max_times_sampled=0)
        old, *_ = await made_by(buffer, "gpu-1")
        await buffer.get(1, "math", current_train_step=1)
        await buffer.checkpoint(1)
        new, *_ = await made_by(buffer, "gpu-2")
        await buffer.get(2, "math", current_train_step=2)
        await buffer.restore(1, keep_new=keep_new)
        kept = {item.uid: (item.worker, item.trained_step) for item in await found(buffer)}
        assert kept == {old: ("gpu-1", 1)} | ({new: ("gpu-2", None)} if keep_new else {})

    async def test_copies_have_workers_and_train_steps(self, open_buffer: OpenBuffer) -> None:
        buffer, fresh = await open_buffer(max_times_sampled=0), await open_buffer(max_times_sampled=0)
        await made_by(buffer, "gpu-1")
        await buffer.get(1, "math", current_train_step=5)
        fresh.load_state_dict(buffer.state_dict())
        item = await only(fresh)
        assert (item.worker, item.trained_step) == ("gpu-1", 5)


class LeaseRecordLaws(Harness):
    """What leases know of their draws, and of their store."""

    async def test_an_acknowledged_group_knows_its_train_step(self, open_buffer: OpenBuffer) -> None:
        """Not one that is given back. The lease, also one that is adopted, has the step of the draw."""
        buffer = await open_buffer(max_times_sampled=0)
        uids = await fill(buffer, 3)
        lease = await buffer.lease_batch({"math": 3}, current_train_step=6, heartbeat=False)
        assert lease.handle.train_step == 6
        await lease.acknowledge(uids[:1])
        await lease.give_back(uids[1:2])
        await buffer.adopt(lease.handle, heartbeat=False).acknowledge()
        assert [item.trained_step for item in await found(buffer)] == [6, None, 6]

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
