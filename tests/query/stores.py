"""Groups to query, in tables of SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    Executable,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    delete,
    insert,
    make_url,
    select,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import StaticPool

from replaybuf.rules.query import FIELDS, Query, parse
from replaybuf.rules.query.sql_conditions import compile_sql


@dataclass
class Group:
    uid: int = 1
    timestamp_id: int = 1
    task_name: str = "math"
    status: str = "completed"
    staleness: int = 0
    priority: float = 1.0
    times_sampled: int = 0
    created_at: float = 1.7e9
    reward: float | None = None
    worker: str | None = None
    trained_step: int | None = None
    tags: Mapping[str, Any] | None = None


GROUPS = Table(
    "groups",
    MetaData(),
    Column("place", Integer, primary_key=True),
    Column("uid", BigInteger, nullable=False, index=True),
    Column("timestamp_id", BigInteger, nullable=False),
    Column("task_name", String, nullable=False, index=True),
    Column("status", String, nullable=False),
    Column("staleness", Integer, nullable=False),
    Column("priority", Double, nullable=False),
    Column("times_sampled", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("reward", Double),
    Column("worker", String),
    Column("trained_step", BigInteger),
    Column("tags", JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")),
)
COLUMNS = {name: GROUPS.c[name] for name in (*FIELDS, "tags")}


class Store(ABC):
    """A table of groups; a group is known by its place in the list that filled it."""

    dialect: str

    def fill(self, groups: Iterable[Group]) -> None:
        self.run(delete(GROUPS))
        rows = [{"place": place, **asdict(group)} for place, group in enumerate(groups)]
        if rows:
            self.run(insert(GROUPS), rows)

    def matches(self, query: Query) -> list[int]:
        """The places of the groups that match."""
        condition = compile_sql(parse(query), COLUMNS, self.dialect)
        both = select(GROUPS.c.place, condition.label("seen")).order_by(GROUPS.c.place)
        seen = self.run(both)
        assert all(flag is not None for _, flag in seen), "a condition was NULL"
        found = [place for (place,) in self.run(select(GROUPS.c.place).where(condition).order_by(GROUPS.c.place))]
        assert found == [place for place, flag in seen if flag]
        return found

    @abstractmethod
    def run(self, statement: Executable, rows: Any = None) -> list[Any]: ...


class SqliteStore(Store):
    dialect = "sqlite"

    def __init__(self) -> None:
        self.engine = create_engine("sqlite://", poolclass=StaticPool)
        GROUPS.metadata.create_all(self.engine)

    def run(self, statement: Executable, rows: Any = None) -> list[Any]:
        with self.engine.begin() as connection:
            result = connection.execute(statement, rows)
            return list(result) if result.returns_rows else []


class PostgresStore(Store):
    dialect = "postgresql"

    def __init__(self, url: str, runner: asyncio.Runner) -> None:
        self.engine = create_async_engine(make_url(url).set(drivername="postgresql+asyncpg"), pool_size=1)
        self._runner = runner
        runner.run(self._create())

    def run(self, statement: Executable, rows: Any = None) -> list[Any]:
        return self._runner.run(self._run(statement, rows))

    async def _create(self) -> None:
        async with self.engine.begin() as connection:
            await connection.run_sync(GROUPS.metadata.create_all)

    async def _run(self, statement: Executable, rows: Any) -> list[Any]:
        async with self.engine.begin() as connection:
            result = await connection.execute(statement, rows)
            return list(result) if result.returns_rows else []


@contextmanager
def sqlite_store() -> Iterator[SqliteStore]:
    store = SqliteStore()
    yield store
    store.engine.dispose()


@contextmanager
def postgres_store(url: str) -> Iterator[PostgresStore]:
    with asyncio.Runner() as runner:
        store = PostgresStore(url, runner)
        yield store
        runner.run(store.engine.dispose())
