"""Parses a user's query, a dict or its JSON, into checked nodes, whose operands both databases can store.

Users write numpy scalars, enum members and datetimes; operands become str, int, float, bool or None, of a type that the
field compares with. Errors have the path of a mistake, such as `$and[1].staleness.$gt`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from enum import Enum
from itertools import islice
from typing import Any

from replaybuf.common.checks import INT64, is_numpy, is_storable, shown
from replaybuf.common.redact import redact
from replaybuf.errors import QueryError
from replaybuf.rules.query.nodes import (
    FIELD_OPERATORS,
    FIELDS,
    LOGIC_OPERATORS,
    OPERATORS,
    SCALAR_OPERATORS,
    SET_OPERATORS,
    FieldType,
    Kind,
    LogicNode,
    Node,
    NotNode,
    Query,
    ScalarNode,
    SetNode,
    Value,
    as_dict,
    field_type,
    is_number,
    tag_name,
)
from replaybuf.values.rollouts.statuses import OUR_STATUSES, Status, Statuses


def inside(place: str, name: str) -> str:
    """Return the path of a field or operator inside the query at `place`."""
    step = name if name.isprintable() and len(name) <= 100 else shown(name)
    return f"{place}.{step}" if place else step


MAX_VALUES = 1_000_000

_EXPECTED_TEXTS: dict[Kind, str] = {
    "int": "a number",
    "float": "a number",
    "time": "a number (seconds since the epoch) or a datetime",
    "str": "a str",
    "status": "a status",
    "tag": "a str, int, float or bool",
}
_ACCEPTED_TYPES: dict[Kind, tuple[type, ...]] = {
    "int": (int, float),
    "float": (int, float),
    "time": (int, float, datetime),
    "str": (str,),
    "status": (str,),
    "tag": (str, int, float, bool),
}
_STATUSES = frozenset(status.value for status in Status)


def read_value(value: Any, field: FieldType, place: str) -> Value:
    """Return one operand of a field as a plain value.

    Raises QueryError when the field can't be compared with it.
    """
    value = _plain_value(value)
    if value is None:
        return None
    if not isinstance(value, _ACCEPTED_TYPES[field.kind]) or (isinstance(value, bool) and field.kind != "tag"):
        raise QueryError(f"expected {_expected_text(field)}, not {_kind_name(value)}{_hint(value)}", place)
    if isinstance(value, datetime):
        value = _seconds(value, place)
    if isinstance(value, str):
        return _checked_text(value, field, place)
    return _checked_number(value, place)


def read_values(values: Any, field: FieldType, place: str) -> tuple[Value, ...]:
    """Return the operands of `$in` and `$not_in`. Equal ones may be left out; True, 1 and 1.0 are equal.

    Raises QueryError unless they are a list whose values fit the field.
    """
    listed = _check_values(values, place)
    kinds = {*map(type, listed)}
    if len(kinds) == 1 and _fit_at_a_glance(listed, kinds.pop(), field):
        return listed
    return tuple(dict.fromkeys(read_value(value, field, f"{place}[{i}]") for i, value in enumerate(listed)))


def _fit_at_a_glance(listed: Sequence[Any], kind: type, field: FieldType) -> bool:
    """Return whether operands of this one type are plain values that fit the field, without a look at each.

    Lists of uids and of keys are long, and the event loop waits: a set of them would take longer than all of this.
    """
    if kind not in _ACCEPTED_TYPES[field.kind]:
        return False
    if kind is int:
        return min(listed) in INT64 and max(listed) in INT64
    if kind is float:
        return not any(map(math.isnan, listed))
    return kind is str and field.kind != "status" and is_storable("".join(listed))


def read_bounds(bounds: Any, field: FieldType, place: str) -> tuple[Value, Value]:
    """Return the operands of `$between`.

    Raises QueryError unless they are two values of one type, in order.
    """
    if is_numpy(bounds, "ndarray"):
        bounds = list(bounds)
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        raise QueryError(f"expected a list of two values, [lowest, highest], not {_kind_name(bounds)}", place)
    lower, upper = (read_value(bound, field, f"{place}[{i}]") for i, bound in enumerate(bounds))
    if lower is None or upper is None:
        raise QueryError("None has no order; both bounds must be values", place)
    if is_number(lower) != is_number(upper):
        raise QueryError("both bounds must be numbers, or both strings", place)
    if lower > upper:  # type: ignore[operator]  # of one type, checked above
        raise QueryError(f"the lowest value comes first: {shown(lower)} is above {shown(upper)}", place)
    return lower, upper


def _check_values(values: Any, place: str) -> tuple[Any, ...]:
    if is_numpy(values, "ndarray"):
        values = values.tolist() if values.dtype.kind in "iuf" or not values.ndim else list(values)
    if not isinstance(values, list | tuple | set | frozenset | range):
        raise QueryError(f"expected a list of values, not {_kind_name(values)}", place)
    listed = tuple(islice(values, MAX_VALUES + 1))  # a range may be longer than `len` can say
    if len(listed) > MAX_VALUES:
        raise QueryError(f"at most {MAX_VALUES} values", place)
    return listed


def _plain_value(value: Any) -> Any:
    """Return the value as a plain Python type: not all drivers accept enums, numpy types and subclasses."""
    if isinstance(value, Enum):
        return _plain_value(value.value)
    if is_numpy(value, "datetime64"):
        # item() of nanoseconds is a plain int, which would be taken for seconds.
        moment = value.astype("datetime64[us]").item()
        return math.nan if moment is None else moment  # NaT
    if is_numpy(value, "generic"):
        return value.item()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__int__(value)
    return value


def _seconds(moment: datetime, place: str) -> float:
    try:
        return (moment if moment.utcoffset() is not None else moment.replace(tzinfo=UTC)).timestamp()
    except Exception as error:  # from a time zone, or pandas' NaT, a datetime by type
        raise QueryError("the datetime is no moment in time", place) from error


def _checked_text(text: str, field: FieldType, place: str) -> str:
    check_storable(text, place)
    if field.kind == "status" and text not in _STATUSES:
        raise QueryError(f"there is no status {shown(text)}; expected {_expected_text(field)}", place)
    return text


def check_storable(text: str, place: str) -> None:
    """Raise QueryError for a text that a database can't store."""
    if not is_storable(text):
        raise QueryError("a text with a NUL character or lone surrogates can't be stored", place)


def _checked_number(number: int | float, place: str) -> int | float:
    if isinstance(number, float):
        if math.isnan(number):
            raise QueryError("NaN compares with nothing; expected a number", place)
    elif number not in INT64:
        raise QueryError("the integer does not fit into 64 bits", place)
    return number


def _expected_text(field: FieldType) -> str:
    text = _EXPECTED_TEXTS[field.kind]
    if field.kind == "status":
        text += f" ({', '.join(status.value for status in Status)})"
    return f"{text} or None" if field.nullable else text


def _hint(value: object) -> str:
    several = isinstance(value, list | tuple | set | frozenset) or is_numpy(value, "ndarray")
    return "; for several values use $in" if several else ""


def _kind_name(value: object) -> str:
    return f"one of type {type(value).__name__}"


MAX_DEPTH = 64
# Databases limit the size of a statement; a query of this many nodes stays below every such limit.
MAX_NODES = 1000
MAX_TAG_NAME = 200


def parse(query: Query, statuses: Statuses = OUR_STATUSES) -> Node:
    """Return the checked nodes of a query, given as a dict or as nodes; `statuses` translates users' statuses.

    Raises QueryError, and nothing else, for an invalid query; its `place` is the path of the mistake.
    """
    try:
        return _QueryParser(statuses).query(query, "", 0)
    except QueryError:
        raise
    except Exception as error:  # a user's objects may raise any exception
        raise QueryError(f"the query can't be read: looking at it raised {type(error).__name__}") from error


def query_of(where: str | None, task: str | None, status: str | None) -> Node:
    """Return the query that groups of a query's text, a task and a status match. Raises QueryError."""
    nodes = [_read_query(where)] if where else []
    fields = {"task_name": task, "status": None if status is None else redact(status)}
    nodes += [parse({name: value}) for name, value in fields.items() if value is not None]
    return LogicNode("$and", tuple(nodes))


def _read_query(text: str) -> Node:
    """Parse a query; an empty text is one that everything matches. Raises QueryError."""
    if not text.strip():
        return LogicNode("$and", ())
    try:
        query = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise QueryError(f'a query is JSON, such as {{"reward": {{"$gte": 0.9}}}}: {error}') from None
    if not isinstance(query, dict):
        raise QueryError('a query is a JSON object, such as {"reward": {"$gte": 0.9}}')
    return parse(query)


class _QueryParser:
    """Parses one query. It limits the nodes, because a small query that refers to itself can have billions of them.

    `depth` is always the number of logic nodes above, so that parsed nodes can be parsed again.
    """

    def __init__(self, statuses: Statuses) -> None:
        self._statuses = statuses
        self._nodes = 0

    def query(self, query: object, place: str, depth: int) -> Node:
        if isinstance(query, ScalarNode | SetNode | LogicNode | NotNode):
            query = as_dict(query)
        if isinstance(query, Mapping):
            return self._all_of(query, place, depth)
        expected = 'expected a query, a dict such as {"staleness": {"$lt": 5}}'
        raise QueryError(f"{expected}, not one of type {type(query).__name__}", place)

    def _all_of(self, query: Mapping[Any, Any], place: str, depth: int) -> Node:
        entries = list(query.items())
        if len(entries) == 1:
            return self._entry(*entries[0], place, depth)
        self._count(place, depth)
        return LogicNode("$and", tuple(self._entry(key, operand, place, depth + 1) for key, operand in entries))

    def _entry(self, key: object, operand: object, place: str, depth: int) -> Node:
        name = _key_text(key, place)
        if name.startswith("$"):
            return self._logic(name, operand, place, depth)
        return self._field(name, operand, inside(place, name), depth)

    def _logic(self, relation: str, operand: object, place: str, depth: int) -> Node:
        place = inside(place, relation)
        self._count(place, depth)
        if relation == "$not":
            return NotNode(self.query(operand, place, depth + 1))
        if relation not in LOGIC_OPERATORS:
            raise _unknown_error("operator for queries", relation, LOGIC_OPERATORS, place, OPERATORS)
        if not isinstance(operand, list | tuple):
            raise QueryError(f"expected a list of queries, not one of type {type(operand).__name__}", place)
        return LogicNode(relation, tuple(self.query(q, f"{place}[{i}]", depth + 1) for i, q in enumerate(operand)))

    def _field(self, name: str, operand: object, place: str, depth: int) -> Node:
        """Return the node for a field's operand: a value, or a dict of operators that all hold."""
        kind = _known_field(name, place)
        if not isinstance(operand, Mapping):
            self._count(place, depth)
            return ScalarNode(name, "$eq", read_value(self._our_status(kind, operand), kind, place))
        entries = [(_key_text(key, place), value) for key, value in operand.items()]
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
        if op == "$between":
            lower, upper = read_bounds(operand, kind, place)
            ends = ScalarNode(name, "$gte", lower), ScalarNode(name, "$lte", upper)
            for _ in ends:
                self._count(place, depth + 1)
            return LogicNode("$and", ends)
        return _comparison(name, kind, op, self._our_status(kind, operand), place)

    def _our_status(self, kind: FieldType, operand: Any) -> Any:
        """Return an operand with users' statuses replaced by ours; unknown values are unchanged."""
        if kind.kind != "status":
            return operand
        if isinstance(operand, list | tuple | set | frozenset):
            return [self._statuses.get(value) or value for value in operand] if len(operand) <= MAX_VALUES else operand
        return self._statuses.get(operand) or operand

    def _count(self, place: str, depth: int) -> None:
        self._nodes += 1
        if depth > MAX_DEPTH:
            raise QueryError(f"queries nest at most {MAX_DEPTH} levels deep", place)
        if self._nodes > MAX_NODES:
            raise QueryError(f"a query has at most {MAX_NODES} conditions; for many values use $in", place)


def _comparison(name: str, kind: FieldType, op: str, operand: Any, place: str) -> Node:
    if op in SCALAR_OPERATORS:
        value = read_value(operand, kind, place)
        if value is None and op not in ("$eq", "$ne"):
            raise QueryError("None has no order; it goes with $eq, $ne, $in and $not_in", place)
        return ScalarNode(name, op, value)
    if op in SET_OPERATORS:
        return SetNode(name, SET_OPERATORS[op], read_values(operand, kind, place))
    raise _unknown_error("operator", op, FIELD_OPERATORS, place, OPERATORS)


def _key_text(key: object, place: str) -> str:
    """Return a key of the query as text; it may be a member of an enum. Raises QueryError unless it is a str."""
    if isinstance(key, Enum):
        key = key.value
    if not isinstance(key, str):
        raise QueryError(f"expected the name of a field or operator, not one of type {type(key).__name__}", place)
    return str.__str__(key)


def _known_field(name: str, place: str) -> FieldType:
    kind = field_type(name)
    if kind is None:
        raise _unknown_error("field", name, (*FIELDS, "tags.NAME"), place)
    tag = tag_name(name)
    if tag is not None:
        if not 0 < len(tag) <= MAX_TAG_NAME:
            raise QueryError(f"expected tags.NAME, with a name of 1 to {MAX_TAG_NAME} characters", place)
        check_storable(tag, place)
    return kind


def _unknown_error(kind: str, name: str, valid: Iterable[str], place: str, listed: str = "") -> QueryError:
    similar = get_close_matches(name[:100], list(valid), n=1)
    suggestion = f"did you mean {similar[0]}? " if similar else ""
    return QueryError(f"there is no {kind} {shown(name)}; {suggestion}valid: {listed or ', '.join(valid)}", place)
