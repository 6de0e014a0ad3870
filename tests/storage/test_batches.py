"""Who drew what: the batches that a database keeps of its draws, and what it keeps of each group for people."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import Table

from replaybuf import ReplayBuffer, RolloutState, Status
from replaybuf.common.worker_name import working_as
from replaybuf.errors import InputError
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema import tables
from replaybuf.storage.sql.schema.tables import batch
from replaybuf.storage.sql.tasks import sweeper
from tests.cancellation.conftest import end_background_work, take
from tests.contract.harness import group
from tests.postgres import meanwhile
from tests.sql_example import questions
from tests.stores import TASK, build, sweep_now

HOSTILE = "a'; DROP TABLE rb_batch; --$rb$ \\ %s :x \" $$ \u202e€"


@pytest_asyncio.fixture
async def buffer(shared_url: str) -> AsyncIterator[ReplayBuffer]:
    async with build(shared_url, worker="trainer", max_times_sampled=1, archive=100) as buffer:
        yield buffer


async def rows(buffer: ReplayBuffer, table: Table = batch) -> list[dict[str, Any]]:
    """The rows of a table, by its first column."""

    def read(tx: Transaction) -> list[dict[str, Any]]:
        names = [column.name for column in table.columns]
        tuples = tx.tuples(f"SELECT {', '.join(names)} FROM {table.name} ORDER BY 1")
        return [dict(zip(names, row, strict=True)) for row in tuples]

    return await buffer.storage._read(read)


async def members(buffer: ReplayBuffer, number: int) -> list[tuple[Any, ...]]:
    """Uid, task, worker, reward, staleness and oldest model step of the groups of a batch."""
    names = "uid, task_name, worker, reward, staleness, oldest_model_step"
    query = f"SELECT {names} FROM batch_groups WHERE batch = :batch ORDER BY uid"
    return [*await buffer.storage._read(lambda tx: [tuple(row) for row in tx.tuples(query, batch=number)])]


async def put(buffer: ReplayBuffer, number: int, worker: str, task: str = TASK, **options: Any) -> int:
    with working_as(worker):
        uid = await buffer.put(group(number, reward={"score": options.pop("reward", 1.0)}), task, **options)
    assert uid is not None
    return uid


async def test_a_take_is_kept_with_its_consumer_its_step_and_its_groups(buffer: ReplayBuffer) -> None:
    """By default the step is that of the last refresh; a lane that the process knows already makes no difference."""
    first = await put(buffer, 1, "gpu-1", model_step=3, current_train_step=5, reward=0.25)
    await put(buffer, 2, "gpu-2", "code", model_step=2, reward=0.75)
    await buffer.take_batch({TASK: 0})
    await buffer.refresh_staleness(task_stale_thresholds={TASK: None, "code": None}, current_train_step=7)
    await buffer.take_batch({TASK: 1, "code": 1})
    third = await put(buffer, 3, "gpu-1", model_step=6, reward=1.0)
    with working_as("evaluation"):
        await buffer.get(1, TASK, current_train_step=8)
    row, second_row = await rows(buffer)
    assert {name: row[name] for name in ("buffer", "epoch", "step", "status", "worker", "lease")} == {
        "buffer": "default", "epoch": 0, "step": 7, "status": "completed", "worker": "trainer", "lease": None,
    }  # fmt: skip
    assert [row[name] for name in ("groups", "settled", "reward", "min_reward", "max_reward")] == [
        2,
        2,
        0.5,
        0.25,
        0.75,
    ]
    assert (row["staleness"], row["max_staleness"], row["oldest_step"], row["newest_step"]) == (3.5, 4, 2, 3)
    assert (row["first_uid"], row["last_uid"]) == (first, first + 1)
    assert await members(buffer, row["id"]) == [
        (first, TASK, "gpu-1", 0.25, 3, 3),
        (first + 1, "code", "gpu-2", 0.75, 4, 2),
    ]
    assert (second_row["worker"], second_row["step"], second_row["first_uid"]) == ("evaluation", 8, third)


async def test_a_lease_is_settled_by_what_it_acknowledges(buffer: ReplayBuffer) -> None:
    uids = [await put(buffer, number, "gpu") for number in range(3)]
    lease = await buffer.lease_batch({TASK: 3}, current_train_step=9, heartbeat=False)
    [taken] = await rows(buffer)
    assert (taken["lease"], taken["groups"], taken["settled"], taken["step"]) == (lease.token, 3, 0, 9)
    holders = {row["uid"]: (row["holder"], row["worker"]) for row in await rows(buffer, tables.group)}
    assert holders == dict.fromkeys(uids, ("trainer", "gpu"))
    await lease.acknowledge(uids[:1])
    await lease.give_back(uids[1:2])
    assert [row["settled"] for row in await rows(buffer)] == [1]
    late_lease = buffer.adopt(lease.handle, heartbeat=False)
    await late_lease.acknowledge()
    await lease.acknowledge()  # what was acknowledged before is passed over
    assert [row["settled"] for row in await rows(buffer)] == [2]
    settled_rows = {row["uid"]: (row["holder"], row["trained_step"]) for row in await rows(buffer, tables.group)}
    assert settled_rows == {uids[0]: (None, 9), uids[1]: (None, None), uids[2]: (None, 9)}


async def steps_of(buffer: ReplayBuffer) -> list[tuple[int | None, int, int, list[int]]]:
    """The step, the groups and the settled groups of each batch, and the uids of its groups."""
    batches = await rows(buffer)
    return [
        (row["step"], row["groups"], row["settled"], [uid for uid, *_ in await members(buffer, row["id"])])
        for row in batches
    ]


async def test_groups_of_an_adopted_lease_are_of_the_step_of_their_own_acknowledgement(buffer: ReplayBuffer) -> None:
    """What was acknowledged before the lease was handed on stays of its step."""
    uids = [await put(buffer, number, "gpu-1") for number in range(4)]
    lease = await buffer.lease_batch({TASK: 4}, current_train_step=5)
    await lease.acknowledge(uids[:2])
    late_lease = buffer.adopt(lease.handle)
    await late_lease.acknowledge(uids[2:3], train_step=6)
    await buffer.adopt(late_lease.handle).acknowledge(train_step=7)
    assert sorted(await steps_of(buffer)) == [(5, 2, 2, uids[:2]), (6, 1, 1, uids[2:3]), (7, 1, 1, uids[3:])]


@pytest.mark.parametrize("named", [None, 100])
async def test_leased_groups_are_of_the_last_refresh_before_their_acknowledgement(
    buffer: ReplayBuffer, named: int | None
) -> None:
    """A worker of a DataLoader leases some steps ahead. What the draw itself named stays."""
    uids = [await put(buffer, number, "gpu-1") for number in range(2)]
    await buffer.refresh_staleness(task_stale_thresholds={TASK: None}, current_train_step=100)
    lease = await buffer.lease_batch({TASK: 2}, current_train_step=named)
    await buffer.refresh_staleness(task_stale_thresholds={TASK: None}, current_train_step=102)
    await lease.acknowledge()
    step = 102 if named is None else named
    assert await steps_of(buffer) == [(step, 2, 2, uids)]
    assert [item.trained_step async for item in buffer.find({"status": "archived"})] == [step, step]


async def test_groups_of_one_lease_may_be_of_several_steps(buffer: ReplayBuffer) -> None:
    """As of mini-batches with an optimizer's step each: every step has its own groups, and figures of these."""
    uids = [await put(buffer, number, "gpu-1", reward=number / 4) for number in range(5)]
    lease = await buffer.lease_batch({TASK: 5}, current_train_step=7)
    for first, step in ((0, 7), (2, 8)):
        await lease.acknowledge(uids[first : first + 2], train_step=step)
    assert await steps_of(buffer) == [(7, 3, 2, [*uids[:2], uids[4]]), (8, 2, 2, uids[2:4])]
    await lease.acknowledge(uids[4:], train_step=9)
    assert await steps_of(buffer) == [(7, 2, 2, uids[:2]), (8, 2, 2, uids[2:4]), (9, 1, 1, uids[4:])]
    first, second, third = await rows(buffer)
    assert [row["reward"] for row in (first, second, third)] == [0.125, 0.625, 1.0]
    assert (second["first_uid"], second["last_uid"], second["worker"]) == (uids[2], uids[3], "trainer")
    assert first["taken_at"] == third["taken_at"]


@pytest.mark.parametrize("seconds", [None, pytest.param(60.0, marks=pytest.mark.long)])
async def test_a_draw_that_nobody_received_is_not_kept(buffer: ReplayBuffer, seconds: float | None) -> None:
    uids = [await put(buffer, number, "gpu") for number in range(2)]
    await buffer.get(1, TASK, current_train_step=1)
    undo = await take(buffer, 1, seconds, worker=HOSTILE, train_step=2)
    assert [row["worker"] for row in await rows(buffer)] == ["trainer", HOSTILE]
    await buffer.annotate({uids[1]: {"kl": 0.5}})
    await undo()
    assert await rows(buffer, tables.annotation) == []
    assert [row["first_uid"] for row in await rows(buffer)] == uids[:1]
    [group_row] = [row for row in await rows(buffer, tables.group) if row["uid"] == uids[1]]
    assert (group_row["trained_step"], group_row["holder"], group_row["times_sampled"]) == (None, None, 0)


async def test_the_number_of_a_draw_is_not_given_again(buffer: ReplayBuffer) -> None:
    """Versions of a draw that was undone, or whose record was pruned, may have it for a while."""
    await put(buffer, 0, "gpu")
    undo = await take(buffer, 1)
    [undone] = await rows(buffer)
    await undo()
    await buffer.get(1, TASK)
    [drawn] = await rows(buffer)
    assert drawn["id"] > undone["id"]


async def test_names_and_rewards_may_be_anything(buffer: ReplayBuffer) -> None:
    for number, reward in enumerate([math.nan, math.inf, -math.inf, 0.5]):
        await put(buffer, number, HOSTILE, reward=reward)
    with working_as(HOSTILE):
        lease = await buffer.lease_batch({TASK: 4}, heartbeat=False)
    [taken] = await rows(buffer)
    assert taken["worker"] == HOSTILE
    assert [member[2] for member in await members(buffer, taken["id"])] == [HOSTILE] * 4
    assert (taken["reward"], taken["min_reward"], taken["max_reward"]) == (0.5, 0.5, 0.5)
    assert {row["holder"] for row in await rows(buffer, tables.group)} == {HOSTILE}
    await lease.acknowledge()


async def test_the_last_ones_are_kept(shared_url: str) -> None:
    async with build(shared_url, history=2) as buffer, build(shared_url, name="other", history=2) as other:
        for number in range(5):
            await put(buffer, number, "gpu")
            await buffer.get(1, TASK)
        await put(other, 0, "gpu")
        await other.get(1, TASK)
        await buffer.storage.open()
        await buffer.storage.thread.run(lambda: buffer.storage.transactions.write(sweep_now))
        await buffer.storage.thread.run(buffer.storage.sweeper.prune_history)
        assert [row["buffer"] for row in await rows(buffer)] == ["default"] * 2 + ["other"]
        assert len(await rows(buffer, tables.past)) == 3  # what is kept of their groups


@pytest.mark.parametrize("is_closing", [False, True])
async def test_many_are_removed_in_short_times_between_which_other_work_is_done(
    shared_url: str, monkeypatch: pytest.MonkeyPatch, is_closing: bool
) -> None:
    monkeypatch.setattr(sweeper, "_BATCHES", 2)
    monkeypatch.setattr(sweeper, "_PRUNING_SECONDS", 3600.0 if is_closing else -1.0)
    async with build(shared_url, history=1) as buffer:
        await buffer.storage.open()
        await end_background_work(buffer)
        if not is_closing:
            buffer.storage.sweeper._stopping.clear()
        for number in range(6):
            await put(buffer, number, "gpu")
            await buffer.get(1, TASK)
        for left in (4, 2, 1, 1):
            await buffer.storage.thread.run(buffer.storage.sweeper.prune_history)
            assert len(await rows(buffer)) == left


async def test_what_is_beyond_is_looked_for_after_each_percent(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks reads as many rows as are kept."""
    looked: list[int] = []
    beyond = sweeper.last_beyond
    monkeypatch.setattr(sweeper, "last_beyond", lambda tx, keep: looked.append(keep) or beyond(tx, keep))
    async with build(shared_url, history=200) as buffer:
        for _ in range(4):
            await put(buffer, 0, "gpu")
            await buffer.get(1, TASK)
            await buffer.storage.thread.run(buffer.storage.sweeper.prune_history)
    assert looked == [200, 200]


async def test_a_group_says_what_it_replaced(shared_url: str) -> None:
    """Whether or not a checkpoint has it."""
    async with build(shared_url) as buffer:
        first = await put(buffer, 0, "gpu", current_train_step=3)
        second = await put(buffer, 1, "gpu", replaces=[first])
        [row] = await rows(buffer, tables.group)
        assert (row["uid"], json.loads(row["made_from"]), row["put_step"]) == (second, [first], None)
        lease = await buffer.lease_batch({TASK: 1}, heartbeat=False)
        with working_as("editor"):
            third = await lease.save(group(2), TASK, replaces=[second], current_train_step=4)
        [row] = await rows(buffer, tables.group)
        assert json.loads(row["made_from"]) == [second]
        columns = ("uid", "worker", "holder", "put_step")
        assert tuple(row[name] for name in columns) == (third, "editor", "editor", 4)


async def test_a_lease_that_lapses_settles_nothing(buffer: ReplayBuffer) -> None:
    await put(buffer, 0, "gpu")
    await buffer.lease_batch({TASK: 1}, seconds=0.01, heartbeat=False)
    await buffer.wait_ready({TASK: 1}, timeout=20)
    assert [row["settled"] for row in await rows(buffer)] == [0]
    assert [row["holder"] for row in await rows(buffer, tables.group)] == [None]


async def trained_twice(buffer: ReplayBuffer) -> list[tuple[int, int]]:
    """What the question answers, of which docs/sql.md has the statement."""
    [question] = [asked for asked in questions() if "trained on twice" in asked.text]

    def ask(tx: Transaction) -> list[tuple[int, int]]:
        return [(uid, times) for uid, times in tx.tuples(question.sqlite)]

    assert question.sqlite == question.postgresql
    return await buffer.storage._read(ask)


async def test_only_what_was_trained_on_twice_is_said_to_have_been(shared_url: str) -> None:
    """Not what a restore undid or a lease gave back, and no prompt that is generated again."""
    async with build(shared_url, worker="trainer", max_times_sampled=2) as buffer:
        uids = [await put(buffer, number, "gpu-1") for number in range(4)]
        await buffer.put([prompt_of(9)], TASK)
        await buffer.checkpoint(4)
        for _ in range(2):
            async with buffer.lease_batch({TASK: 1}, group_status=Status.INIT) as prompts:
                await prompts.give_back()
            async with buffer.lease_batch({TASK: 4}, current_train_step=5) as lease:
                await lease.give_back()
        async with buffer.lease_batch({TASK: 4}, current_train_step=5):
            pass
        await buffer.restore(4)
        assert await trained_twice(buffer) == []
        async with buffer.lease_batch({TASK: 4}, current_train_step=5):
            pass
        assert await trained_twice(buffer) == []
        async with buffer.lease_batch({TASK: 4}, current_train_step=6):
            pass
        assert await trained_twice(buffer) == [(uid, 2) for uid in uids]


def prompt_of(number: int) -> RolloutState:
    return RolloutState(message=[{"role": "user", "content": str(number)}], status=Status.INIT)


@pytest.mark.parametrize(
    "change",
    ["DELETE FROM rb_batch WHERE id = 1", "UPDATE rb_past SET draw = 2 WHERE draw = 1"],
    ids=["pruned", "moved"],
)
async def test_annotations_are_of_the_draw_as_it_is_when_they_are_written(lent_database: str, change: str) -> None:
    """They wait for another transaction that deletes it, or moves its groups into the batch of another step."""
    async with build(lent_database) as buffer:
        uids = [await put(buffer, number, "gpu") for number in range(2)]
        for _ in uids:
            await buffer.get(1, TASK)
        is_pruned = change.startswith("DELETE")
        async with meanwhile(lent_database, change, buffer.annotate({uids[0]: {"kl": 0.5}})) as [annotating]:
            refusal = pytest.raises(InputError, match="no draw of group 1 is recorded")
            with refusal if is_pruned else nullcontext():
                await annotating
        annotated = [(row["draw"], row["uid"]) for row in await rows(buffer, tables.annotation)]
        assert annotated == ([] if is_pruned else [(2, uids[0])])
