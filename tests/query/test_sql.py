"""SQL says what `predicate` says, on both databases."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text

from replaybuf.rules.query import Query, parse
from replaybuf.rules.query.sql_conditions import compile_sql, condition_text
from tests.query.conftest import COLUMNS, COMPILERS, GROUPS, HOSTILE, TEXTS, Group, Store, groups, queries, sqlite_store
from tests.reference.predicates import predicate


def expected(query: Query, rows: list[Group]) -> list[int]:
    matches = predicate(parse(query))
    return [place for place, row in enumerate(rows) if matches(row)]


@settings(max_examples=20)
@given(rows=st.lists(groups, min_size=6, max_size=9), query=queries)
def test_sql_means_what_the_predicate_means(store: Store, rows: list[Group], query: Query) -> None:
    store.fill(rows)
    assert store.matches(query) == expected(query, rows)


SAMPLE = [
    Group(uid=1, reward=None, tags=None, priority=math.inf, worker="a", trained_step=2**53),
    Group(uid=3, reward=3.0, tags={"n": 1, "s": "1"}, priority=-math.inf, status="failed"),
    Group(uid=4, reward=0.5, tags={"n": True, "s": None}, priority=0.1 + 0.2, task_name="B"),
    Group(uid=2**53 + 1, reward=-1.0, tags={"n": 1.0, "s": "é"}, priority=2.0**53, task_name="a"),
    Group(uid=2**63 - 1, reward=1e300, priority=2.0**53 + 4, tags={"n": 2**53 + 1, "s": False}, task_name="é"),
    Group(uid=-(2**63), reward=5e-324, tags={"n": 2**63 - 1, "s": "a"}, task_name="😀"),
    Group(uid=0, reward=0.0, tags={"n": 5e-324, "s": "B"}, task_name="\uffff", worker="é", trained_step=0),
]
SAMPLE += [Group(uid=9, tags={"n": number}) for number in (2.0**63, -(2.0**63), 2.0**64, 2.0**53, 1e300)]
EDGES: list[Query] = [
    {"uid": {"$lt": 3.5}},
    {"uid": 3.0},
    {"uid": 3.5},
    {"uid": {"$ne": 3.5}},
    {"uid": {"$lt": math.inf}},
    {"uid": {"$gt": -math.inf}},
    {"uid": {"$gte": -(2.0**63)}},
    {"uid": {"$in": [3.0, 4.5, math.inf, 0]}},
    {"uid": {"$ne": None}},
    {"priority": math.inf},
    {"priority": {"$in": [math.inf, -math.inf]}},
    {"priority": {"$gte": 2**53}},
    {"priority": {"$gt": 2**53 - 1}},
    {"priority": 0.30000000000000004},
    {"reward": {"$ne": 3}},
    {"reward": None},
    {"reward": {"$not": {"$gt": 1}}},
    {"reward": {"$not_in": [3]}},
    {"reward": {"$in": [None, 3]}},
    {"reward": {"$not_in": [None, 3]}},
    {"worker": None},
    {"worker": {"$not": {"$gt": "a"}}},
    {"worker": {"$not_in": [None, "a"]}},
    {"trained_step": {"$ne": 2**53}},
    {"trained_step": {"$not": {"$lt": 0.5}}},
    {"trained_step": {"$in": [None, 2.0**53]}},
    {"tags.n": True},
    {"tags.n": 1},
    {"tags.n": "1"},
    {"tags.s": 1},
    {"tags.s": "1"},
    {"tags.s": None},
    {"tags.s": {"$ne": None}},
    {"tags.s": {"$lt": 5}},
    {"tags.s": {"$lt": "b"}},
    {"tags.s": {"$in": [None, "a", 0]}},
    {"tags.n": {"$gt": 2**53}},
    {"tags.n": {"$gt": 2.0**53}},
    {"tags.n": {"$lt": 2.0**63}},
    {"tags.n": {"$lt": math.inf}},
    {"tags.n": {"$in": [2**53, 2**63 - 1]}},
    {"tags.n": 5e-324},
    *({"tags.n": {op: sign * 2.0**63}} for op in ("$eq", "$gt", "$gte", "$lt", "$lte") for sign in (1, -1)),
    {"tags.n": {"$in": [2.0**63, -(2.0**63), 2.0**64, "Infinity"]}},
    {"tags.n": {"$gt": -math.inf}},
    {"tags.n": {"$in": [math.inf, 2.0**53]}},
    {"tags.none": {"$ne": 1}},
    {"task_name": {"$gt": "a"}},
    {"task_name": {"$between": ["a", "\uffff"]}},
    {"status": {"$gt": "completed"}},
    {"$and": []},
    {"$or": []},
    {"$not": {}},
    {"$not": {"$or": []}},
    {"uid": {"$in": []}},
    {"uid": {"$not_in": []}},
    {"tags.n": {"$in": []}},
    {"tags.n": {"$not_in": []}},
]


def test_edges_of_the_fields_compare_as_in_python(store: Store) -> None:
    store.fill(SAMPLE)
    for query in EDGES:
        assert store.matches(query) == expected(query, SAMPLE), query


@pytest.mark.parametrize("hostile", ["".join(HOSTILE), HOSTILE[0], HOSTILE[3]], ids=ascii)
def test_no_string_is_taken_for_sql(store: Store, hostile: str) -> None:
    rows = [Group(task_name=hostile, tags={hostile: hostile, "plain": hostile}), Group(tags={"other": "x"})]
    store.fill(rows)
    field = f"tags.{hostile}"
    for query in (
        {"task_name": hostile},
        {field: hostile},
        {"tags.plain": {"$in": [hostile, *map(str, range(300))]}},
        {"task_name": {"$in": [hostile, *map(str, range(300))]}},
        {field: {"$gte": hostile}},
        {field: {"$ne": None}},
    ):
        assert store.matches(query) == [0]
        assert store.matches({"$not": query}) == [1]
    assert len(store.run(select(GROUPS.c.place))) == 2


@pytest.mark.parametrize("dialect", COMPILERS)
def test_no_value_or_tag_name_is_written_into_the_statement(dialect: str) -> None:
    conditions = [
        {"task_name": "secret"},
        {"tags.secret": "secret"},
        {"tags.secret": {"$in": ["secret", 987654]}},
        {"tags.secret": {"$in": ["secret"] + [f"secret{i}" for i in range(300)]}},
        {"task_name": {"$not_in": [f"secret{i}" for i in range(300)]}},
        {"uid": {"$between": [987654, 987655]}},
    ]
    words, values = condition_text(parse({"$and": conditions}), TEXTS, COMPILERS[dialect])
    assert "secret" not in words
    assert "98765" not in words
    assert {"secret", 987654} <= set(values.values())


def many_groups() -> list[Group]:
    random.seed(7)
    numbers = [random.uniform(-1, 1) * 10.0 ** random.randint(-300, 18) for _ in range(600)]
    return [
        Group(
            uid=i,
            task_name=f"task-{i}",
            priority=x,
            reward=x if i % 3 else None,
            tags={"int": i, "float": x if abs(x) < 2**53 else 0, "text": f"it's-{i}"},
        )
        for i, x in enumerate(numbers)
    ]


def lists(rows: list[Group], count: int) -> dict[str, Any]:
    """So many values for a field of each type, of which many are those of a row."""
    first = len(rows) // 2
    fractions = [*(g.priority for g in rows[first : first + count]), 0, *(i / 7 for i in range(1, count))]
    return {
        "uid": range(first, first + count),
        "priority": fractions,
        "reward": [None, *fractions],
        "task_name": [f"task-{i}" for i in range(first, first + count)],
        "tags.int": range(first, first + count),
        "tags.float": fractions,
        "tags.text": [f"it's-{i}" for i in range(first, first + count)],
        "tags.none": [None, math.inf, 1.5, 2**60, "x", *range(count)],
    }


def test_lists_are_exact_whatever_their_length(store: Store) -> None:
    rows = many_groups()
    store.fill(rows)
    store.run(text("ANALYZE"))
    for count in (1, 20, 21, 300):
        for field, values in lists(rows, count).items():
            for operator in ("$in", "$not_in"):
                query = {field: {operator: values}}
                assert store.matches(query) == expected(query, rows), (field, operator, count)


def nested(levels: int) -> Query:
    query: dict[str, Any] = {"uid": 1}
    for level in range(levels):
        query = {"$not": query} if level % 2 else {"$or": [query, {"tags.n": 1}, {"reward": {"$gt": level}}]}
    return query


BIG: dict[str, Query] = {
    "deep": nested(64),
    "wide or": {"$or": [{"uid": i} for i in range(999)]},
    "wide and": {"$and": [{"reward": {"$ne": i + 0.5}} for i in range(999)]},
    "many lists": {"$or": [{"uid": {"$in": range(i, i + 30)}} for i in range(999)]},
    "many lists of tags": {"$or": [{"tags.n": {"$in": range(i, i + 20)}} for i in range(999)]},
}


@pytest.mark.parametrize("name", BIG)
def test_the_largest_queries_run(store: Store, name: str) -> None:
    store.fill(SAMPLE)
    assert store.matches(BIG[name]) == expected(BIG[name], SAMPLE)


@pytest.mark.parametrize(
    "query",
    [
        {"task_name": "math"},
        {"task_name": {"$gt": "math"}},
        {"task_name": {"$in": ["a", "b"]}},
        {"task_name": {"$in": [str(i) for i in range(300)]}},
        {"uid": {"$lt": 3.5}},
        {"uid": {"$between": [1, 5]}, "reward": 1},
    ],
    ids=str,
)
def test_indexes_are_used(query: Query) -> None:
    with sqlite_store() as store:
        statement = select(GROUPS).where(compile_sql(parse(query), COLUMNS, "sqlite"))
        compiled = statement.compile(dialect=COMPILERS["sqlite"], compile_kwargs={"literal_binds": True})
        plan = store.run(text("EXPLAIN QUERY PLAN " + str(compiled).replace(":", "\\:")))
        assert any("USING INDEX ix_groups" in step[3] for step in plan)


def test_strings_are_ordered_by_code_point_whatever_the_collation_of_postgresql() -> None:
    for field in ("task_name", "tags.a"):
        condition = compile_sql(parse({field: {"$lt": "a"}}), COLUMNS, "postgresql")
        assert 'COLLATE "C"' in str(condition.compile(dialect=COMPILERS["postgresql"]))
