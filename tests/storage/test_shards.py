"""Random draws: the first one, and those in shards."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from replaybuf import ConfigError
from replaybuf.errors import LockedError
from replaybuf.rules.policies import PRIORITIZED, UNIFORM, Race
from replaybuf.storage.sql.engine.transaction import Hook, Transaction, installed
from replaybuf.storage.sql.statements import ordering
from replaybuf.storage.sql.statements.upkeep import clear_what_is_left, is_anything_left
from replaybuf.storage.sql.tasks import sweeper
from tests.cancellation.conftest import end_background_work
from tests.stores import TASK, build, fill, group, rows, take_all, until, until_equal

_SIZES = "SELECT shard, sum(amount)::int FROM rb_tally WHERE name = 'size' GROUP BY shard"
_LEFT = "SELECT count(DISTINCT shard) FROM rb_tally WHERE shard NOT IN (SELECT pid FROM pg_stat_activity)"


async def test_shards_of_connections_that_are_gone_are_merged_and_others_stay(lent_database: str) -> None:
    """Who adds to the row of a shard would wait for a merge of it."""
    connection = await asyncpg.connect(lent_database)
    async with build(lent_database) as buffer:
        await buffer.put(group(0), TASK)
        await end_background_work(buffer)
        for number in (1, 2):
            async with build(lent_database) as other:
                await other.put(group(number), TASK)
        await until_equal(2, lambda: connection.fetchval(_LEFT))  # a server's process ends after the connection
        alive = {shard for shard, _ in await connection.fetch(_SIZES)} & {
            pid for (pid,) in await connection.fetch("SELECT pid FROM pg_stat_activity")
        }
        storage = buffer.storage
        for is_left in (True, False):
            assert await storage._read(is_anything_left) is is_left
            await storage.thread.run(lambda: storage.engine.write(clear_what_is_left))
        sizes = dict(map(tuple, await connection.fetch(_SIZES)))
        assert sizes == {0: 2, **dict.fromkeys(alive, 1)}
        assert len(alive) == 1
        assert len(buffer) == 3
    await connection.close()


# How often processes look for what there is to do in the background


class Rounds(Hook):
    """Counts the polls of an open buffer for what is due, and the rounds of its background work."""

    def __init__(self) -> None:
        self.polls = self.rounds = 0

    def statement(self, sql: str, values: Any, many: bool) -> None:
        self.polls += "rb_past" in sql and "leased_until" in sql

    async def beat(self) -> None:
        self.rounds += 1

    async def wait(self, count: int) -> None:
        end = self.rounds + count
        await until(lambda: self.rounds >= end)


async def test_an_idle_process_polls_when_a_lease_ends(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its polls by the clock."""
    monkeypatch.setattr(sweeper, "_POLL_SECONDS", 3600.0)
    monkeypatch.setattr(sweeper, "_IDLE_SECONDS", 0.01)

    async with build(shared_url) as buffer:
        await fill(buffer, 2)
        rounds = Rounds()
        monkeypatch.setattr(buffer.storage.presence, "beat", rounds.beat)
        await rounds.wait(5)
        with installed(rounds):
            await rounds.wait(30)
            assert rounds.polls == 0
            await buffer.lease_batch({TASK: 1}, seconds=0.3, heartbeat=False)
            monkeypatch.setattr(buffer.storage.sweeper, "_poll_at", 0.0)
            await until_equal(2, lambda: buffer.count(TASK, "completed"))
            assert 2 <= rounds.polls <= 4


async def test_the_background_work_begins_after_a_pause_which_closing_ends(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the first calls it would need another connection."""
    monkeypatch.setattr(sweeper, "_IDLE_SECONDS", 3600.0)
    monkeypatch.setattr(sweeper._random, "uniform", lambda lower, upper: upper)
    rounds = Rounds()
    async with build(shared_url) as buffer:
        await buffer.storage.open()  # which creates the tables
    with installed(rounds):
        async with build(shared_url) as buffer, asyncio.timeout(60):
            for number in range(5):
                await fill(buffer, 1, number)
    assert rounds.polls == 0


async def test_what_failed_is_tried_again_though_nothing_has_changed(
    shared_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sweeper, "_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(sweeper, "_POLL_SECONDS", 0.01)
    real, tries = sweeper.prune, list[int]()

    def prune(tx: Transaction, now: float, limit: int) -> int:
        tries.append(limit)
        if len(tries) == 1:
            raise LockedError("a lock was not free")
        return real(tx, now, limit)

    monkeypatch.setattr(sweeper, "prune", prune)
    async with build(shared_url, archive=1) as buffer:
        await fill(buffer, 2)
        await buffer.get(2, TASK)
        await until_equal(1, lambda: buffer.count(TASK, "archived"))
    assert "sweeping failed and will be tried again" in caplog.text


GROUPS = 60
_KEYS = "SELECT coalesce(ticket, uid) AS ticket, priority, random_key FROM rb_group ORDER BY uid"


@pytest.mark.parametrize(("policy", "key"), [("uniform", UNIFORM), ("prioritized", PRIORITIZED)])
async def test_the_first_random_draw_gives_keys_to_groups_of_another_config(
    shared_url: str, monkeypatch: pytest.MonkeyPatch, policy: str, key: str
) -> None:
    """All of them are drawn as if they had had their keys from the put on, and so are leased groups that come back."""
    monkeypatch.setattr(ordering, "_CHUNK", 7)
    async with build(shared_url) as holder, build(shared_url, policy=policy, seed=5) as buffer:
        await fill(holder, GROUPS)
        lease = await holder.lease_batch({TASK: 2})
        assert len(await buffer.get(3, TASK)) == 3
        await lease.give_back()
        await fill(holder, 5, first=1000)
        remaining = await rows(buffer, _KEYS)
        assert len(remaining) == GROUPS + 5 - 3
        keys = Race(key, 5).draw_keys([(ticket, priority) for ticket, priority, _ in remaining])
        same_count = sum(row[2] == wanted for row, wanted in zip(remaining, keys, strict=True))
        assert same_count == GROUPS - 3 - 2  # the others came in at a later time of the race
        assert len(await take_all(buffer)) == GROUPS + 5 - 3


@pytest.mark.parametrize("options", [{"policy": "prioritized", "seed": 5}, {"policy": "uniform", "seed": 6}])
async def test_another_random_policy_or_seed_is_refused(shared_url: str, options: dict[str, object]) -> None:
    """With a sentence that names both; without a seed the buffer's is used, and other orders are each caller's."""
    async with build(shared_url, policy="uniform", seed=5) as first:
        await fill(first, 3)
        assert len(await first.get(1, TASK)) == 1
        async with build(shared_url, **options) as other:
            with pytest.raises(ConfigError, match="uniform_key with the seed 5"):
                await other.get(1, TASK)
        for policy in ("uniform", "lifo"):
            async with build(shared_url, policy=policy) as other:
                assert len(await other.get(1, TASK)) == 1


def test_two_random_orders_in_one_config_are_refused() -> None:
    with pytest.raises(ConfigError, match="one random order"):
        build("sqlite://", policy="uniform", remover="prioritized")
