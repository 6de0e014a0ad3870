"""Files of payloads that are kept apart: their places, the groups that each has, and what is deleted.

1. A file is written before the one transaction that names it, in `rb_file`, with the number of its groups.
2. That number falls as rows of `rb_payload` are deleted, in the same transaction. At 0 the file is deleted, and then
   its row. It never rises from 0.
3. A file without a row is of a writer that died, or is about to commit. It gets a row with -1 groups, which stays, and
   is deleted then: the writer's late row conflicts with that one, and its put is refused.
4. While somebody copies payloads, no file is deleted (`rb_place.kept_until`).

At the end: where this database is, which tells it from its copies. Places belong to one of them.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from replaybuf.errors import PayloadStoreError
from replaybuf.storage.places.owners import Home
from replaybuf.storage.places.store import Extent
from replaybuf.storage.sql.engine.transaction import Transaction

#: Seconds after which a process that wasn't heard of, or no longer keeps files, counts as dead.
SILENT_SECONDS = 60.0
#: Seconds for which payloads of removed groups are kept for their taker's read.
READING_SECONDS = 120.0
#: The number of groups of a file that was no transaction's.
_ORPHAN = -1
_FIRST_PLACE, _LAST_PLACE = 1_000_000, 2**31


# Places


def add_place(tx: Transaction, url: str) -> int | None:
    """Return the id of a place without a marker, which is added if its URL is new.

    None for a place with files of this database: it isn't new, but has lost its marker.
    """
    places = tx.values("SELECT id FROM rb_place WHERE url = :url ORDER BY id DESC", url=url)
    if places:
        if tx.values("SELECT 1 FROM rb_file WHERE place {in:places} AND groups > 0 LIMIT 1", places=places):
            return None
        if not tx.values("SELECT 1 FROM rb_file WHERE place {in:places} LIMIT 1", places=places):
            return int(places[0])  # added by a faster process, which hasn't marked it yet
        # The place with this id may reappear elsewhere, with its marker.
        tx.change("DELETE FROM rb_file WHERE place {in:places}", places=places)
        tx.change("DELETE FROM rb_place WHERE id {in:places}", places=places)
    # A random id: a database restored from a backup would reuse the next number, which a marker may have.
    number = _FIRST_PLACE + secrets.randbelow(_LAST_PLACE - _FIRST_PLACE)
    tx.change(_ADD_PLACE, id=number, url=url)
    return number


_ADD_PLACE = "INSERT INTO rb_place (id, url) VALUES (:id, :url)"


def record_url(tx: Transaction, number: int, url: str) -> None:
    """Record the URL of a place; a database that was restored to a time before the place has it again."""
    tx.change(f"{_ADD_PLACE} ON CONFLICT (id) DO UPDATE SET url = excluded.url", id=number, url=url)


def keep_files(tx: Transaction) -> bool:
    """Keep all files for `SILENT_SECONDS` from now; return whether they have been kept until now."""
    now = tx.start_clock()
    lapsed = tx.tuples("SELECT 1 FROM rb_place WHERE kept_until IS NULL OR kept_until < :now LIMIT 1", now=now)
    tx.change("UPDATE rb_place SET kept_until = :until", until=now + SILENT_SECONDS)
    return not lapsed


def may_list(tx: Transaction, number: int, interval: float) -> bool:
    """Return whether a place wasn't listed for so many seconds; if so, it counts as listed now."""
    now = tx.start_clock()
    listing = """UPDATE rb_place SET listed_at = :now
WHERE id = :id AND (listed_at IS NULL OR listed_at < :due OR listed_at > :now)"""
    return tx.change(listing, now=now, id=number, due=now - interval) > 0


# Counts of groups


def name_files(tx: Transaction, extents: Iterable[Extent]) -> None:
    """Record the files of new payloads. Raises PayloadStoreError when one was found without a row, and is deleted."""
    numbers: Counter[int] = Counter()
    ends: dict[int, tuple[int, int]] = {}
    for extent in extents:
        numbers[extent.file] += 1
        _, end = ends.get(extent.file, (0, 0))
        ends[extent.file] = extent.place, max(extent.at + extent.size, end)
    for number, count in sorted(numbers.items()):
        place, end = ends[number]
        if not tx.tuples(_ADD_FILE, id=number, place=place, bytes=end, groups=count):
            raise PayloadStoreError(
                "the arrays of this put were written more than a day before its commit, and were deleted as nobody's; "
                "nothing was stored: put it again"
            )


# The bytes of a file that is named before are of the same transaction.
_ADD_FILE = """INSERT INTO rb_file AS old (id, place, bytes, groups) VALUES (:id, :place, :bytes, :groups)
ON CONFLICT (id) DO UPDATE SET groups = old.groups + excluded.groups, bytes = excluded.bytes WHERE old.groups > 0
RETURNING id"""


def count_gone(tx: Transaction, files: Iterable[int | None]) -> None:
    """Count payloads whose rows were deleted, given the file of each."""
    numbers = Counter(number for number in files if number is not None)
    if numbers:
        query = "UPDATE rb_file SET groups = groups - :less WHERE id = :id"
        tx.each(query, [(count, number) for number, count in sorted(numbers.items())])


def count_back(tx: Transaction, number: int) -> bool:
    """Count a payload whose row was deleted, and is inserted again; return False if its file may be gone."""
    return tx.change("UPDATE rb_file SET groups = groups + 1 WHERE id = :id AND groups > 0", id=number) > 0


# Deletion


def empty_files(tx: Transaction, limit: int, but: Sequence[int] = ()) -> dict[int, list[int]]:
    """Return files that no group has any more, by the id of their place, which is none of `but`."""
    now = tx.clock()
    query = """SELECT place, id FROM rb_file WHERE groups = 0 AND NOT place {in:but}
AND NOT EXISTS (SELECT 1 FROM rb_place WHERE kept_until BETWEEN :now AND :until) LIMIT :limit"""
    by_place: dict[int, list[int]] = {}
    for number, file in tx.tuples(query, but=but, now=now, until=now + SILENT_SECONDS, limit=limit):
        by_place.setdefault(number, []).append(file)
    return by_place


def forget(tx: Transaction, numbers: Sequence[int]) -> None:
    """Remove the rows of deleted files."""
    tx.change("DELETE FROM rb_file WHERE id {in:ids} AND groups = 0", ids=numbers)


def unknown(tx: Transaction, files: Sequence[int]) -> list[int]:
    """Return those of these files that no row names, or that are nobody's."""
    sql = "SELECT id FROM rb_file WHERE id {in:ids} AND groups <> :orphans"
    recorded = set(tx.values(sql, ids=files, orphans=_ORPHAN))
    return [file for file in files if file not in recorded]


def record_orphans(tx: Transaction, number: int, files: Sequence[int]) -> list[int]:
    """Record those of these files in a place that no row names as nobody's; return all that are, and can be deleted."""
    orphans = "INSERT INTO rb_file (id, place, bytes, groups) VALUES (:id, :place, 0, :groups) ON CONFLICT DO NOTHING"
    tx.each(orphans, [(file, number, _ORPHAN) for file in files])
    return tx.values("SELECT id FROM rb_file WHERE id {in:ids} AND groups = :orphans", ids=files, orphans=_ORPHAN)


# Reading


def keep_for_reading(tx: Transaction, uids: Sequence[int], seconds: float) -> None:
    """Keep the payloads of removed groups for `seconds` from now, while they are read."""
    if uids:
        now = None if tx.dialect.is_remote else time.time()
        tx.send(_KEEP, now=now, seconds=seconds, uids=uids)


_KEEP = "UPDATE rb_past SET removed_at = {clock:now} + :seconds WHERE uid {in:uids} AND removed_at IS NOT NULL"


def wrong_counts(tx: Transaction) -> Mapping[int, int]:
    """Return the numbers of groups of files with a wrong one."""
    rows = tx.tuples(_WRONG_COUNTS, orphans=_ORPHAN)
    return {number: int(count) for number, count in rows}


_WRONG_COUNTS = """SELECT f.id, coalesce(c.there, 0) FROM rb_file f LEFT JOIN (
    SELECT file, count(*) AS there FROM rb_payload WHERE file IS NOT NULL GROUP BY file
) c ON c.file = f.id
WHERE f.groups <> coalesce(c.there, 0) AND (f.groups <> :orphans OR coalesce(c.there, 0) > 0)"""


# The location of this database


_DATABASE_FILE = "SELECT file FROM pragma_database_list WHERE name = 'main'"
# A cluster keeps its system identifier through failover and physical backups. Reading it needs a privilege.
_MAY_ASK = "SELECT has_function_privilege('pg_control_system()', 'EXECUTE')"
_CLUSTER = "SELECT system_identifier::text FROM pg_control_system()"
_DATABASE = """
SELECT current_database()::text, relnamespace::regnamespace::text, d.oid || '.' || relnamespace
FROM pg_class, pg_database d WHERE pg_class.oid = 'rb_info'::regclass AND d.datname = current_database()"""


def home_of(tx: Transaction) -> Home:
    """Return the location of this database; empty for one in memory, which has no copies."""
    if tx.dialect.name == "postgresql":
        [(may_ask,)] = tx.run(_MAY_ASK)
        cluster = tx.run(_CLUSTER)[0][0] if may_ask else "unknown"
        [(database, schema, numbers)] = tx.run(_DATABASE)
        name = f"the schema {schema} of the database {database} in the PostgreSQL cluster {cluster}"
        return {"cluster": cluster, "numbers": numbers, "name": name}
    path = tx.run(_DATABASE_FILE)[0][0]
    if not path:
        return {}
    host, path = socket.gethostname(), os.path.realpath(path)
    return {"host": host, "path": path, "inode": str(os.stat(path).st_ino), "name": f"{path} on {host}"}
