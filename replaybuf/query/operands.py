"""Operands of a query: what each field may be compared with.

Users write numpy scalars, enum members and datetimes; the result is str, int, float, bool or None, of a kind that the
field compares with and that both databases can hold.
"""

from __future__ import annotations

import math
import reprlib
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from replaybuf.checks import is_numpy
from replaybuf.errors import QueryError
from replaybuf.query.nodes import FieldType, Kind, Value, is_number
from replaybuf.rollouts.status import Status

MAX_VALUES = 1_000_000

_WANTED: dict[Kind, str] = {
    "int": "a number",
    "float": "a number",
    "time": "a number (seconds since the epoch) or a datetime",
    "str": "a str",
    "status": "a status",
    "tag": "a str, int, float or bool",
}
_ACCEPTED: dict[Kind, tuple[type, ...]] = {
    "int": (int, float),
    "float": (int, float),
    "time": (int, float, datetime),
    "str": (str,),
    "status": (str,),
    "tag": (str, int, float, bool),
}
_STATUSES = frozenset(status.value for status in Status)
_INT64 = range(-(2**63), 2**63)


def read_value(value: Any, field: FieldType, place: str) -> Value:
    """Return one operand of a field as a plain value.

    Raises QueryError when the field can't be compared with it.
    """
    value = _plain(value)
    if value is None:
        return None
    if not isinstance(value, _ACCEPTED[field.kind]) or (isinstance(value, bool) and field.kind != "tag"):
        raise QueryError(f"expected {_wanted(field)}, not {_kind_name(value)}{_hint(value)}", place)
    if isinstance(value, datetime):
        value = _seconds(value, place)
    if isinstance(value, str):
        return _checked_text(value, field, place)
    return _checked_number(value, place)


def read_values(values: Any, field: FieldType, place: str) -> tuple[Value, ...]:
    """Return the operands of `$in` and `$not_in`, each once; True, 1 and 1.0 are the same.

    Raises QueryError when they are not a list or one of them does not fit the field.
    """
    listed = _listed(values, place)
    return tuple(dict.fromkeys(read_value(value, field, f"{place}[{i}]") for i, value in enumerate(listed)))


def read_bounds(bounds: Any, field: FieldType, place: str) -> tuple[Value, Value]:
    """Return the operands of `$between`.

    Raises QueryError unless they are two values of one kind, in order.
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
    if lower > upper:  # type: ignore[operator]  # of one kind, checked above
        raise QueryError(f"the lowest value comes first: {_short(lower)} is above {_short(upper)}", place)
    return lower, upper


def _listed(values: Any, place: str) -> Any:
    if is_numpy(values, "ndarray") and values.ndim != 1:
        raise QueryError("expected an array of one dimension", place)
    if not isinstance(values, list | tuple | set | frozenset | range) and not is_numpy(values, "ndarray"):
        raise QueryError(f"expected a list of values, not {_kind_name(values)}", place)
    # A slice, because len() fails for a huge range.
    if len(values[: MAX_VALUES + 1] if isinstance(values, range) else values) > MAX_VALUES:
        raise QueryError(f"at most {MAX_VALUES} values", place)
    return values


def _plain(value: Any) -> Any:
    """Return the value as a plain Python type: not all drivers accept enums, numpy types and subclasses."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if is_numpy(value, "datetime64"):
        # item() of nanoseconds is a plain int, which would be taken for seconds.
        moment = value.astype("datetime64[us]").item()
        return math.nan if moment is None else moment  # NaT
    if is_numpy(value, "longdouble"):  # its item() is itself
        return float(value)
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
    except Exception as error:  # from a time zone, or because it is pandas' NaT, which claims to be a datetime
        raise QueryError("the datetime is no moment in time", place) from error


def _checked_text(text: str, field: FieldType, place: str) -> str:
    check_storable(text, place)
    if field.kind == "status" and text not in _STATUSES:
        raise QueryError(f"there is no status {_short(text)}; expected {_wanted(field)}", place)
    return text


def check_storable(text: str, place: str) -> None:
    """Raise QueryError for a text that a database can't hold."""
    if "\0" in text:
        raise QueryError("a text with a NUL character can't be stored", place)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise QueryError("a text with lone surrogates can't be stored", place) from None


def _checked_number(number: int | float, place: str) -> int | float:
    if isinstance(number, float):
        if math.isnan(number):
            raise QueryError("NaN compares with nothing; expected a number", place)
    elif number not in _INT64:
        raise QueryError("the integer does not fit into 64 bits", place)
    return number


def _wanted(field: FieldType) -> str:
    what = _WANTED[field.kind]
    if field.kind == "status":
        what += f" ({', '.join(status.value for status in Status)})"
    return f"{what} or None" if field.nullable else what


def _hint(value: object) -> str:
    several = isinstance(value, list | tuple | set | frozenset) or is_numpy(value, "ndarray")
    return "; for several values use $in" if several else ""


def _kind_name(value: object) -> str:
    return f"one of type {type(value).__name__}"


def _short(value: object) -> str:
    return reprlib.repr(value)
