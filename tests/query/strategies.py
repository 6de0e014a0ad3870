"""Random groups and random queries, of few enough values to often have something to do with each other."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from replaybuf.rules.query import FIELDS
from replaybuf.values.rollouts.rollout import Status
from tests.query.stores import Group

HOSTILE = ["'; DROP TABLE groups; --", '"', "'", "\\", "%", "a.b", '$."a"', "[0]", "$", ":x", "é", "A", "😀", "\uffff"]


def _mostly(usual: list[Any], rest: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 4).flatmap(lambda chance: rest if chance == 0 else st.sampled_from(usual))


_edge_floats = st.sampled_from([-0.0, 0.1, math.inf, -math.inf, 2.0**53, 2.0**63, -(2.0**63), 1e300, 5e-324])
_edge_integers = st.sampled_from([2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63)])
_any_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)
texts = _mostly(["a", "b", "1", "é"], st.sampled_from(["", *HOSTILE]) | _any_text)
int64 = _mostly([0, 1, 2], _edge_integers | st.integers(-(2**63), 2**63 - 1))
int32 = _mostly([0, 1, 2], st.integers(-(2**31), 2**31 - 1))
floats = _mostly([0.0, 0.5, 1.0, 1.5, 2.0], _edge_floats | st.floats(allow_nan=False))
statuses = st.sampled_from([Status.COMPLETED, Status.FAILED, Status.INIT])
tag_names = _mostly(["a", 'b"'], st.sampled_from(HOSTILE) | _any_text.filter(bool))
# Whole floats above 2**53 are for the storage to write as integers; PostgreSQL can't tell their decimals apart.
_tag_floats = floats.filter(lambda x: math.isfinite(x) and not 2**53 <= abs(x) <= 2**63)
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
