"""The schema, and engines."""

from __future__ import annotations

import asyncio
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, text

from replaybuf.errors import StorageError
from replaybuf.storage.sql import schema
from replaybuf.storage.sql.engine import open_database
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.inspection import writer
from replaybuf.storage.sql.inspection.writer import migrations_folder, over_sqlalchemy, transaction_of, upgrade
from replaybuf.storage.sql.schema import HEAD, REVISIONS, VERSION_TABLE
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.schema.tables import metadata
from replaybuf.storage.sql.schema.views import VIEWS
from tests.bad_input.conftest import refused_put
from tests.faults.failpoints import open_together
from tests.faults.processes import barrier, end, start
from tests.postgres import execute
from tests.stores import because, build, until
from tests.stores import group as new_group

T = TypeVar("T")


async def run(url: str, function: Callable[[Connection], T]) -> T:
    """Run a function in a transaction of a database."""
    return await over_sqlalchemy(Access(parse_url(url)), function)


def create(connection: Connection) -> None:
    create_schema(transaction_of(connection), "here")


def differences(connection: Connection) -> list[Any]:
    """The differences of a database from the metadata of the tables, as alembic sees them."""
    options = {
        "compare_type": True,
        "compare_server_default": True,
        "include_name": lambda name, kind, _: not (kind == "table" and name == VERSION_TABLE),
    }
    with warnings.catch_warnings(action="ignore"):  # an index of an expression isn't compared on SQLite
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


def names_of(connection: Connection) -> set[str]:
    """The names of all tables and views but alembic's."""
    catalog = inspect(connection)
    return {*catalog.get_table_names(), *catalog.get_view_names()} - {VERSION_TABLE, "sqlite_sequence"}


@pytest.mark.parametrize("make", [create, upgrade])
async def test_both_ways_make_the_tables(empty_url: str, make: Callable[[Connection], None]) -> None:
    await run(empty_url, make)
    assert await run(empty_url, differences) == []
    assert await run(empty_url, revision_of) == HEAD
    assert await run(empty_url, names_of) == {*metadata.tables, *VIEWS}


async def test_postgresql_stores_payloads_apart_and_leaves_room_in_pages(postgres_database: str) -> None:
    await run(postgres_database, create)
    answers = {
        "SELECT attstorage FROM pg_attribute WHERE attrelid = 'rb_payload'::regclass AND attname = 'data'": "e",
        "SELECT reloptions[1] FROM pg_class WHERE relname = 'rb_group'": "fillfactor=80",
    }
    for sql, expected in answers.items():
        answer = await run(postgres_database, lambda connection, sql=sql: connection.execute(text(sql)).scalar())
        assert (answer.decode() if isinstance(answer, bytes) else answer) == expected


def revision_of(connection: Connection) -> str | None:
    return transaction_of(connection).revision()


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
    monkeypatch.setattr(schema, "HEAD", "0002")


@pytest.mark.parametrize("kind", ["TABLE", "VIEW"])
async def test_what_somebody_else_has_named_like_our_views_stays(empty_url: str, kind: str) -> None:
    execute(empty_url, f"CREATE {kind} events AS SELECT 1 AS mine")
    with pytest.raises(StorageError, match="named events that are not replaybuf's", check=because("not a database")):
        await run(empty_url, create)
    assert await run(empty_url, lambda connection: connection.scalar(text("SELECT mine FROM events"))) == 1


async def test_an_upgrade_keeps_rows_and_views(empty_url: str, next_revision: None) -> None:
    async with build(empty_url) as buffer:
        await buffer.put(new_group(1, 2), "math", tags={"i": 1})
    await run(empty_url, upgrade)
    assert await run(empty_url, revision_of) == "0002"
    count = await run(empty_url, lambda connection: connection.execute(text("SELECT count(*) FROM rollouts")).scalar())
    assert count == 2
    await run(empty_url, lambda connection: connection.execute(text("SELECT gpu FROM rb_worker")))


@pytest.mark.parametrize(
    ("revision", "message"),
    [
        ("0000", r"revision 0000.*replaybuf doctor .* --upgrade"),
        ("0999", r"0999.*newer version; upgrade replaybuf here"),
    ],
)
async def test_an_older_or_newer_schema_is_refused(
    empty_url: str, monkeypatch: pytest.MonkeyPatch, revision: str, message: str
) -> None:
    """The message says what to upgrade."""
    await run(empty_url, create)
    execute(empty_url, f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'")
    monkeypatch.setattr(schema, "REVISIONS", ("0000", HEAD))
    error = await refused_put(empty_url, StorageError)
    assert error.reason == "schema"
    assert re.search(message, str(error))


async def test_an_upgrade_that_fails_changes_nothing(empty_url: str) -> None:
    """The chain runs in one transaction, on both databases."""

    def fail(connection: Connection) -> None:
        upgrade(connection)
        raise RuntimeError("in the end")

    with pytest.raises(RuntimeError, match="in the end"):
        await run(empty_url, fail)
    assert await run(empty_url, names_of) == set()
    await run(empty_url, upgrade)


async def test_who_waited_for_the_tables_of_another_finds_them(postgres_database: str) -> None:
    first, second = (open_database(Access(parse_url(postgres_database))) for _ in range(2))

    def create_version(tx: Transaction) -> None:
        tx.lock_schema()
        tx.run(f"CREATE TABLE {VERSION_TABLE} (version_num text)")
        tx.run(f"INSERT INTO {VERSION_TABLE} VALUES ('{HEAD}')")

    def find_version(tx: Transaction) -> str | None:
        assert tx.revision() is None  # which the server process remembers
        tx.lock_schema()
        return tx.revision()

    try:
        async with first.transaction(write=True) as step:
            await step(create_version)
            finding = asyncio.create_task(second.write(find_version))
            await until(lambda: first.read(lambda tx: tx.value("SELECT 1 FROM pg_locks WHERE NOT granted")), 30)
        assert await finding == HEAD
    finally:
        await first.dispose()
        await second.dispose()


@pytest.mark.parametrize("count", [4, pytest.param(16, marks=pytest.mark.long)])
async def test_processes_create_one_database_together(empty_url: str, tmp_path: Path, count: int) -> None:
    """Several that open a new database at once all succeed, and it has one schema with all their groups."""
    together = barrier(count)
    ledgers = [tmp_path / str(number) for number in range(count)]
    processes = [start(open_together, ledger, empty_url, number, together) for number, ledger in enumerate(ledgers)]
    for process, ledger in zip(processes, ledgers, strict=True):
        assert await asyncio.to_thread(end, process, ledger) == 0
    async with build(empty_url) as buffer:
        assert sorted([item.item[0].rollout_id async for item in buffer.find({})]) == list(range(count))
    assert await run(empty_url, differences) == []
