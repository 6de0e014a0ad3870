"""Laws of damage: a payload that can't be decoded is set aside with the reason, never lost, and fails no batch."""

from __future__ import annotations

import asyncio

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import NotReadyError
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import NewGroup
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import (
    CODEC,
    OTHER_CODEC,
    Harness,
    Open,
    OpenBuffer,
    found,
    group,
    ids,
    payload_of,
)


class DamageLaws(Harness):
    """Bit rot, and payloads of another rollout type."""

    @pytest.fixture(params=["bit rot", "other type"])
    def kind(self, request: pytest.FixtureRequest) -> str:
        """The damage of the second of three groups."""
        return str(request.param)

    async def _damaged(self, kind: str, open_storage: Open) -> tuple[ReplayBuffer, list[int]]:
        """Return a buffer with three groups, whose second can't be decoded, and their uids."""
        storage = await open_storage()
        uids = [await storage.put(_new(0))]
        if kind == "bit rot":
            uids.append(await storage.put(_new(1)))
            uids.append(await storage.put(_new(2)))
            await self.damage(storage, uids[1])
        else:
            others = await open_storage(OTHER_CODEC)
            others.load_snapshot(storage.snapshot({}), {})
            fields = {"status": "completed", "of_another_type": 1}
            uids.append(await others.put(NewGroup("math", Status.COMPLETED, 0, [fields], 1.0)))
            storage = await open_storage()
            storage.load_snapshot(others.snapshot({}), {})
            uids.append(await storage.put(_new(2)))
        return ReplayBuffer(storage, CODEC.rollout_type), uids

    async def test_a_take_goes_on_with_the_next(self, kind: str, open_storage: Open) -> None:
        """The batch is as large as if the damaged group weren't there."""
        buffer, _ = await self._damaged(kind, open_storage)
        assert ids(await buffer.get(2, "math")) == [0, 2]

    async def test_a_damaged_group_is_set_aside(self, kind: str, open_storage: Open) -> None:
        """Its status is FAILED, `error` says why; identity, staleness and payload stay."""
        buffer, uids = await self._damaged(kind, open_storage)
        payload = await payload_of(buffer.storage, uids[1])
        await buffer.get(9, "math")
        [item] = await found(buffer)
        assert (item.uid, item.timestamp_id, item.status, item.item) == (uids[1], uids[1], Status.FAILED, [])
        assert item.error
        assert ("another rollout type" in item.error) is (kind == "other type")
        assert await buffer.count("math", "failed") == 1
        assert await payload_of(buffer.storage, uids[1]) == payload

    async def test_find_shows_a_damaged_group(self, kind: str, open_storage: Open) -> None:
        """With the reason in `error` and an empty item; reading changes nothing."""
        buffer, uids = await self._damaged(kind, open_storage)
        items = await found(buffer)
        assert [item.uid for item in items] == uids
        assert [item.error is None for item in items] == [True, False, True]
        assert [len(item.item) for item in items] == [1, 0, 1]
        assert await buffer.count("math", "completed") == 3

    async def test_all_or_nothing_counts_only_what_is_good(self, kind: str, open_storage: Open) -> None:
        """A batch that the damaged group would have completed isn't ready; nothing is taken."""
        buffer, _ = await self._damaged(kind, open_storage)
        with pytest.raises(NotReadyError, match="task math: 2 completed groups there, 3 needed"):
            await buffer.take_batch({"math": 3}, timeout=0.2)
        assert len(buffer) == 3
        batch, _ = await buffer.take_batch({"math": 2}, timeout=20)
        assert ids(batch["math"]) == [0, 2]

    async def test_concurrent_takers_pass_a_damaged_group(self, kind: str, open_storage: Open) -> None:
        """Several takers get the good groups once and set the bad one aside once."""
        buffer, _ = await self._damaged(kind, open_storage)
        batches = await asyncio.gather(*(buffer.get(1, "math") for _ in range(5)))
        assert sorted(i for batch in batches for i in ids(batch)) == [0, 2]
        assert await buffer.count_where({"status": "failed"}) == len(buffer) == 1

    async def test_a_group_set_aside_can_be_asked_for_again(self, kind: str, open_storage: Open) -> None:
        """It is set aside again each time it is taken, and can be deleted."""
        buffer, _ = await self._damaged(kind, open_storage)
        await buffer.get(9, "math")
        assert await buffer.get(9, "math", "failed") == []
        assert await buffer.update({"status": "failed"}, status="completed") == 1
        assert await buffer.get(9, "math") == []
        assert await buffer.count("math", "failed") == 1
        assert await buffer.delete({}) == 1

    async def test_a_refresh_passes_damaged_groups(self, kind: str, open_storage: Open) -> None:
        """It is for the others; the damaged one is neither lost nor expired."""
        buffer, uids = await self._damaged(kind, open_storage)
        assert await buffer.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=9) == {"math": 0}
        assert [item.uid for item in await found(buffer)] == uids

    async def test_snapshots_keep_damaged_groups(self, open_storage: Open, open_buffer: OpenBuffer) -> None:
        """A snapshot with a damaged group can be loaded, and the group is as damaged as before."""
        storage: SQLStorage = await open_storage()
        uid = await storage.put(_new(0))
        await self.damage(storage, uid)
        buffer = await open_buffer()
        buffer.storage.load_snapshot(storage.snapshot({}), {})
        assert await payload_of(buffer.storage, uid) == await payload_of(storage, uid)
        [item] = await found(buffer)
        assert item.error is not None


def _new(rollout_id: int) -> NewGroup:
    return NewGroup("math", Status.COMPLETED, 0, group(rollout_id), 1.0)
