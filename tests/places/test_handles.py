"""Handles of arrays: in other processes, after their lease, and where their arrays are damaged."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from replaybuf import LeaseLostError, ReplayBuffer, load_into
from replaybuf.errors import DecodeError, InputError, PayloadStoreError, StorageError
from replaybuf.storage.sql.statements.past import sweep
from replaybuf.storage.sql.tasks.handles import ArrayHandle, load_all
from tests.places.deferred import Kept, experts, lent, rollout, same
from tests.stores import TASK


def load_elsewhere(pickled: bytes, answers: Any) -> None:
    try:
        answers.put([np.asarray(one).tobytes() for one in load_all(pickle.loads(pickled))])
    except Exception as error:
        answers.put(repr(error))


def elsewhere(pickled: bytes, method: str = "spawn") -> Any:
    context: Any = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=load_elsewhere, args=(pickled, answers))
    process.start()
    try:
        return answers.get(timeout=60)
    finally:
        process.join()


async def test_handles_load_in_another_process_without_the_config(
    shared: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was named by a relative path, and the other process is in another folder."""
    if shared.url.startswith("sqlite"):
        monkeypatch.chdir(tmp_path)
        shared.url = "sqlite:///buffer.db"
    async with shared.opened() as buffer:
        await buffer.put([rollout(4, small=np.arange(2))], TASK)
        _, [found] = await lent(buffer, deferred=["routed_experts", "extra_fields"])
        sent = pickle.dumps([found.routed_experts, found.extra_fields["small"]])
        monkeypatch.chdir("/")
        assert await asyncio.to_thread(elsewhere, sent) == [experts(4).tobytes(), np.arange(2).tobytes()]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("shared", ["sqlite", "postgresql, folder"], indirect=True)
async def test_a_forked_process_loads_for_itself(shared: Kept) -> None:
    async with shared.opened() as buffer:
        await buffer.put([rollout()], TASK)
        _, [found] = await lent(buffer)
        found.routed_experts.load()
        sent = pickle.dumps([found.routed_experts])
        assert await asyncio.to_thread(elsewhere, sent, "fork") == [experts().tobytes()]


async def test_a_handle_outlives_the_buffer_that_it_came_from(shared: Kept) -> None:
    async with shared.opened() as buffer:
        await buffer.put([rollout()], TASK)
        found = [item async for item in buffer.find({}, deferred=["routed_experts"])]
    handle = found[0].item[0].routed_experts
    assert same(handle.load(), experts())
    assert same(await handle.load_async(), experts())


async def test_a_handle_of_a_buffer_in_memory_is_for_its_own_process() -> None:
    async with Kept("memory://").opened() as buffer:
        await buffer.put([rollout()], TASK)
        _, [found] = await lent(buffer)
        assert same(found.routed_experts.load(), experts())
    with pytest.raises(InputError, match="only its own process can read, as long as it is open"):
        found.routed_experts.load()


async def test_no_password_is_in_a_handle(postgres_database: str) -> None:
    """Another process needs it from its own environment; here the open buffer reads."""
    place = urlsplit(postgres_database)
    url = place._replace(netloc=f"{place.username}:s3cr3t@{place.netloc.rpartition('@')[2]}").geturl()
    async with Kept(url).opened() as buffer:
        await buffer.put([rollout()], TASK)
        _, [found] = await lent(buffer)
        sent = pickle.dumps([found.routed_experts])
        assert b"s3cr3t" not in sent
        assert "s3cr3t" not in repr(found)
        assert b"***" not in sent
        assert same(found.routed_experts.load(), experts())
        assert await asyncio.to_thread(elsewhere, sent) == [experts().tobytes()]


async def test_a_place_that_another_host_does_not_reach(in_folder: Kept, tmp_path: Path) -> None:
    async with in_folder.opened() as buffer:
        await buffer.put([rollout()], TASK)
        _, [found] = await lent(buffer)
        there, away = Path(in_folder.payloads), tmp_path / "unmounted"
        there.rename(away)  # noqa: ASYNC240
        with pytest.raises(PayloadStoreError, match=f"{there}.*mount it"):
            found.routed_experts.load()
        away.rename(there)
        assert same(found.routed_experts.load(), experts())


async def test_a_database_that_another_host_does_not_have(in_file: Kept, tmp_path: Path) -> None:
    async with in_file.opened() as buffer:
        await buffer.put([rollout()], TASK)
        _, [found] = await lent(buffer)
    (tmp_path / "buffer.db").unlink()
    with pytest.raises(StorageError, match=r"buffer\.db"):
        found.routed_experts.load()
    assert not (tmp_path / "buffer.db").exists()


# After the lease


async def test_a_handle_after_its_lease_never_gives_wrong_data(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the file is there it gives what was put; once the row is swept it says that it is too late."""
    monkeypatch.setattr("replaybuf.storage.sql.tasks.payload_files.FILE_BYTES", 300_000)
    async with kept.opened() as buffer:
        await buffer.put([rollout(3)], TASK)
        lease, [found] = await lent(buffer)
        await lease.acknowledge()
        handle = found.routed_experts
        for number in range(20):
            try:
                assert same(handle.load(), experts(3))
            except LeaseLostError:
                break
            await sweep_all(buffer)
            await buffer.put([rollout(number + 100)], TASK)
            await buffer.get(1, TASK)
        with pytest.raises(LeaseLostError, match="Load before the lease is acknowledged"):
            handle.load()


async def sweep_all(buffer: ReplayBuffer[Any]) -> None:
    """Let what has left be swept, and empty files be deleted, without the time of grace."""
    storage: Any = buffer.storage
    await storage.thread.run(lambda: _sweep(storage))


async def _sweep(storage: Any) -> None:

    def forget(tx: Any) -> None:
        tx.change("UPDATE rb_past SET removed_at = 0.0")

    await storage.sweeper.stop()  # which would be in the way
    await storage.engine.write(forget)
    await storage.engine.write(lambda tx: sweep(tx, time.time(), 100))
    while await storage.files.tend(True):  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # an earlier task of the store may be deleting


# Damage


async def test_damage_of_a_deferred_array_is_an_error_of_load_alone(on_disk: Kept) -> None:
    async with on_disk.opened() as buffer:
        await buffer.put([rollout(pixels=experts(10**6)), rollout(1)], TASK)
        await turn_bits(buffer, on_disk, experts(10**6).tobytes()[5000:5016])
        lease, _ = await lent(buffer, deferred=["routed_experts", "extra_fields"])
        first, second = lease.items[TASK][0].item
        assert same(first.routed_experts.load(), experts())
        assert same(second.routed_experts.load(), experts(1))
        with pytest.raises(DecodeError, match="its checksum doesn't match"):
            first.extra_fields["pixels"].load()
        with pytest.raises(DecodeError):
            load_into(lease.items)
        assert type(first.routed_experts) is ArrayHandle  # nothing was changed


async def test_damage_elsewhere_sets_the_group_aside(on_disk: Kept) -> None:
    async with on_disk.opened() as buffer:
        await buffer.put([rollout(pixels=experts(10**6))], TASK)
        await buffer.put([rollout(2, pixels=experts(11))], TASK)
        await turn_bits(buffer, on_disk, experts(10**6).tobytes()[5000:5016])
        lease = await buffer.lease_batch({TASK: 1}, deferred=["routed_experts"], timeout=0)
        assert [item.item[0].rollout_id for item in lease.items[TASK]] == [2]
        failed = [item async for item in buffer.find({"status": "failed"}, deferred=["routed_experts"])]
        assert len(failed) == 1
        assert "checksum" in (failed[0].error or "")


async def turn_bits(buffer: ReplayBuffer[Any], kept: Kept, around: bytes) -> None:
    """Damage the bytes that are like these, in a file or in the payload's row."""
    turned = bytes(one ^ 1 for one in around)
    for path in kept.files():
        content = path.read_bytes()
        if (at := content.find(around)) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(turned)
            return

    def change(tx: Any) -> None:
        for uid, data in tx.tuples("SELECT uid, data FROM rb_payload"):
            if around in data:
                changed = data.replace(around, turned)
                tx.change("UPDATE rb_payload SET data = :data WHERE uid = :uid", data=changed, uid=uid)

    storage: Any = buffer.storage
    await storage.thread.run(lambda: storage.engine.write(change))
