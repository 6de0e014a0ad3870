"""The marks of payloads: what stands before the content of a value that msgpack doesn't know.

Their numbers are part of the format: never change the meaning of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import msgpack  # type: ignore[import-untyped]

TUPLE, SET, FROZENSET, BYTEARRAY, INT, COMPLEX, DECIMAL, UUID_, DATETIME, DATE, TIME, TIMEDELTA = range(1, 13)
RANGE, DEQUE, PATH, MEMORYVIEW, ORDERED_DICT, DEFAULT_DICT, COUNTER = range(13, 20)
ENUM, ARRAY, SCALAR, NUMPY_STR, NUMPY_BYTES, PLAIN_ARRAY, ARRAY_BEHIND, STATUS = range(20, 28)
OBJECT, NAMEDTUPLE = range(30, 32)
OBJECT_ARRAY, TENSOR, OBJECT_REF, IMAGE, CONVERTED = range(40, 45)

#: Marks whose contents are users' values, unchanged.
HOLDERS = frozenset({OBJECT, NAMEDTUPLE})

#: How a value is stored: its mark, and the function that returns the content behind it. Without a mark, the content
#: stands for the value by itself.
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

        A TypeError, of this or of the form's function, says why a value can't be stored, and what to do. Contents that
        hold users' values have to pass through `foreign.wrapped`, unless their mark is one of HOLDERS.
        """


@runtime_checkable
class Nesting(Protocol):
    """A family whose values hold others: it can say where in them something is that can't be stored."""

    def parts(self, value: Any) -> Iterable[tuple[str, Any]]:
        """Yield the values inside one, each with the step that leads to it (`.field`, `[0]`); nothing for strangers."""


def mark(number: int) -> Any:
    """Return the mark with this number, as msgpack packs it."""
    return msgpack.ExtType(number, b"")
