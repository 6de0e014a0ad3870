"""The floor: the same bytes through the bare drivers, written in the usual way without replaybuf."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Self


class SqliteFloor:
    """The `sqlite3` module: WAL, synchronous=NORMAL, 4 KiB pages, one transaction per put."""

    def __init__(self, path: str, page_size: int = 4096) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        for pragma in (f"page_size = {page_size}", "journal_mode = WAL", "synchronous = NORMAL"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.execute("CREATE TABLE IF NOT EXISTS floor (id INTEGER PRIMARY KEY, data BLOB NOT NULL)")

    def put(self, payloads: Sequence[bytes]) -> None:
        """Insert payloads, each in its own transaction."""
        execute = self._connection.execute
        for payload in payloads:
            execute("BEGIN IMMEDIATE")
            execute("INSERT INTO floor (data) VALUES (?)", (payload,))
            execute("COMMIT")

    def take(self, size: int) -> list[bytes]:
        """Return the oldest payloads, deleted in the same transaction; not decoded."""
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        ids = [row[0] for row in execute("SELECT id FROM floor ORDER BY id LIMIT ?", (size,))]
        marks = ",".join("?" * len(ids))
        rows = execute(f"DELETE FROM floor WHERE id IN ({marks}) RETURNING data", ids).fetchall()  # noqa: S608
        execute("COMMIT")
        return [row[0] for row in rows]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class TunedSqliteFloor(SqliteFloor):
    """The `sqlite3` module at its best: 64 puts a transaction, 16 KiB pages, freed pages not overwritten."""

    def __init__(self, path: str) -> None:
        super().__init__(path, page_size=16 * 1024)
        self._connection.execute("PRAGMA secure_delete = FAST")

    def put(self, payloads: Sequence[bytes]) -> None:
        """Insert payloads, 64 in a transaction."""
        execute = self._connection.execute
        for start in range(0, len(payloads), 64):
            execute("BEGIN IMMEDIATE")
            for payload in payloads[start : start + 64]:
                execute("INSERT INTO floor (data) VALUES (?)", (payload,))
            execute("COMMIT")


def copy_log_back(path: str) -> None:
    """Copy SQLite's log into the database, through a connection of its own.

    Part of the work of whoever wrote it: without this, a short measurement ends before the log is copied back at all.
    """
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    connection.close()


class PostgresFloor:
    """asyncpg: 8 connections, one transaction per put; payloads neither compressed nor in the row, as in replaybuf."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool: Any = None

    async def __aenter__(self) -> Self:
        import asyncpg

        self._pool = await asyncpg.create_pool(self._url, min_size=8, max_size=8)
        await self._pool.execute(
            "CREATE TABLE IF NOT EXISTS floor (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, data bytea NOT NULL)"
        )
        await self._pool.execute("ALTER TABLE floor ALTER COLUMN data SET STORAGE EXTERNAL")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    async def put(self, payloads: Sequence[bytes]) -> None:
        """Insert payloads, each in its own transaction, over 8 connections."""
        waiting = iter(payloads)

        async def worker() -> None:
            async with self._pool.acquire() as connection:
                for payload in waiting:
                    await connection.execute("INSERT INTO floor (data) VALUES ($1)", payload)

        await asyncio.gather(*(worker() for _ in range(8)))

    async def put_one(self, payload: bytes, *, notify: bool = False) -> None:
        """Insert a payload in its own transaction; `notify` wakes who listens."""
        async with self._pool.acquire() as connection:
            await connection.execute("INSERT INTO floor (data) VALUES ($1)", payload)
            if notify:
                await connection.execute("NOTIFY floor")

    async def listen(self, heard: Callable[[], None]) -> Any:
        """Call `heard` at each notification. Return the connection that listens."""
        connection = await self._pool.acquire()
        await connection.add_listener("floor", lambda *_: heard())
        return connection

    async def take(self, size: int) -> list[bytes]:
        """Return the oldest payloads, deleted in the same transaction; not decoded."""
        async with self._pool.acquire() as connection, connection.transaction():
            ids = await connection.fetch("SELECT id FROM floor ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED", size)
            rows = await connection.fetch(
                "DELETE FROM floor WHERE id = ANY($1::bigint[]) RETURNING data", [row[0] for row in ids]
            )
        return [row[0] for row in rows]
