"""Laws of checkpoints and of what a buffer keeps."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import SnapshotError, StorageError
from replaybuf.storage.sql.copies.snapshot_file import SNAPSHOT_FILE
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import SOON, Harness, OpenBuffer, everything, found, group, ids, rollout
from tests.contract.waiting import waiting
from tests.reference.snapshots import held_by, load_snapshot, snapshot_of
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


class PersistenceLaws(Harness):
    """save and resume."""

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

    async def test_a_load_gives_no_uid_again(self, open_buffer: OpenBuffer) -> None:
        """A buffer that has given higher uids than those of the state goes on from its own."""
        buffer, fresh = await open_buffer(), await open_buffer()
        await buffer.put(group(1), "math")
        new_uids = [await fresh.put(group(i), "math") for i in range(5)]
        await fresh.delete({})
        load_snapshot(fresh, snapshot_of(buffer))
        assert await fresh.put(group(2), "math") not in new_uids

    async def test_loading_wakes_those_who_wait(self, open_buffer: OpenBuffer) -> None:
        """As any put does."""
        buffer, fresh = await open_buffer(), await open_buffer()
        await buffer.put(group(1), "math")
        task = await waiting(fresh, fresh.wait_ready({"math": 1}, timeout=None))
        load_snapshot(fresh, snapshot_of(buffer))
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


class CheckpointLaws(Harness):
    """checkpoint, restore, checkpoints, drop_checkpoint."""

    async def test_a_restore_gives_back_exactly_what_was(self, buffer: ReplayBuffer) -> None:
        """Groups, metadata, rollouts, counts: groups taken since are back, groups put since are gone."""
        await fill_in_every_way(buffer)
        rated = await buffer.put(group(31), "rated")
        await buffer.put(group(32), "dated", model_step=1, current_train_step=2)
        before, contents = held_by(buffer), await everything(buffer)
        checkpoint = await buffer.checkpoint(8)
        assert (checkpoint.step, checkpoint.groups) == (8, len(contents))
        await buffer.update_priorities({rated: 9.0})
        await buffer.refresh_staleness(task_stale_thresholds={"dated": 3}, current_train_step=12)
        await go_on(buffer)
        assert await everything(buffer) != contents
        assert await buffer.restore(8) == checkpoint
        assert held_by(buffer) == before
        assert await everything(buffer) == contents

    async def test_the_checkpoints_made_last_are_kept(self, open_buffer: OpenBuffer) -> None:
        """As many as the buffer's setting; a checkpoint of the same step replaces the older one."""
        storage = (await open_buffer()).storage
        buffer = ReplayBuffer(storage, keep_checkpoints=2)
        for number, step in enumerate([1, 2, 1, 3]):
            await buffer.put(group(number), "math")
            await buffer.checkpoint(step)
        assert [(checkpoint.step, checkpoint.groups) for checkpoint in await buffer.checkpoints()] == [(1, 3), (3, 4)]

    async def test_a_restore_wakes_those_who_wait(self, buffer: ReplayBuffer) -> None:
        """Waits in the same buffer get groups that are back."""
        await buffer.put(group(1), "math")
        await buffer.checkpoint(1)
        await buffer.get(1, "math")
        task = await waiting(buffer, buffer.take_batch({"math": 1}, timeout=SOON * 2))
        await buffer.restore(1)
        batch, _ = await asyncio.wait_for(task, SOON)
        assert ids(batch["math"]) == [1]
