"""What the databases do differently: the order of strings, long lists, and tags.

A tag is NULL where a group has none of that name. None of these conditions is ever NULL for a value that isn't NULL.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Double,
    Integer,
    Numeric,
    Select,
    String,
    Text,
    and_,
    bindparam,
    case,
    cast,
    exists,
    false,
    func,
    literal,
    or_,
    select,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeEngine

from replaybuf.query.exact import COMPARISONS
from replaybuf.query.nodes import is_number

Tags = ColumnElement[Any]
Typed = tuple[list[Any], TypeEngine[Any]]


class Dialect(ABC):
    """The SQL of one kind of database. Lists of more than `inline` values are sent as one parameter."""

    def __init__(self, inline: int) -> None:
        self._inline = inline

    def one_of(self, value: ColumnElement[Any], values: Sequence[Any], kind: TypeEngine[Any]) -> ColumnElement[bool]:
        """Return `value IN values`, all of one type; NULL when the value is."""
        if not values:
            return false()
        if len(values) <= self._inline:
            return value.in_(bindparam(None, list(values), kind, unique=True, expanding=True))
        return value.in_(self._rows(values, kind))

    @abstractmethod
    def by_code_point(self, text: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return the text such that it is compared by Unicode code points."""

    @abstractmethod
    def tag_compares(self, tags: Tags, name: str, op: str, value: str | int | float) -> ColumnElement[bool]:
        """Return the condition that the tag is of the value's kind, and `tag op value`."""

    @abstractmethod
    def tag_one_of(self, tags: Tags, name: str, values: Sequence[str | int | float]) -> ColumnElement[bool]:
        """Return the condition that the tag equals one of the values."""

    @abstractmethod
    def tag_present(self, tags: Tags, name: str) -> ColumnElement[bool]:
        """Return the condition that there is such a tag, and it is not None."""

    @abstractmethod
    def _rows(self, values: Sequence[Any], kind: TypeEngine[Any]) -> Select[Any]:
        """Return the values as rows, from one bound parameter."""


class Sqlite(Dialect):
    """Looks up tags as rows of json_each: JSON paths quote names, which SQLite gets wrong for some."""

    def by_code_point(self, text: ColumnElement[Any]) -> ColumnElement[Any]:
        return text  # SQLite compares the bytes of UTF-8, whose order is the same

    def tag_compares(self, tags: Tags, name: str, op: str, value: str | int | float) -> ColumnElement[bool]:
        entry = _entries(tags)
        typed = literal(value, _sqlite_type(value))
        return _has(entry, name, and_(_is_kind(entry, value), COMPARISONS[op](entry.c.value, typed)))

    def tag_one_of(self, tags: Tags, name: str, values: Sequence[str | int | float]) -> ColumnElement[bool]:
        entry = _entries(tags)
        lists = _by_type(values, _sqlite_type)
        return _has(entry, name, or_(false(), *(self.one_of(entry.c.value, *typed) for typed in lists)))

    def tag_present(self, tags: Tags, name: str) -> ColumnElement[bool]:
        entry = _entries(tags)
        return _has(entry, name, entry.c.type != "null")

    def _rows(self, values: Sequence[Any], kind: TypeEngine[Any]) -> Select[Any]:
        # The shortest decimals of floats are read from JSON as the same floats (tested).
        listed = json.dumps(values, ensure_ascii=False)
        if isinstance(kind, Double):
            listed = listed.replace("Infinity", "9e999")
        return select(func.json_each(literal(listed, Text())).table_valued("value").c.value)


class Postgres(Dialect):
    """Sends long lists as JSON, as on SQLite.

    The planner turns `= ANY(array)` into a scan of the array for each row once a prepared statement is reused (its
    sixth run), and an array's length can keep it from hashing.
    """

    def by_code_point(self, text: ColumnElement[Any]) -> ColumnElement[Any]:
        return text.collate("C")

    def tag_compares(self, tags: Tags, name: str, op: str, value: str | int | float) -> ColumnElement[bool]:
        [([operand], kind)] = _by_type([value], _postgres_type)
        tag = _tag(tags, name, kind)
        if isinstance(value, str):
            tag = self.by_code_point(tag)
        return func.coalesce(COMPARISONS[op](tag, literal(operand, kind)), false())

    def tag_one_of(self, tags: Tags, name: str, values: Sequence[str | int | float]) -> ColumnElement[bool]:
        lists = _by_type(values, _postgres_type)
        found = (self.one_of(_tag(tags, name, kind), listed, kind) for listed, kind in lists)
        return or_(false(), *(func.coalesce(condition, false()) for condition in found))

    def tag_present(self, tags: Tags, name: str) -> ColumnElement[bool]:
        return _get(tags, "->>", name).is_not(None)

    def _rows(self, values: Sequence[Any], kind: TypeEngine[Any]) -> Select[Any]:
        listed = json.dumps([str(value) for value in values], ensure_ascii=False)
        each = func.jsonb_array_elements_text(cast(literal(listed, Text()), JSONB())).table_valued("value")
        return select(cast(each.c.value, kind))


DIALECTS: dict[str, type[Dialect]] = {"sqlite": Sqlite, "postgresql": Postgres}


def _by_type(values: Sequence[Any], type_of: Any) -> list[Typed]:
    """Return the values in lists of one type each, with the type that they are bound as."""
    lists: dict[type, Typed] = {}
    for value in values:
        kind = type_of(value)
        listed = lists.setdefault(type(kind), ([], kind))[0]
        listed.append(_BOUND[type(kind)](value))
    return list(lists.values())


_BOUND: dict[type, Any] = {BigInteger: int, Double: float, Numeric: lambda value: Decimal(int(value)), Text: str}


def _sqlite_type(value: str | int | float) -> TypeEngine[Any]:
    if isinstance(value, str):
        return Text()
    return BigInteger() if isinstance(value, int) else Double()


def _postgres_type(value: str | int | float) -> TypeEngine[Any]:
    if isinstance(value, str):
        return Text()
    # Comparing tags as floats is exact except in this range, where integers are closer together than floats.
    return Numeric() if 2**53 <= abs(value) <= 2**63 else Double()


def _entries(tags: Tags) -> Any:
    return func.json_each(tags).table_valued("key", "value", "type")


def _has(entry: Any, name: str, condition: ColumnElement[bool]) -> ColumnElement[bool]:
    return exists(select(literal(1, Integer())).where(entry.c.key == literal(name, Text()), condition))


def _is_kind(entry: Any, value: str | int | float) -> ColumnElement[bool]:
    kinds = ("integer", "real", "true", "false") if is_number(value) else ("text",)
    result: ColumnElement[bool] = entry.c.type.in_(kinds)
    return result


def _get(tags: Tags, op: str, name: str) -> ColumnElement[Any]:
    return tags.op(op, return_type=JSONB() if op == "->" else Text())(literal(name, Text()))


def _tag(tags: Tags, name: str, kind: TypeEngine[Any]) -> ColumnElement[Any]:
    """Return the tag as this type, NULL when it is of another kind. (CASE avoids casts that would fail.)"""
    tag = _get(tags, "->", name)
    stored = func.jsonb_typeof(tag)
    if isinstance(kind, String):
        return case((stored == "string", _get(tags, "->>", name)))
    return case(
        (stored == "number", cast(tag, kind)),
        (stored == "boolean", cast(cast(cast(tag, Boolean()), Integer()), kind)),
    )
