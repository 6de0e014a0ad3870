"""Random groups and random queries that often have something to do with each other."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from replaybuf.query import FIELDS
from replaybuf.rollout import Status
from tests.query.stores import Group

HOSTILE = [
    "'; DROP TABLE groups; --",
    '"',
    "'",
    "\\",
    "%",
    "a.b",
    '$."a"',
    "[0]",
    "$",
    "é",
    "A",
    "a",
    "b",
    "😀",
    "\uffff",
    ":x",
]

texts = st.sampled_from(["", "\uffff", *HOSTILE]) | st.text(
    st.characters(exclude_characters="\0", codec="utf-8"), max_size=5
)
tag_names = st.sampled_from(HOSTILE) | texts.filter(bool)
_EDGES = [0, 1, 2, 3, -1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63)]
int64 = st.sampled_from(_EDGES) | st.integers(-(2**63), 2**63 - 1)
int32 = st.integers(-3, 3) | st.integers(-(2**31), 2**31 - 1)
floats = st.sampled_from([0.0, -0.0, 0.1, 0.5, 1.0, 2.0, 2.5, 2.0**53, 2.0**63, -(2.0**63), 1e300, 5e-324]) | st.floats(
    allow_nan=False
)
# Whole floats above 2**53 are for the storage to write as integers; PostgreSQL can't tell their decimals apart.
tag_floats = floats.filter(lambda x: math.isfinite(x) and not 2**53 <= abs(x) <= 2**63)
tag_values = st.none() | st.booleans() | int64 | tag_floats | texts
statuses = st.sampled_from(list(Status))

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
    reward=st.none() | floats,
    tags=st.none() | st.dictionaries(st.sampled_from(["a", "b", 'a"b']) | tag_names, tag_values, max_size=4),
)

_numbers = st.integers(-3, 3) | int64 | floats
_tag_kinds = [_numbers | st.booleans(), texts]


def _operands(field: str) -> list[st.SearchStrategy[Any]]:
    """What the field may be compared with; the operands of each strategy have an order."""
    if field.startswith("tags."):
        return _tag_kinds
    return {"str": [texts], "status": [statuses]}.get(FIELDS[field].kind, [_numbers])


@st.composite
def comparisons(draw: st.DrawFn, field: str) -> tuple[str, Any]:
    """An operator and its operand."""
    ordered = draw(st.sampled_from(_operands(field)))
    anything = st.one_of(st.none(), *_operands(field))
    operator = draw(st.sampled_from(["order", "$eq", "$ne", "$in", "$not_in", "$nin", "$between", "$not"]))
    if operator == "order":
        return draw(st.sampled_from(["$gt", "$gte", "$lt", "$lte"])), draw(ordered)
    if operator == "$between":
        return operator, sorted(draw(st.tuples(ordered, ordered)))
    if operator == "$not":
        return operator, dict([draw(comparisons(field))])
    if operator in ("$eq", "$ne"):
        return operator, draw(anything)
    return operator, draw(st.lists(anything, max_size=4))


@st.composite
def fields(draw: st.DrawFn) -> tuple[str, Any]:
    """A field and what it is compared with."""
    tags = st.sampled_from(["a", "b", 'a"b']) | tag_names
    field = draw(st.sampled_from(list(FIELDS)) | tags.map("tags.".__add__))
    operand = st.dictionaries(st.just("$eq"), st.one_of(*_operands(field)), min_size=1) | st.lists(
        comparisons(field), min_size=1, max_size=2
    ).map(dict)
    return field, draw(operand | st.one_of(st.none(), *_operands(field)))


leaves = st.lists(fields(), max_size=2).map(dict)
queries = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"$and": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"$or": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"$not": inner}),
        st.tuples(inner, fields()).map(lambda pair: {**pair[0], pair[1][0]: pair[1][1]}),
    ),
    max_leaves=6,
)
