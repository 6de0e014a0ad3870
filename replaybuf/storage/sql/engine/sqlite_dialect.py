"""What SQLite does inside a transaction, where the two databases differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    Table,
    Text,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    select,
    update,
)
from sqlalchemy.dialects import sqlite

from replaybuf.rules.race import KEYS
from replaybuf.storage.sql.engine import even_clock, sizes
from replaybuf.storage.sql.engine.dialect import LANE, SIZE, Dialect
from replaybuf.storage.sql.engine.locks import Lock, NamedLock
from replaybuf.storage.sql.engine.plans import PlanStep, sqlite_plan
from replaybuf.storage.sql.engine.prepared import Prepared, SqliteDriver
from replaybuf.storage.sql.engine.sizes import RowLimit
from replaybuf.storage.sql.schema.tables import counter, garbage, group, payload

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.transaction import Transaction


#: Payloads from this size on, in bytes, are read by themselves.
_LARGE = 16 * 1024


class SqliteDialect(Dialect):
    name = "sqlite"
    locks_rows = False
    is_remote = False
    shard = literal(0)

    def insert(self, table: Table) -> Any:
        return sqlite.insert(table)

    def one_of(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        return column.in_(select(func.json_each(bindparam(name, type_=Text())).table_valued("value").c.value))

    def listed(self, values: Iterable[int] | Iterable[str]) -> Any:
        return to_json(list(values)).decode()

    def for_update(self, query: Select[Any], *, of: Table | None = None, skip_locked: bool = False) -> Select[Any]:
        return query

    def lock(self, connection: Connection, key: Lock) -> None:
        pass

    def try_lock(self, connection: Connection, key: Lock, *, shared: bool = False) -> bool:
        return True

    def lock_names(self, connection: Connection, kind: NamedLock, names: Iterable[str]) -> None:
        pass

    def clock(self, tx: Transaction) -> float:
        return even_clock.read(tx)

    def clock_value(self, given: ColumnElement[float]) -> ColumnElement[float]:
        return given

    def start_clock(self, tx: Transaction) -> float:
        return even_clock.start(tx)

    def first_of_lane(self, query: Select[Any], keys: Sequence[ColumnElement[Any]], *, backwards: bool) -> Select[Any]:
        return query.where(group.c.lane == LANE).order_by(*keys).limit(SIZE)

    def with_payload(self, columns: Sequence[ColumnElement[Any]]) -> Select[Any]:
        # A query copies what it reads twice. That of large payloads costs more than a call for each of them.
        data = case((group.c.bytes < _LARGE, payload.c.data))
        return select(*columns, data).outerjoin_from(group, payload, payload.c.uid == group.c.uid)

    def read_payload(self, tx: Transaction, uid: int) -> bytes | None:
        assert isinstance(tx.driver, SqliteDriver)
        return tx.driver.read_blob(payload.name, payload.c.data.name, uid)

    def remove_groups(self, tx: Transaction, uids: Sequence[int], now: float) -> None:
        listed = self.listed(uids)
        tx.fetch(_REMOVE, listed)
        tx.fetch(_DISCARD, now, listed)

    def set_columns(self, tx: Transaction, names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            columns = ", ".join(f"{name} = ?{place}" for place, name in enumerate(names, 2))
            tx.connection.exec_driver_sql(f"UPDATE rb_group SET {columns} WHERE uid = ?1", list(rows))  # noqa: S608

    def set_keys(self, tx: Transaction, race: str, uids: Sequence[int], keys: Sequence[float]) -> None:
        tx.run_many(_SET_KEY[race], list(zip(keys, uids, strict=True)))

    def reserve_uids(self, tx: Transaction, count: int) -> list[int]:
        [(last,)] = tx.fetch(_RAISE_UID, count)
        return list(range(last - count + 1, last + 1))

    def last_uid(self, connection: Connection) -> int:
        return int(connection.execute(select(counter.c.value).where(_UID)).scalar_one())

    def set_last_uid(self, connection: Connection, last: int) -> None:
        connection.execute(update(counter).where(_UID).values(value=last))

    def begin_keeping(self, tx: Transaction, checkpoint: int, last: int, lanes: Sequence[int]) -> None:
        names = ", ".join(column.name for column in group.columns)
        old = ", ".join(f"old.{column.name}" for column in group.columns)
        for event in _EVENTS:
            tx.connection.exec_driver_sql(f"""
                CREATE TRIGGER {_trigger(event, checkpoint)} AFTER {event} ON rb_group
                WHEN old.uid > (SELECT copied_to FROM rb_checkpoint WHERE id = {checkpoint})
                 AND old.uid <= {last} AND old.lane IN ({", ".join(map(str, lanes))})
                BEGIN
                    INSERT OR IGNORE INTO rb_checkpoint_group (checkpoint, {names}) VALUES ({checkpoint}, {old});
                END""")  # noqa: S608

    def end_keeping(self, tx: Transaction, checkpoint: int) -> None:
        for event in _EVENTS:
            tx.connection.exec_driver_sql(f"DROP TRIGGER IF EXISTS {_trigger(event, checkpoint)}")

    def row_limit(self, connection: Connection) -> RowLimit:
        return sizes.sqlite_limit(connection)

    def database_bytes(self, connection: Connection) -> int:
        path = connection.exec_driver_sql("SELECT file FROM pragma_database_list WHERE name = 'main'").scalar_one()
        beside = (Path(f"{path}{suffix}") for suffix in ("", "-wal"))
        return sum(file.stat().st_size for file in beside if file.exists())

    def explain(self, connection: Connection, sql: str, values: Sequence[Any]) -> list[PlanStep]:
        return sqlite_plan(connection, sql, values)

    def invalid_indexes(self, connection: Connection) -> set[str]:
        return set()


_EVENTS = ("UPDATE", "DELETE")


def _trigger(event: str, checkpoint: int) -> str:
    return f"rb_checkpoint_{checkpoint}_{event.lower()}"


_UID = counter.c.name == "uid"
_RAISE_UID = Prepared(
    lambda _: (
        update(counter)
        .where(_UID)
        .values(value=counter.c.value + bindparam("count", type_=BigInteger))
        .returning(counter.c.value)
    ),
    "count",
)
_REMOVE = Prepared(lambda dialect: delete(group).where(dialect.one_of(group.c.uid, "uids")), "uids")
_value = func.json_each(bindparam("uids", type_=Text())).table_valued("value").c.value
_DISCARD = Prepared(
    lambda _: insert(garbage).from_select(
        ["uid", "removed_at"], select(_value, bindparam("now", type_=garbage.c.removed_at.type))
    ),
    "now",
    "uids",
)


def _set_key(race: str) -> Prepared:
    changed = update(group).values({group.c[race]: bindparam("new_key")})
    return Prepared(lambda _: changed.where(group.c.uid == bindparam("of_uid")), "new_key", "of_uid")


_SET_KEY = {race: _set_key(race) for race in KEYS}

SQLITE = SqliteDialect()
