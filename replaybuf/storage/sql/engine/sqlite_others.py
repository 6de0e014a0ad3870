"""Whether a SQLite file may be opened for writing: an empty one, or ours. Nothing of another program's is changed.

To open a file as usual changes it: SQLite rolls back what a journal beside it holds, copies its log into it, and takes
a file of one byte for an empty one. So it is read as `immutable` first, without its log and journal, and read-only
with its log where that says too little. (Python's `open` would release the locks that this process has on the file.)
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from replaybuf.errors import NotADatabaseError
from replaybuf.rules.circumstances import brief
from replaybuf.storage.sql.engine.sqlite_files import quote_path
from replaybuf.storage.sql.schema.revisions import VERSION_TABLE

#: Some columns of tables that every revision of the schema has.
_OURS = {
    (VERSION_TABLE, "version_num"),
    *(("rb_lane", name) for name in ("id", "task_name", "status", "step")),
    *(("rb_group", name) for name in ("uid", "lane", "priority", "times_sampled", "marks")),
    *(("rb_payload", name) for name in ("uid", "outline", "data")),
}
_COLUMNS = f"""
SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c
WHERE m.type = 'table' AND m.name IN ({", ".join(f"'{table}'" for table in sorted({table for table, _ in _OURS}))})"""  # noqa: S608
_LEFT = "it was left as it is: give the path of a file that isn't there yet"

# A journal begins with this; the number of pages that the file had before the transaction is at _PAGES.
_JOURNAL, _PAGES = bytes.fromhex("d9d505f920a163d7"), slice(16, 20)
# For so long another process may be making the same database.
_WAIT_SECONDS, _PAUSE = 2.0, 0.01


def refuse_others(path: str, where: str) -> None:
    """Raise NotADatabaseError unless there is no file, or an empty one, or a database of ours.

    Raises errors of `sqlite3` for one that can't be read.
    """
    path = os.path.realpath(path)
    deadline = time.monotonic() + _WAIT_SECONDS
    while _is_unfinished(path, where):
        if time.monotonic() >= deadline:
            raise NotADatabaseError(
                f"{where} has a transaction of another program that isn't finished ({Path(path).name}-journal); {_LEFT}"
            )
        time.sleep(_PAUSE)


def _is_unfinished(path: str, where: str) -> bool:
    """Return whether the database is empty only while a transaction lasts, or until it is rolled back."""
    logged = _size(f"{path}-wal")  # before the file, which another process makes first
    size = _size(path)
    if not size and not logged:
        return _pages_before(path) > 0
    if size < 2:
        what = "empty" if not size else "a single byte"
        log = f", but has a write-ahead log beside it ({Path(path).name}-wal)" if logged else ""
        raise NotADatabaseError(f"{where} is not a database: it is {what}{log}; {_LEFT}")
    try:
        empty = _is_empty(path, where, "immutable=1")
    except sqlite3.DatabaseError as error:
        if not logged or getattr(error, "sqlite_errorname", "") == "SQLITE_NOTADB":
            raise
        empty = True  # half of the log is copied
    if empty and logged:
        empty = _is_empty(path, where, "mode=ro")
    return empty and _pages_before(path) > 0


def _is_empty(path: str, where: str, how: str) -> bool:
    """Return whether a database holds nothing; False if it is ours. Raises NotADatabaseError for another one."""
    with closing(sqlite3.connect(f"file:{quote_path(Path(path))}?{how}", uri=True)) as raw:
        names = [name for (name,) in raw.execute("SELECT name FROM sqlite_master ORDER BY name")]
        [(marked,)] = raw.execute("PRAGMA application_id")
        if not names and not marked:
            return True
        if set(raw.execute(_COLUMNS)) >= _OURS:
            return False
    more = f", {len(names) - 1} more" if len(names) > 1 else ""
    what = f"{brief(names[0])}{more}" if names else f"the application_id {marked}"
    raise NotADatabaseError(
        f"{where} is a database of another program: it has {what} and not the tables of replaybuf; {_LEFT}"
    )


def _pages_before(path: str) -> int:
    """Return how many pages the file had before the transaction whose journal is there; 0 if there is none."""
    try:
        with open(f"{path}-journal", "rb") as file:
            header = file.read(_PAGES.stop)
    except OSError:
        return 0
    return int.from_bytes(header[_PAGES]) if header.startswith(_JOURNAL) else 0


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
