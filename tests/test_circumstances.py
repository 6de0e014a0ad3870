"""What is known of a buffer when somebody waits, as it is read from both databases."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing

import pytest

from replaybuf import Status
from replaybuf.produce import TrainState, publish
from replaybuf.rules.circumstances import Circumstances
from replaybuf.storage.sql.inspection import circumstances
from replaybuf.storage.sql.inspection.circumstances import read_circumstances
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.worker_name import working_as
from tests.postgres import execute
from tests.stores import TASK, build, group


async def read(url: str) -> Circumstances:
    reader = open_reader(url)
    return await asyncio.to_thread(reader.look, lambda look: read_circumstances(look, "default", ()))


def change(url: str, statement: str) -> None:
    if url.startswith("postgresql"):
        execute(url, statement)
        return
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)) as connection, connection:
        connection.execute(statement)


async def test_a_buffer_that_was_only_opened(shared_url: str) -> None:
    async with build(shared_url):
        pass
    about = await read(shared_url)
    assert (about.tallies, about.held, about.trainer, about.last_take, about.restored) == ({}, [], None, None, None)


async def test_who_holds_what_and_who_drew_last(shared_url: str) -> None:
    """The time of the last put is known, too, when no group is left in the buffer."""
    async with build(shared_url, worker="gen-1") as buffer:
        for number in range(3):
            await buffer.put(group(number), TASK)
        with working_as("trainer-2"):
            await buffer.lease_batch({TASK: 2}, seconds=600, heartbeat=False)
            await buffer.take_batch({TASK: 1})
        about = await read(shared_url)
    [held] = about.held
    assert (held.task_name, held.status, held.holder, held.groups) == (TASK, Status.COMPLETED, "trainer-2", 2)
    assert 500 < held.until - about.now < 700
    assert about.last_take is not None
    assert (about.last_take.worker, about.last_take.groups) == ("trainer-2", 1)
    assert abs(about.now - about.last_put[TASK]) < 60
    done = {one.name: (one.groups, one.taken) for one in (await read(shared_url)).workers}
    assert done == {"gen-1": (3, 0), "trainer-2": (0, 3)}


async def test_what_failed_whose_it_was_and_why(shared_url: str) -> None:
    async with build(shared_url) as buffer:
        for number, name in enumerate(["gen-1", "gen-2", "gen-2"]):
            rollouts = group(number, status=Status.FAILED)
            rollouts[0].error_msg = f"error {number}"
            with working_as(name):
                await buffer.put(rollouts, TASK)
    about = await read(shared_url)
    assert about.errors == {TASK: "error 2"}
    assert about.failed_by == {TASK: {"gen-1": 1, "gen-2": 2}}


async def test_the_trainer_and_the_last_restore(shared_url: str) -> None:
    async with build(shared_url, worker="trainer-1") as buffer:
        await buffer.put(group(1), TASK, model_step=1, current_train_step=3)
        await publish(buffer, TrainState(4, 3, finished=True))
        await buffer.checkpoint(4)
        await buffer.restore(4)
    about = await read(shared_url)
    assert about.trainer == TrainState(4, 3, finished=True)
    assert about.steps == {TASK: 3}
    assert about.restored is not None
    assert (about.restored.step, about.restored.worker) == (4, "trainer-1")


async def test_rates_are_those_since_the_first_minute_of_the_last_hour(shared_url: str) -> None:
    async with build(shared_url) as buffer:
        for number in range(9):
            await buffer.put(group(number), TASK)
    now = int((await read(shared_url)).now)
    change(shared_url, "DELETE FROM rb_history")
    for seconds, put in ((4000, 1), (1800, 3), (600, 9)):
        data = json.dumps({"tasks": {TASK: {"put": put, "put_of": {"completed": put}, "dropped": 1}}})
        change(shared_url, f"INSERT INTO rb_history VALUES ('default', {now - seconds}, '{data}')")
    about = await read(shared_url)
    assert about.before is not None
    assert about.before.time == now - 1800
    assert about.put(TASK, Status.COMPLETED).lately == 6
    assert about.rate(TASK, Status.COMPLETED) == pytest.approx(6 / 1800, rel=0.05)
    assert about.now - about.last_put[TASK] < 60  # its newest group is there
    change(shared_url, "DELETE FROM rb_group")
    assert (await read(shared_url)).last_put[TASK] == now - 1800  # the last minute in which something came


@pytest.mark.parametrize("statement", ["_HELD", "_LAST_PUTS", "_FAILED_LANES"])
async def test_no_statement_looks_at_all_groups(statement: str, tmp_path: object) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    async with build(url):
        pass
    plan = open_reader(url).look(
        lambda look: look.rows(f"EXPLAIN QUERY PLAN {getattr(circumstances, statement)}", buffer="default")
    )
    steps = [row["detail"] for row in plan if " g " in f"{row['detail']} "]
    assert steps
    assert all("SEARCH g USING" in step and "lane" in step for step in steps)
