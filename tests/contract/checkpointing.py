"""Laws of step checkpoints: a restore gives back exactly what was, and goes on from there as it would have."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import CheckpointError, FencedError, InputError, SnapshotError
from replaybuf.rules.transitions import Tally
from replaybuf.storage.values import Cursor
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import SOON, Harness, OpenBuffer, found, group, ids, plain
from tests.contract.leasing import LONG
from tests.contract.persistence import everything, fill
from tests.contract.waiting import waiting
from tests.reasons import because
from tests.reference.snapshots import held_by


async def go_on(buffer: ReplayBuffer) -> None:
    """Do what a trainer and its workers do next, to change everything that can be changed."""
    await buffer.put(group(21), "math", model_step=8, current_train_step=9)
    await buffer.put(group(22), "math", key="a")
    await buffer.put(group(23), "other")
    await buffer.get(2, "math")
    await buffer.update({"task_name": "code"}, priority=7, tags={"late": True})
    await buffer.refresh_staleness(task_stale_thresholds={"math": 3, "code": 4}, current_train_step=12)
    await buffer.update({"status": "failed"}, status="completed")
    await buffer.get(1, "code", "completed")
    await buffer.delete({"status": "filtered"})


async def batches(buffer: ReplayBuffer, first: int, steps: int = 4) -> list[Any]:
    """Return the batches of some more steps, each after puts, with the metadata of their groups."""
    drawn = []
    for step in range(steps):
        for number in range(3):
            await buffer.put(group(first + 10 * step + number), "math", priority=number + 1, model_step=step)
        items = (await buffer.sample({"math": 2}))["math"]
        drawn.append([(ids([item.item]), item.staleness, item.priority, item.times_sampled) for item in items])
        await buffer.update_priorities({item.uid: 5.0 for item in items})
    return drawn


class CheckpointLaws(Harness):
    """checkpoint, restore, checkpoints, drop_checkpoint."""

    async def test_a_restore_gives_back_exactly_what_was(self, buffer: ReplayBuffer) -> None:
        """Groups, metadata, rollouts, counts: groups taken since are back, groups put since are gone."""
        await fill(buffer)
        rated = await buffer.put(group(31), "rated")
        await buffer.put(group(32), "dated", model_step=1, current_train_step=2)
        before, seen = held_by(buffer), await everything(buffer)
        made = await buffer.checkpoint(8)
        assert (made.step, made.groups) == (8, len(seen) - 3)
        await buffer.update_priorities({rated: 9.0})
        await buffer.refresh_staleness(task_stale_thresholds={"dated": 3}, current_train_step=12)
        await go_on(buffer)
        assert await everything(buffer) != seen
        assert await buffer.restore(8) == made
        assert held_by(buffer) == before
        assert await everything(buffer) == seen

    @pytest.mark.parametrize("policy", ["fifo", "lifo", "staleness", "uniform", "prioritized"])
    async def test_a_restored_run_draws_what_it_would_have_drawn(self, policy: str, open_buffer: OpenBuffer) -> None:
        """The batches after a restore are those of a run that was never interrupted, with the same seed."""
        buffer = await open_buffer(policy, seed=7, max_times_sampled=2)
        await batches(buffer, 100)
        await buffer.checkpoint(4)
        uninterrupted = await batches(buffer, 200)
        for _ in range(2):
            await buffer.restore(4)
            assert await batches(buffer, 200) == uninterrupted

    async def test_uids_are_never_given_again(self, buffer: ReplayBuffer) -> None:
        """Also those of groups that a restore has removed."""
        await buffer.put(group(1), "math")
        await buffer.checkpoint(1)
        given = [await buffer.put(group(number), "math") for number in range(3)]
        await buffer.restore(1)
        assert await buffer.put(group(9), "math") not in given

    async def test_leased_groups_are_as_if_given_back(self, buffer: ReplayBuffer) -> None:
        """Those that were leased then, and those that are leased now."""
        uids = [await buffer.put(group(number), "math") for number in range(3)]
        async with buffer.lease_batch({"math": 1}, seconds=LONG):
            await buffer.checkpoint(1)
        await buffer.lease_batch({"math": 1}, seconds=LONG, heartbeat=False)
        await buffer.restore(1)
        items = await found(buffer)
        assert [(item.uid, item.times_sampled, item.deliveries) for item in items] == [(uid, 0, 0) for uid in uids]
        assert (await buffer.storage.tallies()).get(("math", Status.COMPLETED, Tally.LEASED), 0) == 0

    async def test_a_lease_of_before_the_restore_is_fenced(self, buffer: ReplayBuffer) -> None:
        """It can't be acknowledged, extended or settled by a put any more; nothing is changed by the attempt."""
        await buffer.put(group(1), "math")
        await buffer.checkpoint(1)
        lease = await buffer.lease_batch({"math": 1}, seconds=LONG, heartbeat=False)
        await buffer.restore(1)
        [uid] = lease.open
        with pytest.raises(FencedError, match="restored"):
            await lease.acknowledge()
        with pytest.raises(FencedError):
            await lease.extend()
        with pytest.raises(FencedError):
            await lease.finish(group(2), "math", replaces=[uid])
        assert await lease.give_back() == 0
        assert ids(await buffer.get(9, "math")) == [1]

    async def test_keep_new_keeps_what_was_put_since(self, open_buffer: OpenBuffer) -> None:
        """With its staleness, as if it had never been drawn; what was taken since is back all the same."""
        buffer = await open_buffer("fifo", max_times_sampled=3)
        await buffer.put(group(1), "math", model_step=1, current_train_step=2)
        await buffer.checkpoint(2)
        await buffer.put(group(2), "math", model_step=2, current_train_step=6, tags={"new": True})
        await buffer.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=7)
        await buffer.get(2, "math")
        await buffer.delete({"tags.new": {"$ne": True}})
        await buffer.restore(2, keep_new=True)
        items = await found(buffer)
        assert [(ids([item.item]), item.staleness, item.times_sampled) for item in items] == [([1], 0, 0), ([2], 4, 0)]
        assert plain(await buffer.get(9, "math")) == plain([item.item for item in items])

    async def test_keep_new_counts_what_it_keeps(self, buffer: ReplayBuffer) -> None:
        """put = the sum of all outcomes, also after groups were kept over a restore, and one replaced another."""
        await buffer.put(group(1), "math", key="a")
        await buffer.put(group(2), "math")
        await buffer.checkpoint(2)
        await buffer.put(group(3), "math", key="a")
        await buffer.put(group(4), "math", key="b")
        await buffer.get(1, "math")
        await buffer.lease_batch({"math": 1}, seconds=LONG, heartbeat=False)
        await buffer.restore(2, keep_new=True)
        assert sorted(ids([item.item for item in await found(buffer)])) == [2, 3, 4]
        tallies = {name: n for (_, _, name), n in (await buffer.storage.tallies()).items() if n}
        assert tallies == {Tally.PUT: 4, Tally.SIZE: 3, Tally.REPLACED: 1}

    async def test_keep_new_brings_archived_groups_back(self, open_buffer: OpenBuffer) -> None:
        """Groups that were put and taken since are completed again, where the archive has kept them."""
        buffer = await open_buffer("fifo", archive_groups=10)
        await buffer.put(group(1), "math")
        await buffer.checkpoint(1)
        await buffer.put(group(2), "math")
        await buffer.put(group(3, status=Status.ARCHIVED), "math")
        assert ids(await buffer.get(9, "math")) == [1, 2]
        await buffer.restore(1, keep_new=True)
        assert len(buffer) == 2
        assert ids([item.item for item in await found(buffer) if item.status == Status.ARCHIVED]) == [3]
        assert ids(await buffer.get(9, "math")) == [1, 2]

    async def test_cursors_are_part_of_a_checkpoint(self, buffer: ReplayBuffer) -> None:
        """They go back with a restore, and stay where they are with keep_new."""
        storage = buffer.storage
        assert await storage.move_cursor(Cursor("a", 0, 3, b"three"))
        await buffer.checkpoint(1)
        await storage.move_cursor(Cursor("a", 1, 5, b"five"))
        await storage.move_cursor(Cursor("b", 0, 1, b"one"))
        await buffer.restore(1, keep_new=True)
        assert (await storage.cursor("a")).value == b"five"
        await buffer.restore(1)
        assert await storage.cursor("a") == Cursor("a", 1, 3, b"three")
        assert await storage.cursor("b") == Cursor("b")

    async def test_the_checkpoints_made_last_are_kept(self, open_buffer: OpenBuffer) -> None:
        """As many as the buffer's setting; a checkpoint of the same step replaces the older one."""
        storage = (await open_buffer()).storage
        buffer = ReplayBuffer(storage, storage.codec.rollout_type, keep_checkpoints=2)
        for number, step in enumerate([1, 2, 1, 3]):
            await buffer.put(group(number), "math")
            await buffer.checkpoint(step)
        assert [(made.step, made.groups) for made in await buffer.checkpoints()] == [(1, 3), (3, 4)]

    async def test_a_dropped_checkpoint_is_gone(self, buffer: ReplayBuffer) -> None:
        """CheckpointError that names the step, and those that there are."""
        for step in (5, 6):
            await buffer.checkpoint(step)
        await buffer.drop_checkpoint(5)
        for call in (buffer.restore(5), buffer.drop_checkpoint(5), buffer.restore(5, keep_new=True)):
            with pytest.raises(CheckpointError, match=r"step 5.* 6"):
                await call
        await buffer.drop_checkpoint(6)
        with pytest.raises(CheckpointError, match="no checkpoint was made"):
            await buffer.restore(6)

    async def test_a_missing_checkpoint_changes_nothing(self, buffer: ReplayBuffer) -> None:
        """And a step that is none is refused."""
        await fill(buffer)
        before = held_by(buffer)
        for call in (buffer.restore(99), buffer.restore(99, keep_new=True)):
            with pytest.raises(CheckpointError):
                await call
        for step in (None, 1.5, "1", True):
            for call in (buffer.checkpoint(step), buffer.restore(step)):  # type: ignore[arg-type]
                with pytest.raises(InputError, match="step"):
                    await call
        assert held_by(buffer) == before

    async def test_a_state_is_not_loaded_over_checkpoints(self, buffer: ReplayBuffer) -> None:
        """SnapshotError that names their steps."""
        state = buffer.state_dict()
        await buffer.checkpoint(4)
        with pytest.raises(SnapshotError, match="4", check=because("not empty")):
            buffer.load_state_dict(state)

    async def test_a_restore_wakes_those_who_wait(self, buffer: ReplayBuffer) -> None:
        """Waits in the same buffer get groups that are back."""
        await buffer.put(group(1), "math")
        await buffer.checkpoint(1)
        await buffer.get(1, "math")
        task = await waiting(buffer, buffer.take_batch({"math": 1}, timeout=SOON * 2))
        await buffer.restore(1)
        batch, _ = await asyncio.wait_for(task, SOON)
        assert ids(batch["math"]) == [1]

    async def test_keep_new_keeps_a_result_in_the_place_of_its_prompt(self, buffer: ReplayBuffer) -> None:
        """Groups that a kept group has replaced since, also through others, don't come back beside it."""
        for number in range(3):
            await buffer.put(group(number, status=Status.INIT), "math")
        lease = await buffer.lease_batch({"math": 3}, group_status="init", seconds=LONG, heartbeat=False)
        done, saved, lost = sorted(lease.open)
        await buffer.checkpoint(1)
        await lease.finish(group(10), "math", replaces=[done])
        for number in (11, 12):
            half = group(number, status=Status.ABORTED)
            saved = await lease.save(half, "math", replaces=[saved]) or 0
        await lease.finish(group(13), "math", replaces=[lost])
        await buffer.delete({"reward": 1, "status": "completed", "uid": {"$gt": saved}})
        for _ in range(2):
            await buffer.restore(1, keep_new=True)
            items = sorted((item.item[0].rollout_id, str(item.status)) for item in await found(buffer))
            assert items == [(2, "init"), (10, "completed"), (12, "aborted")]
            tallies: Counter[Tally] = Counter()
            for (_, _, name), count in (await buffer.storage.tallies()).items():
                tallies[name] += count
            assert +tallies == {Tally.PUT: 5, Tally.SIZE: 3, Tally.REPLACED: 2}
