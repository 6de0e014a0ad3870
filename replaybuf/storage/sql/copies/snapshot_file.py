"""The files of snapshots: opening, checking and closing one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from replaybuf.errors import SnapshotMismatchError
from replaybuf.storage.sql.copies.facts import GROUPS, damaged, is_damage, read_facts
from replaybuf.storage.sql.engine.errors import translated
from replaybuf.storage.sql.engine.sqlite import SqliteEngine
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.schema.create import check_schema


def file_engine(path: str, *, read_only: bool = False) -> SqliteEngine:
    """Return the engine for the SQLite file of a snapshot."""
    url = parse_url("sqlite://").set(database=str(Path(path).absolute()))
    return SqliteEngine(url, durability="normal", lock_timeout=30, read_only=read_only)


async def open_file(path: str, expected: Mapping[str, str]) -> SqliteEngine:
    """Open a snapshot and return its engine. Raises SnapshotError or SchemaError when it isn't as expected."""
    engine = file_engine(path, read_only=True)
    try:
        facts = await engine.read(lambda tx: _facts(tx, path))
        _compare(facts, expected, path)
    except BaseException as error:
        await engine.dispose()
        if isinstance(error, Exception) and is_damage(error):
            raise damaged(path, error) from error
        raise
    return engine


async def read_snapshot_facts(path: str) -> dict[str, str]:
    """Return a snapshot's facts. Raises SnapshotError or SchemaError when it isn't a snapshot."""
    engine = await open_file(path, {})
    try:
        return await engine.read(read_facts)
    finally:
        await engine.dispose()


def _facts(tx: Transaction, path: str) -> dict[str, str]:
    if not check_schema(tx.connection, path):
        raise SnapshotMismatchError(f"{path} is a database, but not a snapshot of replaybuf")
    facts = read_facts(tx)
    if GROUPS not in facts and "policy" not in facts:  # before the other facts existed, the policy was written last
        raise damaged(path, "whoever wrote it did not come to the end")
    return facts


def _compare(facts: Mapping[str, str], expected: Mapping[str, str], path: str) -> None:
    for name, value in expected.items():
        if facts.get(name, value) != value:
            raise SnapshotMismatchError(
                f"{path} was saved with {name} {facts[name]!r}, and this buffer has {name} {value!r}: "
                f"build the buffer with {name}={facts[name]!r} to resume from it"
            )


async def close_file(engine: SqliteEngine) -> None:
    """Close the file, leaving everything in it and no log beside it."""
    try:
        await engine.end_writing()
        with translated(engine.url, engine.lock_timeout):
            async with engine.pool.connect() as connection:
                await connection.run_sync(_leave_wal)
    finally:
        await engine.dispose()


def _leave_wal(connection: Connection) -> None:
    cursor: Any = connection.connection.cursor()
    cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    cursor.execute("PRAGMA journal_mode = DELETE")
    cursor.close()


def same_file(path: str, other: str) -> bool:
    """Return whether both paths name the same file."""
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)
