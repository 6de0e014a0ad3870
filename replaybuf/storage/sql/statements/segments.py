"""Segments of payloads that are kept apart: registered before they are written, sealed, compacted, reused, deleted.

Invariants between bytes and rows:

1. Bytes are in a registered, open segment before the transaction that refers to them (`check_open` in each put).
2. A segment without writers is sealed by its owner, or by others once the owner's lease has lapsed.
3. A sealed segment is overwritten by its owner, or deleted, when no row of `rb_payload` refers to it, and no user keeps
   segments. A process whose segments were taken over can only write to deleted files.

Places distinguish a database from its copies by its location (`Home`, `segments.places`).
"""

from __future__ import annotations

import os
import secrets
import socket
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import quote

from sqlalchemy import (
    ColumnElement,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal_column,
    not_,
    or_,
    select,
    update,
)

from replaybuf.segments.places import Home
from replaybuf.segments.store import Extent, SegmentLostError
from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.transaction import Prepared, Transaction
from replaybuf.storage.sql.schema.tables import (
    IDENTITY,
    group,
    past,
    payload,
    place,
    segment,
    segment_user,
)

#: Seconds without a heartbeat after which a user counts as dead, by the clock of the database.
SILENT_SECONDS = 60.0
#: Seconds for which payloads of removed groups are kept for their taker's read.
READING_SECONDS = 120.0
_FIRST_PLACE, _LAST_PLACE = 1_000_000, 2**31


class Segment(NamedTuple):
    """A segment: its id, the id of its file, and its size once sealed."""

    id: int
    file: int
    size: int | None = None


# Places


def add_place(tx: Transaction, url: str) -> int | None:
    """Return the id of a place without a marker, which is added if its URL is new.

    None for a place with payloads of this database: it isn't new, but has lost its marker.
    """
    known = tx.execute(select(place.c.id).where(place.c.url == url).order_by(place.c.id.desc())).scalars()
    if known:
        there = exists().where(segment.c.place.in_(known), payload.c.segment == segment.c.id)
        if tx.execute(select(there)).scalar_one():
            return None
        if not tx.execute(select(exists().where(segment.c.place.in_(known)))).scalar_one():
            return int(known[0])  # added by a faster process, which hasn't marked it yet
        # The place with this id may reappear elsewhere, with its marker.
        tx.execute(delete(segment).where(segment.c.place.in_(known)))
        tx.execute(delete(place).where(place.c.id.in_(known)))
    # A random id: a database restored from a backup would reuse the next number, which a marker may have.
    number = _FIRST_PLACE + secrets.randbelow(_LAST_PLACE - _FIRST_PLACE)
    tx.execute(insert(place).values(id=number, url=url))
    return number


def move_place(tx: Transaction, number: int, url: str, user: int | None) -> bool:
    """Record a place's new URL, unless other users of segments are alive, since they use the old one.

    Return whether it is recorded.
    """
    if tx.execute(select(place.c.id).where(place.c.id == number)).first() is None:
        tx.execute(insert(place).values(id=number, url=url))  # the database was restored to a time before the place
        return True
    others = _alive(tx) if user is None else _alive(tx).where(segment_user.c.id != user)
    if tx.execute(others.limit(1)).first() is not None:
        return False
    tx.execute(update(place).where(place.c.id == number).values(url=url))
    return True


# Users


def begin_use(tx: Transaction, *, keeps: bool) -> int:
    """Add a user of segments, which writes some, or `keeps` all existing ones; return its id."""
    values = {"worker": tx.scope.worker, "keeps": keeps, "renewed_at": tx.dialect.start_clock(tx)}
    return int(tx.execute(insert(segment_user).values(values).returning(segment_user.c.id)).scalar_one())


def renew_use(tx: Transaction, user: int) -> bool:
    """Renew a user's lease; return False if it has lapsed."""
    now = tx.dialect.start_clock(tx)
    return tx.execute(update(segment_user).where(segment_user.c.id == user).values(renewed_at=now)).rowcount > 0


def end_use(tx: Transaction, user: int) -> None:
    """Remove a user. Its segments lose their owner, and open ones are sealed."""
    tx.execute(delete(segment_user).where(segment_user.c.id == user))
    _disown(tx, segment.c.owner == user)


def end_dead_users(tx: Transaction) -> int:
    """Remove users whose lease has lapsed, and disown the segments of all removed ones; return their number."""
    late = segment_user.c.renewed_at < tx.dialect.start_clock(tx) - SILENT_SECONDS
    # First, since it locks the rows: a concurrent renewal either makes the user alive, or finds it removed.
    dead = tx.execute(delete(segment_user).where(late)).rowcount
    _disown(tx, _orphaned())
    return dead


def any_dead_users(tx: Transaction) -> bool:
    """Return whether `end_dead_users` has anything to do."""
    late = segment_user.c.renewed_at < tx.dialect.clock(tx) - SILENT_SECONDS
    found = (select(segment_user.c.id).where(late), select(segment.c.id).where(_orphaned()))
    return any(tx.execute(query.limit(1)).first() is not None for query in found)


def _orphaned() -> ColumnElement[bool]:
    return and_(segment.c.owner > 0, not_(exists().where(segment_user.c.id == segment.c.owner)))


def _disown(tx: Transaction, condition: ColumnElement[bool]) -> None:
    theirs = select(segment.c.id).where(condition).order_by(segment.c.id)
    for number in tx.execute(tx.dialect.for_update(theirs)).scalars():
        live = _live_in(tx, number)
        sealed = func.coalesce(segment.c.size, live)
        tx.execute(update(segment).where(segment.c.id == number).values(owner=None, size=sealed, live=live))


def _live_in(tx: Transaction, number: int) -> int:
    """Return the bytes of payloads in a segment."""
    in_it = select(func.coalesce(func.sum(payload.c.size), 0)).where(payload.c.segment == number)
    return int(tx.execute(in_it).scalar_one())


# Writing


def register(tx: Transaction, number: int, owner: int, count: int) -> list[Segment]:
    """Register this number of new segments in a place."""
    new = insert(segment).values(place=number, owner=owner).returning(segment.c.id)
    return [Segment(id, id) for id in (int(tx.execute(new).scalar_one()) for _ in range(count))]


def disclaim(tx: Transaction, owner: int, numbers: Sequence[int]) -> None:
    """Remove rows of segments that their owner can't open because of foreign files, which aren't deleted."""
    tx.execute(delete(segment).where(segment.c.id.in_(numbers), segment.c.owner == owner, segment.c.size.is_(None)))


def reuse(tx: Transaction, number: int, owner: int, count: int) -> list[Segment]:
    """Register up to `count` segments in the files of the owner's empty ones, which are removed."""
    # One statement: between two, a copy might begin, and a payload that it needs be removed.
    unkept = not_(_keepers(tx).exists())
    ours = _empty().where(segment.c.owner == owner, segment.c.place == number, unkept).limit(count)
    found = []
    for old in tx.execute(tx.dialect.for_update(ours, of=segment, skip_locked=True)).all():
        file = old.id if old.file is None else old.file
        tx.execute(delete(segment).where(segment.c.id == old.id))
        new = insert(segment).values(place=number, owner=owner, file=file).returning(segment.c.id)
        found.append(Segment(int(tx.execute(new).scalar_one()), file))
    return found


def check_open(tx: Transaction, numbers: Iterable[int | None]) -> None:
    """Lock these segments open until the end of the transaction. Raises SegmentLostError."""
    numbers = sorted({number for number in numbers if number is not None})
    if numbers and len(tx.fetch(_OPEN, tx.dialect.listed(numbers))) < len(numbers):
        raise SegmentLostError


def _open(dialect: Dialect) -> Select[int]:
    found = select(segment.c.id).where(dialect.one_of(segment.c.id, "ids"), segment.c.size.is_(None))
    # A key share lock: compatible with other puts and with counting, not with sealing, which is FOR UPDATE.
    return found.with_for_update(read=True, key_share=True) if dialect.locks_rows else found


_OPEN = Prepared(_open, "ids")


def seal(tx: Transaction, owner: int, sizes: Mapping[int, int], *, keep: bool) -> None:
    """Seal segments of an owner, with their sizes; unless it may `keep` them to overwrite them, they are disowned."""
    for number, size in sorted(sizes.items()):
        ours = select(segment.c.id).where(segment.c.id == number, segment.c.owner == owner)
        if tx.execute(tx.dialect.for_update(ours)).first() is None:
            continue  # taken over
        values = {"size": size, "live": _live_in(tx, number), "owner": owner if keep else None}
        tx.execute(update(segment).where(segment.c.id == number).values(values))


def give_up(tx: Transaction, owner: int, most: int) -> None:
    """Disown the owner's empty segments beyond `most`, so that they are deleted."""
    ours = _empty().where(segment.c.owner == owner).order_by(segment.c.id).offset(most)
    surplus = [row.id for row in tx.execute(ours)]
    if surplus:
        tx.execute(update(segment).where(segment.c.id.in_(surplus), segment.c.owner == owner).values(owner=None))


# Space


def count_gone(tx: Transaction, gone: Iterable[Sequence[int | None]]) -> None:
    """Subtract payloads whose rows were deleted, given the segment of each and its bytes there."""
    sizes: dict[int, int] = {}
    for number, size in gone:
        if number is not None:
            sizes[number] = sizes.get(number, 0) + (size or 0)
    if sizes:
        tx.run_many(_LESS, [(size, number) for number, size in sorted(sizes.items())])


_LESS = Prepared(
    lambda _: (
        update(segment)
        .where(segment.c.id == bindparam("of_id"))
        .values(live=segment.c.live - bindparam("less", type_=segment.c.live.type))
    ),
    "less",
    "of_id",
)


def staying(tx: Transaction, numbers: Iterable[int]) -> set[int]:
    """Return those of these segments whose bytes exist, and are kept until the end of the transaction.

    These are open ones, and those with a payload: without any, a sealed segment may be deleted.
    """
    found = set()
    for number in sorted(set(numbers)):
        named = select(payload.c.uid).where(payload.c.segment == number).limit(1)
        is_open = tx.fetch(_OPEN, tx.dialect.listed([number]))
        if is_open or tx.execute(tx.dialect.for_update(named, skip_locked=True)).first() is not None:
            found.add(number)
    return found


def _keepers(tx: Transaction) -> Select[int]:
    return _alive(tx).where(segment_user.c.keeps)


def _alive(tx: Transaction) -> Select[int]:
    return select(segment_user.c.id).where(segment_user.c.renewed_at >= tx.dialect.clock(tx) - SILENT_SECONDS)


def _empty() -> Select[Any]:
    unnamed = not_(exists().where(payload.c.segment == segment.c.id))
    return select(segment.c.id, segment.c.file).where(segment.c.size.is_not(None), segment.c.live <= 0, unnamed)


def deletable(tx: Transaction, limit: int, but: Sequence[int] = ()) -> list[tuple[int, Segment]]:
    """Return empty segments without an owner, each with the id of its place, which is none of `but`."""
    if tx.execute(_keepers(tx).limit(1)).first() is not None:  # a user needs the existing segments
        return []
    found = _empty().add_columns(segment.c.place).where(segment.c.owner.is_(None), segment.c.place.not_in(but))
    return [
        (row.place, Segment(row.id, row.id if row.file is None else row.file)) for row in tx.execute(found.limit(limit))
    ]


def forget(tx: Transaction, numbers: Sequence[int]) -> None:
    """Remove the rows of deleted segments."""
    tx.execute(delete(segment).where(segment.c.id.in_(numbers), segment.c.owner.is_(None)))


def sparse(tx: Transaction, number: int, least: float, but: Sequence[int] = ()) -> int | None:
    """Return a sealed segment of a place with less than `least` of its bytes live, if any; none of `but`."""
    dense = segment.c.live < segment.c.size * least
    others = segment.c.id.not_in(but)
    found = select(segment.c.id).where(segment.c.place == number, segment.c.live > 0, dense, others).limit(1)
    return tx.execute(found).scalar()  # type: ignore[no-any-return]


def movable(tx: Transaction, number: int, limit: int) -> list[tuple[int, bytes]]:
    """Return payloads of a segment that aren't being read, by uid, with their heads."""
    found = select(payload.c.uid, payload.c.data).where(payload.c.segment == number)
    return [(row.uid, row.data) for row in tx.execute(_unread(tx, found).order_by(payload.c.uid).limit(limit))]


def move(tx: Transaction, heads: Mapping[int, tuple[bytes, Extent]], old: int) -> int:
    """Record the new segments of moved payloads, and return their number. Must exclude other writers.

    Payloads that are being read meanwhile aren't moved.
    """
    check_open(tx, (extent.segment for _, extent in heads.values()))
    ours = select(payload.c.uid, payload.c.size).where(payload.c.segment == old, payload.c.uid.in_(list(heads)))
    moved = tx.execute(_unread(tx, ours)).all()
    for row in moved:
        head, extent = heads[row.uid]
        values = {"data": head, "segment": extent.segment, "size": extent.size}
        tx.execute(update(payload).where(payload.c.uid == row.uid).values(values))
    count_gone(tx, [(old, row.size) for row in moved])
    return len(moved)


def _unread(tx: Transaction, found: Select[object]) -> Select[object]:
    """Narrow a query to payloads of existing groups without a lease, or only in checkpoints."""
    free = exists().where(group.c.uid == payload.c.uid, group.c.lease.is_(None))
    there = exists().where(group.c.uid == payload.c.uid)
    kept = exists().where(past.c.uid == payload.c.uid)
    leaving = exists().where(
        past.c.uid == payload.c.uid, or_(past.c.until.is_(None), past.c.removed_at > literal_column(tx.dialect.now))
    )
    return found.where(free | (kept & ~there & ~leaving))


# Reading


def keep_for_reading(tx: Transaction, uids: Sequence[int], seconds: float) -> None:
    """Keep the payloads of removed groups for `seconds` from now, while they are read."""
    if uids:
        tx.fetch(_KEEP, None if tx.dialect.is_remote else time.time(), seconds, tx.dialect.listed(uids))


def _keep(dialect: Dialect) -> Any:
    now, seconds = (bindparam(name, type_=past.c.removed_at.type) for name in ("now", "seconds"))
    kept = update(past).where(dialect.one_of(past.c.uid, "uids"))
    return kept.values(removed_at=dialect.clock_value(now) + seconds)


_KEEP = Prepared(_keep, "now", "seconds", "uids")


def read_data(tx: Transaction, uids: Sequence[int]) -> dict[int, bytes]:
    """Return the stored payloads of these groups, without parts that are kept apart, by uid."""
    return {uid: bytes(data) for uid, data in tx.fetch(_DATA, tx.dialect.listed(uids))}


_DATA = Prepared(
    lambda dialect: select(payload.c.uid, payload.c.data).where(dialect.one_of(payload.c.uid, "uids")), "uids"
)


# Location of this database

_IDENTITY = f"SELECT value FROM rb_info WHERE name = '{IDENTITY}'"  # noqa: S608
_FILE = "SELECT file FROM pragma_database_list WHERE name = 'main'"
# A cluster keeps its system identifier through failover and physical backups. Reading it needs a privilege.
_MAY_ASK = "SELECT has_function_privilege('pg_control_system()', 'EXECUTE')"
_CLUSTER = "SELECT system_identifier::text FROM pg_control_system()"
_DATABASE = """
SELECT current_database()::text, relnamespace::regnamespace::text, d.oid || '.' || relnamespace
FROM pg_class, pg_database d WHERE pg_class.oid = 'rb_info'::regclass AND d.datname = current_database()"""
# A schema of another database can't be seen from here: the existence of that database is enough.
_THERE = """
SELECT count(*) FROM pg_database d WHERE d.oid::text = split_part($1, '.', 1)
AND (d.datname <> current_database() OR EXISTS (
    SELECT FROM pg_class WHERE relname = 'rb_info' AND relnamespace::text = split_part($1, '.', 2)))"""


def home_of(tx: Transaction) -> Home:
    """Return the location of this database; empty for one in memory, which has no copies."""
    if tx.dialect.name == "postgresql":
        [(may_ask,)] = tx.run(_MAY_ASK)
        cluster = tx.run(_CLUSTER)[0][0] if may_ask else "unknown"
        [(database, schema, numbers)] = tx.run(_DATABASE)
        name = f"the schema {schema} of the database {database} in the PostgreSQL cluster {cluster}"
        return {"cluster": cluster, "numbers": numbers, "name": name}
    path = tx.run(_FILE)[0][0]
    if not path:
        return {}
    host, path = socket.gethostname(), os.path.realpath(path)
    return {"host": host, "path": path, "inode": str(os.stat(path).st_ino), "name": f"{path} on {host}"}


def has_left(tx: Transaction, home: Home) -> bool:
    """Return whether no database like this one is at a former location, as far as it is visible from here."""
    ours = home_of(tx)
    if tx.dialect.name == "postgresql":
        [(there,)] = tx.run(_THERE, home.get("numbers", ""))
        return ours["cluster"] == home.get("cluster") and not int(there)
    if not ours or ours["host"] != home.get("host"):
        return False
    path = home.get("path", "")
    if not os.path.exists(path) or os.path.samefile(path, ours["path"]):
        return True
    try:
        return bool(_identity(path) != tx.run(_IDENTITY)[0][0])
    except (sqlite3.Error, OSError):
        return False


def _identity(path: str) -> str | None:
    with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True)) as connection:
        found = connection.execute(_IDENTITY).fetchone()
        return None if found is None else str(found[0])
