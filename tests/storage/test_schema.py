"""The alembic chain makes exactly the tables of `tables.py`, on both databases, and opening checks the revision."""

from __future__ import annotations

import asyncio
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, make_url, text

from replaybuf.errors import StorageError
from replaybuf.storage.sql.engine.opening import open_database
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.inspection import writer
from replaybuf.storage.sql.inspection.writer import migrations_folder, over_sqlalchemy, transaction_of, upgrade
from replaybuf.storage.sql.schema import revisions
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.schema.records import metadata
from replaybuf.storage.sql.schema.revisions import HEAD, REVISIONS, VERSION_TABLE
from tests.faults.processes import barrier, end, start
from tests.faults.schemas import open_together
from tests.reasons import because
from tests.stores import build
from tests.stores import group as new_group

T = TypeVar("T")


async def run(url: str, function: Callable[[Connection], T]) -> T:
    """Run a function in a transaction of a database."""
    return await over_sqlalchemy(parse_url(url), function)


def create(connection: Connection) -> None:
    create_schema(transaction_of(connection), "here")


@pytest.fixture(params=["sqlite", "postgresql"])
def two_urls(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Two new, empty databases of one kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/one.db", f"sqlite:///{tmp_path}/two.db"
    else:
        from tests.postgres import new_database

        server = request.getfixturevalue("postgres_url")
        with new_database(server) as one, new_database(server) as two:
            yield one, two


async def definition(url: str) -> dict[str, Any]:
    """Everything in the database's own catalog that makes up the schema."""
    if url.startswith("sqlite"):
        return sqlite_definition(make_url(url).database or "")
    return await postgres_definition(url)


def sqlite_definition(path: str) -> dict[str, Any]:
    """The SQL of tables, indexes and views, with spaces, quotes and the order of constraints left out of account."""
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    connection.close()
    return {f"{kind} {name}": sorted(_clauses(sql)) if kind == "table" else _squeezed(sql) for kind, name, sql in rows}


def _squeezed(sql: str) -> str:
    return re.sub(r"\s+", " ", sql.replace('"', "")).replace("( ", "(").replace(" )", ")").strip()


def _clauses(sql: str) -> list[str]:
    """The columns and constraints of a CREATE TABLE."""
    inside = _squeezed(sql).split("(", 1)[1].rsplit(")", 1)[0]
    return [clause.strip() for clause in re.split(r",(?![^(]*\))", inside)]


_POSTGRES_CATALOG = {
    "columns": """
        SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attstorage, l.collname,
               pg_get_expr(d.adbin, d.adrelid)
          FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
          LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
          LEFT JOIN pg_collation l ON l.oid = a.attcollation
         WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'v')
           AND a.attnum > 0 AND NOT a.attisdropped
         ORDER BY c.relname, a.attname""",
    "options": """
        SELECT c.relname, c.relkind, c.reloptions, t.reloptions
          FROM pg_class c LEFT JOIN pg_class t ON t.oid = c.reltoastrelid
         WHERE c.relnamespace = 'public'::regnamespace ORDER BY c.relname""",
    "indexes": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY indexname",
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
         WHERE connamespace = 'public'::regnamespace ORDER BY 1, 2""",
    "sequences": """
        SELECT sequencename, data_type, start_value, min_value, max_value, increment_by, cycle, cache_size
          FROM pg_sequences WHERE schemaname = 'public' ORDER BY sequencename""",
    "views": "SELECT viewname, definition FROM pg_views WHERE schemaname = 'public' ORDER BY viewname",
    "triggers": "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal ORDER BY tgname",
    "functions": "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
    " AND proname NOT LIKE 'rb\\_call\\_%' ORDER BY proname",
}  # fmt: skip


async def postgres_definition(url: str) -> dict[str, Any]:
    connection = await asyncpg.connect(url)
    try:
        return {
            name: [tuple(row) for row in await connection.fetch(query)] for name, query in _POSTGRES_CATALOG.items()
        }
    finally:
        await connection.close()


async def test_the_chain_makes_the_tables(two_urls: tuple[str, str]) -> None:
    created, upgraded = two_urls
    await run(created, create)
    await run(upgraded, upgrade)
    assert await definition(upgraded) == await definition(created)


async def test_the_definition_sees_what_matters(two_urls: tuple[str, str]) -> None:
    """Of the comparison above: it has the partial indexes, the views and what PostgreSQL stores apart."""
    url, _ = two_urls
    await run(url, create)
    seen = repr(await definition(url))
    assert all(index.name in seen for table in metadata.tables.values() for index in table.indexes)
    assert "WHERE pinned_staleness IS NULL" in seen.replace("(", "").replace(")", "")
    assert "groups" in seen
    assert "rollouts" in seen
    if url.startswith("postgresql"):
        assert "'rb_payload', 'data', 'bytea', True, b'e'" in seen
        assert "fillfactor=80" in seen


@pytest.mark.parametrize("make", [create, upgrade])
async def test_alembic_sees_no_difference(two_urls: tuple[str, str], make: Callable[[Connection], None]) -> None:
    url, _ = two_urls

    def differences(connection: Connection) -> list[Any]:
        options = {
            "compare_type": True,
            "compare_server_default": True,
            "include_name": lambda name, kind, _: not (kind == "table" and name == VERSION_TABLE),
        }
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))

    await run(url, make)
    assert await run(url, differences) == []


def revision_of(connection: Connection) -> str | None:
    return transaction_of(connection).revision()


async def test_both_ways_say_the_same_revision(two_urls: tuple[str, str]) -> None:
    for url, make in zip(two_urls, (create, upgrade), strict=True):
        await run(url, make)
        assert await run(url, revision_of) == HEAD


def test_the_revisions_are_those_of_the_chain() -> None:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    chain = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    assert tuple(reversed(chain)) == REVISIONS


NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    op.add_column("rb_worker", sa.Column("gpu", sa.Text))
"""


@pytest.fixture
def next_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of one more revision, for a test of what an upgrade does besides."""
    folder = tmp_path / "migrations"
    shutil.copytree(migrations_folder(), folder)
    (folder / "versions/0002_next.py").write_text(NEXT)
    monkeypatch.setattr(writer, "migrations_folder", lambda: folder)
    monkeypatch.setattr(revisions, "HEAD", "0002")


@pytest.mark.parametrize("kind", ["TABLE", "VIEW"])
async def test_what_somebody_else_has_named_like_our_views_stays(
    two_urls: tuple[str, str], kind: str, next_revision: None
) -> None:
    old, new = two_urls
    await run(old, create)
    await run(old, lambda connection: connection.execute(text("DROP VIEW events")))
    for url in two_urls:
        await run(url, lambda connection: connection.execute(text(f"CREATE {kind} events AS SELECT 1 AS mine")))
    with pytest.raises(
        StorageError, match=r"named events that are not replaybuf's.*nothing was changed", check=because("schema")
    ):
        await run(old, upgrade)
    with pytest.raises(StorageError, match="named events that are not replaybuf's", check=because("not a database")):
        await run(new, create)
    for url in two_urls:
        assert await run(url, lambda connection: connection.execute(text("SELECT mine FROM events")).scalar()) == 1
    assert await run(old, revision_of) == HEAD


async def test_an_upgrade_keeps_rows_and_views(two_urls: tuple[str, str], next_revision: None) -> None:
    url, _ = two_urls
    async with build(url) as buffer:
        await buffer.put(new_group(1, 2), "math", tags={"i": 1})
    await run(url, upgrade)
    assert await run(url, revision_of) == "0002"
    seen = await run(url, lambda connection: connection.execute(text("SELECT count(*) FROM rollouts")).scalar())
    assert seen == 2
    await run(url, lambda connection: connection.execute(text("SELECT gpu FROM rb_worker")))


async def test_an_older_schema_is_refused(two_urls: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says how to upgrade, without the password."""
    url, _ = two_urls
    await run(url, create)
    await run(url, lambda connection: connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '0000'")))
    monkeypatch.setattr(revisions, "REVISIONS", ("0000", HEAD))
    buffer = build(url)
    with pytest.raises(StorageError, match=r"revision 0000.*replaybuf doctor .* --upgrade", check=because("schema")):
        await buffer.put(new_group(1), "math")
    await buffer.close()


async def test_a_newer_schema_is_refused(two_urls: tuple[str, str]) -> None:
    url, _ = two_urls
    await run(url, create)
    await run(url, lambda connection: connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '0999'")))
    buffer = build(url)
    with pytest.raises(StorageError, match=r"0999.*newer version; upgrade replaybuf here", check=because("schema")):
        await buffer.put(new_group(1), "math")
    await buffer.close()


async def test_an_upgrade_that_fails_changes_nothing(two_urls: tuple[str, str]) -> None:
    """The chain runs in one transaction, on both databases."""
    url, _ = two_urls
    before = await definition(url)

    def fail(connection: Connection) -> None:
        upgrade(connection)
        raise RuntimeError("in the end")

    with pytest.raises(RuntimeError, match="in the end"):
        await run(url, fail)
    assert await definition(url) == before
    await run(url, upgrade)


async def test_who_waited_for_the_tables_of_another_finds_them(postgres_database: str) -> None:
    first, second = (open_database(parse_url(postgres_database)) for _ in range(2))

    def create_version(tx: Transaction) -> None:
        tx.dialect.lock_schema(tx)
        tx.run(f"CREATE TABLE {VERSION_TABLE} (version_num text)")
        tx.run(f"INSERT INTO {VERSION_TABLE} VALUES ('{HEAD}')")

    def find_version(tx: Transaction) -> str | None:
        assert tx.revision() is None  # which the server process remembers
        tx.dialect.lock_schema(tx)
        return tx.revision()

    async def waits() -> None:
        while True:
            if await first.read(lambda tx: tx.value("SELECT 1 FROM pg_locks WHERE NOT granted")):
                return
            await asyncio.sleep(0.01)

    try:
        async with first.transaction(write=True) as steps:
            await steps.run(create_version)
            found = asyncio.create_task(second.write(find_version))
            await asyncio.wait_for(waits(), 30)
        assert await found == HEAD
    finally:
        await first.dispose()
        await second.dispose()


@pytest.mark.parametrize("count", [6, pytest.param(16, marks=pytest.mark.long)])
async def test_processes_create_one_database_together(two_urls: tuple[str, str], tmp_path: Path, count: int) -> None:
    """Several that open a new database at once all succeed, and it has one schema with all their groups."""
    url, other = two_urls
    together = barrier(count)
    ledgers = [tmp_path / str(number) for number in range(count)]
    processes = [start(open_together, ledger, url, number, together) for number, ledger in enumerate(ledgers)]
    for process, ledger in zip(processes, ledgers, strict=True):
        assert await asyncio.to_thread(end, process, ledger) == 0
    async with build(url) as buffer:
        assert sorted([item.item[0].rollout_id async for item in buffer.find({})]) == list(range(count))
    await run(other, create)
    assert await definition(url) == await definition(other)
