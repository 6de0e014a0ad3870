"""Groups to query, in tables of SQLite and PostgreSQL, and random queries."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    CursorResult,
    Double,
    Executable,
    Integer,
    MetaData,
    String,
    Table,
    bindparam,
    create_engine,
    delete,
    insert,
    make_url,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import StaticPool
from sqlalchemy.schema import CreateTable
from sqlalchemy.types import NullType

from replaybuf.common.checks import check_tags
from replaybuf.rules.query import FIELDS, Query, parse
from replaybuf.rules.query.sql_conditions import compile_sql, condition_text
from replaybuf.storage.sql.engine.postgres_dialect import POSTGRES
from replaybuf.storage.sql.engine.sqlite_dialect import SQLITE
from replaybuf.values.rollouts.rollout import Status
from tests.postgres import new_database


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A table on each database. It is shared by the tests of a module, which fill it anew."""
    if request.param == "sqlite":
        with sqlite_store() as sqlite:
            yield sqlite
        return
    with new_database(request.getfixturevalue("postgres_url")) as url, postgres_store(url) as postgres:
        yield postgres


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
TEXTS = {name: f"groups.{name}" for name in COLUMNS}
COMPILERS = {dialect.name: dialect.compiler for dialect in (SQLITE, POSTGRES)}


@dataclass
class Store:
    """A table of groups; a group is known by its place in the list that filled it."""

    dialect: str
    run: Callable[..., list[Any]]  # a statement, perhaps with rows to insert

    def fill(self, groups: Iterable[Group]) -> None:
        self.run(delete(GROUPS))
        rows = [{"place": place, **asdict(group), "tags": check_tags(group.tags)} for place, group in enumerate(groups)]
        if rows:
            self.run(insert(GROUPS), rows)

    def matches(self, query: Query) -> list[int]:
        """The places of the groups that match."""
        condition = compile_sql(parse(query), COLUMNS, self.dialect)
        places_and_flags = select(GROUPS.c.place, condition.label("seen")).order_by(GROUPS.c.place)
        flags = self.run(places_and_flags)
        assert all(flag is not None for _, flag in flags), "a condition was NULL"
        words, values = condition_text(parse(query), TEXTS, COMPILERS[self.dialect])
        spaced = words.replace("::", " ::")  # without a space, `text` doesn't find the end of the name before it
        matching = text(spaced).bindparams(*(bindparam(name, value, NullType()) for name, value in values.items()))
        places = [place for (place,) in self.run(select(GROUPS.c.place).where(matching).order_by(GROUPS.c.place))]
        assert places == [place for place, flag in flags if flag]
        return places


def _rows(result: CursorResult[Any]) -> list[Any]:
    return list(result) if result.returns_rows else []


@contextmanager
def sqlite_store() -> Iterator[Store]:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    GROUPS.metadata.create_all(engine)

    def run(statement: Executable, rows: Any = None) -> list[Any]:
        with engine.begin() as connection:
            return _rows(connection.execute(statement, rows))

    yield Store("sqlite", run)
    engine.dispose()


@contextmanager
def postgres_store(url: str) -> Iterator[Store]:
    engine = create_async_engine(make_url(url).set(drivername="postgresql+asyncpg"), pool_size=1)

    async def execute(statement: Executable, rows: Any) -> list[Any]:
        async with engine.begin() as connection:
            return _rows(await connection.execute(statement, rows))

    with asyncio.Runner() as runner:
        runner.run(execute(CreateTable(GROUPS), None))
        yield Store("postgresql", lambda statement, rows=None: runner.run(execute(statement, rows)))
        runner.run(engine.dispose())


HOSTILE = ["'; DROP TABLE groups; --", '"', "'", "\\", "%", "a.b", '$."a"', "[0]", "$", ":x", "é", "A", "😀", "\uffff"]


def _mostly(usual: list[Any], rest: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 4).flatmap(lambda chance: rest if chance == 0 else st.sampled_from(usual))


_edge_floats = st.sampled_from([-0.0, 0.1, math.inf, -math.inf, 1e300, 5e-324])
_edge_integers = st.sampled_from([2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63)])
_any_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)
texts = _mostly(["a", "b", "1", "é"], st.sampled_from(["", *HOSTILE]) | _any_text)
int64 = _mostly([0, 1, 2], _edge_integers | st.integers(-(2**63), 2**63 - 1))
int32 = _mostly([0, 1, 2], st.integers(-(2**31), 2**31 - 1))
# Databases round integers that they compare with floats, if they are beyond 2**53.
floats = _mostly([0.0, 0.5, 1.0, 1.5, 2.0], _edge_floats | st.floats(allow_nan=False)).filter(
    lambda number: not 2**53 <= abs(number) <= 2**63
)
statuses = st.sampled_from([Status.COMPLETED, Status.FAILED, Status.INIT])
tag_names = _mostly(["a", 'b"'], st.sampled_from(HOSTILE) | _any_text.filter(bool))
_tag_floats = floats.filter(math.isfinite)
_tags = st.dictionaries(tag_names, st.none() | st.booleans() | int64 | _tag_floats | texts, max_size=4)

groups = st.builds(
    Group,
    uid=int64,
    timestamp_id=int64,
    task_name=texts,
    status=statuses.map(lambda status: status.value),
    staleness=int32,
    priority=floats,
    times_sampled=int32,
    created_at=floats,
    reward=_mostly([None, 1.0, 1.5], floats),
    worker=st.none() | texts,
    trained_step=st.none() | int64,
    tags=st.none() | _tags | _tags,
)

_numbers = int64 | floats


def _operands(field: str) -> list[st.SearchStrategy[Any]]:
    """What the field may be compared with; the operands of each strategy have an order."""
    if field.startswith("tags."):
        return [_numbers | st.booleans(), texts]
    return {"str": [texts], "status": [statuses]}.get(FIELDS[field].kind, [_numbers])


def _nullable(field: str) -> bool:
    return field in FIELDS and FIELDS[field].nullable


@st.composite
def comparisons(draw: st.DrawFn, field: str) -> tuple[str, Any]:
    """An operator and its operand."""
    kinds = _operands(field)
    ordered = draw(st.sampled_from(kinds))
    # None is of use only to what may be None; the cases where it is not are in the tables of edges.
    anything = st.one_of(ordered, *kinds, *([st.none()] if len(kinds) > 1 or _nullable(field) else []))
    operator = draw(st.sampled_from(["order", "order", "$eq", "$ne", "$in", "$not_in", "$between", "$not"]))
    if operator == "order":
        return draw(st.sampled_from(["$gt", "$gte", "$lt", "$lte"])), draw(ordered)
    if operator == "$between":
        return operator, sorted(draw(st.tuples(ordered, ordered)))
    if operator == "$not":
        return operator, dict([draw(comparisons(field))])
    if operator in ("$eq", "$ne"):
        return operator, draw(anything)
    return operator, draw(st.lists(anything, min_size=1, max_size=3))


@st.composite
def fields(draw: st.DrawFn) -> tuple[str, Any]:
    """A field and what it is compared with."""
    field = draw(st.sampled_from(list(FIELDS)) | tag_names.map("tags.".__add__))
    return field, dict(draw(st.lists(comparisons(field), min_size=1, max_size=2)))


def _logic(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=2, max_size=3)
    return st.one_of(
        several.map(lambda queries: {"$or": queries}),
        several.map(lambda queries: {"$and": queries}),
        inner.map(lambda query: {"$not": query}),
        st.tuples(inner, fields()).map(lambda pair: {**pair[0], pair[1][0]: pair[1][1]}),
    )


queries = st.recursive(fields().map(lambda field: dict([field])), _logic, max_leaves=6)
