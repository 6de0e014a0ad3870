"""Compiles queries to SQL with the meaning of `tests.reference.predicates`.

No condition is ever NULL, so that negation works. Comparisons of columns that are never NULL stay plain, so that
indexes are used. Every value is bound, including tag names, so that statements of the same shape share a cache entry.

Numbers are compared as the databases do it: PostgreSQL rounds integers beyond 2**53 that are compared with floats. The
operands of tags are written as JSON, as tags are. A missing tag is NULL, but no condition on tags is.
"""

from __future__ import annotations

import json
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Dialect,
    Double,
    Integer,
    Select,
    String,
    Text,
    and_,
    case,
    cast,
    exists,
    false,
    func,
    literal,
    literal_column,
    not_,
    or_,
    select,
    true,
    type_coerce,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.elements import Grouping
from sqlalchemy.types import TypeEngine

from replaybuf.common.checks import exact_in_json
from replaybuf.rules.query.nodes import (
    FIELDS,
    LogicNode,
    Node,
    NotNode,
    ScalarNode,
    SetNode,
    Value,
    tag_name,
)

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
# Databases allow about 32,000 parameters per statement, and a query has at most 1,000 conditions (`parse.MAX_NODES`).
_MOST_INLINE = 20


def _operand_type(field: str, values: Sequence[Any]) -> TypeEngine[Any]:
    """Return the type of bound operands of a field."""
    kind = FIELDS[field].kind
    if kind in ("str", "status"):
        return String()
    return BigInteger() if kind == "int" and all(isinstance(value, int) for value in values) else Double()


#: Above all floats, for which JSON has no infinity.
_ABOVE_FLOATS = 10**309
Tags = ColumnElement[Any]


class QueryDialect(ABC):
    """The SQL of one database. Longer lists than `_MOST_INLINE` are sent as one parameter."""

    def one_of(self, value: ColumnElement[Any], values: Sequence[Any], kind: TypeEngine[Any]) -> ColumnElement[bool]:
        """Return `value IN values`, all of one type; NULL where the value is NULL."""
        if not values:
            return false()
        if len(values) <= _MOST_INLINE:
            return value.in_([literal(operand, kind) for operand in values])
        return value.in_(self._rows(values, kind))

    @abstractmethod
    def by_code_point(self, text: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return the text with a collation by Unicode code points."""

    @abstractmethod
    def tag_compares(self, tags: Tags, name: str, op: str, value: str | int | float) -> ColumnElement[bool]:
        """Return the condition that the tag has the value's type, and `tag op value`, where op is of an order."""

    @abstractmethod
    def tag_one_of(self, tags: Tags, name: str, values: Sequence[str | int | float]) -> ColumnElement[bool]:
        """Return the condition that the tag equals one of the values."""

    @abstractmethod
    def tag_present(self, tags: Tags, name: str) -> ColumnElement[bool]:
        """Return the condition that the tag exists, and isn't None."""

    @abstractmethod
    def _rows(self, values: Sequence[Any], kind: TypeEngine[Any]) -> Select[Any]:
        """Return the values as rows, from one bound parameter."""


class SQLiteQueries(QueryDialect):
    """Looks up tags as rows of json_each: JSON paths quote names, which SQLite gets wrong for some."""

    def by_code_point(self, text: ColumnElement[Any]) -> ColumnElement[Any]:
        return text  # SQLite compares the bytes of UTF-8, whose order is the same

    def tag_compares(self, tags: Tags, name: str, op: str, value: str | int | float) -> ColumnElement[bool]:
        entry = _entries(tags)
        is_kind = entry.c.type == "text" if isinstance(value, str) else entry.c.type != "text"
        return _has_entry(entry, name, and_(is_kind, COMPARISONS[op](entry.c.value, literal(value))))

    def tag_one_of(self, tags: Tags, name: str, values: Sequence[str | int | float]) -> ColumnElement[bool]:
        entry = _entries(tags)
        listed = func.json_each(_as_json([*map(_operand, values)])).table_valued("value")
        return _has_entry(entry, name, entry.c.value.in_(select(listed.c.value)))

    def tag_present(self, tags: Tags, name: str) -> ColumnElement[bool]:
        entry = _entries(tags)
        return _has_entry(entry, name, entry.c.type != "null")

    def _rows(self, values: Sequence[Any], kind: TypeEngine[Any]) -> Select[Any]:
        # The shortest decimals of floats are read from JSON as the same floats (tested).
        listed = json.dumps(values, ensure_ascii=False)
        if isinstance(kind, Double):
            listed = listed.replace("Infinity", "9e999")
        return select(func.json_each(literal(listed, Text())).table_valued("value").c.value)


class PostgresQueries(QueryDialect):
    """Sends long lists as JSON, as on SQLite.

    The planner turns `= ANY(array)` into a scan of the array for each row once a prepared statement is reused (its
    sixth run), and an array's length can keep it from hashing.
    """

    def by_code_point(self, text: ColumnElement[Any]) -> ColumnElement[Any]:
        return text.collate("C")

    def tag_compares(self, tags: Tags, name: str, op: str, value: str | int | float) -> ColumnElement[bool]:
        if isinstance(value, str):
            is_text = func.jsonb_typeof(_get_tag(tags, "->", name)) == "string"
            text = self.by_code_point(_get_tag(tags, "->>", name))
            return func.coalesce(and_(is_text, COMPARISONS[op](text, literal(value, Text()))), false())
        tag = _tag(tags, name)
        compares = COMPARISONS[op](tag, cast(_as_json(_operand(value)), JSONB()))
        return func.coalesce(and_(func.jsonb_typeof(tag) == "number", compares), false())

    def tag_one_of(self, tags: Tags, name: str, values: Sequence[str | int | float]) -> ColumnElement[bool]:
        listed = func.jsonb_array_elements(cast(_as_json([*map(_operand, values)]), JSONB())).table_valued("value")
        return func.coalesce(_tag(tags, name).in_(select(listed.c.value)), false())

    def tag_present(self, tags: Tags, name: str) -> ColumnElement[bool]:
        return _get_tag(tags, "->>", name).is_not(None)

    def _rows(self, values: Sequence[Any], kind: TypeEngine[Any]) -> Select[Any]:
        listed = json.dumps([str(value) for value in values], ensure_ascii=False)
        elements = func.jsonb_array_elements_text(cast(literal(listed, Text()), JSONB())).table_valued("value")
        return select(cast(elements.c.value, kind))


DIALECTS: dict[str, type[QueryDialect]] = {"sqlite": SQLiteQueries, "postgresql": PostgresQueries}


def _operand(value: str | int | float) -> str | int | float:
    """Return the operand of a tag as JSON has it; True and False are numbers."""
    if isinstance(value, float) and math.isinf(value):
        return _ABOVE_FLOATS if value > 0 else -_ABOVE_FLOATS
    return value if isinstance(value, str) else exact_in_json(value)


def _as_json(operands: Any) -> ColumnElement[str]:
    return literal(json.dumps(operands, ensure_ascii=False), Text())


def _entries(tags: Tags) -> Any:
    return func.json_each(tags).table_valued("key", "value", "type")


def _has_entry(entry: Any, name: str, condition: ColumnElement[bool]) -> ColumnElement[bool]:
    return exists(select(literal(1, Integer())).where(entry.c.key == literal(name, Text()), condition))


def _get_tag(tags: Tags, op: str, name: str) -> ColumnElement[Any]:
    return tags.op(op, return_type=JSONB() if op == "->" else Text())(literal(name, Text()))


def _tag(tags: Tags, name: str) -> ColumnElement[Any]:
    """Return the tag as JSON, with booleans as the numbers 0 and 1."""
    tag = _get_tag(tags, "->", name)
    as_number = func.to_jsonb(cast(cast(tag, Boolean()), Integer()))
    return case((func.jsonb_typeof(tag) == "boolean", as_number), else_=tag)


Condition = ColumnElement[bool]

_MOST_FLAT = 8


def compile_sql(node: Node, columns: Mapping[str, ColumnElement[Any]], dialect_name: str) -> Condition:
    """Return the condition for a node from `parse`, for `sqlite` or `postgresql`.

    `columns` has a column for each field, and `tags`: JSON text on SQLite, JSONB on PostgreSQL, NULL for no tags. Only
    `tags` and nullable fields may be NULL.
    """
    return _Compiler(columns, DIALECTS[dialect_name]()).condition(node)


def condition_text(node: Node, columns: Mapping[str, str], compiler: Dialect) -> tuple[str, dict[str, Any]]:
    """Return the condition as text with parameters `:name`, and their values. Columns are texts of SQL.

    `compiler` is SQLAlchemy's dialect, with named parameters.
    """
    texts: dict[str, ColumnElement[Any]] = {name: literal_column(column) for name, column in columns.items()}
    compiled = compile_sql(node, texts, compiler.name).compile(dialect=compiler)
    return f"({compiled})", dict(compiled.params)


class _Compiler:
    def __init__(self, columns: Mapping[str, ColumnElement[Any]], dialect: QueryDialect) -> None:
        self._columns = columns
        self._dialect = dialect

    def condition(self, node: Node) -> Condition:
        match node:
            case LogicNode("$and", conditions):
                return _join_halves(and_, true(), [self.condition(part) for part in conditions])
            case LogicNode(_, conditions):
                return _join_halves(or_, false(), [self.condition(part) for part in conditions])
            case NotNode(part):
                return not_(self.condition(part))
            case SetNode(field, "$in", values):
                return self._is_member(field, values)
            case SetNode(field, _, values):
                return not_(self._is_member(field, values))
            case ScalarNode(field, "$ne", value):
                return not_(self._scalar(field, "$eq", value))
            case ScalarNode(field, op, value):
                return self._scalar(field, op, value)

    def _scalar(self, field: str, op: str, value: Value) -> Condition:
        """Return the condition of any comparison but $ne."""
        if value is None:
            return self._is_missing(field)
        tag = tag_name(field)
        if tag is None:
            return self._never_null(field, self._comparison(field, op, value))
        if op == "$eq":
            return self._is_member(field, [value])
        return self._dialect.tag_compares(self._columns["tags"], tag, op, value)

    def _comparison(self, field: str, op: str, value: str | int | float) -> Condition:
        column = self._columns[field]
        if isinstance(value, str) and op != "$eq":
            column = self._dialect.by_code_point(column)
        result: Condition = COMPARISONS[op](column, literal(value, _operand_type(field, [value])))
        return result

    def _is_member(self, field: str, values: Sequence[Value]) -> Condition:
        operands = [value for value in values if value is not None]
        tag = tag_name(field)
        if tag is not None:
            condition = self._dialect.tag_one_of(self._columns["tags"], tag, operands)
        else:
            operand_type = _operand_type(field, operands)
            condition = self._never_null(field, self._dialect.one_of(self._columns[field], operands, operand_type))
        return condition if len(operands) == len(values) else or_(condition, self._is_missing(field))

    def _is_missing(self, field: str) -> Condition:
        tag = tag_name(field)
        if tag is not None:
            return not_(self._dialect.tag_present(self._columns["tags"], tag))
        return self._columns[field].is_(None) if FIELDS[field].nullable else false()

    def _never_null(self, field: str, condition: Condition) -> Condition:
        return and_(self._columns[field].is_not(None), condition) if FIELDS[field].nullable else condition


def _join_halves(join: Callable[..., Condition], empty: Condition, parts: Sequence[Condition]) -> Condition:
    """Return the parts joined, recursively in halves.

    SQLite limits the depth of an expression, and counts each link of a flat chain as one level.
    """
    if len(parts) <= _MOST_FLAT:
        return join(empty, *parts)
    middle = len(parts) // 2
    halves = (_join_halves(join, empty, half) for half in (parts[:middle], parts[middle:]))
    # Without type_coerce, SQLAlchemy removes the parentheses.
    return join(*(type_coerce(Grouping(half), Boolean()) for half in halves))
