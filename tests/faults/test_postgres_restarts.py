"""The server is away, crashes, refuses or interrupts: operations go on when they can, within their bound."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from replaybuf import ReplayBuffer, Status
from replaybuf.common.worker_name import worker_name
from replaybuf.errors import ClosedError, UnreachableError
from replaybuf.storage.sql.tasks import delivery as drawing
from replaybuf.storage.values import Cursor, NewGroup
from tests.cancellation.conftest import no_connection_out
from tests.faults.calling import calling, goes_on
from tests.faults.conftest import Figures
from tests.faults.processes import Ledger
from tests.faults.proxy import Proxy, once, proxied
from tests.faults.test_postgres_connections import (
    before_it_arrives,
    before_the_answer,
    end_background_work,
)
from tests.histories.history import Recorder, calls_in
from tests.histories.workers import take_all_left
from tests.postgres import Databases, Server, ask, execute, own_server
from tests.stores import TASK, build, fill, group, numbers_of, take_all, until, until_equal


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that tests may stop; each leaves it running."""
    with own_server() as server:
        server.configure(max_connections="30")
        server.stop()
        server.start()
        yield server


@pytest.fixture(scope="module")
def databases(server: Server) -> Iterator[Databases]:
    databases = Databases(server.url)
    yield databases
    databases.close()


@pytest.fixture
def url(databases: Databases) -> Iterator[str]:
    with databases.lent() as lend:
        yield lend()


async def crash(server: Server, away: float = 0.0) -> int:
    """Stop and start the server; return a moment at which it didn't run."""
    await asyncio.to_thread(server.stop)
    moment = time.monotonic_ns()
    await asyncio.sleep(away)
    await asyncio.to_thread(server.start)
    return moment


@contextlib.asynccontextmanager
async def stopped(server: Server) -> AsyncIterator[None]:
    await asyncio.to_thread(server.stop)
    try:
        yield
    finally:
        await asyncio.to_thread(server.start)


@pytest.mark.parametrize("crashes", [2, pytest.param(40, marks=pytest.mark.long)])
async def test_no_crash_of_the_server_loses_or_doubles_a_group(
    server: Server, url: str, crashes: int, figures: Figures, tmp_path: Path
) -> None:
    """Tasks of two buffers call all the while, and record it."""
    recorder, moments = Recorder(Ledger(tmp_path / "calls")), list[int]()
    async with build(url, max_deliveries=0) as first, build(url, max_deliveries=0) as second:
        waiting = asyncio.create_task(second.take_batch({"another": 1}, timeout=600))
        async with calling(recorder, [first, second] * 3):
            for count in range(crashes):
                await goes_on(recorder, "put", more=50)
                moments.append(await crash(server, 0.3 * (count % 2)))
        await first.put(group(7), "another")
        batch, _ = await waiting
        assert numbers_of(batch["another"]) == [7]
        await take_all_left(first, recorder)
    figures.judge(crashes, calls_in([tmp_path / "calls"]), moments)


@contextlib.asynccontextmanager
async def connections_used_up(url: str) -> AsyncIterator[None]:
    """All that the server has, also those for its administrators."""
    connections = []
    with contextlib.suppress(asyncpg.TooManyConnectionsError):
        while True:
            connections.append(await asyncpg.connect(url))
    try:
        yield
    finally:
        for connection in connections:
            await connection.close()


async def test_a_server_without_connections_is_spoken_of(url: str, caplog: Any) -> None:
    """While operations find one now and then. No connection was lost, and none is said to be."""
    async with build(url) as buffer:
        await fill(buffer, 100)
        await end_background_work(buffer)
        with caplog.at_level(logging.INFO, logger="replaybuf.database"):
            async with connections_used_up(url):
                for _ in range(5):
                    batches = await asyncio.gather(*(buffer.get(1, TASK) for _ in range(20)))
                    assert all(batches)
    messages = [record.getMessage() for record in caplog.records if record.name == "replaybuf.database"]
    waiting = [
        line for line in messages if line.startswith("operations wait for a connection: can't reach postgresql://")
    ]
    assert "raise its max_connections" in waiting[0]
    assert not any("lost" in line for line in messages), messages


CALLS: dict[str, Callable[[ReplayBuffer], Awaitable[Any]]] = {
    "put": lambda buffer: buffer.put(group(1), TASK),
    "take": lambda buffer: buffer.get(1, TASK),
    "wait": lambda buffer: buffer.take_batch({TASK: 9}, timeout=60),
    "count": lambda buffer: buffer.count(TASK, Status.COMPLETED),
    "refresh": lambda buffer: buffer.refresh_staleness(task_stale_thresholds={TASK: 1}, current_train_step=1),
}


async def test_after_the_bound_the_error_says_how_long_it_was_tried_and_what_is_known(server: Server, url: str) -> None:
    async with build(url, reconnect_timeout=1) as buffer:
        await fill(buffer, 2)
        async with stopped(server):
            ends = await asyncio.gather(*(call(buffer) for call in CALLS.values()), return_exceptions=True)
        for name, error in zip(CALLS, ends, strict=True):
            assert type(error) is UnreachableError
            assert not error.in_doubt
            assert "can't reach postgresql://" in str(error)
            assert "tried again for 1 s (reconnect_timeout=1)" in str(error)
            assert ("nothing of it was stored" in str(error)) == (name in ("put", "take", "wait", "refresh"))
        assert await take_all(buffer) == [0, 1]
        await no_connection_out(buffer)


Doubtful = tuple[Proxy, ReplayBuffer, ReplayBuffer]


@pytest.fixture
async def doubtful(url: str) -> AsyncIterator[Doubtful]:
    """A proxy, a buffer behind it, with three groups and without background work, and one that isn't behind it."""
    async with proxied(url) as proxy, build(proxy.url, reconnect_timeout=0.3) as buffer, build(url) as other:
        await fill(buffer, 3)
        await end_background_work(buffer)
        yield proxy, buffer, other
        await no_connection_out(buffer)


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("operation", ["get", "lease_batch"])
async def test_what_a_taker_was_not_told_comes_back(doubtful: Doubtful, operation: str, committed: bool) -> None:
    """The answer to its COMMIT is lost, and the server can't be asked before the bound."""
    proxy, buffer, other = doubtful
    proxy.fault = once(proxy.refuse(before_the_answer if committed else before_it_arrives))
    with pytest.raises(UnreachableError, match="it isn't known whether it succeeded") as caught:
        await (buffer.get(2, TASK) if operation == "get" else buffer.lease_batch({TASK: 2}))
    assert caught.value.in_doubt
    assert await other.count(TASK, Status.COMPLETED) == (1 if committed else 3)
    proxy.refusing = False
    await until_equal(3, lambda: other.count(TASK, Status.COMPLETED), 20)
    assert [item.times_sampled async for item in other.find({})] == [0, 0, 0]
    assert await take_all(buffer) == [0, 1, 2]
    assert buffer.storage.presence.of(worker_name(None)).taken == 3


async def test_prompts_that_a_claimer_was_not_told_of_come_back(doubtful: Doubtful) -> None:
    proxy, buffer, other = doubtful
    proxy.fault = once(proxy.refuse(before_the_answer))
    prompt = NewGroup(TASK, Status.INIT, 0, group(1, status=Status.INIT), 1.0)
    with pytest.raises(UnreachableError, match="it isn't known whether it succeeded"):
        await buffer.storage.claim([prompt], Cursor("data", 0, 1, b"x"), 1000.0)
    assert await other.count(TASK, Status.INIT) == 0
    proxy.refusing = False
    await other.wait_ready({TASK: 1}, Status.INIT, timeout=20)


async def test_closing_brings_back_what_a_taker_was_not_told(url: str) -> None:
    async with proxied(url) as proxy, build(url) as other:
        async with build(proxy.url, reconnect_timeout=0.3) as buffer:
            await fill(buffer, 3)
            await end_background_work(buffer)
            proxy.fault = once(proxy.refuse(before_the_answer))
            with pytest.raises(UnreachableError):
                await buffer.get(2, TASK)
            proxy.refusing = False
        assert await take_all(other) == [0, 1, 2]


async def test_a_give_back_whose_answer_is_lost_is_not_done_twice(
    doubtful: Doubtful, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, buffer, other = doubtful
    unconsume = drawing.unconsume

    def back_and_lost(*arguments: Any) -> Any:
        proxy.fault = once(proxy.refuse(before_the_answer))
        return unconsume(*arguments)

    monkeypatch.setattr(drawing, "unconsume", back_and_lost)
    monkeypatch.setattr(drawing.Drawing, "_decode", lambda *_: 1 / 0)  # whatever it is: they go back
    with pytest.raises(ZeroDivisionError):
        await buffer.get(2, TASK)
    monkeypatch.undo()
    proxy.refusing = False
    assert (await other.metrics())["tasks"][TASK]["taken"] == 0
    assert await take_all(other) == [0, 1, 2]
    await asyncio.sleep(1.5)  # longer than until the next attempt
    assert (await other.metrics())["tasks"][TASK]["taken"] == 3


async def test_closing_ends_all_calls_that_wait_for_the_server(server: Server, url: str) -> None:
    buffer = build(url)
    await fill(buffer, 2)
    async with stopped(server):
        calls = [asyncio.create_task(call(buffer)) for call in CALLS.values()]  # type: ignore[arg-type, var-annotated]
        await asyncio.wait(calls, timeout=0.3)
        async with asyncio.timeout(30):  # of the 60 s for which each of them would go on
            await buffer.close()
            ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end).__mro__.count(ClosedError) for end in ends] == [1] * len(CALLS)
    async with build(url) as reopened:
        assert await take_all(reopened) == [0, 1]


async def test_a_server_that_was_never_reached_is_an_error_at_once(server: Server, url: str) -> None:
    async with stopped(server):
        for call in CALLS.values():
            buffer = build(url)
            with pytest.raises(UnreachableError, match="is the server running") as caught:
                await call(buffer)
            assert "tried again" not in str(caught.value)
            await buffer.close()


# Transactions that PostgreSQL rolls back for the sake of others


async def test_a_deadlock_is_run_again(url: str) -> None:
    """The buffer waits for group 1 while it holds group 0, which the other one wants: PostgreSQL ends the buffer's."""
    name = url.rsplit("/", 1)[1].partition("?")[0]
    execute(url, f"ALTER DATABASE {name} SET deadlock_timeout = '100ms'")
    async with build(url) as buffer:
        uids = [await buffer.put(group(number), TASK) for number in range(2)]
        other = await asyncpg.connect(url, server_settings={"deadlock_timeout": "30s"})
        before = await statistic(other, "deadlocks")
        transaction = other.transaction()
        await transaction.start()
        await other.execute("SELECT 1 FROM rb_group WHERE uid = $1 FOR UPDATE", uids[1])
        changing = asyncio.create_task(buffer.update_priorities(dict.fromkeys(uids, 5.0)))
        await until(lambda: is_waiting(url))
        await other.execute("SELECT 1 FROM rb_group WHERE uid = $1 FOR UPDATE", uids[0])
        await transaction.commit()
        assert await changing == 2
        assert [item.priority async for item in buffer.find({})] == [5.0, 5.0]

        async def there_was_one() -> bool:
            await buffer.update_priorities({})  # a session that is idle tells its numbers after 10 s
            return await statistic(other, "deadlocks") == before + 1

        await until(there_was_one)
        await other.close()


async def is_waiting(url: str) -> bool:
    """Whether somebody waits for a lock of a row."""
    return bool(await ask(url, "SELECT pid FROM pg_stat_activity WHERE wait_event = 'transactionid'"))


async def statistic(connection: Any, name: str) -> int:
    query = f"SELECT {name} FROM pg_stat_database WHERE datname = current_database()"
    return int(await connection.fetchval(query))
