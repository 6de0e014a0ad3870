"""Transactions of PostgreSQL: statements from synchronous functions, and what only this database does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from pydantic_core import from_json
from sqlalchemy import JSON
from sqlalchemy.util import await_only, greenlet_spawn

from replaybuf.storage.sql.engine import dialect
from replaybuf.storage.sql.engine.locks import Lock, NamedLock
from replaybuf.storage.sql.engine.postgres_connect import Connection
from replaybuf.storage.sql.engine.postgres_dialect import NOW, POSTGRES, PostgresDialect, array, inlined, texts
from replaybuf.storage.sql.engine.transaction import (
    DEFAULT,
    Row,
    Scope,
    Transaction,
    after_commit,
    on_commit,
    on_statement,
)
from replaybuf.storage.sql.schema.tables import group, uid_sequence

T = TypeVar("T")


class PostgresTransaction(Transaction):
    """A transaction on an asyncpg connection, which caches prepared statements; only in functions called by `run`.

    Errors are asyncpg's; raises OSError when the connection can't be used any more. `waiting` are statements to be sent
    with the next one; None where nobody sends them with COMMIT.
    """

    dialect = POSTGRES

    def __init__(self, connection: Connection, scope: Scope = DEFAULT, waiting: list[str] | None = None) -> None:
        super().__init__(scope)
        self._raw = connection
        self._raw.has_written = False
        self.waiting = waiting

    def fetch(self, sql: str, values: Row = ()) -> Sequence[Row]:
        self._check(sql, values)
        return self._answer(self._raw.fetch, sql, *values)  # type: ignore[no-any-return]

    def execute(self, sql: str, values: Row = ()) -> int:
        self._check(sql, values)
        status: str = self._answer(self._raw.execute, sql, *values)
        return int(status.rpartition(" ")[2])

    def run_many(self, sql: str, rows: Sequence[Row]) -> None:
        on_statement(sql, rows, many=True)
        self._raw.has_written = True
        self._answer(self._run_each, sql, rows)

    def send_many(self, sql: str, rows: Sequence[Row]) -> None:
        if self.waiting is None:
            self.run_many(sql, rows)
        else:
            self._raw.has_written = True
            self.waiting += [inlined(sql, row) for row in rows]

    def _answer(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """Return the server's answer, once those that wait are sent."""
        if self.waiting:
            self.flush(self.waiting)
        return await_only(_ask_server(self._raw, ask, *arguments))

    def flush(self, waiting: list[str]) -> None:
        """Send the statements that wait, at least one."""
        message = _message(waiting)
        waiting.clear()
        await_only(_ask_server(self._raw, self._raw.execute, message))

    async def _run_each(self, sql: str, rows: Sequence[Row]) -> None:
        """Run a statement for each row. (`executemany` alone may wait on after the connection was lost.)"""
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def hear(_: object) -> None:
            if not lost.done():
                lost.set_result(None)

        self._raw.add_termination_listener(hear)
        sending = asyncio.ensure_future(self._raw.executemany(sql, rows))
        try:
            await asyncio.wait({sending, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ConnectionResetError("the connection was lost")
            await sending
        finally:
            sending.cancel()
            self._raw.remove_termination_listener(hear)

    def table(self, sql: str, values: Row = ()) -> tuple[list[str], Sequence[Row]]:
        self._check(sql, values)
        prepared: Any = self._answer(self._raw.prepare, sql)
        rows: list[Row] = self._answer(prepared.fetch, *values)
        columns = prepared.get_attributes()
        for at, column in enumerate(columns):
            if column.type.name in ("json", "jsonb"):
                rows = [(*row[:at], None if row[at] is None else from_json(row[at]), *row[at + 1 :]) for row in rows]
        return [column.name for column in columns], rows

    def fetch_mappings(self, sql: str, values: Row) -> Sequence[Mapping[str, Any]]:
        return self.fetch(sql, values)  # type: ignore[return-value]  # asyncpg's records are both

    def _check(self, sql: str, values: Row) -> None:
        on_statement(sql, values)
        if not sql.startswith("SELECT"):
            self._raw.has_written = True
        # Otherwise the server would close the connection, and retries would send the same again and again. (The size of
        # groups, which are sent as rows of executemany, is checked where they are encoded.)
        if any(
            isinstance(value, (bytes, bytearray, str)) and 4 * len(value) > dialect.MOST_ROW_BYTES for value in values
        ):
            dialect.check_row("what was to be stored", values)

    def lock(self, key: Lock) -> None:
        self.run("SELECT pg_advisory_xact_lock($1)", key)

    def try_lock(self, key: Lock) -> bool:
        return bool(self.run("SELECT pg_try_advisory_xact_lock($1)", key)[0][0])

    def lock_names(self, kind: NamedLock, names: Iterable[str]) -> None:
        for name in sorted(names):
            self.run("SELECT pg_advisory_xact_lock(hashtextextended($1, $2))", name, kind)

    def clock(self) -> float:
        [(seconds,)] = self.run(f"SELECT {NOW}")
        return float(seconds)

    def set_columns(self, names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            self.run(_set_columns(tuple(names)), *map(texts, zip(*rows, strict=True)))

    def reserve_uids(self, count: int) -> list[int]:
        return [uid for (uid,) in self.run(_NEXT_UIDS, count)]


_NEXT_UIDS = f"SELECT nextval('{uid_sequence.name}') FROM generate_series(1, CAST($1 AS int))"  # noqa: S608


@cache
def _set_columns(names: tuple[str, ...]) -> str:
    """Return the bulk UPDATE of these columns, with an array parameter per column, the uids' first."""
    arrays, changes = [array("$1", "bigint")], []
    for place, name in enumerate(names, 2):
        kind = group.c[name].type
        is_json = isinstance(kind, JSON)
        arrays.append(array(f"${place}", "text" if is_json else kind.compile(dialect=PostgresDialect.compiler)))
        changes.append(f"{name} = {f'CAST(new.{name} AS jsonb)' if is_json else f'new.{name}'}")
    source = f"unnest({', '.join(arrays)}) AS new (uid, {', '.join(names)})"
    return f"UPDATE rb_group SET {', '.join(changes)} FROM {source} WHERE rb_group.uid = new.uid"  # noqa: S608


async def run(function: Callable[[], T]) -> T:
    """Run a synchronous function of a transaction in a greenlet, so that its waits don't block the loop."""
    return await greenlet_spawn(function)


async def _ask_server(connection: Connection, ask: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return await ask(*arguments)
    except Exception as error:
        if connection.is_closed() and not isinstance(error, OSError):
            raise ConnectionResetError(str(error)) from error
        raise


async def send(connection: Connection, message: str) -> str:
    """Send one message; return the answer to its last statement. Raises OSError when the connection is lost."""
    try:
        return await connection.execute(message)
    except Exception as error:
        if isinstance(error, OSError) or isinstance(getattr(error, "sqlstate", None), str):
            raise
        raise ConnectionResetError(str(error)) from error  # it was closed while idle


async def commit(connection: Connection, waiting: Sequence[str] = ()) -> None:
    """Send the statements that wait and COMMIT in one message."""
    message = _message(waiting) if waiting else ""
    on_commit()
    await send(connection, f"{message}COMMIT;")
    after_commit()


def _message(statements: Iterable[str]) -> str:
    message = "".join(f"{statement};" for statement in statements)
    on_statement(message)
    return message
