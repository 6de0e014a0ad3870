"""Laws of snapshots and state dicts: a saved storage comes back whole, in any other."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from replaybuf.buffer.copies import SNAPSHOT_FILE
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import SnapshotError, StorageError
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import CODEC, Harness, OpenBuffer, found, group, plain, rollout
from tests.reasons import because


async def fill(buffer: ReplayBuffer) -> None:
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
        await fill(buffer)
        before = await everything(buffer)
        assert await buffer.save(tmp_path / "deep" / "folder") == tmp_path / "deep" / "folder" / SNAPSHOT_FILE
        await fresh.resume(tmp_path / "deep" / "folder")
        assert await everything(fresh) == before
        assert await everything(buffer) == before

    @pytest.mark.parametrize("way", ["snapshot", "state"])
    async def test_a_group_that_was_made_aborted_expires_there_as_it_would_have_here(
        self, open_buffer: OpenBuffer, tmp_path: Path, way: str
    ) -> None:
        """One that expired and was requeued doesn't at the next refresh; one that was put as expired does, once."""
        buffer, fresh = await open_buffer(), await open_buffer()
        await buffer.put([rollout(1, response_model_steps=[1])], "math", current_train_step=2)
        await buffer.refresh_staleness(task_stale_thresholds={"math": 3}, current_train_step=9)
        await buffer.put([rollout(2, status=Status.EXPIRED, response="a")], "code")
        await buffer.update({"status": "expired"}, status="aborted")
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
        await fill(buffer)
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
        await fill(buffer)
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
        await fill(buffer)
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
        await fill(buffer)
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
        await fill(buffer)
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
        await fill(buffer)
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
        await fill(buffer)
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
