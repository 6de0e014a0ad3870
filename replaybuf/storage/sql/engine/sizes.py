"""How large a row may be. What is larger is refused before it is sent: PostgreSQL would end the connection."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from replaybuf import units
from replaybuf.errors import TooLargeError

#: The most bytes of a UTF-8 character.
_CHARACTER = 4
_SIZED = (bytes, str)


@dataclass(frozen=True, slots=True)
class RowLimit:
    """The most bytes of all values of a row, and what sets this limit."""

    nbytes: int
    why: str

    def check(self, what: str, values: Iterable[object]) -> None:
        """Raise TooLargeError when these values, in one row, are too large. `what` begins the message."""
        if (size := self._size(list(values))) > self.nbytes:
            raise TooLargeError(
                f"{what} takes {units.size(size)} ({size:,} bytes), and a row holds at most {self.nbytes:,} bytes "
                f"({self.why}); nothing was stored. Make smaller groups, or keep large values elsewhere and store "
                "their place"
            )

    def _size(self, values: list[object]) -> int:
        texts = [value for value in values if isinstance(value, str)]
        size = sum(len(value) for value in values if isinstance(value, (bytes, bytearray, memoryview)))
        if size + _CHARACTER * sum(map(len, texts)) <= self.nbytes:
            return 0
        return size + sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


#: Rows without any value of this length are not looked at more closely.
LARGE = 1 << 26


def has_large(values: Iterable[object]) -> bool:
    """Return whether a text or byte string among the values of a row is large."""
    return any(isinstance(value, _SIZED) and len(value) > LARGE for value in values)


#: A row arrives in one message, and is sent back in one. The megabyte is for its other columns.
POSTGRES = RowLimit((1 << 30) - (1 << 20), "PostgreSQL's messages have less than 1 GiB")


def sqlite_limit(connection: Connection) -> RowLimit:
    """Return the limit of a SQLite connection, as its library was built."""
    driver: Any = connection.connection.driver_connection
    raw: sqlite3.Connection = getattr(driver, "_conn", driver)  # below aiosqlite's
    limit = raw.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)
    # As in PostgreSQL, where the megabyte is part of the total, too.
    return RowLimit(limit - limit // 1000, "SQLite's limit SQLITE_MAX_LENGTH")
