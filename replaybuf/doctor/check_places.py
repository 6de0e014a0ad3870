"""Checks of segments, and of the places where they are: what the database says of them, and what is there.

That a payload is as it was written is checked with all others (`check_payloads`).
"""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Final

from sqlalchemy import insert, select, update

from replaybuf import units
from replaybuf.codec.stored import PATIENCE
from replaybuf.doctor import CheckContext, Finding, Severity, fine, problem, repairable, warning
from replaybuf.doctor.check_file import LITTLE_SPACE
from replaybuf.errors import ConfigError, DecodeError, MissingDriverError, PayloadStoreError
from replaybuf.segments.places import Home, Marker, described, open_place, recognise, take_over
from replaybuf.segments.store import EXTENT_BYTES, Extent, SegmentStore, StoredSegment, file_name
from replaybuf.storage.sql.engine.transaction import DEFAULT, Transaction
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction
from replaybuf.storage.sql.schema.tables import IDENTITY, payload, segment
from replaybuf.storage.sql.statements.segments import SILENT_SECONDS, end_use, home_of
from replaybuf.units import some

#: Files and objects that the database doesn't name are left alone for so long: they may be being written.
YOUNG_SECONDS: Final = 3600.0
#: The most of them that one repair deletes: nobody can write meanwhile.
_DELETED_AT_ONCE = 1000
_SAMPLE = 200
_ROWS_AT_ONCE = 10_000
_SEGMENT_FILE = re.compile(r"[0-9]+\.seg")

_LACKING: Final = (
    "put the files back, then replaybuf requeue --status failed brings back groups that were set aside for it; else "
    "--repair sets the others aside (see checksums), and replaybuf rm --status failed removes them"
)

# What the database says

# The heads of payloads that are kept apart, of which the end says where the rest is.
_ENDS = f"""
SELECT p.uid, p.segment, p.size, substr(p.data, length(p.data) - {EXTENT_BYTES - 1}) AS said
FROM rb_payload p WHERE p.segment IS NOT NULL AND p.uid > :after ORDER BY p.uid LIMIT :most"""  # noqa: S608
_UNREGISTERED = """
SELECT p.uid FROM rb_payload p
WHERE p.segment IS NOT NULL AND NOT EXISTS (SELECT 1 FROM rb_segment s WHERE s.id = p.segment) ORDER BY p.uid"""
_MISCOUNTED = """
SELECT found.id, found.live, found.there FROM (
    SELECT s.id AS id, s.live AS live,
        (SELECT coalesce(sum(p.size), 0) FROM rb_payload p WHERE p.segment = s.id) AS there
    FROM rb_segment s WHERE s.size IS NOT NULL) found
WHERE found.live <> found.there ORDER BY found.id"""
_SILENT = """
SELECT s.owner, u.worker, u.renewed_at, count(*) FROM rb_segment s LEFT JOIN rb_segment_user u ON u.id = s.owner
WHERE s.owner IS NOT NULL AND (u.id IS NULL OR u.renewed_at < :latest)
GROUP BY s.owner, u.worker, u.renewed_at ORDER BY s.owner"""


def _misplaced(tx: ReadTransaction, *, quick: bool) -> Iterator[tuple[int, Extent]]:
    """Yield the payloads of which the row says another segment or size than the payload itself, and that."""
    rows = tx.tuples(_ENDS, after=-1, most=_SAMPLE if quick else _ROWS_AT_ONCE)
    while rows:
        for uid, number, size, said in rows:
            try:
                extent = Extent.at_end_of(said)
            except (DecodeError, TypeError):
                continue  # it is damaged, which the check of checksums finds
            if (extent.segment, extent.size) != (number, size):
                yield uid, extent
        rows = [] if quick else tx.tuples(_ENDS, after=rows[-1][0], most=_ROWS_AT_ONCE)


def find_segments(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether payloads and segments agree, and whether somebody looks after each segment."""
    found = []
    if misplaced := list(_misplaced(tx, quick=context.quick)):
        uids = some([uid for uid, _ in misplaced])
        found.append(repairable(f"rows of payloads name other segments than they do: {uids}"))
    if lost := tx.values(_UNREGISTERED):
        found.append(repairable(f"{units.number_of(len(lost), 'payload')} in segments without a row: {some(lost)}"))
    if wrong := tx.tuples(_MISCOUNTED):
        counts = [f"{number}: {live:,} bytes counted, {there:,} there" for number, live, there in wrong]
        found.append(repairable(f"live bytes of segments are wrong: {some(counts, 3)}"))
    now = tx.seconds()
    for _, worker, renewed_at, count in tx.tuples(_SILENT, latest=now - SILENT_SECONDS):
        silent = f"silent for {now - renewed_at:,.0f} s" if renewed_at is not None else "gone"
        left = f"{units.number_of(count, 'segment')} of {worker or 'a process'}, which is {silent}"
        found.append(repairable(f"{left}: nobody who writes here has looked since", level=Severity.WARNING))
    if found:
        return found
    [(count, live)] = tx.tuples("SELECT count(*), coalesce(sum(size), 0) FROM rb_payload WHERE segment IS NOT NULL")
    segments = tx.value("SELECT count(*) FROM rb_segment")
    kept = f"{units.number_of(count, 'payload')} of {units.size(int(live))}"
    return [fine(f"{units.number_of(segments, 'segment')} with {kept}, as counted")]


def repair_segments(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Take from payloads where they are, register their segments anew, leave those of the dead, and count."""
    done = []
    if misplaced := list(_misplaced(tx, quick=False)):
        for uid, extent in misplaced:
            values = {"segment": extent.segment, "size": extent.size}
            tx.execute(update(payload).where(payload.c.uid == uid).values(values))
        done.append(f"corrected the segments of {units.number_of(len(misplaced), 'payload')}")
    for extent in _unregistered(tx).values():
        values = {"id": extent.segment, "place": extent.place, "file": extent.file, "size": extent.at + extent.size}
        tx.execute(insert(segment).values(values))
        done.append(f"registered the segment {extent.segment} anew")
    for owner, worker, _, count in tx.tuples(_SILENT, latest=tx.seconds() - SILENT_SECONDS):
        end_use(tx, owner)
        done.append(f"took {units.number_of(count, 'segment')} from {worker or 'a process'}, which is silent")
    wrong = tx.tuples(_MISCOUNTED)
    for number, _, there in wrong:
        tx.execute(update(segment).where(segment.c.id == number).values(live=there))
    return [*done, f"counted the live bytes of {units.number_of(len(wrong), 'segment')} anew"] if wrong else done


def _unregistered(tx: Transaction) -> dict[int, Extent]:
    """Return the last payload in each of the segments without a row."""
    last: dict[int, Extent] = {}
    lost = set(tx.values(_UNREGISTERED))
    for row in tx.execute(select(payload.c.uid, payload.c.data).where(payload.c.uid.in_(lost))) if lost else ():
        try:
            extent = Extent.at_end_of(row.data)
        except DecodeError:
            continue
        known = last.get(extent.segment)
        if known is None or known.at < extent.at:
            last[extent.segment] = extent
    return last


# What is there


_SEGMENTS = """
SELECT s.place, coalesce(s.file, s.id), (SELECT sum(p.size) FROM rb_payload p WHERE p.segment = s.id)
FROM rb_segment s"""


def _known(tx: ReadTransaction) -> dict[int, dict[str, int]]:
    """Return the files and objects of each place that the database names, with the bytes of payloads in them."""
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for place, file, live in tx.tuples(_SEGMENTS):
        found[place][file_name(file)] = int(live or 0)
    return found


def _identity(tx: ReadTransaction) -> tuple[str, Home]:
    """Return the number of this database, and where it is."""
    number = tx.value("SELECT value FROM rb_info WHERE name = :name", name=IDENTITY) or ""
    return number, home_of(tx.of(DEFAULT))


def check_places(reader: Reader, context: CheckContext) -> list[Finding]:
    """Compare the segments in each place with those that the database names; no transaction is open meanwhile.

    Places that can't be reached are kept in `context.out_of_reach`, what nobody names in `context.unnamed`.
    """

    places, known, (identity, home) = reader.read_any(lambda tx: (tx.places()[0], _known(tx), _identity(tx)))
    found: list[Finding] = []
    texts = []
    for number, url in sorted(places.items()):
        ours = known.get(number, {})
        try:
            marker, there, (free, short_of) = _read_place(url, number, identity, home)
        except PayloadStoreError as error:
            if ours:  # else nothing depends on it
                context.out_of_reach.add(number)
                found.append(warning(f"{error}; what is there was not checked", "then run replaybuf doctor again"))
            continue
        now = reader.read_any(_known).get(number, {})  # what was deleted meanwhile
        there = {name: one for name, one in there.items() if name not in ours or name in now}
        ours = {name: live for name, live in ours.items() if now.get(name)}
        own = marker.belongs_to(home)
        if not own:
            found.append(_of_a_copy(url, marker))
        found += _compare(url, number, ours, there, named=now.keys() if own else there.keys(), context=context)
        found += short_of
        young = len(_unnamed(there, now.keys(), younger=True))
        writing = f", and {units.number_of(young, 'new one')} that may be being written" if young else ""
        room = "" if free is None else f", {units.size(free)} free"
        texts.append(f"{url}: {units.number_of(len(there), 'segment')}{writing}{room}")
    return found or [fine("; ".join(texts) or "none: all payloads are in the database")]


def _of_a_copy(url: str, marker: Marker) -> Finding:
    return warning(
        f"{url} has the payloads of {described(marker.home)}, and this database is a copy of that: it reads there, and "
        "deletes nothing",
        "once nobody uses the other any more: replaybuf doctor URL --take-over",
    )


_Room = tuple[int | None, list[Finding]]


def _room_in(store: SegmentStore) -> _Room:
    """Return the bytes that a place has room for, if anybody knows, and what keeps this user from writing there."""
    try:
        store.check_may_write()
    except PayloadStoreError as error:
        return None, [warning(f"{error}; puts with arrays that belong there fail")]
    free = store.free_bytes()
    if free is None or free >= LITTLE_SPACE:
        return free, []
    what = f"{units.size(free)} free in {store.url}"
    return free, [problem(what, "free some space: puts with arrays fail when there is none")]


def _read_place(url: str, number: int, identity: str, home: Home) -> tuple[Marker, dict[str, StoredSegment], _Room]:
    """Return the marker and the segments in a place, by name, and the room there if it is this database's to write to.

    Raises PayloadStoreError unless it is that of this database, or of a copy.
    """
    try:
        store = open_place(url, PATIENCE)
    except (ConfigError, MissingDriverError) as error:
        raise PayloadStoreError(str(error)) from error
    with closing(store):
        marker = _recognise(store, identity, number)
        there = {one.name: one for one in store.segments() if _SEGMENT_FILE.fullmatch(one.name)}
        return marker, there, _room_in(store) if marker.belongs_to(home) else (None, [])


def _recognise(store: SegmentStore, identity: str, number: int) -> Marker:
    """Make sure that this is the place of this number of the database; a mount that hangs would never answer."""
    asked = Future[Marker]()

    def ask() -> None:
        try:
            asked.set_result(recognise(store, identity, number))
        except Exception as error:
            asked.set_exception(error)

    threading.Thread(target=ask, name="replaybuf-doctor", daemon=True).start()
    try:
        return asked.result(2 * PATIENCE)
    except TimeoutError:
        raise PayloadStoreError(
            f"{store.url} didn't answer within {2 * PATIENCE:g} s: see that it is mounted"
        ) from None


def _compare(
    url: str,
    number: int,
    ours: dict[str, int],
    there: dict[str, StoredSegment],
    *,
    named: Collection[str],
    context: CheckContext,
) -> Iterator[Finding]:
    lacking = [name for name, live in sorted(ours.items()) if live and name not in there]
    if lacking:
        gone = f"{url} lacks {units.number_of(len(lacking), 'segment')} with payloads of groups: {some(lacking)}"
        yield problem(gone, _LACKING)
    short = [name for name, live in sorted(ours.items()) if name in there and there[name].nbytes < live]
    if short:
        cut = f"{units.number_of(len(short), 'segment')} in {url} were cut short: {some(short)}"
        yield problem(cut, _LACKING)
    unnamed = _unnamed(there, named)
    if unnamed:
        context.unnamed[number] = unnamed
        size = units.size(sum(there[name].nbytes for name in unnamed))
        what = f"{units.number_of(len(unnamed), 'segment')} of {size} in {url} that this database doesn't name"
        yield repairable(
            f"{what}, older than an hour: {some(unnamed)}. A crash left them, or this is an older copy of the "
            "database: use the newer one if there is, because --repair deletes them",
            level=Severity.WARNING,
        )


def _unnamed(there: dict[str, StoredSegment], named: Collection[str], *, younger: bool = False) -> list[str]:
    """Return the segments that the database doesn't name: those that nobody can be writing, or the `younger` ones."""
    latest = time.time() - YOUNG_SECONDS
    return sorted(name for name, one in there.items() if name not in named and (one.written_at > latest) is younger)


def repair_places(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Delete what was found that the database doesn't name, and still doesn't: nobody registers segments meanwhile."""
    done = []
    places, known, (identity, home) = tx.places()[0], _known(tx), _identity(tx)
    if context.unnamed and tx.values(_UNREGISTERED):
        return ["left segments that the database doesn't name, because rows of others are missing"]
    for number, names in context.unnamed.items():
        left = [name for name in names if name not in known.get(number, {})]
        if number not in places or not left:
            continue
        with closing(open_place(places[number], PATIENCE)) as store:
            if not _recognise(store, identity, number).belongs_to(home):
                continue
            for name in left[:_DELETED_AT_ONCE]:
                store.delete(name)
        more = len(left) - _DELETED_AT_ONCE
        again = f"; {more:,} more are left: repair again" if more > 0 else ""
        count = units.number_of(min(len(left), _DELETED_AT_ONCE), "segment")
        done.append(f"deleted {count} in {places[number]} that nothing names{again}")
    return done


def take_over_places(reader: Reader) -> list[str]:
    """Make the places of a copy of this database that of this one, which may then write and delete there.

    Return what was done. Raises PayloadStoreError where a place can't be reached.
    """
    done = []
    places, (identity, home) = reader.read_any(lambda tx: (tx.places()[0], _identity(tx)))
    for number, url in sorted(places.items()):
        with closing(open_place(url, PATIENCE)) as store:
            marker = _recognise(store, identity, number)
            if not marker.belongs_to(home):
                take_over(store, home)
                done.append(f"{url} is this database's now, and no longer that of {described(marker.home)}")
    return done
