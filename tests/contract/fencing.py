"""Laws of restores among several storages over one place: those opened before are fenced off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import FencedError
from replaybuf.storage.values import Cursor
from tests.contract.durable import SamePlace
from tests.contract.harness import CODEC, SOON, Harness, OpenBuffer, group, ids, rules_of
from tests.contract.leasing import LONG
from tests.contract.persistence import everything, fill
from tests.contract.waiting import waiting
from tests.reference.snapshots import held_by

Attempt = Callable[[ReplayBuffer], Awaitable[Any]]

ATTEMPTS: dict[str, Attempt] = {
    "put": lambda buffer: buffer.put(group(9), "math"),
    "get": lambda buffer: buffer.get(1, "math"),
    "take_batch": lambda buffer: buffer.take_batch({"math": 1}, timeout=SOON),
    "sample": lambda buffer: buffer.sample({"math": 1}),
    "lease": lambda buffer: buffer.lease_batch({"math": 1}, seconds=LONG).__aenter__(),
    "delete": lambda buffer: buffer.delete({}),
    "update": lambda buffer: buffer.update({}, priority=2),
    "update_priorities": lambda buffer: buffer.update_priorities({1: 2.0}),
    "refresh": lambda buffer: buffer.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=9),
    "dropped put": lambda buffer: buffer.put(
        group(9, seq_staleness=5), "math", stale_threshold=4, expired_groups_retryable=False
    ),
    "cursor": lambda buffer: buffer.cursors.move(Cursor("data")),
    "claim": lambda buffer: buffer.cursors.claim([], Cursor("data"), LONG),
    "checkpoint": lambda buffer: buffer.checkpoint(7),
    "drop": lambda buffer: buffer.drop_checkpoint(1),
}


class FenceLaws(Harness):
    """Restores, as other storages see them."""

    @pytest.fixture
    def same_place(self) -> SamePlace:
        """As for `DurableLaws`."""
        raise NotImplementedError("give a fixture same_place; tests.contract says how")

    @pytest.mark.parametrize("attempt", ATTEMPTS)
    async def test_those_of_the_run_before_can_change_nothing(
        self, attempt: str, buffer: ReplayBuffer, open_buffer: OpenBuffer, same_place: SamePlace
    ) -> None:
        """FencedError that names the step, at every attempt; the restored buffer stays as it is."""
        await fill(buffer)
        await buffer.checkpoint(1)
        trainer = await open_buffer(storage=same_place(buffer.storage, CODEC))
        await trainer.restore(1)
        before = held_by(trainer)
        for _ in range(2):
            with pytest.raises(FencedError, match=r"step 1 at .* by .*End this process"):
                await ATTEMPTS[attempt](buffer)
        assert held_by(trainer) == before

    async def test_background_work_of_the_run_before_changes_nothing(
        self, open_buffer: OpenBuffer, same_place: SamePlace
    ) -> None:
        """It prunes by no limit of its own, ends no lease, forgets no draw, and publishes no limits."""
        buffer = await open_buffer(unfit_groups=1, archive_groups=1, max_deliveries=1)
        await buffer.checkpoint(1)
        storage = same_place(buffer.storage, CODEC)
        storage.rules = rules_of()
        trainer = await open_buffer(storage=storage)
        await trainer.restore(1)
        await trainer.storage.thread.run(trainer.storage.sweeper.stop)  # its own work
        for number in range(3):
            await trainer.put(group(number, status="failed"), "math")
            await trainer.put(group(number), "math")
        await trainer.get(2, "math")
        leased = await trainer.lease_batch({"math": 1}, seconds=0.001, heartbeat=False)
        before = held_by(trainer)
        work = buffer.storage
        work.sweeper._history = 0
        for step in (work.sweeper.look_after_groups, work.sweeper.prune_history):
            with pytest.raises(FencedError):
                await work.thread.run(step)
        assert held_by(trainer) == before
        assert await trainer.storage._read(lambda tx: tx.run("SELECT count(*) FROM rb_batch")) == [(2,)]
        await leased.extend(LONG)

    async def test_leases_of_the_run_before_are_fenced(
        self, buffer: ReplayBuffer, open_buffer: OpenBuffer, same_place: SamePlace
    ) -> None:
        """They can't be acknowledged, extended or given back by those who still hold them."""
        await buffer.put(group(1), "math")
        await buffer.checkpoint(1)
        lease = await buffer.lease_batch({"math": 1}, seconds=LONG, heartbeat=False)
        trainer = await open_buffer(storage=same_place(buffer.storage, CODEC))
        await trainer.restore(1)
        for call in (
            lease.acknowledge(),
            lease.extend(),
            lease.give_back(),
            lease.finish(group(2), "math", replaces=lease.open),
        ):
            with pytest.raises(FencedError):
                await call
        assert ids(await trainer.get(9, "math")) == [1]

    async def test_those_who_wait_are_told(
        self, buffer: ReplayBuffer, open_buffer: OpenBuffer, same_place: SamePlace
    ) -> None:
        """Waits of the run before end with FencedError, long before their timeout."""
        await buffer.checkpoint(1)
        task = await waiting(buffer, buffer.wait_ready({"math": 1}, timeout=None))
        trainer = await open_buffer(storage=same_place(buffer.storage, CODEC))
        await trainer.restore(1)
        with pytest.raises(FencedError):
            await asyncio.wait_for(task, SOON)

    async def test_a_fenced_buffer_can_still_be_read(
        self, buffer: ReplayBuffer, open_buffer: OpenBuffer, same_place: SamePlace
    ) -> None:
        """Counting, finding, and the list of checkpoints."""
        await fill(buffer)
        await buffer.checkpoint(1)
        trainer = await open_buffer(storage=same_place(buffer.storage, CODEC))
        await trainer.restore(1)
        assert await everything(buffer) == await everything(trainer)
        assert await buffer.checkpoints() == await trainer.checkpoints()

    async def test_a_new_buffer_joins_the_restored_run(
        self, buffer: ReplayBuffer, open_buffer: OpenBuffer, same_place: SamePlace
    ) -> None:
        """Storages opened after the restore, and the one that restored; also after a second restore."""
        await buffer.checkpoint(1)
        for number in range(2):
            trainer = await open_buffer(storage=same_place(buffer.storage, CODEC))
            await trainer.restore(1)
            worker = await open_buffer(storage=same_place(buffer.storage, CODEC))
            await worker.put(group(number), "math")
            await trainer.put(group(number), "math")
            assert ids(await trainer.get(9, "math")) == [number, number]
