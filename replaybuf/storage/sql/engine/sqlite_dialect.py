"""Transactions of SQLite and their SQL, where the two databases differ, and the clock of its leases."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from replaybuf.storage.sql.engine.dialect import Dialect, to_json_text
from replaybuf.storage.sql.engine.sqlite_raw import RawConnection
from replaybuf.storage.sql.engine.transaction import DEFAULT, HOOKS, Row, Scope, Transaction, on_statement

if TYPE_CHECKING:
    from sqlalchemy import Dialect as Compiler


class SqliteDialect(Dialect):
    name = "sqlite"
    is_remote = False
    parameter = "?"
    macros: ClassVar = {
        "in": "IN (SELECT value FROM json_each({}))",
        "in_texts": "IN (SELECT value FROM json_each({}))",
        "each": "json_each({})",
        "json": "{}",
        "moment": "{}",
        "clock": "{}",
        "lock_of": "",
        "lock": "",
        "skip": "",
        "insert": "INSERT OR FAIL",
        "shard": "0",
        "draw": "(SELECT max(id) FROM rb_batch)",
        "tables": "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite@_%' ESCAPE '@'",
        "views": "SELECT name FROM sqlite_master WHERE type = 'view'",
        "set_last_uid": "REPLACE INTO rb_info (name, number) VALUES ('uid', {})",
    }

    @cached_property
    def compiler(self) -> Compiler:
        from sqlalchemy.dialects.sqlite import pysqlite

        return pysqlite.dialect(paramstyle="named")

    def listed(self, values: Iterable[int] | Iterable[str]) -> Any:
        return to_json_text(list(values))


SQLITE = SqliteDialect()

#: How many rows are inserted by one statement. Python's `sqlite3` releases the GIL for each step of a statement, and
#: beside a busy event loop it may have to wait for it again each time: up to 5 ms, the switch interval.
_ROWS_TOGETHER = (16, 4)
#: The bytes of their values at most: `sqlite3` copies these, and keeps the copies until the statement is run again.
_MOST_BOUND = 4 << 20
_SIZED_TYPES = (bytes, bytearray, str)
_VALUES_CLAUSE = re.compile(r"(?s)(INSERT .*\) VALUES )(\([^()]*\))(.*)")


@lru_cache(maxsize=256)
def of_rows(sql: str, count: int) -> str | None:
    """Return an INSERT of one row as one of so many rows; None for a statement that isn't an INSERT of parameters."""
    match = _VALUES_CLAUSE.fullmatch(sql)
    if match is None:
        return None
    begin, row, end = match.groups()
    numbers = re.findall(r"\?(\d+)", row)
    if [*map(int, numbers)] != [*range(1, len(numbers) + 1)] or "?" in begin + end:
        return None
    return begin + ", ".join([re.sub(r"\?\d+", "?", row)] * count) + end


class SqliteTransaction(Transaction):
    """A transaction on a connection of `sqlite3`, by one thread at a time."""

    dialect = SQLITE

    def __init__(self, raw: RawConnection, scope: Scope = DEFAULT) -> None:
        super().__init__(scope)
        self._raw = raw

    def fetch(self, sql: str, values: Row = ()) -> Sequence[Row]:
        if HOOKS:
            on_statement(sql, values)
        return self._raw.execute(sql, values).fetchall()

    def execute(self, sql: str, values: Row = ()) -> int:
        on_statement(sql, values)
        return self._raw.execute(sql, values).rowcount

    def run_many(self, sql: str, rows: Sequence[Row]) -> None:
        on_statement(sql, rows, many=True)
        at = 0
        for count in _ROWS_TOGETHER:
            insertion = of_rows(sql, count) if len(rows) >= at + count else None
            while insertion is not None and len(rows) >= at + count:
                values = [*chain.from_iterable(rows[at : at + count])]
                if sum([len(value) for value in values if type(value) in _SIZED_TYPES]) > _MOST_BOUND:
                    break
                self._raw.execute(insertion, values)
                at += count
        if at < len(rows):
            self._raw.executemany(sql, rows[at:])

    def table(self, sql: str, values: Row = ()) -> tuple[list[str], Sequence[Row]]:
        on_statement(sql, values)
        cursor = self._raw.execute(sql, values)
        return [name for name, *_ in cursor.description or ()], cursor.fetchall()

    def fetch_mappings(self, sql: str, values: Row) -> Sequence[Mapping[str, Any]]:
        names, rows = self.table(sql, values)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def clock(self) -> float:
        start = self._host_start()
        return time.time() if start is None else start + since_start()

    def start_clock(self) -> float:
        name = this_start()
        if name is not None and self._host_start() is None:
            start = repr(time.time() - since_start())
            self.change("INSERT INTO rb_info (name, value) VALUES (:name, :value)", name=name, value=start)
        return self.clock()

    def _host_start(self) -> float | None:
        """Return this host's boot time as recorded in the database, or None."""
        name = this_start()
        start = None if name is None else self.value("SELECT value FROM rb_info WHERE name = :name", name=name)
        return None if start is None else float(start)

    def set_columns(self, names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            columns = ", ".join(f"{name} = ?{place}" for place, name in enumerate(names, 2))
            self.run_many(f"UPDATE rb_group SET {columns} WHERE uid = ?1", rows)  # noqa: S608

    def reserve_uids(self, count: int) -> list[int]:
        query = "UPDATE rb_info SET number = number + :count WHERE name = 'uid' RETURNING number"
        [(last,)] = self.tuples(query, count=count)
        return list(range(last - count + 1, last + 1))


# The clock of leases is monotonic, unaffected by changes of the host's wall clock.
#
# A host knows the time since its boot, including sleep; it can't be set, and is the same for all its processes. The
# database has the moment of the boot by the wall clock, as of the host's first lease (`rb_info`); the sum is the time.
# After a reboot, a host begins again with its wall clock. So does each of several hosts that share a file: their clocks
# differ by as much as their wall clocks did then.
#
# Where a boot has no id (systems other than Linux), the wall clock is used.

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/time")


@cache
def this_start() -> str | None:
    """Return an id of the host's current boot, as seen by this process; None if the system has none."""
    namespace = ""  # containers may have a time namespace
    try:
        name = _BOOT_ID.read_text("utf-8").strip()
        with suppress(OSError):
            namespace = f" {_NAMESPACE.readlink()}"
    except (OSError, ValueError):
        return None
    return f"start of {name}{namespace}" if name and hasattr(time, "CLOCK_BOOTTIME") else None


def since_start() -> float:
    """Return the seconds since the host's boot, including sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
