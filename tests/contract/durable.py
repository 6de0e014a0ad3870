"""Laws of storages that outlive their process, or that several processes share: data, rules, fences, damage."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import FencedError, NotReadyError
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import NewGroup
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import (
    CODEC,
    OTHER_CODEC,
    SOON,
    Harness,
    Open,
    OpenBuffer,
    drawn,
    everything,
    fill,
    found,
    group,
    ids,
    payload_of,
    plain,
    rules_of,
    total,
)
from tests.contract.leasing import LONG, lease_of
from tests.contract.persistence import fill_in_every_way
from tests.contract.waiting import CHANGES, waiting
from tests.reference.snapshots import held_by, load_snapshot, snapshot_of
from tests.stores import until

SamePlace = Callable[[SQLStorage, Codec], SQLStorage]
Another = Callable[[ReplayBuffer], Awaitable[ReplayBuffer]]


class InOnePlace(Harness):
    """Several buffers over the same data."""

    @pytest.fixture
    def same_place(self) -> SamePlace:
        """A function that returns a further storage over the data of the one given, with its rules, for a codec."""
        raise NotImplementedError("give a fixture same_place; tests.contract says how")

    @pytest.fixture
    def another(self, open_buffer: OpenBuffer, same_place: SamePlace) -> Another:
        """A coroutine function that opens a further buffer over the data of the one given."""
        return lambda buffer: open_buffer(storage=same_place(buffer.storage, CODEC))


async def reopened(buffer: ReplayBuffer, another: Another) -> ReplayBuffer:
    await buffer.close()
    return await another(buffer)


async def restored(buffer: ReplayBuffer, another: Another) -> ReplayBuffer:
    """Return a further buffer, through which step 1 was restored."""
    trainer = await another(buffer)
    await trainer.restore(1)
    return trainer


class DurableLaws(InOnePlace):
    """Committed groups are there for all that open the same place."""

    async def test_a_put_that_returned_is_seen_by_others(self, buffer: ReplayBuffer, another: Another) -> None:
        """At once, and in both directions."""
        other = await another(buffer)
        await buffer.put(group(1), "math")
        assert len(other) == 1
        await other.put(group(2), "math")
        assert ids(await buffer.get(9, "math")) == [1, 2]
        assert len(other) == 0

    async def test_a_put_elsewhere_wakes_those_who_wait(self, buffer: ReplayBuffer, another: Another) -> None:
        """A wait here sees a put there."""
        other = await another(buffer)
        task = await waiting(buffer, buffer.take_batch({"math": 1}, timeout=SOON * 2))
        await other.put(group(1), "math")
        batch, _ = await asyncio.wait_for(task, SOON)
        assert ids(batch["math"]) == [1]

    async def test_groups_of_another_type_wait_for_theirs(
        self, open_storage: Open, open_buffer: OpenBuffer, same_place: SamePlace
    ) -> None:
        """Set aside by a reader of the wrong rollout type, they are there for one of the right type."""
        storage = await open_storage(OTHER_CODEC)
        fields = {"status": "completed", "of_another_type": 1}
        await storage.put(NewGroup("math", Status.COMPLETED, 0, [fields], 1.0))
        other_type = await open_buffer(storage=same_place(storage, CODEC))
        assert await other_type.get(1, "math") == []
        right = ReplayBuffer(storage)
        assert plain(await right.get(1, "math", "failed")) == plain([[fields]])


class DurableRulesLaws(InOnePlace):
    """Storages over the same place go on where the others are."""

    async def test_several_storages_share_the_race(self, open_buffer: OpenBuffer, another: Another) -> None:
        """Draws through any, also one that is opened again, are the same as draws through one."""
        another_buffer = await open_buffer("prioritized", seed=2, max_times_sampled=3)
        first = await open_buffer("prioritized", seed=2, max_times_sampled=3)
        second = await another(first)
        drawn_here, drawn_there = [], []
        for turn in range(6):
            for buffer in (another_buffer, first):
                for number in range(4):
                    await buffer.put(group(number), "math", priority=1 + number % 3)
            drawn_here += [await drawn(another_buffer, 2), await drawn(another_buffer, 1 + turn)]
            drawn_there += [await drawn(first, 2), await drawn(second, 1 + turn)]
            if turn % 2:
                second = await reopened(second, another)
        assert drawn_there == drawn_here

    async def test_two_readers_never_get_the_same_draw(self, open_buffer: OpenBuffer, another: Another) -> None:
        """Trinity-RFT's readers of SQLite get the same rows; here groups are drawn as often as the limit says."""
        buffer = await open_buffer("uniform", seed=1, max_times_sampled=2)
        readers = [await another(buffer) for _ in range(2)]
        uids = await fill(buffer, 12)
        calls = [drawn(reader, 3) for reader in (buffer, *readers) for _ in range(4)]
        received = Counter([uid for batch in await asyncio.gather(*calls) for uid in batch])
        while batch := await drawn(buffer, 12):
            received.update(batch)
        assert received == dict.fromkeys(uids, 2)
        assert len(buffer) == 0

    async def test_the_capacity_is_that_of_the_place(self, open_buffer: OpenBuffer, another: Another) -> None:
        """Puts through several storages at once never exceed it."""
        buffer = await open_buffer(capacity=4)
        other = await another(buffer)
        await asyncio.gather(*((buffer, other)[n % 2].put(group(n), "math") for n in range(16)))
        assert len(buffer) == len(other) == 4
        assert await total(buffer, "evicted") == 12

    async def test_a_take_elsewhere_makes_room(self, open_buffer: OpenBuffer, another: Another) -> None:
        """A put that waits here sees a take there."""
        buffer = await open_buffer(capacity=1, on_full="block")
        other = await another(buffer)
        await fill(buffer, 1)
        task = asyncio.create_task(buffer.put(group(1), "math", timeout=SOON * 2))
        await asyncio.sleep(0.05)
        assert ids(await other.get(1, "math")) == [0]
        await asyncio.wait_for(task, SOON)

    async def test_leases_survive_reopening(self, open_buffer: OpenBuffer, another: Another) -> None:
        """Groups stay hidden from every storage over the place; when their lease ends, they come back."""
        buffer = await open_buffer()
        uids = await fill(buffer, 3)
        await lease_of(buffer, 1)
        await lease_of(buffer, 1, 0.5)
        reopened_buffer = await reopened(buffer, another)
        await until(lambda: reopened_buffer.is_ready({"math": 2}), SOON)
        assert [(item.uid, item.deliveries) for item in await found(reopened_buffer)] == [(uids[1], 1), (uids[2], 0)]

    async def test_a_heartbeat_ends_with_its_buffer(self, open_buffer: OpenBuffer, another: Another) -> None:
        """A consumer that closed its buffer holds its groups no longer than the lease's time."""
        buffer = await open_buffer()
        await fill(buffer, 1)
        lease = await buffer.lease_batch({"math": 1}, seconds=0.5)
        reopened_buffer = await reopened(buffer, another)
        await reopened_buffer.wait_ready({"math": 1}, timeout=SOON)
        assert lease.open


class FenceLaws(InOnePlace):
    """Restores, as other storages see them."""

    async def test_those_of_the_run_before_can_change_nothing(self, buffer: ReplayBuffer, another: Another) -> None:
        """FencedError that names the step, at every attempt; the restored buffer stays as it is."""
        await fill_in_every_way(buffer)
        await buffer.checkpoint(1)
        trainer = await restored(buffer, another)
        before = held_by(trainer)
        for attempt in CHANGES.values():
            with pytest.raises(FencedError, match=r"step 1 at .*End this process"):
                await attempt(buffer)
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
        for step in (work.sweeper.maintain_groups, work.sweeper.prune_history):
            with pytest.raises(FencedError):
                await work.thread.run(step)
        assert held_by(trainer) == before
        assert await trainer.storage._read(lambda tx: tx.run("SELECT count(*) FROM rb_batch")) == [(2,)]
        await leased.extend(LONG)

    async def test_leases_of_the_run_before_are_fenced(self, buffer: ReplayBuffer, another: Another) -> None:
        """They can't be acknowledged, extended or given back by those who still hold them."""
        await buffer.put(group(1), "math")
        await buffer.checkpoint(1)
        lease = await lease_of(buffer)
        trainer = await restored(buffer, another)
        for call in (
            lease.acknowledge(),
            lease.extend(),
            lease.give_back(),
            lease.finish(group(2), "math", replaces=lease.open),
        ):
            with pytest.raises(FencedError):
                await call
        assert ids(await trainer.get(9, "math")) == [1]

    async def test_those_who_wait_are_told(self, buffer: ReplayBuffer, another: Another) -> None:
        """Waits of the run before end with FencedError, long before their timeout."""
        await buffer.checkpoint(1)
        task = await waiting(buffer, buffer.wait_ready({"math": 1}, timeout=None))
        await restored(buffer, another)
        with pytest.raises(FencedError):
            await asyncio.wait_for(task, SOON)

    async def test_a_fenced_buffer_can_still_be_read(self, buffer: ReplayBuffer, another: Another) -> None:
        """Counting, finding, and the list of checkpoints."""
        await fill_in_every_way(buffer)
        await buffer.checkpoint(1)
        trainer = await restored(buffer, another)
        assert await everything(buffer) == await everything(trainer)
        assert (len(buffer), await buffer.dropped("math")) == (len(trainer), 1)
        assert await buffer.checkpoints() == await trainer.checkpoints()

    async def test_a_new_buffer_joins_the_restored_run(self, buffer: ReplayBuffer, another: Another) -> None:
        """Storages opened after the restore, and the one that restored; also after a second restore."""
        await buffer.checkpoint(1)
        for number in range(2):
            trainer = await restored(buffer, another)
            worker = await another(buffer)
            await worker.put(group(number), "math")
            await trainer.put(group(number), "math")
            assert ids(await trainer.get(9, "math")) == [number, number]


#: The damage of the second of three groups.
KINDS = pytest.mark.parametrize("kind", ["bit rot", "other group", "other type"])


class DamageLaws(Harness):
    """Bit rot, payloads of another rollout type, and a payload that is another group's."""

    async def _damaged(self, kind: str, open_storage: Open) -> tuple[ReplayBuffer, list[int]]:
        """Return a buffer with three groups, whose second can't be decoded, and their uids."""
        storage = await open_storage()
        uids = [await storage.put(_new(0))]
        if kind != "other type":
            uids.append(await storage.put(_new(1)))
            uids.append(await storage.put(_new(2)))
        if kind == "bit rot":
            await self.damage(storage, uids[1])
        elif kind == "other group":
            await self.spoil(storage, uids[1], CODEC.encode(group(1, response="of another group" * 9)))
        else:
            other_storage = await open_storage(OTHER_CODEC)
            load_snapshot(ReplayBuffer(other_storage), snapshot_of(ReplayBuffer(storage)))
            fields = {"status": "completed", "of_another_type": 1}
            uids.append(await other_storage.put(NewGroup("math", Status.COMPLETED, 0, [fields], 1.0)))
            storage = await open_storage()
            load_snapshot(ReplayBuffer(storage), snapshot_of(ReplayBuffer(other_storage)))
            uids.append(await storage.put(_new(2)))
        return ReplayBuffer(storage), uids

    @KINDS
    async def test_reads_and_refreshes_pass_a_damaged_group(self, kind: str, open_storage: Open) -> None:
        """`find` has the reason in `error` and an empty item; a refresh neither loses nor expires it."""
        buffer, uids = await self._damaged(kind, open_storage)
        assert await buffer.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=9) == {"math": 0}
        items = await found(buffer)
        assert [item.uid for item in items] == uids
        assert [item.error is None for item in items] == [True, False, True]
        assert [len(item.item) for item in items] == [1, 0, 1]
        assert await buffer.count("math", "completed") == 3

    @KINDS
    async def test_a_take_sets_a_damaged_group_aside_and_goes_on_with_the_next(
        self, kind: str, open_storage: Open
    ) -> None:
        """Its status is FAILED, `error` says why; identity and payload stay. It can be asked for again, in vain."""
        buffer, uids = await self._damaged(kind, open_storage)
        payload = await payload_of(buffer.storage, uids[1])
        assert ids(await buffer.get(2, "math")) == [0, 2]
        for _ in range(2):
            [item] = await found(buffer)
            assert (item.uid, item.timestamp_id, item.status, item.item) == (uids[1], uids[1], Status.FAILED, [])
            assert item.error
            assert ("another rollout type" in item.error) is (kind == "other type")
            assert await payload_of(buffer.storage, uids[1]) == payload
            assert await buffer.get(9, "math", "failed") == []
            assert await buffer.update({"status": "failed"}, status="completed") == 1
            assert await buffer.get(9, "math") == []
        assert await buffer.delete({}) == 1

    async def test_all_or_nothing_counts_only_what_is_good(self, open_storage: Open) -> None:
        """A batch that the damaged group would have completed isn't ready; nothing is taken."""
        buffer, _ = await self._damaged("bit rot", open_storage)
        with pytest.raises(NotReadyError, match="task math: 2 completed groups there, 3 needed"):
            await buffer.take_batch({"math": 3}, timeout=0.2)
        assert len(buffer) == 3
        batch, _ = await buffer.take_batch({"math": 2}, timeout=20)
        assert ids(batch["math"]) == [0, 2]

    async def test_concurrent_takers_pass_a_damaged_group(self, open_storage: Open) -> None:
        """Several takers get the good groups once and set the bad one aside once."""
        buffer, _ = await self._damaged("bit rot", open_storage)
        batches = await asyncio.gather(*(buffer.get(1, "math") for _ in range(5)))
        assert sorted(i for batch in batches for i in ids(batch)) == [0, 2]
        assert await buffer.count_where({"status": "failed"}) == len(buffer) == 1


def _new(rollout_id: int) -> NewGroup:
    return NewGroup("math", Status.COMPLETED, 0, group(rollout_id), 1.0)
