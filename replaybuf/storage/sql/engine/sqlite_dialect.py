"""The SQL of SQLite, where the two databases differ inside a transaction."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic_core import to_json
from sqlalchemy import ColumnElement, Select, Text, bindparam, func, select
from sqlalchemy.dialects.sqlite import pysqlite

from replaybuf.storage.sql.engine import lease_clock
from replaybuf.storage.sql.engine.dialect import JSON_OPTIONS, LANE, SIZE, Dialect, RowLimit
from replaybuf.storage.sql.engine.lease_clock import host_start, lease_time
from replaybuf.storage.sql.schema.tables import group, payload

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.sqlite_session import SqliteSession
    from replaybuf.storage.sql.engine.transaction import Transaction


class SqliteDialect(Dialect):
    name = "sqlite"
    compiler = pysqlite.dialect(**JSON_OPTIONS)
    is_remote = False
    parameter = "?"
    macros: ClassVar = {
        "in": "IN (SELECT value FROM json_each({}))",
        "not_in": "NOT IN (SELECT value FROM json_each({}))",
        "in_texts": "IN (SELECT value FROM json_each({}))",
        "not_in_texts": "NOT IN (SELECT value FROM json_each({}))",
        "json": "{}",
        "moment": "{}",
        "clock": "{}",
        "lock_of": "",
        "lock": "",
        "skip": "",
        "now": "(julianday('now') - 2440587.5) * 86400.0",
        "connections": "1",
        "shard": "0",
        "tables": "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite@_%' ESCAPE '@'",
        "views": "SELECT name, sql FROM sqlite_master WHERE type = 'view'",
        "set_last_uid": "UPDATE rb_info SET number = {} WHERE name = 'uid'",
    }

    def one_of(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        return column.in_(select(func.json_each(bindparam(name, type_=Text())).table_valued("value").c.value))

    def listed(self, values: Iterable[int] | Iterable[str]) -> Any:
        return to_json(list(values)).decode()

    def clock(self, tx: Transaction) -> float:
        return lease_time(tx)

    def start_clock(self, tx: Transaction) -> float:
        name = lease_clock.this_start()
        if name is not None and host_start(tx) is None:
            start = repr(time.time() - lease_clock.since_start())
            tx.change("INSERT INTO rb_info (name, value) VALUES (:name, :value)", name=name, value=start)
        return self.clock(tx)

    def first_of_lane(self, query: Select[Any], keys: Sequence[ColumnElement[Any]], *, backwards: bool) -> Select[Any]:
        return query.where(group.c.lane == LANE).order_by(*keys).limit(SIZE)

    def read_ranges(self, tx: Transaction, ranges: Sequence[tuple[int, int, int]]) -> list[bytes | None]:
        session = _session(tx)
        return [session.read_blob(payload.name, payload.c.data.name, uid, at, size) for uid, at, size in ranges]

    def set_columns(self, tx: Transaction, names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            columns = ", ".join(f"{name} = ?{place}" for place, name in enumerate(names, 2))
            tx.session.run_many(f"UPDATE rb_group SET {columns} WHERE uid = ?1", rows)  # noqa: S608

    def reserve_uids(self, tx: Transaction, count: int) -> list[int]:
        raised = "UPDATE rb_info SET number = number + :count WHERE name = 'uid' RETURNING number"
        [(last,)] = tx.tuples(raised, count=count)
        return list(range(last - count + 1, last + 1))

    def row_limit(self, tx: Transaction) -> RowLimit:
        limit = _session(tx).raw.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)
        # A reserve of 0.1 % (a megabyte of a gigabyte), as on PostgreSQL.
        return RowLimit(limit - limit // 1000, "SQLite's limit SQLITE_MAX_LENGTH")


def _session(tx: Transaction) -> SqliteSession:
    session: Any = tx.session
    return session  # type: ignore[no-any-return]


SQLITE = SqliteDialect()
