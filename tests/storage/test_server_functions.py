"""Puts by a function of PostgreSQL: what they rest on, and where they do without."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid

import asyncpg
import pytest
from sqlalchemy import make_url

from replaybuf import FencedError, FullError
from replaybuf.storage.sql.engine.hooks import Hook, installed
from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.writer import upgrade_database
from replaybuf.storage.sql.statements.counts import lock_tasks
from replaybuf.storage.sql.statements.put_at_once import FUNCTIONS
from tests.cancellation.ways import end_background_work
from tests.faults.proxy import Link, is_commit, proxied
from tests.postgres import drop_functions, execute, set_default
from tests.stores import TASK, build, fill, group, take_all, until


class Calls(Hook):
    """How many calls of a function were sent."""

    def __init__(self) -> None:
        self.count = 0

    def statement(self, sql: str, values: object, many: bool) -> None:
        self.count += "rb_call_" in sql


async def functions_in(url: str) -> set[str]:
    connection = await asyncpg.connect(url)
    try:
        return {name for (name,) in await connection.fetch("SELECT proname FROM pg_proc WHERE proname LIKE 'rb_call%'")}
    finally:
        await connection.close()


NAMES = {function.name for function in FUNCTIONS}


async def test_a_call_that_waited_for_a_restore_is_fenced_off(postgres_database: str) -> None:
    """Its statement begins after it has the lock of writers, and sees what the restore has committed."""
    async with build(postgres_database) as buffer:
        await fill(buffer, 3)
        restoring = await asyncpg.connect(postgres_database)
        try:
            async with restoring.transaction():
                await restoring.execute(f"SELECT pg_advisory_xact_lock({Lock.WRITERS:d})")
                put = asyncio.create_task(buffer.put(group(3), TASK))
                waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory' AND query LIKE '%rb_call%'"

                async def is_waiting() -> bool:
                    await asyncio.sleep(0.02)
                    return bool(await restoring.fetchval(waits))

                await until(is_waiting)
                await restoring.execute(
                    "INSERT INTO rb_buffer (name, epoch, ticket_shift) VALUES ('default', 1, 0) "
                    "ON CONFLICT (name) DO UPDATE SET epoch = rb_buffer.epoch + 1"
                )
            with pytest.raises(FencedError):
                await put
        finally:
            await restoring.close()
    async with build(postgres_database) as buffer:
        assert await take_all(buffer) == [0, 1, 2]


async def test_a_call_that_waited_for_its_task_counts_what_was_put_meanwhile(postgres_database: str) -> None:
    """It waits for those who take the lock of a task by statements: the two agree on its name."""
    task = 'mäth\'s "任务"'

    def put_slowly(tx: Transaction) -> None:
        lock_tasks(tx, [task])
        tx.run("SELECT pg_sleep(0.5)")
        tx.run("INSERT INTO rb_tally SELECT id, 'size', 0, 1 FROM rb_lane WHERE status = 'completed'")

    async with build(postgres_database, capacity=4, on_full="reject") as buffer, build(postgres_database) as other:
        for number in range(3):
            await buffer.put(group(number), task)
        slow = asyncio.create_task(other.storage._write(put_slowly))
        await asyncio.sleep(0.2)
        with installed(calls := Calls()), pytest.raises(FullError):
            await buffer.put(group(3), task)
        assert calls.count == 1
        await slow


async def test_at_another_level_by_default_nothing_is_called_that_rests_on_read_committed(
    postgres_database: str,
) -> None:
    set_default(postgres_database, default_transaction_isolation="repeatable read")
    async with build(postgres_database) as buffer:
        await fill(buffer, 5)
        assert await take_all(buffer) == list(range(5))


async def test_functions_that_are_dropped_in_the_middle_of_a_run_are_not_missed(postgres_database: str) -> None:
    async with build(postgres_database) as buffer:
        await fill(buffer, 3)
        with installed(calls := Calls()):
            await buffer.put(group(3), TASK)
        assert calls.count == 1
        drop_functions(postgres_database)
        await fill(buffer, 3, first=4)
        assert await take_all(buffer) == list(range(7))


async def test_who_opens_a_database_without_the_functions_creates_them(postgres_database: str) -> None:
    async with build(postgres_database) as buffer:
        await fill(buffer, 1)
    drop_functions(postgres_database)
    async with build(postgres_database) as buffer:
        await fill(buffer, 1)
    assert await functions_in(postgres_database) == NAMES


async def test_an_upgrade_creates_them_and_drops_those_of_other_versions(postgres_database: str) -> None:
    async with build(postgres_database) as buffer:
        await fill(buffer, 1)
    drop_functions(postgres_database)
    for name in ("rb_call_put_00000000", "rb_callback"):  # the second is somebody's own
        execute(postgres_database, f"CREATE FUNCTION {name}(int) RETURNS int LANGUAGE sql AS 'SELECT 1'")
    await asyncio.to_thread(upgrade_database, open_reader(postgres_database))
    assert await functions_in(postgres_database) == NAMES | {"rb_callback"}


@pytest.mark.parametrize("may", ["create nothing", "not execute them"])
async def test_a_role_that_may_not_have_them_does_without(postgres_database: str, may: str) -> None:
    role = f"limited_{uuid.uuid4().hex[:8]}"
    async with build(postgres_database) as buffer:
        await fill(buffer, 2)
    if may == "create nothing":
        drop_functions(postgres_database)
    else:
        for function in FUNCTIONS:
            execute(postgres_database, f"REVOKE EXECUTE ON FUNCTION {function.name} FROM PUBLIC")
    execute(postgres_database, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    execute(
        postgres_database,
        f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA public TO {role};"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role};"
        f"GRANT USAGE, SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA public TO {role}",
    )
    url = make_url(postgres_database).set(username=role).render_as_string(hide_password=False)
    try:
        async with build(url) as buffer:
            await fill(buffer, 3, first=2)
            assert await take_all(buffer) == list(range(5))
        await asyncio.to_thread(upgrade_database, open_reader(url))
    finally:
        execute(postgres_database, f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_a_call_that_is_unread_when_its_connection_is_lost_is_never_run(postgres_database: str) -> None:
    """Its server process sleeps, and wakes up when the put was long repeated, or would be."""
    stopped: list[int] = []

    async def stop(link: Link, data: bytes) -> bool:
        if stopped or not is_commit(link, data):
            return True
        stopped.append(link.pid)
        os.kill(link.pid, signal.SIGSTOP)
        link._writers[1].write(data)
        await asyncio.sleep(0.05)
        link.cut()
        asyncio.get_running_loop().call_later(1, os.kill, link.pid, signal.SIGCONT)
        return False

    async with proxied(postgres_database) as proxy, build(proxy.url) as buffer:
        await fill(buffer, 3)
        await end_background_work(buffer)
        proxy.fault = stop
        uid = await buffer.put(group(3), TASK)
        assert stopped
        assert [item.uid async for item in buffer.find({})][-1] == uid
        await fill(buffer, 1, first=4)
        assert await take_all(buffer) == list(range(5))
