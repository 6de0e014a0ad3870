"""Creating and checking the schema.

A new database gets the tables of `tables.py` at once and is stamped with the newest revision; an existing one must be
at that revision. The alembic chain in `migrations` upgrades older ones (`inspection.writer`)."""

from __future__ import annotations

import uuid
from functools import cache
from typing import TYPE_CHECKING

from sqlalchemy import Index
from sqlalchemy.schema import CreateIndex, CreateSequence, CreateTable, ExecutableDDLElement

from replaybuf.errors import StorageError
from replaybuf.storage.sql.schema import HEAD, VERSION_TABLE, check_schema
from replaybuf.storage.sql.schema.tables import IDENTITY, metadata, uid_sequence
from replaybuf.storage.sql.schema.views import CREATE_VIEWS, VIEWS

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.dialect import Dialect
    from replaybuf.storage.sql.engine.transaction import Transaction


# As created by alembic.
_CREATE_VERSION = f"""CREATE TABLE {VERSION_TABLE} (
    version_num VARCHAR(32) NOT NULL, CONSTRAINT {VERSION_TABLE}_pkc PRIMARY KEY (version_num))"""


def create_schema(tx: Transaction, where: str) -> None:
    """Create the schema if missing; several processes may do so at once."""
    tx.lock_schema()
    if check_schema(tx, where):
        return
    if taken := {*metadata.tables, *VIEWS} & {*tx.values("{tables}"), *tx.values("{views}")}:
        raise StorageError(
            f"{where} already has tables or views named {', '.join(sorted(taken))} that are not replaybuf's; "
            "use another database, or rename them",
            reason="not a database",
        )
    create_tables(tx)
    create_views(tx)
    tx.run(_CREATE_VERSION)
    tx.change(f"INSERT INTO {VERSION_TABLE} VALUES (:revision)", revision=HEAD)  # noqa: S608


def create_tables(tx: Transaction) -> None:
    """Create all tables, indexes and initial rows in an empty database."""
    for definition in _definitions(tx.dialect):
        tx.run(definition)
    tx.change("INSERT INTO rb_info (name, number) VALUES ('uid', 0)")
    tx.change("INSERT INTO rb_info (name, value) VALUES (:name, :value)", name=IDENTITY, value=uuid.uuid4().hex)
    if tx.dialect.name == "postgresql":
        for table in metadata.tables.values():
            if table.info:
                parameters = ", ".join(f"{name} = {value}" for name, value in table.info.items())
                tx.run(f"ALTER TABLE {table.name} SET ({parameters})")
        # Payloads are stored out of line without TOAST compression, which isn't worth its time.
        tx.run("ALTER TABLE rb_payload ALTER COLUMN data SET STORAGE EXTERNAL")


def create_index(tx: Transaction, index: Index) -> None:
    """Create an index."""
    tx.run(_sql(CreateIndex(index), tx.dialect))


@cache
def _definitions(dialect: Dialect) -> list[str]:
    """Return the statements that create all tables and indexes. (To compile them takes longer than to run them.)"""
    tables = metadata.sorted_tables
    statements: list[ExecutableDDLElement] = [CreateSequence(uid_sequence)] if dialect.is_remote else []
    statements += map(CreateTable, tables)
    statements += [CreateIndex(index) for table in tables for index in table.indexes]
    return [_sql(statement, dialect) for statement in statements]


def _sql(definition: ExecutableDDLElement, dialect: Dialect) -> str:
    return str(definition.compile(dialect=dialect.compiler))


def create_views(tx: Transaction) -> None:
    """Create the views."""
    for statement in CREATE_VIEWS[tx.dialect.name].values():
        tx.run(statement)


def drop_views(tx: Transaction) -> None:
    """Drop the views that exist."""
    for view in VIEWS:
        tx.run(f"DROP VIEW IF EXISTS {view}")
