"""What a server that speaks PostgreSQL has of what the store needs: each part is tried, none is guessed from a version.

Two connections try the parts in transactions that are rolled back. Where replaybuf's tables are missing, some are made
for it, and are gone afterwards; where they are there, one row of theirs is locked for a moment, and that the server
could make them needs no trial.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from replaybuf.doctor import Finding, fine, problem, warning
from replaybuf.storage.sql.engine import locks, outage
from replaybuf.storage.sql.engine.errors import is_about_pooler, said, translated
from replaybuf.storage.sql.engine.postgres import SNAPSHOT
from replaybuf.storage.sql.engine.postgres_pool import Pool, PostgresSession, run
from replaybuf.storage.sql.engine.server_function import unusable
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.reader import LOCK_TIMEOUT, Reader
from replaybuf.storage.sql.schema.create import create_tables
from replaybuf.storage.sql.schema.tables import counter
from replaybuf.storage.sql.statements.put_at_once import FUNCTIONS

#: How long a part may take, and how long a notification may be on its way, in seconds.
TRIAL_SECONDS = 3.0
HEARD_SECONDS = 0.5
#: A payload that is more than servers with small limits take in a message, or in a row.
LARGE_BYTES = 17 << 20

_PAGE = "docs/engines.md says which servers have it"
#: Errors that say that the trial isn't allowed, not that the server lacks something.
_NOT_ALLOWED = {"42501": "the role may not", "25006": "the server, or the role, only reads"}


class Untried(Exception):  # noqa: N818
    """A part that couldn't be tried, and why."""


@dataclass(slots=True)
class Bench:
    """Two connections on which parts are tried. `has_tables`: replaybuf's are there."""

    one: Any
    other: Any
    has_tables: bool
    name: str = field(default_factory=lambda: f"rb_doctor_{secrets.token_hex(6)}")
    number: int = field(default_factory=lambda: secrets.randbits(62))
    #: What other parts rest on, once it was tried.
    sees_commits: bool = False
    ddl_is_undone: bool = True

    @asynccontextmanager
    async def begun(self, level: str = "READ COMMITTED", connection: Any = None) -> AsyncIterator[Any]:
        """A transaction on a connection, the first one unless given, which is rolled back."""
        connection = connection or self.one
        await connection.execute(f"BEGIN ISOLATION LEVEL {level};")
        try:
            yield connection
        finally:
            with suppress(Exception):  # the connection was lost: the next trial says so
                await connection.execute("ROLLBACK;")

    @asynccontextmanager
    async def table(self, more: str = "") -> AsyncIterator[tuple[Any, str]]:
        """A transaction with a table that has the columns of `rb_counter`, and its name."""
        if self.has_tables:
            async with self.begun() as connection:
                yield connection, counter.name
            return
        columns = f'name varchar COLLATE "C" PRIMARY KEY, value bigint NOT NULL{more}'
        async with self.made("TABLE", f"({columns})") as connection:
            yield connection, self.name

    @asynccontextmanager
    async def made(self, kind: str, how: str = "") -> AsyncIterator[Any]:
        """A transaction in which something of the bench's name is made, which is gone afterwards."""
        try:
            async with self.begun() as connection:
                await connection.execute(f"CREATE {kind} {self.name} {how}")
                yield connection
        finally:
            if not self.ddl_is_undone:
                await self.other.execute(f"DROP {kind} IF EXISTS {self.name}")


#: Tries a part. Returns what is wrong with it, nothing if all is well. Raises Untried, and what the driver raises.
Trial = Callable[[Bench], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class EnginePart:
    """A part that the store uses: its name, for what, and what becomes of a run without it."""

    name: str
    use: str
    without: str
    trial: Trial
    #: Without it no run is possible; else the store does without, or does worse.
    needed: bool = True
    #: That replaybuf's tables are there shows that the server has it.
    shown_by_tables: bool = False
    mend: str = _PAGE
    #: Without it nothing else can be tried.
    comes_first: bool = False


#: In the order in which they are tried.
PARTS: list[EnginePart] = []


def part(name: str, use: str, without: str, **more: Any) -> Callable[[Trial], Trial]:
    """Make a trial that of a part, which comes after those of `PARTS`."""

    def add(trial: Trial) -> Trial:
        PARTS.append(EnginePart(name, use, without, trial, **more))
        return trial

    return add


@part(
    "prepared statements",
    "every statement but the first of its kind",
    "statements fail, or others run in their place",
    mend="behind a pooler in transaction mode add statement_cache_size=0 to the url, or from PgBouncer 1.21 on set "
    "max_prepared_statements (docs/pgbouncer.md)",
    comes_first=True,
)
async def _prepared_statements(bench: Bench) -> str:
    ask = "SELECT CAST($1 AS text)"
    try:
        for value in ("prepared", "run again"):
            if await bench.one.fetchval(ask, value) != value:
                return "another statement ran than the one that was prepared"
            async with bench.begun(connection=bench.other) as other:  # a pooler has another connection for `one` then
                await other.fetchval("SELECT 1")
                if await bench.one.fetchval(ask, value) != value:
                    return "another statement ran than the one that was prepared"
    except Exception as error:
        if not is_about_pooler(str(getattr(error, "sqlstate", "")), str(error)):
            raise
        return f"they get lost between transactions, since a pooler changes the server's connections ({said(error)})"
    return ""


@part(
    "advisory locks",
    "every write, limit, key, restore and checkpoint",
    "writers would overtake restores, and limits would be exceeded",
)
async def _advisory_locks(bench: Bench) -> str:
    async with bench.begun() as one, bench.begun(connection=bench.other) as other:
        await one.fetch(locks.TAKE, bench.number)
        await one.fetch(locks.TAKE_NAMED, bench.name, locks.NamedLock.TASK)
        if await other.fetchval(locks.TRY_SHARED, bench.number):
            return "they are accepted, and exclude nobody"
    async with bench.begun() as one, bench.begun(connection=bench.other) as other:
        both = [await connection.fetchval(locks.TRY_SHARED, bench.number) for connection in (one, other)]
        if not all(both):
            return "they outlast their transaction" if not both[0] else "shared ones exclude each other"
        return "an exclusive one goes beside shared ones" if await other.fetchval(locks.TRY, bench.number) else ""


@part(
    "commits of others",
    "waits that look twice a second whether anything changed",
    "waits then read the buffer twice a second instead",
    needed=False,
)
async def _commits_of_others(bench: Bench) -> str:
    before = await bench.one.fetchval(SNAPSHOT)
    await bench.other.fetch("SELECT pg_current_xact_id()")
    bench.sees_commits = before != await bench.one.fetchval(SNAPSHOT)
    return "" if bench.sees_commits else "the server's snapshot doesn't change with a commit of another session"


@part(
    "isolation levels",
    "READ COMMITTED for writes, REPEATABLE READ for reads and checkpoints",
    "a writer that waited for a lock would act on what was there before, or a copy would mix two states",
)
async def _isolation(bench: Bench) -> str:
    for level, sees in (("READ COMMITTED", True), ("REPEATABLE READ", False)):
        async with bench.begun(level) as one:
            if (said := str(await one.fetchval("SHOW transaction_isolation"))) != level.lower():
                return f"{level} is {said.upper()}"
            if not bench.sees_commits:
                continue
            before = await one.fetchval(SNAPSHOT)
            await bench.other.fetch("SELECT pg_current_xact_id()")
            if (before != await one.fetchval(SNAPSHOT)) is not sees:
                return f"a statement in {level} {'does not see' if sees else 'sees'} what was committed before it"
    if not bench.sees_commits:
        raise Untried("the server only says that it has them")
    return ""


@part(
    "LISTEN",
    "waking those who wait as soon as a group is put",
    "waits then notice within half a second, by polling, what other processes have put",
    needed=False,
)
async def _notifications(bench: Bench) -> str:
    heard = asyncio.Event()

    def hear(*_: Any) -> None:
        heard.set()

    await bench.one.add_listener(bench.name, hear)
    try:
        await bench.other.fetch("SELECT pg_notify($1, '')", bench.name)
        async with asyncio.timeout(HEARD_SECONDS):
            await heard.wait()
    except TimeoutError:
        return "LISTEN is accepted, and a NOTIFY doesn't arrive"
    finally:
        await bench.one.remove_listener(bench.name, hear)
    return ""


@part(
    "settings of connections",
    "lock_timeout, idle_in_transaction_session_timeout, synchronous_commit",
    "set them for the role: ALTER ROLE ... SET ... (docs/pgbouncer.md)",
    needed=False,
)
async def _settings(bench: Bench) -> str:
    lost = []
    for name in ("lock_timeout", "idle_in_transaction_session_timeout", "synchronous_commit"):
        if (value := await bench.one.fetchval("SELECT current_setting($1, true)", name)) in ("0", "off", None, ""):
            lost.append(f"{name} is {value or 'unknown'}")
    return f"they don't reach the server: {', '.join(lost)}" if lost else ""


@part(
    "transactional DDL",
    "making all tables or none",
    "a process that is killed while it makes the tables leaves some of them behind: drop them, and begin again",
    needed=False,
    shown_by_tables=True,
)
async def _ddl(bench: Bench) -> str:
    async with bench.table():
        pass
    if await bench.other.fetchval("SELECT count(*) FROM pg_class WHERE relname = $1", bench.name):
        bench.ddl_is_undone = False
        await bench.other.execute(f"DROP TABLE {bench.name}")
        return "a table stays that was made in a transaction that is rolled back"
    return ""


@part("tables", "the tables, indexes and views", "nothing can be stored", shown_by_tables=True)
async def _tables(bench: Bench) -> str:
    if not bench.ddl_is_undone:
        raise Untried("what is made in a transaction would stay")
    async with bench.begun() as one:
        await run(lambda: create_tables(Transaction(PostgresSession(one))))
    return ""


@part(
    "functions in PL/pgSQL",
    "light puts in one round trip",
    "they take three; let the owner of the tables make the functions (replaybuf db upgrade URL)",
    needed=False,
)
async def _functions(bench: Bench) -> str:
    if bench.has_tables:
        async with bench.begun() as one:
            lacking = await run(lambda: unusable(Transaction(PostgresSession(one)), FUNCTIONS))
        return f"those of this version aren't there for this role ({', '.join(lacking)})" if lacking else ""
    if not bench.ddl_is_undone:
        raise Untried("what is made in a transaction would stay")
    how = "() RETURNS bigint[] LANGUAGE plpgsql AS $$ BEGIN RETURN ARRAY[5, 7]; END $$"
    async with bench.made("FUNCTION", how) as one:
        found = await one.fetchval(f"SELECT {bench.name}()")
        return "" if found == [5, 7] else f"one gave {found}, not {[5, 7]}"


@part("SKIP LOCKED", "draws, which don't wait for each other", "two takers would wait for, or get, the same groups")
async def _row_locks(bench: Bench) -> str:
    async with bench.table() as (one, table):
        query = f"SELECT value FROM {table} WHERE name = $1 FOR UPDATE"  # noqa: S608
        if not bench.has_tables:
            await one.execute(f"INSERT INTO {table} (name, value) VALUES ('uid', 0)")  # noqa: S608
        if not await one.fetch(query + " SKIP LOCKED", "uid"):
            raise Untried("the row for it is locked by somebody else")
        await one.fetch(f"SELECT value FROM {table} WHERE name = $1 FOR KEY SHARE", "uid")  # noqa: S608
        if not bench.has_tables:
            return ""
        async with bench.begun(connection=bench.other) as other:
            return "a locked row isn't skipped" if await other.fetch(query + " SKIP LOCKED", "uid") else ""


@part(
    "writes in queries",
    "a put or a take in one statement (WITH ... INSERT ... ON CONFLICT ... RETURNING)",
    "no group could be put",
)
async def _writing_queries(bench: Bench) -> str:
    async with bench.table() as (one, table):
        put = f"""
            WITH put AS (
                INSERT INTO {table} AS old (name, value) SELECT unnest($1::varchar[]), unnest($2::bigint[])
                ON CONFLICT (name) DO UPDATE SET value = old.value + excluded.value RETURNING value
            ), gone AS (DELETE FROM {table} WHERE name = $3 RETURNING value)
            SELECT (SELECT sum(value) FROM put), (SELECT sum(value) FROM gone)"""  # noqa: S608
        names = [f"{bench.name} {n}" for n in range(3)]
        await one.fetch(put, names[1:], [5, 7], "")
        [(stored, gone)] = await one.fetch(put, names[:2], [1, 2], names[2])
        return "" if (stored, gone) == (8, 7) else f"they gave {stored} and {gone} where PostgreSQL gives 8 and 7"


@part("sequences", "the uids of groups", "groups would have no numbers", shown_by_tables=True)
async def _sequences(bench: Bench) -> str:
    async with bench.made("SEQUENCE") as one:
        many = f"SELECT ARRAY(SELECT nextval('{bench.name}') FROM generate_series(1, 3))"  # noqa: S608
        first = list(await one.fetchval(many))
        await one.fetch(f"SELECT setval('{bench.name}', 10, false)")
        then = list(await one.fetchval(many))
        return "" if [*first, *then] == [1, 2, 3, 10, 11, 12] else f"one gave {first}, and from 10 on {then}"


@part("JSONB", "staleness, tags, and the views", "queries and views would fail")
async def _jsonb(bench: Bench) -> str:
    found = await bench.one.fetchval("""
        SELECT count(*)
        FROM jsonb_array_elements(CAST('[{"a": [1, 2]}, {"a": [3]}]' AS jsonb)) WITH ORDINALITY AS e (v, n)
        WHERE jsonb_path_exists(v, '$.a[*] ? (@ > 1)') AND v ->> 'a' IS NOT NULL AND n <= 2""")
    return "" if found == 2 else f"a path was found {found} times, not twice"


@part(
    "rows of 17 MB",
    "the payload of a group, in one row and one message",
    "keep payloads apart (payloads=, docs/payloads.md), with a payload_threshold below the server's limit",
    needed=False,
    shown_by_tables=True,
)
async def _large_rows(bench: Bench) -> str:
    data = secrets.token_bytes(LARGE_BYTES)  # nothing makes it smaller
    async with bench.table(", data bytea") as (one, table):
        await one.execute(f"INSERT INTO {table} VALUES ('large', 0, $1)", data)  # noqa: S608
        part = await one.fetchval(f"SELECT substr(data, {LARGE_BYTES - 99}, 100) FROM {table}")  # noqa: S608
        return "" if part == data[-100:] else "its last 100 bytes aren't those that were sent"


@part(
    "transaction identity",
    "finding out whether a commit succeeded whose answer was lost",
    "a lost connection in the middle of a write is then an error of the call, which has to find out by itself",
    needed=False,
)
async def _identity(bench: Bench) -> str:
    """(The last trial: it ends a connection.)"""
    async with bench.begun() as one:
        identity = outage.Identity(bench.name, 1, bench.number)
        await one.fetch(locks.TAKE, identity.lock)
        tx = Transaction(PostgresSession(bench.other))
        if not await run(lambda: outage.end_if_running(tx, identity)):
            return "the lock of a transaction isn't in pg_locks"
        while await run(lambda: outage.end_if_running(tx, identity)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return ""


def check_engine(reader: Reader) -> Sequence[Finding]:
    """Try all parts, and say which are missing. Raises ReplayBufError when there are no two connections to be had."""
    has_tables = reader.read_any(lambda tx: tx.revision()) is not None
    return _findings(asyncio.run(_try_all(reader, has_tables=has_tables)))


async def _try_all(reader: Reader, *, has_tables: bool) -> Sequence[tuple[EnginePart, str, bool]]:
    """Return each part, what is wrong with it (or why it wasn't tried), and whether it was tried."""
    with translated(reader.url, LOCK_TIMEOUT):
        pool = Pool(reader.url, lock_timeout=LOCK_TIMEOUT, read_only=False)
        lent: list[Any] = []
        try:
            lent += [await pool.take(), await pool.take()]
            bench, tried = Bench(lent[0], lent[1], has_tables), []
            for part in PARTS:
                if not (has_tables and part.shown_by_tables):
                    tried.append((part, *await _try(part, bench)))
                if part.comes_first and tried[-1][1]:
                    break
            return tried
        finally:
            for connection in lent:
                await pool.discard(connection)
            await pool.close()


async def _try(part: EnginePart, bench: Bench) -> tuple[str, bool]:
    try:
        async with asyncio.timeout(TRIAL_SECONDS):
            return await part.trial(bench), True
    except Untried as why:
        return str(why), False
    except TimeoutError:
        return f"no answer within {TRIAL_SECONDS:g} s", True
    except Exception as error:
        state = getattr(error, "sqlstate", None)
        if not isinstance(state, str):
            raise
        if state in _NOT_ALLOWED:
            return f"{_NOT_ALLOWED[state]}: {said(error)}", False
        return said(error), True


def _findings(tried: Sequence[tuple[EnginePart, str, bool]]) -> Sequence[Finding]:
    there = [part.name for part, wrong, _ in tried if not wrong]
    found = [fine(f"tried, and there: {', '.join(there)}")] if there else []
    untried: dict[str, list[str]] = {}
    for part, wrong, was_tried in tried:
        if not was_tried:
            untried.setdefault(wrong, []).append(part.name)
        elif wrong and part.needed:
            found.append(problem(f"{part.name}: {wrong}; needed for {part.use}: {part.without}", part.mend))
        elif wrong:
            found.append(warning(f"{part.name}: {wrong}; used for {part.use}", part.without))
    for why, names in untried.items():
        found.append(warning(f"couldn't be tried: {', '.join(names)} ({why})", "ask as the role of the run"))
    return found
