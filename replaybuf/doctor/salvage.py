"""Reading as much as possible of a SQLite file that is damaged or truncated.

Each row is looked up separately from the root of its table, so that a damaged page costs only the rows on it or below
it. Nothing is ever written to the file.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from replaybuf.errors import NotADatabaseError
from replaybuf.storage.sql.engine.sqlite_files import PAGE_SIZE, quote_path
from replaybuf.storage.sql.engine.sqlite_session import SqliteSession

#: The errors of reading damaged pages. (OverflowError and ValueError: impossible values.)
ERRORS = (sqlite3.Error, OverflowError, ValueError)

_HIGHEST = 2**62
# The first byte of a page of a table that only points to others.
_INTERIOR = 5
_MOST_PROBES = 200_000

Row = tuple[Any, ...]


@contextmanager
def opened(path: Path) -> Iterator[Salvage]:
    """Open the file to salvage it. Raises NotADatabaseError when nothing in it is intelligible."""
    with TemporaryDirectory(prefix="replaybuf-") as folder:
        connection, guessed = _connect(path, Path(folder))
        try:
            yield Salvage(connection, guessed)
        finally:
            connection.close()


def _connect(path: Path, folder: Path) -> tuple[sqlite3.Connection, bool]:
    log = Path(f"{path}-wal")
    ways = ["mode=ro&immutable=1"]
    if log.exists() and log.stat().st_size:
        ways.insert(0, "mode=ro")
    for way in ways:
        with suppress(*ERRORS):
            return _usable(f"file:{quote_path(path.absolute())}?{way}"), False
    # The pages that say where everything is are damaged: a copy gets those of a new database instead.
    copy = folder / "copy.db"
    _copy_with_new_schema(path, copy, folder / "new.db")
    try:
        return _usable(f"file:{quote_path(copy)}?mode=ro&immutable=1"), True
    except ERRORS as error:
        raise NotADatabaseError(f"{path}: {error}; nothing of it can be read") from error


def _usable(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    try:
        connection.text_factory = bytes  # texts may be invalid
        connection.execute("PRAGMA writable_schema = ON")  # accepts a file shorter than its header says
        connection.execute("PRAGMA query_only = ON")
        for table in ("rb_lane", "rb_group", "rb_payload"):  # fails if one is listed but unknown: the list is damaged
            connection.execute(f"SELECT rowid FROM {table} LIMIT 0")  # noqa: S608
    except BaseException:
        connection.close()
        raise
    return connection


def _copy_with_new_schema(path: Path, copy: Path, new: Path) -> None:
    """Copy a file with the first page of a new database, and the others of its list of tables.

    Tables begin at the same pages in every database that this version of replaybuf creates.
    """
    from replaybuf.storage.sql.engine.transaction import DEFAULT
    from replaybuf.storage.sql.schema.create import create_schema

    with closing(sqlite3.connect(new, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
        SqliteSession(connection).transact(lambda tx: create_schema(tx, str(new)), DEFAULT, write=True)
    shutil.copyfile(path, copy)
    made = new.read_bytes()
    pages = {page: bytearray(made[(page - 1) * PAGE_SIZE : page * PAGE_SIZE]) for page in _schema_pages(made)}
    pages[1][28:32] = max(copy.stat().st_size // PAGE_SIZE, *pages).to_bytes(4, "big")
    with copy.open("r+b") as file:
        for page, content in pages.items():
            file.seek((page - 1) * PAGE_SIZE)
            file.write(content)


def _schema_pages(data: bytes, page: int = 1) -> list[int]:
    """Return the pages of the table that lists all others, from this one on: a tree, whose root is the first page."""
    start = (page - 1) * PAGE_SIZE
    header = start + (100 if page == 1 else 0)
    if data[header] != _INTERIOR:
        return [page]
    cells = int.from_bytes(data[header + 3 : header + 5], "big")
    places = [int.from_bytes(data[at : at + 2], "big") for at in range(header + 12, header + 12 + 2 * cells, 2)]
    below = [header + 8, *(start + place for place in places)]
    children = [int.from_bytes(data[at : at + 4], "big") for at in below]
    return [page, *(one for child in children for one in _schema_pages(data, child))]


class Salvage:
    """A damaged database. Texts are read as bytes. `guessed`: its tables' places are inferred from a new database."""

    def __init__(self, connection: sqlite3.Connection, guessed: bool) -> None:
        self._connection = connection
        self.guessed = guessed

    def columns(self, table: str) -> list[str]:
        """Return the names of a table's columns; none when there is no such table."""
        try:
            return [row[1].decode() for row in self._connection.execute(f"PRAGMA table_info({table})")]
        except ERRORS:
            return []

    def one(self, table: str, columns: Sequence[str], uid: int) -> Row | None:
        """Return the row with this uid. Raises one of ERRORS when it can't be read."""
        query = f"SELECT {', '.join(columns)} FROM {table} WHERE rowid = ?"  # noqa: S608
        row: Row | None = self._connection.execute(query, (uid,)).fetchone()
        return row

    def indexed(self, query: str) -> list[Row]:
        """Return the readable rows of an index, from its beginning on."""
        rows: list[Row] = []
        with suppress(*ERRORS):
            rows.extend(self._connection.execute(query))
        return rows

    def table(self, table: str, columns: Sequence[str], known: Sequence[int] = ()) -> dict[int, Row]:
        """Return all readable rows of a table, by rowid. `known` are rowids found elsewhere."""
        rows = self._read_from_both_ends(table, columns)
        for rowid in known:
            if rowid not in rows:
                with suppress(*ERRORS):
                    if (row := self.one(table, columns, rowid)) is not None:
                        rows[rowid] = row
        return dict(sorted(rows.items()))

    def _read_from_both_ends(self, table: str, columns: Sequence[str]) -> dict[int, Row]:
        """Return the rows of a table, read from both ends, and where that fails, from the middle of the rest, ..."""
        select = f"SELECT rowid, {', '.join(columns)} FROM {table} NOT INDEXED"  # noqa: S608
        query = f"{select} WHERE rowid >= ? AND rowid < ? ORDER BY rowid"
        rows: dict[int, Row] = {}

        def read(low: int, high: int, *, down: bool = False) -> int:
            """Read rows upwards from `low` to before `high`, or downwards; return the rowid where that ended."""
            try:
                for rowid, *row in self._connection.execute(f"{query} {'DESC' if down else ''}", (low, high)):
                    if not low <= rowid < high:  # a page that points back to another
                        break
                    rows[rowid] = tuple(row)
                    low, high = (low, rowid) if down else (rowid + 1, high)
                else:
                    return low if down else high
            except ERRORS:
                pass
            return high if down else low

        low, high = read(-_HIGHEST, _HIGHEST), read(-_HIGHEST, _HIGHEST, down=True)
        # If a page at one end is damaged, the table may go on beyond it: by as much again as is known.
        first, last = (min(rows), max(rows)) if rows else (0, 0)
        width = max(1024, last - first)
        left = deque([(max(low, first - width), min(high, last + width))])
        probes = 0
        while left and probes < _MOST_PROBES:
            low, high = left.popleft()
            if high - low > 1:
                middle = (low + high) // 2
                left += [(low, read(low, middle, down=True)), (read(middle, high), high)]
                probes += 2
        return rows
