"""The facts that a snapshot file states about its content, so that a damaged or partial file is noticed.

The facts are in `rb_info` and are written last: the number of groups, the bytes of their payloads, and a digest of all
rows. The digest is a sum of row checksums, so that it doesn't depend on the order or the batches in which rows are
read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import delete, func, insert, select

from replaybuf.errors import NotADatabaseError, SnapshotError, StorageError
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import DIGEST, buffer, counter, cursor, group, info, lane, tally

GROUPS, BYTES = "groups", "bytes"

# A snapshot has no checkpoints and no garbage.
_TABLES = (lane, group, tally, counter, buffer, cursor, info)
_BATCH = 5000
_BITS = (1 << 64) - 1


def payloads_digest(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return the digest of rows of `rb_payload`."""
    total = 0
    for row in rows:
        head = _encoded((row["uid"], row["outline"], row["prompt"]))
        data = row["data"] if isinstance(row["data"], bytes) else _encoded((row["data"],))
        total += zlib.crc32(data, zlib.crc32(head))
    return total


def _metadata_digest(tx: Transaction) -> int:
    """Return the digest of all other rows of a snapshot file (SQLite)."""
    total = 0
    for table in _TABLES:
        after = -1
        while rows := tx.connection.exec_driver_sql(
            f"SELECT rowid, * FROM {table.name} WHERE rowid > ? ORDER BY rowid LIMIT ?",  # noqa: S608
            (after, _BATCH),
        ).fetchall():
            after = rows[-1][0]
            kept = (row for row in rows if table is not info or row.name != DIGEST)
            total += sum(zlib.crc32(_encoded((table.name, *row[1:]))) for row in kept)
    return total


def _encoded(values: tuple[Any, ...]) -> bytes:
    return repr(values).encode("utf-8", "surrogatepass")


def write_facts(tx: Transaction, about: Mapping[str, str], payloads: int) -> None:
    """Write the facts about the file's content; `payloads` is the digest of the payloads."""
    count, nbytes = _sizes(tx)
    set_info(tx, {**about, GROUPS: str(count), BYTES: str(nbytes)})
    set_info(tx, {DIGEST: _text(_metadata_digest(tx) + payloads)})


def check_facts(tx: Transaction, path: str, payloads: int) -> None:
    """Raise SnapshotError when the file's content differs from its facts."""
    facts = read_facts(tx)
    count, nbytes = _sizes(tx)
    for name, found in ((GROUPS, count), (BYTES, nbytes)):
        if facts.get(name, str(found)) != str(found):
            raise damaged(path, f"it should have {facts[name]} {name}, and has {found}")
    # (A file that was upgraded to another schema has no digest.)
    if DIGEST in facts and facts[DIGEST] != _text(_metadata_digest(tx) + payloads):
        raise damaged(path, "its rows are not those that were saved")


def read_facts(tx: Transaction) -> dict[str, str]:
    """Return all facts about the file."""
    return {row.name: row.value for row in tx.execute(select(info))}


def damaged(path: str, why: object) -> SnapshotError:
    """Return the error for a snapshot that isn't whole."""
    return SnapshotError(
        f"the snapshot {path} is damaged or was cut short: {why}; nothing was loaded. Take another one, or save what "
        f"can be read of it: replaybuf doctor {path} --rescue FOLDER"
    )


def is_damage(error: Exception) -> bool:
    """Return whether this error, while reading a snapshot, means that the file is damaged."""
    if isinstance(error, SnapshotError):
        return False
    # StorageError: SQLite's error for invalid text; the others: values that can't be right.
    return type(error) in (StorageError, NotADatabaseError) or isinstance(error, (ValueError, TypeError, LookupError))


def _sizes(tx: Transaction) -> tuple[int, int]:
    count, nbytes = tx.execute(select(func.count(), func.coalesce(func.sum(group.c.bytes), 0))).one()
    return int(count), int(nbytes)


def _text(digest: int) -> str:
    return f"{digest & _BITS:016x}"


def set_info(tx: Transaction, facts: Mapping[str, str]) -> None:
    """Write facts about the store, replacing older ones."""
    tx.execute(delete(info).where(info.c.name.in_(list(facts))))
    if facts:
        tx.execute(insert(info), [{"name": name, "value": value} for name, value in facts.items()])
