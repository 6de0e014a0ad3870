"""The nodes of a parsed query, its operators, the fields that it may name, and its JSON text.

Nodes are plain data. Users may build them by hand; `parse` checks them like a dict, and only nodes that it returned are
compiled by `sql_conditions`. (`tests.reference.predicates` defines a query's meaning, which the SQL must have.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Value: TypeAlias = str | int | float | None
"""An operand after parsing. A bool is an int, as in Python."""

Kind: TypeAlias = Literal["int", "float", "time", "str", "status", "tag"]

SCALAR_OPERATORS = ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte")
SET_OPERATORS = {"$in": "$in", "$not_in": "$not_in", "$nin": "$not_in"}
LOGIC_OPERATORS = ("$and", "$or", "$not")
FIELD_OPERATORS = (*SCALAR_OPERATORS, *SET_OPERATORS, "$between", "$not")
#: All operators, for people.
OPERATORS = f"of a field {', '.join(FIELD_OPERATORS)}; of queries {', '.join(LOGIC_OPERATORS)}"


@dataclass(frozen=True, slots=True)
class FieldType:
    """The type of a field; a `nullable` one may be None. A `time` is a float, seconds since the epoch."""

    kind: Kind
    nullable: bool = False


FIELDS: dict[str, FieldType] = {
    "uid": FieldType("int"),
    "timestamp_id": FieldType("int"),
    "task_name": FieldType("str"),
    "status": FieldType("status"),
    "staleness": FieldType("int"),
    "priority": FieldType("float"),
    "times_sampled": FieldType("int"),
    "created_at": FieldType("time"),
    "reward": FieldType("float", nullable=True),
    "worker": FieldType("str", nullable=True),
    "trained_step": FieldType("int", nullable=True),
}

TAG_PREFIX = "tags."
TAG = FieldType("tag", nullable=True)


@dataclass(frozen=True, slots=True)
class ScalarNode:
    """`field op value`, where op is one of $eq $ne $gt $gte $lt $lte."""

    field: str
    op: str
    value: Any


@dataclass(frozen=True, slots=True)
class SetNode:
    """The field is ($in) or is not ($not_in) one of the values."""

    field: str
    op: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class LogicNode:
    """All ($and) or at least one ($or) of the conditions hold; of no conditions, $and holds and $or does not."""

    relation: str
    conditions: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class NotNode:
    """The condition does not hold."""

    condition: Node


Node: TypeAlias = ScalarNode | SetNode | LogicNode | NotNode
Query: TypeAlias = Mapping[Any, Any] | Node


def tag_name(field: str) -> str | None:
    """Return the tag's name, everything after `tags.`; None when the field is no tag."""
    return field.removeprefix(TAG_PREFIX) if field.startswith(TAG_PREFIX) else None


def field_type(field: str) -> FieldType | None:
    """Return the type of a field or tag; None for an unknown field."""
    return TAG if tag_name(field) is not None else FIELDS.get(field)


def is_number(value: object) -> bool:
    """Return whether a tag's value compares as a number; bools do, as 0 and 1."""
    return isinstance(value, int | float)


def to_text(node: Node) -> str:
    """Return a query as JSON."""
    return json.dumps(as_dict(node), ensure_ascii=False, default=as_dict)


def as_dict(node: Node) -> dict[str, Any]:
    """Return a node as a user's dict, whose values may be nodes."""
    match node:
        case ScalarNode(field, "$eq", value):
            return {field: value}
        case ScalarNode(field, op, value):
            return {field: {op: value}}
        case SetNode(field, op, values):
            return {field: {op: values}}
        case NotNode(condition):
            return {"$not": condition}
        case LogicNode("$and", ()):
            return {}
        case LogicNode(relation, conditions):
            return {relation: conditions}
