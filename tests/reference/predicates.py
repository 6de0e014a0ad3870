"""What a query means, in Python: the SQL of both databases has to agree with it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

from replaybuf.rules.query import LogicNode, Node, NotNode, ScalarNode, SetNode, Value
from replaybuf.rules.query.nodes import is_number, tag_name

Predicate: TypeAlias = Callable[[Any], bool]

_ORDERINGS: dict[str, Callable[[Any, Any], bool]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}


def predicate(node: Node) -> Predicate:
    """Return a function that says whether a group matches the node, which must come from `parse`.

    A group is an object with the fields as attributes and a dict `tags` (or None).
    """
    match node:
        case LogicNode("$and", conditions):
            parts = [predicate(condition) for condition in conditions]
            return lambda row: all(part(row) for part in parts)
        case LogicNode(_, conditions):
            parts = [predicate(condition) for condition in conditions]
            return lambda row: any(part(row) for part in parts)
        case NotNode(condition):
            part = predicate(condition)
            return lambda row: not part(row)
        case SetNode(field, op, values):
            return _member(field, frozenset(values), wanted=op == "$in")
        case ScalarNode(field, op, value):
            return _scalar(field, op, value)


def _member(field: str, values: frozenset[Value], *, wanted: bool) -> Predicate:
    value_of = _reader(field)
    return lambda row: (value_of(row) in values) is wanted


def _scalar(field: str, op: str, value: Value) -> Predicate:
    value_of = _reader(field)
    if op == "$eq":
        return lambda row: bool(value_of(row) == value)
    if op == "$ne":
        return lambda row: bool(value_of(row) != value)
    return lambda row: _ordered(op, value_of(row), value)


def _ordered(op: str, left: Any, right: Any) -> bool:
    """Return whether `left op right`: numbers are ordered among numbers, strings among strings, and nothing else is."""
    if left is None or right is None or is_number(left) != is_number(right):
        return False
    return _ORDERINGS[op](left, right)


def _reader(field: str) -> Callable[[Any], Any]:
    """Return a function that reads the field of a group; a missing tag is None."""
    tag = tag_name(field)
    if tag is None:
        return operator.attrgetter(field)
    return lambda row: (row.tags or {}).get(tag)
