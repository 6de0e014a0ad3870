"""Unpacking payloads: the reverse of `codec.pack`.

The bytes may be damaged or hostile: content is checked before it reaches a constructor that could allocate more memory
than the payload, and nothing that the payload names is imported or called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import msgpack  # type: ignore[import-untyped]
import numpy as np

from replaybuf.codec import arrays, containers, marks
from replaybuf.codec.behind import Behind
from replaybuf.codec.marks import Family, Restore
from replaybuf.rollouts.rollout import Status


class _Mark:
    """A mark met while unpacking; `restore(content)` returns the value that it stands for."""

    __slots__ = ("restore",)

    def __init__(self, restore: Restore) -> None:
        self.restore = restore


def _typed(kind: type, restore: Restore) -> Restore:
    """Return `restore`, limited to content of this type: `bytearray(10**12)` would not be a conversion."""

    def checked(content: Any) -> Any:
        if type(content) is not kind:
            raise ValueError(f"a {type(content).__name__} where a {kind.__name__} belongs")
        return restore(content)

    return checked


def _restore_tz(content: Any) -> tzinfo | None:
    if content is None:
        return None
    if isinstance(content, str):
        return ZoneInfo(content)  # refuses paths outside of the time zone database
    offset, name = content
    return timezone(offset) if name is None else timezone(offset, name)


def _restore_datetime(content: list[Any]) -> datetime:
    year, month, day, hour, minute, second, microsecond, fold, tz = content
    return datetime(year, month, day, hour, minute, second, microsecond, _restore_tz(tz), fold=fold)


def _restore_time(content: list[Any]) -> time:
    hour, minute, second, microsecond, fold, tz = content
    return time(hour, minute, second, microsecond, _restore_tz(tz), fold=fold)


_CONTENTS: tuple[tuple[int, type, Restore], ...] = (
    (marks.TUPLE, list, tuple),
    (marks.SET, list, set),
    (marks.FROZENSET, list, frozenset),
    (marks.BYTEARRAY, bytes, bytearray),
    (marks.INT, bytes, lambda raw: int.from_bytes(raw, "little", signed=True)),
    (marks.COMPLEX, list, lambda parts: complex(*parts)),
    (marks.DECIMAL, str, Decimal),
    (marks.UUID_, bytes, lambda raw: UUID(bytes=raw)),
    (marks.DATETIME, list, _restore_datetime),
    (marks.DATE, list, lambda numbers: date(*numbers)),
    (marks.TIME, list, _restore_time),
    (marks.TIMEDELTA, list, lambda numbers: timedelta(*numbers)),
    (marks.SCALAR, list, arrays.build_scalar),
    (marks.NUMPY_STR, str, np.str_),
    (marks.NUMPY_BYTES, bytes, np.bytes_),
    (marks.ARRAY, list, arrays.build),
    (marks.OBJECT_ARRAY, list, arrays.build_objects),
    *containers.RESTORES,
)
_RESTORE: Final[dict[int, Restore]] = {number: _typed(kind, restore) for number, kind, restore in _CONTENTS}
_PLAIN_ARRAY: Final = marks.PLAIN_ARRAY
_ARRAY_BEHIND: Final = marks.ARRAY_BEHIND
_STATUS: Final = marks.STATUS
_STATUSES: Final = {status.value.encode(): status for status in Status}


def restores(families: Iterable[Family]) -> Mapping[int, _Mark]:
    """Return the marks that payloads may hold, those of these families included."""
    known = dict(_RESTORE)
    for family in families:
        known.update(family.restores)
    return {number: _Mark(restore) for number, restore in known.items()}


class Unpacking:
    """The reading of a payload: `unpack` the fields of each rollout in order, then `finish`. Anything wrong raises."""

    __slots__ = ("_behind", "_marks", "_open_marks")

    def __init__(self, known: Mapping[int, _Mark], behind: Behind) -> None:
        self._marks = known
        self._behind = behind
        self._open_marks = 0

    def unpack(self, packed: memoryview) -> Any:
        """Return the next value."""
        return msgpack.unpackb(
            packed,
            object_hook=self._restore,
            ext_hook=self._extension,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )

    def finish(self) -> None:
        """Raise ValueError when there were marks where they mark nothing, or there is more than was referred to."""
        if self._open_marks:
            raise ValueError("it holds marks that mark nothing")
        self._behind.finish()

    def _extension(self, number: int, content: bytes) -> Any:
        if number == _ARRAY_BEHIND:
            return self._behind.restore(content)
        if number == _PLAIN_ARRAY:
            return arrays.unflatten(content)
        if number == _STATUS:
            return _STATUSES[content]
        mark = self._marks.get(number)
        if mark is None or content:
            raise ValueError(f"unknown kind of value ({number}); was it written by a newer replaybuf?")
        self._open_marks += 1
        return mark

    def _restore(self, fields: dict[Any, Any]) -> Any:
        if len(fields) == 1:
            for mark in fields:
                if type(mark) is _Mark:
                    self._open_marks -= 1
                    return mark.restore(fields[mark])
        return fields
