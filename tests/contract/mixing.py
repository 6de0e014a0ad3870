"""Laws of mixed draws: a share of the batch was drawn before."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

import pytest

from replaybuf.buffer.drawing import DrawRequest
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import NotReadyError
from replaybuf.storage.sql.tasks.delivery import Drawing
from replaybuf.values.rollouts.rollout import Status
from tests.contract.drawing import CRITICAL
from tests.contract.harness import SOON, Harness, OpenBuffer, chi_square, drawn, fill, found, total

HALF: dict[str, Any] = {"mix": {"replay": 0.5}}
KEPT, ARCHIVED = {"max_times_sampled": 3}, {"archive_groups": 100}
WITH_OLD_ONES = pytest.mark.parametrize("limits", [KEPT, ARCHIVED], ids=["kept", "archived"])


async def state(buffer: ReplayBuffer) -> dict[int, tuple[str, int]]:
    """Return the status and the number of draws of each group, by uid."""
    return {item.uid: (str(item.status), item.times_sampled) for item in await found(buffer)}


class MixLaws(Harness):
    """`mix` is an option of all draws."""

    @pytest.mark.parametrize("policy", ["staleness", "prioritized"])
    @WITH_OLD_ONES
    async def test_a_share_was_drawn_before(self, open_buffer: OpenBuffer, policy: str, limits: dict[str, Any]) -> None:
        """The rest wasn't; archived groups stay archived; fresh ones fill up where too few were drawn before."""
        buffer = await open_buffer(policy, seed=3, **limits)
        uids = await fill(buffer, 12)
        old_uids = set(await drawn(buffer, 3))
        for _ in range(2):
            sampled = (await buffer.sample({"math": 4}, **HALF))["math"]
            redrawn = {item.uid for item in sampled if item.times_sampled > 1}
            assert len(redrawn) == 2
            assert redrawn <= old_uids
            old_uids |= {item.uid for item in sampled}
        now = await state(buffer)
        assert {uid for uid, (_, times) in now.items() if not times} == set(uids) - old_uids
        assert await total(buffer, "sampled_again") == 4
        if limits is ARCHIVED:
            assert {now[uid][0] for uid in old_uids} == {"archived"}
            assert await total(buffer, "taken") == len(old_uids)
        mixed = {"mix": {"replay": 0.9}}
        await buffer.delete({"times_sampled": {"$gt": 0}})
        assert len(await drawn(buffer, 4, **mixed)) == 4

    @WITH_OLD_ONES
    async def test_only_fresh_groups_are_waited_for(self, open_buffer: OpenBuffer, limits: dict[str, Any]) -> None:
        """`at_least` counts them alone; NotReadyError takes nothing."""
        buffer = await open_buffer(**limits)
        old_uids = await fill(buffer, 4)
        await drawn(buffer, 4)
        await fill(buffer, 1)
        before = await state(buffer)
        for options in (HALF | {"timeout": 0.01}, HALF | {"at_least": 2}):
            with pytest.raises(NotReadyError, match="1 completed group there, at least 2 needed"):
                await drawn(buffer, 4, **options)
        assert await state(buffer) == before
        drawing = asyncio.create_task(drawn(buffer, 4, timeout=SOON, **HALF))
        fresh = await fill(buffer, 1)
        assert set(await drawing) == {*old_uids[:2], fresh[0] - 1, fresh[0]}

    async def test_each_task_has_its_own_share(self, open_buffer: OpenBuffer) -> None:
        """A task that isn't named is all fresh; a query narrows both parts."""
        buffer = await open_buffer(max_times_sampled=0)
        for task in ("math", "code"):
            await fill(buffer, 2, task)
            await buffer.take_batch({task: 2})
            await fill(buffer, 4, task, tags={"a": 1})
        mix = {"replay": {"math": 0.75}}
        batch = await buffer.sample({"math": 4, "code": 4}, mix=mix)
        assert [item.times_sampled for items in batch.values() for item in items] == [1, 1, 2, 2, 1, 1, 1, 1]
        batch = await buffer.sample({"math": 4}, mix=mix, where={"tags.a": 1})
        assert [item.times_sampled for item in batch["math"]] == [1, 1, 2, 2]

    async def test_the_rate_limit_counts_all_of_it(self, open_buffer: OpenBuffer) -> None:
        """What it leaves is first for fresh groups."""
        buffer = await open_buffer(samples_per_insert=1.0, error_buffer=(-2, 8), **ARCHIVED)
        await fill(buffer, 4)
        await drawn(buffer, 2)
        assert Counter([times for _, times in (await state(buffer)).values()]) == {1: 2, 0: 2}
        assert len(await drawn(buffer, 4, **HALF)) == 4
        assert len(await drawn(buffer, 4, **HALF)) == 0
        await fill(buffer, 2)
        sampled = (await buffer.sample({"math": 4}, timeout=SOON, **HALF))["math"]
        assert [item.times_sampled for item in sampled] == [1, 1]

    @WITH_OLD_ONES
    async def test_a_mixed_lease(self, open_buffer: OpenBuffer, limits: dict[str, Any]) -> None:
        """What is given back, or never delivered, is as before; what is acknowledged, as after a draw."""
        buffer = await open_buffer("uniform", seed=1, **limits)
        await fill(buffer, 6)
        await drawn(buffer, 2)
        before, tallies_before = await state(buffer), await buffer.tallies()
        lease = await buffer.lease_batch({"math": 4}, **HALF)
        assert len(await state(buffer)) == 2
        await lease.give_back()
        assert await state(buffer) == before
        request = DrawRequest.checked({"math": 4}, "completed", statuses=buffer.rollout_type.statuses, **HALF)
        drawing = Drawing(buffer.storage.draws, request.draw)
        thread = buffer.storage.thread
        batch = await thread.run(drawing.run)
        assert batch is not None
        await thread.run(partial(drawing.undo, batch))
        assert await state(buffer) == before
        came = {name: n for name, n in (await buffer.tallies()).items() if n and name[2] != "returned"}
        assert came == {name: n for name, n in tallies_before.items() if n}
        async with buffer.lease_batch({"math": 4}, **HALF) as lease:
            pass
        after = await state(buffer)
        assert sorted(after[item.uid][1] for item in lease.items["math"]) == [1, 1, 2, 2]
        assert {status for status, times in after.values() if times} == {
            "archived" if limits is ARCHIVED else "completed"
        }

    async def test_a_restore_brings_the_old_ones_back(self, open_buffer: OpenBuffer) -> None:
        """And the same draws after it."""
        buffer = await open_buffer("uniform", seed=1, **ARCHIVED)
        await fill(buffer, 9)
        await drawn(buffer, 4)
        await buffer.checkpoint(1)
        before, first = await state(buffer), await drawn(buffer, 4, **HALF)
        await buffer.restore(1)
        assert await state(buffer) == before
        assert await drawn(buffer, 4, **HALF) == first

    @pytest.mark.parametrize("policy", ["fifo", "prioritized"])
    async def test_weights_of_a_mixed_batch(self, open_buffer: OpenBuffer, policy: str) -> None:
        """p is the share of the stratum in the batch times the probability in it, N the groups of all strata."""
        buffer = await open_buffer(policy, seed=1, **ARCHIVED)
        await fill(buffer, 2, priority=5)
        await drawn(buffer, 2)
        await fill(buffer, 6, priority=1)
        await fill(buffer, 2, priority=2)
        for item in (await buffer.sample({"math": 4}, beta=1, mix={"replay": 0.25}))["math"]:
            chance = (item.priority / 10 if policy == "prioritized" else 1 / 8) if item.times_sampled == 1 else 1 / 2
            assert item.probability == pytest.approx(chance * (3 / 4 if item.times_sampled == 1 else 1 / 4))
            assert item.weight == pytest.approx(1 / (10 * item.probability))

    @WITH_OLD_ONES
    async def test_old_ones_are_as_random(self, open_buffer: OpenBuffer, limits: dict[str, Any]) -> None:
        """Each group is as likely as the others of its part, and weighted means are those of the whole buffer."""
        buffer = await open_buffer(
            "uniform", seed=5, **(limits | {"max_times_sampled": 1 if limits is ARCHIVED else 0})
        )
        old_uids = await fill(buffer, 6)
        await drawn(buffer, 6)
        redraws: Counter[int] = Counter()
        estimate, rounds = 0.0, 60
        for _ in range(rounds):
            [first, *_] = await fill(buffer, 3)
            sampled = (await buffer.sample({"math": 3}, beta=1, mix={"replay": 0.667}))["math"]
            assert [item.times_sampled > 1 for item in sampled] == [False, True, True]
            redraws.update(item.uid for item in sampled if item.times_sampled > 1)
            estimate += sum(item.weight or 0.0 for item in sampled if item.uid in old_uids) / 3
            await buffer.delete({"uid": {"$gte": first}})
        # Two of one draw exclude each other: the statistic is smaller by this factor.
        assert chi_square([redraws[uid] for uid in old_uids], [rounds / 3] * 6) * 5 / 4 < CRITICAL[5]
        assert estimate / rounds == pytest.approx(6 / 9)

    async def test_a_lease_does_not_prolong_the_retention(self, open_buffer: OpenBuffer) -> None:
        """Groups that are drawn from the archive leave it in the order in which they came."""
        buffer = await open_buffer(archive_groups=2)
        uids = await fill(buffer, 2)
        await drawn(buffer, 2)
        async with buffer.lease_batch({"math": 1}, mix={"replay": 1}) as lease:
            assert [item.uid for item in lease.items["math"]] == uids[:1]
        uids += await fill(buffer, 1)
        await drawn(buffer, 1)
        await buffer.storage.thread.run(buffer.storage.sweeper.maintain_groups)
        assert sorted(await state(buffer)) == uids[1:]
        assert {item.status for item in await found(buffer)} == {Status.ARCHIVED}
