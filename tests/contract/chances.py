"""Laws of chance: with what probability groups are drawn and evicted.

Seeds are fixed, so that a test that passes once passes always.
"""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.storage.sql.statements import ordering
from replaybuf.values.rollouts.rollout import Status
from tests.contract.filling import numbers
from tests.contract.harness import Harness, OpenBuffer, chi_square, drawn, fill, found, group, ids

#: What chi-square exceeds with a probability of 0.001, by degrees of freedom (tables, e.g. Abramowitz & Stegun 26.8).
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 7: 24.32, 9: 27.88, 11: 31.26}

RANDOM = pytest.mark.parametrize("policy", ["uniform", "prioritized"])


async def tally(buffer: ReplayBuffer, uids: list[int], times: int, **options: Any) -> list[int]:
    """Return how often each group comes when one group is drawn this many times."""
    counts = Counter([uid for _ in range(times) for uid in await drawn(buffer, 1, **options)])
    assert set(counts) <= set(uids)
    return [counts[uid] for uid in uids]


class ChanceLaws(Harness):
    """Draws and evictions by uniform and prioritized policies."""

    @RANDOM
    @pytest.mark.parametrize("size", [1, 3])
    async def test_draws_are_uniform(self, open_buffer: OpenBuffer, policy: str, size: int) -> None:
        """Of equal priorities every group is as likely, also in draws of several, as often as they are repeated."""
        buffer = await open_buffer(policy, seed=5, max_times_sampled=0)
        uids = await fill(buffer, 10)
        rounds = 150
        counts = Counter([uid for _ in range(rounds) for uid in await drawn(buffer, size)])
        expected = rounds * size / 10
        # Groups of one draw exclude each other, which makes the statistic smaller by this factor.
        statistic = chi_square([counts[uid] for uid in uids], [expected] * 10) * 9 / (10 - size)
        assert statistic < CRITICAL[9]

    async def test_prioritized_draws_by_priority(self, open_buffer: OpenBuffer) -> None:
        """The probability of a group is its share of the priorities."""
        buffer = await open_buffer("prioritized", seed=1, max_times_sampled=0)
        uids = [uid for priority in (1, 2, 3, 4) for uid in await fill(buffer, 1, priority=priority)]
        assert chi_square(await tally(buffer, uids, 300), [30, 60, 90, 120]) < CRITICAL[3]

    async def test_prioritized_draws_without_replacement(self, open_buffer: OpenBuffer) -> None:
        """Of several groups of one draw each is drawn by priority from those that are left."""
        buffer = await open_buffer("prioritized", seed=2, max_times_sampled=0)
        weights = {}
        for priority in (1, 2, 3, 4):
            weights[(await fill(buffer, 1, priority=priority))[0]] = priority / 10
        rounds = 300
        pairs = Counter([tuple(await drawn(buffer, 2)) for _ in range(rounds)])
        possible = list(permutations(weights, 2))
        expected = [rounds * weights[one] * weights[two] / (1 - weights[one]) for one, two in possible]
        assert chi_square([pairs[pair] for pair in possible], expected) < CRITICAL[11]

    @RANDOM
    async def test_draws_that_consume_are_as_random(self, open_buffer: OpenBuffer, policy: str) -> None:
        """The first group that is taken of many tasks is any of them, with its probability."""
        buffer = await open_buffer(policy, seed=9)
        tasks = [f"task {number}" for number in range(100)]
        for task in tasks:
            for number in (1, 2, 3):
                await buffer.put(group(number), task, priority=number)
        firsts = Counter([ids(await buffer.get(1, task))[0] for task in tasks])
        expected = [100 / 3] * 3 if policy == "uniform" else [100 / 6, 200 / 6, 300 / 6]
        assert chi_square([firsts[1], firsts[2], firsts[3]], expected) < CRITICAL[2]

    async def test_new_priorities_count_from_now_on(self, open_buffer: OpenBuffer) -> None:
        """update_priorities by uid, and update by a query; groups that aren't there are not counted."""
        buffer = await open_buffer("prioritized", seed=4, max_times_sampled=0)
        uids = await fill(buffer, 4)
        await tally(buffer, uids, 20)
        await buffer.update_priorities({uids[0]: 4, uids[1]: 3.0, uids[2]: 2})
        assert chi_square(await tally(buffer, uids, 300), [120, 90, 60, 30]) < CRITICAL[3]
        await buffer.update({"uid": {"$in": uids[:2]}}, priority=1.5)
        assert chi_square(await tally(buffer, uids, 300), [75, 75, 100, 50]) < CRITICAL[3]

    @RANDOM
    async def test_draws_after_evictions_are_as_random(self, open_buffer: OpenBuffer, policy: str) -> None:
        """What is left, and what came last, has its probability."""
        buffer = await open_buffer(policy, seed=6, max_times_sampled=0, capacity=5)
        await fill(buffer, 4)
        for _ in range(10):
            await drawn(buffer, 2)
        uids = (await fill(buffer, 9))[-5:]
        assert chi_square(await tally(buffer, uids, 250), [50] * 5) < CRITICAL[4]

    @RANDOM
    @pytest.mark.parametrize("is_sparse", [False, True])
    async def test_draws_with_a_where_are_as_random(
        self, open_buffer: OpenBuffer, policy: str, is_sparse: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Among the groups that match, in the order of keys or afresh; and draws of all stay as random after them."""
        monkeypatch.setattr(ordering.Source, "is_sparse", lambda *_: is_sparse)
        buffer = await open_buffer(policy, seed=8, max_times_sampled=0)
        tagged = await fill(buffer, 4, tags={"a": 1})
        others = await fill(buffer, 4)
        narrowed = await tally(buffer, tagged, 200, where={"tags.a": 1})
        assert chi_square(narrowed, [50] * 4) < CRITICAL[3]
        counts = [0] * 8
        for _ in range(120):
            await drawn(buffer, 2, where={"tags.a": 1})
            [one] = await drawn(buffer, 1)
            counts[(tagged + others).index(one)] += 1
        assert chi_square(counts, [15] * 8) < CRITICAL[7]

    @pytest.mark.parametrize("times", [3, 0])
    async def test_reused_groups_are_as_likely_as_new_ones(self, open_buffer: OpenBuffer, times: int) -> None:
        """In a window of fresh groups, the share of draws that go to groups drawn before is what chance says."""
        buffer = await open_buffer("uniform", seed=7, max_times_sampled=times)
        again = new = 0
        for round_number in range(120):
            task = f"task {round_number}"
            uids = await fill(buffer, 2, task)
            first = await drawn(buffer, 1, task)
            later = await drawn(buffer, 1, task)
            assert {*first, *later} <= set(uids)
            again, new = again + (later == first), new + (later != first)
        assert chi_square([again, new], [60, 60]) < CRITICAL[1]

    async def test_groups_of_priority_zero_are_uniform_among_themselves(self, open_buffer: OpenBuffer) -> None:
        """Whatever is drawn before them."""
        buffer = await open_buffer("prioritized", seed=1, max_times_sampled=0)
        idle = await fill(buffer, 4, priority=0)
        counts: Counter[int] = Counter()
        await fill(buffer, 2)
        for _ in range(200):
            batch = await drawn(buffer, 3)
            counts[batch[2]] += 1
        assert chi_square([counts[uid] for uid in idle], [50] * 4) < CRITICAL[3]

    async def test_random_eviction_is_uniform(self, open_buffer: OpenBuffer) -> None:
        """Each group is as likely to leave, the newcomer included, whatever its status."""
        buffer = await open_buffer(remover="uniform", capacity=3, seed=2)
        left: Counter[int] = Counter()
        for round_number in range(80):
            task = f"task {round_number}"
            for number in range(5):
                await buffer.put(group(number, status=Status.EXPIRED if number % 2 else Status.COMPLETED), task)
            left.update(await numbers(buffer, {"task_name": task}))
        # Groups of one task exclude each other, which makes the statistic smaller by this factor.
        assert chi_square([left[number] for number in range(5)], [48] * 5) * 4 / 2 < CRITICAL[4]

    async def test_random_eviction_is_uniform_when_it_goes_on(self, open_buffer: OpenBuffer) -> None:
        """Groups of the status that was hit before are no likelier to be hit again."""
        buffer = await open_buffer(remover="uniform", capacity=8, seed=3)
        evicted: Counter[Status] = Counter()
        await fill(buffer, 4)
        for number in range(4):
            await buffer.put(group(number, status=Status.EXPIRED), "math")
        for _ in range(150):
            before = Counter([item.status for item in await found(buffer)])
            await buffer.put(group(9, status=Status.ABORTED), "math")
            [lost] = (before + Counter([Status.ABORTED])) - Counter([item.status for item in await found(buffer)])
            evicted[lost] += 1
            if lost != Status.ABORTED:
                await buffer.delete({"status": "aborted"})
                await buffer.put(group(1, status=lost), "math")
        assert evicted[Status.COMPLETED] + evicted[Status.EXPIRED] > 100
        expected = (evicted[Status.COMPLETED] + evicted[Status.EXPIRED]) / 2
        pair = [evicted[Status.COMPLETED], evicted[Status.EXPIRED]]
        assert chi_square(pair, [expected] * 2) < CRITICAL[1]
