"""Exact comparison of a column of integers or floats with any number.

Databases convert one side when an integer is compared with a float, which rounds large integers and may keep an index
on the column from being used. Here the operand is replaced instead: `uid < 3.5` becomes `uid <= 3`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Double, false, literal, true
from sqlalchemy.types import TypeEngine

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1


def number_type(*, integers: bool) -> TypeEngine[Any]:
    """Return the type that operands of such a column are bound with."""
    return BigInteger() if integers else Double()


def compare_number(column: ColumnElement[Any], op: str, value: int | float, *, integers: bool) -> ColumnElement[bool]:
    """Return `column op value` with the meaning of Python; NULL where the column is."""
    floor = _floor(value, integers=integers)
    if floor == value:
        return _compare(column, op, floor, integers=integers)
    # The column never holds the value itself: numbers below it are at most the floor, numbers above it are more.
    if op in ("$eq", "$ne"):
        return true() if op == "$ne" else false()
    below = op in ("$lt", "$lte")
    if floor is None:
        return false() if below else true()
    return _compare(column, "$lte" if below else "$gt", floor, integers=integers)


def representable(values: Iterable[int | float], *, integers: bool) -> list[int | float]:
    """Return the values that such a column can hold, as it holds them."""
    floors = ((value, _floor(value, integers=integers)) for value in values)
    return [floor for value, floor in floors if floor is not None and floor == value]


def _compare(column: ColumnElement[Any], op: str, value: int | float, *, integers: bool) -> ColumnElement[bool]:
    result: ColumnElement[bool] = COMPARISONS[op](column, literal(value, number_type(integers=integers)))
    return result


def _floor(value: int | float, *, integers: bool) -> int | float | None:
    """Return the largest number of the column's type that is not above the value; None when all are above."""
    if not integers:
        near = float(value)
        return near if near <= value else math.nextafter(near, -math.inf)
    if value < _LOWEST:
        return None
    return _HIGHEST if value > _HIGHEST else math.floor(value)
