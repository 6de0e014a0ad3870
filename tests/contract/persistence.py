"""Laws of checkpoints and of what a buffer keeps."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from replaybuf.buffer.copies import SNAPSHOT_FILE
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import CheckpointError, FencedError, InputError, SnapshotError, StorageError
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import Cursor
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import CODEC, SOON, Harness, OpenBuffer, found, group, ids, plain, rollout
from tests.contract.leasing import LONG, lease_of
from tests.contract.waiting import waiting
from tests.reference.snapshots import held_by
from tests.stores import because


async def fill_in_every_way(buffer: ReplayBuffer) -> None:
    """Put groups and change them in every way."""
    await buffer.put([rollout(1, response_model_steps=[1]), rollout(2, response_model_steps=[3, 6])], "math", key="a")
    await buffer.put(group(3), "math", model_step=5, current_train_step=7, priority=2, tags={"a": 1, "b": None})
    await buffer.put(group(4, seq_staleness=3, reward=None), "math")
    # It expires in the refresh; fields that it leaves out because they are None are reset all the same.
    await buffer.put(group(8, response=None, logprobs=None, response_model_steps=[0]), "math")
    await buffer.put(group(5, status=Status.FAILED), "code", model_step=2, current_train_step=7)
    await buffer.put(group(6), "code", model_step=2)
    await buffer.refresh_staleness(  # one token of a rollout that stays is masked
        task_stale_thresholds={"math": 5}, task_token_stale_thresholds={"math": 3}, current_train_step=8
    )
    await buffer.put(group(7, seq_staleness=9), "math", stale_threshold=2, expired_groups_retryable=False)
    await buffer.update({"priority": 2}, status="filtered")


async def everything(buffer: ReplayBuffer) -> list[Any]:
    """Return everything that a buffer shows."""
    items = await found(buffer)
    seen = [plain({name: getattr(item, name) for name in type(item).__slots__}) for item in items]
    return [*seen, len(buffer), await buffer.dropped("math"), await buffer.dropped("code")]


class PersistenceLaws(Harness):
    """save, resume, state_dict and load_state_dict."""

    async def test_a_snapshot_resumes_as_it_was(self, open_buffer: OpenBuffer, tmp_path: Path) -> None:
        """Groups, metadata, dropped counts; the saved buffer stays as it is."""
        buffer, fresh = await open_buffer(), await open_buffer()
        await fill_in_every_way(buffer)
        before = await everything(buffer)
        assert await buffer.save(tmp_path / "deep" / "folder") == tmp_path / "deep" / "folder" / SNAPSHOT_FILE
        await fresh.resume(tmp_path / "deep" / "folder")
        assert await everything(fresh) == before
        assert await everything(buffer) == before

    @pytest.mark.parametrize("way", ["snapshot", "state"])
    async def test_a_group_with_an_expired_rollout_expires_there_as_it_would_have_here(
        self, open_buffer: OpenBuffer, tmp_path: Path, way: str
    ) -> None:
        """One that expired and was requeued doesn't at the next refresh; one that was put with it does, once."""
        buffer, fresh = await open_buffer(), await open_buffer()
        await buffer.put([rollout(1, response_model_steps=[1])], "math", current_train_step=2)
        await buffer.refresh_staleness(task_stale_thresholds={"math": 3}, current_train_step=9)
        await buffer.put([rollout(2, status=Status.EXPIRED), rollout(3, status=Status.ABORTED)], "code")
        await buffer.update({"task_name": "math"}, status="aborted")
        if way == "state":
            fresh.load_state_dict(buffer.state_dict())
        else:
            await buffer.save(tmp_path / "saved")
            await fresh.resume(tmp_path / "saved")
        thresholds = {"math": 9, "code": 9}
        for one in (buffer, fresh):
            counts = [
                await one.refresh_staleness(task_stale_thresholds=thresholds, current_train_step=step)
                for step in (10, 11)
            ]
            assert counts == [{"math": 0, "code": 1}, {"math": 0, "code": 0}]

    async def test_an_empty_buffer_can_be_saved(self, open_buffer: OpenBuffer, tmp_path: Path) -> None:
        """Its uids and dropped counts go on."""
        buffer, fresh = await open_buffer(), await open_buffer()
        await fill_in_every_way(buffer)
        uids = [item.uid for item in await found(buffer)]
        await buffer.delete({})
        await buffer.save(tmp_path)
        await fresh.resume(tmp_path)
        assert await everything(fresh) == [0, 1, 0]
        assert await fresh.put(group(1), "math") not in uids

    async def test_a_snapshot_replaces_an_older_one(self, open_buffer: OpenBuffer, tmp_path: Path) -> None:
        """Of saves into one folder the last counts, and nothing else is left there."""
        buffer, fresh = await open_buffer(), await open_buffer()
        await buffer.put(group(1), "math")
        await buffer.save(tmp_path / "saved")
        await fill_in_every_way(buffer)
        await buffer.save(tmp_path / "saved")
        await fresh.resume(tmp_path / "saved")
        assert await everything(fresh) == await everything(buffer)
        assert os.listdir(tmp_path / "saved") == [SNAPSHOT_FILE]

    async def test_a_snapshot_is_consistent_while_others_write(self, open_buffer: OpenBuffer, tmp_path: Path) -> None:
        """It holds the state of one moment: of groups that are put in order, the first ones."""
        buffer, fresh = await open_buffer(), await open_buffer()
        uids = [await buffer.put(group(i), "math") for i in range(20)]
        saving = asyncio.create_task(buffer.save(tmp_path))
        while not saving.done():
            uids.append(await buffer.put(group(len(uids)), "math"))
            await asyncio.sleep(0)
        await saving
        await fresh.resume(tmp_path)
        saved = [item.uid for item in await found(fresh)]
        assert saved == uids[: len(saved)]
        assert len(saved) >= 20

    async def test_resume_refuses_a_buffer_with_groups(self, open_buffer: OpenBuffer, tmp_path: Path) -> None:
        """SnapshotError, and the buffer stays as it is."""
        buffer, other = await open_buffer(), await open_buffer()
        await fill_in_every_way(buffer)
        await buffer.save(tmp_path)
        await other.put(group(1), "math")
        before = await everything(other)
        with pytest.raises(SnapshotError, match="1 group", check=because("not empty")):
            await other.resume(tmp_path)
        with pytest.raises(SnapshotError, check=because("not empty")):
            other.load_state_dict(buffer.state_dict())
        assert await everything(other) == before

    async def test_resume_refuses_a_missing_snapshot(self, buffer: ReplayBuffer, tmp_path: Path) -> None:
        """SnapshotError that names the folder."""
        for folder in (tmp_path, tmp_path / "none"):
            with pytest.raises(SnapshotError, match=tmp_path.name, check=because("missing")):
                await buffer.resume(folder)

    async def test_resume_refuses_another_policy(self, open_buffer: OpenBuffer, tmp_path: Path) -> None:
        """SnapshotError that names both; nothing is loaded."""
        buffer, other = await open_buffer("fifo"), await open_buffer("staleness")
        await fill_in_every_way(buffer)
        await buffer.save(tmp_path)
        with pytest.raises(SnapshotError, match=r"'fifo'.*'staleness'", check=because("mismatch")):
            await other.resume(tmp_path)
        with pytest.raises(SnapshotError, match=r"'fifo'.*'staleness'", check=because("mismatch")):
            other.load_state_dict(buffer.state_dict())
        assert len(other) == 0

    async def test_resume_refuses_another_schema(self, open_buffer: OpenBuffer, tmp_path: Path) -> None:
        """StorageError for a snapshot of another version, an error too for a file that is none."""
        buffer, fresh = await open_buffer(), await open_buffer()
        file = await buffer.save(tmp_path)
        with sqlite3.connect(file) as connection:
            connection.execute("UPDATE rb_version SET version_num = '9999'")
        connection.close()
        with pytest.raises(StorageError, match="9999", check=because("schema")):
            await fresh.resume(tmp_path)
        file.write_bytes(b"")
        with pytest.raises(SnapshotError):
            await fresh.resume(tmp_path)
        assert len(fresh) == 0

    async def test_snapshots_go_from_any_database_to_any(self, open_buffer: OpenBuffer, tmp_path: Path) -> None:
        """To a SQLite database in memory and back."""
        buffer, fresh = await open_buffer(), await open_buffer()
        memory = await open_buffer(storage=SQLStorage("memory://", CODEC))
        await fill_in_every_way(buffer)
        await buffer.save(tmp_path / "1")
        await memory.resume(tmp_path / "1")
        assert await everything(memory) == await everything(buffer)
        await memory.save(tmp_path / "2")
        await fresh.resume(tmp_path / "2")
        assert await everything(fresh) == await everything(buffer)

    async def test_state_dicts_go_from_any_database_to_any(self, open_buffer: OpenBuffer) -> None:
        """To a SQLite database in memory and back, and they are not used up."""
        buffer, fresh = await open_buffer(), await open_buffer()
        memory = await open_buffer(storage=SQLStorage("memory://", CODEC))
        await fill_in_every_way(buffer)
        state = buffer.state_dict()
        kept = deepcopy(state)
        memory.load_state_dict(state)
        assert await everything(memory) == await everything(buffer)
        fresh.load_state_dict(memory.state_dict())
        assert await everything(fresh) == await everything(buffer)
        assert state == kept

    async def test_a_damaged_state_is_refused_whole(self, open_buffer: OpenBuffer) -> None:
        """If one group of a state dict is damaged, none is loaded, and the right state still can be."""
        buffer, fresh = await open_buffer(), await open_buffer()
        await fill_in_every_way(buffer)
        state = buffer.state_dict()
        damaged = state["snapshot"].replace(b"the answer", b"an answers", 1)
        with pytest.raises(SnapshotError, match="damaged", check=because("")):
            fresh.load_state_dict({"snapshot": damaged})
        with pytest.raises(SnapshotError, match="damaged"):
            fresh.load_state_dict({"snapshot": state["snapshot"][:5000]})
        assert len(fresh) == 0
        fresh.load_state_dict(state)
        assert await everything(fresh) == await everything(buffer)

    async def test_a_load_gives_no_uid_again(self, open_buffer: OpenBuffer) -> None:
        """A buffer that has given higher uids than those of the state goes on from its own."""
        buffer, fresh = await open_buffer(), await open_buffer()
        await buffer.put(group(1), "math")
        given = [await fresh.put(group(i), "math") for i in range(5)]
        await fresh.delete({})
        fresh.load_state_dict(buffer.state_dict())
        assert await fresh.put(group(2), "math") not in given

    async def test_loading_wakes_those_who_wait(self, open_buffer: OpenBuffer) -> None:
        """As any put does."""
        from tests.contract.waiting import waiting

        buffer, fresh = await open_buffer(), await open_buffer()
        await buffer.put(group(1), "math")
        task = await waiting(fresh, fresh.wait_ready({"math": 1}, timeout=None))
        fresh.load_state_dict(buffer.state_dict())
        await asyncio.wait_for(task, 20)


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
        await fill_in_every_way(buffer)
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
        await lease_of(buffer)
        await buffer.restore(1)
        items = await found(buffer)
        assert [(item.uid, item.times_sampled, item.deliveries) for item in items] == [(uid, 0, 0) for uid in uids]
        assert (await buffer.storage.tallies()).get(("math", Status.COMPLETED, Tally.LEASED), 0) == 0

    async def test_a_restore_undoes_a_refresh(self, buffer: ReplayBuffer) -> None:
        """Stale tokens are trained on again, and a group that was put without a step has its own staleness again."""
        await buffer.put(group(1, response_model_steps=[0, 7, 7]), "math", current_train_step=8)
        await buffer.put(group(2, response_model_steps=[5, 5, 5]), "math")
        await buffer.put(group(3, response_model_steps=[2, 7, 7]), "math", current_train_step=8)
        await buffer.checkpoint(1)
        before, items = held_by(buffer), await found(buffer)
        thresholds: Any = {"task_stale_thresholds": {"math": 8}, "task_token_stale_thresholds": {"math": 5}}
        await buffer.refresh_staleness(**thresholds, current_train_step=9)
        assert [one.item[0].response_mask for one in await found(buffer)] == [None, [1, 1, 1], [0, 1, 1]]
        await buffer.restore(1)
        assert held_by(buffer) == before
        assert await found(buffer) == items

    async def test_a_lease_of_before_the_restore_is_fenced(self, buffer: ReplayBuffer) -> None:
        """It can't be acknowledged, extended or settled by a put any more; nothing is changed by the attempt."""
        await buffer.put(group(1), "math")
        await buffer.checkpoint(1)
        lease = await lease_of(buffer)
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

    async def test_keep_new_leaves_later_checkpoints_as_they_are(self, open_buffer: OpenBuffer) -> None:
        """What it makes of the groups that it keeps isn't in a checkpoint that had them before."""
        buffer = await open_buffer("fifo", max_times_sampled=5)
        await buffer.checkpoint(1)
        await buffer.put(group(1), "math", key="a")
        await buffer.get(1, "math")
        await buffer.checkpoint(2)
        await buffer.restore(1, keep_new=True)
        assert [item.times_sampled for item in await found(buffer)] == [0]
        await buffer.restore(2)
        assert [item.times_sampled for item in await found(buffer)] == [1]

    async def test_keep_new_counts_what_it_keeps(self, buffer: ReplayBuffer) -> None:
        """put = the sum of all outcomes, also after groups were kept over a restore, and one replaced another."""
        await buffer.put(group(1), "math", key="a")
        await buffer.put(group(2), "math")
        await buffer.checkpoint(2)
        await buffer.put(group(3), "math", key="a")
        await buffer.put(group(4), "math", key="b")
        await buffer.get(1, "math")
        await lease_of(buffer)
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
        buffer = ReplayBuffer(storage, keep_checkpoints=2)
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
        await fill_in_every_way(buffer)
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
