"""Parsing: from the user's query to checked nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import Enum
from typing import Any

from replaybuf.errors import QueryError
from replaybuf.query.nodes import (
    FIELD_OPERATORS,
    FIELDS,
    LOGIC_OPERATORS,
    SCALAR_OPERATORS,
    SET_OPERATORS,
    BetweenNode,
    FieldType,
    LogicNode,
    Node,
    NotNode,
    Query,
    ScalarNode,
    SetNode,
    field_type,
    tag_name,
)
from replaybuf.query.operands import MAX_VALUES, check_storable, read_bounds, read_value, read_values
from replaybuf.query.places import inside, short
from replaybuf.rollouts.statuses import OUR_STATUSES, Statuses

MAX_DEPTH = 64
# Databases limit the size of a statement; a query of this many nodes stays below every such limit.
MAX_NODES = 1000
MAX_TAG_NAME = 200


def parse(query: Query, statuses: Statuses = OUR_STATUSES) -> Node:
    """Return the checked nodes of a query, given as a dict or as nodes; `statuses` says what statuses mean.

    Raises QueryError, and nothing else, for anything that is not a query; its `place` says where.
    """
    try:
        return _Reader(statuses).query(query, "", 0)
    except QueryError:
        raise
    except Exception as error:  # a user's objects may raise anything when they are read
        raise QueryError(f"the query can't be read: looking at it raised {type(error).__name__}") from error


class _Reader:
    """Reads one query. It counts the nodes, because a small query that refers to itself can hold billions of them.

    `depth` is always the number of logic nodes above, so that parsed nodes can be parsed again.
    """

    def __init__(self, statuses: Statuses) -> None:
        self._statuses = statuses
        self._nodes = 0

    def query(self, query: object, place: str, depth: int) -> Node:
        if isinstance(query, Mapping):
            return self._all_of(query, place, depth)
        match query:
            case LogicNode(relation, conditions):
                return self._logic(_text(relation, place), conditions, place, depth)
            case NotNode(condition):
                return self._logic("$not", condition, place, depth)
            case ScalarNode(field, op, value):
                return self._leaf(field, op, value, SCALAR_OPERATORS, place, depth)
            case SetNode(field, op, values):
                return self._leaf(field, op, values, SET_OPERATORS, place, depth)
            case BetweenNode(field, lower, upper):
                return self._leaf(field, "$between", (lower, upper), ("$between",), place, depth)
        wanted = 'expected a query, a dict such as {"staleness": {"$lt": 5}}'
        raise QueryError(f"{wanted}, not one of type {type(query).__name__}", place)

    def _all_of(self, query: Mapping[Any, Any], place: str, depth: int) -> Node:
        entries = list(query.items())
        if len(entries) == 1:
            return self._entry(*entries[0], place, depth)
        self._count(place, depth)
        return LogicNode("$and", tuple(self._entry(key, operand, place, depth + 1) for key, operand in entries))

    def _entry(self, key: object, operand: object, place: str, depth: int) -> Node:
        name = _text(key, place)
        if name.startswith("$"):
            return self._logic(name, operand, place, depth)
        return self._field(name, operand, inside(place, name), depth)

    def _logic(self, relation: str, operand: object, place: str, depth: int) -> Node:
        place = inside(place, relation)
        self._count(place, depth)
        if relation == "$not":
            return NotNode(self.query(operand, place, depth + 1))
        if relation not in LOGIC_OPERATORS:
            raise _unknown("operator for queries", relation, LOGIC_OPERATORS, place)
        if not isinstance(operand, list | tuple):
            raise QueryError(f"expected a list of queries, not one of type {type(operand).__name__}", place)
        return LogicNode(relation, tuple(self.query(q, f"{place}[{i}]", depth + 1) for i, q in enumerate(operand)))

    def _field(self, name: str, operand: object, place: str, depth: int) -> Node:
        """Return the node for a field's operand: a value, or a dict of operators that all hold."""
        kind = _known_field(name, place)
        if not isinstance(operand, Mapping):
            self._count(place, depth)
            return ScalarNode(name, "$eq", read_value(self._own_status(kind, operand), kind, place))
        entries = [(_text(key, place), value) for key, value in operand.items()]
        if not entries:
            raise QueryError(f"expected a value or an operator ({', '.join(FIELD_OPERATORS)})", place)
        if len(entries) == 1:
            return self._operator(name, kind, *entries[0], place, depth)
        self._count(place, depth)
        return LogicNode("$and", tuple(self._operator(name, kind, op, v, place, depth + 1) for op, v in entries))

    def _operator(self, name: str, kind: FieldType, op: str, operand: object, place: str, depth: int) -> Node:
        self._count(place, depth)
        place = inside(place, op)
        if op == "$not":
            return NotNode(self._field(name, operand, place, depth + 1))
        return _compared(name, kind, op, self._own_status(kind, operand), place)

    def _leaf(self, field: object, op: object, operand: Any, valid: Iterable[str], place: str, depth: int) -> Node:
        """Return the checked form of a node that the user built."""
        self._count(place, depth)
        name = _text(field, place)
        kind = _known_field(name, inside(place, name))
        operator = _text(op, inside(place, name))
        place = inside(inside(place, name), operator)
        if operator not in valid:
            raise _unknown("operator for this node", operator, valid, place)
        return _compared(name, kind, operator, self._own_status(kind, operand), place)

    def _own_status(self, kind: FieldType, operand: Any) -> Any:
        """Return an operand with statuses of ours in place of those of users; what isn't known stays."""
        if kind.kind != "status":
            return operand
        if isinstance(operand, list | tuple | set | frozenset):
            return [self._statuses.get(one) or one for one in operand] if len(operand) <= MAX_VALUES else operand
        return self._statuses.get(operand) or operand

    def _count(self, place: str, depth: int) -> None:
        self._nodes += 1
        if depth > MAX_DEPTH:
            raise QueryError(f"queries nest at most {MAX_DEPTH} levels deep", place)
        if self._nodes > MAX_NODES:
            raise QueryError(f"a query has at most {MAX_NODES} conditions; for many values use $in", place)


def _compared(name: str, kind: FieldType, op: str, operand: Any, place: str) -> Node:
    if op in SCALAR_OPERATORS:
        value = read_value(operand, kind, place)
        if value is None and op not in ("$eq", "$ne"):
            raise QueryError("None has no order; it goes with $eq, $ne, $in and $not_in", place)
        return ScalarNode(name, op, value)
    if op in SET_OPERATORS:
        return SetNode(name, SET_OPERATORS[op], read_values(operand, kind, place))
    if op == "$between":
        return BetweenNode(name, *read_bounds(operand, kind, place))
    raise _unknown("operator", op, FIELD_OPERATORS, place)


def _text(key: object, place: str) -> str:
    """Return a key of the query as text; it may be a member of an enum.

    Raises QueryError when it isn't a str.
    """
    if isinstance(key, Enum):
        key = key.value
    if not isinstance(key, str):
        raise QueryError(f"expected the name of a field or operator, not one of type {type(key).__name__}", place)
    return str.__str__(key)


def _known_field(name: str, place: str) -> FieldType:
    kind = field_type(name)
    if kind is None:
        raise _unknown("field", name, (*FIELDS, "tags.NAME"), place)
    tag = tag_name(name)
    if tag is not None:
        if not 0 < len(tag) <= MAX_TAG_NAME:
            raise QueryError(f"expected tags.NAME, with a name of 1 to {MAX_TAG_NAME} characters", place)
        check_storable(tag, place)
    return kind


def _unknown(what: str, name: str, valid: Iterable[str], place: str) -> QueryError:
    near = get_close_matches(name[:100], list(valid), n=1)
    suggestion = f"did you mean {near[0]}? " if near else ""
    return QueryError(f"there is no {what} {short(name)}; {suggestion}valid: {', '.join(valid)}", place)
