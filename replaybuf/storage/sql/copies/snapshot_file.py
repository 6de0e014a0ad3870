"""The file of a snapshot in its folder, and facts about its content, by which a damaged or partial file is detected.

The facts are in `rb_info`. The last one is a digest of all rows, a sum of their checksums, which is compared before
anything is loaded. An upgrade of the schema leaves an empty one.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from replaybuf.common.checks import check_no_url
from replaybuf.common.redact import redact_path
from replaybuf.errors import SnapshotError, StorageError
from replaybuf.storage.decoding import DAMAGE
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.driver_errors import translated
from replaybuf.storage.sql.engine.sqlite import SqliteDatabase
from replaybuf.storage.sql.engine.sqlite_raw import FORK_GUARD
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.schema import check_schema
from replaybuf.storage.sql.schema.tables import DIGEST

SNAPSHOT_FILE = "replaybuf.sqlite"

#: The name of the buffer that was saved.
BUFFER = "buffer"

# A snapshot has no checkpoints and no past. Rows of payloads may be large: few are read at a time.
_SMALL_TABLES = ("rb_lane", "rb_group", "rb_tally", "rb_buffer", "rb_cursor", "rb_prompt", "rb_info")
_TABLES = dict.fromkeys(_SMALL_TABLES, 5000) | {"rb_payload": 50}
_BIT_MASK = (1 << 64) - 1

#: Runs a function of a transaction.
Run = Callable[..., Awaitable[Any]]


def snapshot_file(folder: Path, *, make: bool = False) -> Path:
    """Return the snapshot file of a folder; with `make`, create the folder for a new one. Raises SnapshotError.

    Without `make`, raises SnapshotError if there is no snapshot.
    """
    check_no_url(folder)
    file, shown = folder / SNAPSHOT_FILE, f"{redact_path(str(folder)):.200}"
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        elif not file.is_file():
            raise SnapshotError(f"there is no snapshot in {shown}: expected the file {SNAPSHOT_FILE}", reason="missing")
    except OSError as error:
        verb = "make" if make else "look into"
        raise SnapshotError(f"can't {verb} the folder {shown} for the snapshot: {error.strerror}") from error
    return file


async def _digest(run: Run) -> tuple[str, int]:
    """Return the digest of all rows of a snapshot file but its own, and the number of payloads."""
    total, rows = 0, 0
    for table in _TABLES:
        after, rows = -1, 0
        while part := await run(_digest_part, table, after):
            after, total, rows = part[0], total + part[1], rows + part[2]
    return f"{total & _BIT_MASK:016x}", rows


def _digest_part(tx: Transaction, table: str, after: int) -> tuple[int, int, int] | None:
    """Return the last rowid, the digest, and the number of the next rows of a table; None at its end."""
    rows = tx.run(f"SELECT rowid, * FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT ?", after, _TABLES[table])  # noqa: S608
    digested = (row[1:] for row in rows if table != "rb_info" or row[1] != DIGEST)
    return (rows[-1][0], sum(_checksum(table, row) for row in digested), len(rows)) if rows else None


def _checksum(table: str, row: Sequence[Any]) -> int:
    cells = (table, *(None if isinstance(value, bytes) else value for value in row))
    total = zlib.crc32(repr(cells).encode("utf-8", "surrogatepass"))
    for value in row:
        total = zlib.crc32(value, total) if isinstance(value, bytes) else total
    return total


async def write_facts(run: Run, about: Mapping[str, str]) -> None:
    """Write facts about the file, and at last the digest of its content."""
    await run(_add_facts, about)
    await run(_add_facts, {DIGEST: (await _digest(run))[0]})


async def check_facts(run: Run, path: str) -> int:
    """Return the number of payloads. Raises SnapshotError when the file's content differs from its digest."""
    digest, payloads = await _digest(run)
    if (await run(read_facts))[DIGEST] not in ("", digest):
        raise damaged(path, "its rows are not those that were saved")
    return payloads


def read_facts(tx: Transaction) -> dict[str, str]:
    """Return all facts about the file."""
    return dict(map(tuple, tx.tuples("SELECT name, value FROM rb_info WHERE value IS NOT NULL")))


def damaged(path: str, cause: object) -> SnapshotError:
    """Return the error for a damaged or partial snapshot."""
    return SnapshotError(
        f"the snapshot {path} is damaged or was cut short: {cause}; nothing was loaded. Take another "
        "one, or save what can be read of it (docs/outages.md)"
    )


def is_damage(error: Exception) -> bool:
    """Return whether this error, while reading a snapshot, means that the file is damaged."""
    if isinstance(error, SnapshotError):
        return False
    # SQLite's error for invalid text.
    if type(error) is StorageError:
        return error.reason in ("", "not a database")
    return isinstance(error, DAMAGE)


def _add_facts(tx: Transaction, facts: Mapping[str, str]) -> None:
    tx.each("INSERT INTO rb_info (name, value) VALUES (:name, :value)", [*facts.items()])


def file_engine(path: str, *, read_only: bool = False) -> SqliteDatabase:
    """Return the engine for the SQLite file of a snapshot."""
    url = parse_url("sqlite://").set(database=str(Path(path).absolute()))
    return SqliteDatabase(Access(url, read_only=read_only, is_inherited=False))


async def open_file(path: str, expected: Mapping[str, str]) -> SqliteDatabase:
    """Open a snapshot and return its engine. Raises SnapshotError or StorageError when its facts aren't as expected."""
    engine = file_engine(path, read_only=True)
    try:
        facts = await engine.read(lambda tx: _checked_facts(tx, path))
        for name, value in expected.items():
            if facts.get(name, value) != value:
                raise SnapshotError(
                    f"{path} was saved with {name} {facts[name]!r}, and this buffer has {name} {value!r}: "
                    f"build the buffer with {name}={facts[name]!r} to resume from it",
                    reason="mismatch",
                )
    except BaseException as error:
        await engine.dispose()
        if isinstance(error, Exception) and is_damage(error):
            raise damaged(path, error) from error
        raise
    return engine


async def read_snapshot_facts(path: str) -> dict[str, str]:
    """Return a snapshot's facts. Raises SnapshotError or StorageError when it isn't a snapshot."""
    engine = await open_file(path, {})
    try:
        return await engine.read(read_facts)
    finally:
        await engine.dispose()


def _checked_facts(tx: Transaction, path: str) -> dict[str, str]:
    if not check_schema(tx, path):
        raise SnapshotError(f"{path} is a database, but not a snapshot of replaybuf", reason="mismatch")
    facts = read_facts(tx)
    if DIGEST not in facts:
        raise damaged(path, "whoever wrote it did not come to the end")
    return facts


async def close_file(engine: SqliteDatabase) -> None:
    """Close the file, with all content in it and no WAL beside it."""
    await engine.dispose()
    with translated(engine.access):
        await asyncio.to_thread(_leave_wal, str(engine.path))


def _leave_wal(path: str) -> None:
    with FORK_GUARD, closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE").fetchall()


def check_replaceable(path: str) -> None:
    """Raise SnapshotError if there is anything but a snapshot that was never opened as a database, or a log beside it.

    SQLite would read the log with the new file. Blocks.
    """
    logs = [f"{path}{suffix}" for suffix in ("-wal", "-journal")]
    has_log = any(os.path.exists(log) and os.path.getsize(log) for log in logs)
    if has_log or (os.path.exists(path) and not _is_unused_snapshot(path)):
        raise SnapshotError(
            f"{redact_path(path)} is no complete snapshot, or was opened as a database: save into another folder, or "
            "move it away, with the -wal or -journal beside it if there is one"
        )


def _is_unused_snapshot(path: str) -> bool:
    uri = f"{Path(path).absolute().as_uri()}?mode=ro"
    try:
        with open(path, "rb") as file:
            versions = file.read(20)[18:]
        with FORK_GUARD, closing(sqlite3.connect(uri, uri=True)) as connection:
            has_digest = connection.execute("SELECT 1 FROM rb_info WHERE name = ?", (DIGEST,)).fetchall()
    except (OSError, sqlite3.Error):
        return False
    return versions == _NO_WAL and bool(has_digest)


#: The format versions in the header of a file that isn't in WAL mode (sqlite.org/fileformat.html), as databases are.
_NO_WAL = b"\x01\x01"


def same_file(path: str, other: str) -> bool:
    """Return whether both paths name the same file."""
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)
