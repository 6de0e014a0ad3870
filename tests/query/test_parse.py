"""Reading queries: what they parse to, and where the mistakes in them are."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaybuf.errors import QueryError
from replaybuf.rules.query import FIELDS, LogicNode, NotNode, Query, ScalarNode, SetNode, parse
from replaybuf.values.rollouts.rollout import Status
from tests.query.conftest import queries


class Operator(StrEnum):
    GTE = "$gte"
    AND = "$and"


class Plain(Enum):
    MATH = "math"
    FIVE = 5
    TASK = "task_name"


def between(field: str, lower: Any, upper: Any) -> LogicNode:
    return LogicNode("$and", (ScalarNode(field, "$gte", lower), ScalarNode(field, "$lte", upper)))


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp()

PARSED: list[tuple[Any, Any]] = [
    ({}, LogicNode("$and", ())),
    ({"uid": 1}, ScalarNode("uid", "$eq", 1)),
    ({Plain.TASK: Plain.MATH}, ScalarNode("task_name", "$eq", "math")),
    ({"uid": None}, ScalarNode("uid", "$eq", None)),
    ({"uid": {"$lt": 3.5}}, ScalarNode("uid", "$lt", 3.5)),
    ({"uid": {"$in": [1, 2, 1]}}, SetNode("uid", "$in", (1, 2, 1))),
    ({"uid": {"$nin": (1, 2)}}, SetNode("uid", "$not_in", (1, 2))),
    ({"uid": {"$in": range(2)}}, SetNode("uid", "$in", (0, 1))),
    ({"uid": {"$in": {1}}}, SetNode("uid", "$in", (1,))),
    ({"uid": {"$in": frozenset({1})}}, SetNode("uid", "$in", (1,))),
    ({"uid": {"$in": np.array([1, 2])}}, SetNode("uid", "$in", (1, 2))),
    ({"tags.x": {"$in": np.array(["a", "b"])}}, SetNode("tags.x", "$in", ("a", "b"))),
    ({"uid": {"$between": [1, 2]}}, between("uid", 1, 2)),
    ({"uid": {"$between": np.array([1, 2])}}, between("uid", 1, 2)),
    ({"tags.x": {"$between": [True, 2.5]}}, between("tags.x", True, 2.5)),
    ({"uid": {"$gt": 1, "$lt": 5}}, LogicNode("$and", (ScalarNode("uid", "$gt", 1), ScalarNode("uid", "$lt", 5)))),
    ({"uid": 1, "reward": 2}, LogicNode("$and", (ScalarNode("uid", "$eq", 1), ScalarNode("reward", "$eq", 2)))),
    ({"$or": ({"uid": 1},)}, LogicNode("$or", (ScalarNode("uid", "$eq", 1),))),
    ({"$not": {"uid": 1}}, NotNode(ScalarNode("uid", "$eq", 1))),
    ({"uid": {"$not": {"$lt": 5}}}, NotNode(ScalarNode("uid", "$lt", 5))),
    ({"uid": {"$not": 5}}, NotNode(ScalarNode("uid", "$eq", 5))),
    ({"$and": [ScalarNode("uid", "$eq", 1)]}, LogicNode("$and", (ScalarNode("uid", "$eq", 1),))),
    (ScalarNode("uid", "$in", [1]), SetNode("uid", "$in", (1,))),
    ({Operator.AND: [{"uid": {Operator.GTE: 1}}]}, LogicNode("$and", (ScalarNode("uid", "$gte", 1),))),
    ({"task_name": {"$lt": Plain.MATH}}, ScalarNode("task_name", "$lt", "math")),
    ({"uid": Plain.FIVE}, ScalarNode("uid", "$eq", 5)),
    ({"status": Status.FAILED}, ScalarNode("status", "$eq", "failed")),
    ({"reward": math.inf}, ScalarNode("reward", "$eq", math.inf)),
    ({"uid": {"$lt": math.inf}}, ScalarNode("uid", "$lt", math.inf)),
    ({"reward": None}, ScalarNode("reward", "$eq", None)),
    ({"tags.a.b": True}, ScalarNode("tags.a.b", "$eq", True)),
    ({'tags."': "x"}, ScalarNode('tags."', "$eq", "x")),
    ({"tags." + "x" * 200: 1}, ScalarNode("tags." + "x" * 200, "$eq", 1)),
    ({"created_at": datetime(2026, 1, 1, 12)}, ScalarNode("created_at", "$eq", NOON)),
    (
        {"created_at": datetime(2026, 1, 1, 14, tzinfo=timezone(timedelta(hours=2)))},
        ScalarNode("created_at", "$eq", NOON),
    ),
    ({"created_at": np.datetime64("2026-01-01T12:00:00.000000000")}, ScalarNode("created_at", "$eq", NOON)),
    ({"created_at": pd.Timestamp("2026-01-01T12:00")}, ScalarNode("created_at", "$eq", NOON)),
    ({"created_at": {"$gt": 5}}, ScalarNode("created_at", "$gt", 5)),
]


@pytest.mark.parametrize(("query", "node"), PARSED, ids=lambda x: ascii(x)[:60])
def test_queries_parse_to_their_nodes(query: Any, node: Any) -> None:
    assert parse(query) == node


@pytest.mark.parametrize(
    ("operand", "plain"),
    [
        (np.int32(1), 1),
        (np.uint64(1), 1),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (type("Text", (str,), {})("a"), "a"),
        (type("Integer", (int,), {})(1), 1),
        (type("Real", (float,), {})(0.5), 0.5),
    ],
)
def test_operands_become_plain_values(operand: Any, plain: Any) -> None:
    node = parse({"tags.x": operand})
    assert isinstance(node, ScalarNode)
    assert node.value == plain
    assert type(node.value) is type(plain)


@given(queries)
@settings(max_examples=40)
def test_parsing_what_was_parsed_changes_nothing(query: Query) -> None:
    assert parse(parse(query)) == parse(query)


def itself() -> dict[str, Any]:
    query: dict[str, Any] = {}
    query["$and"] = [query, query]
    return query


def deep(levels: int) -> dict[str, Any]:
    query: dict[str, Any] = {"uid": 1}
    for _ in range(levels):
        query = {"$not": query}
    return query


def doubling() -> dict[str, Any]:
    query: dict[str, Any] = {}
    for _ in range(60):
        query = {"$and": [query, query]}
    return query


MISTAKES: list[tuple[Any, str, str]] = [
    # the query itself
    (None, "", "expected a query"),
    ([], "", "expected a query"),
    ("uid", "", "expected a query"),
    ({1: 2}, "", "expected the name of a field or operator"),
    ({None: 2}, "", "expected the name"),
    ({"uid": {1: 2}}, "uid", "expected the name"),
    # fields
    ({"stalenes": 1}, "stalenes", "did you mean staleness?"),
    ({"nothing": 1}, "nothing", "valid: uid, timestamp_id, task_name"),
    ({"": 1}, "", "there is no field ''"),
    ({"tags": 1}, "tags", "tags.NAME"),
    ({"tags.": 1}, "tags.", "tags.NAME"),
    ({"tags." + "x" * 201: 1}, "", "1 to 200 characters"),
    ({"tags.a\0": 1}, "", "NUL"),
    ({"tags.\ud800": 1}, "", "surrogates"),
    # operators
    ({"uid": {}}, "uid", "expected a value or an operator"),
    ({"uid": {"$gtt": 1}}, "uid.$gtt", "did you mean $gt?"),
    ({"uid": {"gt": 1}}, "uid.gt", "did you mean $gt?"),
    ({"uid": {"$exists": 1}}, "uid.$exists", "valid: of a field $eq, $ne"),
    ({"uid": {"$and": []}}, "uid.$and", "there is no operator"),
    ({"uid": {"$not": {}}}, "uid.$not", "expected a value or an operator"),
    ({"$gt": 1}, "$gt", "there is no operator for queries"),
    ({"$nor": []}, "$nor", "; of queries $and, $or, $not"),
    ({"$and": {}}, "$and", "expected a list of queries"),
    ({"$or": "ab"}, "$or", "expected a list of queries"),
    ({"$not": []}, "$not", "expected a query"),
    ({"$and": [{}, 5]}, "$and[1]", "expected a query"),
    # operands
    ({"$and": [{}, {"staleness": {"$gt": "5"}}]}, "$and[1].staleness.$gt", "expected a number, not one of type str"),
    ({"$or": [{"$not": {"uid": "x"}}]}, "$or[0].$not.uid", "expected a number"),
    ({"staleness": {"$not": {"$lt": "x"}}}, "staleness.$not.$lt", "expected a number"),
    ({"staleness": True}, "staleness", "not one of type bool"),
    ({"reward": np.bool_(True)}, "reward", "not one of type bool"),
    ({"staleness": [1, 2]}, "staleness", "use $in"),
    ({"task_name": 5}, "task_name", "expected a str"),
    ({"task_name": b"x"}, "task_name", "expected a str"),
    ({"uid": Decimal(1)}, "uid", "expected a number"),
    ({"uid": 1j}, "uid", "expected a number"),
    ({"uid": datetime.now()}, "uid", "expected a number"),
    ({"created_at": date.today()}, "created_at", "or a datetime"),
    ({"created_at": "2026-01-01"}, "created_at", "or a datetime"),
    ({"created_at": {"$gt": pd.NaT}}, "created_at.$gt", "no moment in time"),
    ({"created_at": {"$ne": np.datetime64("NaT", "s")}}, "created_at.$ne", "NaN"),
    ({"created_at": {"$not_in": [np.datetime64("NaT", "s")]}}, "created_at.$not_in[0]", "NaN"),
    ({"tags.x": {"$eq": {}}}, "tags.x.$eq", "expected a str, int, float or bool or None"),
    ({"tags.x": {"$eq": [1]}}, "tags.x.$eq", "use $in"),
    ({"status": "done"}, "status", "expected a status (init, completed, aborted"),
    ({"status": {"$in": ["init", "done"]}}, "status.$in[1]", "there is no status 'done'"),
    ({"status": {"$in": ["done"]}}, "status.$in[0]", "there is no status 'done'"),
    ({"status": Plain.MATH}, "status", "there is no status 'math'"),
    ({"reward": math.nan}, "reward", "NaN"),
    ({"tags.x": {"$in": [math.nan]}}, "tags.x.$in[0]", "NaN"),
    ({"tags.x": {"$in": ["a", "\0"]}}, "tags.x.$in[1]", "NUL"),
    ({"task_name": {"$in": ["\ud83d", "\ude00"]}}, "task_name.$in[0]", "lone surrogates"),
    ({"uid": {"$in": [1, 2**63]}}, "uid.$in[1]", "64 bits"),
    ({"uid": {"$in": [True, False]}}, "uid.$in[0]", "expected a number"),
    ({"uid": 2**63}, "uid", "64 bits"),
    ({"tags.x": -(2**63) - 1}, "tags.x", "64 bits"),
    ({"task_name": "a\0"}, "task_name", "NUL"),
    ({"tags.x": "\udfff"}, "tags.x", "surrogates"),
    ({"reward": {"$gt": None}}, "reward.$gt", "None has no order"),
    ({"uid": {"$lte": None}}, "uid.$lte", "None has no order"),
    # lists
    ({"uid": {"$in": 5}}, "uid.$in", "expected a list of values, not one of type int"),
    ({"task_name": {"$in": "math"}}, "task_name.$in", "expected a list of values, not one of type str"),
    ({"uid": {"$in": {1: 2}}}, "uid.$in", "expected a list of values"),
    ({"uid": {"$in": (i for i in ())}}, "uid.$in", "expected a list of values"),
    ({"uid": {"$not_in": [1, "x"]}}, "uid.$not_in[1]", "expected a number"),
    ({"uid": {"$between": 5}}, "uid.$between", "expected a list of two values"),
    ({"uid": {"$between": [1]}}, "uid.$between", "expected a list of two values"),
    ({"uid": {"$between": [1, 2, 3]}}, "uid.$between", "expected a list of two values"),
    ({"uid": {"$between": {1, 2}}}, "uid.$between", "expected a list of two values"),
    ({"task_name": {"$between": "ab"}}, "task_name.$between", "expected a list of two values"),
    ({"uid": {"$between": [2, 1]}}, "uid.$between", "2 is above 1"),
    ({"uid": {"$between": [1, "x"]}}, "uid.$between[1]", "expected a number"),
    ({"tags.x": {"$between": [1, "x"]}}, "tags.x.$between", "both strings"),
    ({"reward": {"$between": [None, 1]}}, "reward.$between", "None has no order"),
    # nodes
    (ScalarNode("stalenes", "$eq", 1), "stalenes", "did you mean staleness?"),
    (ScalarNode("uid", "$gt", "x"), "uid.$gt", "expected a number"),
    (ScalarNode(5, "$gt", 1), "", "expected the name"),  # type: ignore[arg-type]
    (ScalarNode("uid", None, 1), "uid", "expected the name"),  # type: ignore[arg-type]
    (SetNode("uid", "$eq", (1,)), "uid.$eq", "use $in"),
    (SetNode("uid", "$in", 5), "uid.$in", "expected a list"),  # type: ignore[arg-type]
    (LogicNode("$xor", ()), "$xor", "did you mean $or?"),
    (LogicNode("$and", (NotNode(ScalarNode("uid", "$gt", "x")),)), "$and[0].$not.uid.$gt", "expected a number"),
    (LogicNode("$and", 5), "$and", "expected a list of queries"),  # type: ignore[arg-type]
    (NotNode(None), "$not", "expected a query"),  # type: ignore[arg-type]
    (ScalarNode, "", "expected a query"),
    # size
    (itself(), "$and[0].$and[0]", "at most 64 levels"),
    (deep(65), "$not.$not", "at most 64 levels"),
    (deep(10_000), "$not.$not", "at most 64 levels"),
    (doubling(), "$and[0]", "at most 1000 conditions"),
    ({"$or": [{"uid": i} for i in range(1000)]}, "$or[999].uid", "at most 1000 conditions"),
    ({"uid": {"$in": range(10**30)}}, "uid.$in", "at most 1000000 values"),
    ({"task_name": {"$in": np.array("math")}}, "task_name.$in", "expected a list of values, not one of type str"),
]


@pytest.mark.parametrize("values", [[1, 2, 5], np.array([1, 2, 5]), np.array([1, 2, 5], "u1"), np.array([1.0, 2, 5])])
def test_long_lists_of_numbers_are_read_without_a_look_at_each(values: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For which the event loop would wait: a million takes seconds."""
    monkeypatch.setattr(sys.modules["replaybuf.rules.query.parse"], "read_value", None)
    assert parse({"uid": {"$in": values}}) == SetNode("uid", "$in", (1, 2, 5))


def test_a_mistake_is_named_with_its_place() -> None:
    for query, place, message in MISTAKES:
        with pytest.raises(QueryError) as caught:
            parse(query)
        assert message in str(caught.value)
        if message.startswith(("at most 64", "at most 1000 cond")):
            assert caught.value.place.startswith(place)
        elif place:
            assert caught.value.place == place


def test_messages_can_be_printed_whatever_the_query_holds() -> None:
    for name in ("\ud800", "x" * 100_000, "\0\n", "tags.\ud800", "$\ud800"):
        with pytest.raises(QueryError) as caught:
            parse({name: 1})
        str(caught.value).encode()
        assert len(str(caught.value)) < 1_000


class Hostile(Mapping[str, Any]):
    """A mapping whose every use fails."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        raise OSError

    def __len__(self) -> int:
        raise ZeroDivisionError


class Unreadable:
    def __str__(self) -> str:
        raise RuntimeError

    __hash__ = __eq__ = __len__ = __iter__ = __float__ = __str__  # type: ignore[assignment]


class Endless(Enum):
    @property
    def value(self) -> Any:
        return self

    ONE = 1


@pytest.mark.parametrize(
    "query",
    [
        Hostile(),
        Unreadable(),
        {"$and": [Hostile()]},
        {"$or": Unreadable()},
        {"uid": Hostile()},
        {"uid": Unreadable()},
        {"uid": {"$in": [Unreadable()]}},
        {"tags.x": {"$between": [Unreadable(), Unreadable()]}},
        {"created_at": {"$in": np.array([Unreadable()])}},
        {"uid": Endless.ONE},
        LogicNode(Unreadable(), ()),  # type: ignore[arg-type]
        SetNode("uid", Unreadable(), ()),  # type: ignore[arg-type]
    ],
)
def test_objects_that_fail_when_looked_at_are_refused(query: Any) -> None:
    with pytest.raises(QueryError):
        parse(query)


GARBAGE = st.sampled_from(
    [
        object(),
        int,
        Status.FAILED,
        np.array([[1]]),
        np.array([None, {}], dtype=object),
        np.float64("nan"),
        np.datetime64("NaT", "s"),
        np.timedelta64(1, "s"),
        np.void(b"x"),
        datetime.min,
        datetime.max,
        pd.NaT,
        pd.Series([1]),
        math.nan,
        2**64,
        1j,
        b"\xff",
        range(10**20),
        "\ud800",
        "\0",
        ScalarNode("uid", "$eq", 1),
        LogicNode("$and", None),  # type: ignore[arg-type]
    ]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | GARBAGE
KEYS = st.sampled_from([*FIELDS, "tags.a", "$and", "$or", "$not", "$eq", "$in", "$between", "$gt"])
any_keys = KEYS | st.text(max_size=3) | st.integers()
anything = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_keys, inner, max_size=3),
    max_leaves=8,
)


def refusal(garbage: Any) -> str:
    """What parse says against it; nothing when it takes it for a query."""
    try:
        parse(garbage)
    except QueryError as error:
        return str(error)
    return ""


@given(anything | st.dictionaries(KEYS, anything, min_size=1, max_size=2))
def test_garbage_raises_nothing_but_query_error(garbage: Any) -> None:
    assert len(refusal(garbage).encode()) < 2_000


@given(st.sampled_from([ScalarNode, SetNode]), st.text() | SCALARS, st.text() | SCALARS | KEYS, anything)
def test_garbage_in_nodes_raises_nothing_but_query_error(node: Any, field: Any, op: Any, value: Any) -> None:
    for garbage in (node(field, op, value), LogicNode(op, value), NotNode(value)):
        assert len(refusal(garbage).encode()) < 2_000


def test_a_datetime_without_a_zone_is_utc_wherever_this_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert parse({"created_at": datetime(2026, 1, 1, 12)}) == ScalarNode("created_at", "$eq", NOON)
    finally:
        monkeypatch.undo()
        time.tzset()
