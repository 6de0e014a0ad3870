"""What the one SELECT of a draw has to get right on each database: any order, and groups that aren't as they were."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBuffer, Status
from replaybuf.errors import DecodeError
from replaybuf.rules.policies import OrderTerm, ReplayPolicy
from replaybuf.rules.query import FIELDS, parse
from replaybuf.storage.sql.statements import ordering
from replaybuf.storage.sql.statements.past import keep, sweep
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.sql.tasks.transactions import Transactions
from replaybuf.storage.values import StorageItem
from tests.cancellation.conftest import take
from tests.contract.waiting import conserved
from tests.postgres import execute
from tests.stores import TASK, build, fill, group, numbers_of, rows, take_all

ORDERS = [(field, place % 4 == 0) for place, field in enumerate(FIELDS) if place % 2 == 0]
#: More than SQLite reads within the query.
LONG = "4 " * 20_000


def by(field: str, *, descending: bool) -> ReplayPolicy:
    """A policy that orders by a field."""
    order = (OrderTerm(field, descending), OrderTerm("timestamp_id"))
    policy: type[ReplayPolicy] = type("ByField", (ReplayPolicy,), {"name": "by_field", "order": order})
    return policy()


async def draws(url: str, field: str, *, descending: bool) -> list[list[int]]:
    """The numbers of some draws in this order, from six groups, one of them large."""
    policy, name = by(field, descending=descending), f"{field} {descending}"
    async with build(url, name=name, policy=policy, max_times_sampled=0) as buffer:
        for number in range(6):
            rollouts = group(number, text=LONG if number == 2 else "4")
            rollouts[0].reward = None if number % 2 else float(number % 3)
            steps = {"model_step": number % 4, "current_train_step": 5} if number % 3 else {}
            await buffer.put(rollouts, TASK, priority=number % 2, tags={"low": number < 3}, **steps)
        batches = [await buffer.get(size, TASK) for size in (1, 4, 6)]
        batches.append(await buffer.get(2, TASK, where={"tags.low": True, "task_name": TASK, "status": "completed"}))
    return [numbers_of(groups) for groups in batches]


async def test_draws_in_any_order_are_those_of_the_memory(shared_url: str) -> None:
    for field, descending in ORDERS:
        expected = await draws("memory://", field, descending=descending)
        assert await draws(shared_url, field, descending=descending) == expected, (field, descending)


async def test_the_most_stale_are_those_of_the_oldest_weights(shared_url: str) -> None:
    """Whatever staleness they were given, or have before the next refresh; groups without model steps come last."""
    async with build(shared_url, policy="staleness") as buffer:
        unknown = group(0)
        unknown[0].seq_staleness = 9
        await buffer.put(unknown, TASK)
        for number, (step, at) in enumerate(((3, 5), (1, 5), (2, 9), (4, None)), 1):
            await buffer.put(group(number), TASK, model_step=step, current_train_step=at)
        assert numbers_of(await buffer.get(5, TASK)) == [2, 3, 1, 4, 0]


DAMAGES = [
    "DELETE FROM rb_payload WHERE uid = ?",
    "UPDATE rb_payload SET data = zeroblob(length(data)) WHERE uid = ?",
    "UPDATE rb_payload SET data = substr(data, 1, length(data) - 1) WHERE uid = ?",
    "UPDATE rb_payload SET data = 'a text' WHERE uid = ?",
    "UPDATE rb_payload SET data = 1.5 WHERE uid = ?",
    "UPDATE rb_group SET bytes = 'many' WHERE uid = ?",
    "UPDATE rb_group SET reward = 'much' WHERE uid = ?",
    "UPDATE rb_group SET pinned_staleness = 'stale' WHERE uid = ?",
    "UPDATE rb_group SET marks = '{\"oldest' WHERE uid = ?",
    "UPDATE rb_group SET tags = 'no JSON' WHERE uid = ?",
]


@pytest.mark.parametrize("text", ["4", LONG], ids=["small", "large"])
async def test_a_group_that_is_damaged_is_set_aside_and_the_next_drawn(tmp_path: Path, text: str) -> None:
    """Whatever a SQLite file holds in its place; a group that can be read all the same is drawn."""
    async with build(f"sqlite:///{tmp_path}/run.db") as buffer:
        for damage in DAMAGES:
            task = damage[:40]
            uids = [await buffer.put(group(number, text=text), task) for number in range(3)]
            with closing(sqlite3.connect(tmp_path / "run.db", isolation_level=None)) as other:
                assert other.execute(damage, (uids[1],)).rowcount == 1
            readable = "bytes" in damage or "reward" in damage
            assert numbers_of(await buffer.get(2, task)) == ([0, 1] if readable else [0, 2]), damage
            assert await buffer.count(task, "failed") == (0 if readable else 1), damage
            if "rb_payload" in damage:
                [failed] = [item async for item in buffer.find({"task_name": task, "status": "failed"})]
                assert failed.error, damage
                assert not failed.item, damage


@pytest.mark.parametrize("marks", ['{"due"', '["due"]', '{"oldest": "due"}'])
async def test_an_update_sets_the_status_of_a_group_that_is_damaged_and_the_next_draw_sets_it_aside(
    tmp_path: Path, marks: str
) -> None:
    async with build(f"sqlite:///{tmp_path}/run.db") as buffer:
        uids = [await buffer.put(group(number, status=Status.EXPIRED), TASK) for number in range(2)]
        execute(tmp_path / "run.db", f"UPDATE rb_group SET marks = '{marks}' WHERE uid = {uids[0]}")
        assert await buffer.update({"task_name": TASK}, status=Status.COMPLETED) == 2
        assert numbers_of(await buffer.get(1, TASK)) == [1]
        assert await buffer.count(TASK, "failed") == 1


# Draws of groups that can't be given to anyone, also while others change the store


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_a_group_that_is_replaced_before_it_can_be_set_aside_is_counted_once(
    shared_url: str, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """As REPLACED: it isn't there to be set aside, and the newer one is drawn."""
    decode, uids = GroupRow.decode, []

    async def put_again() -> None:
        async with build(shared_url, max_times_sampled=times) as other:
            await other.put(group(2), TASK, key="a")

    def decode_later(row: GroupRow, codec: Any, deferral: Any = None) -> StorageItem:
        uids.append(row.uid)
        if len(uids) > 1:
            return decode(row, codec, deferral)
        asyncio.run(put_again())
        raise DecodeError("another rollout type")

    async with build(shared_url, max_times_sampled=times) as buffer:
        await buffer.put(group(1), TASK, key="a")
        monkeypatch.setattr(GroupRow, "decode", decode_later)
        assert numbers_of(await buffer.get(1, TASK)) == [2]
        await conserved(buffer.storage)
        totals = (await buffer.metrics())["tasks"][TASK]
    assert (totals["replaced"], totals["set_aside"], totals["put"]) == (1, 0, 2)


async def test_very_many_groups_are_kept_for_a_checkpoint(shared_url: str) -> None:
    """More than a statement may have parameters."""
    async with build(shared_url) as buffer:
        uid = await buffer.put(group(1), TASK)
        await buffer.checkpoint(1)
        await buffer.storage._write(lambda tx: keep(tx, range(uid, uid + 300_000)))
        await buffer.restore(1)
        assert numbers_of(await buffer.get(1, TASK)) == [1]


# Draws and puts that take one statement from what a process remembers of lanes (PostgreSQL)


async def test_the_id_of_a_lane_that_is_gone_is_of_no_use(lent_database: str) -> None:
    """A server that took over may lack the last transactions, and gives their lanes' ids again."""
    async with build(lent_database) as buffer, build(lent_database, name="other") as other:
        for number in range(3):  # so that both puts and takes know the lane
            await buffer.put(group(number), TASK)
        assert len(await buffer.get(1, TASK)) == 1
        execute(lent_database, "TRUNCATE rb_lane, rb_group, rb_payload, rb_tally, rb_past RESTART IDENTITY")
        await other.put(group(10), "code")
        await buffer.put(group(4), TASK)
        assert await take_all(buffer) == [4]
        assert await take_all(other, "code") == [10]


# Groups that leave are told once, also when a transaction is run again or several callers ask at once


async def test_a_transaction_that_is_run_again_tells_once(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a lost connection: what the first run has read counts for nothing."""
    write = Transactions.write

    async def twice(self: Transactions, function: Any, **options: Any) -> Any:
        def run_twice(tx: Any) -> Any:
            tx.run("SAVEPOINT first")
            function(tx)
            tx.run("ROLLBACK TO SAVEPOINT first")
            return function(tx)

        return await write(self, run_twice, **options)

    async with build(shared_url, capacity=2) as buffer:
        for number in range(2):
            await buffer.put(group(number), TASK, model_step=number, current_train_step=2)
        monkeypatch.setattr(Transactions, "write", twice)
        replaced: list[StorageItem] = []
        await buffer.put(group(2), TASK, model_step=9, current_train_step=10, dropped=replaced)
        refreshed: list[StorageItem] = []
        await buffer.refresh_staleness(
            task_stale_thresholds={TASK: 5},
            expired_groups_retryable_by_task={TASK: False},
            current_train_step=10,
            dropped=refreshed,
        )
    assert numbers_of([item.item for item in replaced]) == [0]
    assert numbers_of([item.item for item in refreshed]) == [1]


_KEYS = "SELECT uid, random_key FROM rb_group ORDER BY uid"


async def test_a_random_draw_of_few_that_match_leaves_the_keys_of_the_others(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it draws the same ones after a restore."""
    monkeypatch.setattr(ordering, "_SAMPLE", 20)
    async with build(shared_url, policy="uniform", seed=3) as buffer:
        tagged = [await buffer.put(group(number), TASK, tags={"rare": 1}) for number in range(6)]
        await fill(buffer, 60, first=6)
        tagged += [await buffer.put(group(number), TASK, tags={"rare": 1}) for number in range(66, 72)]
        await buffer.checkpoint(1)
        before = await rows(buffer, _KEYS)
        uids = await draw_rare(buffer) + await draw_rare(buffer)
        assert len(set(uids)) == 4
        assert set(uids) < set(tagged)
        assert await rows(buffer, _KEYS) == [row for row in before if row[0] not in uids]
        await buffer.restore(1)
        assert await draw_rare(buffer) + await draw_rare(buffer) == uids


async def draw_rare(buffer: ReplayBuffer) -> list[int]:
    return [item.uid for item in (await buffer.sample({TASK: 2}, where={"tags.rare": 1}))[TASK]]


async def test_a_group_that_came_back_after_its_payload_was_swept_is_no_finished_one(shared_url: str) -> None:
    """Nobody knows then whether it has all its responses: a requeue has it generated again."""
    async with build(shared_url, max_deliveries=1) as buffer:
        await buffer.put(group(1) + group(2, status=Status.ABORTED), TASK)
        storage = buffer.storage
        undo = await take(buffer, 1, status=Status.ABORTED)
        assert await storage.thread.run(lambda: storage.engine.write(lambda tx: sweep(tx, 1e12, 10))) == 1
        await undo()
        lease = await buffer.lease_batch({TASK: 1}, group_status=Status.ABORTED)
        await lease.give_back(failed="the worker crashed")
        assert await storage.requeue(parse({"status": "failed"})) == {Status.ABORTED: 1}
