"""PostgreSQL's pool of connections, and the rights of roles."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from replaybuf import ReplayBuffer, Status
from replaybuf.errors import AccessError, ReplayBufError
from replaybuf.storage.sql.engine import postgres_pool
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.locks import Stamp, next_stamp
from replaybuf.storage.sql.engine.postgres_pool import MOST_CONNECTIONS, Pool, UnreachableError
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.inspection.reader import open_reader
from tests import sql_example
from tests.bad_input.conftest import refused_put
from tests.cancellation.conftest import lent
from tests.cli.conftest import run
from tests.pages import DOCS
from tests.postgres import execute, new_database
from tests.stores import TASK, because, build, fill, group, numbers_of, until
from tests.web.conftest import client_of


@pytest.fixture
async def pool(lent_database: str) -> AsyncIterator[Pool]:
    pool = Pool(Access(parse_url(lent_database), lock_timeout=20))
    yield pool
    await pool.close()


async def process_of(pool: Pool) -> Any:
    """The server process of the connection that is lent next."""
    async with pool.lend() as connection:
        return connection.get_server_pid()


async def test_the_last_one_is_lent_again(pool: Pool) -> None:
    async with pool.lend():
        last = await process_of(pool)
        assert await process_of(pool) == last
    assert await process_of(pool) != last
    assert (pool.size, lent(pool)) == (2, 0)


async def test_who_waits_for_a_new_one_has_one_that_is_given_back_meanwhile(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ask at once, one is made at a time."""
    making = may_make = 0
    connect, may_go_on = pool.servers.connect, asyncio.Event()

    async def slowly() -> Any:
        nonlocal making, may_make
        making, may_make = making + 1, max(may_make, making + 1)
        await may_go_on.wait()
        new_connection = await connect()
        making -= 1
        return new_connection

    async with pool.lend() as connection:
        first = connection.get_server_pid()
        monkeypatch.setattr(pool.servers, "connect", slowly)
        waiters = [asyncio.create_task(process_of(pool)) for _ in range(10)]
        await until(lambda: making == 1)
    served = await asyncio.gather(*waiters[1:])
    assert served == [first] * 9
    may_go_on.set()
    assert await waiters[0] != first
    assert may_make == 1


async def test_one_that_is_given_back_in_time_serves_all(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_pool, "_PATIENCE", ((0, 0.0), (MOST_CONNECTIONS, 60.0)))
    async with pool.lend() as connection:
        monkeypatch.setattr(pool.servers, "connect", None)
        waiters = [asyncio.create_task(process_of(pool)) for _ in range(3)]
        for _ in range(9):
            await asyncio.sleep(0)
    assert set(await asyncio.gather(*waiters)) == {connection.get_server_pid()}


async def test_one_that_was_idle_for_long_is_closed(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_pool, "KEPT_SECONDS", 0.05)
    async with pool.lend():
        await process_of(pool)

    async def closed() -> bool:
        await process_of(pool)
        return pool.size == 1

    await until(closed)


async def test_who_waits_has_the_next_one(pool: Pool) -> None:
    all_lent = asyncio.gather(*(process_of(pool) for _ in range(2 * MOST_CONNECTIONS)))
    assert len(set(await asyncio.wait_for(all_lent, 15))) <= MOST_CONNECTIONS


async def test_who_waits_in_vain_is_told_why(pool: Pool) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            await stack.enter_async_context(pool.lend())
        pool._lock_timeout = 0.05
        with pytest.raises(
            UnreachableError,
            match=f"all {MOST_CONNECTIONS} connections of this buffer were in use",
            check=because("pool busy"),
        ):
            await process_of(pool)


@pytest.mark.parametrize(
    ("first", "error"),
    [("BEGIN", ZeroDivisionError), ("BEGIN", ReplayBufError), ("SELECT", ZeroDivisionError), ("BEGIN", None)],
)
async def test_one_in_an_unknown_state_is_closed(pool: Pool, first: str, error: type[Exception] | None) -> None:
    """After an error of nobody knows where, in a transaction that was left open, or cancelled."""

    async def use() -> None:
        async with pool.lend() as connection:
            await connection.execute(first)
            if error is not None:
                raise error
            await connection.execute("SELECT pg_sleep(60)")

    using = asyncio.create_task(use())
    finished, _ = await asyncio.wait([using], timeout=0.2 if error is None else 60)
    using.cancel()
    await asyncio.wait([using])
    assert bool(finished) == (error is not None)
    assert (pool.size, lent(pool)) == (0, 0)


async def test_one_that_the_server_ended_is_not_lent(pool: Pool) -> None:
    async with pool.lend() as connection:
        async with pool.lend() as other:
            process_id, heard = other.get_server_pid(), asyncio.Event()
            other.add_termination_listener(lambda _: heard.set())
        await connection.execute("SELECT pg_terminate_backend($1, 5000)", process_id)
        await asyncio.wait_for(heard.wait(), 20)
        assert await process_of(pool) != process_id


async def test_transactions_of_a_connection_have_numbers_that_rise(pool: Pool) -> None:
    async with pool.lend() as connection, pool.lend() as other:
        first, second = connection.next_stamp(), connection.next_stamp()
        assert first.row == second.row != other.next_stamp().row
        assert first.number < second.number
    assert next_stamp(Stamp("connection 1", 1 << 60)).number == (1 << 60) + 1  # a clock that was set back


async def test_a_pool_closes_though_one_is_in_use(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_pool, "_CLOSING_SECONDS", 0.1)
    connection = await pool.take()
    await asyncio.wait_for(pool.close(), 5)
    assert connection.is_closed()


TEXT = (DOCS / "operating.md").read_text("utf-8")
GRANTS = {
    re.search(r"CREATE ROLE (\w+)", block)[1]: block  # type: ignore[index]
    for block in re.findall(r"(?ms)^```sql\n(.*?)^```", TEXT)
    if "CREATE ROLE" in block
}


@contextlib.contextmanager
def granted(database: str, role: str, *, more: str = "") -> Iterator[str]:
    """The URL of a database for a role with what the page grants it. Its name goes on, since roles are the server's."""
    name = f"{role}_{uuid.uuid4().hex[:8]}"
    execute(database, re.sub(rf"\b{role}\b", name, GRANTS[role] + more))
    try:
        yield make_url(database).set(username=name).render_as_string(hide_password=False)
    finally:
        execute(database, f"DROP OWNED BY {name}; DROP ROLE {name}")


@pytest.fixture(scope="module")
def made(postgres_url: str) -> Iterator[str]:
    """A database whose owner has made the tables; each test has a buffer of its own there."""
    with new_database(postgres_url) as database:
        run("doctor", database, "--upgrade")
        yield database


@pytest.fixture
def trainer(made: str) -> Iterator[str]:
    with granted(made, "trainer") as url:
        yield url


async def test_a_trainer_does_all_that_a_run_does(trainer: str, tmp_path: Path) -> None:
    async with build(trainer, archive=10, unfit=10, keep_checkpoints=2) as buffer:
        await fill(buffer, 6)
        await buffer.checkpoint(1)
        async with buffer.lease_batch({TASK: 2}, current_train_step=1) as lease:
            assert numbers_of(lease.batch[TASK]) == [0, 1]
        async with buffer.lease_batch({TASK: 1}, current_train_step=1) as lease:
            await lease.give_back()
        await buffer.update({}, tags={"seen": True})
        await buffer.refresh_staleness(task_stale_thresholds={TASK: 4}, current_train_step=2)
        await buffer.restore(1)
        assert await buffer.count(TASK, Status.COMPLETED) == 6
        await buffer.put(group(9, status=Status.FAILED), TASK)
        await buffer.delete({"status": "failed"})
        assert len(numbers_of(await buffer.get(9, TASK))) == 6
        await buffer.save(tmp_path / "saved")
        assert [item async for item in buffer.find({"status": "archived"})] != []
    async with build(trainer, name="resumed") as buffer:
        await buffer.resume(tmp_path / "saved")


#: What looks at a run, and what it says of it.
LOOKS = [
    "stats",
    "ls",
    "why",
    "show --worst 1",
    "trace step 414",
    "sql 'SELECT count(*) FROM groups'",
    "checkpoint ls",
]


@pytest.fixture(scope="module")
def viewer(postgres_url: str) -> Iterator[str]:
    with new_database(postgres_url) as database:
        asyncio.run(sql_example.fill(database))
        with granted(database, "viewer") as url:
            yield url


def test_a_viewer_sees_what_there_is(viewer: str) -> None:
    """By commands, and on the page."""
    for command in LOOKS:
        name, *arguments = shlex.split(command)
        place = 1 if name == "checkpoint" else 0
        result = run(name, *arguments[:place], viewer, *arguments[place:])
        assert result.stdout
        assert "permission" not in result.output
    client = client_of(viewer)
    for page in ("", "groups", "groups/1", "steps", "steps/414", "workers", "metrics"):
        assert client.get(f"/{page}").status_code == 200, page
    assert "damaged" not in run("doctor", viewer, code=None).stdout


async def test_a_viewer_changes_nothing(viewer: str) -> None:
    calls: list[Callable[[ReplayBuffer], Any]] = [
        lambda buffer: buffer.put(group(1), TASK),
        lambda buffer: buffer.get(1, "math"),
        lambda buffer: buffer.delete({}),
        lambda buffer: buffer.checkpoint(9),
    ]
    before = open_reader(viewer)
    count_before = await asyncio.to_thread(before.read, lambda tx: tx.value("SELECT count(*) FROM rb_group"))
    async with build(viewer) as buffer:
        for call in calls:
            with pytest.raises(AccessError, match=r"permission denied for (table|sequence) rb_\w+; let the owner"):
                await call(buffer)
    assert await asyncio.to_thread(before.read, lambda tx: tx.value("SELECT count(*) FROM rb_group")) == count_before


#: A right that is missing, and the sentence of a put, a take or the opening.
LACKING = {
    "REVOKE INSERT ON rb_payload FROM trainer": "permission denied for table rb_payload; let the owner",
    "REVOKE SELECT ON rb_version FROM trainer": "permission denied for table rb_version; let the owner",
    "REVOKE ALL ON SEQUENCE rb_uid FROM trainer": "permission denied for sequence rb_uid; let the owner",
    "ALTER ROLE trainer NOLOGIN": 'role "trainer" is not permitted to log in; create the role if it',
}


@pytest.mark.parametrize("revoked", LACKING)
async def test_a_right_that_is_missing_is_named(made: str, revoked: str) -> None:
    with granted(made, "trainer", more=f";{revoked}") as url:
        message = re.sub(r"\btrainer_\w+", "trainer", str(await refused_put(url, AccessError)))
    assert LACKING[revoked] in message


async def test_who_may_not_make_the_tables_is_told_who_does(postgres_database: str) -> None:
    with granted(postgres_database, "trainer") as url:
        error = await refused_put(url, AccessError)
    assert "let the owner make the tables (replaybuf doctor URL --upgrade)" in str(error)
