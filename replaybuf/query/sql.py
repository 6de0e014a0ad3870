"""Queries in SQL, with the meaning that `predicate` gives them.

No condition is ever NULL, so that negation works. Comparisons of columns that are never NULL stay plain, so that
indexes are used. Every value is bound, tag names included, so that statements of the same shape share a cache entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Boolean, ColumnElement, String, and_, false, literal, not_, or_, true, type_coerce
from sqlalchemy.sql.elements import Grouping

from replaybuf.query.dialects import DIALECTS, Dialect
from replaybuf.query.exact import COMPARISONS, compare_number, number_type, representable
from replaybuf.query.nodes import (
    FIELDS,
    BetweenNode,
    LogicNode,
    Node,
    NotNode,
    ScalarNode,
    SetNode,
    Value,
    tag_name,
)

Condition = ColumnElement[bool]

_INLINE = 200
# Databases take about 32,000 parameters per statement; the other operands of a query need fewer than the rest.
_INLINE_IN_ALL = 20_000
_FLAT = 8


def compile_sql(node: Node, columns: Mapping[str, ColumnElement[Any]], dialect_name: str) -> Condition:
    """Return the condition for a node from `parse`, for `sqlite` or `postgresql`.

    `columns` has a column for each field, and `tags`: JSON text on SQLite, JSONB on PostgreSQL, NULL for no tags. Only
    `tags` and the fields that are nullable may be NULL. Raises ValueError for another database.
    """
    if dialect_name not in DIALECTS:
        raise ValueError(f"no SQL for {dialect_name!r}, only for {' and '.join(DIALECTS)}")
    sets = _count_sets(node)
    dialect = DIALECTS[dialect_name](min(_INLINE, _INLINE_IN_ALL // max(sets, 1)))
    return _Compiler(columns, dialect).condition(node)


class _Compiler:
    def __init__(self, columns: Mapping[str, ColumnElement[Any]], dialect: Dialect) -> None:
        self._columns = columns
        self._dialect = dialect

    def condition(self, node: Node) -> Condition:
        match node:
            case LogicNode("$and", conditions):
                return _joined(and_, true(), [self.condition(part) for part in conditions])
            case LogicNode(_, conditions):
                return _joined(or_, false(), [self.condition(part) for part in conditions])
            case NotNode(part):
                return not_(self.condition(part))
            case BetweenNode(field, lower, upper):
                return and_(self._scalar(field, "$gte", lower), self._scalar(field, "$lte", upper))
            case SetNode(field, "$in", values):
                return self._member(field, values)
            case SetNode(field, _, values):
                return not_(self._member(field, values))
            case ScalarNode(field, "$ne", value):
                return not_(self._scalar(field, "$eq", value))
            case ScalarNode(field, op, value):
                return self._scalar(field, op, value)

    def _scalar(self, field: str, op: str, value: Value) -> Condition:
        """Return the condition of any comparison but $ne."""
        if value is None:
            return self._missing(field)
        tag = tag_name(field)
        if tag is not None:
            return self._dialect.tag_compares(self._columns["tags"], tag, op, value)
        return self._never_null(field, self._compared(field, op, value))

    def _compared(self, field: str, op: str, value: str | int | float) -> Condition:
        column = self._columns[field]
        if not isinstance(value, str):
            return compare_number(column, op, value, integers=FIELDS[field].kind == "int")
        if op != "$eq":
            column = self._dialect.by_code_point(column)
        result: Condition = COMPARISONS[op](column, literal(value, String()))
        return result

    def _member(self, field: str, values: Sequence[Value]) -> Condition:
        given = [value for value in values if value is not None]
        tag = tag_name(field)
        if tag is not None:
            found = self._dialect.tag_one_of(self._columns["tags"], tag, given)
        else:
            found = self._never_null(field, self._listed(field, given))
        return found if len(given) == len(values) else or_(found, self._missing(field))

    def _listed(self, field: str, values: Sequence[Any]) -> Condition:
        column = self._columns[field]
        if FIELDS[field].kind in ("str", "status"):
            return self._dialect.one_of(column, values, String())
        integers = FIELDS[field].kind == "int"
        return self._dialect.one_of(column, representable(values, integers=integers), number_type(integers=integers))

    def _missing(self, field: str) -> Condition:
        tag = tag_name(field)
        if tag is not None:
            return not_(self._dialect.tag_present(self._columns["tags"], tag))
        return self._columns[field].is_(None) if FIELDS[field].nullable else false()

    def _never_null(self, field: str, condition: Condition) -> Condition:
        return and_(self._columns[field].is_not(None), condition) if FIELDS[field].nullable else condition


def _joined(join: Callable[..., Condition], empty: Condition, parts: Sequence[Condition]) -> Condition:
    """Return the parts joined, many of them in halves.

    SQLite limits the depth of an expression, and counts each link of a flat chain as one level.
    """
    if len(parts) <= _FLAT:
        return join(empty, *parts)
    middle = len(parts) // 2
    halves = (_joined(join, empty, half) for half in (parts[:middle], parts[middle:]))
    # Without type_coerce, SQLAlchemy removes the parentheses.
    return join(*(type_coerce(Grouping(half), Boolean()) for half in halves))


def _count_sets(node: Node) -> int:
    match node:
        case LogicNode(_, conditions):
            return sum(map(_count_sets, conditions))
        case NotNode(condition):
            return _count_sets(condition)
    return int(isinstance(node, SetNode))
