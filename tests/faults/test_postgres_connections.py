"""A connection that is lost at any moment: every group is put once and taken once, and callers hear nothing of it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from itertools import count
from typing import Any

import asyncpg
import pytest

from replaybuf import Lease, ReplayBuffer, Status
from replaybuf.errors import ReplayBufError, UnreachableError
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.engine import outage, postgres
from replaybuf.storage.sql.engine.locks import Stamp, next_stamp
from replaybuf.storage.sql.engine.transaction import Hook, installed
from tests.cancellation.conftest import end_background_work, no_connection_out
from tests.faults.conftest import Figures
from tests.faults.proxy import Link, Proxy, is_commit, once, proxied
from tests.faults.test_storm import totals_of
from tests.postgres import ask, execute
from tests.stores import TASK, because, build, fill, group, number_of, numbers_of, take_all, until

GROUPS = 30


@pytest.fixture
async def proxy(lent_database: str) -> AsyncIterator[Proxy]:
    async with proxied(lent_database) as proxy:
        yield proxy


@pytest.fixture
async def buffer(proxy: Proxy) -> AsyncIterator[ReplayBuffer]:
    """A buffer behind the proxy, without background work; in the end all of its connections are back."""
    async with build(proxy.url) as buffer:
        await buffer.count_where({})
        await end_background_work(buffer)
        yield buffer
        proxy.fault = None
        await no_connection_out(buffer)


async def all_told(buffer: ReplayBuffer) -> None:
    """Wait until nothing is announced any more, so that the next COMMIT is that of the next call."""
    await until(lambda: buffer.storage.watch._announce_task is None)


# Ways to lose a connection, at the moment when the client sends something


async def before_it_arrives(link: Link) -> bool:
    link.cut()
    return False


async def before_the_answer(link: Link) -> bool:
    link.answers_lost = True
    return True


async def ended_by_the_server(proxy: Proxy, link: Link) -> bool:
    await proxy.end_process(link)
    return True


WAYS: dict[str, Callable[[Proxy, Link], Awaitable[bool]]] = {
    "before it arrives": lambda _, link: before_it_arrives(link),
    "before the answer": lambda _, link: before_the_answer(link),
    "ended by the server": ended_by_the_server,
}


def ways(*quick: str) -> list[Any]:
    """All ways, those that aren't named as long forms."""
    return [way if way in quick else pytest.param(way, marks=pytest.mark.long) for way in WAYS]


async def at_every_message(proxy: Proxy, way: str, operation: Callable[[int], Awaitable[None]]) -> int:
    """Run an operation again and again, and lose the connection at its first message, its second, ...; how many."""
    place = passed = 0

    async def lose(link: Link, _data: bytes) -> bool:
        nonlocal passed
        passed += 1
        return passed != place + 1 or await WAYS[way](proxy, link)

    for place in range(100):
        passed, proxy.fault = 0, lose
        await operation(place)
        proxy.fault = None
        if passed <= place:
            return place
    raise AssertionError("an operation of 100 messages?")


@pytest.mark.parametrize("way", ways("before the answer", "ended by the server"))
async def test_a_put_is_stored_once_wherever_its_connection_is_lost(
    buffer: ReplayBuffer, proxy: Proxy, way: str, figures: Figures
) -> None:
    uids: dict[int, int] = {}

    async def put(number: int) -> None:
        uids[number] = await buffer.put(group(number), TASK)

    places = await at_every_message(proxy, way, put)
    assert {number_of(item.item): item.uid async for item in buffer.find({})} == uids
    assert (await totals_of(proxy.server_url))[TASK, Tally.PUT] == len(uids) == places + 1
    delivered = await take_all(buffer)
    figures.compare(places, sorted(uids), delivered)
    assert sorted(delivered) == sorted(uids)


@pytest.mark.parametrize("way", ways("before the answer"))
async def test_a_take_hands_out_once_wherever_its_connection_is_lost(
    buffer: ReplayBuffer, proxy: Proxy, way: str, figures: Figures
) -> None:
    await fill(buffer, GROUPS)
    numbers: list[int] = []

    async def take(_place: int) -> None:
        numbers.extend(numbers_of(await buffer.get(1, TASK)))

    places = await at_every_message(proxy, way, take)
    assert places >= 3
    remaining = await take_all(buffer)
    figures.compare(places, range(GROUPS), numbers + remaining)
    assert numbers == list(range(places + 1))
    assert remaining == list(range(places + 1, GROUPS))
    assert (await totals_of(proxy.server_url))[TASK, Tally.TAKEN] == GROUPS


@pytest.mark.parametrize("way", ways("before the answer"))
@pytest.mark.parametrize("end", ["acknowledge", pytest.param("give_back", marks=pytest.mark.long)])
async def test_a_lease_ends_once_wherever_its_connection_is_lost(
    buffer: ReplayBuffer, proxy: Proxy, way: str, end: str
) -> None:
    await fill(buffer, GROUPS)
    leases = [await buffer.lease_batch({TASK: 1}, heartbeat=False) for _ in range(GROUPS)]

    async def settle(place: int) -> None:
        lease: Lease = leases[place]
        await getattr(lease, end)()
        assert lease.open == frozenset()

    places = await at_every_message(proxy, way, settle)
    assert places > 4
    totals = await totals_of(proxy.server_url)
    name = Tally.TAKEN if end == "acknowledge" else Tally.RETURNED
    assert (totals[TASK, name], totals[TASK, Tally.LEASED]) == (places + 1, GROUPS - places - 1)


async def test_what_was_committed_is_not_done_again(buffer: ReplayBuffer, proxy: Proxy, caplog: Any) -> None:
    """Of a put and a take whose answers were lost, the first results are the callers'."""
    with caplog.at_level(logging.INFO, logger="replaybuf.database"):
        await all_told(buffer)
        proxy.fault = once(before_the_answer)
        uid = await buffer.put(group(7), TASK)
        assert [item.uid async for item in buffer.find({})] == [uid]
        await all_told(buffer)
        proxy.fault = once(before_the_answer)
        assert numbers_of(await buffer.get(5, TASK)) == [7]
    assert await buffer.count(TASK, Status.COMPLETED) == 0
    logs = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "replaybuf.database"]
    assert [level for level, _ in logs] == ["WARNING", "INFO"]  # the second loss came soon after
    assert logs[0][1].startswith("operations wait for a connection: can't reach postgresql://")
    assert logs[1][1].startswith("connected to postgresql://")


def test_a_flapping_server_is_told_of_now_and_then(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an outage that lasts is told of, however soon after another one it began."""
    flapping, error = outage.Outage("server", 5.0), OSError("gone")
    with caplog.at_level(logging.INFO, logger="replaybuf.database"):
        for _ in range(100):
            flapping.begin(error)
            flapping.end()
        flapping.begin(error)
        monkeypatch.setattr(outage, "_QUIET_SECONDS", 0.0)
        flapping.begin(error)
        flapping.begin(error)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]


async def test_puts_that_are_repeated_after_a_crash_take_no_uids_of_later_ones(
    buffer: ReplayBuffer, proxy: Proxy, lent_database: str
) -> None:
    """A crash of the server sets the sequence back to the last number that was committed."""
    await fill(buffer, 2)  # of a lane that is there
    await all_told(buffer)

    async def crash(link: Link) -> bool:
        await asyncio.to_thread(execute, lent_database, "SELECT setval('rb_uid', (SELECT max(uid) FROM rb_group))")
        await proxy.end_process(link)
        return False

    proxy.fault = once(crash)
    await fill(buffer, 20, first=2)
    await buffer.put(group(22), TASK)
    assert sorted([item.uid async for item in buffer.find({})]) == list(range(1, 24))


@pytest.mark.parametrize(
    ("operation", "arrives"),
    [
        pytest.param("put", True, id="put: the server sleeps"),
        pytest.param("take", False, id="take: the server isn't told"),
        pytest.param("put", False, id="put: the server isn't told", marks=pytest.mark.long),
        pytest.param("take", True, id="take: the server sleeps", marks=pytest.mark.long),
    ],
)
async def test_a_repeat_waits_for_the_transaction_whose_answer_was_lost(
    lent_database: str, proxy: Proxy, arrives: bool, operation: str
) -> None:
    """COMMIT is unread when the client loses its connection, or never arrives. The server's side holds its locks.

    For longer than a transaction waits for a lock.
    """
    links: list[Link] = []

    async def leave(link: Link, data: bytes) -> bool:
        if links or not is_commit(link, data):
            return True
        links.append(link)
        if arrives:
            os.kill(link.pid, signal.SIGSTOP)
            link._writers[1].write(data)
            await asyncio.sleep(0.05)
        link.frozen = not arrives
        link._writers[0].transport.abort()
        return False

    waited: set[Any] = set()

    async def has_waited_again() -> bool:
        condition = "wait_event_type = 'Lock' AND query LIKE '%INTO rb_info%'"
        waited.update(await of_sessions(lent_database, "xact_start", condition))
        return len(waited) > 1

    async with build(proxy.url, lock_timeout=0.3) as buffer:
        await fill(buffer, 2)
        await end_background_work(buffer)
        await all_told(buffer)
        proxy.fault = leave
        call: Any = buffer.put(group(2), TASK) if operation == "put" else buffer.get(1, TASK)
        with installed(sent := Sent("SELECT g.uid" if operation == "take" else "INTO rb_group")):
            running = asyncio.create_task(call)
            await until(has_waited_again)
            count = sent.count
            if arrives:
                os.kill(links[0].pid, signal.SIGCONT)
            else:
                await proxy.end_process(links[0])
            result = await running
        assert (sent.count == count) == arrives  # nothing follows a stamp that is refused
        if operation == "put":
            assert [item.uid async for item in buffer.find({})][-1] == result
            assert await take_all(buffer) == [0, 1, 2]
        else:
            assert numbers_of(result) + await take_all(buffer) == [0, 1]
        await no_connection_out(buffer)
    assert await of_sessions(lent_database, "pid", "state LIKE 'idle in trans%'") == []


async def test_a_repeat_that_is_refused_leaves_no_doubt(buffer: ReplayBuffer, proxy: Proxy) -> None:
    """COMMIT never arrived, and the checkpoint has gone before the restore is repeated."""
    await fill(buffer, 2)
    await buffer.checkpoint(1)

    cut, removed = asyncio.Event(), asyncio.Event()

    async def remove_meanwhile(link: Link, data: bytes) -> bool:
        if cut.is_set():
            await removed.wait()  # else the repeat might find the checkpoint before it has gone
            return True
        if not is_commit(link, data):
            return True
        cut.set()
        link.cut()
        await asyncio.to_thread(execute, proxy.server_url, "DELETE FROM rb_checkpoint")
        removed.set()
        return False

    await all_told(buffer)
    proxy.fault = remove_meanwhile
    with pytest.raises(ReplayBufError) as caught:
        await buffer.restore(1)
    assert not isinstance(caught.value, UnreachableError)
    assert await take_all(buffer) == [0, 1]


async def test_a_transaction_was_committed_if_its_number_is_stored(lent_database: str) -> None:
    """Whoever asks first of a row that isn't there, or has the number of the transaction before, gets the same."""
    async with build(lent_database) as buffer:
        await fill(buffer, 1)
        for name, stored_number in (("none", None), ("before", 6), ("its own", 7)):
            if stored_number is not None:
                execute(lent_database, f"INSERT INTO rb_info (name, number) VALUES ('{name}', {stored_number})")
            engine, attempt = buffer.storage.engine, outage.Attempt[None](stamp=Stamp(name, 7))
            for _ in range(2):
                was = await buffer.storage.thread.run(partial(engine._was_committed, attempt))
                assert was == (stored_number == 7), name


async def test_to_ask_whether_a_transaction_was_committed_has_an_end(
    lent_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the transaction, and as a commit does for a standby; it can be asked again."""
    monkeypatch.setattr(postgres, "COMMIT_SECONDS", 0.3)
    async with build(lent_database, reconnect_timeout=0.3, lock_timeout=60) as buffer:
        await fill(buffer, 1)
        stamp = next_stamp(None)
        engine, attempt = buffer.storage.engine, outage.Attempt[None](stamp=stamp)
        other = await asyncpg.connect(lent_database)
        async with other.transaction():
            await other.execute("INSERT INTO rb_info (name, number) VALUES ($1, $2)", *stamp)
            with pytest.raises(UnreachableError, check=because("commit unanswered")):
                await buffer.storage.thread.run(lambda: engine._was_committed(attempt))
        await other.close()
        assert await buffer.storage.thread.run(lambda: engine._was_committed(attempt))


@pytest.mark.parametrize(
    ("table", "is_late"), [("rb_group", False), ("rb_payload", False), ("rb_tally", False), ("rb_payload", True)]
)
async def test_a_wait_for_a_lock_is_not_taken_for_that_of_a_commit(
    lent_database: str, monkeypatch: pytest.MonkeyPatch, table: str, is_late: bool
) -> None:
    """It may last for `lock_timeout`, though a commit is given up sooner: nothing is in doubt, and the put goes on.

    So it is for a repeat at the end of an outage, when little is left of `reconnect_timeout`.
    """
    monkeypatch.setattr(postgres, "COMMIT_SECONDS", 0.3)
    async with build(lent_database, reconnect_timeout=90 if is_late else 0.3, lock_timeout=60) as buffer:
        await fill(buffer, 1)
        if is_late:
            monkeypatch.setattr(outage.Outage, "deadline", lambda _, since: since + 0.3)
        other = await asyncpg.connect(lent_database)
        async with other.transaction():
            await other.execute(f"LOCK TABLE {table} IN SHARE MODE")
            putting = asyncio.ensure_future(buffer.put(group(1), TASK))
            await asyncio.wait({putting}, timeout=1)
            assert not putting.done()
        await other.close()
        await putting
        assert await take_all(buffer) == [0, 1]


async def test_a_commit_on_a_server_that_was_left_meanwhile_is_made_again(
    lent_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its stamp: the server that took over may lack it. Here it is the same one, so nothing is stored twice."""
    async with build(lent_database) as buffer:
        await fill(buffer, 1)
        await end_background_work(buffer)
        with installed(sent := Sent("INSERT INTO rb_info")):
            answers = iter([True])
            servers = buffer.storage.engine.pool.servers
            monkeypatch.setattr(servers, "is_superseded", lambda _: sent.count > 0 and next(answers, False))
            uid = await buffer.put(group(1), TASK)
        assert sent.count == 2
        assert [item.uid async for item in buffer.find({})][1:] == [uid]


class Sent(Hook):
    """How many statements with a text were sent."""

    def __init__(self, text: str) -> None:
        self.text, self.count = text, 0

    def statement(self, sql: str, values: object, many: bool) -> None:
        self.count += self.text in sql


async def of_sessions(url: str, column: str, condition: str) -> list[Any]:
    """A column of the database's sessions for which a condition holds."""
    return await ask(url, f"SELECT {column} FROM pg_stat_activity WHERE datname = current_database() AND {condition}")


async def test_connections_that_ended_while_nothing_was_asked_are_made_again(lent_database: str, caplog: Any) -> None:
    async with build(lent_database) as buffer:
        await fill(buffer, 25)
        for _ in range(2):
            execute(lent_database, END_ALL)
            assert len(await asyncio.gather(*(buffer.get(1, TASK) for _ in range(10)))) == 10
        assert len(buffer) == 5
        await no_connection_out(buffer)
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


END_ALL = (
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = 'replaybuf'"
)


async def test_no_connection_asks_the_server_about_types(lent_database: str) -> None:
    """As asyncpg does for arrays other than those of texts, which costs more than all else of a new connection."""
    queries: list[bytes] = []

    async def hear(_link: Link, data: bytes) -> bool:
        queries.extend([data] if b"typeinfo" in data else [])
        return True

    async with proxied(lent_database) as proxy:
        proxy.fault = hear
        async with build(proxy.url, policy="prioritized", capacity=100, archive=10) as buffer:
            await asyncio.gather(*(buffer.put(group(number), TASK) for number in range(20)))
            await buffer.put(group(20), TASK, key="a")
            await buffer.update_priorities({item.uid: 2.0 async for item in buffer.find({})})
            await buffer.refresh_staleness(task_stale_thresholds={TASK: 4}, current_train_step=1)
            await buffer.checkpoint(1)
            async with buffer.lease_batch({TASK: 5}) as lease:
                assert len(lease.batch[TASK]) == 5
            await buffer.get(5, TASK)
            await buffer.restore(1)
            assert await buffer.delete({}) == 21
        assert queries == []
        connection = await asyncpg.connect(proxy.url)
        assert await connection.fetchval("SELECT $1::float8[]", [1.0]) == [1.0]
        await connection.close()
    assert queries, "asyncpg asks in other words"


async def test_a_take_that_is_cancelled_while_it_reconnects_takes_nothing(buffer: ReplayBuffer, proxy: Proxy) -> None:
    await fill(buffer, 5)
    for committed in (True, False):
        await all_told(buffer)
        proxy.fault = once(proxy.refuse(before_the_answer if committed else before_it_arrives))
        take = asyncio.create_task(buffer.get(2, TASK))
        await asyncio.sleep(0.3)
        take.cancel()
        with pytest.raises(asyncio.CancelledError):
            await take
        proxy.refusing = False
        assert await buffer.count(TASK, Status.COMPLETED) == 5
    assert await take_all(buffer) == [0, 1, 2, 3, 4]


async def test_stamps_that_nobody_asks_for_any_more_are_forgotten(lent_database: str) -> None:
    async with build(lent_database) as buffer:
        await fill(buffer, 1)
        execute(lent_database, "INSERT INTO rb_info (name, number) VALUES ('connection of last month', 1)")
        buffer.storage.sweeper._tidy_at = 0

        async def forgotten() -> bool:
            names = {*await ask(lent_database, "SELECT name FROM rb_info WHERE name LIKE 'connection %'")}
            assert names - {"connection of last month"}  # of those that are in use
            return "connection of last month" not in names

        await until(forgotten)


# Backends of PostgreSQL that are ended while large groups are sent: every put ends, and each group is there once


#: Long enough for a connection that falls silent, several times.
PATIENCE = 120.0

END_TWO = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND datname = current_database() ORDER BY random() LIMIT 2
"""


@pytest.mark.parametrize("seconds", [1, pytest.param(12, marks=pytest.mark.long)])
async def test_puts_of_large_groups_end_when_backends_are_ended(
    lent_database: str, seconds: int, figures: Figures
) -> None:
    """A statement that waits until it may send more has to hear that its connection is gone."""
    numbers, put_numbers, over, ended = count(), list[int](), asyncio.Event(), 0

    async def producer() -> None:
        while not over.is_set():
            number = next(numbers)
            await buffer.put(group(number, text="x" * (400_000 if number % 5 == 0 else 240)), TASK)
            put_numbers.append(number)

    async with build(lent_database) as buffer, asyncio.timeout(seconds + PATIENCE):
        assert await buffer.count_where({}) == 0
        async with asyncio.TaskGroup() as tasks:
            for _ in range(48):
                tasks.create_task(producer())
            for _ in range(seconds * 4):
                await asyncio.sleep(0.25)
                ended += len(await ask(lent_database, END_TWO))
            over.set()
        remaining = await take_all(buffer)
    figures.compare(ended, put_numbers, remaining)
    assert sorted(remaining) == sorted(put_numbers)
