"""What PostgreSQL does inside a transaction, where the two databases differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Integer,
    Select,
    Table,
    Text,
    bindparam,
    cast,
    delete,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import ARRAY, DOUBLE_PRECISION

from replaybuf.rules.race import KEYS
from replaybuf.storage.sql.engine import locks, sizes
from replaybuf.storage.sql.engine.dialect import LANE, SIZE, Dialect
from replaybuf.storage.sql.engine.locks import Lock, NamedLock
from replaybuf.storage.sql.engine.plans import PlanStep, postgres_plan
from replaybuf.storage.sql.engine.prepared import Prepared
from replaybuf.storage.sql.engine.sizes import RowLimit
from replaybuf.storage.sql.schema.tables import Number, garbage, group, payload, uid_sequence

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.transaction import Transaction


class PostgresDialect(Dialect):
    name = "postgresql"
    locks_rows = True
    is_remote = True
    shard = func.pg_backend_pid()

    def insert(self, table: Table) -> Any:
        return postgresql.insert(table)

    def one_of(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        return column == func.any(bindparam(name, type_=ARRAY(column.type)))

    def listed(self, values: Iterable[int] | Iterable[str]) -> Any:
        return list(values)

    def for_update(self, query: Select[Any], *, of: Table | None = None, skip_locked: bool = False) -> Select[Any]:
        return query.with_for_update(of=of, skip_locked=skip_locked)

    def lock(self, connection: Connection, key: Lock) -> None:
        connection.execute(locks.TAKE, {"key": key})

    def try_lock(self, connection: Connection, key: Lock, *, shared: bool = False) -> bool:
        return bool(connection.execute(locks.TRY_SHARED if shared else locks.TRY, {"key": key}).scalar())

    def lock_names(self, connection: Connection, kind: NamedLock, names: Iterable[str]) -> None:
        for name in sorted(names):
            connection.execute(locks.TAKE_NAMED, {"name": name, "seed": kind})

    def clock(self, tx: Transaction) -> float:
        [(seconds,)] = tx.fetch(_CLOCK)
        return float(seconds)

    def clock_value(self, given: ColumnElement[float]) -> ColumnElement[float]:
        # A value of its own: no index can be used with a function that may change while it is.
        return func.coalesce(given, cast(_NOW.scalar_subquery(), Number))

    def start_clock(self, tx: Transaction) -> float:
        return self.clock(tx)

    def first_of_lane(self, query: Select[Any], keys: Sequence[ColumnElement[Any]], *, backwards: bool) -> Select[Any]:
        # With `lane = n` the planner treats the lane as a constant and may walk the primary key from its beginning,
        # past the groups of other lanes. With a range of one lane only indexes that begin with the lane qualify.
        query = query.where(group.c.lane.between(LANE, LANE))
        query = query.order_by(group.c.lane.desc() if backwards else group.c.lane, *keys).limit(SIZE)
        return query.with_for_update(skip_locked=True)

    def with_payload(self, columns: Sequence[ColumnElement[Any]]) -> Select[Any]:
        # A value isn't joined, but read for the rows that are returned, whatever number of them the planner expects.
        data = select(payload.c.data).where(payload.c.uid == group.c.uid).scalar_subquery()
        return select(*columns, data)

    def remove_groups(self, tx: Transaction, uids: Sequence[int], now: float) -> None:
        tx.fetch(_REMOVE_TO_GARBAGE, self.listed(uids), now)

    def set_columns(self, tx: Transaction, names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            values = {
                f"new_{name}": list(each) for name, each in zip(("uid", *names), zip(*rows, strict=True), strict=True)
            }
            tx.connection.execute(_set_columns(tuple(names)), values)

    def set_keys(self, tx: Transaction, race: str, uids: Sequence[int], keys: Sequence[float]) -> None:
        tx.fetch(_SET_KEYS[race], uids, keys)

    def reserve_uids(self, tx: Transaction, count: int) -> list[int]:
        return [uid for (uid,) in tx.fetch(_NEXT_UIDS, count)]

    def last_uid(self, connection: Connection) -> int:
        last, called = connection.execute(text("SELECT last_value, is_called FROM rb_uid")).one()
        return int(last) if called else int(last) - 1

    def set_last_uid(self, connection: Connection, last: int) -> None:
        connection.execute(select(func.setval(uid_sequence.name, max(last, 1), last > 0)))

    def begin_keeping(self, tx: Transaction, checkpoint: int, last: int, lanes: Sequence[int]) -> None:
        pass

    def end_keeping(self, tx: Transaction, checkpoint: int) -> None:
        pass

    def row_limit(self, connection: Connection) -> RowLimit:
        return sizes.POSTGRES

    def database_bytes(self, connection: Connection) -> int:
        return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())

    def explain(self, connection: Connection, sql: str, values: Sequence[Any]) -> list[PlanStep]:
        return postgres_plan(connection, sql, values)

    def invalid_indexes(self, connection: Connection) -> set[str]:
        query = "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE NOT i.indisvalid"
        return set(connection.execute(text(query)).scalars())


_NOW = select(func.extract("epoch", func.clock_timestamp()))
_CLOCK = Prepared(lambda _: _NOW)
_series = func.generate_series(1, bindparam("count", type_=Integer)).table_valued("n")
_NEXT_UIDS = Prepared(lambda _: select(uid_sequence.next_value()).select_from(_series), "count")


def _to_garbage(dialect: Dialect) -> Any:
    gone = delete(group).where(dialect.one_of(group.c.uid, "uids")).returning(group.c.uid).cte("gone")
    removed = select(gone.c.uid, bindparam("now", type_=garbage.c.removed_at.type))
    return insert(garbage).from_select(["uid", "removed_at"], removed)


_REMOVE_TO_GARBAGE = Prepared(_to_garbage, "uids", "now")


@cache
def _set_columns(names: tuple[str, ...]) -> Any:
    """Return the UPDATE of these columns, with an array for each."""

    def values_of(column: Column[Any]) -> Any:
        json = isinstance(column.type, JSON)
        given = func.unnest(bindparam(f"new_{column.name}", type_=ARRAY(Text() if json else column.type)))
        return (cast(given, postgresql.JSONB) if json else given).label(column.name)

    given = select(*(values_of(group.c[name]) for name in ("uid", *names))).subquery("given")
    chosen = update(group).where(group.c.uid == given.c.uid)
    return chosen.values({group.c[name]: given.c[name] for name in names})


# All keys as two arrays, in one statement.
_drawn = select(
    func.unnest(bindparam("uids", type_=ARRAY(BigInteger))).label("uid"),
    func.unnest(bindparam("keys", type_=ARRAY(DOUBLE_PRECISION))).label("key"),
).subquery("drawn")


def _set_keys(race: str) -> Prepared:
    changed = update(group).where(group.c.uid == _drawn.c.uid).values({group.c[race]: _drawn.c.key})
    return Prepared(lambda _: changed, "uids", "keys")


_SET_KEYS = {race: _set_keys(race) for race in KEYS}

POSTGRES = PostgresDialect()
