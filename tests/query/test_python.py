"""What queries mean."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from replaybuf.rules.query import Query, parse
from replaybuf.values.rollouts.rollout import Status
from tests.query.stores import Group
from tests.query.strategies import groups, queries
from tests.reference.predicates import predicate


def matches(query: Query, **fields: Any) -> bool:
    return predicate(parse(query))(Group(**fields))


@pytest.mark.parametrize(
    ("operator", "below", "same", "above"),
    [
        ("$eq", False, True, False),
        ("$ne", True, False, True),
        ("$gt", False, False, True),
        ("$gte", False, True, True),
        ("$lt", True, False, False),
        ("$lte", True, True, False),
    ],
)
def test_scalar_operators_compare_the_field_with_the_operand(
    operator: str, below: bool, same: bool, above: bool
) -> None:
    assert [matches({"staleness": {operator: 3}}, staleness=x) for x in (2, 3, 4)] == [below, same, above]


def test_a_bare_value_means_equal() -> None:
    assert matches({"task_name": "math"}, task_name="math")
    assert not matches({"task_name": "math"}, task_name="code")


def test_between_holds_at_both_bounds() -> None:
    assert [matches({"staleness": {"$between": [1, 3]}}, staleness=x) for x in range(5)] == [0, 1, 1, 1, 0]


def test_several_keys_all_hold() -> None:
    query = {"task_name": "math", "staleness": 1}
    assert matches(query, task_name="math", staleness=1)
    assert not matches(query, task_name="math", staleness=2)


def test_several_operators_on_a_field_all_hold() -> None:
    assert [matches({"staleness": {"$gt": 1, "$lt": 3}}, staleness=x) for x in range(5)] == [0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("query", "result"),
    [
        ({}, True),
        ({"$and": []}, True),
        ({"$or": []}, False),
        ({"$not": {}}, False),
        ({"uid": {"$in": []}}, False),
        ({"uid": {"$not_in": []}}, True),
    ],
)
def test_of_nothing_all_hold_and_none_does(query: Query, result: bool) -> None:
    assert matches(query) is result


@pytest.mark.parametrize(
    ("condition", "result"),
    [
        ({"$ne": 3}, True),
        ({"$eq": None}, True),
        (None, True),
        ({"$ne": None}, False),
        ({"$in": [None]}, True),
        ({"$not_in": [3]}, True),
        ({"$not_in": [None]}, False),
        ({"$gt": 1}, False),
        ({"$lte": 1}, False),
        ({"$between": [-9, 9]}, False),
        ({"$not": {"$gt": 1}}, True),
    ],
)
def test_none_equals_only_none_and_has_no_order(condition: Any, result: bool) -> None:
    assert matches({"reward": condition}, reward=None) is result
    assert matches({"tags.x": condition}, tags={"x": None}) is result
    assert matches({"tags.x": condition}, tags={}) is result
    assert matches({"tags.x": condition}, tags=None) is result


def test_a_field_that_is_never_none_does_not_equal_none() -> None:
    assert not matches({"uid": None})
    assert matches({"uid": {"$ne": None}})
    assert matches({"uid": {"$in": [None, 1]}}, uid=1)


@pytest.mark.parametrize("one", [1, 1.0, True])
def test_numbers_and_bools_of_tags_compare_by_value(one: Any) -> None:
    for operand in (1, 1.0, True):
        assert matches({"tags.x": operand}, tags={"x": one})
        assert matches({"tags.x": {"$in": [operand]}}, tags={"x": one})
        assert matches({"tags.x": {"$gte": operand}}, tags={"x": one})
    assert matches({"tags.x": {"$lt": 1.5}}, tags={"x": one})


def test_tags_of_another_kind_are_neither_equal_nor_in_order() -> None:
    for condition in ("1", {"$lt": "a"}, {"$gt": ""}, {"$in": ["1"]}, {"$between": ["", "z"]}):
        assert not matches({"tags.x": condition}, tags={"x": 1})
    for condition in (1, {"$lt": 9}, {"$gt": -9}, {"$in": [1]}, {"$between": [-9, 9]}):
        assert not matches({"tags.x": condition}, tags={"x": "1"})
    assert matches({"tags.x": {"$ne": "1"}}, tags={"x": 1})


def test_everything_after_the_first_dot_is_the_name_of_the_tag() -> None:
    assert matches({'tags.a.b"c': 1}, tags={'a.b"c': 1})


def test_members_of_an_enum_equal_their_values() -> None:
    for status in ("failed", Status.FAILED):
        assert matches({"status": Status.FAILED}, status=status)
        assert matches({"status": {"$in": ["failed"]}}, status=status)


def test_integers_compare_with_floats_exactly() -> None:
    assert matches({"uid": {"$gt": 2.0**53}}, uid=2**53 + 1)
    assert matches({"uid": {"$lt": 3.5}}, uid=3)


@given(row=groups, query=queries)
def test_a_query_or_its_negation_matches(row: Group, query: Query) -> None:
    assert predicate(parse({"$not": query}))(row) is not predicate(parse(query))(row)


@given(row=groups, one=queries, other=queries)
def test_negation_turns_and_into_or(row: Group, one: Query, other: Query) -> None:
    neither = {"$not": {"$or": [one, other]}}
    both_not = {"$and": [{"$not": one}, {"$not": other}]}
    assert predicate(parse(neither))(row) is predicate(parse(both_not))(row)
