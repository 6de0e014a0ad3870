"""Values as payloads have them: what has a mark stays a mark and its content, whatever it stands for.

Files of rollouts are written from such trees and read into them: so they hold all that a payload can hold, and neither
the class of a value nor its library is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from replaybuf.codec import marks
from replaybuf.codec.marks import Form, Restore, mark

#: The marks that stay, by the names that files have for them: all but those of arrays, tensors and our statuses.
NAMES: Final[dict[int, str]] = {
    getattr(marks, name): name.strip("_").lower()
    for name in (
        *("TUPLE", "SET", "FROZENSET", "BYTEARRAY", "INT", "COMPLEX", "DECIMAL", "UUID_", "DATETIME", "DATE", "TIME"),
        *("TIMEDELTA", "RANGE", "DEQUE", "PATH", "MEMORYVIEW", "ORDERED_DICT", "DEFAULT_DICT", "COUNTER", "ENUM"),
        *("ARRAY", "SCALAR", "NUMPY_STR", "NUMPY_BYTES", "OBJECT", "NAMEDTUPLE", "OBJECT_ARRAY", "OBJECT_REF"),
        *("IMAGE", "CONVERTED"),
    )
}


class Marked:
    """A value as it is stored: the number of its mark, and the content behind it."""

    __slots__ = ("content", "number")

    def __init__(self, number: int, content: Any) -> None:
        self.number = number
        self.content = content


class Trees:
    """The family of marked values."""

    restores: Mapping[int, Restore] = {number: partial(Marked, number) for number in NAMES}

    def form(self, kind: type) -> Form | None:
        return (None, lambda marked: {mark(marked.number): marked.content}) if kind is Marked else None
