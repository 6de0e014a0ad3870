"""Laws of draws: policies, priorities, reuse and chance. A test that passes once passes always: seeds are fixed."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from itertools import permutations
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import NotReadyError
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements import ordering
from replaybuf.storage.values import StorageItem
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import SOON, Harness, OpenBuffer, chi_square, drawn, fill, found, group, ids


async def by_take_batch(buffer: ReplayBuffer, size: int, **options: Any) -> list[int]:
    batch, counts = await buffer.take_batch({"math": size}, **options)
    assert counts == {"math": len(batch["math"])}
    return ids(batch["math"])


class DrawingLaws(Harness):
    """`get`, `take_batch` and `sample` take the same keywords."""

    async def test_a_draw_waits_for_at_least_so_many(self, buffer: ReplayBuffer) -> None:
        """And takes as many as are there then, up to its size, of those that match."""
        await fill(buffer, 2)
        options = {"where": {"priority": 2.0}, "timeout": SOON, "at_least": 2}
        drawing = asyncio.create_task(by_take_batch(buffer, 4, **options))
        await fill(buffer, 2, first=5, priority=2.0)
        assert await drawing == [5, 6]
        await fill(buffer, 5, first=10, priority=2.0)
        assert await by_take_batch(buffer, 4, **options) == [10, 11, 12, 13]

    @pytest.mark.parametrize("timeout", [0, 0.01])
    async def test_a_draw_of_less_than_it_needs_takes_nothing(self, buffer: ReplayBuffer, timeout: float) -> None:
        """However short its timeout; needing nothing, it takes what is there at once, however long."""
        await fill(buffer, 2)
        with pytest.raises(
            NotReadyError, match=r"task math: 2 completed groups there, at least 3 needed.*; nothing was taken"
        ):
            await by_take_batch(buffer, 5, timeout=timeout, at_least=3)
        assert await by_take_batch(buffer, sys.maxsize, timeout=None, at_least=0) == [0, 1]
        assert await by_take_batch(buffer, 0, timeout=None, at_least=3) == []

    async def test_each_task_has_its_own_least(self, buffer: ReplayBuffer) -> None:
        """All are waited for, and drawn from at once; one that isn't named needs none."""
        await fill(buffer, 3)
        sizes = {"math": 4, "code": 4, "chess": 0}
        with pytest.raises(
            NotReadyError, match=r"^after 0 s: .* [Tt]ask code: 0 completed groups there, at least 1 needed"
        ):
            await buffer.take_batch(sizes, at_least=1)
        taking = asyncio.create_task(buffer.take_batch(sizes, at_least={"code": 2}, timeout=SOON))
        await fill(buffer, 2, "code")
        _, counts = await taking
        assert counts == {"math": 3, "code": 2, "chess": 0}

    async def test_readiness_can_be_narrowed(self, buffer: ReplayBuffer) -> None:
        """As a draw would be."""
        await fill(buffer, 2)
        await buffer.put(group(5), "math", priority=2.0)
        assert await buffer.is_ready({"math": 1}, where={"priority": 2.0})
        assert not await buffer.is_ready({"math": 2}, where={"priority": 2.0})
        await buffer.wait_ready({"math": 1}, where={"priority": 2.0}, timeout=0)
        with pytest.raises(NotReadyError):
            await buffer.wait_ready({"math": 2}, where={"priority": 2.0}, timeout=0)


RANDOM = pytest.mark.parametrize("policy", ["uniform", "prioritized"])


def odds(item: StorageItem) -> list[float]:
    """Return the probability and the weight of a draw."""
    assert item.probability is not None
    assert item.weight is not None
    return [item.probability, item.weight]


class WeightLaws(Harness):
    """The metadata of a `sample`, with `beta`."""

    async def test_prioritized_weights(self, open_buffer: OpenBuffer) -> None:
        """p is priority / sum of priorities, the weight (N p)^-beta, where N is the number before the draw."""
        buffer = await open_buffer("prioritized", seed=1, max_times_sampled=0)
        for priority in (0.5, 1.5, 2, 4):
            await fill(buffer, 1, priority=priority)
        for beta in (0, 0.4, 1):
            for item in (await buffer.sample({"math": 3}, beta=beta))["math"]:
                assert odds(item) == pytest.approx([item.priority / 8, (4 * item.priority / 8) ** -beta])

    @pytest.mark.parametrize("policy", ["fifo", "prioritized"])
    async def test_the_odds_are_among_the_groups_that_match(self, open_buffer: OpenBuffer, policy: str) -> None:
        buffer = await open_buffer(policy, seed=1, max_times_sampled=0)
        for priority in (1, 3, 9, 9):
            await fill(buffer, 1, priority=priority)
        for item in (await buffer.sample({"math": 4}, beta=1, where={"priority": {"$lt": 9}}))["math"]:
            chance = item.priority / 4 if policy == "prioritized" else 1 / 2
            assert odds(item) == pytest.approx([chance, 1 / (2 * chance)])

    @pytest.mark.parametrize("policy", ["fifo", "uniform"])
    async def test_odds_that_no_priority_changes_take_no_count_of_all_groups(
        self, open_buffer: OpenBuffer, policy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        buffer = await open_buffer(policy, seed=1, max_times_sampled=0)
        await fill(buffer, 4)
        statements: list[str] = []
        tuples = Transaction.tuples

        def noted(tx: Transaction, statement: str, /, **values: Any) -> Any:
            statements.append(statement)
            return tuples(tx, statement, **values)

        monkeypatch.setattr(Transaction, "tuples", noted)
        for _ in range(2):  # then PostgreSQL knows the lane, and draws in one statement
            for item in (await buffer.sample({"math": 3}, beta=1))["math"]:
                assert odds(item) == pytest.approx([1 / 4, 1])
        assert not [statement for statement in statements if "count(*)" in statement and "rb_group" in statement]

    async def test_groups_of_priority_zero_come_last(self, open_buffer: OpenBuffer) -> None:
        """No draw fails or is short because of them."""
        buffer = await open_buffer("prioritized", seed=1, max_times_sampled=0)
        idle = await fill(buffer, 4, priority=0)
        weighty = await fill(buffer, 2)
        for _ in range(5):
            batch = await drawn(buffer, 3)
            assert set(batch[:2]) == set(weighty)
            assert batch[2] in idle
        assert sorted(await drawn(buffer, 9)) == sorted(idle + weighty)

    async def test_extreme_priorities_lose_no_batch(self, open_buffer: OpenBuffer) -> None:
        """A weight beyond all floats is infinite."""
        buffer = await open_buffer("prioritized", seed=1)
        for priority in (1.7e308, 1.7e308, 1e-308):
            await fill(buffer, 1, priority=priority)
        items = (await buffer.sample({"math": 3}, beta=1))["math"]
        assert len(items) == 3
        assert all(item.weight is not None and item.weight > 0 for item in items)


#: What chi-square exceeds with a probability of 0.001, by degrees of freedom (tables, e.g. Abramowitz & Stegun 26.8).
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 7: 24.32, 9: 27.88, 11: 31.26}


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
        expected = [rounds * weights[first] * weights[second] / (1 - weights[first]) for first, second in possible]
        assert chi_square([pairs[pair] for pair in possible], expected) < CRITICAL[11]

    async def test_new_priorities_count_from_now_on(self, open_buffer: OpenBuffer) -> None:
        """update_priorities by uid, and update by a query; groups that aren't there are not counted."""
        buffer = await open_buffer("prioritized", seed=4, max_times_sampled=0)
        uids = await fill(buffer, 4)
        await tally(buffer, uids, 20)
        await buffer.update_priorities({uids[0]: 4, uids[1]: 3.0, uids[2]: 2})
        assert chi_square(await tally(buffer, uids, 300), [120, 90, 60, 30]) < CRITICAL[3]
        await buffer.update({"uid": {"$in": uids[:2]}}, priority=1.5)
        assert chi_square(await tally(buffer, uids, 300), [75, 75, 100, 50]) < CRITICAL[3]

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
            [status] = (before + Counter([Status.ABORTED])) - Counter([item.status for item in await found(buffer)])
            evicted[status] += 1
            if status != Status.ABORTED:
                await buffer.delete({"status": "aborted"})
                await buffer.put(group(1, status=status), "math")
        assert evicted[Status.COMPLETED] + evicted[Status.EXPIRED] > 100
        expected = (evicted[Status.COMPLETED] + evicted[Status.EXPIRED]) / 2
        pair = [evicted[Status.COMPLETED], evicted[Status.EXPIRED]]
        assert chi_square(pair, [expected] * 2) < CRITICAL[1]


class NarrowedChanceLaws(Harness):
    """Draws with a query, for which a database has two ways."""

    @pytest.mark.parametrize("is_sparse", [False, True])
    async def test_draws_with_a_where_are_as_random(
        self, open_buffer: OpenBuffer, is_sparse: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Among the groups that match, in the order of keys or afresh; and draws of all stay as random after them."""
        monkeypatch.setattr(ordering.Source, "is_sparse", lambda *_: is_sparse)
        buffer = await open_buffer("prioritized", seed=8, max_times_sampled=0)
        tagged = await fill(buffer, 4, tags={"a": 1})
        untagged = await fill(buffer, 4)
        narrowed = await tally(buffer, tagged, 100, where={"tags.a": 1})
        assert chi_square(narrowed, [25] * 4) < CRITICAL[3]
        counts = [0] * 8
        for _ in range(80):
            await drawn(buffer, 2, where={"tags.a": 1})
            [uid] = await drawn(buffer, 1)
            counts[(tagged + untagged).index(uid)] += 1
        assert chi_square(counts, [10] * 8) < CRITICAL[7]
