"""Files of payloads that are kept apart: their places, the groups that each has, and what is deleted.

1. A file is written before the one transaction that names it, in `rb_file`, with the number of its groups.
2. That number falls as rows of `rb_payload` are deleted, in the same transaction. At 0 the file is deleted, and then
   its row. It never rises from 0.
3. A file without a row is of a writer that died, or is about to commit. It gets a row with -1 groups, which stays, and
   is deleted then: the writer's late row conflicts with that one, and its payloads are written again.
4. While somebody copies payloads, no file is deleted (`rb_place.kept_until`).
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import BigInteger, bindparam, delete, exists, func, insert, or_, select, update

from replaybuf.places.store import Extent, FileLostError
from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.transaction import Prepared, Transaction
from replaybuf.storage.sql.schema.records import worker
from replaybuf.storage.sql.schema.tables import file, past, payload, place

#: Seconds after which a process that wasn't heard of, or no longer keeps files, counts as dead.
SILENT_SECONDS = 60.0
#: Seconds for which payloads of removed groups are kept for their taker's read.
READING_SECONDS = 120.0
#: The number of groups of a file that was no transaction's.
_NOBODYS = -1
_FIRST_PLACE, _LAST_PLACE = 1_000_000, 2**31


# Places


def add_place(tx: Transaction, url: str) -> int | None:
    """Return the id of a place without a marker, which is added if its URL is new.

    None for a place with files of this database: it isn't new, but has lost its marker.
    """
    known = tx.execute(select(place.c.id).where(place.c.url == url).order_by(place.c.id.desc())).scalars()
    if known:
        if tx.execute(select(exists().where(file.c.place.in_(known), file.c.groups > 0))).scalar_one():
            return None
        if not tx.execute(select(exists().where(file.c.place.in_(known)))).scalar_one():
            return int(known[0])  # added by a faster process, which hasn't marked it yet
        # The place with this id may reappear elsewhere, with its marker.
        tx.execute(delete(file).where(file.c.place.in_(known)))
        tx.execute(delete(place).where(place.c.id.in_(known)))
    # A random id: a database restored from a backup would reuse the next number, which a marker may have.
    number = _FIRST_PLACE + secrets.randbelow(_LAST_PLACE - _FIRST_PLACE)
    tx.execute(insert(place).values(id=number, url=url))
    return number


def note_url(tx: Transaction, number: int, url: str) -> None:
    """Record a place's new URL, unless other processes are alive, which may use the old one."""
    if tx.execute(select(place.c.id).where(place.c.id == number)).first() is None:
        tx.execute(insert(place).values(id=number, url=url))  # the database was restored to a time before the place
        return
    heard_of = worker.c.ended_at.is_(None) & (worker.c.seen_at > tx.dialect.clock(tx) - SILENT_SECONDS)
    others = or_(worker.c.pid != os.getpid(), worker.c.host != socket.gethostname())
    if not tx.execute(select(exists().where(heard_of, others))).scalar_one():
        tx.execute(update(place).where(place.c.id == number).values(url=url))


def keep_files(tx: Transaction) -> bool:
    """Keep all files for `SILENT_SECONDS` from now; return whether they have been kept until now."""
    now = tx.dialect.start_clock(tx)
    lapsed = select(exists().where(or_(place.c.kept_until.is_(None), place.c.kept_until < now)))
    kept = not tx.execute(lapsed).scalar_one()
    tx.execute(update(place).values(kept_until=now + SILENT_SECONDS))
    return kept


def may_list(tx: Transaction, number: int, interval: float) -> bool:
    """Return whether a place wasn't listed for so many seconds; if so, it counts as listed now."""
    now = tx.dialect.start_clock(tx)
    due = or_(place.c.listed_at.is_(None), place.c.listed_at < now - interval, place.c.listed_at > now)
    return tx.execute(update(place).where(place.c.id == number, due).values(listed_at=now)).rowcount > 0


# Counts of groups


def name_files(tx: Transaction, extents: Iterable[Extent]) -> None:
    """Record the files of new payloads. Raises FileLostError when one was found without a row, and is deleted."""
    numbers: Counter[int] = Counter()
    ends: dict[int, tuple[int, int]] = {}
    for one in extents:
        numbers[one.file] += 1
        ends[one.file] = one.place, max(one.end, ends[one.file][1] if one.file in ends else 0)
    for number, count in sorted(numbers.items()):
        if not tx.fetch(_NAME, number, *ends[number], count):
            raise FileLostError


def _name(dialect: Dialect) -> Any:
    new = dialect.insert(file).values(
        {name: bindparam(name, type_=file.c[name].type) for name in ("id", "place", "bytes", "groups")}
    )
    more = {"groups": file.c.groups + new.excluded.groups, "bytes": new.excluded.bytes}  # in the same transaction
    return new.on_conflict_do_update(index_elements=["id"], set_=more, where=file.c.groups > 0).returning(file.c.id)


_NAME = Prepared(_name, "id", "place", "bytes", "groups")


def count_gone(tx: Transaction, gone: Iterable[int | None]) -> None:
    """Count payloads whose rows were deleted, given the file of each."""
    numbers = Counter(number for number in gone if number is not None)
    if numbers:
        tx.run_many(_LESS, [(count, number) for number, count in sorted(numbers.items())])


_LESS = Prepared(
    lambda _: (
        update(file)
        .where(file.c.id == bindparam("of_id"))
        .values(groups=file.c.groups - bindparam("less", type_=BigInteger()))
    ),
    "less",
    "of_id",
)


def count_back(tx: Transaction, number: int) -> bool:
    """Count a payload whose row was deleted, and is inserted again; return False if its file may be gone."""
    there = update(file).where(file.c.id == number, file.c.groups > 0)
    return tx.execute(there.values(groups=file.c.groups + 1)).rowcount > 0


# Deletion


def empty_files(tx: Transaction, limit: int, but: Sequence[int] = ()) -> dict[int, list[int]]:
    """Return files that no group has any more, by the id of their place, which is none of `but`."""
    now = tx.dialect.clock(tx)
    kept = exists().where(place.c.kept_until.between(now, now + SILENT_SECONDS))
    empty = select(file.c.place, file.c.id).where(file.c.groups == 0, file.c.place.not_in(but), ~kept)
    found: dict[int, list[int]] = {}
    for row in tx.execute(empty.limit(limit)):
        found.setdefault(row.place, []).append(row.id)
    return found


def forget(tx: Transaction, numbers: Sequence[int]) -> None:
    """Remove the rows of deleted files."""
    tx.execute(delete(file).where(file.c.id.in_(numbers), file.c.groups == 0))


_AT_ONCE = 500


def unknown(tx: Transaction, files: Sequence[int]) -> list[int]:
    """Return those of these files that no row names, or that are nobody's."""
    known: set[int] = set()
    for start in range(0, len(files), _AT_ONCE):
        named = file.c.id.in_(files[start : start + _AT_ONCE]), file.c.groups != _NOBODYS
        known |= set(tx.execute(select(file.c.id).where(*named)).scalars())
    return [one for one in files if one not in known]


def disown(tx: Transaction, number: int, files: Sequence[int]) -> list[int]:
    """Record those of these files in a place that no row names as nobody's; return all that are, and can be deleted."""
    nobodys: list[int] = []
    for start in range(0, len(files), _AT_ONCE):
        some = files[start : start + _AT_ONCE]
        rows = [{"id": one, "place": number, "bytes": 0, "groups": _NOBODYS} for one in some]
        tx.execute(tx.dialect.insert(file).values(rows).on_conflict_do_nothing())
        nobodys += tx.execute(select(file.c.id).where(file.c.id.in_(some), file.c.groups == _NOBODYS)).scalars()
    return nobodys


# Reading


def keep_for_reading(tx: Transaction, uids: Sequence[int], seconds: float) -> None:
    """Keep the payloads of removed groups for `seconds` from now, while they are read."""
    if uids:
        tx.fetch(_KEEP, None if tx.dialect.is_remote else time.time(), seconds, tx.dialect.listed(uids))


def _keep(dialect: Dialect) -> Any:
    now, seconds = (bindparam(name, type_=past.c.removed_at.type) for name in ("now", "seconds"))
    kept = update(past).where(dialect.one_of(past.c.uid, "uids"), past.c.removed_at.is_not(None))
    return kept.values(removed_at=dialect.clock_value(now) + seconds)


_KEEP = Prepared(_keep, "now", "seconds", "uids")


def wrong_counts(tx: Transaction) -> Mapping[int, int]:
    """Return the numbers of groups of files with a wrong one."""
    found = select(payload.c.file, func.count().label("there")).where(payload.c.file.is_not(None))
    counts = found.group_by(payload.c.file).subquery()
    there = func.coalesce(counts.c.there, 0)
    joined = select(file.c.id, there).outerjoin_from(file, counts, counts.c.file == file.c.id)
    wrong = joined.where(file.c.groups != there, or_(file.c.groups != _NOBODYS, there > 0))
    return {row[0]: int(row[1]) for row in tx.execute(wrong)}
