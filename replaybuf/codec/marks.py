"""The marks of payloads: what stands before the content of a value that msgpack doesn't know.

Their numbers are part of the format: never change the meaning of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgpack  # type: ignore[import-untyped]

TUPLE, SET, FROZENSET, BYTEARRAY, INT, COMPLEX, DECIMAL, UUID_, DATETIME, DATE, TIME, TIMEDELTA = range(1, 13)
ENUM, ARRAY, SCALAR, NUMPY_STR, NUMPY_BYTES, PLAIN_ARRAY = range(20, 26)
OBJECT, NAMEDTUPLE = range(30, 32)

#: Those whose content holds values of users, which msgpack might store as something else.
HOLDERS = frozenset({OBJECT, NAMEDTUPLE})

#: How a value is stored: its mark, and the function that returns the content behind it.
Form = tuple[Any, Callable[[Any], Any]]
#: The reverse: the function that returns the value for a content, which may be damaged or hostile.
Restore = Callable[[Any], Any]


class Family(Protocol):
    """Kinds of value that one codec knows beyond those that all know."""

    @property
    def restores(self) -> Mapping[int, Restore]:
        """How contents are restored, by the numbers of their marks."""

    def form(self, kind: type) -> Form | None:
        """Return the form of a class's instances, or None when the family doesn't know the class. Asked once a class.

        A TypeError of the form's function says why a value can't be stored, and what to do.
        """


def mark(number: int) -> Any:
    """Return the mark with this number, as msgpack packs it."""
    return msgpack.ExtType(number, b"")
