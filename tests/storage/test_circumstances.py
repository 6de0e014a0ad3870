"""What is known of a buffer when somebody waits, as it is read from both databases."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from replaybuf import NotReadyError, Status
from replaybuf.common.worker_name import working_as
from replaybuf.produce import TrainState, publish
from replaybuf.rules.circumstances import Circumstances
from replaybuf.rules.diagnosis import Reason
from replaybuf.storage.sql.inspection import wait_facts
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.wait_facts import read_circumstances
from replaybuf.storage.sql.statements.presence import record_minute
from tests.postgres import execute
from tests.produce.conftest import ledger_of
from tests.stores import TASK, build, fill, group, until


async def read(url: str) -> Circumstances:
    reader = open_reader(url)
    return await asyncio.to_thread(reader.read, lambda tx: read_circumstances(tx, "default"))


async def test_a_buffer_that_was_only_opened(shared_url: str) -> None:
    async with build(shared_url):
        pass
    state = await read(shared_url)
    assert (state.tallies, state.held, state.trainer, state.last_take, state.restored) == ({}, [], None, None, None)


async def test_who_holds_what_and_who_drew_last(shared_url: str) -> None:
    """The time of the last put is known, too, when no group is left in the buffer."""
    async with build(shared_url, worker="gen-1") as buffer:
        for number in range(3):
            await buffer.put(group(number), TASK)
        with working_as("trainer-2"):
            await buffer.lease_batch({TASK: 2}, seconds=600, heartbeat=False)
            await buffer.take_batch({TASK: 1})
        circumstances = await read(shared_url)
    [leased] = circumstances.held
    assert (leased.task_name, leased.status, leased.holder, leased.groups) == (TASK, Status.COMPLETED, "trainer-2", 2)
    assert 500 < leased.until - circumstances.now < 700
    assert circumstances.last_take is not None
    assert (circumstances.last_take.worker, circumstances.last_take.groups) == ("trainer-2", 1)
    assert abs(circumstances.now - circumstances.last_put[TASK, Status.COMPLETED]) < 60
    work_of = {worker.name: (worker.groups, worker.taken) for worker in (await read(shared_url)).workers}
    assert work_of == {"gen-1": (3, 0), "trainer-2": (0, 3)}


async def test_why_the_newest_group_failed(shared_url: str) -> None:
    async with build(shared_url) as buffer:
        for number in range(3):
            rollouts = group(number, status=Status.FAILED)
            rollouts[0].error_msg = f"error {number}"
            await buffer.put(rollouts, TASK)
    assert (await read(shared_url)).errors == {TASK: "error 2"}


async def test_the_trainer_and_the_last_restore(shared_url: str) -> None:
    async with build(shared_url, worker="trainer-1") as buffer:
        await buffer.put(group(1), TASK, model_step=1, current_train_step=3)
        await publish(buffer, TrainState(4, 3, finished=True))
        await buffer.checkpoint(4)
        await buffer.restore(4)
    circumstances = await read(shared_url)
    assert circumstances.trainer == TrainState(4, 3, finished=True)
    assert circumstances.steps == {TASK: 3}
    assert circumstances.restored is not None
    assert circumstances.restored.worker == "trainer-1"


async def test_a_worker_is_fenced_off_if_it_opened_the_buffer_before_the_restore(shared_url: str) -> None:
    """Not if it opened it afterwards, however short the time between."""
    late_buffer = build(shared_url, worker="gen-2")
    late_buffer.storage.begin()  # and joins the buffer with its first call
    async with build(shared_url, worker="trainer-1") as trainer, build(shared_url, worker="gen-1") as early_buffer:
        await early_buffer.put(group(0), TASK)
        await early_buffer.storage._run(early_buffer.storage.presence.flush)
        await trainer.checkpoint(1)
        await trainer.restore(1)
        async with late_buffer:
            await late_buffer.put(group(1), TASK)
        await trainer.take_batch({TASK: 1})
    execute(shared_url, "UPDATE rb_worker SET pid = 1 WHERE name <> 'trainer-1'")
    circumstances = await read(shared_url)
    assert {worker.name: circumstances.is_fenced(worker) for worker in circumstances.workers} == {
        "gen-1": True,
        "gen-2": False,
        "trainer-1": False,
    }


async def test_losses_are_those_of_the_last_hour(shared_url: str) -> None:
    """Those since the last record from before it; a younger buffer has none, also with one of a minute ago."""
    async with build(shared_url) as buffer:
        for number in range(9):
            await buffer.put(group(number, status=Status.FILTERED if number % 2 else Status.COMPLETED), TASK)
        now = int((await read(shared_url)).now)
        execute(shared_url, "DELETE FROM rb_history")
        note(shared_url, now - 240, completed=4, filtered=3)
        young = await read(shared_url)
        note(shared_url, now - 9000)
        note(shared_url, now - 4000, completed=2, filtered=1)
        circumstances = await read(shared_url)
    assert young.losses(TASK, lately=True)[Status.FILTERED] == young.losses(TASK)[Status.FILTERED] == (4, 9)
    assert (circumstances.earlier_at, circumstances.losses(TASK, lately=True)[Status.FILTERED]) == (now - 4000, (3, 6))
    assert circumstances.put(TASK, Status.COMPLETED, lately=True) == 3


def note(url: str, at: int, **put_of: int) -> None:
    """Record the puts of a task up to a time."""
    data = json.dumps({"tasks": {TASK: {"put_of": put_of}}})
    execute(url, f"INSERT INTO rb_history VALUES ('default', {at}, '{data}')")


async def test_what_is_put_and_not_kept_is_counted_as_its_workers(shared_url: str) -> None:
    """Groups that had expired, and unfit ones: the reason counts them among those that were put."""
    async with build(shared_url) as buffer:
        with working_as("gen-1"):
            for number in range(3):
                assert await buffer.put(group(number), TASK, **_STALE, expired_groups_retryable=False) is None
        with working_as("gen-2"):
            for number in range(2):
                await buffer.put(group(number, status=Status.FAILED), "code", keep_unfit=False)
        for task, says in (
            (TASK, "3 of the 3 groups put expired"),
            ("code", "2 of the 2 groups put failed. Mend what makes the errors"),
        ):
            with pytest.raises(NotReadyError, match=rf"\(0 of 2\): {says}"):
                await buffer.take_batch({task: 2}, timeout=0.05)
    workers = {row.name: (row.groups, row.failures) for row in (await read(shared_url)).workers if row.groups}
    assert workers == {"gen-1": (3, 0), "gen-2": (2, 2)}


_STALE: dict[str, Any] = {"model_step": 1, "current_train_step": 9, "stale_threshold": 2}


async def test_a_second_short_wait_has_the_same_reason(shared_url: str) -> None:
    """Though the store isn't asked again within a second."""
    async with build(shared_url, worker="gen-1") as buffer:
        await fill(buffer, 2)
        lease = await buffer.lease_batch({TASK: 2}, seconds=600, heartbeat=False)
        for _ in range(2):
            with pytest.raises(NotReadyError, match="all 2 completed groups are leased by gen-1"):
                await buffer.take_batch({TASK: 2}, timeout=0.01)
        await lease.give_back()


async def test_one_dead_producer_is_named_though_another_is_alive(shared_url: str) -> None:
    async with build(shared_url, worker="gen-1") as buffer:
        for name in ("gen-1", "gen-2"):
            with working_as(name):
                await buffer.put(group(1), TASK)
        await buffer.storage.flush()
        execute(shared_url, "UPDATE rb_worker SET seen_at = seen_at - 90 WHERE name = 'gen-2'")
        execute(shared_url, "UPDATE rb_group SET created_at = created_at - 95")
        execute(shared_url, "DELETE FROM rb_history")
        sentence = r"gen-2 went silent: last seen at .*; gen-1 is alive, the last group was put at"
        with working_as("trainer-1"), pytest.raises(NotReadyError, match=sentence) as error:
            await buffer.take_batch({TASK: 4}, timeout=0.05)
        assert error.value.diagnosis.reason == Reason.ABSENT


async def test_after_two_spurts_groups_are_leased_and_none_is_foretold(shared_url: str) -> None:
    """Whoever holds them: the minute was noted between the spurts."""
    async with build(shared_url, worker="gen-1") as buffer:
        await fill(buffer, 4)
        await buffer.storage.flush()
        execute(shared_url, "DELETE FROM rb_history")
        await buffer.storage._write(record_minute)
        await fill(buffer, 6, first=4)
        with working_as("trainer-2"):
            lease = await buffer.lease_batch({TASK: 8}, seconds=600, heartbeat=False)
        with pytest.raises(NotReadyError, match=r"\(2 of 4\): 8 more completed groups are leased by trainer-2"):
            await buffer.take_batch({TASK: 4}, timeout=0.05)
        await lease.give_back()
        with working_as("gen-1"):
            lease = await buffer.lease_batch({TASK: 8}, seconds=600, heartbeat=False)
        with pytest.raises(NotReadyError, match=r"\(2 of 4\): 8 more completed groups are leased by gen-1"):
            await buffer.take_batch({TASK: 4}, timeout=1.5)
        await lease.give_back()


@pytest.mark.parametrize("statement", ["_HELD", "_LAST_PUTS", "_FAILED_LANES"])
async def test_no_statement_looks_at_all_groups(statement: str, tmp_path: object) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    async with build(url):
        pass
    plan = open_reader(url).read(
        lambda tx: tx.rows(f"EXPLAIN QUERY PLAN {getattr(wait_facts, statement)}", buffer="default")
    )
    steps = [row["detail"] for row in plan if " g " in f"{row['detail']} "]
    assert steps
    assert all("SEARCH g USING" in step and "lane" in step for step in steps)


async def test_the_end_of_a_dataset_is_known_until_the_ledger_goes_on(shared_url: str) -> None:
    """With its numbers; also after a restore, which takes the ledger back."""
    async with build(shared_url, worker="gen-1") as buffer:
        ledger = ledger_of(buffer, [group(1), group(2), group(3)], TASK)
        [first] = await ledger.draw(1)
        await buffer.checkpoint(1)
        prompts = [first, *await ledger.draw(5)]
        assert await ledger.draw(1) == []
        for prompt in prompts[:2]:
            await prompt.finish(group(1))

        async def is_known() -> bool:
            return (await read(shared_url)).datasets == {TASK: 3}

        await until(is_known)
        text = "no prompt of math is left to draw: of the 3 drawn, 2 are finished, 1 in flight"
        with pytest.raises(NotReadyError, match=rf"\(2 of 4\): {text}"):
            await buffer.take_batch({TASK: 4}, timeout=0.05)
        await buffer.take_batch({TASK: 2})
        await prompts[2].finish(group(1))
        await buffer.take_batch({TASK: 1})
        with pytest.raises(
            NotReadyError, match=r"3 are finished, 0 in flight and 0 to be handed out again\. Ask for no more"
        ):
            await buffer.take_batch({TASK: 4}, at_least={TASK: 1}, timeout=0.05)
        longer = ledger_of(buffer, [group(1), group(2), group(3)], TASK, epochs=2)
        await longer.draw(1)
        assert (await read(shared_url)).datasets == {}
        await buffer.restore(1)
        assert (await read(shared_url)).datasets == {}
