"""xtuner's query nodes: the dict of a query as a tree, for storage backends of users' own, and for ours."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from replaybuf import query as ours
from replaybuf.errors import QueryError
from replaybuf.query.nodes import SCALAR_OPERATORS


class QueryNode(ABC):  # noqa: B024
    """A part of a query."""


class ConditionNode(QueryNode):
    """A condition on one field of a `StorageItem`."""

    field: str


class ScalarNode(ConditionNode):
    """`field op value`, where op is one of $eq $ne $gt $gte $lt $lte."""

    def __init__(self, field: str, op: str, value: Any) -> None:
        self.field, self.op, self.value = field, op, value


class SetNode(ConditionNode):
    """The field is ($in) or is not ($not_in) one of the values."""

    def __init__(self, field: str, op: str, value: Sequence[Any]) -> None:
        self.field, self.op, self.value = field, op, value


class BetweenNode(ConditionNode):
    """`lower <= field <= upper`. Raises QueryError, a ValueError, when lower is greater."""

    def __init__(self, field: str, lower: Any, upper: Any) -> None:
        if lower > upper:
            raise QueryError(f"$between needs its lower bound first, got {lower!r:.50} and {upper!r:.50}", field)
        self.field, self.op, self.lower, self.upper = field, "$between", lower, upper


class LogicNode(QueryNode):
    """All ($and) or at least one ($or) of the conditions hold."""

    def __init__(self, relation: str, conditions: Sequence[QueryNode]) -> None:
        self.relation, self.conditions = relation, list(conditions)


Query: TypeAlias = Mapping[Any, Any] | QueryNode


def parse_query(expr: Query) -> QueryNode:
    """Return the nodes of a query. Raises QueryError, a ValueError, for what is none."""
    if isinstance(expr, QueryNode):
        return expr
    if not isinstance(expr, Mapping):
        raise QueryError(f"expected a query, a dict such as {{'staleness': {{'$lt': 5}}}}, got {type(expr).__name__}")
    conditions = [node for key, operand in expr.items() for node in _entry(key, operand)]
    return conditions[0] if len(conditions) == 1 else LogicNode("$and", conditions)


def _entry(key: Any, operand: Any) -> list[QueryNode]:
    if key in ("$and", "$or"):
        if not isinstance(operand, list):
            raise QueryError(f"expected a list of queries, got {type(operand).__name__}", str(key))
        return [LogicNode(key, [parse_query(one) for one in operand])]
    if not isinstance(operand, Mapping):
        return [ScalarNode(key, "$eq", operand)]
    return [_condition(key, op, value) for op, value in operand.items()]


def _condition(field: str, op: Any, value: Any) -> ConditionNode:
    place = f"{field}.{op}"
    if op in SCALAR_OPERATORS:
        return ScalarNode(field, op, value)
    if op in ("$in", "$not_in"):
        if not isinstance(value, list | tuple):
            raise QueryError("expected a list of values", place)
        return SetNode(field, op, value)
    if op == "$between":
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise QueryError("expected a list of two values, the lower and the upper bound", place)
        return BetweenNode(field, *value)
    raise QueryError(
        f"there is no operator {op!r:.50}; valid: {', '.join(SCALAR_OPERATORS)}, $in, $not_in, $between", place
    )


def as_ours(query: Query) -> ours.Query:
    """Return a query as a replaybuf buffer takes it: from a dict, from these nodes, or from xtuner's own."""
    if isinstance(query, Mapping):
        return {key: [*map(as_ours, value)] if key in ("$and", "$or") else value for key, value in query.items()}
    node: Any = query
    if hasattr(node, "conditions"):
        return {node.relation: [*map(as_ours, node.conditions)]}
    if hasattr(node, "lower"):
        return {node.field: {"$between": [node.lower, node.upper]}}
    return {node.field: {node.op: node.value}}
